"""Compiled models, sharded: with inductor's kernels on a GPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import full
from support.gpus import Ranks, on_gpus
from support.models import Model, tokens
from support.training import FULL, assert_close, named_parameters
from torch import nn

from composer_fsdp2 import prepare_fully_shard


def compiled_blocks(model: nn.Module) -> nn.Module:
    """As in recipes for large models, because blocks of one kind compile once."""
    for block in model.decoder.blocks:
        block.compile()
    return model


def gradients(device: str, config: dict[str, Any], compiled: Any) -> dict[str, torch.Tensor]:
    """The gradients after two microbatches; the second runs the compiled code of the first."""
    torch.manual_seed(0)
    model = Model()
    prepare_fully_shard(model, None, FULL | config, device=device)
    runs = compiled(model)
    for seed in range(2):
        runs(tokens(2 * dist.get_rank() + seed).to(device)).square().mean().backward()
    return {name: full(parameter.grad) for name, parameter in named_parameters(model).items()}


def check_compiled(device: str) -> None:
    def check(config: dict[str, Any], compiled: Any) -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        expected = gradients(device, config, lambda model: model)
        for name, gradient in gradients(device, config, compiled).items():
            assert_close(name, gradient, expected[name], rtol=1e-4, atol=1e-6)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"

    configs: dict[str, dict[str, Any]] = {"FULL_SHARD": {}, "recomputed": {"activation_checkpointing": True}}
    for_each(
        check,
        {
            f"{name}, {compiled.__name__}": (config, compiled)
            for name, config in configs.items()
            for compiled in (compiled_blocks, torch.compile)  # the latter as the Trainer's compile_config
        },
    )


@on_gpus(2, rehearsal=0)  # tests/_torch/test_unit.py has the CPU version
def test_a_compiled_model_trains_alike(ranks: Ranks):
    """compile_config can stay in the YAML: all-gathers and reduce-scatters run around compiled blocks."""
    ranks.run(check_compiled, fresh=True)
