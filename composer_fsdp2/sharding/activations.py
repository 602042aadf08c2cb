"""Activation checkpointing and offloading."""

import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from composer_fsdp2._torch.private_names import (
    CheckpointImpl,
    checkpoint_wrapper,
    offload_wrapper,
    transformer_engine_checkpoint_wrapper,
)
from composer_fsdp2.config.sharding import ActivationCheckpointing
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.sharding.modules import ancestors_or_self, at_path, is_pretrained


def require_checkpointing(mode: ActivationCheckpointing) -> None:
    """Raise if the recomputation of ``mode`` needs a package that is not installed.

    Raises:
        ConfigError: Transformer Engine is not installed; names the key.
    """
    if mode.transformer_engine and mode.enabled and importlib.util.find_spec("transformer_engine") is None:
        raise ConfigError(
            "te_checkpoint_wrapper under precision amp_fp8 needs Transformer Engine, which is not installed: install "
            "transformer-engine, or set te_checkpoint_wrapper to false",
            keys=("te_checkpoint_wrapper",),
        )


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


def caching_modules(modules: Mapping[str, nn.Module], recomputed: Sequence[str]) -> tuple[str, ...]:
    """The paths of transformers models that would fill a KV cache in training while their layers are recomputed.

    A recomputed layer adds its keys and values to the cache again, and attends to both copies. torch's non-reentrant
    checkpointing raises in this case; the reentrant one computes wrong gradients with a correct loss. transformers
    turns the cache off only for its own gradient checkpointing.

    Args:
        modules: All modules of the model, by every path.
        recomputed: The paths of the modules with activation checkpointing.
    """
    around = {above for path in recomputed for above in ancestors_or_self(path)}
    return tuple(path for path, module in modules.items() if path in around and _fills_a_cache(module))


def _fills_a_cache(module: nn.Module) -> bool:
    """Whether this is a transformers model that takes ``use_cache``, and whose ``config.use_cache`` default is on."""
    config = getattr(module, "config", None)
    return is_pretrained(module) and bool(getattr(config, "use_cache", False)) and "use_cache" in _parameters(module)


def _parameters(module: nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)


def turn_off_caches(model: nn.Module, paths: Sequence[str]) -> None:
    """Turn ``use_cache`` off in forwards that need gradients.

    ``config.use_cache`` is unchanged: ``generate`` and other models read it.
    """
    for path in paths:
        module = at_path(model, path)
        hook = partial(_without_cache, _parameters(module).index("use_cache"))
        module.register_forward_pre_hook(hook, with_kwargs=True)


def _without_cache(
    position: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if not torch.is_grad_enabled():
        return None
    if len(args) > position:
        return (*args[:position], False, *args[position + 1 :]), kwargs
    return args, kwargs | {"use_cache": False}


def _recompute(mode: ActivationCheckpointing) -> Callable[[nn.Module], nn.Module]:
    if mode.transformer_engine:
        return transformer_engine_checkpoint_wrapper(mode.transformer_engine_seed)
    implementation = CheckpointImpl.REENTRANT if mode.reentrant else CheckpointImpl.NO_REENTRANT
    return partial(checkpoint_wrapper, checkpoint_impl=implementation)
