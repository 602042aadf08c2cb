"""Transformer Engine's layers and checkpointing in FP8."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from support.comparing import full
from support.gpus import Ranks, on_gpus
from support.models import Chain, features
from support.training import assert_close, named_parameters
from torch import nn

from composer_fsdp2 import prepare_fully_shard

WIDTH, BATCH = 64, 32  # FP8 kernels need multiples of 16
RECOMPUTED = {
    "activation_checkpointing": True,
    "activation_checkpointing_reentrant": False,
    "te_checkpoint_wrapper": True,
}


class Block(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class Body(nn.Sequential):
    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        return isinstance(module, Block)

    activation_checkpointing_fn = fsdp_wrap_fn


def build(linear: Callable[..., nn.Module]) -> nn.Module:
    pairs = [(linear(WIDTH, 2 * WIDTH), linear(2 * WIDTH, WIDTH)) for _ in range(2)]
    return Chain(body=Body(*(Block(up, nn.Tanh(), down) for up, down in pairs)))


def check_gradients(device: str) -> None:
    """The gradients with and without recomputation are equal; they also depend on FP8's scales."""
    import transformer_engine.pytorch as te  # type: ignore[import-not-found]

    gradients = []
    for each in ({}, RECOMPUTED):
        torch.manual_seed(0)
        with torch.device(device):
            model = build(partial(te.Linear, params_dtype=torch.float32))
        prepare_fully_shard(model, None, each | {"mixed_precision": "PURE"}, "amp_fp8", device, te_rng_seed=77)
        for batch in range(2):  # the second uses the scales of the first
            x = features(batch + dist.get_rank(), batch_size=BATCH, width=WIDTH).to(device, torch.bfloat16)
            with te.fp8_autocast():
                loss = model(x).float().square().mean()
            loss.backward()
        gradients.append({name: full(parameter.grad) for name, parameter in named_parameters(model).items()})
    plain, recomputed = gradients
    assert plain.keys() == recomputed.keys() and len(plain) == 8, plain.keys()
    for name, gradient in recomputed.items():
        assert gradient.abs().sum() > 0, name
        assert_close(name, gradient, plain[name], rtol=1e-2, atol=1e-4)


@on_gpus(2, packages=("transformer-engine",), capability=(8, 9), rehearsal=0)  # tests/sharding/ has the CPU version
def test_fp8_layers_are_sharded_and_recomputed(ranks: Ranks):
    """Scales of an fp8 run are buffers and extra state of its modules, which sharding must not change."""
    ranks.run(check_gradients)
