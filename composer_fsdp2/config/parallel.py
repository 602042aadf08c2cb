"""Settings of tensor, sequence and expert parallelism, as values."""

import enum
from dataclasses import dataclass

from composer_fsdp2.config.value import Value
from composer_fsdp2.errors import ConfigError


class BroadcastBatch(enum.Enum):
    """How ranks that must compute the same batch (TP and CP peers) obtain it.

    Values are those of the configuration key.

    ``OFF``: each rank's dataloader must return the same batch; no communication. ``FIRST``: the first rank broadcasts
    its batch. ``GATHER``: ranks all-gather their batches and concatenate them in rank order.
    """

    OFF = False
    FIRST = "first"
    GATHER = "gather"


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledMLP(Value):
    """Classes of MLPs that compute the sequence in ``chunks`` chunks, which lowers the peak of activations.

    Raises:
        ConfigError: no class, or fewer than 2 chunks.

    Example:
        >>> TiledMLP(classes=("LlamaMLP",), chunks=4).chunks
        4
    """

    classes: tuple[str, ...]
    chunks: int

    def __post_init__(self) -> None:
        if not self.classes:
            raise ConfigError("classes is empty; name the classes of the model's MLPs, such as LlamaMLP")
        if not isinstance(self.chunks, int) or isinstance(self.chunks, bool) or self.chunks < 2:
            raise ConfigError(f"chunks is {self.chunks!r}; give a whole number of pieces from 2 on")


class IdleExperts(enum.Enum):
    """How ranks treat experts without tokens. Values are those of the configuration key."""

    IN_ORDER = "in_order"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBlock(Value):
    """The path of a module that calls experts, and the paths of these experts in registration order."""

    block: str
    experts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitExperts(Value):
    """A module with EP-sharded experts: each rank stores some of them.

    Args:
        module: The module's path.
        kind: The kind of MoE layer, for which this package shards the weights and exchanges tokens; "" if the script
            does both.
        num_experts: The number of experts on all ranks; 0 if the script sharded the weights.
        degree: The expert parallel degree.
        is_added: Whether expert parallelism made the module a unit, not a hook or policy. On the meta device it is then
            initialised with the enclosing unit.
    """

    module: str
    kind: str = ""
    num_experts: int = 0
    degree: int
    is_added: bool = True

    @property
    def is_split(self) -> bool:
        """Whether the script sharded the weights. They are then DTensors before FSDP shards them."""
        return not self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerModel(Value):
    """A module with towers: submodules that some batches do not use, such as a vision encoder.

    Args:
        model: The path of the module.
        towers: Paths of the towers, in registration order.
        sync_points: Paths of submodules that all ranks run. Before the forward of each, the ranks all-reduce which
            tower runs next.
    """

    model: str
    towers: tuple[str, ...]
    sync_points: tuple[str, ...]
