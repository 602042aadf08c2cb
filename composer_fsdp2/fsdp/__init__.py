"""FSDP1's class on FSDP2, and the other names that scripts import with it.

    from composer_fsdp2.fsdp import FullyShardedDataParallel as FSDP

replaces the same import from ``torch.distributed.fsdp``. Policies, enums and configs are torch's own objects. The
package requires only torch. Import the class before creating optimizers: optimizers created after the import are
tracked, and rebound to the sharded parameters when a model is wrapped.
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
    """Import the class lazily, and track optimizers created after this import.

    An import of another module of this package, as in ``composer_fsdp2.compat``, does not track optimizers.
    """
    if name != "FullyShardedDataParallel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from composer_fsdp2.fsdp.optimizers import note_optimizers
    from composer_fsdp2.fsdp.wrapper import FullyShardedDataParallel

    note_optimizers()
    return FullyShardedDataParallel
