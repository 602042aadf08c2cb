"""Materialize a unit's parameters and buffers on its device, immediately before it is sharded.

[Note: initialization] FSDP1 initialized meta parameters unit by unit, bottom-up, on full tensors. For each module that
directly owns a meta tensor it called the direct child's ``param_init_fn(module)``, else the module's
``reset_parameters()`` (composer/distributed/dist_strategy.py, 0.32.1). We do the same on every rank with rank 0's RNG
state, so that all ranks compute equal values. If rank 0 has values and another rank does not, initializers do not run;
rank 0's values are broadcast.

[Note: initialized in full] A parameter that a script has already TP-sharded is initialized as a full tensor and then
sharded. If its local tensors were initialized, all TP ranks would have equal shards, because they use rank 0's RNG
state.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from composer_fsdp2._torch.local_tensors import with_local_tensor
from composer_fsdp2._torch.private_names import own_buffers, own_parameters
from composer_fsdp2.errors import PlanError
from composer_fsdp2.sharding.agree import all_gather_object
from composer_fsdp2.sharding.meshes import UnitMesh
from composer_fsdp2.sharding.modules import first_paths
from composer_fsdp2.sharding.random_states import random_states, set_random_states
from composer_fsdp2.sharding.ties import join

# Maps a module and its path to a function that initializes the module's own tensors; None if there is no such function.
Initializers: TypeAlias = Callable[[nn.Module, str], Callable[[], object] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Initialization:
    """How parameters get their values.

    Args:
        initialize: Run the initializers.
        broadcast: Broadcast the values, from the first rank of a unit's mesh.
        from_rank_zero: Broadcast from rank 0 instead, because it is the only rank with values.
    """

    initialize: bool
    broadcast: bool
    from_rank_zero: bool = False


def decide_initialization(modules: Iterable[nn.Module], sync_module_states: bool | None) -> Initialization:
    """Determine which ranks have real tensors in ``modules``. Called on all ranks; all-gathers one flag per rank.

    Raises:
        PlanError: only some ranks have values and ``sync_module_states`` is False (FSDP1's message), or rank 0 has
            none.
    """
    on_meta: list[bool] = all_gather_object(any(map(_owns_meta, modules)))
    if not any(on_meta):
        return Initialization(initialize=False, broadcast=bool(sync_module_states))
    if all(on_meta):
        return Initialization(initialize=True, broadcast=bool(sync_module_states))
    if sync_module_states is False:
        raise PlanError(
            "Detected mixed initialization where some ranks have model on cpu or gpu and some ranks are on meta "
            f"(ranks {[rank for rank, is_meta in enumerate(on_meta) if is_meta]}). Set sync_module_states to true, or "
            "initialise every rank the same way"
        )
    if on_meta[0]:
        raise PlanError(
            "rank 0's model is on the meta device while other ranks have values, and sync_module_states sends rank "
            "0's; build the model with values on rank 0, or on the meta device on every rank"
        )
    return Initialization(initialize=False, broadcast=True, from_rank_zero=True)


@contextlib.contextmanager
def rank_zero_rng() -> Iterator[None]:
    """Use rank 0's RNG states within the block, then restore this rank's. Called on all ranks; broadcasts the states.

    Covers all generators in use, since an initializer may use any of them.
    """
    own = random_states()
    sent = [own]
    dist.broadcast_object_list(sent)
    set_random_states(sent[0])
    try:
        yield
    finally:
        set_random_states(own)


class Materializer:
    """Materializes units one at a time, bottom-up.

    Args:
        modules: All modules of the model, by every path. Only ``materialize_unit`` modifies them.
        device: The device of the materialized tensors.
        initialization: Whether to run initializers and to broadcast.
        initializers: Return the initializer of a module.
        ignored: Parameters that are not modified.
        in_place: Parameters that may move to another device, but remain the same objects.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        device: torch.device,
        initialization: Initialization,
        initializers: Initializers,
        ignored: Collection[nn.Parameter] = (),
        in_place: Collection[nn.Parameter] = (),
    ) -> None:
        self.device = device
        self.initialization = initialization
        self.initializers = initializers
        self.ignored = ignored
        self.in_place = in_place
        self.initialized: set[nn.Module] = set()
        self.path_of = first_paths(modules)
        self.registrations: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in self.path_of:
            for name, parameter in own_parameters(module):
                self.registrations.setdefault(parameter, []).append((module, name))

    def check(self, inside: Collection[nn.Module]) -> None:
        """Raise if a meta tensor would never get a value. Only reads.

        Args:
            inside: The modules whose tensors belong to units.
        Raises:
            PlanError: names the module without ``param_init_fn`` and ``reset_parameters``, or the parameter or
                buffer outside of all units.
        """
        for module, path in self.path_of.items():
            if self.initialization.from_rank_zero:
                self._refuse_tensor_parallel(module, path)
            if not _owns_meta(module):
                continue
            outside = [
                f"{kind} {join(path, name)}"
                for kind, own in (("parameter", own_parameters(module)), ("buffer", own_buffers(module)))
                for name, tensor in own
                if tensor.is_meta and (module not in inside or tensor in self.ignored)
            ]
            if outside:
                raise PlanError(
                    f"{outside[0]} is on the meta device, and no unit holds it, so it would never get a value; build "
                    "that part of the model on a real device"
                )
            if self.initialization.initialize and self._initializer(module) is None:
                raise PlanError(
                    f"module {path!r} ({type(module).__name__}) has parameters or buffers on the meta device, but "
                    "it has no reset_parameters(), and the direct child above it no param_init_fn(module); add one "
                    "of them, or build the model on the CPU"
                )

    def _refuse_tensor_parallel(self, module: nn.Module, path: str) -> None:
        for name, parameter in own_parameters(module):
            if isinstance(parameter, DTensor):
                raise PlanError(
                    f"parameter {join(path, name)} is split by tensor parallelism already, and rank 0, the only one "
                    "with values, has its own part of it alone; give prepare_fully_shard the model before "
                    "parallelize_module, and the layer plan as tensor_parallel"
                )

    def materialize_unit(self, modules: Sequence[nn.Module], mesh: UnitMesh) -> None:
        """Materialize, move and (if requested) broadcast the tensors that the ``modules`` of one unit own.

        Called on all ranks in the same order. Broadcasts the unit's tensors over its mesh (TP-sharded ones over its
        data-parallel axes), or from rank 0, depending on ``initialization``.
        """
        self.materialize(modules)
        for tensor in _own_tensors(modules):
            if tensor not in self.ignored:
                self._move(tensor)
        if self.initialization.broadcast:
            groups = [None] if self.initialization.from_rank_zero else _groups_of(mesh.whole)
            of_split = groups if mesh.fsdp is mesh.whole else _groups_of(mesh.fsdp)
            for tensor in _own_tensors(modules):
                if tensor not in self.ignored:
                    _broadcast(tensor, of_split if isinstance(tensor, DTensor) else groups)

    def materialize(self, modules: Iterable[nn.Module]) -> None:
        """Materialize the meta tensors that the modules own, in this order. Does not communicate."""
        for module in modules:
            if _owns_meta(module):
                self._initialize(module)

    def equal_on_all_ranks(self, modules: Iterable[nn.Module]) -> set[nn.Module]:
        """The modules whose parameters are equal on all ranks: initialized with rank 0's RNG state, or broadcast."""
        return set(modules) if self.initialization.broadcast else self.initialized.intersection(modules)

    def _move(self, tensor: torch.Tensor) -> None:
        """Move the tensor to the device, with the contiguous layout that ``fully_shard`` requires.

        A parameter that will be sharded is replaced by a new one. The optimizer and others reference the old
        parameter until all units are sharded, and would otherwise keep the moved tensor alive.
        """
        if isinstance(tensor, DTensor):
            self._move_dtensor(tensor)
            return
        value = tensor.data.to(self.device).contiguous()
        if value.data_ptr() == tensor.data_ptr() and value.device == tensor.device:
            return
        if isinstance(tensor, nn.Parameter) and tensor in self.registrations and tensor not in self.in_place:
            self._replace(tensor, value)
        else:
            tensor.data = value

    def _move_dtensor(self, tensor: DTensor) -> None:
        local = tensor.to_local()
        if local.device != self.device and isinstance(tensor, nn.Parameter):
            self._replace(tensor, with_local_tensor(tensor, local.detach().to(self.device)))

    def _replace(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Replace the parameter under each of its registrations, to preserve ties."""
        real = nn.Parameter(value, parameter.requires_grad)
        real.__dict__.update(parameter.__dict__)
        for owner, attribute in self.registrations[parameter]:
            setattr(owner, attribute, real)

    def _initialize(self, module: nn.Module) -> None:
        named = {parameter: name for name, parameter in own_parameters(module) if parameter.is_meta}
        initialize = self._initializer(module) if self.initialization.initialize else None
        if isinstance(initialize, MetaInitializer):
            self._initialize_meta(initialize, module, named)
            return
        for parameter in named:
            if isinstance(parameter, DTensor):  # [Note: initialized in full]
                self._replace(parameter, torch.empty(parameter.shape, dtype=parameter.dtype, device=self.device))
            else:
                self._replace(parameter, torch.empty_like(parameter, device=self.device))
        for name, buffer in own_buffers(module):
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device=self.device))
        if self.initialization.initialize:
            assert initialize is not None, "check() ran before"
            initialize()
            # tensors that were not on the meta device may differ between ranks
            if len(named) == len(own_parameters(module)):
                self.initialized.add(module)
        for parameter, name in named.items():
            if isinstance(parameter, DTensor):  # [Note: initialized in full]
                full: torch.Tensor = getattr(module, name).data
                mesh, placements = parameter.device_mesh, parameter.placements
                self._replace(parameter, distribute_tensor(full, mesh, placements, src_data_rank=None))

    def _initialize_meta(
        self, initialize: "MetaInitializer", module: nn.Module, named: dict[nn.Parameter, str]
    ) -> None:
        initialize()
        for name, tensor in (*own_parameters(module), *own_buffers(module)):
            if tensor.is_meta:
                raise PlanError(
                    f"param_init_fn left {join(self.path_of[module], name)} on the meta device; call "
                    "module.to_empty(device=..., recurse=False) in it first"
                )
        for parameter, name in named.items():
            self._replace(parameter, getattr(module, name).data)
        if len(named) == len(own_parameters(module)):
            self.initialized.add(module)

    def _initializer(self, module: nn.Module) -> Callable[[], object] | None:
        return self.initializers(module, self.path_of[module])


@dataclass(frozen=True, slots=True)
class MetaInitializer:
    """An initializer that materializes its module itself: FSDP1 called ``param_init_fn`` with meta tensors."""

    function: Callable[[], object]

    def __call__(self) -> None:
        self.function()


def _owns_meta(module: nn.Module) -> bool:
    tensors = (*own_parameters(module), *own_buffers(module))
    return any(tensor.is_meta for _, tensor in tensors) if tensors else False


def breadth_first(roots: Sequence[nn.Module], nested: Collection[nn.Module]) -> list[nn.Module]:
    """The modules of one unit, without those in ``nested`` units, in the order in which FSDP1 initialized them."""
    waiting, seen = deque(roots), set(roots)
    found = []
    while waiting:
        module = waiting.popleft()
        found.append(module)
        for child in module.children():
            if child not in seen and child not in nested:
                seen.add(child)
                waiting.append(child)
    return found


def _own_tensors(modules: Sequence[nn.Module]) -> list[torch.Tensor]:
    """Every parameter and buffer that the modules themselves register, once."""
    found: dict[torch.Tensor, None] = {}
    for module in modules:
        found.update((tensor, None) for _, tensor in (*own_parameters(module), *own_buffers(module)))
    return list(found)


def _groups_of(mesh: DeviceMesh) -> list[dist.ProcessGroup | None]:
    """Groups over which successive broadcasts reach the whole mesh from its first rank; None: the default group."""
    if mesh.size() == dist.get_world_size():
        return [None]
    return [mesh.get_group(axis) for axis in reversed(range(mesh.ndim))]


def _broadcast(tensor: torch.Tensor, groups: Sequence[dist.ProcessGroup | None]) -> None:
    """Broadcast from the first rank of each group in turn, as bytes: gloo supports fewer dtypes than torch."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.numel():
        for group in groups:
            dist.broadcast(local.detach().view(-1).view(torch.uint8), group=group, group_src=0)
