"""Match an optimizer's state in a checkpoint to parameters, never by their positions in the groups alone.

To find out which state an optimizer would create for a parameter, a copy of it executes a step.
"""

import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2.checkpoint.differences import Difference, DifferenceKind, can_cast
from composer_fsdp2.checkpoint.inventory import CheckpointInventory, ObjectRecord, OptimizerContents, TensorRecord
from composer_fsdp2.checkpoint.same_bytes import same_content
from composer_fsdp2.checkpoint.target import ModelTarget


@dataclass(frozen=True, slots=True)
class Expected:
    """The value that the optimizer would create for one key of a parameter's state."""

    shape: tuple[int, ...] | None  # None: unknown
    dtype: torch.dtype | None  # None: no tensor
    kind: type


# By dtype and number of dimensions: the sizes of the probed parameter, and the state that the optimizer created.
Probes: TypeAlias = dict[tuple[torch.dtype, int], tuple[tuple[int, ...], Mapping[str, Any]] | None]
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)


def expected_state(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: nn.Parameter, probes: Probes
) -> dict[str, Expected] | None:
    """The state that the optimizer has for a parameter or would create in its first step; None if that is unknown.

    Args:
        probes: Results for other parameters of the group.
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
    """Execute a step of a copy of the optimizer on a small parameter, with gradients of zero.

    The optimizer and its parameters are not modified. All dimensions have different sizes, so the shape of a state
    shows from which dimensions of the parameter it is made (Adafactor's are (n, 1) and (1, m)).
    """
    if like.dim() > len(_PRIMES):
        return None
    sizes = _PRIMES[: like.dim()]
    device = like.to_local().device if isinstance(like, DTensor) else like.device
    stand_in = nn.Parameter(torch.zeros(sizes, dtype=like.dtype, device=device))
    stand_in.grad = torch.zeros_like(stand_in)
    probe = _bare_copy(optimizer, {**group, "params": [stand_in]})
    step = type(optimizer).step
    step = (
        getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    )  # without the hooks of optimizer steps
    try:
        step(probe)
    except Exception:  # an optimizer whose step needs more than gradients
        return None
    return sizes, probe.state.get(stand_in, {})


def _bare_copy(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> torch.optim.Optimizer:
    """Copy the optimizer with one group, without state and hooks, and without a scheduler's wrappers of its methods."""
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
    """The expected value for a parameter of ``shape``, from the value that was created for one of ``sizes``."""
    if not isinstance(value, torch.Tensor):
        return Expected(None, None, type(value))
    if sizes == shape:
        return Expected(tuple(value.shape), value.dtype, torch.Tensor)
    new_size = {1: 1, **dict(zip(sizes, shape, strict=True))}
    known = all(size in new_size for size in value.shape)
    return Expected(tuple(new_size[size] for size in value.shape) if known else None, value.dtype, torch.Tensor)


# ---------------------------------------------------------------------------------------------------------------------
# Matching


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterState:
    """The state to load for one parameter: tensors to read, and other values.

    Args:
        dtypes: The dtypes of the tensors after loading. They are the optimizer's own, if these are known.
    """

    name: str
    parameter: nn.Parameter
    entries: dict[str, TensorRecord | ObjectRecord]
    dtypes: dict[str, torch.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerPlan:
    """The state and hyperparameters to load into an optimizer.

    Args:
        states: In the order of the optimizer's parameters, excluding those without state in the file.
        groups: Hyperparameters for each of the optimizer's groups, without ``params``.
        without_state: Parameters in the file's groups for which the saving run had no state; they get none.
        kept: Hyperparameters that are missing in the file, and stay unchanged.
    """

    optimizer: torch.optim.Optimizer
    states: tuple[ParameterState, ...]
    groups: tuple[dict[str, Any], ...]
    without_state: frozenset[nn.Parameter]
    kept: tuple[str, ...]


def plan_optimizer(
    inventory: CheckpointInventory,
    contents: OptimizerContents,
    optimizer: torch.optim.Optimizer,
    target: ModelTarget,
    rename: Callable[[str], str],
    ignored: frozenset[str] = frozenset(),
) -> tuple[OptimizerPlan, list[Difference]]:
    """Match the file's state to ``optimizer``, and list all differences.

    Args:
        contents: One of ``inventory.optimizers``.
        rename: Maps a name in the file to the model's.
        ignored: The model's names of parameters whose state was removed from the inventory.
    Raises:
        CheckpointError: param_groups are damaged.

    Does not communicate; every rank gets the same result.
    """
    matching = _Matching(inventory, contents, optimizer, target, rename, ignored)
    matching.match_states()
    matching.match_groups()
    plan = OptimizerPlan(
        optimizer=optimizer,
        states=tuple(matching.states),
        groups=tuple(matching.groups),
        without_state=frozenset(matching.without_state),
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
        self.without_state: list[nn.Parameter] = []
        self.kept: list[str] = []
        self.by_name = self.named(rename)  # the model's name of a parameter -> its key in the file

    def differ(self, kind: DifferenceKind, name: str, found: Any, expected: Any) -> None:
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
                DifferenceKind.GROUPS,
                "keyed by position; the groups' sizes",
                sizes,
                f"{own_sizes} (build the groups as in the run that saved)",
            )
            return {}
        return {self.names[parameter][0]: key for parameter, key in zip(self.parameters, in_groups, strict=True)}

    def key_of(self, parameter: nn.Parameter) -> str | int | None:
        """The parameter's key in the file, under any of its names. A key with state is preferred."""
        keys = [self.by_name[name] for name in self.names.get(parameter, ()) if name in self.by_name]
        with_state = [key for key in keys if key in self.contents.state]
        return next(iter([*with_state, *keys]), None)

    # State

    def match_states(self) -> None:
        names = [name for parameter in self.parameters for name in self.names[parameter]]
        used = {self.by_name[name] for name in names if name in self.by_name}
        unused = [key for key in self.contents.state if key not in used]
        for group in self.optimizer.param_groups:
            probes: Probes = {}
            for parameter in group["params"]:
                template = expected_state(self.optimizer, group, parameter, probes)
                self.match_state(parameter, template, may_be_renamed=bool(unused))
        for key in unused:
            self.differ(DifferenceKind.SURPLUS, f"the state of {key}", "state", "no such parameter in this optimizer")

    def match_state(
        self, parameter: nn.Parameter, template: dict[str, Expected] | None, *, may_be_renamed: bool
    ) -> None:
        """Match one parameter's state.

        Args:
            may_be_renamed: Whether the file has state under names that this optimizer does not have.
        """
        key, name = self.key_of(parameter), self.names[parameter][0]
        entries = self.contents.state.get(key, {}) if key is not None else {}
        if not entries:
            lacks_state = parameter.requires_grad and template != {} and bool(self.contents.state)
            if self.ignored.intersection(self.names[parameter]):
                self.kept.append(f"the state of {name} (ignored)")
            elif key is not None and not may_be_renamed:
                # A parameter in the file without state: optimizers create state at the first gradient.
                self.without_state.append(parameter)
                if lacks_state:
                    self.kept.append(f"the state of {name} (it had no gradient in the run that saved)")
            elif lacks_state:
                self.differ(
                    DifferenceKind.MISSING,
                    f"the state of {name}",
                    "nothing",
                    "state, as other parameters have (if the run that saved did not train it, freeze it here, too)",
                )
            return
        self.check_aliases(parameter, name, entries)
        self.check_entries(name, entries, template)
        if template is not None:
            if not template.keys() <= entries.keys():
                return  # the optimizer could not resume from a partial state
            entries = {key: entries[key] for key in template}
        dtypes = {
            key: (template[key].dtype if template else None) or record.dtype
            for key, record in entries.items()
            if isinstance(record, TensorRecord)
        }
        self.states.append(ParameterState(name=name, parameter=parameter, entries=entries, dtypes=dtypes))

    def check_aliases(
        self, parameter: nn.Parameter, name: str, entries: Mapping[str, TensorRecord | ObjectRecord]
    ) -> None:
        """Check that the state of a shared parameter is equal if the file has it under several of its names."""
        for alias in self.names[parameter]:
            others = self.contents.state.get(self.by_name.get(alias, ""), entries)
            unequal = [
                key
                for key in {**entries, **others}
                if key not in entries or key not in others or same_content(entries[key], others[key]) is False
            ]
            if unequal:
                self.differ(
                    DifferenceKind.TIED,
                    f"{', '.join(unequal)} of {name} = {alias}",
                    "different values",
                    "the same, for one parameter",
                )

    def check_entries(
        self, name: str, entries: Mapping[str, TensorRecord | ObjectRecord], template: dict[str, Expected] | None
    ) -> None:
        """Compare each entry with the value that the optimizer would create, if that is known."""
        if template is None:
            return
        own = ", ".join(template) or "no state"
        for key, record in entries.items():
            wanted = template.get(key)
            if wanted is None:
                self.differ(DifferenceKind.SURPLUS, f"{key} of {name}", "a value", own)
            elif isinstance(record, TensorRecord) and wanted.dtype is not None:
                if wanted.shape not in (None, record.shape):
                    self.differ(DifferenceKind.SHAPE, f"{key} of {name}", record.shape, wanted.shape)
                if record.dtype != wanted.dtype:
                    kind = DifferenceKind.DTYPE if can_cast(record.dtype, wanted.dtype) else DifferenceKind.TYPE
                    self.differ(kind, f"{key} of {name}", record.dtype, wanted.dtype)
            elif isinstance(record, TensorRecord) or wanted.dtype is not None:
                found = "a tensor" if isinstance(record, TensorRecord) else "no tensor"
                self.differ(DifferenceKind.TYPE, f"{key} of {name}", found, wanted.kind.__name__)
        for key in template:
            if key not in entries:
                self.differ(DifferenceKind.MISSING, f"{key} of {name}", "nothing", f"one of {own}")

    # Hyperparameters

    def match_groups(self) -> None:
        """Choose each group's hyperparameters from the file's groups of its parameters, which must agree."""
        place = {key: number for number, group in enumerate(self.file_groups) for key in group.get("params", ())}
        in_file = [_hyperparameters(group) for group in self.file_groups]
        first_groups: dict[int, tuple[int, dict[str, Any]]] = {}  # by the file's group
        for number, group in enumerate(self.optimizer.param_groups):
            own = _hyperparameters(group)
            keys = map(self.key_of, group["params"])
            numbers = list(dict.fromkeys(place[key] for key in keys if key in place))
            if not numbers:
                if in_file and group["params"]:
                    self.differ(
                        DifferenceKind.GROUPS, f"group {number}", "none of its parameters", "hyperparameters for them"
                    )
                self.groups.append(own)
                continue
            first = numbers[0]
            for other in numbers[1:]:
                self.check_joined(number, (first, in_file[first]), (other, in_file[other]))
            self.check_hyperparameters(number, own, in_file[first])
            self.groups.append({**own, **in_file[first]})
            for each in numbers:
                self.check_split(first_groups.setdefault(each, (number, own)), (number, own), each)

    def check_joined(
        self, number: int, first: tuple[int, Mapping[str, Any]], second: tuple[int, Mapping[str, Any]]
    ) -> None:
        """Record a difference if a group of the optimizer combines groups of the file with unequal hyperparameters."""
        if unequal := _unequal(first[1], second[1]):
            self.differ(
                DifferenceKind.GROUPS,
                f"group {number} takes parameters from the file's groups {first[0]} and {second[0]}, which differ in "
                f"{', '.join(unequal)}",
                ", ".join(f"{key} {one!r} and {other!r}" for key, (one, other) in unequal.items()),
                "equal ones, or the same groups as in the run that saved",
            )

    def check_split(
        self, first: tuple[int, Mapping[str, Any]], second: tuple[int, Mapping[str, Any]], place: int
    ) -> None:
        """Record a difference if two groups of the optimizer were one in the file and now have unequal hyperparameters.

        Both would get those of the file's group.
        """
        if unequal := _unequal(first[1], second[1]):
            self.differ(
                DifferenceKind.GROUPS,
                f"groups {first[0]} and {second[0]} take parameters from the file's group {place}",
                "one value for both",
                ", ".join(f"{key} {one!r} and {other!r}" for key, (one, other) in unequal.items()),
            )

    def check_hyperparameters(self, number: int, own: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        for key, value in own.items():
            if key not in found:
                self.kept.append(f"group {number}: {key}={value!r}")
            elif not _can_replace(value, found[key]):
                self.differ(
                    DifferenceKind.TYPE, f"group {number}: {key}", repr(found[key]), f"something like {value!r}"
                )


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _unequal(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The hyperparameters that differ, with both values."""
    pairs = {key: (one.get(key), other.get(key)) for key in sorted({*one, *other})}
    return {key: pair for key, pair in pairs.items() if not _equal(*pair)}


def _equal(a: Any, b: Any) -> bool:
    """Whether two hyperparameters are equal. A tensor in the file was not read yet, so it equals only itself."""
    if isinstance(a, Sequence) and isinstance(b, Sequence) and not isinstance(a, str):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


def _can_replace(own: Any, found: Any) -> bool:
    """Whether a value from the file can replace the optimizer's: both are numbers, flags or sequences."""
    if own is None or found is None:
        return True
    if isinstance(own, bool) or isinstance(found, bool):
        return isinstance(own, bool) and isinstance(found, bool)
    for kind in ((Number, torch.Tensor, TensorRecord), (str,), (list, tuple), (dict,)):
        if isinstance(own, kind):
            return isinstance(found, kind)
    return True
