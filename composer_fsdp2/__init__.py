"""composer_fsdp2: training runs written for Composer's FSDP1, on ``torch.distributed.fsdp.fully_shard``.

The engine needs torch only; ``composer_fsdp2.compat`` plugs it into Composer and LLM Foundry.
"""

from composer_fsdp2._torch import ShardedGradScaler
from composer_fsdp2.activation_checkpointing import apply_activation_checkpointing
from composer_fsdp2.apply import apply_plan
from composer_fsdp2.checkpoint.conversion.plan import ConversionPlan
from composer_fsdp2.checkpoint.convert import ConversionReport, convert_checkpoint
from composer_fsdp2.checkpoint.inspect import inspect_checkpoint
from composer_fsdp2.checkpoint.inventory import CheckpointInventory, TensorRecord
from composer_fsdp2.checkpoint.load import LoadReport, load_checkpoint
from composer_fsdp2.checkpoint.loading.plan import LoadPlan
from composer_fsdp2.checkpoint.save import save_monolithic
from composer_fsdp2.checkpoint.verify import VerifyReport, verify_checkpoint
from composer_fsdp2.clipping import clip_grad_adaptive_, clip_grad_norm_
from composer_fsdp2.config import (
    Accumulation,
    ActivationCheckpointing,
    GradientSync,
    MeshSpec,
    Prefetch,
    ShardingConfig,
)
from composer_fsdp2.errors import (
    CheckpointError,
    ComposerFSDP2Error,
    ConfigError,
    IncompatibleVersionError,
    PlanError,
    RanksPartedError,
    UnsupportedError,
)
from composer_fsdp2.findings import Finding, Outcome
from composer_fsdp2.fsdp1.translate import Translation, translate
from composer_fsdp2.full_params import summon_full_params
from composer_fsdp2.microbatching import begin_microbatch
from composer_fsdp2.plan import ShardingPlan, ShardUnit
from composer_fsdp2.planning import plan_sharding
from composer_fsdp2.prepare import prepare_fully_shard
from composer_fsdp2.sharded import reshard

__version__ = "0.1.0"

__all__ = [
    "Accumulation",
    "ActivationCheckpointing",
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
    "MeshSpec",
    "Outcome",
    "PlanError",
    "Prefetch",
    "RanksPartedError",
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
