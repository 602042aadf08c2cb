"""Proposals for a user's file: the cheapest settings that fit, in the file's own words, and planned anew from there."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from composer_fsdp2.config.text import human_bytes
from composer_fsdp2.config.value import Value
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.estimate.optimizers import optimizer_state
from composer_fsdp2.estimate.settings import LEVERS, Activations, Numbers, Settings, Space, blocks_of
from composer_fsdp2.estimate.step import Kind, MemorySample
from composer_fsdp2.estimate.suggest import Cost, Subject, Suggestions, suggest_settings
from composer_fsdp2.migration.fulfil import Fulfilled, KeyChange, fulfil
from composer_fsdp2.migration.wish import Degrees, Microbatches, Recomputation, Wish
from composer_fsdp2.preflight.preflight_run import PreflightRun
from composer_fsdp2.preflight.traces import Traces

# From another text of the file to its run, as it was read before.
Replan = Callable[[str], PreflightRun]
MAX_PLANNED = 12  # choices that are planned anew, a second or two each


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion(Value):
    """One proposal.

    Args:
        changes: Of the file's keys.
        cost: Of a step, the dearest first.
        peak: What a rank's device holds when it holds the most, as planned from the new text.
        numbers: What becomes of the run's numbers.
        reasons: Why, where they are not the same to the last bit.
        diff: Of the file.
    """

    changes: tuple[KeyChange, ...]
    cost: Cost
    peak: MemorySample = field(metadata={"json": lambda peak: peak.total_bytes})
    numbers: Numbers
    reasons: tuple[str, ...]
    diff: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsaid(Value):
    """What is not proposed because the file cannot say it."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SuggestedEdits(Value):
    """What ``--suggest`` says of a run.

    Args:
        memory_bytes: What an estimate may take of a device.
        fits: Whether the run as it is does.
        cost, peak_bytes: Of the run as it is.
        proposals: At most three, the cheapest first.
        nearest: Where nothing fits, what takes the least.
        fixed_bytes: Of the least, activations and loss, which more ranks do not make smaller.
        num_tried: Of choices.
        unsaid: What the file has no words for.
    """

    memory_bytes: int
    fits: bool
    cost: Cost
    peak_bytes: int
    proposals: tuple[Suggestion, ...]
    nearest: Suggestion | None
    fixed_bytes: int | None
    num_tried: int
    unsaid: tuple[Unsaid, ...]

    def explain(self) -> str:
        """As text."""
        return "\n".join(_explained(self))


def suggest(
    run: PreflightRun,
    text: str,
    name: str,
    *,
    replan: Replan,
    memory_bytes: int,
    host_bytes: int | None = None,
    gpus_per_node: int = 8,
    dialect: str | None = None,
    at: str | None = None,
) -> SuggestedEdits:
    """The cheapest settings with which the run of a file fits, as edits of the file.

    Args:
        run: Of the file.
        text: Of the file, and ``name`` its name.
        replan: Reads another text in the file's place.
        memory_bytes: What an estimate may take of a rank's device.
        host_bytes: What it may take of its host's memory; None: as much.
        dialect, at: Which section of the file is meant, as ``fulfil`` takes them.
    """
    editor = _Editor(
        subject=subject_of(run, gpus_per_node),
        text=text,
        name=name,
        replan=replan,
        memory_bytes=memory_bytes,
        dialect=dialect,
        at=at,
    )
    found = suggest_settings(
        editor.subject, memory_bytes, editor.space(), host_bytes=host_bytes, accepts=editor.can_be_had
    )
    return _as_edits(found, editor)


def _as_edits(found: Suggestions, editor: "_Editor") -> SuggestedEdits:
    nearest = None if found.nearest is None else editor.had[found.nearest.settings]
    return SuggestedEdits(
        memory_bytes=found.memory_bytes,
        fits=found.fits,
        cost=found.present.cost,
        peak_bytes=found.present.peak_bytes,
        proposals=tuple(editor.had[each.settings] for each in found.proposals),
        nearest=nearest,
        fixed_bytes=None if nearest is None else _fixed_bytes(nearest.peak),
        num_tried=found.num_points,
        unsaid=tuple(Unsaid(what=what, reason=reason) for what, reason in editor.unsaid.items()),
    )


def _fixed_bytes(peak: MemorySample) -> int:
    return peak.bytes_of(Kind.ACTIVATIONS) + peak.bytes_of(Kind.LOSS)


