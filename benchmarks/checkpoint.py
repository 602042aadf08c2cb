"""A large monolithic checkpoint: loaded on two ranks, converted to DCP and back, verified; beside torch and Composer.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --gib 1 --rounds 1 --json

The checkpoint is one ``torch.save`` file of a decoder with AdamW's state, as Composer writes it with
``state_dict_type: full``. Each load, copy, conversion and verification has processes of its own; a round makes one of
each, in an order that is turned around from round to round, and its ratios are to what was measured in the same round.
Needs Linux, the disk for three checkpoints and, for torch's and Composer's parts, the memory for two. Exit code 0, or 1
if a bar does not hold.
"""

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest import mock

import report
import torch
import torch.distributed as dist
from by_hand import local
from launch import on_ranks
from models import Model, Shape, shape_of
from report import Bar, machine, markdown, mib
from timing import gather
from torch import nn
from variants import missing

CACHES = {"cached": "in the page cache", "cold": "on the disk alone"}
LOADS = {"ours": "load_checkpoint", "torch": "torch, from rank 0", "composer": "Composer's Trainer"}
CONVERSIONS = {
    "cp": "cp and fsync",
    "to DCP": "convert_checkpoint, to DCP",
    "back": "convert_checkpoint, back",
    "torch to DCP": "torch_save_to_dcp",
    "torch back": "dcp_to_torch_save",
}
# What a verification is compared with.
SPEEDS = {"cached": "zlib.crc32", "cold": "reading the disk"}
MAX_LOAD_RATIO, MAX_CONVERT_RATIO, MIN_VERIFY_RATE = 1.0, 1.5, 0.7
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Task:
    """Something to be done by new processes, by its name in one of the tables."""

    name: str
    shape: Shape
    path: str
    to: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--gib", type=report.positive, default=4.0, help="size of the checkpoint; default: 4")
    parser.add_argument("--ranks", type=report.count, default=2)
    parser.add_argument("--rounds", type=report.count, default=3)
    parser.add_argument(
        "--folder", type=report.folder, default=tempfile.gettempdir(), help="on the disk to be measured"
    )
    given = parser.parse_args(arguments)
    loads = [name for name in LOADS if not missing(name)]
    shape = shape_of(int(given.gib * 2**30))
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="checkpoint-benchmark-") as folder:
        rounds = Rounds(Path(folder), shape, given.ranks, loads)
        for number in range(given.rounds):
            rounds.run(is_turned=number % 2 == 1)
        file_bytes = os.path.getsize(rounds.path)
    text = (
        f"{machine()}; {mib(file_bytes)} in one file, {shape.layers} layers of width {shape.width}, vocabulary "
        f"{shape.vocabulary}, fp32, AdamW; {given.ranks} ranks; {given.rounds} rounds\n\n"
        f"{_table(rounds.seconds, file_bytes)}\n"
    )
    summary = {"file_bytes": file_bytes, "digests": rounds.digests, "seconds": rounds.seconds}
    return report.conclude(given, _bars(rounds), summary=summary, text=text)


