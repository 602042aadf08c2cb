"""Settings outside a section that affect it: the arguments of a Trainer."""

from collections.abc import Iterator, Mapping
from typing import Any

from composer_fsdp2.config.findings import Finding, Outcome
from composer_fsdp2.fsdp1.parsing import PRECISIONS
from composer_fsdp2.migration.dialect import Section, implicit
from composer_fsdp2.migration.interpolated import has_interpolation
from composer_fsdp2.migration.training import count, number_of, optimizer_of

Given = Mapping[str, Any]
# Composer's default for a GPU, on which nearly all of these files were trained.
_DEFAULT_PRECISION = "amp_bf16"
# Composer's names until 0.12 (composer/trainer/trainer.py, 0.13.5).
_OLD_PRECISIONS = {"fp16": "amp_fp16", "amp": "amp_fp16", "bf16": "amp_bf16"}


def around_of(section: Section) -> Given:
    """Return a Trainer's other arguments: entries of the mapping that contains the section, and of those around it."""
    values: Any = section.around
    found = dict(values)
    for key in section.path[:-1]:
        values = values[key]
        if isinstance(values, Mapping):
            found |= values
    return found


def precision_of(around: Given) -> tuple[str, Finding | None]:
    """Return the precision that is set beside the section or above it, and a finding if it is invalid."""
    given = around.get("precision", _DEFAULT_PRECISION)
    given = given.lower() if isinstance(given, str) else given
    if isinstance(given, str) and given in PRECISIONS:
        return given, None
    is_old = isinstance(given, str) and given in _OLD_PRECISIONS
    finding = Finding(
        key="precision",
        value=given,
        outcome=Outcome.NEEDS_DECISION,
        reason="mixed_precision depends on it, and Composer has no such precision",
        hint=f"say {_OLD_PRECISIONS[given]}" if is_old else f"say one of {', '.join(PRECISIONS)}",
    )
    return _DEFAULT_PRECISION, finding


def training_of(around: Given) -> dict[str, Any]:
    """Return batches, steps and the optimizer; None for values that are unset or known at run time only."""
    duration, optimizer = around.get("max_duration"), around.get("optimizer")
    return {
        "microbatch_size": count(around.get("device_train_microbatch_size")),
        "global_batch_size": count(around.get("global_train_batch_size")),
        "max_duration": duration if isinstance(duration, str) else f"{duration}ep" if count(duration) else None,
        "optimizer": _optimizer(optimizer) if isinstance(optimizer, Mapping) else None,
    }


OF_TRAINING_KEYS = {
    "device_train_microbatch_size": "microbatch_size",
    "global_train_batch_size": "global_batch_size",
    "max_duration": "max_duration",
}


def open_training(around: Given) -> Iterator[Finding]:
    """Yield a finding for each number of the batches and steps that is known at run time only."""
    known = training_of(around)
    for key, field in OF_TRAINING_KEYS.items():
        if around.get(key) is not None and known[field] is None:
            reason = "its value is known at run time only, and is not in the new keys"
            yield implicit(key, Outcome.APPROXIMATE, reason, value=around[key])


# Defaults of DecoupledAdamW (composer/optim/decoupled_weight_decay.py, 0.32.1).
_DEFAULTS = {"name": "", "lr": 1e-3, "weight_decay": 1e-5, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


def _optimizer(given: Given) -> Given | None:
    betas = given.get("betas")
    first, second = betas if isinstance(betas, list) and len(betas) == 2 else (None, None)
    options = {name: given.get(name) for name in ("name", "lr", "weight_decay", "eps")}
    others = {*given} - {*options, "betas"}
    unknown = {
        key for key, value in options.items() if key != "name" and value is not None and number_of(value) is None
    }
    options = {key: None if key in unknown else value for key, value in options.items()}
    if others or unknown:  # an optimizer of its own
        options["name"] = f"{options['name']} with {', '.join(sorted(others | unknown))}"
    found = optimizer_of({**options, "beta1": first, "beta2": second}, _DEFAULTS)
    decay = {} if found is None or not found["lr"] else {"weight_decay": number_of(found["weight_decay"] / found["lr"])}
    return None if found is None else {**found, **decay}


def clipped(around: Given) -> tuple[float | None, str | None]:
    """Return the norm to which gradients are clipped, and a description of clipping by a value or an unknown norm."""
    clipping = clipping_of(around)
    kind, threshold = clipping.get("clipping_type"), clipping.get("clipping_threshold")
    if not clipping or (kind == "norm" and not has_interpolation(threshold)):
        return threshold, None
    return None, f"{kind} {threshold}"


def clipping_problem(around: Given) -> Finding | None:
    """Return a finding if the threshold is not a positive number."""
    clipping = clipping_of(around)
    threshold = clipping.get("clipping_threshold")
    is_number = isinstance(threshold, int | float) and not isinstance(threshold, bool) and threshold > 0
    if not clipping or is_number or has_interpolation(threshold):
        return None
    return Finding(
        key="algorithms.gradient_clipping.clipping_threshold",
        value=threshold,
        outcome=Outcome.NEEDS_DECISION,
        reason="it takes a positive number",
        hint="write one, or remove gradient_clipping to clip nothing",
    )


def clipping_of(around: Given) -> Given:
    """Return the arguments of Composer's gradient clipping, as LLM Foundry takes them; empty without clipping."""
    algorithms = around.get("algorithms")
    clipping = algorithms.get("gradient_clipping") if isinstance(algorithms, Mapping) else None
    return clipping if isinstance(clipping, Mapping) else {}
