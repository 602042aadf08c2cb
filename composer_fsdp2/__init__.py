"""composer_fsdp2: training runs written for Composer's FSDP1, on ``torch.distributed.fsdp.fully_shard``.

The engine needs torch only; ``composer_fsdp2.compat`` plugs it into Composer and LLM Foundry.
"""

from composer_fsdp2._torch.scaler import ShardedGradScaler
from composer_fsdp2.checkpoint.convert.conversion import ConversionReport, convert_checkpoint
from composer_fsdp2.checkpoint.convert.conversion_plan import ConversionPlan
from composer_fsdp2.checkpoint.inspect import inspect_checkpoint
from composer_fsdp2.checkpoint.inventory import CheckpointInventory, TensorRecord
from composer_fsdp2.checkpoint.load.into_model import LoadReport, load_checkpoint
from composer_fsdp2.checkpoint.load.load_plan import LoadPlan
from composer_fsdp2.checkpoint.save.monolithic import save_monolithic
from composer_fsdp2.checkpoint.verify.verification import VerifyReport, verify_checkpoint
from composer_fsdp2.config.findings import Finding, Outcome
from composer_fsdp2.config.mesh import AxisRole, MeshAxis, MeshSpec
from composer_fsdp2.config.sharding import (
    Accumulation,
    ActivationCheckpointing,
    GradientSync,
    MixedPrecision,
    Prefetch,
    ShardingConfig,
)
from composer_fsdp2.errors import (
    CheckpointError,
    ComposerFSDP2Error,
    ConfigError,
    IncompatibleVersionError,
    PlanError,
    RanksDivergedError,
    UnsupportedError,
)
from composer_fsdp2.fsdp1.translate import Translation, translate
from composer_fsdp2.prepare import (
    apply_activation_checkpointing,
    apply_plan,
    plan_sharding,
    prepare_fully_shard,
)
from composer_fsdp2.sharding.plan import ShardingPlan, ShardUnit
from composer_fsdp2.sharding.sharded import reshard
from composer_fsdp2.training.clipping import clip_grad_adaptive_, clip_grad_norm_
from composer_fsdp2.training.full_params import summon_full_params
from composer_fsdp2.training.microbatches import begin_microbatch

__version__ = "0.1.0"

__all__ = [
    "Accumulation",
    "ActivationCheckpointing",
    "AxisRole",
    "CheckpointError",
    "CheckpointInventory",
    "ComposerFSDP2Error",
    "ConfigError",
    "ConversionPlan",
    "ConversionReport",
    "Finding",
    "GradientSync",
    "IncompatibleVersionError",
    "LoadPlan",
    "LoadReport",
    "MeshAxis",
    "MeshSpec",
    "MixedPrecision",
    "Outcome",
    "PlanError",
    "Prefetch",
    "RanksDivergedError",
    "ShardUnit",
    "ShardedGradScaler",
    "ShardingConfig",
    "ShardingPlan",
    "TensorRecord",
    "Translation",
    "UnsupportedError",
    "VerifyReport",
    "__version__",
    "apply_activation_checkpointing",
    "apply_plan",
    "begin_microbatch",
    "clip_grad_adaptive_",
    "clip_grad_norm_",
    "convert_checkpoint",
    "inspect_checkpoint",
    "load_checkpoint",
    "plan_sharding",
    "prepare_fully_shard",
    "reshard",
    "save_monolithic",
    "summon_full_params",
    "translate",
    "verify_checkpoint",
]