def subject_of(run: PreflightRun, gpus_per_node: int = 8) -> Subject:
    """The run as a search takes it."""
    microbatch_size = max(round(run.microbatch_size), 1)
    return Subject(
        plan=run.plan,
        traces=Traces(run),
        rows=microbatch_size * run.num_microbatches,
        microbatch_size=microbatch_size,
        world_size=run.world_size,
        gpus_per_node=gpus_per_node,
        optimizer=None if run.optimizer is None else optimizer_state(run.optimizer.name, run.optimizer.options),
    )


# ---------------------------------------------------------------------------------------------------------------------
# In the file's words

_OFFLOADING = "activations in the host's memory"
_EVERY = "every so many blocks recomputed"
_WORDS = {
    "reshard_after_forward": "freeing parameters after forward",
    "replicas": "replicas of the model",
    "activations": "recomputed activations",
    "microbatch_size": "the rows of a microbatch",
    "cpu_offload": "parameters and optimizer in the host's memory",
}


@dataclass(kw_only=True, slots=True)
class _Editor:
    """Writes choices into a file, and keeps what came of it.

    Args:
        had: By choice, the proposal that it became.
        unsaid: What the file has no words for, and why.
    """

    subject: Subject
    text: str
    name: str
    replan: Replan
    memory_bytes: int
    dialect: str | None = None
    at: str | None = None
    had: dict[Settings, Suggestion] = field(default_factory=dict)
    unsaid: dict[str, str] = field(default_factory=dict)
    num_planned: int = 0

    def space(self) -> Space:
        """All choices whose words the file has, as far as one of each kind tells."""
        space, present = self.subject.space(), self.subject.present
        reshards = [each for each in space.reshards if isinstance(each, bool)]
        groups = [each for each in space.reshards if not isinstance(each, bool)]
        marked = [each for each in space.activations if 0 <= each.every < 2 and not each.offload]
        every = [each for each in space.activations if each.every > 1 and not each.offload]
        offloaded = [each for each in space.activations if each.offload and each.every == 1]
        offloaded_every = [each for each in space.activations if each.offload and each.every > 1]
        own = [present.activations]
        return replace(
            space,
            reshards=_unique(
                present.reshard_after_forward,
                self._sayable(_WORDS["reshard_after_forward"], "reshard_after_forward", reshards),
                self._sayable(_GROUPS, "reshard_after_forward", groups),
            ),
            replicas=_unique(present.replicas, self._sayable(_WORDS["replicas"], "replicas", space.replicas)),
            activations=_unique(
                own[0],
                self._sayable(_WORDS["activations"], "activations", marked),
                says_every := self._sayable(_EVERY, "activations", every),
                says_offload := self._sayable(_OFFLOADING, "activations", offloaded),
                offloaded_every if says_every and says_offload else (),
            ),
            microbatch_sizes=_unique(
                present.microbatch_size,
                self._sayable(_WORDS["microbatch_size"], "microbatch_size", space.microbatch_sizes),
            ),
            cpu_offloads=_unique(
                present.cpu_offload, self._sayable(_WORDS["cpu_offload"], "cpu_offload", space.cpu_offloads)
            ),
        )

    def _sayable(self, what: str, lever: str, values: Sequence[Any]) -> Sequence[Any]:
        """The values, or none of them where the file has no word for the first that it does not say now."""
        present = self.subject.present
        other = next((each for each in values if each != getattr(present, lever)), None)
        if other is None:
            return values
        found = self._fulfilled(replace(present, **{lever: other}))
        if found.missing:
            self.unsaid[what] = found.missing[0]
        return () if found.missing else values

    def can_be_had(self, settings: Settings, peak_bytes: int) -> bool:
        """Whether the file can say it, and a plan of what it says then fits as well."""
        if settings in self.had:
            return True
        found = self._fulfilled(settings)
        if found.missing or self.num_planned == MAX_PLANNED:
            return False
        self.num_planned += 1
        try:
            again = subject_of(self.replan(found.after), self.subject.gpus_per_node)
            peak = again.estimate(again.present).peak
        except ConfigError as error:
            self.unsaid[", ".join(map(str, found.changes))] = str(error)
            return False
        if again.present != settings or peak_bytes <= self.memory_bytes < peak.total_bytes:
            return False
        self.had[settings] = self._suggestion(settings, found, peak, again.cost(settings))
        return True

    def _suggestion(self, settings: Settings, found: Fulfilled, peak: MemorySample, cost: Cost) -> Suggestion:
        changed = settings.changed_from(self.subject.present)
        levers = [lever for lever in LEVERS if lever.name in changed and lever.numbers is not Numbers.SAME]
        return Suggestion(
            changes=found.changes,
            cost=cost,
            peak=peak,
            numbers=Numbers.ROUNDING if levers else Numbers.SAME,
            reasons=tuple(lever.reason for lever in levers),
            diff=found.diff(),
        )

    def _fulfilled(self, settings: Settings) -> Fulfilled:
        return fulfil(self.text, self.name, self._wish(settings), dialect=self.dialect, at=self.at)

    def _wish(self, settings: Settings) -> Wish:
        subject, changed = self.subject, settings.changed_from(self.subject.present)
        mesh, rows = subject.plan.mesh, settings.microbatch_size
        shards = mesh.shard_degree * mesh.replicate_degree // settings.replicas
        return Wish(
            reshard_after_forward=settings.reshard_after_forward if "reshard_after_forward" in changed else None,
            degrees=Degrees(shards=shards, replicas=settings.replicas) if "replicas" in changed else None,
            activations=_recomputation(subject, settings.activations) if "activations" in changed else None,
            microbatches=Microbatches(
                rows=rows, number=subject.rows // rows, global_rows=subject.rows * subject.num_data_ranks
            )
            if "microbatch_size" in changed
            else None,
            cpu_offload=settings.cpu_offload if "cpu_offload" in changed else None,
        )


