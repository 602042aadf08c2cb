"""Staging of a load: tensors that were read into host memory, and are not yet copied into the model."""

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from composer_fsdp2._torch.local_tensors import local_tensor
from composer_fsdp2._torch.private_names import has_custom_load_state_dict, state_dict_of
from composer_fsdp2.checkpoint.inventory import ObjectRecord, TensorRecord
from composer_fsdp2.checkpoint.load.load_plan import LoadPlan
from composer_fsdp2.checkpoint.load.optimizer_state import ParameterState
from composer_fsdp2.checkpoint.read import Reader, bytes_of, materialized
from composer_fsdp2.checkpoint.target import LocalBox, TensorTarget
from composer_fsdp2.checkpoint.trees import fitted
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.sharding.agree import all_gather_object, device_of_group

# Below this many bytes a collective costs more than the read that it saves. Only tensors that are not split: replicas
# that each read a part of a record would count it several times (``check_content``).
_SMALL_BYTES = 1024
# Bytes of one broadcast.
_PIECE_BYTES = 64 << 20


def owners(boxes: Sequence[tuple[LocalBox, int]]) -> list[int | None]:
    """For each box, the replica that reads it, balanced by bytes; None if each replica reads it.

    Args:
        boxes: Each with its element size in bytes; the same on all ranks that share a box.
    """
    loads: dict[object, list[int]] = {}
    chosen: list[int | None] = []
    for box, itemsize in boxes:
        num_bytes = box.numel * itemsize
        if box.num_replicas == 1 or (num_bytes <= _SMALL_BYTES and box.numel == box.like.numel()):
            chosen.append(None)
            continue
        of_replicas = loads.setdefault(box.replica_groups, [0] * box.num_replicas)
        owner = of_replicas.index(min(of_replicas))
        of_replicas[owner] += num_bytes
        chosen.append(owner)
    return chosen


def broadcast_replicas(local: torch.Tensor, box: LocalBox, owner: int) -> None:
    """Broadcast the owner's ``local`` to all replicas. Called on all of them, in the same order.

    Args:
        local: Contiguous, on the device of the groups.
    """
    groups, coordinates = box.replica_groups, list[int]()
    for group in reversed(groups):
        owner, coordinate = divmod(owner, group.size())
        coordinates.insert(0, coordinate)
    for position, group in enumerate(groups):
        # First along the first axis, from the owner; then each of these ranks along the next axis.
        later_axes = zip(groups[position + 1 :], coordinates[position + 1 :], strict=True)
        if local.numel() and all(other.rank() == coordinate for other, coordinate in later_axes):
            source = dist.get_global_rank(group, coordinates[position])
            dist.broadcast(local.view(-1).view(torch.uint8), source, group)  # gloo knows no fp8


@dataclass(slots=True)
class _Staged:
    """This rank's part of one tensor.

    Args:
        value: The tensor to load into: the model's, the optimizer's own, or a new one that ``allocate`` creates.
        owner: The replica that reads the part and broadcasts it; None if each rank reads its own part.
        data: The part in host memory, on a rank that reads it, from ``read`` to ``commit``.
    """

    record: TensorRecord
    box: LocalBox
    value: torch.Tensor | None = None
    owner: int | None = None
    data: torch.Tensor | None = None

    @property
    def is_read_here(self) -> bool:
        """Whether this rank reads the part, instead of another replica."""
        return self.owner is None or self.owner == self.box.replica

    @property
    def local(self) -> torch.Tensor:
        """This rank's memory of ``value``."""
        assert self.value is not None
        return local_tensor(self.value)

    def allocate(self, *, is_staged: bool) -> None:
        """Create ``value`` and, if the part is staged, ``data``: the same memory, if ``value`` is new and in host
        memory.
        """
        is_new = self.value is None
        if self.value is None:
            # On its like's device: with CPU offload, shards on a GPU mesh are on the host.
            self.value = torch.empty_like(self.box.like, dtype=self.record.dtype, memory_format=torch.contiguous_format)
        if is_staged:
            is_shared = is_new and self.local.device.type == "cpu"
            self.data = self.local if is_shared else torch.empty(self.box.sizes, dtype=self.record.dtype)


