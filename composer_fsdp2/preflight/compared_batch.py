"""What ``plan`` would have said of the batch that ``compare`` counts."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from composer_fsdp2.comparing.predicting import CountedBatch, prediction_of
from composer_fsdp2.comparing.run_record import Prediction
from composer_fsdp2.config.text import one_line
from composer_fsdp2.errors import ComposerFSDP2Error, ConfigError
from composer_fsdp2.estimate.events import MicrobatchTrace
from composer_fsdp2.estimate.optimizers import OptimizerState, optimizer_state
from composer_fsdp2.estimate.replay import estimate_step, state_of_step
from composer_fsdp2.estimate.trace import trace_microbatch
from composer_fsdp2.preflight.losses import RecordedLoss
from composer_fsdp2.preflight.planned_model import num_experts
from composer_fsdp2.preflight.preflight_run import Loss
from composer_fsdp2.preflight.read_run import read_run
from composer_fsdp2.sharding.plan import ShardingPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traceable:
    """A model, its plan, and how a microbatch of it is computed; ``rests_on`` says where they come from."""

    model: nn.Module
    plan: ShardingPlan
    loss: Loss
    rows: int
    tokens: int
    precision: str
    rests_on: str


def predict_batch(batch: CountedBatch) -> Prediction:
    """The step of rank 0: of a YAML from the file alone, as ``plan`` reads it; else from the ranks' model and plan.

    It never raises for what cannot be predicted: that is the prediction's ``reason`` then, or a note. Does not
    communicate.
    """
    notes: list[str] = []
    optimizer = _optimizer(batch, notes)
    traceable = _of_file(batch, notes) or _of_ranks(batch, notes)
    trace = None if traceable is None else _traced(traceable, notes)
    plan = batch.plan if traceable is None else traceable.plan
    how: dict[str, Any] = {
        "world_size": batch.num_ranks,
        "optimizer": optimizer,
        "num_microbatches": batch.num_microbatches,
        "gpus_per_node": batch.num_ranks,
    }
    try:
        step = estimate_step(plan, trace, **how)
        state = state_of_step(plan, trace, **how)
    except ComposerFSDP2Error as error:
        return Prediction(reason=str(error))
    # What the optimizer's step allocates is no state.
    of_microbatches = (each for each in state.samples if each.microbatch >= 0)
    state_bytes = max(max(each.meanwhile_bytes, each.afterwards_bytes) for each in of_microbatches)
    rests_on = "" if traceable is None or trace is None else traceable.rests_on
    return prediction_of(step, batch, state_bytes=state_bytes, rests_on=rests_on, notes=notes)


def _of_file(batch: CountedBatch, notes: list[str]) -> _Traceable | None:
    """A YAML by itself, if what is read of it is the plan that the ranks have."""
    if not batch.job.is_yaml:
        return None
    try:
        run = read_run(
            batch.job.file,
            world_size=batch.num_ranks,
            gpus_per_node=batch.num_ranks,
            microbatch=1 if batch.is_auto else None,
            device=batch.plan.mesh.device_type,
            overrides=batch.job.arguments,
        )
    except Exception as error:  # Foundry's and the models' own, too
        notes.append(f"`composer-fsdp2 plan` cannot read the file, so the ranks' model was traced: {one_line(error)}")
        return None
    plan = run.plan.resolve(batch.num_ranks)
    if plan.digest != batch.plan.digest:
        notes.append("`composer-fsdp2 plan` shards the file's model otherwise than the ranks do; theirs was traced.")
        return None
    return _Traceable(
        model=run.model,
        plan=plan,
        loss=run.loss,
        rows=run.computed_rows,
        tokens=run.sequence_length,
        precision=run.precision,
        rests_on=f"the file alone, as `composer-fsdp2 plan` reads it: {run.computed_rows} rows of "
        f"{run.sequence_length} tokens in a microbatch",
    )


def _of_ranks(batch: CountedBatch, notes: list[str]) -> _Traceable | None:
    if batch.model is None:
        notes.append("The model cannot be copied, so that nothing was traced.")
        return None
    if not batch.is_uniform:
        notes.append("Microbatches differ in size; all are counted as the batch's first.")
    return _Traceable(
        model=batch.model,
        plan=batch.plan,
        loss=RecordedLoss(batch=batch.microbatch, num_experts=num_experts(batch.model)),
        rows=1,
        tokens=1,
        precision=batch.precision,
        rests_on="the ranks' plan, and their model on the first microbatch of the counted batch",
    )


def _traced(traceable: _Traceable, notes: list[str]) -> MicrobatchTrace | None:
    try:
        return trace_microbatch(
            traceable.model,
            traceable.plan,
            traceable.loss,
            rows=traceable.rows,
            tokens=traceable.tokens,
            precision=traceable.precision,
        )
    except Exception as error:  # whatever a model's own code raises
        notes.append(f"A microbatch cannot be traced without data: {one_line(error)}")
        return None


def _optimizer(batch: CountedBatch, notes: list[str]) -> OptimizerState:
    try:
        return next(_known(batch), None) or optimizer_state("SGD")
    except ConfigError as error:
        notes.append(f"{error}; AdamW's state is counted.")
        return optimizer_state("AdamW")


def _known(batch: CountedBatch) -> Iterator[OptimizerState]:
    for optimizer in batch.optimizers:
        yield optimizer_state(type(optimizer).__name__, optimizer.defaults)
