"""Look up the classes of a model's modules."""

from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from composer_fsdp2.config.text import did_you_mean
from composer_fsdp2.errors import PlanError


def classes_named(
    model: nn.Module, names: Sequence[str], *, key: str, otherwise: Sequence[str] = ()
) -> tuple[type[nn.Module], ...]:
    """The classes with these names among the modules of ``model``. Instances of subclasses match too.

    Args:
        names: The class names. Empty for ``auto``: the classes that the model names itself, or ``otherwise`` if it
            names none.
        key: The configuration key, for error messages.
    Raises:
        PlanError: no module has such a class, or the model names none; lists the model's classes.

    Only reads.
    """
    of_model: dict[str, list[type[nn.Module]]] = {}
    for module in model.modules():
        of_model.setdefault(type(module).__name__, []).append(type(module))
    known = ", ".join(sorted(of_model))
    if not names:
        own = set(own_names(model))  # sets in transformers 5, in a different order in each process
        names = [name for name in of_model if name in own] or otherwise
        if not names:
            raise PlanError(
                f"{key} is auto, and {type(model).__name__} names no classes of its own "
                f"(_no_split_modules); list them; it has {known}"
            )
    unknown = [name for name in names if name not in of_model]
    if unknown:
        raise PlanError("\n".join(_unknown(name, key, model, known) for name in unknown))
    return tuple(dict.fromkeys(cls for name in names for cls in of_model[name]))


def own_names(model: nn.Module) -> Iterator[str]:
    """The classes in transformers' ``_no_split_modules``: the layers of a model, and those of the models it contains.

    Some of these names belong to other releases.
    """
    for module in model.modules():
        names = getattr(type(module), "_no_split_modules", None) or getattr(module, "_no_split_modules", None)
        if isinstance(names, str):
            yield names
        elif isinstance(names, Iterable):
            yield from map(str, names)


def _unknown(name: str, key: str, model: nn.Module, known: str) -> str:
    near = did_you_mean(name, known.split(", "))
    return f"{key}: no module of {type(model).__name__} is a {name}{near}; it has {known}"
