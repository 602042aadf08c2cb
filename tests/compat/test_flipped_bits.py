"""After a bit flip anywhere in a checkpoint, the load is refused or returns the same values as without it.

``FLIPS=5000 python -m pytest tests/compat/test_flipped_bits.py -s`` flips that many bits in each fixture, and prints
the outcomes.
"""

from __future__ import annotations

import copy
import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.comparing import differences
from support.examples import IS_THOROUGH
from support.legacy import KINDS, checkpoint_of, legacy_model, legacy_optimizer
from support.ranks import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2 import load_checkpoint, prepare_fully_shard
from composer_fsdp2.errors import CheckpointError

pytestmark = pytest.mark.composer

FLIPS = int(os.environ.get("FLIPS", "40" if IS_THOROUGH else "16"))


def plain(value: Any) -> Any:
    """A copy of this rank's part of the value."""
    if isinstance(value, DTensor):
        return value.to_local().detach().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list) else copy.deepcopy(value)


class Target:
    """A sharded model and its optimizer, the target of many loads."""

    def __init__(self, kind: str) -> None:
        self.model: nn.Module = legacy_model(kind, seed=3)
        self.optimizer = legacy_optimizer(self.model)
        prepare_fully_shard(self.model, self.optimizer, {}, device="cpu", precision="fp32")
        self.before = self.state()
        self.text = ""

    def state(self) -> Any:
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        optimizer = {names[parameter]: own for parameter, own in self.optimizer.state.items()}
        groups = [{**group, "params": len(group["params"])} for group in self.optimizer.param_groups]
        return plain({"model": dict(self.model.state_dict()), "optimizer": optimizer, "groups": groups})

    @torch.no_grad()
    def renew(self) -> None:
        for name, value in self.model.state_dict().items():
            (value.to_local() if isinstance(value, DTensor) else value).copy_(self.before["model"][name])
        self.optimizer.state.clear()
        for group, before in zip(self.optimizer.param_groups, self.before["groups"], strict=True):
            params = group["params"]
            group.clear()
            group.update({**plain(before), "params": params})

    def load(self, path: Path) -> tuple[Any, Any]:
        """The state after a load and everything else in the file; None if refused."""
        try:
            report = load_checkpoint(path, self.model, self.optimizer)
        except CheckpointError as error:
            self.text = str(error)
            return None, None
        try:
            return self.state(), plain(report.other_entries())  # read now
        except CheckpointError as error:
            self.text = str(error)
            return self.state(), None


def check_flips(kind: str, source: str, folder: str, num_flips: int) -> Counter[str]:
    """The number of flips by outcome and file."""
    target = Target(kind)
    copied = Path(folder, Path(source).name)
    if dist.get_rank() == 0:
        (shutil.copytree if Path(source).is_dir() else shutil.copy)(source, copied)
    dist.barrier()
    expected = target.load(copied)
    assert None not in expected, target.text
    target.renew()
    files = sorted(file for file in copied.rglob("*") if file.is_file()) if copied.is_dir() else [copied]
    ends = [0]
    for file in files:
        ends.append(ends[-1] + file.stat().st_size)
    draw, counts, wrong = random.Random(f"{kind} {num_flips}"), Counter[str](), []
    for _ in range(num_flips):
        at, bit = draw.randrange(ends[-1]), draw.randrange(8)
        number = next(number for number, end in enumerate(ends[1:]) if at < end)
        where = f"{files[number].name}, byte {at - ends[number]}, bit {bit}"
        flip(files[number], at - ends[number], bit)
        state, entries = target.load(copied)
        flip(files[number], at - ends[number], bit)
        counts[f"{files[number].suffix or files[number].name}: {'refused' if entries is None else 'equal'}"] += 1
        # A refused load changes nothing; entries beside model and optimizer are read after it.
        unlike = list(differences(target.state(), target.before if state is None else expected[0], in_bits=True))
        if entries is not None:
            unlike += differences(entries, expected[1], in_bits=True)
        wrong += [f"{where}: {each}" for each in unlike[:1]]
        target.renew()
    assert not wrong, f"{len(wrong)} of {num_flips}\n" + "\n".join(wrong[:30])
    return counts


def flip(file: Path, at: int, bit: int) -> None:
    """Rank 0 flips the bit after a barrier. Called on all ranks."""
    dist.barrier()
    if dist.get_rank() == 0:
        with file.open("r+b") as data:
            data.seek(at)
            byte = data.read(1)[0]
            data.seek(at)
            data.write(bytes([byte ^ 1 << bit]))
    dist.barrier()


# Composer's own files with CRC32s, in each layout; "c032" is of Composer 0.32.1 with torch 2.7.
@pytest.mark.parametrize("kind", [*(KINDS if IS_THOROUGH else ("c220/sharded", "c172/local-flat")), "c032/full"])
def test_a_flipped_bit_is_never_loaded(kind: str, tmp_path: Path):
    """A disk, a cable or a memory module flips one bit of 40 GB: the run continued with an average of 1.6e36."""
    source, model = checkpoint_of(kind), kind
    if kind == "c032/full":
        source, model = tmp_path / "source.pt", "c172/full"
        torch.save(torch.load(checkpoint_of(model), weights_only=False), source)
    folder = tmp_path / "copy"
    folder.mkdir()
    counts = run_ranks(check_flips, 2, model, str(source), str(folder), FLIPS, timeout_s=60 + 4 * FLIPS)
    assert counts[0] == counts[1] and sum(counts[0].values()) == FLIPS
    print(f"\n{kind}: {dict(sorted(counts[0].items()))}")
