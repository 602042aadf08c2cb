"""The cost of a load on a rank: bytes read from the file, and temporary memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
import torch
from support.checkpoints.samples import bytes_read
from support.memory import HostMemory
from support.ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

from composer_fsdp2 import load_checkpoint

WIDTH, NUM_LAYERS, MOMENTS = 1024, 8, ("exp_avg", "exp_avg_sq")
FILE_BYTES = 3 * NUM_LAYERS * WIDTH**2 * 4  # 96 MiB
AT_ONCE_BYTES = 16 << 20  # beside the target, and a third of it


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
    of_python = tracemalloc.get_traced_memory()[1]  # tracemalloc never stops: see the test
    assert report.num_bytes == pytest.approx(FILE_BYTES / 2, rel=0.001)
    assert FILE_BYTES / 2 <= read_bytes < 1.01 * FILE_BYTES / 2, f"{read_bytes:,} of {FILE_BYTES:,} bytes"
    # Everything is read before the model changes.
    assert host.peak_bytes + of_python < FILE_BYTES / 2 + AT_ONCE_BYTES, f"{host.peak_bytes:,} and {of_python:,} bytes"


def test_a_rank_reads_its_part_of_a_file_and_holds_little_of_it(tmp_path: Path):
    """Otherwise a machine of eight ranks would need memory for eight copies of a model, and read it eight times.

    Runs on separate ranks: tracemalloc.stop() crashes Python 3.11 while a thread ends, and join() returns before a
    thread has freed its state (CPython issue 128679).
    """
    write_checkpoint(tmp_path / "file.pt")
    run_ranks(check_load, 2, str(tmp_path / "file.pt"), fresh=True)
