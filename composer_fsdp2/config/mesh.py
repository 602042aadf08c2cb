"""A device mesh as a value: its axes, each with a name, a role, and a size or groups of ranks."""

import enum
import math
import os
from dataclasses import dataclass, field, replace

from composer_fsdp2.config.value import Value
from composer_fsdp2.errors import ConfigError, GroupSizeError

# The names that Composer gives to the axes of its mesh (composer/core/state.py, 0.32.1), kept so that code which
# looks an axis up by name finds it. A degree's key is the axis's name and "_degree"; the other key gives groups.
REPLICATE_AXIS = "data_parallel_replicate"
SHARD_AXIS = "data_parallel_shard"
TENSOR_AXIS = "tensor_parallel"
# LLM Foundry's (llmfoundry/models/utils/config_moe_args.py, 0.22.0).
EXPERT_AXIS = "expert_parallel"
GROUPS_KEY = "process_group"


class AxisRole(enum.Enum):
    """What ranks along an axis of a mesh have of a parameter, a batch or a layer.

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
    """How the ranks are divided into groups; the values are Composer's words."""

    CONSECUTIVE = "set"
    STRIDED = "mod"
    GIVEN = "given"
    NODE = "node"
    ACROSS_NODES = "local_rank_across_nodes"

    @property
    def on_machine(self) -> "GroupRule | None":
        """The rule that this one is where the number of ranks of a node is known; None if no node decides it."""
        return {GroupRule.NODE: GroupRule.CONSECUTIVE, GroupRule.ACROSS_NODES: GroupRule.STRIDED}.get(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroups(Value):
    """Along one axis of a mesh, which ranks belong together where not all do: FSDP1's ``process_group``.

    ``number`` is Composer's K: ``setK`` are groups of K consecutive ranks, ``modK`` the K groups of every K-th rank.
    ``NODE`` and ``ACROSS_NODES`` are these two with as many ranks as a node has, which a launcher sets where it runs:
    they stay open until the mesh is resolved.
    Under ``GIVEN`` each rank knows its own group only, ``ranks``; those of the others are gathered when the mesh is
    made, so JSON, which is alike on all ranks, has none.
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
        """The groups with the number of ranks that a node of this machine has, where the rule leaves it open.

        Raises:
            ConfigError: no launcher has set LOCAL_WORLD_SIZE.
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
        """Raise if a world of this size cannot be divided so.

        Raises:
            ConfigError: names the numbers that would do, or the rank that does not exist.
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
        """How many ranks one group has."""
        return {
            GroupRule.CONSECUTIVE: self.number,
            GroupRule.STRIDED: world_size // max(self.number, 1),
            GroupRule.GIVEN: len(self.ranks),
        }[self.rule]

    def members(self, rank: int, world_size: int) -> tuple[int, ...]:
        """The ranks of the group that ``rank`` belongs to, in ascending order."""
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
        size: How many ranks lie along it; -1: what the world size leaves. Of groups that each rank gives for itself
            it stays -1, because ranks may have groups of different sizes.
        groups: Which ranks belong together along it, where the mesh is not the one of all ranks in order.

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
        """The key that says its size."""
        return f"{self.name}_degree"

    @property
    def is_given(self) -> bool:
        """Whether each rank gives its own group."""
        return self.groups is not None and self.groups.rule is GroupRule.GIVEN

    def resolve_groups(self, world_size: int) -> "MeshAxis":
        """The axis with the size that its groups have in a world of this size; as it is without groups."""
        if self.groups is None:
            return self
        groups = self.groups.on_this_machine()
        groups.check(world_size)
        return self if self.is_given else replace(self, groups=groups, size=groups.size(world_size))

    @property
    def num_ranks(self) -> int:
        """How many ranks lie along it, of this rank's group if each gives its own; -1 if that is open."""
        return len(self.groups.ranks) if self.groups is not None and self.is_given else self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSpec(Value):
    """Over which ranks parameters are sharded and replicated, and later split by layers: the axes, outermost first.

    Without groups the mesh holds all ranks in order, and the size of one axis may be open. With groups every axis has
    them, every rank has a mesh of its own group, and nothing passes between groups.

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
        """All ranks: ``replicate`` groups (None: no such axis) of ``shard`` ranks each.

        With ``tensor`` above 1 each of these stands for so many consecutive ranks, which split layers between them.
        """
        replicas = () if replicate is None else (_replicate(replicate),)
        split = () if tensor == 1 else (MeshAxis(name=TENSOR_AXIS, role=AxisRole.TENSOR, size=tensor),)
        return cls(axes=(*replicas, _shard(shard), *split), device_type=device_type)

    @classmethod
    def of_experts(cls, degree: int, *, device_type: str = "cpu") -> "MeshSpec":
        """All ranks: each ``degree`` consecutive ones split experts between them, which are sharded over the others."""
        split = MeshAxis(name=EXPERT_AXIS, role=AxisRole.EXPERT, size=degree)
        return cls(axes=(_shard(-1), split), device_type=device_type)

    @classmethod
    def of_groups(
        cls, shard: RankGroups, replicate: RankGroups | None = None, *, device_type: str = "cpu"
    ) -> "MeshSpec":
        """One mesh for each group of ``shard``; a 2-D one, if ``replicate`` says which ranks hold the same shards."""
        replicas = () if replicate is None else (_replicate(-1, replicate),)
        return cls(axes=(*replicas, _shard(-1, shard)), device_type=device_type)

    def axes_of(self, role: AxisRole) -> tuple[int, ...]:
        """The numbers of the axes with this role."""
        return tuple(number for number, axis in enumerate(self.axes) if axis.role is role)

    def degree(self, role: AxisRole) -> int:
        """Over how many ranks the axes of this role go together: 1 without any, -1 while one is open."""
        sizes = [self.axes[number].num_ranks for number in self.axes_of(role)]
        return -1 if -1 in sizes else math.prod(sizes)

    @property
    def shard_degree(self) -> int:
        return self.degree(AxisRole.SHARD)

    @property
    def known_shard_degree(self) -> int:
        """``shard_degree``; of groups of consecutive ranks also before the world size is known."""
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
        """Over how many ranks a parameter may be split before it is sharded: experts are not split by layers too."""
        return self.expert_degree if self.axes_of(AxisRole.EXPERT) else self.tensor_degree

    @property
    def data_parallel(self) -> "MeshSpec":
        """The axes that ``fully_shard`` gets: those along which ranks shard or replicate a parameter."""
        if all(axis.role in DATA_PARALLEL for axis in self.axes):
            return self
        return replace(self, axes=tuple(axis for axis in self.axes if axis.role in DATA_PARALLEL))

    @property
    def has_replicas(self) -> bool:
        """Whether there is an axis of replicas, be it of one."""
        return bool(self.axes_of(AxisRole.REPLICATE))

    @property
    def groups(self) -> tuple[RankGroups, ...]:
        """The groups of each axis; empty for the mesh of all ranks."""
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
        """How many ranks the mesh has (negative while an axis is open)."""
        return math.prod(self.shape)

    def without_shards(self) -> "MeshSpec":
        """The same ranks, each with full parameters: axes that shard and replicate become one of replicas.

        Raises:
            ConfigError: two such axes of groups, which have no common group to average in.
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
        """The mesh with -1 filled in, and for groups by nodes this machine's (LOCAL_WORLD_SIZE).

        Raises:
            ConfigError: the degrees or groups do not fit ``world_size``; names those that would.
        """
        return self._resolve_groups(world_size) if self.is_grouped else self._resolve_degrees(world_size)

    def _resolve_groups(self, world_size: int) -> "MeshSpec":
        axes = tuple(axis.resolve_groups(world_size) for axis in self.axes)
        resolved = replace(self, axes=axes)
        if max(resolved.shape) == world_size and not any(axis.is_given for axis in axes):  # one group, of all ranks
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
        """The axes and groups, without the type of device."""
        groups = f" (ranks: {', '.join(map(str, self.groups))})" if self.is_grouped else ""
        return " x ".join(f"{name} {size}" for name, size in zip(self.axis_names, self.shape, strict=True)) + groups


def _replicate(size: int, groups: RankGroups | None = None) -> MeshAxis:
    return MeshAxis(name=REPLICATE_AXIS, role=AxisRole.REPLICATE, size=size, groups=groups)


def _shard(size: int, groups: RankGroups | None = None) -> MeshAxis:
    return MeshAxis(name=SHARD_AXIS, role=AxisRole.SHARD, size=size, groups=groups)


def divisors_text(number: int, prefix: str = "") -> str:
    """The divisors of a number as alternatives: ``1, 2 or 4``."""
    if number > 2**16:  # no cluster that exists; a list would take for ever
        return f"{prefix} with a divisor of {number}".strip()
    *others, last = (f"{prefix}{divisor}" for divisor in range(1, number + 1) if number % divisor == 0)
    return f"{', '.join(others)} or {last}" if others else last
