"""Helpers for module trees and paths."""

from collections.abc import Mapping

from torch import nn

from composer_fsdp2._torch.private_names import is_compiled
from composer_fsdp2.config.sharding import ShardingConfig
from composer_fsdp2.errors import PlanError


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called. Containers such as ModuleList have no forward, and so run no hooks."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def is_pretrained(module: nn.Module) -> bool:
    """Whether this is a transformers model. Does not import transformers."""
    kinds = type(module).__mro__
    return any(cls.__name__ == "PreTrainedModel" and cls.__module__.startswith("transformers.") for cls in kinds)


def outside_compilation(modules: Mapping[str, nn.Module], path: str) -> tuple[str, nn.Module]:
    """The module at ``path``, or its ``torch.compile`` wrapper if it has one.

    The compiled wrapper calls the module directly, so a wrapper between the two would be bypassed.
    """
    parent = path.rpartition(".")[0]
    if path and is_compiled(modules[parent]):
        return parent, modules[parent]
    return path, modules[path]


def at_path(model: nn.Module, path: str) -> nn.Module:
    """The module registered at ``path``. Checkpoint wrappers above it are skipped; its own wrapper is returned."""
    module = model
    for name in path.split(".") if path else []:
        module = getattr(module, name)  # wrappers forward missing attributes to their module
    return module


def parameter_at(model: nn.Module, name: str) -> nn.Parameter:
    """A parameter by its name before sharding and wrapping."""
    path, _, attribute = name.rpartition(".")
    parameter: nn.Parameter = getattr(at_path(model, path), attribute)
    return parameter


def is_at_or_under(path: str, ancestor: str) -> bool:
    """Whether a module path equals ``ancestor`` or is below it. Every path is below the model's, ''."""
    return not ancestor or path == ancestor or path.startswith(f"{ancestor}.")


def ancestors_or_self(path: str) -> list[str]:
    """``a.b`` yields ``a.b``, ``a`` and the model's path ''."""
    parts = path.split(".") if path else []
    return [".".join(parts[:end]) for end in range(len(parts), -1, -1)]


def first_paths(modules: Mapping[str, nn.Module]) -> dict[nn.Module, str]:
    """The path of each module in ``named_modules``, which is the first one in ``modules``.

    Args:
        modules: All modules of the model by every path, in registration order.
    """
    found: dict[nn.Module, str] = {}
    for path, module in modules.items():
        found.setdefault(module, path)
    return found


def ignored_modules(modules: Mapping[str, nn.Module], config: ShardingConfig) -> dict[str, nn.Module]:
    """The ignored modules by path. Each is specified as a module or as a path.

    Args:
        modules: All modules of the model, by every path.
    Raises:
        PlanError: a module is not part of the model, or is the model itself.
    """
    found = {}
    paths = first_paths(modules) if config.ignored_modules else {}
    for number, given in enumerate(config.ignored_modules):
        path = given if isinstance(given, str) else paths.get(given)
        if path is None or path not in modules:
            shown = repr(given) if isinstance(given, str) else type(given).__name__
            raise PlanError(
                f"ignored_modules[{number}] ({shown}) is not part of the model; pass the modules of the model that is "
                "sharded"
            )
        if not path:
            raise PlanError("ignored_modules holds the model itself, so there is nothing to shard")
        found[path] = modules[path]
    return found
