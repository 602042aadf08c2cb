"""A device mesh as a value: axes with a name, a role, and a size or groups of ranks."""

import enum
import math
import os
from dataclasses import dataclass, field, replace

from composer_fsdp2.config.value import Value
from composer_fsdp2.errors import ConfigError, GroupSizeError

# Composer's names for the axes of its mesh (composer/core/state.py, 0.32.1), for code that looks up an axis by its
# name. The key of an axis's degree is its name plus "_degree"; GROUPS_KEY sets groups instead.
REPLICATE_AXIS = "data_parallel_replicate"
SHARD_AXIS = "data_parallel_shard"
TENSOR_AXIS = "tensor_parallel"
# From LLM Foundry (llmfoundry/models/utils/config_moe_args.py, 0.22.0).
EXPERT_AXIS = "expert_parallel"
GROUPS_KEY = "process_group"


class AxisRole(enum.Enum):
    """The parallelism along a mesh axis: replicas, shards, tensor, context or expert parallelism.

    Example:
        >>> [axis.role.name for axis in MeshSpec.of_degrees(replicate=2).axes]
        ['REPLICATE', 'SHARD']
    """

    REPLICATE = "replicate"
    SHARD = "shard"
    TENSOR = "tensor"
    CONTEXT = "context"
    EXPERT = "expert"


DATA_PARALLEL = (AxisRole.REPLICATE, AxisRole.SHARD)


