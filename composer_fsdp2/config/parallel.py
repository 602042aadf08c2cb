"""Settings of tensor, sequence and expert parallelism, as values."""

import enum
from dataclasses import dataclass

from composer_fsdp2.config.value import Value
from composer_fsdp2.errors import ConfigError


class BroadcastBatch(enum.Enum):
    """How ranks that share a batch obtain it; the values are those of the configuration key.

    ``OFF``: each rank reads its batch itself; it must be the same on all of them. ``FIRST``: all use the first rank's
    batch. ``GATHER``: all use the rows of all ranks, concatenated in rank order.
    """

    OFF = False
    FIRST = "first"
    GATHER = "gather"


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledMLP(Value):
    """MLP classes that are computed in ``chunks`` chunks of the sequence.

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
    """How ranks treat experts without tokens; the values are those of the configuration key."""

    IN_ORDER = "in_order"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBlock(Value):
    """The path of a module that calls experts, and the experts' paths in registration order."""

    block: str
    experts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitExperts(Value):
    """A module whose experts are distributed over ranks (EP-sharded).

    Args:
        module: Its path.
        kind: The known kind of MoE layer; "" if a script sharded the weights and exchanges the tokens.
        num_experts: The total over all ranks; 0 if a script sharded the weights.
        degree: The number of ranks that share the experts.
        is_added: Whether the module is a unit only because of its experts. It is then initialised with the enclosing
            unit.
    """

    module: str
    kind: str = ""
    num_experts: int = 0
    degree: int
    is_added: bool = True

    @property
    def is_split(self) -> bool:
        """Whether a script sharded the weights, so they are DTensors before FSDP shards them."""
        return not self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerModel(Value):
    """The path of a module with towers, submodules that some batches do not use.

    Args:
        towers: Paths of the towers, in registration order.
        sync_points: Paths of other submodules; before each of them, ranks communicate which of them use a tower.
    """

    model: str
    towers: tuple[str, ...]
    sync_points: tuple[str, ...]
