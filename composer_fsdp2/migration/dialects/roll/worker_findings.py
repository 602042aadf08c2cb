"""A finding for each key of a worker, and for what ROLL does without being told."""

from collections.abc import Iterator
from dataclasses import replace

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.config.rows import INT, Row, finding_of, idle, undecided, unknown_key
from composer_fsdp2.migration.dialect import implicit
from composer_fsdp2.migration.dialects.roll.worker import Worker
from composer_fsdp2.migration.dialects.roll.worker_keys import BY_NAME, ROWS

_UNKNOWN = "ROLL takes any key into strategy_config and reads those only that it knows, so this one did nothing"
# By how other systems call it, a degree that is near to the name of another one of ROLL's.
_OF_OTHERS = dict.fromkeys(("cp_size", "sp_size", "context_parallel_size"), "model_args.ulysses_size")
_NO_GRADIENTS = "fsdp2_infer makes no gradients"
_FOR_GRADIENTS = {
    "reduce_dtype",
    "enable_mix_precision",
    "reduce_scatter_during_grad_accumulation",
    "fused_optimizer",
    "model_args.disable_gradient_checkpointing",
    "model_args.gradient_checkpointing_use_reentrant",
    "model_args.freeze_module_prefix",
}
_IMPLICIT_TRAINING = (
    implicit(
        "casting of inputs",
        Outcome.EXACT,
        "no unit casts its inputs, and a step runs under torch.autocast in param_dtype",
        "precision amp_bf16 does the same in Composer",
    ),
    implicit(
        "gradient norms that are not finite",
        Outcome.APPROXIMATE,
        "ROLL skips the optimizer's step then; Composer does so with amp_fp16 only",
        "watch the gradient norm with OptimizerMonitor, or stop with NaNMonitor",
    ),
)
_IMPLICIT = (
    implicit(
        "sharded dimension",
        Outcome.APPROXIMATE,
        "ROLL shards the first dimension that fsdp_size divides; here it is the first one, padded: the same numbers",
    ),
    implicit(
        "state dict",
        Outcome.APPROXIMATE,
        "a ROLL checkpoint holds shards (dcp/) and beside them the full model for Hugging Face",
        "state_dict_type: sharded, and an export for Hugging Face where one is wanted",
    ),
)


def findings_of(worker: Worker) -> Iterator[Finding]:
    for key, value in worker.given.items():
        row = BY_NAME.get(key)
        if key in worker.misshapen:
            yield Finding(key=key, value=value, outcome=Outcome.NEEDS_DECISION, reason="ROLL takes a mapping here, and "
                "fails with this", hint="write its keys below it, or remove it")  # fmt: skip
        elif key in _OF_OTHERS:
            usual = Finding(key=key, value=value, outcome=Outcome.NEEDS_DECISION, reason="", known=False)
            yield undecided(usual, _UNKNOWN, f"as trained: remove it; ROLL's own word is {_OF_OTHERS[key]}")
        elif row is None:
            yield unknown_key(key, value, BY_NAME, _UNKNOWN)
        elif problem := problem_of(worker, row):
            hint = "remove it" if row.default is None else f"its default is {row.default!r}"
            yield undecided(row.usual(key, value), problem, hint)
        else:
            yield _finding(worker, row)
    if problem := norm_problem(worker):
        yield implicit("max_grad_norm", Outcome.NEEDS_DECISION, problem, value=worker.top["max_grad_norm"])
    for row in ROWS:
        is_for_it = worker.is_training or row.name not in _FOR_GRADIENTS
        if row.tells_default and row.name not in worker.given and is_for_it:
            yield replace(_finding(worker, row), origin=Origin.IMPLICIT)
    yield from (*(_IMPLICIT_TRAINING if worker.is_training else ()), *_IMPLICIT)


def norm_problem(worker: Worker) -> str:
    """The error of the gradient clipping norm; "" without an error."""
    norm = worker.top.get("max_grad_norm")
    return "" if norm is None or INT.fits(norm) or isinstance(norm, float) else "it takes a number"


def problem_of(worker: Worker, row: Row) -> str:
    """What stands in the way of reading a key; "" if nothing does."""
    value, ranks = worker[row.name], worker.num_ranks
    if row.only_with and not worker.is_on(row.only_with):
        return ""
    if row.name in worker.given and not row.takes.fits(value):
        return f"this key takes {row.takes.text}"
    if row.name == "fsdp_size" and ranks is not None and 1 < value < ranks and ranks % value:
        return f"the {ranks} ranks of device_mapping are not a multiple of it; use {_divisors(ranks)}"
    if row.name == "reshard_after_forward" and type(value) is int:
        size = worker["fsdp_size"]
        shards = size if isinstance(size, int) and 1 < size < (ranks or size + 1) else ranks
        if shards is not None and shards % value:
            return f"it does not divide the {shards} ranks that a parameter is sharded over; use {_divisors(shards)}"
    return ""


def _divisors(number: int) -> str:
    return " or ".join(str(each) for each in range(1, number + 1) if number % each == 0)


def _finding(worker: Worker, row: Row) -> Finding:
    """The finding of a key with a value that it takes, given or not."""
    value = worker[row.name]
    if not worker.is_training and row.name in _FOR_GRADIENTS:
        return idle(row.usual(row.name, value), _NO_GRADIENTS)
    finding = finding_of(row, row.name, value, is_read=not row.only_with or worker.is_on(row.only_with))
    return finding if row.decide is None else row.decide(finding, worker)
