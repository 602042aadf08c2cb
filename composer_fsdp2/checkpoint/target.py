"""What a model wants from a checkpoint: its tensors under all of their names, and this rank's part of each."""

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
    """This rank's shard of a tensor, and the ranks with the same shard.

    Args:
        like: A DTensor or tensor that is laid out so.
    """

    like: torch.Tensor

    @staticmethod
    def of(tensor: torch.Tensor) -> "LocalBox":
        if isinstance(tensor, DTensor):
            return LocalBox(*local_box(tensor), tensor)
        return LocalBox((0,) * tensor.dim(), tuple(tensor.shape), tensor)

    @property
    def replica_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups of ranks with this shard, one for each axis of the mesh along which it is replicated.

        A tensor that is not a DTensor is unsharded on every rank.
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
        """This rank's part as a tensor of the same layout; does not communicate."""
        if not isinstance(self.like, DTensor):
            return local
        return with_local_tensor(self.like, local)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorTarget:
    """One tensor of a model, under every name that it has in ``state_dict()``.

    Args:
        value: As the state dict shows it, which may be a copy: of buffers in the dtype that they were saved in.
        live: What the model computes with.
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
    """Everything in a model's ``state_dict()``, without repetition.

    Args:
        tensors: Parameters and persistent buffers.
        extra: Names of extra state, and the modules that take it (``set_extra_state``).
        leafless: Names of extra state without leaves, which a sharded checkpoint does not store.
        others: Names of entries that a hook on ``state_dict`` added. ``load_state_dict`` itself takes none of them.
        parameters: By every canonical name.
        custom_loading: What ``load_state_dict`` runs beside torch's own code, by the module's canonical path.
        keys: The state dict's own keys, by canonical name.
        versions: Of the modules, as the state dict has them.
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
        """Whether code of the user's may take an entry of ``others``: a module's own, or that of one around it."""
        return any(not path or name.startswith(f"{path}.") for path in self.custom_loading)

    def names(self) -> Iterable[str]:
        for tensor in self.tensors:
            yield from tensor.names
        yield from self.extra
        yield from self.others


def model_target(model: nn.Module) -> ModelTarget:
    """Read the state dict of ``model``, whose entries it can load; call ``reshard`` before. Does not communicate."""
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
    """The model's tensors that a hook on ``state_dict`` shows under other names."""

    def memory(tensor: torch.Tensor) -> tuple[int, torch.Size]:
        return local_tensor(tensor).data_ptr(), tensor.shape

    places = {memory(tensor): tensor for tensor in live.values() if not tensor.is_meta and tensor.numel()}
    tensors = {name: value for name, value in others.items() if isinstance(value, torch.Tensor) and not value.is_meta}
    return {name: places[memory(value)] for name, value in tensors.items() if memory(value) in places}
