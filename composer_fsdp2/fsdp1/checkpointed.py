"""Select the modules whose activations are recomputed or offloaded: by the model's hooks, or by class."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from composer_fsdp2._torch.private_names import ActivationWrapper
from composer_fsdp2.config.sharding import ShardingConfig
from composer_fsdp2.config.text import and_more
from composer_fsdp2.errors import PlanError
from composer_fsdp2.fsdp1.children import hook_of, is_metric, wrapped_children
from composer_fsdp2.sharding.classes import classes_named
from composer_fsdp2.sharding.modules import has_forward, outside_compilation
from composer_fsdp2.sharding.ties import join

CheckFn = Callable[[nn.Module], Any]
_POLICY = "activation_checkpointing_policy"


def choose_checkpointed(
    model: nn.Module, modules: Mapping[str, nn.Module], config: ShardingConfig, roots: Mapping[str, nn.Module]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the paths of the modules to recompute or offload, and lines for the report.

    The lines name hooks that the configuration replaces, and classes without a selected module.
    """
    if not config.activation_checkpointing.enabled:
        return (), ()
    names = config.activation_checkpointing.classes
    if names is None:
        return tuple(select_checkpointed(model, below_unwrapped=config.shard_below_unwrapped)), ()
    types = classes_named(model, names, key=f"fsdp_config.{_POLICY}", otherwise=config.wrap.classes)
    paths = select_checkpointed(
        model,
        lambda module: isinstance(module, types) and has_forward(module),
        below_unwrapped=config.shard_below_unwrapped,
    )
    return tuple(paths), tuple(_notes_of_policy(modules, roots, types, paths))


def select_checkpointed(
    model: nn.Module, check_fn: CheckFn | None = None, *, below_unwrapped: bool = False
) -> list[str]:
    """Return the paths of the modules that ``activation_checkpointing_fn`` selects, children before parents.

    Args:
        check_fn: Selects modules instead of the model's hooks.
        below_unwrapped: Also search direct children with ``_fsdp_wrap = False``, as Composer's FSDP2 does.
    """
    paths: list[str] = []
    modules = dict(model.named_modules(remove_duplicate=False))
    children = {name: child for name, child in model.named_children() if not is_metric(child)}
    for name, child in (children if below_unwrapped else wrapped_children(model)).items():
        choose = check_fn or hook_of(child, "activation_checkpointing_fn")
        found = [path for path, module in _bottom_up(child, name, set()) if _is_checkpointed(path, module, choose)]
        paths.extend(outside_compilation(modules, path)[0] for path in found)
    return list(dict.fromkeys(paths))


def _notes_of_policy(
    modules: Mapping[str, nn.Module],
    roots: Mapping[str, nn.Module],
    types: Sequence[type[nn.Module]],
    checkpointed: Sequence[str],
) -> Iterator[str]:
    """Yield a line for the report on hooks that the configuration replaces, and one for each class without a selected
    module.
    """
    ignored_fns = [name for name, child in roots.items() if hook_of(child, "activation_checkpointing_fn")]
    if ignored_fns:
        yield (f"{_POLICY} replaces the activation_checkpointing_fn of {and_more(ignored_fns)}, which is not called")
    # The wrapper of a compiled module is outside of it.
    chosen = [module for path in checkpointed for module in (modules[path], *modules[path].children())]
    for cls in types:
        if not any(isinstance(module, cls) for module in chosen):
            yield (
                f"{_POLICY} names {cls.__name__}, but none is selected: each is in a part that FSDP1 excludes, has "
                "_activation_checkpointing = False or no forward, or is already wrapped"
            )


def _is_checkpointed(path: str, module: nn.Module, choose: CheckFn | None) -> bool:
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
        return  # the user's wrapper; its submodules are not changed
    for name, child in module.named_children():
        if child not in seen:
            yield from _bottom_up(child, join(path, name), seen)
    yield path, module
