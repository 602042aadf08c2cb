"""FSDP1's class on FSDP2, and the other names that scripts import with it.

    from composer_fsdp2.fsdp import FullyShardedDataParallel as FSDP

replaces the same import from ``torch.distributed.fsdp``. Policies, enums and configs are torch's own objects. Requires
only torch. Import it before optimizers are created: later optimizers are tracked, and updated when their parameters
are sharded.
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
    """The class, on its first import by a script: optimizers created afterwards are tracked.

    Importing other modules of this package, as compat does, does not track optimizers.
    """
    if name != "FullyShardedDataParallel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from composer_fsdp2.fsdp.optimizers import note_optimizers
    from composer_fsdp2.fsdp.wrapper import FullyShardedDataParallel

    note_optimizers()
    return FullyShardedDataParallel
