"""FSDP1's class on FSDP2, with what scripts import beside it.

    from composer_fsdp2.fsdp import FullyShardedDataParallel as FSDP

takes the place of the same import from ``torch.distributed.fsdp``. Policies, enums and configs are torch's own objects.
Needs torch only. Import it before making optimizers: those that a script makes before wrapping are noted then.
"""

from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from composer_fsdp2._torch.scaler import ShardedGradScaler
from composer_fsdp2.fsdp import wrap
from composer_fsdp2.fsdp.wrapper import FullyShardedDataParallel

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
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "wrap",
]
