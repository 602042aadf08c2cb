"""Recompute or offload activations, with or without sharding: chosen by the model's own hooks, as FSDP1 chose."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from composer_fsdp2._torch import (
    ActivationWrapper,
    CheckpointImpl,
    checkpoint_wrapper,
    offload_wrapper,
    transformer_engine_checkpoint_wrapper,
)
from composer_fsdp2.config import ActivationCheckpointing
from composer_fsdp2.errors import PlanError
from composer_fsdp2.tying import join
from composer_fsdp2.wrap import bound_hook, is_metric, outside_compilation, wrapped_children

__all__ = ["apply_activation_checkpointing", "select_checkpointed", "wrap_activations"]

CheckFn = Callable[[nn.Module], Any]


def apply_activation_checkpointing(
    model: nn.Module,
    *,
    checkpoint: bool = True,
    cpu_offload: bool = False,
    reentrant: bool = False,
    check_fn: CheckFn | None = None,
) -> list[str]:
    """Wrap the chosen modules of ``model`` so that their activations are recomputed, or kept in host memory.

    Usable without sharding; with it, call this first and shard afterwards (``prepare_fully_shard`` does, when its
    configuration says ``activation_checkpointing``), so that the unit's gather surrounds the recomputation:
    FSDP(AC(block)), FSDP1's nesting.

    Args:
        model: Its direct children are looked at one by one. A module is chosen by its attribute
            ``_activation_checkpointing``, else by ``check_fn``, else by the ``activation_checkpointing_fn`` of the
            direct child that it lies in. Modules that are wrapped already are passed over.
        checkpoint: Recompute the activations in backward.
        cpu_offload: Keep what is saved for backward in host memory.
        reentrant: Which of torch's two implementations of checkpointing.
        check_fn: Called with a module, true for those to wrap; goes before the model's own functions.
    Returns:
        The paths of the wrapped modules, children before parents.
    Raises:
        PlanError: the model is sharded already, or a choosing function raised; nothing has been wrapped then.

    Does not communicate.
    """
    for path, module in model.named_modules():
        if isinstance(module, FSDPModule | FullyShardedDataParallel):
            raise PlanError(
                f"module {path or '(the model)'!r} is sharded already: wrapping inside it would leave its unit's "
                "hooks on the wrong module; call apply_activation_checkpointing before sharding"
            )
    if not (checkpoint or cpu_offload):
        return []
    paths = select_checkpointed(model, check_fn)
    mode = ActivationCheckpointing(checkpoint=checkpoint, cpu_offload=cpu_offload, reentrant=reentrant)
    wrap_activations(model, paths, mode)
    return paths


def select_checkpointed(
    model: nn.Module, check_fn: CheckFn | None = None, *, below_unwrapped: bool = False
) -> list[str]:
    """The paths that ``apply_activation_checkpointing`` would wrap, children before parents; only reads.

    Args:
        below_unwrapped: Also in direct children with ``_fsdp_wrap = False``, as Composer's FSDP2 did.
    """
    paths: list[str] = []
    modules = dict(model.named_modules(remove_duplicate=False))
    children = {name: child for name, child in model.named_children() if not is_metric(child)}
    for name, child in (children if below_unwrapped else wrapped_children(model)).items():
        choose = check_fn or bound_hook(child, "activation_checkpointing_fn")
        chosen = partial(_is_chosen, choose=choose)
        found = [path for path, module in _bottom_up(child, name, set()) if chosen(path, module)]
        paths.extend(outside_compilation(modules, path)[0] for path in found)
    return list(dict.fromkeys(paths))


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


def _is_chosen(path: str, module: nn.Module, *, choose: CheckFn | None) -> bool:
    if isinstance(module, ActivationWrapper):
        return False
    if hasattr(module, "_activation_checkpointing"):
        return bool(module._activation_checkpointing)
    if choose is None:
        return False
    try:
        return bool(choose(module))
    except Exception as error:
        raise PlanError(
            f"activation_checkpointing_fn raised {type(error).__name__} for module {path!r} "
            f"({type(module).__name__}): {error}"
        ) from error


def _bottom_up(module: nn.Module, path: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    seen.add(module)
    if isinstance(module, ActivationWrapper):
        return  # the user wrapped it: what lies inside is theirs
    for name, child in module.named_children():
        if child not in seen:
            yield from _bottom_up(child, join(path, name), seen)
    yield path, module
