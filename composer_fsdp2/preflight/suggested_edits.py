"""Propose edits of a user's file: the fastest settings that fit.

Each proposal is planned by reading the edited file.
"""

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.config.sharding import GradientSync
from composer_fsdp2.config.text import and_more, human_bytes, one_line
from composer_fsdp2.errors import ComposerFSDP2Error, ConfigError
from composer_fsdp2.estimate.bounds import Machine
from composer_fsdp2.estimate.events import MicrobatchTrace
from composer_fsdp2.estimate.planned_step import PlannedStep
from composer_fsdp2.estimate.seconds import step_seconds
from composer_fsdp2.estimate.settings import ROUNDS, Settings, blocks_of, present_settings
from composer_fsdp2.estimate.step import Kind
from composer_fsdp2.estimate.suggest import Candidate, ladder_of, suggest_settings
from composer_fsdp2.migration.dialect import Section
from composer_fsdp2.migration.migrate import find_sections
from composer_fsdp2.migration.patched_file import Patch, PatchedFile, apply_patch
from composer_fsdp2.migration.paths import Path as KeyPath
from composer_fsdp2.preflight.batch_keys import batch_keys
from composer_fsdp2.preflight.fixed_settings import fixed_settings
from composer_fsdp2.preflight.preflight_run import PreflightRun
from composer_fsdp2.preflight.read_run import read_run
from composer_fsdp2.preflight.suggestion import NotProposed, SuggestedEdits, Suggestion

# Maps an edited text of the file to its run.
Replan = Callable[[str], PreflightRun]


@contextlib.contextmanager
def replanning(path: str | Path, **options: Any) -> Iterator[Replan]:
    """Yield a function that reads an edited text as a run, from a temporary folder. The user's file is not modified.

    Args:
        options: Keyword arguments of ``read_run``.
    """
    with tempfile.TemporaryDirectory() as folder:
        edited = Path(folder, Path(path).name)

        def replan(text: str) -> PreflightRun:
            edited.write_bytes(text.encode())  # preserves line endings
            try:
                return read_run(edited, **options)
            except ComposerFSDP2Error as error:
                raise ConfigError(str(error).replace(str(edited), str(path))) from error

        yield replan


def suggest_edits(
    run: PreflightRun,
    planned: PlannedStep,
    text: str,
    name: str,
    *,
    replan: Replan,
    memory_bytes: int,
    machine: Machine,
    decided: Mapping[str, str] | None = None,
) -> SuggestedEdits:
    """Search for the fastest settings with which a run fits in memory, and return them as edits of its file.

    Args:
        run: The run that the file configures.
        planned: The predicted step of ``run``, including activations.
        text: The file's content.
        name: The file's name.
        replan: A function that reads an edited text as a run; see ``replanning``.
        memory_bytes: The limit for the estimated peak memory of a rank's device.
        machine: The speeds for the step's time; all must be set.
        decided: Settings that must not change -> the reason; see ``fixed_settings``.
    Raises:
        ConfigError: no section of the file configures sharding.
    """
    try:
        _, sections = find_sections(text, name)
    except ConfigError as error:
        raise ConfigError(
            f"{name} does not configure sharding; plan the file that does (for a model's own "
            f"config.json with --model-config {name})"
        ) from error
    editor = _Editor(
        run=run,
        machine=machine,
        text=text,
        name=name,
        replan=replan,
        decided=fixed_settings(run) | dict(decided or {}),
        dialect=sections[0][0].name,
        section=sections[0][1],
    )
    present = replace(editor.candidate(editor.present, run), peak=planned.estimate.peak)
    ladder = ladder_of(run.plan, editor.present, rows=run.batch_rows, gpus_per_node=run.gpus_per_node)
    found = suggest_settings(present, ladder, memory_bytes, editor.rate)
    nearest = found.nearest
    return SuggestedEdits(
        memory_bytes=memory_bytes,
        seconds=present.seconds,
        peak_bytes=present.peak_bytes,
        speeds=machine.sources,
        proposals=tuple(map(editor.suggestion, found.proposals)),
        nearest=None if nearest is None or nearest is present else editor.suggestion(nearest),
        helps=() if nearest is None else tuple(_further_changes(nearest, run, memory_bytes)),
        num_tried=found.num_tried,
        unsaid=tuple(
            NotProposed(what=and_more(each, 3, "; "), reason=reason) for reason, each in editor.unsaid.items()
        ),
    )


