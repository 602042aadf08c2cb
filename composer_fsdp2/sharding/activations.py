"""Recompute or offload the activations of some modules."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from composer_fsdp2._torch.private_names import (
    CheckpointImpl,
    checkpoint_wrapper,
    offload_wrapper,
    transformer_engine_checkpoint_wrapper,
)
from composer_fsdp2.config.sharding import ActivationCheckpointing
from composer_fsdp2.sharding.modules import ancestors_or_self, at_path


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


def caching_modules(model: nn.Module, recomputed: Sequence[str]) -> tuple[str, ...]:
    """The paths of transformers' models whose ``config.use_cache`` is on around modules that are recomputed.

    A layer that runs again adds its keys and values to the cache once more, and attends to both: torch's non-reentrant
    checkpointing raises then, the reentrant one gives wrong gradients under the right loss. transformers turns the
    cache off for its own gradient checkpointing only.

    Args:
        recomputed: Paths.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    around = {above for path in recomputed for above in ancestors_or_self(path)}
    configs: dict[int, str] = {}
    for path, module in modules.items():
        config = getattr(module, "config", None)
        if path in around and _is_of_transformers(config) and getattr(config, "use_cache", False):
            configs.setdefault(id(config), path)  # a ComposerModel around it has the same
    return tuple(configs.values())


def turn_off_caches(model: nn.Module, paths: Sequence[str]) -> None:
    """In training; ``generate`` goes by a ``generation_config`` of its own, and so caches as before."""
    for path in paths:
        config: Any = at_path(model, path).config
        config.use_cache = False


def _is_of_transformers(config: object) -> bool:
    return any(cls.__module__.partition(".")[0] == "transformers" for cls in type(config).__mro__)


def _recompute(mode: ActivationCheckpointing) -> Callable[[nn.Module], nn.Module]:
    if mode.transformer_engine:
        return transformer_engine_checkpoint_wrapper(mode.transformer_engine_seed)
    implementation = CheckpointImpl.REENTRANT if mode.reentrant else CheckpointImpl.NO_REENTRANT
    return partial(checkpoint_wrapper, checkpoint_impl=implementation)
