"""The tensors of a model that a checkpoint is loaded into: all of their names, and this rank's shard of each."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2._torch.local_tensors import local_tensor, with_local_tensor
from composer_fsdp2._torch.private_names import custom_loading, local_box, versions_in
from composer_fsdp2.checkpoint.boxes import Box
from composer_fsdp2.checkpoint.names import canonical
from composer_fsdp2.checkpoint.trees import is_leafless
from composer_fsdp2.sharding.placements import replicate_axes
from composer_fsdp2.sharding.ties import tie_groups

_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True, slots=True)
class LocalBox(Box):
    """This rank's shard of a tensor, and the ranks that have the same shard.

    Args:
        like: A tensor with the same mesh and placements, or a plain tensor.
    """

    like: torch.Tensor

    @staticmethod
    def of(tensor: torch.Tensor) -> "LocalBox":
        if isinstance(tensor, DTensor):
            return LocalBox(*local_box(tensor), tensor)
        return LocalBox((0,) * tensor.dim(), tuple(tensor.shape), tensor)

    @property
    def replica_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The process groups of the ranks with this shard, one for each axis of the mesh along which it is replicated.

        A plain tensor is replicated on every rank.
        """
        if not isinstance(self.like, DTensor):
            return (dist.group.WORLD,) if dist.is_initialized() and dist.group.WORLD is not None else ()
        return tuple(self.like.device_mesh.get_group(axis) for axis in replicate_axes(self.like))

    @property
    def num_replicas(self) -> int:
        return math.prod(group.size() for group in self.replica_groups)

    @property
    def replica(self) -> int:
        """This rank's number among the replicas."""
        number = 0
        for group in self.replica_groups:
            number = number * group.size() + group.rank()
        return number

    def rebuilt(self, local: torch.Tensor) -> torch.Tensor:
        """Make a DTensor (or a plain tensor) from this rank's shard. Does not communicate."""
        if not isinstance(self.like, DTensor):
            return local
        return with_local_tensor(self.like, local)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorTarget:
    """One tensor of a model, under every name that it has in ``state_dict()``.

    Args:
        value: The tensor in the state dict. It may be a copy, as for buffers that are saved in another dtype.
        live: The tensor with which the model computes.
    """

    names: tuple[str, ...]
    value: torch.Tensor
    live: torch.Tensor

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def local(self) -> torch.Tensor:
        """This rank's memory of it."""
        return local_tensor(self.live)

    def __str__(self) -> str:
        return f"{self.value.dtype} {self.shape}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTarget:
    """The entries of a model's ``state_dict()``, each once.

    Args:
        tensors: Parameters and persistent buffers.
        extra: The modules that load extra state (``set_extra_state``), by its name.
        leafless: The names of extra state without leaves, which a sharded checkpoint does not store.
        others: The names of entries that a ``state_dict`` hook added. ``load_state_dict`` does not load them itself.
        parameters: By every canonical name.
        custom_loading: The functions besides torch's own that ``load_state_dict`` runs, by the module's canonical path.
        keys: The state dict's own keys, by canonical name.
        versions: The versions of the modules in the state dict.
    """

    tensors: tuple[TensorTarget, ...]
    extra: dict[str, nn.Module]
    leafless: frozenset[str]
    others: frozenset[str]
    parameters: dict[str, nn.Parameter]
    custom_loading: dict[str, str]
    keys: dict[str, str]
    versions: Any

    def is_loadable(self, name: str) -> bool:
        """Whether an entry of ``others`` is below a module with its own loading code, which may load it."""
        return any(not path or name.startswith(f"{path}.") for path in self.custom_loading)

    def names(self) -> Iterable[str]:
        for tensor in self.tensors:
            yield from tensor.names
        yield from self.extra
        yield from self.others


def model_target(model: nn.Module) -> ModelTarget:
    """Read the names and tensors of ``model`` from its state dict. Call ``reshard`` before. Does not communicate."""
    state: dict[str, Any] = model.state_dict()
    tied = {canonical(name): tuple(map(canonical, names)) for names in tie_groups(model) for name in names}
    modules = {
        canonical(f"{path}." if path else ""): module for path, module in model.named_modules(remove_duplicate=False)
    }
    parameters = {canonical(name): value for name, value in model.named_parameters(remove_duplicate=False)}
    live = {canonical(name): value for name, value in model.named_buffers(remove_duplicate=False)} | parameters
    values = {canonical(key): value for key, value in state.items()}
    extra = {
        name: modules[name.removesuffix(_EXTRA_STATE)] for name in values if name.rpartition(".")[2] == _EXTRA_STATE
    }
    others = frozenset(values.keys() - live.keys() - extra.keys())
    renamed = _renamed({name: values[name] for name in others}, live) if others else {}
    live |= renamed
    groups: dict[tuple[str, ...], torch.Tensor] = {}
    for name, value in values.items():
        if name in live:
            names = tuple(alias for alias in tied.get(name, (name,)) if alias in values)
            groups.setdefault(names, value)
    return ModelTarget(
        tensors=tuple(TensorTarget(names=names, value=value, live=live[names[0]]) for names, value in groups.items()),
        extra=extra,
        leafless=frozenset(name for name in extra if is_leafless(values[name])),
        others=others - renamed.keys(),
        parameters=parameters,
        custom_loading={canonical(f"{path}.").removesuffix("."): code for path, code in custom_loading(model).items()},
        keys={canonical(key): key for key in state},
        versions=versions_in(state),
    )


def _renamed(others: Mapping[str, Any], live: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model's tensors that a ``state_dict`` hook has renamed."""

    def memory(tensor: torch.Tensor) -> tuple[int, torch.Size]:
        return local_tensor(tensor).data_ptr(), tensor.shape

    places = {memory(tensor): tensor for tensor in live.values() if not tensor.is_meta and tensor.numel()}
    tensors = {name: value for name, value in others.items() if isinstance(value, torch.Tensor) and not value.is_meta}
    return {name: places[memory(value)] for name, value in tensors.items() if memory(value) in places}
