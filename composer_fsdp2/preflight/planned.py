"""Plan one step of a user's run: trace a microbatch, replay the step, and bound its time."""

from dataclasses import dataclass

from composer_fsdp2.config.value import Value
from composer_fsdp2.estimate.bounds import Machine, step_bounds
from composer_fsdp2.estimate.planned_step import Memory, PlannedStep
from composer_fsdp2.estimate.replay import assumed_trace
from composer_fsdp2.preflight.preflight_run import PreflightRun, counted_optimizer
from composer_fsdp2.preflight.run_file import as_config_error


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions(Value):
    """What to predict of a step.

    Args:
        memory: The device memory with which the peak is compared; None: no comparison.
        machine: The speeds for lower bounds of the step's time; None: no bounds.
        counts_activations: Whether a microbatch is traced to predict activations.
    """

    memory: Memory | None = None
    machine: Machine | None = None
    counts_activations: bool = True


def plan_step(run: PreflightRun, source: str, options: StepOptions) -> PlannedStep:
    """Predict memory, collectives and time bounds of one step of ``run``.

    Args:
        source: The file name as the user wrote it, for the output and errors.
    Raises:
        ConfigError: forward or backward cannot be traced; the message suggests ``--no-activations``.
    """
    optimizer, findings = counted_optimizer(run.optimizer)
    trace = None
    if options.counts_activations:
        size = f"a microbatch of {run.microbatch_size} × {run.sequence_length} tokens"
        with as_config_error(
            f"{source}: --no-activations plans everything else, but {size} cannot be traced without data"
        ):
            trace = run.trace()
    estimate = run.estimate(trace)
    machine = options.machine
    peak = "amp_fp8" if run.has_fp8_layers else run.precision
    return PlannedStep(
        source=source,
        plan=run.plan.resolve(run.world_size),
        estimate=estimate,
        trace=trace,
        optimizer=optimizer.name,
        precision=run.precision,
        world_size=run.world_size,
        gpus_per_node=run.gpus_per_node,
        microbatch_size=run.microbatch_size,
        num_microbatches=run.num_microbatches,
        sequence_length=run.sequence_length,
        findings=(*run.translation.findings, *run.findings, *findings),
        memory=options.memory,
        bounds=step_bounds(estimate, trace or assumed_trace(run.plan), machine.computing_in(peak)) if machine else None,
    )
