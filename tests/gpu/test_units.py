"""What autocast keeps of a unit's parameters on a GPU; tests/_torch/test_unit.py has what units take and return."""

from __future__ import annotations

import torch
import torch.distributed as dist
from support.gpus import Ranks, Recorder, on_gpus
from support.models import Model, tokens
from support.sharding import WAYS
from torch import nn

MIB = 2**20


def bf16_bytes(module: nn.Module) -> int:
    return sum(2 * parameter.numel() for parameter in module.parameters() if parameter.dim() > 1)


def check_cache(device: str) -> tuple[dict[str, int], int]:
    """Bytes that an evaluation leaves until autocast ends, by who sharded, and those of all weights in bf16."""
    kept, copies = {}, 0
    for name, shard in WAYS.items():
        torch.manual_seed(0)
        model = Model(num_blocks=16, width=1024)
        copies = sum(map(bf16_bytes, model.decoder.blocks))
        shard(model, device)
        for _ in range(2):  # the first makes what is made once
            with torch.autocast(device, torch.bfloat16), torch.no_grad():
                before = torch.cuda.memory_allocated()
                output = model(tokens(dist.get_rank()).to(device))
                kept[name] = torch.cuda.memory_allocated() - before - output.nbytes
                del output
        del model
    return kept, copies


@on_gpus(1, 2, rehearsal=0)
def test_autocast_keeps_no_weights(ranks: Ranks, record_property: Recorder):
    """Every rank would have the model in bf16 until the forward ends: torch's cache keeps a copy of each fp32 weight.

    ``tests/_torch/test_unit.py`` counts copies on the CPU.
    """
    kept, copies = ranks.run(check_cache)[0]
    assert kept["by hand"] > copies / 2, f"torch's cache keeps nothing any more: {kept}"
    assert kept["ours"] < copies / 16, kept
    cells = {name: f"{each / MIB:,.1f} MiB" for name, each in kept.items()} | {"bf16": f"{copies / MIB:,.1f} MiB"}
    ranks.record(record_property, "kept under autocast after a forward in fp32", cells)
