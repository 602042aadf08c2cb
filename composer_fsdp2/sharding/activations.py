"""Recompute or offload the activations of some modules."""

from collections.abc import Callable
from functools import partial

from torch import nn

from composer_fsdp2._torch.private_names import (
    CheckpointImpl,
    checkpoint_wrapper,
    offload_wrapper,
    transformer_engine_checkpoint_wrapper,
)
from composer_fsdp2.config.sharding import ActivationCheckpointing


def wrap_activations(model: nn.Module, paths: list[str], mode: ActivationCheckpointing) -> None:
    """Replace the modules at ``paths`` (children before parents) by their wrappers, wherever they are registered."""
    if not paths:
        return
    modules = dict(model.named_modules(remove_duplicate=False))
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for path, module in modules.items():
        parent, _, name = path.rpartition(".")
        if path:
            places.setdefault(module, []).append((modules[parent], name))
    recompute = _recompute(mode)
    for path in paths:
        module = modules[path]
        wrapper: nn.Module = module
        if mode.checkpoint:
            wrapper = recompute(wrapper)
        if mode.cpu_offload:
            wrapper = offload_wrapper(wrapper)
        for parent_module, name in dict.fromkeys(places[module]):
            setattr(parent_module, name, wrapper)


def _recompute(mode: ActivationCheckpointing) -> Callable[[nn.Module], nn.Module]:
    if mode.transformer_engine:
        return transformer_engine_checkpoint_wrapper(mode.transformer_engine_seed)
    implementation = CheckpointImpl.REENTRANT if mode.reentrant else CheckpointImpl.NO_REENTRANT
    return partial(checkpoint_wrapper, checkpoint_impl=implementation)
