"""The parameters of a model with all their names, including those that modules share."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from composer_fsdp2._torch.private_names import own_parameters


@dataclass(frozen=True, slots=True)
class ParameterUse:
    """One parameter with all its registrations. The first name is that of ``named_parameters``."""

    parameter: nn.Parameter
    owners: tuple[tuple[str, str], ...]  # (module path, attribute)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(join(path, attribute) for path, attribute in self.owners)

    @property
    def name(self) -> str:
        return self.names[0]


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def parameter_uses(model: nn.Module) -> list[ParameterUse]:
    """Every parameter of ``model`` once, in registration order, with all its owners."""
    owners: dict[nn.Parameter, list[tuple[str, str]]] = {}
    for path, module in _all_modules(model):
        for attribute, parameter in own_parameters(module):
            owners.setdefault(parameter, []).append((path, attribute))
    return [ParameterUse(parameter, tuple(places)) for parameter, places in owners.items()]


def tie_groups(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The names of each parameter with several names."""
    return tuple(use.names for use in parameter_uses(model) if len(use.owners) > 1)


def _all_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module under every path. A module that is registered twice appears twice."""
    return model.named_modules(remove_duplicate=False)
