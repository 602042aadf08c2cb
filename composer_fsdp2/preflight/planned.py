"""One step of a user's run, planned: its trace, its replay, its bounds, as one value."""

from dataclasses import dataclass

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.config.text import printable
from composer_fsdp2.config.value import Value
from composer_fsdp2.errors import ComposerFSDP2Error, ConfigError
from composer_fsdp2.estimate.bounds import Machine, step_bounds
from composer_fsdp2.estimate.events import MicrobatchTrace
from composer_fsdp2.estimate.optimizers import OptimizerState, optimizer_state
from composer_fsdp2.estimate.planned_step import Memory, PlannedStep
from composer_fsdp2.estimate.replay import estimate_step
from composer_fsdp2.estimate.trace import trace_microbatch
from composer_fsdp2.preflight.preflight_run import OptimizerChoice, PreflightRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions(Value):
    """What is asked of a run.

    Args:
        gpus_per_node: Which ranks lie on one node.
        memory: None where nobody asks whether it fits.
        machine: Of whose speeds; None where nobody asks for time.
        counts_activations: Whether a microbatch is traced.
    """

    gpus_per_node: int = 8
    memory: Memory | None = None
    machine: Machine | None = None
    counts_activations: bool = True


def plan_step(run: PreflightRun, source: str, questions: Questions) -> PlannedStep:
    """Everything that can be said of one step before it is run.

    Args:
        source: What was asked about, as the user named it.
    Raises:
        ConfigError: the model's forward or backward cannot be traced; names the way out.
    """
    optimizer, findings = counted_optimizer(run.optimizer)
    trace = _trace(run, source) if questions.counts_activations else None
    estimate = estimate_step(
        run.plan,
        trace,
        world_size=run.world_size,
        optimizer=optimizer,
        num_microbatches=run.num_microbatches,
        gpus_per_node=questions.gpus_per_node,
    )
    machine = questions.machine
    peak = "amp_fp8" if run.has_fp8_layers else run.precision
    return PlannedStep(
        source=source,
        plan=run.plan.resolve(run.world_size),
        estimate=estimate,
        trace=trace,
        optimizer=optimizer.name,
        precision=run.precision,
        world_size=run.world_size,
        gpus_per_node=questions.gpus_per_node,
        microbatch_size=run.microbatch_size,
        num_microbatches=run.num_microbatches,
        sequence_length=run.sequence_length,
        findings=(*run.translation.findings, *run.findings, *findings),
        memory=questions.memory,
        bounds=step_bounds(estimate, trace, machine.computing_in(peak)) if machine else None,
    )


def _trace(run: PreflightRun, source: str) -> MicrobatchTrace:
    try:
        return trace_microbatch(
            run.model,
            run.plan,
            run.loss,
            rows=run.computed_rows,
            tokens=run.sequence_length,
            precision=run.precision,
        )
    except ComposerFSDP2Error:
        raise
    except (Exception, SystemExit) as error:  # whatever a model's own code does
        said = printable(str(error).strip().splitlines()[0]) if str(error).strip() else ""
        raise ConfigError(
            f"{source}: one microbatch of {run.microbatch_size} × {run.sequence_length} tokens cannot be traced "
            f"without data: {type(error).__name__}: {said}; --no-activations plans everything else"
        ) from error


def counted_optimizer(choice: OptimizerChoice | None) -> tuple[OptimizerState, tuple[Finding, ...]]:
    """The optimizer's state; AdamW's where the file names none, or one that nobody knows, which is said."""
    if choice is None:
        reason = "the file names no optimizer, so AdamW's state is counted"
        return optimizer_state("AdamW"), (_assumed("optimizer", "none", reason),)
    try:
        return optimizer_state(choice.name, choice.options), ()
    except ConfigError as error:
        reason = f"{error}; AdamW's state is counted"
        return optimizer_state("AdamW"), (_assumed("optimizer.name", choice.name, reason),)


def _assumed(key: str, value: str, reason: str) -> Finding:
    return Finding(
        key=key, value=value, outcome=Outcome.APPROXIMATE, target="AdamW", reason=reason, origin=Origin.IMPLICIT
    )
