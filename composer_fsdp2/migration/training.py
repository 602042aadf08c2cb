"""Read and write batches, steps and the optimizer of a run.

``RunConfig.optimizer`` contains torch's options. torch's AdamW multiplies weights by ``1 - lr * weight_decay`` in each
step, Composer's DecoupledAdamW by ``1 - lr / initial_lr * weight_decay``: its ``weight_decay`` is torch's times the
initial learning rate.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from composer_fsdp2.config.rows import Row
from composer_fsdp2.migration.lens import decides, unless
from composer_fsdp2.migration.run import OF_TRAINING, RunConfig

ADAMW = "adamw_torch"
# Other implementations with the same numerics, under their systems' names.
_ALIKE = (
    "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adamw_apex_fused", "adamw_hf", "AdamW",
    "decoupled_adamw",
)  # fmt: skip
# The options of torch's AdamW under a Trainer's names, and its defaults.
OF_TRAINERS = {
    "learning_rate": "lr",
    "weight_decay": "weight_decay",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "eps",
}
DEFAULTS = {"name": ADAMW, "lr": 5e-5, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}


def is_of_training(row: Row | None) -> TypeGuard[Row]:
    """Return whether a key sets only fields in ``OF_TRAINING``, which do not affect sharding."""
    return row is not None and bool(decides(row)) and {*OF_TRAINING}.issuperset(decides(row))


def count(value: Any, settings: object = None) -> int | None:
    """Return a value as a positive integer; None for any other value, such as ``auto``."""
    number = number_of(value)
    return None if number is None or number < 1 or number % 1 else int(number)


def number_of(value: Any) -> float | None:
    """Return a value as a finite number, rounded to ten digits, else None.

    Strings are parsed: YAML reads ``2e-5`` as a string.
    """
    try:
        number = math.nan if isinstance(value, bool | None) else float(f"{float(value):.10g}")
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def optimizer_of(explicit: Mapping[str, Any], defaults: Mapping[str, Any] = DEFAULTS) -> Mapping[str, Any] | None:
    """Return the name and options of an optimizer; None if the file sets no option, or one is not a number.

    Args:
        explicit: ``name``, and options by torch's names; None for those that the file does not set.
        defaults: The system's defaults for these.
    """
    given = {name: value for name, value in explicit.items() if value is not None}
    options = {name: number_of(value) for name, value in {**defaults, **given}.items() if name != "name"}
    name = str(given.get("name", defaults["name"]))
    found = {"name": ADAMW if name in _ALIKE else name, **options}
    return None if not given or None in options.values() else found


def adamw_of(run: RunConfig) -> Mapping[str, Any]:
    """Return the optimizer if it is AdamW, with state in any precision, else an empty mapping."""
    optimizer = run.optimizer or {}
    return optimizer if re.fullmatch(r"(paged_)?adamw_\w+", optimizer.get("name", "")) else {}


def option(name: str, default: Any = None) -> Callable[[RunConfig], Any]:
    """Return a ``Lens.write`` function for an option of AdamW. It omits the default."""
    return lambda run: unless(default, adamw_of(run).get(name))


def duration_in(unit: str) -> Callable[[RunConfig], int | None]:
    """Return a ``Lens.write`` function for the duration of a run in ``ba`` (optimizer steps) or ``ep`` (epochs)."""
    return lambda run: count(run.max_duration.removesuffix(unit)) if run.max_duration else None
