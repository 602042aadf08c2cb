"""The settings that ``--suggest`` may change, and how a plan sets them."""

from dataclasses import dataclass

from composer_fsdp2.config.value import Value
from composer_fsdp2.sharding.modules import ancestors_or_self
from composer_fsdp2.sharding.plan import ShardingPlan

MAX_EVERY = 8  # recomputing every ninth block or fewer saves little

# Setting -> why another value changes how the run's numbers are rounded; the other settings do not change any number.
# Dtypes, the batch, the sequence and the optimizer change numbers beyond rounding, and are not settings.
ROUNDS = {
    "replicas": "gradients are summed over the same ranks, in another order",
    "microbatch_size": "a batch has the same rows, and their gradients are summed in another order; where rows differ "
    "in length, a loss that is averaged over a microbatch's tokens weighs them otherwise, unless the trainer counts "
    "tokens over the batch (LLM Foundry does by default)",
    "cpu_offload": "the optimizer runs on the host's processor, which rounds otherwise",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations(Value):
    """The blocks whose activations are recomputed or offloaded.

    Args:
        every: n applies to every n-th block (the last of n blocks), 0 to none, and -1 to the modules that the plan
            already selects.
        recompute: Recompute the blocks in backward.
        offload: Offload activations saved for backward to host memory.
    """

    every: int = 0
    recompute: bool = False
    offload: bool = False

    def __str__(self) -> str:
        done = " and ".join(["recomputed"] * self.recompute + ["offloaded"] * self.offload)
        return f"1 of {self.every} blocks {done}" if self.every > 1 else f"blocks {done}" if self.every else "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Value):
    """One value for each setting that ``--suggest`` may change.

    Args:
        reshard_after_forward: The value for units without their own setting.
        activations: Activation checkpointing and offloading of the blocks.
        microbatch_size: Rows of a microbatch on one rank. The batch size does not change.
        replicas: The replicate degree. The other factor of the data-parallel ranks is the shard degree.
        cpu_offload: Whether parameters, gradients and optimizer state are in host memory.
    """

    reshard_after_forward: bool | int
    activations: Activations
    microbatch_size: int
    replicas: int
    cpu_offload: bool

    def changed_from(self, other: "Settings") -> tuple[str, ...]:
        """The names of the settings that differ."""
        return tuple(name for name in self.__slots__ if getattr(self, name) != getattr(other, name))


def present_settings(plan: ShardingPlan, microbatch_size: int) -> Settings:
    """The settings of a plan."""
    reshard = plan.config.reshard_after_forward
    return Settings(
        microbatch_size=microbatch_size,
        replicas=plan.mesh.replicate_degree,
        reshard_after_forward=reshard if reshard is True or reshard != 1 else False,  # a group of one does not reshard
        activations=_present_activations(plan),
        cpu_offload=plan.config.cpu_offload,
    )


def _present_activations(plan: ShardingPlan) -> Activations:
    mode = plan.config.activation_checkpointing
    if not plan.checkpointed or not mode.enabled:
        return Activations()
    checkpointed, rows = set(plan.checkpointed), blocks_of(plan)
    alike = (n for n in range(1, MAX_EVERY + 1) if checkpointed == {name for row in rows for name in row[n - 1 :: n]})
    return Activations(every=next(alike, -1), recompute=mode.checkpoint, offload=mode.cpu_offload)


def blocks_of(plan: ShardingPlan) -> tuple[tuple[str, ...], ...]:
    """Return the model's blocks, one tuple per module list: units below a root, not nested in another unit, with a
    number as name."""
    below = {unit.name for unit in plan.units if not unit.is_root}
    rows: dict[str, list[str]] = {}
    for unit in plan.units:
        row, _, number = unit.name.rpartition(".")
        if unit.name in below and number.isdecimal() and below.isdisjoint(list(ancestors_or_self(unit.name))[1:]):
            rows.setdefault(row, []).append(unit.name)
    return tuple(tuple(row) for row in rows.values() if len(row) > 1)
