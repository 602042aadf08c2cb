"""Proposals for a user's file: the cheapest settings that fit, in the file's own words, and planned anew from there."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.config.text import one_line
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
from composer_fsdp2.migration.dialect import Section
from composer_fsdp2.migration.migrate import find_sections
from composer_fsdp2.migration.patched_file import Patch, PatchedFile, apply_patch
from composer_fsdp2.migration.paths import Path as KeyPath
from composer_fsdp2.preflight.batch_words import batch_keys
from composer_fsdp2.preflight.left_alone import left_alone
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
            copy.write_bytes(text.encode())  # the ends of its lines as they are
            try:
                return read_run(copy, **how)
            except ComposerFSDP2Error as error:
                raise ConfigError(str(error).replace(str(copy), str(path))) from error

        yield replan


def suggest_edits(
    run: PreflightRun,
    planned: PlannedStep,
    text: str,
    name: str,
    *,
    replan: Replan,
    memory_bytes: int,
    host_bytes: int | None = None,
    decided: Mapping[str, str] | None = None,
    dialect: str | None = None,
    at: str | None = None,
) -> SuggestedEdits:
    """The cheapest settings with which the run of a file fits, as edits of the file.

    Args:
        run: Of the file, and ``planned`` its step with activations.
        text: Of the file, and ``name`` its name.
        replan: Reads another text in the file's place.
        memory_bytes: What an estimate may take of a rank's device.
        host_bytes: What it may take of its host's memory; None: as much.
        decided: By a setting's name, who decides it; it is left as it is.
        dialect, at: Which section of the file is meant, as ``apply_patch`` takes them.
    Raises:
        ConfigError: the file has no section that says how a run is sharded, or its model cannot be traced.
    """
    try:
        _, sections = find_sections(text, name, dialect=dialect, at=at)
    except ConfigError as error:
        raise ConfigError(
            f"{name} says nothing of sharding that could be changed; plan the file that does (for a model's own "
            f"config.json with --model-config {name})"
        ) from error
    editor = _Editor(
        run=run,
        subject=subject_of(run, planned.gpus_per_node),
        text=text,
        name=name,
        replan=replan,
        memory_bytes=memory_bytes,
        decided=left_alone(run) | dict(decided or {}),
        dialect=sections[0][0].name,
        section=sections[0][1],
        at=at,
    )
    space = editor.space()
    try:
        found = suggest_settings(
            editor.subject,
            memory_bytes,
            space,
            host_bytes=host_bytes,
            present_peak=planned.estimate.peak,
            accepts=editor.can_be_had,
        )
    except ComposerFSDP2Error:
        raise
    except Exception as error:  # whatever a model's own code raises with other rows
        raise ConfigError(f"{name}: settings cannot be compared: {one_line(error)}; plan without --suggest") from error
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
_SOMETHING_ELSE = "the changed file is not planned as it was meant: something else, here or typed, stands above it"
_OTHER_BATCH = "the file does not say how many rows a batch has, so that the batch would be another one"
_IN_SCRIPT = "the rows of a microbatch stand in the training script"
_MIGRATED = "the file has no words for it before `composer-fsdp2 migrate`"
_CACHE = (
    "recomputed layers must fill no cache of keys and values, or they fail or train on wrong gradients: this package "
    "sees to it by itself, other trainers need use_cache: false in the model's configuration"
)


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
    dialect: str
    section: Section
    at: str | None = None
    num_planned: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})  # that fit, and that do not
    had: dict[Settings, Suggestion] = field(default_factory=dict)
    unsaid: dict[str, str] = field(default_factory=dict)

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
                self._treated(_WORDS["activations"], marked),
                says_every := self._treated(_EVERY, every),
                says_offload := self._treated(_OFFLOADING, offloaded),
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

    def _treated(self, what: str, values: Sequence[Activations]) -> Sequence[Activations]:
        """Those that the file can say and of which a microbatch can be traced."""
        return [each for each in self._sayable(what, "activations", values) if self._is_traceable(what, each)]

    def _is_traceable(self, what: str, activations: Activations) -> bool:
        one = (activations,) if activations.every < 2 else (Activations(), replace(activations, every=1))
        try:
            for each in one:
                self.subject.traces(each, 1)
        except Exception as error:  # whatever a model's own code raises; the run as it is was traced before
            self.unsaid[what] = f"the model's microbatch cannot be traced so: {one_line(error)}"
            return False
        return True

    def _sayable(self, what: str, lever: str, values: Sequence[Any]) -> Sequence[Any]:
        """The values, or none of them where the file has no word for the first that it does not say now."""
        present = self.subject.present
        other = next((each for each in values if each != getattr(present, lever)), None)
        if other is None:
            return values
        changed = replace(present, **{lever: other})
        found = self._patched(changed)
        why = self.decided.get(lever) or found.missing or self._read_anew(changed, found)
        if isinstance(why, str):
            self.unsaid[what] = why
            return ()
        return values

    def _read_anew(self, settings: Settings, found: PatchedFile) -> PreflightRun | str:
        """The run that the changed file asks for, or why it is not the one that was meant."""
        try:
            run = self.replan(found.after)
        except ComposerFSDP2Error as error:
            return " ".join(str(error).split())
        if run.batch_rows != self.subject.rows:
            return _OTHER_BATCH
        return run if present_settings(run.plan, run.microbatch_size) == settings else _SOMETHING_ELSE

    def _planned_anew(self, settings: Settings, found: PatchedFile) -> PlannedStep | str:
        run = self._read_anew(settings, found)
        if isinstance(run, str):
            return run
        try:
            return plan_step(run, self.name, Questions(gpus_per_node=self.subject.gpus_per_node))
        except ComposerFSDP2Error as error:
            return " ".join(str(error).split())

    def _recompute_as_the_file_would(self, marked: Sequence[Activations]) -> None:
        """A file that recomputes nothing does not say in which of torch's two ways, which keep and compute unlike."""
        present = self.subject.present
        other = next((each for each in marked if each.recompute), None)
        if other is None or present.activations.recompute:
            return
        changed = replace(present, activations=other)
        found = self._patched(changed)
        run = "" if found.missing else self._read_anew(changed, found)
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
        found, fits = self._patched(settings), peak_bytes <= self.memory_bytes
        if found.missing:
            return False
        if self.num_planned[fits] == MAX_PLANNED:
            self.unsaid["further choices"] = f"{MAX_PLANNED} were planned anew, and the search ended there"
            return False
        self.num_planned[fits] += 1
        planned = self._planned_anew(settings, found)
        if isinstance(planned, str):
            if planned not in self.unsaid.values():
                self.unsaid["; ".join(map(str, found.changes))] = planned
            return False
        if fits and planned.estimate.peak_bytes > self.memory_bytes:
            return False
        self.had[settings] = self._suggestion(settings, found, planned)
        return True

    def _suggestion(self, settings: Settings, found: PatchedFile, planned: PlannedStep) -> Suggestion:
        changed = settings.changed_from(self.subject.present)
        levers = [lever for lever in LEVERS if lever.name in changed and lever.numbers is not Numbers.SAME]
        estimate, trace = planned.estimate, planned.trace
        assert trace is not None, "activations are counted"
        # By FSDP's own key, with which transformers' Trainer leaves caches on; with its own it turns them off.
        fills_cache = self.dialect != "composer" and any(
            each.key.endswith("activation_checkpointing") and each.after is True for each in found.changes
        )
        return Suggestion(
            changes=found.changes,
            cost=cost_of(estimate, trace, planned.num_microbatches),
            peak_bytes=estimate.peak_bytes,
            fixed_bytes=estimate.peak.bytes_of(Kind.ACTIVATIONS) + estimate.peak.bytes_of(Kind.LOSS),
            numbers=Numbers.ROUNDING if levers else Numbers.SAME,
            reasons={lever.name: lever.reason for lever in levers},
            notes=(_CACHE,) if fills_cache else (),
            diff=found.diff(),
        )

    def _patched(self, settings: Settings) -> PatchedFile:
        patch = self._patch(settings)
        found = apply_patch(self.text, self.name, patch, dialect=self.dialect, at=self.at)
        if settings.microbatch_size != self.subject.present.microbatch_size and not patch.keys:
            return replace(found, missing=_IN_SCRIPT)
        return replace(found, missing=_MIGRATED if found.is_migrated else found.missing)

    def _patch(self, settings: Settings) -> Patch:
        subject, changed = self.subject, settings.changed_from(self.subject.present)
        same: tuple[str, ...] = ("reshard_after_forward", "cpu_offload")
        fields = {name: getattr(settings, name) for name in same if name in changed}
        keys: dict[KeyPath, Any] = {}
        if "replicas" in changed:
            replicas, mesh = settings.replicas, subject.plan.mesh
            shards = mesh.shard_degree * mesh.replicate_degree // replicas
            fields["mesh"] = MeshSpec.of_degrees(shards, replicas if replicas > 1 else None)
        if "activations" in changed:
            every = settings.activations.every
            fields["activation_checkpointing.checkpoint"] = settings.activations.recompute
            fields["activation_checkpointing.cpu_offload"] = settings.activations.offload
            blocks = range(len(blocks_of(subject.plan)[0]))[every - 1 :: every] if every > 1 else None
            model = self.section.around.get("model")
            if every and isinstance(model, Mapping) and model.get("name") == "mpt_causal_lm":
                keys["model", "activation_checkpointing_target"] = blocks and {"mptblock": [*blocks]}
            else:
                fields["selective_checkpointing"] = blocks and str(every)
        if "microbatch_size" in changed:
            number, global_rows = subject.num_microbatches(settings), subject.rows * subject.num_data_ranks
            batch = {"rows": settings.microbatch_size, "number": number, "global_rows": global_rows}
            keys |= batch_keys(self.dialect, self.section, **batch)
        return Patch(fields=fields, keys=keys)


def _unique(present: Any, *values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple({repr(each): each for each in (*chain.from_iterable(values), present)}.values())