class GroupRule(enum.Enum):
    """How ranks are divided into groups; the values are Composer's."""

    CONSECUTIVE = "set"
    STRIDED = "mod"
    GIVEN = "given"
    NODE = "node"
    ACROSS_NODES = "local_rank_across_nodes"

    @property
    def on_machine(self) -> "GroupRule | None":
        """For a rule by nodes, return the same rule by number of ranks (CONSECUTIVE or STRIDED); None for any other
        rule."""
        return {GroupRule.NODE: GroupRule.CONSECUTIVE, GroupRule.ACROSS_NODES: GroupRule.STRIDED}.get(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroups(Value):
    """The groups of ranks along one mesh axis, from FSDP1's ``process_group``.

    ``number`` is Composer's K: ``setK`` makes groups of K consecutive ranks, and ``modK`` makes K groups of every K-th
    rank. ``NODE`` and ``ACROSS_NODES`` are the same two rules with K = ranks per node. The launcher sets ranks per
    node, so it is unknown until the mesh is resolved.

    Under ``GIVEN`` each rank knows only its own group, ``ranks``; the groups of other ranks are gathered when the mesh
    is created. JSON omits ``ranks``, because it must be equal on all ranks.
    """

    rule: GroupRule
    number: int = 0
    ranks: tuple[int, ...] = field(default=(), metadata={"json": False})

    def __post_init__(self) -> None:
        if self.rule is GroupRule.GIVEN:
            if not self.ranks or min(self.ranks) < 0 or len(set(self.ranks)) < len(self.ranks):
                raise ConfigError(f"{list(self.ranks)}, which must be a list of different ranks, from 0 on")
        elif self.number < 1 and self.rule.on_machine is None:
            raise ConfigError(f"{self}, which does not divide the ranks; give a positive number")

    def on_this_machine(self) -> "RankGroups":
        """Return the groups with ``number`` set from LOCAL_WORLD_SIZE, or unchanged if the rule does not depend on
        nodes.

        Raises:
            ConfigError: LOCAL_WORLD_SIZE is not set, because no launcher started the script.
        """
        if self.rule.on_machine is None:
            return self
        text = os.environ.get("LOCAL_WORLD_SIZE", "")
        if not text.isdecimal():
            raise ConfigError(
                f"fsdp_config.{GROUPS_KEY} is {self.rule.value!r}, which needs to know how many ranks a node has: "
                "start the script with `composer` or torchrun, which set LOCAL_WORLD_SIZE, or set setK or modK",
                keys=(GROUPS_KEY,),
            )
        return RankGroups(rule=self.rule.on_machine, number=int(text))

    def check(self, world_size: int) -> None:
        """Check that ``world_size`` ranks can be divided into these groups.

        Raises:
            ConfigError: names the numbers that fit, or the rank that does not exist.
        """
        if self.rule is GroupRule.GIVEN:
            if max(self.ranks) >= world_size:
                text = f"{GROUPS_KEY} names rank {max(self.ranks)}, but the world size is {world_size}"
                raise ConfigError(text, keys=(GROUPS_KEY,))
        elif world_size % self.number:
            raise GroupSizeError(
                f"world size {world_size} is not a multiple of {GROUPS_KEY} {self}; use "
                f"{divisors_text(world_size, self.rule.value)}",
                keys=(GROUPS_KEY,),
            )

    def size(self, world_size: int) -> int:
        """The number of ranks in one group."""
        return {
            GroupRule.CONSECUTIVE: self.number,
            GroupRule.STRIDED: world_size // max(self.number, 1),
            GroupRule.GIVEN: len(self.ranks),
        }[self.rule]

    def members(self, rank: int, world_size: int) -> tuple[int, ...]:
        """The ranks of ``rank``'s group, in ascending order."""
        if self.rule is GroupRule.GIVEN:
            return tuple(sorted(self.ranks))
        if self.rule is GroupRule.CONSECUTIVE:
            first = rank // self.number * self.number
            return tuple(range(first, first + self.number))
        return tuple(range(rank % self.number, world_size, self.number))

    def __str__(self) -> str:
        if self.rule is GroupRule.GIVEN:
            return "given by each rank"
        return self.rule.value if self.rule.on_machine else f"{self.rule.value}{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis(Value):
    """One axis of a mesh.

    Args:
        size: The number of ranks along the axis. -1 is replaced by the world size divided by the other sizes. It
            remains -1 if each rank passed its own process group, because these groups may differ in size.
        groups: The groups of ranks along the axis; None if the mesh contains all ranks in order.

    Example:
        >>> MeshAxis(name="data_parallel_shard", role=AxisRole.SHARD, size=8).num_ranks
        8
    """

    name: str
    role: AxisRole
    size: int = -1
    groups: RankGroups | None = None

    def __post_init__(self) -> None:
        if self.size != -1 and self.size < 1:
            raise ConfigError(
                f"{self.key} is {self.size}; give a positive number, or -1 for the rest of the world size",
                keys=(self.key,),
            )

    @property
    def key(self) -> str:
        """The key that sets the axis's size."""
        return f"{self.name}_degree"

    @property
    def is_given(self) -> bool:
        """Whether each rank specifies its own group."""
        return self.groups is not None and self.groups.rule is GroupRule.GIVEN

    def resolve_groups(self, world_size: int) -> "MeshAxis":
        """Return the axis with the size of its groups for this world size.

        An axis without groups is returned unchanged.
        """
        if self.groups is None:
            return self
        groups = self.groups.on_this_machine()
        groups.check(world_size)
        return self if self.is_given else replace(self, groups=groups, size=groups.size(world_size))

    @property
    def num_ranks(self) -> int:
        """The number of ranks along the axis, -1 if unknown.

        If each rank passed its own process group, the size of this rank's group.
        """
        return len(self.groups.ranks) if self.groups is not None and self.is_given else self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSpec(Value):
    """The mesh over which parameters are sharded and replicated, and layers TP-sharded.

    Axes are listed outermost first.

    Without groups, the mesh contains all ranks in order, and the size of one axis may be -1. With groups, every axis
    has groups. Each rank's mesh then contains only its own group, and different groups do not communicate.

    Example:
        >>> MeshSpec.of_degrees(replicate=2).resolve(8).shape
        (2, 4)
    """

    axes: tuple[MeshAxis, ...] = (MeshAxis(name=SHARD_AXIS, role=AxisRole.SHARD),)
    device_type: str = "cpu"

    def __post_init__(self) -> None:
        keys = tuple(axis.key for axis in self.axes if axis.size == -1)
        if len(keys) > 1 and not self.is_grouped:
            raise ConfigError(f"{' and '.join(keys)} are both -1; only one can be left open", keys=keys)

    @classmethod
    def of_degrees(
        cls, shard: int = -1, replicate: int | None = None, *, tensor: int = 1, device_type: str = "cpu"
    ) -> "MeshSpec":
        """Return a mesh of all ranks with ``replicate`` replicas (None: no replicate axis), each sharded over ``shard``
        ranks.

        ``tensor`` > 1 adds an innermost axis for tensor parallelism, of ``tensor`` consecutive ranks.
        """
        replicas = () if replicate is None else (_replicate(replicate),)
        split = () if tensor == 1 else (MeshAxis(name=TENSOR_AXIS, role=AxisRole.TENSOR, size=tensor),)
        return cls(axes=(*replicas, _shard(shard), *split), device_type=device_type)

    @classmethod
    def of_experts(cls, degree: int, *, device_type: str = "cpu") -> "MeshSpec":
        """Return a mesh of all ranks with an innermost expert-parallel axis of ``degree`` consecutive ranks and a shard
        axis over the rest.
        """
        split = MeshAxis(name=EXPERT_AXIS, role=AxisRole.EXPERT, size=degree)
        return cls(axes=(_shard(-1), split), device_type=device_type)

    @classmethod
    def of_groups(
        cls, shard: RankGroups, replicate: RankGroups | None = None, *, device_type: str = "cpu"
    ) -> "MeshSpec":
        """Return a mesh for process groups: a shard axis, and a replicate axis if ``replicate`` is given."""
        replicas = () if replicate is None else (_replicate(-1, replicate),)
        return cls(axes=(*replicas, _shard(-1, shard)), device_type=device_type)

    def axes_of(self, role: AxisRole) -> tuple[int, ...]:
        """The indices of the axes with this role."""
        return tuple(number for number, axis in enumerate(self.axes) if axis.role is role)

    def degree(self, role: AxisRole) -> int:
        """The product of the sizes of all axes with this role. 1 without such an axis, -1 if a size is unknown."""
        sizes = [self.axes[number].num_ranks for number in self.axes_of(role)]
        return -1 if -1 in sizes else math.prod(sizes)

    @property
    def shard_degree(self) -> int:
        return self.degree(AxisRole.SHARD)

    @property
    def known_shard_degree(self) -> int:
        """The number of ranks in a shard group, or -1 if it depends on the unknown world size.

        Groups of K consecutive ranks (``setK``) have K ranks at any world size.
        """
        groups = [self.axes[number].groups for number in self.axes_of(AxisRole.SHARD)]
        sizes = (each.number for each in groups if each is not None and each.rule is GroupRule.CONSECUTIVE)
        return next(sizes, self.shard_degree)

    @property
    def replicate_degree(self) -> int:
        return self.degree(AxisRole.REPLICATE)

    @property
    def tensor_degree(self) -> int:
        return self.degree(AxisRole.TENSOR)

    @property
    def expert_degree(self) -> int:
        return self.degree(AxisRole.EXPERT)

    @property
    def split_degree(self) -> int:
        """The number of ranks over which a parameter is TP- or EP-sharded before FSDP shards it.

        Experts are never TP-sharded.
        """
        return self.expert_degree if self.axes_of(AxisRole.EXPERT) else self.tensor_degree

    @property
    def data_parallel(self) -> "MeshSpec":
        """The mesh for ``fully_shard``: the shard and replicate axes."""
        if all(axis.role in DATA_PARALLEL for axis in self.axes):
            return self
        return replace(self, axes=tuple(axis for axis in self.axes if axis.role in DATA_PARALLEL))

    @property
    def has_replicas(self) -> bool:
        """Whether the mesh has a replicate axis, even of size 1."""
        return bool(self.axes_of(AxisRole.REPLICATE))

    @property
    def groups(self) -> tuple[RankGroups, ...]:
        """The groups of each axis; empty if the mesh contains all ranks."""
        return tuple(axis.groups for axis in self.axes if axis.groups is not None)

    @property
    def is_grouped(self) -> bool:
        return bool(self.groups)

    @property
    def is_resolved(self) -> bool:
        return -1 not in self.shape

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.num_ranks for axis in self.axes)

    @property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    @property
    def size(self) -> int:
        """The number of ranks in the mesh; negative if the size of an axis is unknown."""
        return math.prod(self.shape)

    def without_shards(self) -> "MeshSpec":
        """Return the mesh for NO_SHARD: one replicate axis, and a shard axis of size 1, so each rank stores full
        parameters.

        Raises:
            ConfigError: the mesh has a pair of groups (shard, replicate), and no single group to average gradients
                over.
        """
        first, *more = (axis for axis in self.axes if axis.role in DATA_PARALLEL)
        if more and self.is_grouped:
            raise ConfigError("a pair of groups has no common group to average gradients in; give one")
        sizes = [axis.size for axis in (first, *more)]
        replicas = _replicate(-1 if -1 in sizes else math.prod(sizes), first.groups)
        alone = _shard(1, first.groups and RankGroups(rule=GroupRule.CONSECUTIVE, number=1))
        place, others = self.axes.index(first), [axis for axis in self.axes if axis.role not in DATA_PARALLEL]
        return replace(self, axes=(*others[:place], replicas, alone, *others[place:]))

    def resolve(self, world_size: int) -> "MeshSpec":
        """Return the mesh for ``world_size`` ranks: without -1, and with groups by node resolved (LOCAL_WORLD_SIZE).

        Raises:
            ConfigError: the degrees or groups do not fit ``world_size``; names values that fit.
        """
        return self._resolve_groups(world_size) if self.is_grouped else self._resolve_degrees(world_size)

    def _resolve_groups(self, world_size: int) -> "MeshSpec":
        axes = tuple(axis.resolve_groups(world_size) for axis in self.axes)
        resolved = replace(self, axes=axes)
        if max(resolved.shape) == world_size and not any(axis.is_given for axis in axes):  # a single group of all ranks
            return replace(self, axes=tuple(replace(axis, groups=None) for axis in axes))
        return resolved

    def _resolve_degrees(self, world_size: int) -> "MeshSpec":
        given = math.prod(size for size in self.shape if size != -1)
        closed = {axis.key: axis.size for axis in self.axes if axis.size != -1}
        text, keys = " x ".join(f"{key} {size}" for key, size in closed.items()), tuple(closed)
        if self.is_resolved and given != world_size:
            raise ConfigError(
                f"{text} makes {given} ranks, but the world size is {world_size}; leave one degree at -1, or use "
                f"{divisors_text(world_size)}",
                keys=keys,
            )
        if world_size % given:
            text = f"world size {world_size} is not a multiple of {text}; use {divisors_text(world_size)}"
            raise ConfigError(text, keys=keys)
        rest = world_size // given
        return replace(self, axes=tuple(replace(axis, size=rest) if axis.size == -1 else axis for axis in self.axes))

    def __str__(self) -> str:
        return f"{self.device_type} mesh, {self.text}"

    @property
    def text(self) -> str:
        """The axes and groups, without the device type."""
        groups = f" (ranks: {', '.join(map(str, self.groups))})" if self.is_grouped else ""
        return " x ".join(f"{name} {size}" for name, size in zip(self.axis_names, self.shape, strict=True)) + groups


def _replicate(size: int, groups: RankGroups | None = None) -> MeshAxis:
    return MeshAxis(name=REPLICATE_AXIS, role=AxisRole.REPLICATE, size=size, groups=groups)


def _shard(size: int, groups: RankGroups | None = None) -> MeshAxis:
    return MeshAxis(name=SHARD_AXIS, role=AxisRole.SHARD, size=size, groups=groups)


def divisors_text(number: int, prefix: str = "") -> str:
    """List the divisors of a number as alternatives: ``1, 2 or 4``."""
    if number > 2**16:  # larger than any cluster; listing the divisors would be slow
        return f"{prefix} with a divisor of {number}".strip()
    *others, last = (f"{prefix}{divisor}" for divisor in range(1, number + 1) if number % divisor == 0)
    return f"{', '.join(others)} or {last}" if others else last
