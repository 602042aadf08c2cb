"""composer_fsdp2: runs FSDP1 training scripts of Composer on ``torch.distributed.fsdp.fully_shard``.

The engine needs torch only; ``composer_fsdp2.compat`` connects it to Composer and LLM Foundry. Public names are
imported lazily: importing torch takes seconds, and not every command needs it.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public names by module, relative to this package.
_FILES = {
    "_torch.scaler": "ShardedGradScaler",
    "checkpoint.convert.conversion": "ConversionReport convert_checkpoint",
    "checkpoint.convert.conversion_plan": "ConversionPlan",
    "checkpoint.inspect": "inspect_checkpoint",
    "checkpoint.inventory": "CheckpointInventory TensorRecord",
    "checkpoint.load.into_model": "LoadReport load_checkpoint",
    "checkpoint.load.load_plan": "LoadPlan",
    "checkpoint.save.monolithic": "save_monolithic",
    "checkpoint.verify.verification": "VerifyReport verify_checkpoint",
    "config.findings": "Finding Outcome",
    "config.mesh": "AxisRole MeshAxis MeshSpec",
    "config.parallel": "TiledMLP",
    "config.sharding": "Accumulation ActivationCheckpointing GradientSync MixedPrecision Prefetch ShardingConfig",
    "errors": "CheckpointError ComposerFSDP2Error ConfigError IncompatibleVersionError PlanError RanksDivergedError "
    "UnsupportedError",
    "estimate.optimizers": "OptimizerState optimizer_state",
    "estimate.replay": "estimate_step",
    "estimate.step": "StepEstimate",
    "fsdp.installing": "install_fsdp",
    "fsdp1.translate": "Translation translate",
    "parallel.adapters": "AttentionFacts ModelAdapter register_model_adapter",
    "parallel.tiled_mlp": "tile_mlp",
    "prepare": "apply_activation_checkpointing apply_plan plan_sharding prepare_fully_shard",
    "sharding.plan": "ShardingPlan ShardUnit",
    "sharding.sharded": "reshard",
    "training.clipping": "clip_grad_adaptive_ clip_grad_norm_",
    "training.context": "ContextGroup",
    "training.full_params": "summon_full_params",
    "training.microbatches": "begin_microbatch",
}
_FILE_OF = {name: file for file, names in _FILES.items() for name in names.split()}
__all__ = ["__version__", *_FILE_OF]

if TYPE_CHECKING:  # for type checkers and editors; "as" marks a re-export
    from composer_fsdp2._torch.scaler import ShardedGradScaler as ShardedGradScaler
    from composer_fsdp2.checkpoint.convert.conversion import ConversionReport as ConversionReport
    from composer_fsdp2.checkpoint.convert.conversion import convert_checkpoint as convert_checkpoint
    from composer_fsdp2.checkpoint.convert.conversion_plan import ConversionPlan as ConversionPlan
    from composer_fsdp2.checkpoint.inspect import inspect_checkpoint as inspect_checkpoint
    from composer_fsdp2.checkpoint.inventory import CheckpointInventory as CheckpointInventory
    from composer_fsdp2.checkpoint.inventory import TensorRecord as TensorRecord
    from composer_fsdp2.checkpoint.load.into_model import LoadReport as LoadReport
    from composer_fsdp2.checkpoint.load.into_model import load_checkpoint as load_checkpoint
    from composer_fsdp2.checkpoint.load.load_plan import LoadPlan as LoadPlan
    from composer_fsdp2.checkpoint.save.monolithic import save_monolithic as save_monolithic
    from composer_fsdp2.checkpoint.verify.verification import VerifyReport as VerifyReport
    from composer_fsdp2.checkpoint.verify.verification import verify_checkpoint as verify_checkpoint
    from composer_fsdp2.config.findings import Finding as Finding
    from composer_fsdp2.config.findings import Outcome as Outcome
    from composer_fsdp2.config.mesh import AxisRole as AxisRole
    from composer_fsdp2.config.mesh import MeshAxis as MeshAxis
    from composer_fsdp2.config.mesh import MeshSpec as MeshSpec
    from composer_fsdp2.config.parallel import TiledMLP as TiledMLP
    from composer_fsdp2.config.sharding import Accumulation as Accumulation
    from composer_fsdp2.config.sharding import ActivationCheckpointing as ActivationCheckpointing
    from composer_fsdp2.config.sharding import GradientSync as GradientSync
    from composer_fsdp2.config.sharding import MixedPrecision as MixedPrecision
    from composer_fsdp2.config.sharding import Prefetch as Prefetch
    from composer_fsdp2.config.sharding import ShardingConfig as ShardingConfig
    from composer_fsdp2.errors import CheckpointError as CheckpointError
    from composer_fsdp2.errors import ComposerFSDP2Error as ComposerFSDP2Error
    from composer_fsdp2.errors import ConfigError as ConfigError
    from composer_fsdp2.errors import IncompatibleVersionError as IncompatibleVersionError
    from composer_fsdp2.errors import PlanError as PlanError
    from composer_fsdp2.errors import RanksDivergedError as RanksDivergedError
    from composer_fsdp2.errors import UnsupportedError as UnsupportedError
    from composer_fsdp2.estimate.optimizers import OptimizerState as OptimizerState
    from composer_fsdp2.estimate.optimizers import optimizer_state as optimizer_state
    from composer_fsdp2.estimate.replay import estimate_step as estimate_step
    from composer_fsdp2.estimate.step import StepEstimate as StepEstimate
    from composer_fsdp2.fsdp.installing import install_fsdp as install_fsdp
    from composer_fsdp2.fsdp1.translate import Translation as Translation
    from composer_fsdp2.fsdp1.translate import translate as translate
    from composer_fsdp2.parallel.adapters import AttentionFacts as AttentionFacts
    from composer_fsdp2.parallel.adapters import ModelAdapter as ModelAdapter
    from composer_fsdp2.parallel.adapters import register_model_adapter as register_model_adapter
    from composer_fsdp2.parallel.tiled_mlp import tile_mlp as tile_mlp
    from composer_fsdp2.prepare import apply_activation_checkpointing as apply_activation_checkpointing
    from composer_fsdp2.prepare import apply_plan as apply_plan
    from composer_fsdp2.prepare import plan_sharding as plan_sharding
    from composer_fsdp2.prepare import prepare_fully_shard as prepare_fully_shard
    from composer_fsdp2.sharding.plan import ShardingPlan as ShardingPlan
    from composer_fsdp2.sharding.plan import ShardUnit as ShardUnit
    from composer_fsdp2.sharding.sharded import reshard as reshard
    from composer_fsdp2.training.clipping import clip_grad_adaptive_ as clip_grad_adaptive_
    from composer_fsdp2.training.clipping import clip_grad_norm_ as clip_grad_norm_
    from composer_fsdp2.training.context import ContextGroup as ContextGroup
    from composer_fsdp2.training.full_params import summon_full_params as summon_full_params
    from composer_fsdp2.training.microbatches import begin_microbatch as begin_microbatch
else:  # hidden from type checkers, which would accept any name

    def __getattr__(name: str) -> Any:
        if name in _FILE_OF:
            globals()[name] = getattr(importlib.import_module(f"{__name__}.{_FILE_OF[name]}"), name)
            return globals()[name]
        if name in {file.partition(".")[0] for file in _FILES}:  # subpackages, as after an import
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
