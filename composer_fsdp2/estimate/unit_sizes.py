"""Compute the sizes of a unit's parameters and gradients on one rank: sharded and unsharded."""

import math
from dataclasses import dataclass

from torch.distributed.tensor import Shard

from composer_fsdp2.config.mesh import AxisRole, MeshSpec
from composer_fsdp2.estimate.reach import members
from composer_fsdp2.sharding.dtypes import dtype_bytes
from composer_fsdp2.sharding.plan import ParameterSpec, ShardUnit


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSizes:
    """The sizes of one parameter on one rank, in elements.

    Args:
        full: The unsharded parameter. Of a TP-sharded one, this rank's part.
        part: The elements that the rank all-gathers. If each rank all-gathers only its own experts, the mean over
            ranks.
        padded_shard: The local shard with the padding of dim 0 by ``fully_shard``.
        own_shard: The local shard without padding, which is the size of a state tensor of the optimizer.
    """

    name: str
    full: int
    part: int
    padded_shard: int
    own_shard: int
    is_trained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSizes:
    """The sizes and groups of one unit on one rank.

    Args:
        shard_ranks: The ranks over which the unit's parameters are sharded.
        replica_ranks: The ranks that have the same shards; () if the mesh has no replicate axis.
        stays_gathered: Whether the unit is not resharded after forward; always true for a root, as in torch.
        ranks_after_forward: The size of the group over which the unit is sharded between forward and backward, if it is
            resharded.
        param_bytes, reduce_bytes, own_bytes: Bytes per element of unsharded parameters, of reduced gradients, and of
            sharded parameters.
    """

    name: str
    is_root: bool
    parameters: tuple[ParameterSizes, ...]
    shard_ranks: tuple[int, ...]
    replica_ranks: tuple[int, ...]
    stays_gathered: bool
    ranks_after_forward: int
    param_bytes: int
    reduce_bytes: int
    own_bytes: int
    is_cast: bool
    is_offloaded: bool
    forward_prefetch: tuple[str, ...]
    backward_prefetch: tuple[str, ...] | None

    @property
    def num_ranks(self) -> int:
        return len(self.shard_ranks)

    @property
    def shard_elements(self) -> int:
        return sum(each.padded_shard for each in self.parameters)

    @property
    def exchanges(self) -> bool:
        """Whether ranks gather different parts, by an all-to-all (expert parallelism)."""
        return any(each.part < each.full for each in self.parameters)

    def gathered(self, each: ParameterSizes) -> int:
        """The elements that the rank allocates to all-gather a parameter: all padded shards, or the gathered part
        without padding."""
        return each.part if self.exchanges else each.padded_shard * self.num_ranks

    @property
    def gathered_elements(self) -> int:
        return sum(map(self.gathered, self.parameters))


def unit_sizes(unit: ShardUnit, *, rank: int, world_size: int) -> UnitSizes:
    """Return the sizes of a unit on one rank. The unit's mesh must be resolved."""
    shard_ranks = members(unit.mesh, AxisRole.SHARD, rank, world_size)
    place, num_ranks = shard_ranks.index(rank), len(shard_ranks)
    sizes = tuple(_parameter_sizes(spec, unit.mesh, place, num_ranks, rank, world_size) for spec in unit.parameters)
    reshard = unit.reshard_after_forward
    own_dtype = unit.parameters[0].dtype if unit.parameters else "float32"
    param_dtype = unit.mixed_precision.param_dtype or own_dtype
    reduce_dtype = unit.mixed_precision.reduce_dtype or param_dtype
    return UnitSizes(
        name=unit.name,
        is_root=unit.is_root,
        parameters=sizes,
        shard_ranks=shard_ranks,
        replica_ranks=members(unit.mesh, AxisRole.REPLICATE, rank, world_size) if unit.mesh.has_replicas else (),
        stays_gathered=unit.is_root or reshard is False or (reshard == 1 and reshard is not True),
        ranks_after_forward=num_ranks if isinstance(reshard, bool) else reshard,
        param_bytes=dtype_bytes(param_dtype),
        reduce_bytes=dtype_bytes(reduce_dtype),
        own_bytes=dtype_bytes(own_dtype),
        is_cast=param_dtype != own_dtype,
        is_offloaded=unit.cpu_offload and unit.mesh.device_type != "cpu",
        forward_prefetch=unit.forward_prefetch,
        backward_prefetch=unit.backward_prefetch,
    )


def _parameter_sizes(
    spec: ParameterSpec, mesh: MeshSpec, place: int, num_ranks: int, rank: int, world_size: int
) -> ParameterSizes:
    rows, *rest = shape_before_sharding(spec, mesh, rank, world_size)
    row = math.prod(rest)
    padded_rows = -(-rows // num_ranks)
    own_rows = max(0, min(rows - place * padded_rows, padded_rows))
    return ParameterSizes(
        name=spec.name,
        full=rows * row,
        part=rows * row // spec.expert_degree,
        padded_shard=padded_rows * row,
        own_shard=own_rows * row,
        is_trained=spec.is_trained,
    )


def stored_in_full(spec: ParameterSpec) -> ParameterSizes:
    """The sizes of a parameter that every rank stores in full."""
    size = spec.numel
    return ParameterSizes(
        name=spec.name, full=size, part=size, padded_shard=size, own_shard=size, is_trained=spec.is_trained
    )


def shape_before_sharding(spec: ParameterSpec, mesh: MeshSpec, rank: int, world_size: int) -> tuple[int, ...]:
    """Return the shape of a parameter on one rank after TP- or EP-sharding, before FSDP shards it."""
    placement = spec.tensor_placement
    if not isinstance(placement, Shard):
        return spec.shape
    role = AxisRole.EXPERT if mesh.axes_of(AxisRole.EXPERT) else AxisRole.TENSOR
    ranks = members(mesh, role, rank, world_size)
    length = spec.shape[placement.dim]
    piece = -(-length // len(ranks))
    own = max(0, min(length - ranks.index(rank) * piece, piece))
    return (*spec.shape[: placement.dim], own, *spec.shape[placement.dim + 1 :])
