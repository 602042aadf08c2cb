"""The peak device memory of a set-up and a step, counted by torch's allocator; on the CPU the peak host memory."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
import torch.distributed as dist
from support.gpus import Ranks, Recorder, on_gpus
from support.memory import HostMemory
from support.models import Model, tokens
from support.sharding import WAYS
from support.training import FULL, adamw
from torch import nn

from composer_fsdp2 import prepare_fully_shard

SIZES = {"cuda": {"num_blocks": 16, "width": 512}, "cpu": {"num_blocks": 8, "width": 32}}
MIB = 2**20
# The GPU's allocator rounds up, and small tensors share blocks of 2 MiB.
SLACK_BYTES = {"cuda": 1 * MIB, "cpu": 0}


def num_bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def peak_of(work: Callable[[], object], device: str) -> int:
    """The peak of memory allocated during ``work``, beyond the memory allocated before."""
    gc.collect()
    if device != "cuda":
        with HostMemory() as host:
            work()
        return host.peak_bytes
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def check_set_up(device: str) -> tuple[int, int]:
    """In bytes: the peak of allocations in sharding, and the size of the shards and the largest unit."""
    model = Model(**SIZES[device])
    optimizer = adamw(model)
    allowed = num_bytes(model) // dist.get_world_size() + 2 * max(map(num_bytes, model.decoder.blocks))
    return peak_of(lambda: prepare_fully_shard(model, optimizer, FULL, device=device), device), allowed


@on_gpus(1, 2)
def test_a_model_with_values_moves_unit_by_unit(ranks: Ranks):
    """A model built on the host is never unsharded on the device together with its shards, as under FSDP1.

    In the rehearsal it is already on the device, and sharding allocates only its shards.
    """
    for peak, allowed in ranks.run(check_set_up):
        assert peak <= allowed


def check_step(device: str) -> dict[str, int]:
    """The peak of a step with AdamW for each way to shard, beyond the memory of the sharded model and its optimizer."""
    peaks = {}
    for name, shard in WAYS.items():
        torch.manual_seed(0)
        model = Model(**SIZES[device])
        shard(model, device)
        optimizer = adamw(model)

        def step(model: Model = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            model(tokens(dist.get_rank()).to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        peaks[name] = peak_of(step, device)
        del model, optimizer, step
    return peaks


@on_gpus(1, 2, slow_rehearsal=True)
def test_a_step_needs_the_memory_of_the_hand_written_loop(ranks: Ranks, record_property: Recorder):
    """A batch that fits with fully_shard fits with us. FSDP1's peak is recorded; on one GPU it does not shard."""
    for number, peaks in enumerate(ranks.run(check_step)):
        assert peaks["ours"] <= peaks["by hand"] + SLACK_BYTES[ranks.device], peaks
        if number == 0:
            cells = {name: f"{peak / MIB:,.1f} MiB" for name, peak in peaks.items()}
            ranks.record(record_property, "peak of a step, beyond model and optimizer", cells)
