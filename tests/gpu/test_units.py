"""Inputs and outputs of a unit's forward, and the copies of its parameters in autocast's cache, on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from support.gpus import Ranks, Recorder, on_gpus
from support.models import WIDTH, Model, Running, features, layer, tokens
from support.sharding import WAYS
from support.training import train_alike
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

MIB = 2**20


@dataclass
class Out:
    hidden: torch.Tensor


def write_to_input(unit: Any, x: torch.Tensor) -> Out:
    return Out(unit.fc(unit.act(x)))


def run_recurrent(root: Any, x: torch.Tensor) -> Out:
    """Runs it on rows of different lengths."""
    packed = root.lstm(pack_padded_sequence(root.embed(x), torch.tensor([3, 2, 1]), batch_first=True))[0]
    x, _ = pad_packed_sequence(packed, batch_first=True)
    return Out(x + root.unit(x * 2).hidden)


def recurrent() -> nn.Module:
    """Its root returns a dataclass; its units receive a PackedSequence (cuDNN's LSTM) and write to their input."""
    unit = Running(write_to_input, act=nn.ReLU(inplace=True), fc=layer())
    lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
    root = Running(run_recurrent, {"lstm": True, "unit": True}, embed=layer(), lstm=lstm, unit=unit)
    return Running(lambda model, x: model.encoder(x).hidden, encoder=root)


def sequences(seed: int) -> torch.Tensor:
    return features(seed, 9).view(3, 3, WIDTH)


def check_containers(device: str) -> None:
    kept = {"sharding_strategy": "SHARD_GRAD_OP", "forward_prefetch": True}
    for config in ({}, kept, {"cpu_offload": True}):
        train_alike(recurrent, config, sequences, device=device, rtol=1e-9, atol=1e-12)


@on_gpus(1, 2, rehearsal=0)
def test_dataclasses_and_packed_sequences_train(ranks: Ranks):
    """A root whose output torch's pytree does not traverse silently never trained."""
    ranks.run(check_containers)


def bf16_bytes(module: nn.Module) -> int:
    return sum(2 * parameter.numel() for parameter in module.parameters() if parameter.dim() > 1)


def check_cache(device: str) -> tuple[dict[str, int], int]:
    """The bytes that an evaluation retains until autocast ends, for each way to shard, and the bytes of all weights in
    bf16."""
    kept, copies = {}, 0
    for name, shard in WAYS.items():
        torch.manual_seed(0)
        model = Model(num_blocks=16, width=1024)
        copies = sum(map(bf16_bytes, model.decoder.blocks))
        shard(model, device)
        for _ in range(2):  # the first includes one-time initialization
            with torch.autocast(device, torch.bfloat16), torch.no_grad():
                before = torch.cuda.memory_allocated()
                output = model(tokens(dist.get_rank()).to(device))
                kept[name] = torch.cuda.memory_allocated() - before - output.nbytes
                del output
        del model
    return kept, copies


@on_gpus(1, 2, rehearsal=0)
def test_autocast_keeps_no_weights(ranks: Ranks, record_property: Recorder):
    """Otherwise every rank would have the model in bf16 until the forward ends: torch's cache stores a copy of each
    fp32 weight.

    ``tests/_torch/test_unit.py`` counts copies on the CPU.
    """
    kept, copies = ranks.run(check_cache)[0]
    assert kept["by hand"] > copies / 2, f"torch's cache keeps nothing any more: {kept}"
    assert kept["ours"] < copies / 16, kept
    cells = {name: f"{each / MIB:,.1f} MiB" for name, each in kept.items()} | {"bf16": f"{copies / MIB:,.1f} MiB"}
    ranks.record(record_property, "kept under autocast after a forward in fp32", cells)
