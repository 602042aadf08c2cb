"""MPT-7B compared with FSDP1 on eight GPUs, and flash attention on two: LLM Foundry's model with random weights."""

from __future__ import annotations

import statistics
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from support.gpus import Ranks, Recorder, on_gpus
from support.mpt import MPT_7B, TINY, Size, TrainedMpt, train_mpt
from support.oracle import FSDP1_ON, FSDP2
from support.trainers import largest_difference

pytestmark = [pytest.mark.foundry, pytest.mark.timeout(4000)]  # 13 GB of parameters, three runs, two checkpoints

FOUNDRY = ("llm-foundry",)
CONFIG = {
    "sharding_strategy": "FULL_SHARD",
    "mixed_precision": "PURE",
    "activation_checkpointing": True,
    "activation_checkpointing_reentrant": False,
    "state_dict_type": "sharded",
}
BATCHES, SAVED_AT = {"cuda": 10, "cpu": 3}, {"cuda": 5, "cpu": 2}
WARMING_UP = 2  # batches in which the allocator and the choice of kernels settle
GIB = 2**30
# Relative. In bf16 sums have another order; on the CPU in fp32.
TOLERANCE = {"cuda": 1e-2, "cpu": 1e-5}
RESUMED_TOLERANCE = {"cuda": 1e-3, "cpu": 0.0}
MAX_PEAK = 1.05  # of FSDP1's


def train(device: str, who: str, size: Size, attention: str, batches: int, options: dict[str, Any]) -> TrainedMpt:
    """Trains with FSDP1 or with ours, in separate processes, because the allocator's state would affect the next
    run."""
    under = FSDP2 if who == "ours" else FSDP1_ON[device]
    return train_mpt(device, under, size, config=dict(CONFIG), attention=attention, batches=batches, **options)


def both(ranks: Ranks, size: Size, attention: str, batches: int, **saving: Any) -> tuple[TrainedMpt, TrainedMpt]:
    """The results of ours, which saves, and of FSDP1, on rank 0; checks that they agree."""
    theirs = ranks.run(train, "FSDP1", size, attention, batches, {}, timeout_s=1200)[0]
    ours = ranks.run(train, "ours", size, attention, batches, saving, timeout_s=1200)[0]
    assert (theirs.shards, ours.shards) == ({"FullyShardedDataParallel"}, {"FSDPModule"})
    assert len(theirs.losses) == batches
    difference = largest_difference(ours.losses, theirs.losses)
    assert difference <= TOLERANCE[ranks.device], f"{difference}: {ours.losses}, FSDP1 {theirs.losses}"
    return ours, theirs


@on_gpus(8, packages=FOUNDRY, disk_gib=120, rehearsal=2, slow=True, slow_rehearsal=True)
def test_mpt_7b(ranks: Ranks, tmp_path: Path, record_property: Recorder):
    """The run that users migrate: FSDP1's losses, at most FSDP1's memory, and a checkpoint that resumes."""
    on_gpu = not ranks.is_rehearsal
    size, attention = (MPT_7B if on_gpu else TINY), attention_of(ranks)
    batches, saved_at = BATCHES[ranks.device], SAVED_AT[ranks.device]
    saving = {"save_folder": str(tmp_path), "save_interval": f"{saved_at}ba", "save_num_checkpoints_to_keep": -1}
    ours, theirs = both(ranks, size, attention, batches, **saving)
    if on_gpu:  # the CPU does not count memory
        assert 0 < ours.peak_bytes <= MAX_PEAK * theirs.peak_bytes, (ours.peak_bytes, theirs.peak_bytes)
    resumed = ranks.run(
        train, "ours", size, attention, batches, {"load_path": f"{tmp_path}/ep0-ba{saved_at}"}, timeout_s=1200
    )[0]
    difference = largest_difference(resumed.losses, ours.losses[saved_at:])
    assert difference <= RESUMED_TOLERANCE[ranks.device], f"{resumed.losses}, {ours.losses}"
    for name, run in (("composer_fsdp2", ours), ("FSDP1", theirs)):
        cells = {
            "sharded by": name,
            "attention": attention,
            "median step": f"{statistics.median(run.seconds[WARMING_UP:]):.3f} s",
            "peak of rank 0": f"{run.peak_bytes / GIB:.2f} GiB",
            "last loss": f"{run.losses[-1]:.4f}",
        }
        ranks.record(record_property, "MPT-7B", cells)


def attention_of(ranks: Ranks) -> str:
    is_there = not ranks.is_rehearsal and any(metadata.distributions(name="flash-attn"))
    return "flash" if is_there else "torch"


@on_gpus(2, packages=(*FOUNDRY, "flash-attn"), capability=(8, 0), rehearsal=0)
def test_flash_attention(ranks: Ranks):
    """Its kernels only accept bf16: a unit's compute dtype reaches them, and the losses are FSDP1's."""
    small = Size(width=256, heads=4, layers=2, vocabulary=512, sequence=256, batch=2)
    both(ranks, small, "flash", 4)
