"""FSDP1's class on FSDP2, with what scripts import beside it.

    from composer_fsdp2.fsdp import FullyShardedDataParallel as FSDP

replaces the same import from ``torch.distributed.fsdp``. Policies, enums and configs are torch's own objects. Needs
torch only. Import it before optimizers are made: from then on they are noted, and follow when their parameters are
sharded.
"""

from typing import TYPE_CHECKING

from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from composer_fsdp2._torch.scaler import ShardedGradScaler
from composer_fsdp2.fsdp import wrap

if TYPE_CHECKING:
    from composer_fsdp2.fsdp.wrapper import FullyShardedDataParallel as FullyShardedDataParallel

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "wrap",
]


def __getattr__(name: str) -> type:
    """The class, where a script imports it: optimizers that are made from then on are noted.

    Not where another module of this package is imported, as Composer's seams do.
    """
    if name != "FullyShardedDataParallel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from composer_fsdp2.fsdp.optimizers import note_optimizers
    from composer_fsdp2.fsdp.wrapper import FullyShardedDataParallel

    note_optimizers()
    return FullyShardedDataParallel