class Rounds:
    """The checkpoint with what was measured of it.

    Attributes:
        seconds: By what was done, a number for each round. What has two caches is there as ``name, cache``.
        digests: Of what was written (``file``) and of what each load left.
    """

    def __init__(self, folder: Path, shape: Shape, num_ranks: int, loads: Sequence[str]) -> None:
        self.path, self.dcp, self.to = (str(folder / name) for name in ("checkpoint.pt", "dcp", "converted"))
        self.shape, self.num_ranks, self.loads = shape, num_ranks, loads
        self.seconds: dict[str, list[float]] = {}
        self.digests: dict[str, list[int]] = {"file": [on_ranks(write, 1, "cpu", Task("", shape, self.path))]}
        # That the way there and back changes nothing.
        on_ranks(convert, 1, "cpu", Task("to DCP", shape, self.path, self.dcp))
        on_ranks(convert, 1, "cpu", Task("back", shape, self.dcp, self.to))
        on_ranks(verify, 1, "cpu", Task("", shape, self.to, self.path))
        os.unlink(self.to)

    def run(self, *, is_turned: bool) -> None:
        """One round."""
        steps: list[tuple[Callable[[str, str], None], str, str]] = []
        for cache in CACHES:
            steps += [*((self._load, name, cache) for name in self.loads), (self._verify, "verify", cache)]
        steps += [(self._convert, name, "") for name in CONVERSIONS]
        for step, name, cache in reversed(steps) if is_turned else steps:
            step(name, cache)

    def _load(self, name: str, cache: str) -> None:
        self._prepare(self.path, cache)
        digest, seconds = on_ranks(load, self.num_ranks, "cpu", Task(name, self.shape, self.path))
        self.digests.setdefault(name, []).append(digest)
        self._note(f"{name}, {cache}", seconds)

    def _verify(self, name: str, cache: str) -> None:
        """With what it is compared to just before it."""
        self._prepare(self.path, cache)
        self._note(SPEEDS[cache], read_through(self.path, zlib.crc32 if cache == "cached" else len))
        self._prepare(self.path, cache)
        self._note(f"{name}, {cache}", on_ranks(verify, 1, "cpu", Task("", self.shape, self.path)))

    def _convert(self, name: str, _: str) -> None:
        source = self.dcp if name.endswith("back") else self.path
        self._prepare(source, "cached")
        self._note(name, on_ranks(convert, 1, "cpu", Task(name, self.shape, source, self.to)))
        shutil.rmtree(self.to) if os.path.isdir(self.to) else os.unlink(self.to)

    def _note(self, name: str, seconds: float) -> None:
        self.seconds.setdefault(name, []).append(seconds)

    @staticmethod
    def _prepare(path: str, cache: str) -> None:
        os.sync()  # What was written before costs nobody else. A page that is not on the disk yet would stay.
        for file in files_of(path):
            if cache == "cached":
                read_through(file, len)
                continue
            with open(file, "rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def files_of(path: str) -> list[str]:
    """The file, or all files in the folder."""
    return sorted(entry.path for entry in os.scandir(path)) if os.path.isdir(path) else [path]


def read_through(path: str, function: Callable[[memoryview], object]) -> float:
    """Seconds to read a file once, in order, with this done to each part of it."""
    buffer, start = memoryview(bytearray(4 << 20)), perf_counter()
    with open(path, "rb", buffering=0) as file:
        while num_read := file.readinto(buffer):
            function(buffer[:num_read])
    return perf_counter() - start


# In processes of their own --------------------------------------------------------------------------------------------


def write(task: Task) -> int:
    """Random values of the model and of AdamW's state; their digest."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Model(task.shape)
    weights = {name: torch.randn(parameter.shape) for name, parameter in model.named_parameters()}
    state = {name: {key: torch.rand_like(each) for key in MOMENTS} for name, each in weights.items()}
    for each in state.values():
        each["step"] = torch.tensor(7.0)
    groups = [{**torch.optim.AdamW(model.parameters()).state_dict()["param_groups"][0], "params": list(weights)}]
    optimizers = {"AdamW": {"state": state, "param_groups": groups}}
    content = {"model": weights, "optimizers": optimizers, "run_name": "benchmark", "rank_zero_seed": 0}
    torch.save({"state": content, "rng": []}, task.path)
    return _digest(weights | {f"{name} {key}": state[name][key] for name in weights for key in MOMENTS})


def _digest(tensors: dict[str, torch.Tensor]) -> int:
    """Of names and bits; the digests of shards add up to that of the whole."""
    sums = (zlib.crc32(name.encode()) * int(tensor.view(torch.int32).sum()) for name, tensor in tensors.items())
    return sum(sums) % (1 << 61)


def load(task: Task) -> tuple[int, float]:
    """The digest of what all ranks loaded, and the seconds of the slowest. Called on all ranks."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.AdamW([parameter]).step()  # imports torch._dynamo, which takes seconds
    model, optimizer, seconds = {"ours": _ours, "torch": _torch, "composer": _composer}[task.name](task)
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[name] = local(parameter.detach())
        tensors |= {f"{name} {key}": local(optimizer.state[parameter][key]) for key in MOMENTS}
    return sum(gather(_digest(tensors))) % (1 << 61), max(gather(seconds))


_Loaded = tuple[nn.Module, torch.optim.Optimizer, float]


def _timed(call: Callable[[], Any]) -> float:
    dist.barrier()
    start = perf_counter()
    call()
    return perf_counter() - start


def _sharded(shape: Shape) -> tuple[Model, torch.optim.Optimizer]:
    """With real values, so that all of the model is resident before the load; AdamW has no state yet."""
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model = Model(shape)
    for module in (*model.decoder.blocks, model):
        fully_shard(module)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0)
    return model, torch.optim.AdamW(model.parameters())


def _ours(task: Task) -> _Loaded:
    from composer_fsdp2 import load_checkpoint

    model, optimizer = _sharded(task.shape)
    return model, optimizer, _timed(lambda: load_checkpoint(task.path, model, optimizer))


def _torch(task: Task) -> _Loaded:
    """As torch's documentation has it; rank 0 maps the file, instead of reading all of it into its memory."""
    from torch.distributed.checkpoint import state_dict as of_torch

    model, optimizer = _sharded(task.shape)
    options = of_torch.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

    def call() -> None:
        weights, state = {}, {}
        if dist.get_rank() == 0:
            saved = torch.load(task.path, mmap=True, map_location="cpu", weights_only=True)["state"]
            weights, state = saved["model"], saved["optimizers"]["AdamW"]
        of_torch.set_model_state_dict(model, weights, options=options)
        of_torch.set_optimizer_state_dict(model, optimizer, state, options=options)

    return model, optimizer, _timed(call)


