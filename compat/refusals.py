"""What copies the whole model, which a sharded one does not allow: refused before training instead of in the midst."""

import functools
from collections.abc import Callable
from typing import Any

from composer.algorithms import SWA
from composer.callbacks import ExportForInferenceCallback
from composer.core import State
from torch import nn

from composer_fsdp2.errors import UnsupportedError
from composer_fsdp2.sharded import is_sharded

__all__ = ["refuse_copies", "replacement_for_export"]

_HOW_TO_EXPORT = (
    "export in one process after training: build the model once more and call "
    "composer.utils.export_for_inference(model, ..., load_path=CHECKPOINT). It reads a checkpoint of "
    "state_dict_type: full; 'composer-fsdp2 checkpoint convert' makes one of a sharded checkpoint"
)
_REASONS = {
    SWA: (
        "the algorithm SWA copies the whole model, and a sharded one cannot be copied; use the algorithm EMA, which "
        "averages shards, or average checkpoints after training"
    ),
    ExportForInferenceCallback: (
        f"ExportForInferenceCallback copies the model at the end of fit, and a sharded one cannot be copied; "
        f"{_HOW_TO_EXPORT}"
    ),
}


def refuse_copies(state: State) -> None:
    """Called on all ranks before a Trainer shards its model, and before each fit.

    Raises:
        UnsupportedError: an algorithm or a callback would fail later; names each, and what to do instead.
    """
    if state.fsdp_config is None and not is_sharded(state.model):
        return
    present = [*state.algorithms, *state.callbacks]
    reasons = [reason for kind, reason in _REASONS.items() if any(isinstance(each, kind) for each in present)]
    if reasons:
        raise UnsupportedError("\n".join(reasons))


def replacement_for_export(original: Callable[..., None]) -> Callable[..., None]:
    """``composer.utils.inference.export_for_inference``, which rank 0 alone goes into."""

    @functools.wraps(original)
    def export_for_inference(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        if is_sharded(model):
            raise UnsupportedError(
                f"export_for_inference copies the model, and a sharded one cannot be copied; {_HOW_TO_EXPORT}"
            )
        original(model, *args, **kwargs)

    return export_for_inference