def _further_changes(nearest: Candidate, run: PreflightRun, memory_bytes: int) -> Iterator[str]:
    """Changes other than settings that reduce a step's memory."""

    def bytes_of(*kinds: Kind) -> int:
        return sum(map(nearest.peak.bytes_of, kinds))

    state = bytes_of(Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER)
    available = memory_bytes - (nearest.peak_bytes - state)
    if state and available > 0:
        ranks = math.ceil(state * (run.world_size // nearest.settings.replicas) / available)
        yield f"about {ranks:,} ranks: {human_bytes(state)} of it are sharded parameters, gradients and optimizer state"
    if run.plan.config.accumulation.gradient_sync is GradientSync.LAST and run.num_microbatches > 1:
        yield (
            "gradients reduced in each microbatch (gradient_sync, accelerate's sync_each_batch; it rounds otherwise): "
            f"{human_bytes(bytes_of(Kind.UNSHARDED_GRADIENTS))} are unsharded gradients that a batch adds up first"
        )
    unsharded = bytes_of(Kind.GATHERED, Kind.UNSHARDED_GRADIENTS, Kind.COMMUNICATION)
    yield (
        f"tensor parallelism: {human_bytes(unsharded)} are unsharded parameters and gradients and their buffers, which "
        "more ranks do not make smaller"
    )
    activations = bytes_of(Kind.ACTIVATIONS, Kind.LOSS)
    yield (
        f"context parallelism, shorter rows or a loss in pieces: {human_bytes(activations)} are "
        "activations, the output layer and the loss"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Edits of the file

_SOMETHING_ELSE = (
    "the changed file is not planned as it was meant: another key or an override decides it, or this value is planned "
    "as another one, which a finding names"
)
_OTHER_BATCH = "the file does not set the number of rows of a batch, so the batch size would change"
_IN_SCRIPT = "the rows of a microbatch stand in the training script"
_MIGRATED = "the file has no keys for it before `composer-fsdp2 migrate`"
_CACHE = (
    "recomputed layers must fill no cache of keys and values, or they fail or train on wrong gradients: this package "
    "turns caches off, other trainers need use_cache: false in the model's configuration"
)


def _first_problem(error: ComposerFSDP2Error) -> str:
    """Return an error's first line, and the number of others: an error has one line for each rejected unit."""
    first, *others = str(error).splitlines() or [""]
    return " ".join(f"{first} (and {len(others)} more)".split()) if others else " ".join(first.split())


@dataclass(kw_only=True, slots=True)
class _Editor:
    """Writes candidate settings into the file, and plans the edited file.

    Args:
        files: Planned settings -> the edited file.
        unsaid: Reason -> settings that the file cannot express or that cannot be planned.
    """

    run: PreflightRun
    machine: Machine
    text: str
    name: str
    replan: Replan
    decided: Mapping[str, str]
    dialect: str
    section: Section
    files: dict[Settings, PatchedFile] = field(default_factory=dict)
    traces: dict[tuple[Any, ...], MicrobatchTrace] = field(default_factory=dict)
    unsaid: dict[str, list[str]] = field(default_factory=dict)

    @property
    def present(self) -> Settings:
        return present_settings(self.run.plan, self.run.microbatch_size)

    def rate(self, settings: Settings) -> Candidate | None:
        """Plan the file with ``settings``. Returns None if that is impossible, and adds the reason to ``unsaid``."""
        try:
            file = self._patched(settings)
            run = self._replan(settings, file)
            try:
                found = self.candidate(settings, run)
            except Exception as error:  # a model's code may raise any error for other row counts
                raise ConfigError(f"its microbatch cannot be traced: {one_line(error)}") from error
        except ComposerFSDP2Error as error:
            changed = settings.changed_from(self.present)
            refused = self.unsaid.setdefault(_first_problem(error), [])
            refused.append(", ".join(f"{name} = {getattr(settings, name)}" for name in changed))
            return None
        self.files[settings] = file
        return found

    def _replan(self, settings: Settings, file: PatchedFile) -> PreflightRun:
        run = self.replan(file.after)
        if run.batch_rows != self.run.batch_rows:
            raise ConfigError(_OTHER_BATCH)
        if present_settings(run.plan, run.microbatch_size) != settings:
            raise ConfigError(_SOMETHING_ELSE)
        return run

    def candidate(self, settings: Settings, run: PreflightRun) -> Candidate:
        """Estimate the step time and peak memory of an edited file.

        [Note: microbatches alike] All microbatches between the first and the last use the same memory and send the same
        bytes, so an estimate with three microbatches represents any number.
        """
        key = (run.plan.checkpointed, run.plan.config.activation_checkpointing, run.computed_rows)
        if key not in self.traces:
            self.traces[key] = run.trace()
        trace = self.traces[key]
        estimate = run.estimate(trace, num_microbatches=min(run.num_microbatches, 3))
        return Candidate(
            settings=settings,
            seconds=step_seconds(run.plan, estimate, trace, self.machine, run.num_microbatches),
            peak=estimate.peak,
            host_bytes=estimate.host_bytes,
        )

    def suggestion(self, candidate: Candidate) -> Suggestion:
        settings, file = candidate.settings, self.files[candidate.settings]
        # FSDP's own key leaves caches on in transformers' Trainer; the Trainer's key turns them off.
        fills_cache = self.dialect != "composer" and any(
            each.key.endswith("activation_checkpointing") and each.after is True for each in file.changes
        )
        return Suggestion(
            changes=file.changes,
            seconds=candidate.seconds,
            peak_bytes=candidate.peak_bytes,
            host_bytes=candidate.host_bytes,
            reasons={name: ROUNDS[name] for name in settings.changed_from(self.present) if name in ROUNDS},
            notes=(_CACHE,) if fills_cache else (),
            diff=file.diff(),
        )

    def _patched(self, settings: Settings) -> PatchedFile:
        changed = settings.changed_from(self.present)
        if why := next((self.decided[name] for name in changed if name in self.decided), None):
            raise ConfigError(why)
        patch = self._patch(settings, changed)
        if "microbatch_size" in changed and not patch.keys:
            raise ConfigError(_IN_SCRIPT)
        file = apply_patch(self.text, self.name, patch, dialect=self.dialect)
        if file.is_migrated or file.missing:
            raise ConfigError(_MIGRATED if file.is_migrated else file.missing)
        return file

    def _patch(self, settings: Settings, changed: tuple[str, ...]) -> Patch:
        plan, rows = self.run.plan, settings.microbatch_size
        fields: dict[str, Any] = {
            name: getattr(settings, name) for name in ("reshard_after_forward", "cpu_offload") if name in changed
        }
        keys: dict[KeyPath, Any] = {}
        if "replicas" in changed:
            shards = plan.mesh.shard_degree * plan.mesh.replicate_degree // settings.replicas
            fields["mesh"] = MeshSpec.of_degrees(shards, settings.replicas if settings.replicas > 1 else None)
        if "activations" in changed:
            every = settings.activations.every
            fields["activation_checkpointing.checkpoint"] = settings.activations.recompute
            fields["activation_checkpointing.cpu_offload"] = settings.activations.offload
            blocks = range(len(blocks_of(plan)[0]))[every - 1 :: every] if every > 1 else None
            model = self.section.around.get("model")
            if every and isinstance(model, Mapping) and model.get("name") == "mpt_causal_lm":
                keys["model", "activation_checkpointing_target"] = blocks and {"mptblock": [*blocks]}
            else:
                fields["selective_checkpointing"] = blocks and str(every)
        if "microbatch_size" in changed:
            keys |= batch_keys(
                self.dialect,
                self.section,
                rows=rows,
                number=-(-self.run.batch_rows // rows),
                global_rows=self.run.batch_rows * (self.run.world_size // plan.config.data_block_size),
            )
        return Patch(fields=fields, keys=keys)
