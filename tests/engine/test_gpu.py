"""What only a GPU shows: NCCL, host memory beside device memory, values drawn on the device. One GPU is enough."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.comparing import full
from support.models import Block, Model, tokens
from support.ranks import run_ranks
from support.training import FULL, adamw, train_alike
from torch.distributed.tensor import DTensor

from composer_fsdp2 import ShardedGradScaler, clip_grad_norm_, prepare_fully_shard

if torch.version.cuda is None:
    MISSING = "torch is built without CUDA"
elif not torch.cuda.is_available():
    MISSING = "no CUDA device is visible"
elif not dist.is_nccl_available():
    MISSING = "torch is built without NCCL"
else:
    MISSING = ""
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(MISSING), reason=f"needs a CUDA device: {MISSING}")]

OLD_GROUPS: list[Any] = []  # kept: ending a gloo group can hang


def run_on_gpus(check: Callable[..., Any], *args: Any) -> list[Any]:
    """One rank for each of the first two GPUs, on a plain NCCL group as Composer makes it."""
    with tempfile.TemporaryDirectory() as folder:
        world_size = min(2, torch.cuda.device_count())
        return run_ranks(with_nccl, world_size, str(Path(folder, "store")), check.__name__, args, fresh=True)


def with_nccl(store: str, name: str, args: tuple[Any, ...]) -> Any:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    OLD_GROUPS.extend(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()
    torch.cuda.set_device(rank)
    torch.backends.cuda.matmul.allow_tf32 = False
    file_store = dist.FileStore(store, world_size)
    # Without device_id, as Composer: communicators are made at the first collective of each group.
    dist.init_process_group("nccl", store=file_store, rank=rank, world_size=world_size)
    return globals()[name](*args)


def check_training(config: dict[str, Any]) -> set[str]:
    model = train_alike(Model, config, tokens, device="cuda", optimizer=adamw, rtol=1e-9, atol=1e-12)
    return {parameter.device.type for parameter in model.parameters()}


@pytest.mark.parametrize(
    ("config", "device_type"),
    [
        ({}, "cuda"),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, "cuda"),
        ({"sharding_strategy": "NO_SHARD"}, "cuda"),
        ({"data_parallel_replicate_degree": 1, "sharding_strategy": "HYBRID_SHARD"}, "cuda"),
        ({"activation_checkpointing": True, "activation_cpu_offload": True}, "cuda"),
        ({"forward_prefetch": True, "backward_prefetch_limit": 2}, "cuda"),
        ({"cpu_offload": True}, "cpu"),
        ({"cpu_offload": True, "sync_module_states": True}, "cpu"),
    ],
)
def test_trains_as_unsharded_on_the_gpu(config: dict[str, Any], device_type: str):
    """No setting changes what is learnt, with NCCL's collectives and streams; offloaded parameters rest on the CPU."""
    assert all(devices == {device_type} for devices in run_on_gpus(check_training, config))


