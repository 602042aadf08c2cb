"""Proposals for a user's file: the cheapest settings that fit, in the file's own words, and planned anew from there."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from composer_fsdp2.errors import ComposerFSDP2Error, ConfigError
from composer_fsdp2.estimate.planned_step import PlannedStep
from composer_fsdp2.estimate.settings import (
    LEVERS,
    Activations,
    Numbers,
    Settings,
    Space,
    blocks_of,
    present_settings,
)
from composer_fsdp2.estimate.step import Kind
from composer_fsdp2.estimate.suggest import Subject, Suggestions, cost_of, suggest_settings
from composer_fsdp2.migration.fulfil import Fulfilled, fulfil
from composer_fsdp2.migration.migrate import find_sections
from composer_fsdp2.migration.wish import Degrees, Microbatches, Recomputation, Wish
from composer_fsdp2.preflight.planned import Questions, counted_optimizer, plan_step
from composer_fsdp2.preflight.preflight_run import PreflightRun
from composer_fsdp2.preflight.read_run import read_run
from composer_fsdp2.preflight.suggestion import SuggestedEdits, Suggestion, Unsaid
from composer_fsdp2.preflight.traces import Traces

# From another text of the file to its run, as it was read before.
Replan = Callable[[str], PreflightRun]
MAX_PLANNED = 12  # choices that are planned anew, a second or two each


@contextlib.contextmanager
def replanning(path: str | Path, **how: Any) -> Iterator[Replan]:
    """Reads other texts in a file's place, from a folder of their own: the user's file stays as it is.

    Args:
        how: As ``read_run`` takes it.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, Path(path).name)

        def replan(text: str) -> PreflightRun:
            copy.write_text(text, encoding="utf-8")
            try:
                return read_run(copy, **how)
            except ComposerFSDP2Error as error:
                raise ConfigError(str(error).replace(str(copy), str(path))) from error

        yield replan


