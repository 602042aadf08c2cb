"""What a model's own hooks chose for each module, in no framework's words: the units, and their settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.config.parallel import ExpertBlock, TowerModel
from composer_fsdp2.config.sharding import MixedPrecision, Prefetch
from composer_fsdp2.config.value import Value
from composer_fsdp2.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitOverrides(Value):
    """What one module's own settings change of the model's configuration for its unit; None changes nothing.

    Args:
        given: The settings as they were given: what messages name, and by what two modules' settings are the same.
        notes: What the report says of them.
        refused: What is wrong with them; to be raised where the module becomes a unit, and only there.
    """

    mesh: MeshSpec | None = None
    reshard_after_forward: bool | int | None = None
    mixed_precision: MixedPrecision | None = None
    cpu_offload: bool | None = None
    prefetch: Prefetch | None = None
    given: Mapping[Any, Any] = field(
        default_factory=dict, metadata={"json": lambda given: [str(name) for name in given]}
    )
    notes: tuple[str, ...] = ()
    refused: ConfigError | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Value):
    """A module that is to be a unit, who chose it, and its own settings."""

    chosen_by: str
    overrides: UnitOverrides = field(default_factory=UnitOverrides)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoices(Value):
    """What is to become of a model's modules, by their paths.

    Args:
        roots: The direct children that are units with what lies below them.
        excluded: The others, each with why it is not a unit.
        searched: Those of the others below which chosen modules become roots.
        chosen: The modules below direct children that are to be units of their own.
        checkpointed: The modules whose activations are recomputed or offloaded, children before parents.
        expert_blocks: Where idle experts run in order.
        tower_models: Where idle towers run on an example.
        notes: What the report says of these choices.
    """

    roots: tuple[str, ...]
    excluded: Mapping[str, str] = field(default_factory=dict)
    searched: tuple[str, ...] = ()
    chosen: Mapping[str, Choice] = field(default_factory=dict)
    checkpointed: tuple[str, ...] = ()
    expert_blocks: tuple[ExpertBlock, ...] = ()
    tower_models: tuple[TowerModel, ...] = ()
    notes: tuple[str, ...] = ()
