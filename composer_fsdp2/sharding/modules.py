"""Small questions about a tree of modules and its paths."""

from collections.abc import Mapping

from torch import nn

from composer_fsdp2._torch.private_names import is_compiled
from composer_fsdp2.config.sharding import ShardingConfig
from composer_fsdp2.errors import PlanError


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called: containers such as ModuleList have no forward, and so no hooks to gather in."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def is_pretrained(module: nn.Module) -> bool:
    """Whether this is a model of transformers, which is not imported for it."""
    kinds = type(module).__mro__
    return any(cls.__name__ == "PreTrainedModel" and cls.__module__.startswith("transformers.") for cls in kinds)


def outside_compilation(modules: Mapping[str, nn.Module], path: str) -> tuple[str, nn.Module]:
    """The module at ``path``, or what ``torch.compile`` put around it: that calls the module itself, past whatever
    would be put between the two."""
    parent = path.rpartition(".")[0]
    if path and is_compiled(modules[parent]):
        return parent, modules[parent]
    return path, modules[path]


def at_path(model: nn.Module, path: str) -> nn.Module:
    """The module registered at ``path``, seen through checkpointing wrappers (but not through the last one)."""
    module = model
    for name in path.split(".") if path else []:
        module = getattr(module, name)  # wrappers hand on attributes that they have not
    return module


def parameter_at(model: nn.Module, name: str) -> nn.Parameter:
    """By its name before sharding and wrapping."""
    path, _, attribute = name.rpartition(".")
    parameter: nn.Parameter = getattr(at_path(model, path), attribute)
    return parameter


def is_at_or_under(path: str, ancestor: str) -> bool:
    """Whether a module path lies at or below another; everything lies below the model's, ''."""
    return not ancestor or path == ancestor or path.startswith(f"{ancestor}.")


def ancestors_or_self(path: str) -> list[str]:
    """``a.b`` gives ``a.b``, ``a`` and the model's own, ''."""
    parts = path.split(".") if path else []
    return [".".join(parts[:end]) for end in range(len(parts), -1, -1)]


def first_paths(modules: Mapping[str, nn.Module]) -> dict[nn.Module, str]:
    """The path of each module as ``named_modules`` gives it, from those by every path, in registration order."""
    found: dict[nn.Module, str] = {}
    for path, module in modules.items():
        found.setdefault(module, path)
    return found


def ignored_modules(modules: Mapping[str, nn.Module], config: ShardingConfig) -> dict[str, nn.Module]:
    """The ignored modules by path, each given as itself or as its path.

    Args:
        modules: Those of the model, by every path.
    Raises:
        PlanError: one is not part of the model, or the model itself.
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
