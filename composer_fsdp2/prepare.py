"""``prepare_fully_shard``: the FSDP1-shaped front door. Translate, plan, agree, apply."""

import logging
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composer_fsdp2.agreement import agree, require_process_group
from composer_fsdp2.apply import apply_agreed_plan
from composer_fsdp2.errors import ConfigError, UnsupportedError
from composer_fsdp2.findings import Outcome
from composer_fsdp2.fsdp1.attributes import open_fsdp1_attributes
from composer_fsdp2.fsdp1.legacy import LegacyConfig
from composer_fsdp2.fsdp1.translate import Translation, translate
from composer_fsdp2.optimizer import Optimizers, Rebinding, the_optimizer
from composer_fsdp2.plan import ShardingPlan
from composer_fsdp2.planning import plan_sharding

__all__ = ["prepare_fully_shard"]

log = logging.getLogger(__name__)


def prepare_fully_shard(
    model: nn.Module,
    optimizers: Optimizers,
    fsdp_config: Any,
    precision: Any = None,
    device: Any = None,
    auto_microbatching: bool = False,
    te_rng_seed: int = 1234,
) -> tuple[list[Any], dict[str, nn.Module]]:
    """Shard ``model`` with ``fully_shard`` as Composer's ``prepare_fsdp_module`` sharded it with FSDP1.

    Args:
        model: Any module; its direct children become the roots. Changed in place.
        optimizers: One optimizer (or a list of one) over some or all of the model's parameters, or None. It keeps its
            groups, their options and its state, and follows the new parameters.
        fsdp_config: Composer's FSDPConfig or FSDP2Config, or a mapping with FSDP1's keys, FSDP2's or both.
        precision: Composer's Precision or its string; None is ``amp_fp16`` on CUDA and ``fp32`` on the CPU.
        device: Composer's Device, a torch.device or a string; None is CUDA where there is one.
        auto_microbatching: Composer's ``device_train_microbatch_size='auto'``. Changes nothing here: the Trainer's own
            loop votes and repeats, under the shim.
        te_rng_seed: Seed of Transformer Engine's checkpointing (``te_checkpoint_wrapper`` under ``amp_fp8``).
    Returns:
        ``(hook_handles, fsdp_modules)``, both empty: they served FSDP1's automatic microbatching.
    Raises:
        ConfigError: an unknown key, a wrong value, a contradiction, or no process group.
        UnsupportedError: something that cannot be carried over (yet); names the key. Also a NotImplementedError.
        PlanError: the model or the optimizer does not fit; names the module.

    Called on all ranks. Errors are raised on every rank, before the model or the optimizer is touched.
    """
    require_process_group("prepare_fully_shard")
    translation, plan, present = agree(
        lambda: _decide(model, optimizers, fsdp_config, precision, device, te_rng_seed),
        lambda decided: decided[1].fingerprint,
    )
    _report(translation, plan)
    optimizer = the_optimizer(optimizers)
    rebinding = None if optimizer is None else Rebinding.note(model, optimizer)
    apply_agreed_plan(model, plan, present=present)
    open_fsdp1_attributes(model)
    if rebinding is not None:
        rebinding.follow()
    return [], {}


def _decide(
    model: nn.Module,
    optimizers: Optimizers,
    fsdp_config: Any,
    precision: Any,
    device: Any,
    te_rng_seed: int,
) -> tuple[Translation, ShardingPlan, tuple[DeviceMesh, ...]]:
    """What will be done, and the mesh that the configuration brings, of which the plan knows the numbers alone."""
    legacy = LegacyConfig.read(fsdp_config)
    translation = translate(legacy, precision=precision, device=device, world_size=dist.get_world_size())
    if translation.config is None:
        blocking = "\n".join(str(finding) for finding in translation.blocking)
        is_unsupported = any(finding.outcome is Outcome.UNSUPPORTED for finding in translation.blocking)
        raise (UnsupportedError if is_unsupported else ConfigError)(
            f"{blocking}\n(strict: false in the same configuration turns this into a warning)"
        )
    config = translation.config
    checkpointing = replace(config.activation_checkpointing, transformer_engine_seed=te_rng_seed)
    config = replace(config, activation_checkpointing=checkpointing)
    plan = plan_sharding(model, config, optimizers=optimizers)
    present = (legacy.mesh,) if isinstance(legacy.mesh, DeviceMesh) else ()
    return translation, plan.resolve(dist.get_world_size()), present


def _report(translation: Translation, plan: ShardingPlan) -> None:
    """Rank 0 logs the report; what is not exactly what was asked for is a warning."""
    if dist.get_rank() != 0:
        return
    assert translation.config is not None
    level = logging.INFO if translation.config.verbose else logging.DEBUG
    if log.isEnabledFor(level):
        log.log(level, "%s\n%s", translation.explain(), plan.explain())
    for finding in translation.findings:
        if finding.outcome is Outcome.APPROXIMATE or finding.outcome.blocks:
            log.warning("fsdp_config.%s", finding)
    for note in plan.notes:
        log.warning("%s", note)
    for left in plan.left_out:
        log.warning(
            "%d parameters are in no unit (%s; the first is %s): they stay whole on every rank and their gradients are "
            "not averaged across ranks, as under FSDP1",
            len(left.names),
            left.reason,
            left.names[0],
        )
