"""The prediction that ``plan`` makes of the batch that ``compare`` counts."""

from functools import partial
from typing import Any

from composer_fsdp2.comparing.counted_batch import CountedBatch, collective_counts
from composer_fsdp2.comparing.run_record import Prediction
from composer_fsdp2.config.text import one_line
from composer_fsdp2.errors import ComposerFSDP2Error
from composer_fsdp2.estimate.events import MicrobatchTrace
from composer_fsdp2.estimate.replay import estimate_step
from composer_fsdp2.estimate.trace import trace_microbatch
from composer_fsdp2.preflight.losses import composer_loss
from composer_fsdp2.preflight.preflight_run import OptimizerChoice, counted_optimizer
from composer_fsdp2.preflight.read_run import read_run
from composer_fsdp2.sharding.plan import ShardingPlan

# A plan, the trace of a microbatch, and where the model comes from; "" without a trace.
_Traced = tuple[ShardingPlan, MicrobatchTrace | None, str]


def predict_batch(batch: CountedBatch) -> Prediction:
    """Predict memory and communication of rank 0's step, for ``compare``.

    Reads the YAML as ``plan`` does. For a script, or if that fails, uses the model and plan of the running ranks.

    Does not raise: failures are in ``Prediction.reason`` or in a note. Called on rank 0; does not communicate.
    """
    choices = [OptimizerChoice(name=type(each).__name__, options=each.defaults) for each in batch.optimizers]
    optimizer, findings = counted_optimizer(choices[0] if choices else OptimizerChoice(name="SGD", options={}))
    notes = [f"{each.reason}." for each in findings]
    plan, trace, basis = _from_file(batch, notes) or _from_ranks(batch, notes)
    options: dict[str, Any] = {
        "world_size": batch.num_ranks,
        "optimizer": optimizer,
        "num_microbatches": batch.num_microbatches,
        "gpus_per_node": batch.num_ranks,
    }
    try:
        step = estimate_step(plan, trace, **options)
        state = estimate_step(plan, trace and trace.without_activations(), **options)
    except ComposerFSDP2Error as error:
        return Prediction(reason=str(error))
    # The step predicts bytes; an operator's dtype is the counted one, if it has only one.
    dtypes = {each.op: each.dtype for each in batch.counted}
    several = {each.op for each in batch.counted if each.dtype != dtypes[each.op]}
    calls = ((each.op, "" if each.op in several else dtypes.get(each.op, ""), each.num_bytes) for each in step.calls)
    return Prediction(
        collectives=collective_counts(calls),
        # Without the optimizer's step, whose temporaries are not state.
        state_bytes=max(each.total_bytes for each in state.timeline if each.microbatch >= 0),
        peak_bytes=step.peak_bytes if trace else 0,
        rests_on=basis if trace else "",
        notes=(*step.notes, *notes),
    )


def _from_file(batch: CountedBatch, notes: list[str]) -> _Traced | None:
    """Trace the YAML's model, if its plan equals the ranks' plan."""
    if not batch.options.is_yaml:
        return None
    try:
        run = read_run(
            batch.options.file,
            world_size=batch.num_ranks,
            gpus_per_node=batch.num_ranks,
            microbatch=1 if batch.is_auto else None,
            device=batch.plan.mesh.device_type,
            overrides=batch.options.arguments,
        )
    except Exception as error:  # includes errors of Foundry and of models
        notes.append(f"`composer-fsdp2 plan` cannot read the file, so the ranks' model was traced: {one_line(error)}")
        return None
    plan = run.plan.resolve(batch.num_ranks)
    if plan.digest != batch.plan.digest:
        notes.append("`composer-fsdp2 plan` shards the file's model otherwise than the ranks do; theirs was traced.")
        return None
    rows, tokens = run.computed_rows, run.sequence_length
    trace = _traced(notes, run.model, plan, run.loss, rows=rows, tokens=tokens, precision=run.precision)
    size = f"{rows} rows of {tokens} tokens in a microbatch"
    return plan, trace, f"the file alone, as `composer-fsdp2 plan` reads it: {size}"


def _from_ranks(batch: CountedBatch, notes: list[str]) -> _Traced:
    if batch.model is None:
        notes.append("The model cannot be copied, so nothing was traced.")
        return batch.plan, None, ""
    if not batch.is_uniform:
        notes.append("Microbatches differ in size; all are counted as the batch's first.")
    loss = partial(composer_loss, given=batch.microbatch)
    trace = _traced(notes, batch.model, batch.plan, loss, rows=1, tokens=1, precision=batch.precision)
    return batch.plan, trace, "the ranks' plan, and their model on the first microbatch of the counted batch"


def _traced(notes: list[str], *args: Any, **kwargs: Any) -> MicrobatchTrace | None:
    try:
        return trace_microbatch(*args, **kwargs)
    except Exception as error:  # a model's code may raise any error
        notes.append(f"A microbatch cannot be traced without data: {one_line(error)}")
        return None
