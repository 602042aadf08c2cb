"""How one step of a model is divided beyond its parameters, as values."""

import enum
from dataclasses import dataclass

from composer_fsdp2.config.value import Value
from composer_fsdp2.errors import ConfigError


class BroadcastBatch(enum.Enum):
    """How ranks that share one batch come to have it; the values are what a configuration says.

    ``OFF``: each takes what its own loader gives, which must be the same on all of them. ``FIRST``: all take the first
    rank's. ``GATHER``: all take the rows that they read, one rank's after the other's.
    """

    OFF = False
    FIRST = "first"
    GATHER = "gather"


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledMLP(Value):
    """Which MLPs are computed in pieces of the sequence: those of ``classes``, by name, in ``chunks`` pieces.

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
    """What ranks do with experts that none of their tokens chose; the values are what a configuration says."""

    IN_ORDER = "in_order"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBlock(Value):
    """A module that calls experts, by its path, and theirs in the order of registration."""

    block: str
    experts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitExperts(Value):
    """A module whose experts ranks split between them.

    Args:
        module: Its path.
        kind: Which of the known kinds of layers it is; "" if a script split its weights, and it exchanges tokens.
        num_experts: Of all ranks; 0 if a script split the weights.
        degree: How many ranks split them.
        is_added: Whether it is a unit for its experts alone: its values are drawn with those of the unit around it.
    """

    module: str
    kind: str = ""
    num_experts: int = 0
    degree: int
    is_added: bool = True

    @property
    def is_split(self) -> bool:
        """Whether a script split its weights, which are DTensors before sharding."""
        return not self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerModel(Value):
    """A module around parts that a batch may not enter, by its path.

    Args:
        towers: The paths of those parts, in the order of registration.
        sync_points: Those of the modules beside them before which ranks ask each other who enters a tower.
    """

    model: str
    towers: tuple[str, ...]
    sync_points: tuple[str, ...]