def check_mixed_precision() -> dict[str, Any]:
    model = Model()
    prepare_fully_shard(model, None, {}, precision="amp_bf16", device="gpu")
    seen: dict[str, Any] = {}

    def look(module: Block, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        seen.update(
            input=args[0].dtype, weight=module.fc_in.weight.dtype, buffer=module.scale.dtype, output=output.dtype
        )

    # Before the block's own hook frees its parameters.
    model.decoder.blocks[0].register_forward_hook(look, prepend=True)
    model(tokens(0).cuda()).float().square().mean().backward()
    seen["gradients"] = {parameter.grad.dtype for parameter in model.parameters()}
    seen["saved"] = {value.dtype for value in model.state_dict().values()}
    return seen


def test_mixed_precision_on_the_gpu():
    """A bf16 run computes in bf16 and keeps fp32 gradients, parameters and checkpoints."""
    low, high = torch.bfloat16, torch.float32
    for seen in run_on_gpus(check_mixed_precision):
        assert seen == {
            "input": low,
            "weight": low,
            "buffer": low,
            "output": low,
            "gradients": {high},
            "saved": {high},
        }


def check_defaults() -> tuple[str, torch.dtype]:
    model = Model()
    prepare_fully_shard(model, None, {})
    dtypes = []
    model.decoder.head.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    model(tokens(0).cuda())
    return next(model.parameters()).device.type, dtypes[0]


def test_defaults_on_the_gpu():
    """Without a device and a precision the run takes the GPU and Composer's amp_fp16."""
    assert run_on_gpus(check_defaults)[0] == ("cuda", torch.float16)


def check_clipping(config: dict[str, Any]) -> None:
    torch.set_default_dtype(torch.float64)
    model, reference = Model(), Model().cuda()
    reference.load_state_dict(model.state_dict())
    prepare_fully_shard(model, None, FULL | config, device="gpu")
    batch = tokens(0).cuda()  # the same on all ranks, so the mean over ranks is each one's own
    for each in (model, reference):
        (100 * each(batch).square().mean()).backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e-3)
    (norm,) = clip_grad_norm_(model, 1e-3).values()
    assert norm.device.type == "cuda"
    torch.testing.assert_close(norm, expected, rtol=1e-9, atol=0)
    for name, parameter in reference.named_parameters():
        actual = full(model.get_parameter(name).grad)
        torch.testing.assert_close(actual.cuda(), parameter.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("config", [{}, {"cpu_offload": True}, {"sharding_strategy": "NO_SHARD"}])
def test_clipping_on_the_gpu(config: dict[str, Any]):
    """Gradients that rest on the CPU are clipped over plain NCCL, which knows no CPU tensors (pytorch#148532)."""
    run_on_gpus(check_clipping, config)


BLOCK_ORDER = ["", ".fc_in", ".fc_out"]
ORDER = [
    *(f"decoder.blocks.{i}{path}" for i in range(2) for path in BLOCK_ORDER),
    "decoder.embed",
    "decoder.norm",
    "decoder.head",
]


def check_meta(config: dict[str, Any]) -> None:
    torch.manual_seed(100)
    expected = Model(device="meta")
    for path in ORDER:
        module = expected.get_submodule(path)
        module.to_empty(device="cuda", recurse=False)
        module.reset_parameters()
    torch.manual_seed(100 + dist.get_rank())
    model = Model(device="meta")
    prepare_fully_shard(model, None, FULL | config, device="gpu")
    for name, parameter in expected.named_parameters():
        actual = model.get_parameter(name)
        assert isinstance(actual, DTensor)
        torch.testing.assert_close(full(actual).cuda(), parameter.detach(), rtol=0, atol=0)
    model(tokens(0).cuda()).sum().backward()


@pytest.mark.parametrize("config", [{}, {"cpu_offload": True}, {"sync_module_states": True}])
def test_meta_models_are_drawn_on_the_gpu(config: dict[str, Any]):
    """A model too large for the host is drawn on the device, unit by unit, with the values that one GPU would draw."""
    run_on_gpus(check_meta, config)


def check_ignored() -> set[str]:
    model = Model()
    ignored = model.decoder.blocks[0]
    prepare_fully_shard(model, None, FULL | {"ignored_modules": [ignored]}, device="gpu")
    assert {tensor.device.type for tensor in model.decoder.blocks[1].buffers()} == {"cuda"}
    return {tensor.device.type for tensor in (*ignored.parameters(), *ignored.buffers())}


def test_ignored_modules_stay_where_they_are():
    """A module that a user keeps on the host is not moved to the device, nor are its buffers."""
    assert all(devices == {"cpu"} for devices in run_on_gpus(check_ignored))


def check_peak() -> tuple[int, int]:
    """In bytes: what sharding allocated at most, and what the shards and the largest unit take."""
    model = Model(num_blocks=16)
    model.decoder.blocks = torch.nn.ModuleList(Block(512) for _ in range(16))
    optimizer = adamw(model)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    prepare_fully_shard(model, optimizer, FULL, device="gpu")
    sizes = [sum(p.numel() * p.element_size() for p in block.parameters()) for block in model.decoder.blocks]
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    return torch.cuda.max_memory_allocated() - before, whole // dist.get_world_size() + 2 * max(sizes)


def test_a_model_with_values_moves_unit_by_unit():
    """A model that was built on the host is never whole on the device beside its shards, as FSDP1 kept it."""
    for peak, allowed in run_on_gpus(check_peak):
        assert peak <= allowed


def check_scaled() -> tuple[bool, float]:
    """fp16 with one module that is whole; so large a scale overflows."""
    model = Model()
    optimizer = adamw(model)
    config = {"ignored_modules": [model.decoder.norm], "mixed_precision": "PURE"}
    prepare_fully_shard(model, optimizer, config, precision="amp_fp16", device="gpu")
    model.decoder.norm.cuda()
    scaler = ShardedGradScaler("cuda", init_scale=2.0**40)
    with torch.autocast("cuda", torch.float16):
        scaler.scale(model(tokens(0).cuda()).float().square().mean()).backward()
    before = full(model.decoder.head.weight).clone()
    scaler.step(optimizer)
    scaler.update()
    return torch.equal(before, full(model.decoder.head.weight)), scaler.get_scale()


def test_an_overflow_in_half_precision_skips_the_step():
    """Sharded gradients and a whole one in one scaler, with NCCL."""
    assert all(found == (True, 2.0**39) for found in run_on_gpus(check_scaled))
