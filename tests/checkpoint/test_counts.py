"""What a load asks of a rank: bytes of the file, memory beyond what it fills, numbers that it gathers at once."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.checkpoints.samples import bytes_read
from support.memory import HostMemory
from support.ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

from composer_fsdp2 import load_checkpoint
from composer_fsdp2._torch.counting import Collectives
from composer_fsdp2.checkpoint.load import content

WIDTH, NUM_LAYERS, MOMENTS = 1024, 8, ("exp_avg", "exp_avg_sq")
FILE_BYTES = 3 * NUM_LAYERS * WIDTH**2 * 4  # 96 MiB
AT_ONCE_BYTES = 16 << 20  # beside what is filled, and a third of it


def write_checkpoint(path: Path) -> None:
    weights = {f"{number}.weight": torch.randn(WIDTH, WIDTH) for number in range(NUM_LAYERS)}
    state = {name: {"step": torch.tensor(1.0), **dict.fromkeys(MOMENTS, each)} for name, each in weights.items()}
    state = {name: {key: value.clone() for key, value in each.items()} for name, each in state.items()}
    groups = [{**torch.optim.AdamW([nn.Parameter(torch.ones(1))]).state_dict()["param_groups"][0], "params": [*state]}]
    optimizers = {"AdamW": {"state": state, "param_groups": groups}}
    torch.save({"state": {"model": weights, "optimizers": optimizers}, "rng": []}, path)


def check_load(path: str) -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
    for layer in (*model, model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    load_checkpoint(path, model, optimizer)  # imports
    tracemalloc.start()
    with HostMemory() as host:
        before = bytes_read()
        report = load_checkpoint(path, model, optimizer)
        read_bytes = bytes_read() - before
    of_python = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.num_bytes == pytest.approx(FILE_BYTES / 2, rel=0.001)
    assert FILE_BYTES / 2 <= read_bytes < 1.01 * FILE_BYTES / 2, f"{read_bytes:,} of {FILE_BYTES:,} bytes"
    # All is there before any of it becomes the model's.
    assert host.peak_bytes + of_python < FILE_BYTES / 2 + AT_ONCE_BYTES, f"{host.peak_bytes:,} and {of_python:,} bytes"


def test_a_rank_reads_its_part_of_a_file_and_holds_little_of_it(tmp_path: Path):
    """On a machine of eight ranks a model would have to fit its memory eight times, and be read eight times."""
    write_checkpoint(tmp_path / "file.pt")
    run_ranks(check_load, 2, str(tmp_path / "file.pt"))


def check_rounds() -> list[list[int]]:
    """One rank has 45 rows, the other 30; ten of each fit into a round."""
    rank = dist.get_rank()
    numbers = torch.arange(45 - 15 * rank)[:, None] + 1000 * rank
    rows = numbers.expand(-1, 6).contiguous()
    with mock.patch.object(content, "_ROUND_BYTES", 2 * 10 * 6 * 8), Collectives() as sent:
        picked = content._passed_on(rows, content._to_judge)
    gathers = [call.num_bytes for call in sent.calls if "gather" in call.operator]
    assert gathers == [2 * 10 * 6 * 8] * 5, gathers
    return picked.tolist()


def test_ranks_gather_a_bounded_part_at_a_time():
    """At 1,024 ranks all CRC32s of a checkpoint at once were 131 MiB on each rank, most of it other ranks' to judge."""
    of_ranks = run_ranks(check_rounds, 2)
    expected = [[number] * 6 for number in (*range(45), *range(1000, 1030))]
    assert sorted(row for rows in of_ranks for row in rows) == expected
    assert all(row[0] % 2 == rank for rank, rows in enumerate(of_ranks) for row in rows)
