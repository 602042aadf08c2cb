"""The same model, sharded by several implementations: ``build(name, setting)``.

All use the units that the model's hooks choose, the same precision and the same optimizer, and clip with their own
functions. FSDP1 gets the default arguments of Composer's ``prepare_fsdp_module``
(composer/distributed/dist_strategy.py, 0.32.1), from torch itself, without importing Composer.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from by_hand import clip_by_hand
from models import Block, Model, Shape
from torch import nn

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP")
OPTIMIZERS = ("adamw", "decoupled_adamw")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Settings common to all variants.

    Args:
        low_precision: Compute and reduce in bf16, store in fp32.
        optimizer: ``adamw``, torch's; or ``decoupled_adamw``, Composer's.
        max_norm: The norm to clip gradients to, if any.
    """

    shape: Shape
    strategy: str
    device: torch.device
    low_precision: bool
    optimizer: str = "adamw"
    max_norm: float | None = None

    @property
    def fsdp_config(self) -> dict[str, Any]:
        """The section of a user's YAML."""
        return {
            "sharding_strategy": self.strategy,
            "mixed_precision": "PURE" if self.low_precision else "DEFAULT",
        }

    @property
    def precision(self) -> str:
        return "amp_bf16" if self.low_precision else "fp32"


@dataclass(frozen=True, slots=True)
class Trainee:
    """A sharded model with its optimizer.

    Args:
        step: Trains one batch and returns its loss on this rank. Called on all ranks.
        around: A context in which this variant runs.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[torch.Tensor], torch.Tensor]
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


def _trainee(
    model: nn.Module, optimizer: torch.optim.Optimizer, setting: Setting, clip: Callable[[float], object]
) -> Trainee:
    """With its own training loop; ``clip`` clips gradients to a norm."""

    def step(tokens: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(tokens)
        loss.backward()
        if setting.max_norm is not None:
            clip(setting.max_norm)
        optimizer.step()
        return loss.detach()

    return Trainee(model, optimizer, step)


def missing(name: str) -> str | None:
    """The reason why this environment lacks the variant, or None."""
    if name == "composer" and not any(metadata.distributions(name="mosaicml")):
        return "mosaicml is not installed"
    return None


def build(name: str, setting: Setting) -> Trainee:
    """The variant of this name, initialised with seed 0. Called on all ranks."""
    torch.manual_seed(0)
    with setting.device:
        model = Model(setting.shape)
    return _BUILDERS[name](model, setting)


def _optimizer(model: nn.Module, setting: Setting, *, by_hand: bool = False) -> torch.optim.Optimizer:
    if setting.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
    from composer.optim import DecoupledAdamW
    from trainer_parts import UpdatesByHand

    return (UpdatesByHand if by_hand else DecoupledAdamW)(model.parameters(), lr=1e-3)


def _hand(model: Model, setting: Setting) -> Trainee:
    """The code that an expert writes for this one model after reading torch's documentation."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(setting.device.type, (dist.get_world_size(),))
    dtype = torch.bfloat16 if setting.low_precision else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    for block in model.decoder.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=setting.strategy == "FULL_SHARD", mp_policy=policy)
    fully_shard(model.decoder, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    optimizer = _optimizer(model, setting, by_hand=True)
    return _trainee(model, optimizer, setting, lambda max_norm: clip_by_hand(model.parameters(), max_norm))


def _ours(model: Model, setting: Setting) -> Trainee:
    from composer_fsdp2 import clip_grad_norm_, prepare_fully_shard

    optimizer = _optimizer(model, setting)
    prepare_fully_shard(model, optimizer, setting.fsdp_config, setting.precision, setting.device)
    if setting.optimizer == "decoupled_adamw":
        from composer_fsdp2.compat.optimizers import update_local_shards  # as the shim does

        update_local_shards(optimizer)
    return _trainee(model, optimizer, setting, lambda max_norm: clip_grad_norm_(model, max_norm))


def _composer(model: Model, setting: Setting) -> Trainee:
    """Like ``parallelize_composer_model``, without its check for a ComposerModel."""
    from composer.core import Precision
    from composer.core.state import _create_device_mesh
    from composer.distributed.fsdp2_utils import generate_composer_model_policy
    from composer.distributed.param_init import meta_init
    from composer.distributed.prepare_distributed import parallelize_model
    from composer.utils.device import get_device
    from composer.utils.parallelism import FSDP2Config

    config = FSDP2Config.from_compatible_attrs(setting.fsdp_config)
    device = get_device("gpu" if setting.device.type == "cuda" else "cpu")
    config.device_mesh = _create_device_mesh(device, config, None)
    optimizer = _optimizer(model, setting)
    policy: Any = generate_composer_model_policy(model)
    precision = Precision(setting.precision)
    parallelize_model(model, config, optimizer, precision, policy, param_init_fn=meta_init)
    # Called by its GradientClipping.
    clip = nn.utils.clip_grad_norm_
    return _trainee(model, optimizer, setting, lambda max_norm: clip(model.parameters(), max_norm))


def _fsdp1(model: Model, setting: Setting) -> Trainee:
    from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import CustomPolicy

    dtype = torch.bfloat16 if setting.low_precision else torch.float32
    decoder: Any = FullyShardedDataParallel(
        model.decoder,
        sharding_strategy=ShardingStrategy[setting.strategy],
        auto_wrap_policy=CustomPolicy(lambda module: isinstance(module, Block)),
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
        mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype),
        device_id=setting.device,
        limit_all_gathers=True,
        use_orig_params=True,
    )
    model.decoder = decoder
    return _trainee(model, _optimizer(model, setting), setting, decoder.clip_grad_norm_)


_BUILDERS: dict[str, Callable[[Model, Setting], Trainee]] = {
    "hand": _hand,
    "ours": _ours,
    "composer": _composer,
    "fsdp1": _fsdp1,
}
NAMES = tuple(_BUILDERS)
