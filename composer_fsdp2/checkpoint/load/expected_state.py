"""What state an optimizer makes for a parameter, found out by a step of a copy of it."""

import types
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class Expected:
    """What the optimizer would make for one key of a parameter's state."""

    shape: tuple[int, ...] | None  # None: unknown
    dtype: torch.dtype | None  # None: no tensor
    kind: type


# By dtype and number of dimensions: the sizes of the parameter that was tried, and the state that it got.
Probes: TypeAlias = dict[tuple[torch.dtype, int], tuple[tuple[int, ...], Mapping[str, Any]] | None]
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)


def expected_state(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: nn.Parameter, probes: Probes
) -> dict[str, Expected] | None:
    """The state that the optimizer has for a parameter or makes in its first step; None if that cannot be found out.

    Args:
        probes: What was found out for other parameters of the group.
    """
    own = optimizer.state.get(parameter)
    if own:
        return {key: _expectation(value, tuple(parameter.shape), tuple(parameter.shape)) for key, value in own.items()}
    kind = (parameter.dtype, parameter.dim())
    if kind not in probes:
        probes[kind] = _probe(optimizer, group, parameter)
    probed = probes[kind]
    if probed is None:
        return None
    sizes, state = probed
    return {key: _expectation(value, sizes, tuple(parameter.shape)) for key, value in state.items()}


def _probe(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: nn.Parameter
) -> tuple[tuple[int, ...], Mapping[str, Any]] | None:
    """Step with a copy of the optimizer on a small parameter of other sizes, which no gradient moves.

    The optimizer and its parameters are not touched. Sizes differ from each other, so that a state's shape shows which
    of the parameter's it has (Adafactor's are (n, 1) and (1, m)).
    """
    if like.dim() > len(_PRIMES):
        return None
    sizes = _PRIMES[: like.dim()]
    device = like.to_local().device if isinstance(like, DTensor) else like.device
    stand_in = nn.Parameter(torch.zeros(sizes, dtype=like.dtype, device=device))
    stand_in.grad = torch.zeros_like(stand_in)
    probe = _bare_copy(optimizer, {**group, "params": [stand_in]})
    step = type(optimizer).step
    step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step  # not the hooks of all steps
    try:
        step(probe)
    except Exception:  # an optimizer that needs more than a gradient to step
        return None
    return sizes, probe.state.get(stand_in, {})


def _bare_copy(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> torch.optim.Optimizer:
    """A copy with one group, without state, hooks, and the methods that a scheduler put on it to count steps."""
    methods = types.MethodType | types.FunctionType
    copy: torch.optim.Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            copy.__dict__[name] = OrderedDict()
        elif not isinstance(value, methods) and name != "step":
            copy.__dict__[name] = value
    copy.state = defaultdict(dict)
    copy.param_groups = [group]
    return copy


def _expectation(value: Any, sizes: tuple[int, ...], shape: tuple[int, ...]) -> Expected:
    """What a parameter of ``shape`` would get, from the value that was made for one of ``sizes``."""
    if not isinstance(value, torch.Tensor):
        return Expected(None, None, type(value))
    if sizes == shape:
        return Expected(tuple(value.shape), value.dtype, torch.Tensor)
    new_size = {1: 1, **dict(zip(sizes, shape, strict=True))}
    known = all(size in new_size for size in value.shape)
    return Expected(tuple(new_size[size] for size in value.shape) if known else None, value.dtype, torch.Tensor)
