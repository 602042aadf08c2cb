"""What of a run may be changed so that it fits: the settings, what becomes of its numbers, and a plan with others."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.config.value import Value
from composer_fsdp2.sharding.modules import ancestors_or_self
from composer_fsdp2.sharding.plan import ShardingPlan

MAX_EVERY = 8  # with every ninth block recomputed little is gained


class Numbers(enum.Enum):
    """What becomes of a run's numbers where a setting changes."""

    SAME = "the same"
    ROUNDING = "the same up to rounding"
    OTHER = "others"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever(Value):
    """A setting, what becomes of the numbers where it changes, and why it is proposed, or never unasked."""

    name: str
    numbers: Numbers
    reason: str
    is_proposed: bool = True


# fmt: off
LEVERS: tuple[Lever, ...] = (
    Lever(name="reshard_after_forward", numbers=Numbers.SAME,
        reason="the same parameters are gathered, once or twice, over all shards or a few"),
    Lever(name="replicas", numbers=Numbers.ROUNDING,
        reason="gradients are summed over the same ranks, in another order"),
    Lever(name="activations", numbers=Numbers.SAME,
        reason="what is recomputed or brought back from the host is what was there, dropout's random numbers included"),
    Lever(name="microbatch_size", numbers=Numbers.ROUNDING,
        reason="a batch has the same rows, and their gradients are summed in another order; where rows differ in "
        "length, a loss that is averaged over a microbatch's tokens weighs them otherwise, unless the trainer counts "
        "tokens over the batch (LLM Foundry does by default)"),
    Lever(name="cpu_offload", numbers=Numbers.ROUNDING,
        reason="the optimizer runs on the host's processor, which rounds otherwise"),
    Lever(name="gradient_sync", numbers=Numbers.ROUNDING, is_proposed=False,
        reason="gradients of a batch are summed unreduced and in the dtype they are reduced in, so that the order and "
        "the dtype of the sum change; FSDP1 in Composer reduced each microbatch's"),
    Lever(name="reshard_after_backward", numbers=Numbers.SAME, is_proposed=False,
        reason="it saves gathers by keeping all parameters, which reshard_after_forward: false does more simply"),
    Lever(name="mixed_precision", numbers=Numbers.OTHER, is_proposed=False,
        reason="the dtypes that parameters are computed with and gradients reduced in are the run's numbers"),
    Lever(name="keep_low_precision_grads", numbers=Numbers.OTHER, is_proposed=False,
        reason="the optimizer would see rounded gradients"),
    Lever(name="the global batch", numbers=Numbers.OTHER, is_proposed=False,
        reason="another batch is another run: its learning rate was chosen for this one"),
    Lever(name="the sequence length", numbers=Numbers.OTHER, is_proposed=False,
        reason="the model would see other text"),
    Lever(name="the optimizer", numbers=Numbers.OTHER, is_proposed=False,
        reason="one with less state takes other steps"),
    Lever(name="the number of ranks", numbers=Numbers.ROUNDING, is_proposed=False,
        reason="it is given: ask again with another --world-size"),
)
# fmt: on


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Activations(Value):
    """What is done with the activations of a model's blocks.

    Args:
        every: To every so many-th block, the last of each such row; 0: to none; -1: to the modules that the plan has.
        recompute: They are computed again in backward.
        offload: What is kept of them lies in the host's memory.
    """

    every: int = 0
    recompute: bool = False
    offload: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Value):
    """One choice of everything that a search may change.

    Args:
        microbatch_size: In rows of one rank; the rows of a batch stay.
        replicas: Of the model; the other ranks of the data-parallel mesh are shards.
        reshard_after_forward: Of the units that have no setting of their own.
        cpu_offload: Parameters, gradients and the optimizer's state lie in the host's memory.
    """

    microbatch_size: int
    replicas: int
    reshard_after_forward: bool | int
    activations: Activations
    cpu_offload: bool

    def changed_from(self, other: "Settings") -> tuple[str, ...]:
        """The names of the levers that differ."""
        return tuple(name for name in _FIELDS if not is_same(getattr(self, name), getattr(other, name)))


_FIELDS = ("microbatch_size", "replicas", "reshard_after_forward", "activations", "cpu_offload")


def is_same(one: object, other: object) -> bool:
    return type(one) is type(other) and one == other  # True is not a group of one


