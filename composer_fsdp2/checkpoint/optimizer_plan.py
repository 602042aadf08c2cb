"""An optimizer's state from a checkpoint: matched by parameter, never by position in a list of groups alone."""

import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2.checkpoint.differences import Difference, Kind
from composer_fsdp2.checkpoint.inventory import CheckpointInventory, ObjectRecord, OptimizerContents, TensorRecord
from composer_fsdp2.checkpoint.target import ModelTarget

__all__ = ["OptimizerPlan", "ParameterState", "plan_optimizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterState:
    """What one parameter's state will be: tensors to read, and values."""

    name: str
    parameter: nn.Parameter
    entries: dict[str, TensorRecord | ObjectRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerPlan:
    """An optimizer's state and hyperparameters to be.

    Args:
        states: In the order of the optimizer's parameters; those without state in the file are left out.
        groups: Hyperparameters for each of the optimizer's groups, without ``params``.
        kept: Hyperparameters that the file does not have; the optimizer keeps its own.
    """

    optimizer: torch.optim.Optimizer
    states: tuple[ParameterState, ...]
    groups: tuple[dict[str, Any], ...]
    kept: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Expected:
    """What the optimizer would make for one key of a parameter's state."""

    like_parameter: bool
    dtype: torch.dtype | None  # None: no tensor
    kind: type


def plan_optimizer(
    inventory: CheckpointInventory,
    contents: OptimizerContents,
    optimizer: torch.optim.Optimizer,
    target: ModelTarget,
    rename: Callable[[str], str],
    ignored: frozenset[str] = frozenset(),
) -> tuple[OptimizerPlan, list[Difference]]:
    """Match the file's state to ``optimizer``, and name everything that does not fit.

    Args:
        contents: One of ``inventory.optimizers``.
        rename: From a name in the file to the model's.
        ignored: The model's names of parameters whose state was taken out.
    Raises:
        CheckpointError: param_groups are damaged.
    Does not communicate; every rank comes to the same result.
    """
    matching = _Matching(inventory, contents, optimizer, target, rename, ignored)
    matching.match_states()
    matching.match_groups()
    plan = OptimizerPlan(
        optimizer=optimizer,
        states=tuple(matching.states),
        groups=tuple(matching.groups),
        kept=tuple(dict.fromkeys(matching.kept)),
    )
    return plan, matching.differences


class _Matching:
    """One optimizer against one in a file."""

    def __init__(
        self,
        inventory: CheckpointInventory,
        contents: OptimizerContents,
        optimizer: torch.optim.Optimizer,
        target: ModelTarget,
        rename: Callable[[str], str],
        ignored: frozenset[str],
    ) -> None:
        self.contents, self.optimizer, self.ignored = contents, optimizer, ignored
        self.names: dict[nn.Parameter, tuple[str, ...]] = {}
        for name, parameter in target.parameters.items():
            self.names[parameter] = (*self.names.get(parameter, ()), name)
        self.file_groups = inventory.groups(contents.name)
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.differences: list[Difference] = []
        self.states: list[ParameterState] = []
        self.groups: list[dict[str, Any]] = []
        self.kept: list[str] = []
        self.by_name = self.named(rename)  # the model's name of a parameter -> its key in the file

    def differ(self, kind: Kind, name: str, found: Any, expected: Any) -> None:
        self.differences.append(Difference(kind, f"optimizer {self.contents.name}: {name}", str(found), str(expected)))

    def named(self, rename: Callable[[str], str]) -> dict[str, str | int]:
        in_groups = [key for group in self.file_groups for key in group.get("params", ())]
        keys: list[str | int] = list(dict.fromkeys([*in_groups, *self.contents.state]))
        if not any(isinstance(key, int) for key in keys):
            return {rename(str(key)): key for key in keys}
        # torch.optim's own state dict numbers parameters through all groups, in the order of the groups.
        sizes = [len(group.get("params", ())) for group in self.file_groups]
        own_sizes = [len(group["params"]) for group in self.optimizer.param_groups]
        if sizes != own_sizes:
            self.differ(
                Kind.GROUPS,
                "keyed by position; the groups' sizes",
                sizes,
                f"{own_sizes} (build the groups as in the run that saved)",
            )
            return {}
        return {self.names[parameter][0]: key for parameter, key in zip(self.parameters, in_groups, strict=True)}

    def key_of(self, parameter: nn.Parameter) -> str | int | None:
        """The parameter's key in the file, under any of its names; one that holds state is preferred."""
        keys = [self.by_name[name] for name in self.names.get(parameter, ()) if name in self.by_name]
        with_state = [key for key in keys if key in self.contents.state]
        return next(iter([*with_state, *keys]), None)

    # State

    def match_states(self) -> None:
        expected = [_expected_state(self.optimizer, group) for group in self.optimizer.param_groups]
        used: set[str | int] = set()
        for group, template in zip(self.optimizer.param_groups, expected, strict=True):
            for parameter in group["params"]:
                key = self.key_of(parameter)
                name = self.names[parameter][0]
                if key is not None:
                    used.update(self.by_name[alias] for alias in self.names[parameter] if alias in self.by_name)
                entries = self.contents.state.get(key, {}) if key is not None else {}
                if entries:
                    self.check_entries(name, parameter, entries, template)
                    self.states.append(ParameterState(name=name, parameter=parameter, entries=entries))
                elif self.ignored.intersection(self.names[parameter]):
                    self.kept.append(f"the state of {name} (ignored)")
                elif parameter.requires_grad and template != {} and self.contents.state:
                    self.differ(Kind.MISSING, f"the state of {name}", "nothing", "state, as other parameters have")
        for key in self.contents.state:
            if key not in used:
                self.differ(Kind.SURPLUS, f"the state of {key}", "state", "no such parameter in this optimizer")

    def check_entries(
        self,
        name: str,
        parameter: nn.Parameter,
        entries: Mapping[str, TensorRecord | ObjectRecord],
        template: dict[str, _Expected] | None,
    ) -> None:
        for key, record in entries.items():
            wanted = (template or {}).get(key)
            is_tensor = isinstance(record, TensorRecord)
            if template is not None and wanted is None:
                self.differ(Kind.SURPLUS, f"{key} of {name}", "a value", f"{', '.join(template) or 'no state'}")
            elif wanted is None:
                continue  # the optimizer's own state is unknown before its first step
            elif (wanted.dtype is not None) != is_tensor:
                self.differ(
                    Kind.TYPE, f"{key} of {name}", "a tensor" if is_tensor else "no tensor", wanted.kind.__name__
                )
            elif isinstance(record, TensorRecord):
                shape = tuple(parameter.shape) if wanted.like_parameter else ()
                if record.shape != shape:
                    self.differ(Kind.SHAPE, f"{key} of {name}", record.shape, shape)
                if record.dtype != wanted.dtype:
                    self.differ(Kind.DTYPE, f"{key} of {name}", record.dtype, wanted.dtype)
        for key in template or {}:
            if key not in entries:
                self.differ(Kind.MISSING, f"{key} of {name}", "nothing", f"one of {', '.join(template or {})}")

    # Hyperparameters

    def match_groups(self) -> None:
        """Each group's hyperparameters from the file's groups of its parameters; they must agree."""
        place = {key: number for number, group in enumerate(self.file_groups) for key in group.get("params", ())}
        for number, group in enumerate(self.optimizer.param_groups):
            keys = {parameter: self.key_of(parameter) for parameter in group["params"]}
            numbers = dict.fromkeys(place[key] for key in keys.values() if key in place)
            own = {key: value for key, value in group.items() if key != "params"}
            if not numbers:
                if self.file_groups:
                    self.differ(Kind.GROUPS, f"group {number}", "none of its parameters", "hyperparameters for them")
                self.groups.append(own)
                continue
            found = [{k: v for k, v in self.file_groups[n].items() if k != "params"} for n in numbers]
            for other, from_file in zip(list(numbers)[1:], found[1:], strict=True):
                unlike = sorted(k for k in {*found[0], *from_file} if not _equal(found[0].get(k), from_file.get(k)))
                if unlike:
                    first = next(iter(numbers))
                    self.differ(
                        Kind.GROUPS,
                        f"group {number} takes parameters from the file's groups {first} and {other}, which differ in "
                        f"{', '.join(unlike)}",
                        ", ".join(f"{k} {found[0].get(k)!r} and {from_file.get(k)!r}" for k in unlike),
                        "equal ones, or the same groups as in the run that saved",
                    )
            self.check_hyperparameters(number, own, found[0])
            self.groups.append({**own, **found[0]})

    def check_hyperparameters(self, number: int, own: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        for key, value in own.items():
            if key not in found:
                self.kept.append(f"group {number}: {key}={value!r}")
            elif not _alike(value, found[key]):
                self.differ(Kind.TYPE, f"group {number}: {key}", repr(found[key]), f"something like {value!r}")


def _equal(a: Any, b: Any) -> bool:
    """Two hyperparameters; a tensor in the file was not read yet, so it equals itself only."""
    if isinstance(a, Sequence) and isinstance(b, Sequence) and not isinstance(a, str):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


def _alike(own: Any, found: Any) -> bool:
    """Whether a value from the file may stand for one of the optimizer's: both numbers, both flags, both sequences."""
    if own is None or found is None:
        return True
    if isinstance(own, bool) or isinstance(found, bool):
        return isinstance(own, bool) and isinstance(found, bool)
    for kind in ((Number, torch.Tensor, TensorRecord), (str,), (list, tuple), (dict,)):
        if isinstance(own, kind):
            return isinstance(found, kind)
    return True


def _expected_state(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, _Expected] | None:
    """The state that the optimizer makes in its first step, by key; None if that cannot be found out.

    Where it has state already, that. Else a copy of the optimizer steps on a parameter of two elements, which no
    gradient moves; the optimizer and its parameters are not touched.
    """
    for parameter in group["params"]:
        if optimizer.state.get(parameter):
            return {key: _expectation(value, parameter.shape) for key, value in optimizer.state[parameter].items()}
    if not group["params"]:
        return None
    like = group["params"][0]
    device = like.to_local().device if isinstance(like, DTensor) else like.device
    stand_in = nn.Parameter(torch.zeros(2, dtype=like.dtype, device=device))
    stand_in.grad = torch.zeros_like(stand_in)
    probe = object.__new__(type(optimizer))
    probe.__dict__.update(
        {k: v for k, v in vars(optimizer).items() if not isinstance(v, types.MethodType | types.FunctionType)}
    )
    probe.__dict__.update({k: OrderedDict() for k, v in vars(optimizer).items() if k.endswith("_hooks")})
    probe.__dict__.pop("step", None)  # a scheduler's, which counts
    probe.state = defaultdict(dict)
    probe.param_groups = [{**group, "params": [stand_in]}]
    try:
        type(optimizer).step(probe)
    except Exception:  # an optimizer that needs more than a gradient to step
        return None
    state: Mapping[str, Any] = probe.state.get(stand_in, {})
    return {key: _expectation(value, stand_in.shape) for key, value in state.items()}


def _expectation(value: Any, shape: torch.Size) -> _Expected:
    if not isinstance(value, torch.Tensor):
        return _Expected(False, None, type(value))
    return _Expected(value.dim() > 0 and value.shape == shape, value.dtype, torch.Tensor)