class Staging:
    """Executes a plan by ``read``, ``share``, ``check_duplicates``, ``run_custom_load`` and ``commit``, in this order.

    Model and optimizer are not modified before ``run_custom_load``, which can be undone. One of the replicas, the
    owner, reads a tensor, and ``commit`` broadcasts it: R replicas of S bytes take host memory of S / R on each rank,
    plus a piece of 64 MiB. ``read`` allocates all memory that ``commit`` needs.

    [Note: the user's code] A module's ``set_extra_state``, and an overridden or hooked ``load_state_dict`` of a model
    or an optimizer, may raise on a single rank. They therefore run first. If one raises on any rank, their changes are
    undone: a model's tensors and extra state are restored, other attributes are not. The state of such a model or
    optimizer is broadcast before, into separate memory on every rank.

    Args:
        strict: Whether an entry that the model's own loading code rejects or ignores is an error.

    Created on all ranks; gathers which of them run such code.
    """

    def __init__(self, plan: LoadPlan, *, strict: bool = True) -> None:
        self.plan, self._strict = plan, strict
        self.tensors = [_staged(planned.record, planned.target) for planned in plan.tensors]
        # The entry of a tied parameter that is loaded, and each other entry of that parameter.
        self._duplicates = [
            (staged, _staged(record, planned.target))
            for planned, staged in zip(plan.tensors, self.tensors, strict=True)
            for record in planned.duplicates
        ]
        self.groups: list[dict[str, Any]] = []
        self.states: list[dict[str, Any]] = []  # tensors as _Staged
        self.extra: dict[str, Any] = {}
        self._others: dict[str, Any] = {}
        self._undo: list[Callable[[], object]] = []  # in the order of the changes
        optimizer = plan.optimizer.optimizer if plan.optimizer else None
        self._runs_own_loading: bool = any(all_gather_object(bool(plan.target.custom_loading)))
        self._has_custom_optimizer_load: bool = any(
            all_gather_object(optimizer is not None and has_custom_load_state_dict(optimizer))
        )
        used = {_address(planned.target.local) for planned in plan.tensors}
        for state in plan.optimizer.states if plan.optimizer else ():
            own = optimizer.state.get(state.parameter, {}) if optimizer else {}
            self.states.append(
                {
                    key: _stage(record, state, own.get(key), used, in_place=not self._has_custom_optimizer_load)
                    for key, record in state.entries.items()
                }
            )
        self._choose_owners()
        self._buffer = torch.empty(0, dtype=torch.uint8)  # a piece that is broadcast

    def _choose_owners(self) -> None:
        tensors = [*self.tensors, *self._states()]
        boxes = [(staged.box, staged.record.dtype.itemsize) for staged in tensors]
        for staged, owner in zip(tensors, owners(boxes), strict=True):
            staged.owner = owner
        for staged, duplicate in self._duplicates:  # read by the same rank, which compares them
            duplicate.owner = staged.owner

    def _states(self) -> list[_Staged]:
        return [value for state in self.states for value in state.values() if isinstance(value, _Staged)]

    def _all_staged(self) -> list[_Staged]:
        """Duplicates too."""
        return [*self.tensors, *(duplicate for _, duplicate in self._duplicates), *self._states()]

    def _custom_load_tensors(self) -> list[_Staged]:
        """The tensors that the user's loading code gets, on all ranks."""
        return [
            *(self.tensors if self._runs_own_loading else ()),
            *(self._states() if self._has_custom_optimizer_load else ()),
        ]

    def records(self) -> list[TensorRecord]:
        """The records that ranks may read in part; the same on all ranks."""
        return [staged.record for staged in self._all_staged()]

    def read(self, reader: Reader) -> None:
        """Read this rank's parts, and allocate all memory that ``commit`` needs. Does not communicate."""
        custom_load = {id(staged) for staged in self._custom_load_tensors()}
        for staged in self._all_staged():
            staged.allocate(is_staged=staged.is_read_here or id(staged) in custom_load)
            if staged.is_read_here:
                assert staged.data is not None
                reader.read(staged.record, staged.box, staged.data)
        sent = [s.box.numel * s.record.dtype.itemsize for s in self._all_staged() if s.owner is not None]
        if sent:
            num_bytes = min(max(sent), _PIECE_BYTES)
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device_of_group())

        def value_of(record: TensorRecord | ObjectRecord) -> Any:
            return materialized(record if isinstance(record, TensorRecord) else record.value(), reader)

        # Each rank reads small values itself.
        self.extra = {name: value_of(record) for name, (_, record) in self.plan.extra.items()}
        self._others = {name: value_of(record) for name, record in self.plan.others.items()}
        self.groups = [
            materialized(group, reader) for group in (self.plan.optimizer.groups if self.plan.optimizer else ())
        ]
        for state in self.states:
            state.update({key: value_of(value) for key, value in state.items() if not isinstance(value, _Staged)})

    def share(self) -> None:
        """Broadcast the arguments of the user's loading code. Called on all ranks."""
        for staged in self._custom_load_tensors():
            if staged.owner is not None:
                assert staged.data is not None
                self._fill(staged.data, staged)
                staged.owner = None

    @property
    def has_duplicates(self) -> bool:
        """Whether the file has a tied parameter under several names; the same on all ranks."""
        return bool(self._duplicates)

    def check_duplicates(self) -> None:
        """Compare the file's values of tied parameters that it has under several names. Does not communicate.

        Raises:
            CheckpointError: they are not equal; names them.
        """
        unequal = [
            f"{staged.record.name} = {duplicate.record.name}"
            for staged, duplicate in self._duplicates
            if staged.data is not None
            and duplicate.data is not None
            and bytes_of(staged.data) != bytes_of(duplicate.data)
        ]
        self._duplicates = []
        if unequal:
            raise CheckpointError(
                f"{self.plan.inventory.path}: the model shares one parameter under several names, for which the file "
                f"holds different values; nothing was changed: {', '.join(unequal)}"
            )

    @torch.no_grad()
    def run_custom_load(self) -> None:
        """Run the user's code that loads extra state of modules and the state of the model and the optimizer.

        Does not communicate, but a module's code may, through DTensors. See [Note: the user's code].

        Raises:
            CheckpointError: the code of a module or of the optimizer raised; names it.
        """
        if self.plan.target.custom_loading:
            self._load_model()
        else:
            self._set_extra_state()
        if self.plan.optimizer is None or not self._has_custom_optimizer_load:
            return
        optimizer = self.plan.optimizer.optimizer
        self._undo.append(_make_restore(optimizer))
        try:
            self._load_optimizer(optimizer, self.plan.optimizer.states)
        except Exception as error:
            raise CheckpointError(
                f"{self.plan.inventory.path}: load_state_dict of {type(optimizer).__name__}, or a hook of it, raised "
                f"{type(error).__name__}: {error}; nothing was changed"
            ) from error

    @torch.no_grad()
    def undo_custom_load(self) -> None:
        """Undo the changes of ``run_custom_load``, including one that raised."""
        for undo in reversed(self._undo):
            undo()

    def _load_model(self) -> None:
        """Call ``load_state_dict`` of the model as torch does, with this rank's shards as DTensors."""
        model, target = self.plan.model, self.plan.target
        values = {name: self._extra_of(name) for name in self.plan.extra} | self._others
        for tensor in (*model.parameters(), *model.buffers()):
            self._undo.append(
                functools.partial(_restore_tensor, tensor, local_tensor(tensor).detach().to("cpu", copy=True))
            )
        for planned, staged in zip(self.plan.tensors, self.tensors, strict=True):
            assert staged.data is not None
            value = staged.box.rebuilt(staged.data.to(planned.target.local.device))
            values.update(dict.fromkeys(planned.target.names, value))
        state = state_dict_of({target.keys[name]: value for name, value in values.items()}, target.versions)
        try:
            result = model.load_state_dict(state, strict=False)
            # Entries that the file does not have raised earlier, or stay unchanged.
            missing = [key for key in getattr(result, "missing_keys", ()) if key in state]
            unexpected = list(getattr(result, "unexpected_keys", ()))
            if self._strict and missing + unexpected:
                raise CheckpointError(f"it left {', '.join(missing + unexpected)}")
        except Exception as error:
            raise CheckpointError(
                f"{self.plan.inventory.path}: load_state_dict of {type(model).__name__} with the loading code of "
                f"{self.plan.own_loading} raised {type(error).__name__}: {error}; nothing was changed"
            ) from error

    def _set_extra_state(self) -> None:
        for name, (module, _) in self.plan.extra.items():
            try:
                module.set_extra_state(self._extra_of(name))
            except Exception as error:
                raise CheckpointError(
                    f"{self.plan.inventory.path}: {name}: {type(module).__name__} refused its extra state "
                    f"({type(error).__name__}: {error}); nothing was changed"
                ) from error

    def _extra_of(self, name: str) -> Any:
        """The argument of a module's ``set_extra_state``. Records the current state for ``undo_custom_load``."""
        module, record = self.plan.extra[name]
        current = copy.deepcopy(module.get_extra_state())
        self._undo.append(functools.partial(module.set_extra_state, current))
        is_flattened = isinstance(record, ObjectRecord) and record.is_flattened
        return fitted(self.extra[name], current) if is_flattened else self.extra[name]

    @torch.no_grad()
    def commit(self) -> None:
        """Copy the staged tensors into model and optimizer. Called on all ranks; broadcasts replicas piece by piece.

        The optimizer's own code may raise on one rank. It runs after all broadcasts.
        """
        if not self._has_custom_optimizer_load:
            self.states = [{key: self._result(value) for key, value in state.items()} for state in self.states]
        for staged in self.tensors:
            if not self.plan.target.custom_loading:  # else that code did
                self._fill(staged.local, staged)
            staged.data = None
        if self.plan.optimizer is not None and not self._has_custom_optimizer_load:
            self._load_optimizer(self.plan.optimizer.optimizer, self.plan.optimizer.states)

    def _fill(self, destination: torch.Tensor, staged: _Staged) -> None:
        """Copy this rank's part of a tensor to its destination, from the owner's memory."""
        data, itemsize = staged.data, staged.record.dtype.itemsize
        is_in_place = data is not None and (data.data_ptr(), data.device) == (
            destination.data_ptr(),
            destination.device,
        )
        if staged.owner is None:
            assert data is not None
            if not is_in_place:
                destination.copy_(data)
            return
        for piece in staged.box.pieces(max(1, _PIECE_BYTES // itemsize)):
            inside = piece.slices(staged.box.offsets)
            buffer = self._buffer[: piece.numel * itemsize].view(staged.record.dtype).view(piece.sizes)
            if data is not None:
                buffer.copy_(data[inside])
            broadcast_replicas(buffer, staged.box, staged.owner)
            if not (is_in_place and staged.is_read_here):
                destination[inside].copy_(buffer)

    def _result(self, value: Any) -> Any:
        """A loaded value of an optimizer's state."""
        if not isinstance(value, _Staged):
            return value
        self._fill(value.local, value)
        value.data = None
        return value.value

    def _load_optimizer(self, optimizer: torch.optim.Optimizer, states: Sequence[ParameterState]) -> None:
        number_of = {
            parameter: number
            for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"])
        }
        assert self.plan.optimizer is not None
        # Values that the file does not have are unchanged.
        unchanged = number_of.keys() - self.plan.optimizer.without_state
        state = {parameter: dict(own) for parameter, own in optimizer.state.items() if parameter in unchanged}
        dtypes = {
            parameter: {key: value.dtype for key, value in own.items() if isinstance(value, torch.Tensor)}
            for parameter, own in state.items()
        }
        for planned, entries in zip(states, self.states, strict=True):
            state[planned.parameter] = {key: self._result(value) for key, value in entries.items()}
            dtypes[planned.parameter] = planned.dtypes
        groups, first = [], 0
        for new, group in zip(self.groups, optimizer.param_groups, strict=True):
            numbers = list(range(first, first + len(group["params"])))
            groups.append({**new, "params": numbers})
            first += len(numbers)
        self.states.clear()
        # The optimizer's own, which subclasses and hooks extend; tensors of the right dtype and device are not copied.
        by_number = {number_of[parameter]: dict(entries) for parameter, entries in state.items()}
        optimizer.load_state_dict({"state": by_number, "param_groups": groups})
        # Except that torch casts a parameter's state to the parameter's dtype, and breaks text.
        for parameter, entries in state.items():
            loaded = optimizer.state[parameter]
            for key, dtype in dtypes[parameter].items():
                if isinstance(loaded.get(key), torch.Tensor) and loaded[key].dtype != dtype:
                    loaded[key] = entries[key].to(device=loaded[key].device, dtype=dtype)
            loaded.update({key: value for key, value in entries.items() if isinstance(value, str)})


def _restore_tensor(tensor: torch.Tensor, before: torch.Tensor) -> None:
    local_tensor(tensor).copy_(before)  # not the previous tensor: FSDP2's load hook replaces a padded one


def _make_restore(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Make a function that restores an optimizer's attributes, and the current contents of its state and groups."""
    attributes = dict(vars(optimizer))
    state = {parameter: copy.copy(entries) for parameter, entries in optimizer.state.items()}
    groups = [dict(group) for group in optimizer.param_groups]

    def restore() -> None:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(values)

    return restore


def _staged(record: TensorRecord, target: TensorTarget) -> _Staged:
    return _Staged(record, LocalBox.of(target.value), target.live)


def _stage(record: Any, state: ParameterState, own: Any, used: set[int], *, in_place: bool) -> Any:
    """Stage a value of a parameter's state, and choose the memory that it is loaded into.

    Args:
        own: The optimizer's current value.
        used: Addresses of memory that other tensors are loaded into. Own tensors that are loaded into are added.
        in_place: Whether ``own`` may be overwritten.
    """
    if not isinstance(record, TensorRecord):
        return record
    like = _layout_of(record, state.parameter, own)
    staged = _Staged(record, LocalBox.of(like))
    is_own = in_place and like is own and type(own) in (torch.Tensor, DTensor) and own.dtype == record.dtype
    if is_own and local_tensor(own).is_contiguous() and _address(local_tensor(own)) not in used:
        used.add(_address(local_tensor(own)))
        staged.value = own
    return staged


def _layout_of(record: TensorRecord, parameter: nn.Parameter, own: Any) -> torch.Tensor:
    if record.shape and isinstance(own, torch.Tensor) and record.shape == tuple(own.shape):
        return own
    if record.shape and record.shape == tuple(parameter.shape):
        return parameter.detach()
    if record.shape and isinstance(parameter, DTensor):  # a statistic, such as Adafactor's row means
        full = torch.empty(record.shape, dtype=record.dtype, device=parameter.to_local().device)
        replicated = [Replicate()] * parameter.device_mesh.ndim
        return DTensor.from_local(full, parameter.device_mesh, replicated, run_check=False)
    return torch.empty(record.shape, dtype=record.dtype)  # a step count


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
