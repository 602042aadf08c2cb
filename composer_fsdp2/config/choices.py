"""The FSDP units of a model and their settings, as chosen by the model's hooks or a policy."""

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
    """Settings of one module that override the model's ``ShardingConfig`` for its unit. None does not override.

    Args:
        given: The settings as the user wrote them, for error messages and to compare two modules.
        notes: Lines for the plan's report.
        refused: The error of an invalid setting. It is raised only if the module is a unit.
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
    """A module that was chosen as a unit, the hook or policy that chose it, and the module's own settings."""

    chosen_by: str
    overrides: UnitOverrides = field(default_factory=UnitOverrides)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoices(Value):
    """The modules of a model that are units, and the modules that need other treatment. Modules are identified by path.

    Args:
        roots: Direct children of the model that are root units.
        excluded: The other direct children, with the reason why each is not a unit.
        searched: The children in ``excluded`` that are searched for units: their outermost chosen submodules are root
            units.
        chosen: Modules below the direct children that are units, by path.
        checkpointed: Modules whose activations are recomputed or offloaded, children before parents.
        expert_blocks: Modules whose experts run in registration order on all ranks.
        tower_models: Modules whose towers run on an example input on ranks that have no input for them.
        notes: Lines for the plan's report.
    """

    roots: tuple[str, ...]
    excluded: Mapping[str, str] = field(default_factory=dict)
    searched: tuple[str, ...] = ()
    chosen: Mapping[str, Choice] = field(default_factory=dict)
    checkpointed: tuple[str, ...] = ()
    expert_blocks: tuple[ExpertBlock, ...] = ()
    tower_models: tuple[TowerModel, ...] = ()
    notes: tuple[str, ...] = ()