def suggest_edits(
    run: PreflightRun,
    text: str,
    name: str,
    *,
    replan: Replan,
    memory_bytes: int,
    host_bytes: int | None = None,
    gpus_per_node: int = 8,
    decided: Mapping[str, str] | None = None,
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
        decided: By a setting's name, who decides it; it is left as it is.
        dialect, at: Which section of the file is meant, as ``fulfil`` takes them.
    Raises:
        ConfigError: the file has no section that says how a run is sharded.
    """
    try:
        find_sections(text, name, dialect=dialect, at=at)
    except ConfigError as error:
        raise ConfigError(
            f"{name} says nothing of sharding that could be changed; plan the file that does (for a model's own "
            f"config.json with --model-config {name})"
        ) from error
    editor = _Editor(
        run=run,
        subject=subject_of(run, gpus_per_node),
        text=text,
        name=name,
        replan=replan,
        memory_bytes=memory_bytes,
        decided=decided or {},
        dialect=dialect,
        at=at,
    )
    space = editor.space()
    found = suggest_settings(editor.subject, memory_bytes, space, host_bytes=host_bytes, accepts=editor.can_be_had)
    return _as_edits(found, editor)


def _as_edits(found: Suggestions, editor: "_Editor") -> SuggestedEdits:
    return SuggestedEdits(
        memory_bytes=found.memory_bytes,
        fits=found.fits,
        cost=found.present.cost,
        peak_bytes=found.present.peak_bytes,
        proposals=tuple(editor.had[each.settings] for each in found.proposals),
        nearest=None if found.nearest is None else editor.had[found.nearest.settings],
        num_tried=found.num_points,
        unsaid=tuple(Unsaid(what=what, reason=reason) for what, reason in editor.unsaid.items()),
    )


def subject_of(run: PreflightRun, gpus_per_node: int = 8) -> Subject:
    """The run as a search takes it."""
    return Subject(
        plan=run.plan,
        traces=Traces(run),
        rows=run.batch_rows,
        microbatch_size=run.microbatch_size,
        world_size=run.world_size,
        gpus_per_node=gpus_per_node,
        optimizer=counted_optimizer(run.optimizer)[0],
    )


# ---------------------------------------------------------------------------------------------------------------------
# In the file's words

_WORDS = {
    "reshard_after_forward": "freeing parameters after forward",
    "replicas": "replicas of the model",
    "activations": "recomputed activations",
    "microbatch_size": "other rows of a microbatch",
    "cpu_offload": "parameters and optimizer in the host's memory",
}
_GROUPS = "parameters kept in groups of ranks after forward"
_OFFLOADING = "activations in the host's memory"
_EVERY = "every so many blocks recomputed"
_SOMETHING_ELSE = "planned anew from the changed file, it is something else; a KEY=VALUE may stand above the file"


@dataclass(kw_only=True, slots=True)
class _Editor:
    """Writes choices into a file, and keeps what came of it.

    Args:
        had: By choice, the proposal that it became.
        unsaid: What is not proposed, and why.
    """

    run: PreflightRun
    subject: Subject
    text: str
    name: str
    replan: Replan
    memory_bytes: int
    decided: Mapping[str, str]
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
        self._recompute_as_the_file_would(marked)
        return replace(
            space,
            reshards=_unique(
                present.reshard_after_forward,
                self._sayable(_WORDS["reshard_after_forward"], "reshard_after_forward", reshards),
                self._sayable(_GROUPS, "reshard_after_forward", groups),
            ),
            replicas=_unique(present.replicas, self._sayable(_WORDS["replicas"], "replicas", space.replicas)),
            activations=_unique(
                present.activations,
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
        changed = replace(present, **{lever: other})
        found = self._fulfilled(changed)
        why = self.decided.get(lever) or "".join(found.missing[:1]) or self._planned(changed, found)
        if isinstance(why, str):
            self.unsaid[what] = why
            return ()
        return values

    def _planned(self, settings: Settings, found: Fulfilled) -> PreflightRun | str:
        """The run that the changed file asks for, or why it is not the one that was meant."""
        try:
            run = self.replan(found.after)
        except ComposerFSDP2Error as error:
            return " ".join(str(error).split())
        is_meant = present_settings(run.plan, run.microbatch_size) == settings
        return run if is_meant else _SOMETHING_ELSE

    def _recompute_as_the_file_would(self, marked: Sequence[Activations]) -> None:
        """A file that recomputes nothing does not say in which of torch's two ways, which keep and compute unlike."""
        present = self.subject.present
        other = next((each for each in marked if each.recompute), None)
        if other is None or present.activations.recompute:
            return
        changed = replace(present, activations=other)
        found = self._fulfilled(changed)
        run = "" if found.missing else self._planned(changed, found)
        if isinstance(run, str):
            return
        plan, as_said = self.run.plan, run.plan.config.activation_checkpointing
        mode = replace(plan.config.activation_checkpointing, reentrant=as_said.reentrant)
        self.run = replace(self.run, plan=replace(plan, config=replace(plan.config, activation_checkpointing=mode)))
        self.subject = subject_of(self.run, self.subject.gpus_per_node)

    def can_be_had(self, settings: Settings, peak_bytes: int) -> bool:
        """Whether the file can say it, and a plan of what it says then is what was meant, and fits as well."""
        if settings in self.had:
            return True
        found = self._fulfilled(settings)
        if found.missing or self.num_planned == MAX_PLANNED:
            return False
        self.num_planned += 1
        run = self._planned(settings, found)
        if isinstance(run, str):
            if run not in self.unsaid.values():
                self.unsaid["; ".join(map(str, found.changes))] = run
            return False
        planned = plan_step(run, self.name, Questions(gpus_per_node=self.subject.gpus_per_node))
        if peak_bytes <= self.memory_bytes < planned.estimate.peak_bytes:
            return False
        self.had[settings] = self._suggestion(settings, found, planned)
        return True

    def _suggestion(self, settings: Settings, found: Fulfilled, planned: PlannedStep) -> Suggestion:
        changed = settings.changed_from(self.subject.present)
        levers = [lever for lever in LEVERS if lever.name in changed and lever.numbers is not Numbers.SAME]
        estimate, trace = planned.estimate, planned.trace
        assert trace is not None, "activations are counted"
        return Suggestion(
            changes=found.changes,
            cost=cost_of(estimate, trace, planned.num_microbatches),
            peak_bytes=estimate.peak_bytes,
            fixed_bytes=estimate.peak.bytes_of(Kind.ACTIVATIONS) + estimate.peak.bytes_of(Kind.LOSS),
            numbers=Numbers.ROUNDING if levers else Numbers.SAME,
            reasons={lever.name: lever.reason for lever in levers},
            diff=found.diff(),
        )

    def _fulfilled(self, settings: Settings) -> Fulfilled:
        return fulfil(self.text, self.name, self._wish(settings), dialect=self.dialect, at=self.at)

    def _wish(self, settings: Settings) -> Wish:
        subject, changed = self.subject, settings.changed_from(self.subject.present)
        mesh, rows = subject.plan.mesh, settings.microbatch_size
        shards = mesh.shard_degree * mesh.replicate_degree // settings.replicas
        microbatches = Microbatches(
            rows=rows,
            number=subject.num_microbatches(settings),
            global_rows=subject.rows * subject.num_data_ranks,
        )
        return Wish(
            reshard_after_forward=settings.reshard_after_forward if "reshard_after_forward" in changed else None,
            degrees=Degrees(shards=shards, replicas=settings.replicas) if "replicas" in changed else None,
            activations=_recomputation(subject, settings.activations) if "activations" in changed else None,
            microbatches=microbatches if "microbatch_size" in changed else None,
            cpu_offload=settings.cpu_offload if "cpu_offload" in changed else None,
        )


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