def _composer(task: Task) -> _Loaded:
    """A Trainer with ``load_path``, of which the load alone is measured."""
    from composer import Trainer
    from composer.utils import FSDP2Config, ParallelismConfig, checkpoint
    from trainer_parts import Language

    model, seconds, load_checkpoint = Language(task.shape), list[float](), checkpoint.load_checkpoint
    optimizer = torch.optim.AdamW(model.parameters())

    def timed_load(*args: Any, **kwargs: Any) -> Any:
        results: list[Any] = []
        seconds.append(_timed(lambda: results.append(load_checkpoint(*args, **kwargs))))
        return results[0]

    with (
        open(os.devnull, "w") as nowhere,  # for Composer's words; an error still is seen
        contextlib.redirect_stderr(nowhere),
        mock.patch.object(checkpoint, "load_checkpoint", timed_load),
    ):
        fsdp2 = ParallelismConfig(fsdp2=FSDP2Config(state_dict_type="full"))
        trainer = Trainer(
            model=model, optimizers=optimizer, device="cpu", parallelism_config=fsdp2, load_path=task.path,
            progress_bar=False,
        )  # fmt: skip
    return trainer.state.model, optimizer, seconds[0]


def convert(task: Task) -> float:
    """Seconds until all of it is on the disk."""
    warnings.simplefilter("ignore")  # torch's of itself
    from torch.distributed.checkpoint import format_utils

    from composer_fsdp2 import convert_checkpoint

    calls: dict[str, Callable[[str, str], object]] = {
        # Byte by byte: a file system that can share the blocks of both would copy nothing.
        "cp": lambda source, to: subprocess.run(["cp", "--reflink=never", source, to], check=True),
        "to DCP": lambda source, to: convert_checkpoint(source, to, to="dcp"),
        "back": lambda source, to: convert_checkpoint(source, to, to="monolithic"),
        "torch to DCP": format_utils.torch_save_to_dcp,
        "torch back": format_utils.dcp_to_torch_save,
    }
    start = perf_counter()
    calls[task.name](task.path, task.to)
    for path in files_of(task.to):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    return perf_counter() - start


def verify(task: Task) -> float:
    """Seconds; SystemExit if the checkpoint is not in order, or not equal to the one at ``to``."""
    from composer_fsdp2 import verify_checkpoint

    start = perf_counter()
    found = verify_checkpoint(task.path, task.to or None)
    if not found.ok:
        raise SystemExit(str(found))
    return perf_counter() - start


# What is said of it ---------------------------------------------------------------------------------------------------


def _ratio(seconds: dict[str, list[float]], name: str, to: str) -> float:
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[to], strict=True))


def _bars(rounds: Rounds) -> list[Bar]:
    seconds, written = rounds.seconds, set(rounds.digests["file"])
    wrong = [name for name, digests in rounds.digests.items() if set(digests) != written]
    bars = [Bar("what was loaded is what was written", ", ".join(wrong) or "by all", not wrong)]
    for cache, where in CACHES.items():
        ratio = _ratio(seconds, f"ours, {cache}", f"torch, {cache}")
        rate = _ratio(seconds, SPEEDS[cache], f"verify, {cache}")
        bars += [
            Bar(f"load, {where}: no slower than torch", f"{ratio:.2f} of its time", ratio <= MAX_LOAD_RATIO),
            Bar(
                f"verify, {where}: at least {MIN_VERIFY_RATE} of the speed of {SPEEDS[cache]}",
                f"{rate:.2f}",
                rate >= MIN_VERIFY_RATE,
            ),
        ]
    for name in ("to DCP", "back"):
        ratio = _ratio(seconds, name, "cp")
        promise = f"{CONVERSIONS[name]}: at most {MAX_CONVERT_RATIO} times cp and fsync"
        bars.append(Bar(promise, f"{ratio:.2f}", ratio <= MAX_CONVERT_RATIO))
    return bars


def _table(seconds: dict[str, list[float]], file_bytes: int) -> str:
    """Each row with the median, the ratio to what it is compared with, and the speed."""
    rows = []
    for cache, where in CACHES.items():
        compared = dict.fromkeys(LOADS, f"torch, {cache}") | {"verify": SPEEDS[cache]}
        titles = LOADS | {"verify": "verify_checkpoint"}
        rows += [(f"{titles[each]}, {where}", f"{each}, {cache}", to) for each, to in compared.items()]
        rows.append((SPEEDS[cache], SPEEDS[cache], SPEEDS[cache]))
    rows += [(title, name, "cp") for name, title in CONVERSIONS.items()]
    cells = []
    for title, name, to in (row for row in rows if row[1] in seconds):
        median = statistics.median(seconds[name])
        ratio = "" if name == to else f"{_ratio(seconds, name, to):.2f} of {to.partition(',')[0]}"
        cells.append([title, f"{median:.1f} s", f"{file_bytes / 2**20 / median:,.0f} MiB/s", ratio])
    return markdown(["from and to the disk", "median", "speed", "of the time of"], cells)


if __name__ == "__main__":
    sys.exit(main())
