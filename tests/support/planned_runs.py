"""The runs that ``plan`` takes, of a small model, made by hand."""

from __future__ import annotations

from typing import Any

import torch
from support.models import Model
from torch import nn

from composer_fsdp2 import plan_sharding, translate
from composer_fsdp2.preflight.preflight_run import OptimizerChoice, PreflightRun


def squares(model: nn.Module, rows: int, tokens: int) -> torch.Tensor:
    device = next(model.parameters()).device
    return model(torch.zeros(rows, tokens, dtype=torch.long, device=device)).square().sum()


def planned_run(
    config: dict[str, Any] | None = None,
    *,
    world_size: int = 4,
    num_blocks: int = 2,
    num_microbatches: int = 2,
    optimizer: OptimizerChoice | None = None,
) -> PreflightRun:
    """Two blocks of 280 elements and a root of 400, in fp32."""
    with torch.device("meta"):
        model = Model(num_blocks=num_blocks, width=8, vocabulary=24)
    given = {"sharding_strategy": "FULL_SHARD"} | (config or {})
    translation = translate(given, precision="fp32", device="cuda", world_size=world_size)
    return PreflightRun(
        model=model,
        translation=translation,
        plan=plan_sharding(model, translation.config, precision=translation.precision),
        world_size=world_size,
        loss=squares,
        precision="fp32",
        microbatch_size=2,
        num_microbatches=num_microbatches,
        batch_rows=2 * num_microbatches,
        sequence_length=16,
        optimizer=optimizer or OptimizerChoice(name="adamw", options={}),
        findings=(),
    )