@dataclass(frozen=True, slots=True, kw_only=True)
class Space(Value):
    """All values of each setting; a search takes every combination that can be."""

    microbatch_sizes: tuple[int, ...]
    replicas: tuple[int, ...]
    reshards: tuple[bool | int, ...]
    activations: tuple[Activations, ...]
    cpu_offloads: tuple[bool, ...] = (False,)

    def points(self, plan: ShardingPlan) -> Iterator[Settings]:
        """A group of ranks that keep parameters between forward and backward is a part of those that share them."""
        ranks = plan.mesh.shard_degree * plan.mesh.replicate_degree
        for rows, replicas, reshard, activations, offload in product(
            self.microbatch_sizes, self.replicas, self.reshards, self.activations, self.cpu_offloads
        ):
            shards = ranks // replicas
            if isinstance(reshard, bool) or (reshard < shards and shards % reshard == 0):
                yield Settings(
                    microbatch_size=rows,
                    replicas=replicas,
                    reshard_after_forward=reshard,
                    activations=activations,
                    cpu_offload=offload,
                )


# ---------------------------------------------------------------------------------------------------------------------
# Blocks


def blocks_of(plan: ShardingPlan) -> tuple[tuple[str, ...], ...]:
    """The model's blocks, a row of each list of modules: units below a root that have numbers, and are in no other."""
    below = {unit.name for unit in plan.units if not unit.is_root}
    rows: dict[str, list[str]] = {}
    for unit in plan.units:
        row, _, number = unit.name.rpartition(".")
        if unit.name in below and number.isdecimal() and below.isdisjoint(list(ancestors_or_self(unit.name))[1:]):
            rows.setdefault(row, []).append(unit.name)
    return tuple(tuple(row) for row in rows.values() if len(row) > 1)


def chosen_blocks(plan: ShardingPlan, activations: Activations) -> tuple[str, ...]:
    """The modules whose activations are recomputed or offloaded; of each row the last of every so many blocks."""
    if activations.every < 0:
        return plan.checkpointed
    every = activations.every
    return tuple(name for row in blocks_of(plan) for name in (row[every - 1 :: every] if every else ()))


def treatments_of_blocks(plan: ShardingPlan) -> Iterator[Activations]:
    longest = max(len(row) for row in blocks_of(plan))
    for every in range(1, min(longest, MAX_EVERY) + 1):
        for recompute, offload in ((True, False), (True, True), (False, True)):
            yield Activations(every=every, recompute=recompute, offload=offload)


def _present_activations(plan: ShardingPlan) -> Activations:
    mode = plan.config.activation_checkpointing
    if not plan.checkpointed or not mode.enabled:
        return Activations()
    has = Activations(every=-1, recompute=mode.checkpoint, offload=mode.cpu_offload)
    alike = (replace(has, every=each.every) for each in (treatments_of_blocks(plan) if blocks_of(plan) else ()))
    return next((each for each in alike if set(chosen_blocks(plan, each)) == set(plan.checkpointed)), has)


# ---------------------------------------------------------------------------------------------------------------------
# A plan with other settings


def plan_with(plan: ShardingPlan, settings: Settings) -> ShardingPlan:
    """The plan as it would be decided with these settings."""
    config, before = plan.config, plan.config.reshard_after_forward
    mesh = _mesh_with(plan.mesh, settings.replicas)
    mode = replace(
        config.activation_checkpointing,
        checkpoint=settings.activations.recompute,
        cpu_offload=settings.activations.offload,
    )
    changed = replace(
        config,
        mesh=mesh,
        reshard_after_forward=settings.reshard_after_forward,
        activation_checkpointing=mode,
        cpu_offload=settings.cpu_offload,
    )
    units = tuple(
        replace(
            unit,
            mesh=mesh if unit.mesh == plan.mesh else unit.mesh,
            reshard_after_forward=settings.reshard_after_forward
            if not unit.is_root and is_same(unit.reshard_after_forward, before)
            else unit.reshard_after_forward,
            cpu_offload=settings.cpu_offload if unit.cpu_offload == config.cpu_offload else unit.cpu_offload,
        )
        for unit in plan.units
    )
    return replace(plan, config=changed, units=units, checkpointed=chosen_blocks(plan, settings.activations))


def _mesh_with(mesh: MeshSpec, replicas: int) -> MeshSpec:
    if replicas == mesh.replicate_degree:
        return mesh
    shards = mesh.shard_degree * mesh.replicate_degree // replicas
    return MeshSpec.of_degrees(shards, None if replicas == 1 else replicas, device_type=mesh.device_type)


def present_settings(plan: ShardingPlan, microbatch_size: int) -> Settings:
    """What a plan has."""
    reshard = plan.config.reshard_after_forward
    return Settings(
        microbatch_size=microbatch_size,
        replicas=plan.mesh.replicate_degree,
        reshard_after_forward=False if is_same(reshard, 1) else reshard,  # a group of one keeps all
        activations=_present_activations(plan),
        cpu_offload=plan.config.cpu_offload,
    )
