"""Before training, reject or correct settings that would fail later or have no effect on a sharded model."""

from collections.abc import Callable
from typing import Any

from composer.algorithms import SWA, NoOpModel
from composer.callbacks import ExportForInferenceCallback
from composer.core import State
from torch import nn

from composer_fsdp2.checkpoint.names import canonical
from composer_fsdp2.errors import UnsupportedError
from composer_fsdp2.sharding.sharded import is_sharded

from .optimizers import full_name
from .seams import seam

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
    NoOpModel: (
        "the algorithm NoOpModel puts a single number in the model's place, and nothing is left to shard; train "
        "without fsdp_config to measure the data loader"
    ),
    ExportForInferenceCallback: (
        f"ExportForInferenceCallback copies the model at the end of fit, and a sharded one cannot be copied; "
        f"{_HOW_TO_EXPORT}"
    ),
}


def refuse_copies(state: State) -> None:
    """Raise for algorithms and callbacks that do not work on a sharded model.

    Raises:
        UnsupportedError: names each algorithm or callback, and the alternative.

    Called on all ranks before a Trainer shards its model, and before each ``fit``.
    """
    if state.fsdp_config is None and not is_sharded(state.model):
        return
    present = [*state.algorithms, *state.callbacks]
    reasons = [reason for kind, reason in _REASONS.items() if any(isinstance(each, kind) for each in present)]
    if reasons:
        raise UnsupportedError("\n".join(reasons))


@seam(
    "composer.utils.inference",
    "export_for_inference",
    why="rank 0 failed an assertion in torch, and the other ranks continued",
)
def export_for_inference(original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Replaces ``composer.utils.inference.export_for_inference``, which only rank 0 executes."""
    if is_sharded(model):
        raise UnsupportedError(
            f"export_for_inference copies the model, and a sharded one cannot be copied; {_HOW_TO_EXPORT}"
        )
    original(model, *args, **kwargs)


# As a string: LLM Foundry is slow to import, and optional.
_LAYER_FREEZING = "llmfoundry.callbacks.resumption_callbacks.LayerFreezing"


def name_layers_to_freeze(state: Any) -> None:
    """Convert the layer names of LLM Foundry's LayerFreezing to this model's: users write them with or without FSDP1's
    prefixes.

    Called on all ranks at the start of ``fit``, before the callback compares names.
    """
    own = {canonical(name): name for name, _ in state.model.named_parameters()}
    for callback in state.callbacks:
        if any(full_name(kind) == _LAYER_FREEZING for kind in type(callback).__mro__):
            callback.layer_names = {own.get(canonical(name), name) for name in callback.layer_names}
