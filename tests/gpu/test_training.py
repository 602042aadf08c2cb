"""Behaviour that only a GPU shows: NCCL, host and device memory, random values on the device. One GPU is enough."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import full
from support.gpus import Ranks, on_gpus
from support.models import Model, tokens
from support.training import FULL, adamw, train_alike
from torch.distributed.tensor import DTensor

from composer_fsdp2 import ShardedGradScaler, clip_grad_norm_, prepare_fully_shard

TRAININGS: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {"sharding_strategy": "SHARD_GRAD_OP"},
    "NO_SHARD": {"sharding_strategy": "NO_SHARD"},
    "one replica": {"data_parallel_replicate_degree": 1, "sharding_strategy": "HYBRID_SHARD"},
    "recomputed": {"activation_checkpointing": True, "activation_cpu_offload": True},
    "prefetched": {"forward_prefetch": True, "backward_prefetch_limit": 2},
    "offloaded": {"cpu_offload": True},
    "offloaded, from rank 0": {"cpu_offload": True, "sync_module_states": True},
}


def check_training(device: str) -> None:
    def check(config: dict[str, Any]) -> None:
        model = train_alike(Model, config, tokens, device=device, optimizer=adamw, rtol=1e-9, atol=1e-12)
        where = {parameter.device.type for parameter in model.parameters()}
        assert where == ({"cpu"} if "cpu_offload" in config else {device}), where

    for_each(check, {name: (config,) for name, config in TRAININGS.items()})


@on_gpus(1, 2, rehearsal=0)  # tests/sharding/ has the CPU version
def test_trains_as_unsharded(ranks: Ranks):
    """No setting changes the training, with NCCL's collectives and streams; offloaded parameters stay on the CPU."""
    ranks.run(check_training)


def check_defaults(device: str) -> tuple[str, torch.dtype]:
    model = Model()
    prepare_fully_shard(model, None, {})
    dtypes = []
    model.decoder.head.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    model(tokens(0).to(device))
    return next(model.parameters()).device.type, dtypes[0]


@on_gpus(1, 2)
def test_defaults(ranks: Ranks):
    """Without a device and a precision, a run uses the GPU and Composer's amp_fp16; without a GPU, the CPU and fp32."""
    if ranks.is_rehearsal and torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU: without a device the run would take it")
    expected = ("cpu", torch.float32) if ranks.is_rehearsal else ("cuda", torch.float16)
    assert ranks.run(check_defaults)[0] == expected


def check_clipping(device: str) -> None:
    torch.set_default_dtype(torch.float64)

    def check(config: dict[str, Any]) -> None:
        model, reference = Model(), Model().to(device)
        reference.load_state_dict(model.state_dict())
        prepare_fully_shard(model, None, FULL | config, device=device)
        batch = tokens(0).to(device)  # the same on all ranks, so the mean over ranks is each rank's gradient
        for each in (model, reference):
            (100 * each(batch).square().mean()).backward()
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e-3)
        (norm,) = clip_grad_norm_(model, 1e-3).values()
        assert norm.device.type == device, norm.device
        torch.testing.assert_close(norm, expected, rtol=1e-9, atol=0)
        for name, parameter in reference.named_parameters():
            actual = full(model.get_parameter(name).grad)
            torch.testing.assert_close(actual.to(device), parameter.grad, rtol=1e-9, atol=1e-12)

    for_each(
        check,
        {"sharded": ({},), "offloaded": ({"cpu_offload": True},), "NO_SHARD": ({"sharding_strategy": "NO_SHARD"},)},
    )


@on_gpus(1, 2)
def test_clipping(ranks: Ranks):
    """Offloaded gradients are clipped over plain NCCL, which does not support CPU tensors (pytorch#148532)."""
    ranks.run(check_clipping)


BLOCK_ORDER = ["", ".fc_in", ".fc_out"]
ORDER = [
    *(f"decoder.blocks.{i}{path}" for i in range(2) for path in BLOCK_ORDER),
    "decoder.embed",
    "decoder.norm",
    "decoder.head",
]


def check_meta(device: str) -> None:
    def check(config: dict[str, Any]) -> None:
        torch.manual_seed(100)
        expected = Model(device="meta")
        for path in ORDER:
            module = expected.get_submodule(path)
            module.to_empty(device=device, recurse=False)
            module.reset_parameters()
        torch.manual_seed(100 + dist.get_rank())
        model = Model(device="meta")
        prepare_fully_shard(model, None, FULL | config, device=device)
        for name, parameter in expected.named_parameters():
            actual = model.get_parameter(name)
            assert isinstance(actual, DTensor)
            torch.testing.assert_close(full(actual).to(device), parameter.detach(), rtol=0, atol=0)
        model(tokens(0).to(device)).sum().backward()

    for_each(
        check,
        {"sharded": ({},), "offloaded": ({"cpu_offload": True},), "from rank 0": ({"sync_module_states": True},)},
    )


@on_gpus(1, 2)
def test_meta_models_are_drawn_on_the_device(ranks: Ranks):
    """A model too large for the host is initialized on the device, unit by unit, with the same values as on one GPU."""
    ranks.run(check_meta)


def check_scaled(device: str) -> tuple[bool, float]:
    """fp16 with one module that is not sharded; a scale of this size overflows."""
    model = Model()
    optimizer = adamw(model)
    config = {"ignored_modules": [model.decoder.norm], "mixed_precision": "PURE"}
    prepare_fully_shard(model, optimizer, config, precision="amp_fp16", device=device)
    model.decoder.norm.to(device)
    scaler = ShardedGradScaler(device, init_scale=2.0**40)
    with torch.autocast(device, torch.float16):
        scaler.scale(model(tokens(0).to(device)).float().square().mean()).backward()
    before = full(model.decoder.head.weight).clone()
    scaler.step(optimizer)
    scaler.update()
    return torch.equal(before, full(model.decoder.head.weight)), scaler.get_scale()


@on_gpus(1, 2)
def test_an_overflow_in_half_precision_skips_the_step(ranks: Ranks):
    """Sharded and unsharded gradients in one scaler, with NCCL."""
    assert all(found == (True, 2.0**39) for found in ranks.run(check_scaled))