_GROUPS = "parameters kept in groups of ranks after forward"


def _unique(present: Any, *values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple({repr(each): each for each in (*chain.from_iterable(values), present)}.values())


def _recomputation(subject: Subject, activations: Activations) -> Recomputation:
    row = blocks_of(subject.plan)[0]
    numbers = range(len(row))
    every = activations.every
    return Recomputation(
        every=every,
        recompute=activations.recompute,
        offload=activations.offload,
        blocks=tuple(numbers[every - 1 :: every]) if every > 0 else (),
        num_blocks=len(row),
    )


# ---------------------------------------------------------------------------------------------------------------------
# As text


def _explained(found: SuggestedEdits) -> Iterator[str]:
    yield f"suggestions for {human_bytes(found.memory_bytes)} a rank, the best of {found.num_tried:,} choices:"
    over = found.peak_bytes - found.memory_bytes
    whether = f"{human_bytes(over)} too much" if over > 0 else "which fits"
    yield f"  as it is: {human_bytes(found.peak_bytes)} at its peak, {whether}; {_cost_text(found.cost)}"
    if found.fits and not found.proposals:
        yield "  Nothing that this file can say is cheaper."
    for number, each in enumerate(found.proposals, 1):
        yield from _proposal_lines(f"{number}.", each)
    if not found.fits and not found.proposals:
        yield from _nearest_lines(found)
    if found.unsaid:
        yield "  not proposed, because the file cannot say it:"
        yield from (f"    {each.what}: {each.reason}" for each in found.unsaid)


def _nearest_lines(found: SuggestedEdits) -> Iterator[str]:
    if found.nearest is None or found.fixed_bytes is None:
        yield "  Nothing fits, and nothing that this file can say takes less."
        return
    over = found.nearest.peak.total_bytes - found.memory_bytes
    yield f"  Nothing fits. The nearest misses by {human_bytes(over)}:"
    yield from _proposal_lines("-", found.nearest)
    yield (
        f"     {human_bytes(found.fixed_bytes)} of it are activations, the output layer and the loss, which more ranks "
        "do not make smaller: fewer tokens in a row do, or a loss that is computed in pieces"
    )


def _proposal_lines(mark: str, each: Suggestion) -> Iterator[str]:
    yield f"  {mark} {'; '.join(map(str, each.changes)) or 'as it is'}"
    yield f"     {human_bytes(each.peak.total_bytes)} at its peak; {_cost_text(each.cost)}"
    why = f": {'; '.join(each.reasons)}" if each.reasons else ""
    yield f"     the numbers are {each.numbers.value}{why}"
    yield from (f"       {line}" for line in each.diff.splitlines())


def _cost_text(cost: Cost) -> str:
    parts = (
        (cost.inter_node_bytes, f"{human_bytes(cost.inter_node_bytes)} to other nodes"),
        (cost.recomputed_flops, f"{cost.recomputed_flops:.2e} operations a second time"),
        (cost.calls, f"{cost.calls:,} collectives"),
        (cost.offloaded_bytes, f"{human_bytes(cost.offloaded_bytes)} in the host's memory"),
    )
    return ", ".join(text for amount, text in parts if amount) + " a step" if any(a for a, _ in parts) else "no cost"
