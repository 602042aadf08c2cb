"""A large monolithic checkpoint: loaded on two ranks, converted to DCP and back, verified; compared with torch.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --gib 1 --rounds 1 --json

The checkpoint is one ``torch.save`` file of a decoder with AdamW's state, as Composer writes it with ``state_dict_type:
full``. Each load, copy, conversion and verification runs in new processes. A round runs each once, in an order that is
reversed from round to round, and ratios compare measurements of the same round. Requires Linux, disk space for three
checkpoints and, for torch's part, memory for two. Exit code 0, or 1 if a bar fails.
"""

import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import report
import torch
import torch.distributed as dist
from by_hand import local
from launch import on_ranks
from models import Model, Shape, shape_of
from report import Bar, machine, markdown, mib
from timing import gather
from torch import nn

CACHES = {"cached": "in the page cache", "cold": "on the disk alone"}
OURS, BY_TORCH = "load_checkpoint", "torch, from rank 0"
COPY, TO_DCP, BACK = "cp and fsync", "convert_checkpoint, to DCP", "convert_checkpoint, back"
# A check uses two threads, so it may be faster than its reference.
SPEEDS = {"cached": "zlib.crc32", "cold": "reading"}
MAX_LOAD_RATIO, MAX_CONVERT_RATIO, MAX_VERIFY_RATIO = 1.0, 1.5, 1.43
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Task:
    """A task for new processes, by its name in one of the tables; on a file or folder ``path``."""

    name: str
    shape: Shape
    path: str
    to: str = ""


@dataclass(frozen=True, slots=True)
class Work:
    """Timed in each round: ``function(task)``, which returns seconds and a digest of the loaded tensors.

    Args:
        beside: The title of the task that its time is divided by; the ratio is at most ``limit``.
    """

    function: Callable[[Task], tuple[float, int]]
    task: Task
    cache: str
    beside: str
    limit: float = math.inf
    num_ranks: int = 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--gib", type=float, default=4.0, help="size of the checkpoint; default: 4")
    parser.add_argument("--ranks", type=report.count, default=2)
    parser.add_argument("--rounds", type=report.count, default=3)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk to be measured")
    given = parser.parse_args(arguments)
    shape = shape_of(int(given.gib * 2**30))
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="checkpoint-benchmark-") as folder:
        path, dcp, to = (os.path.join(folder, name) for name in ("checkpoint.pt", "dcp", "converted"))
        digest = on_ranks(write, 1, "cpu", Task("", shape, path, dcp))
        works = _works(shape, given.ranks, path, dcp, to)
        seconds, digests = measure(works, given.rounds)
        file_bytes = os.path.getsize(path)
    wrong = [title for title, each in digests.items() if set(each) - {digest, 0}]
    bars = [Bar("what was loaded is what was written", ", ".join(wrong) or "by all", not wrong)]
    rows = []
    for title, work in works.items():
        ratio = statistics.median(a / b for a, b in zip(seconds[title], seconds[work.beside], strict=True))
        median, beside = statistics.median(seconds[title]), work.beside.partition(", ")[0]
        speed = f"{file_bytes / 2**20 / median:,.0f} MiB/s"
        rows.append([title, f"{median:.1f} s", speed, "" if work.beside == title else f"{ratio:.2f} of {beside}"])
        if work.limit < math.inf:
            promise = f"{title}: at most {work.limit} times {beside}"
            bars.append(Bar(promise, f"{ratio:.2f}", ratio <= work.limit))
    text = (
        f"{machine()}; {mib(file_bytes)} in one file, {shape.layers} layers of width {shape.width}, vocabulary "
        f"{shape.vocabulary}, fp32, AdamW; {given.ranks} ranks; {given.rounds} rounds\n\n"
        f"{markdown(['from and to the disk', 'median', 'speed', 'of the time of'], rows)}\n"
    )
    summary = {"file_bytes": file_bytes, "seconds": seconds}
    return report.conclude(given, bars, summary=summary, text=text)


def _works(shape: Shape, num_ranks: int, path: str, dcp: str, to: str) -> dict[str, Work]:
    """The tasks by title."""
    works = {}
    for cache, where in CACHES.items():
        for name in (OURS, BY_TORCH):
            limit, beside = MAX_LOAD_RATIO if name == OURS else math.inf, f"{BY_TORCH}, {where}"
            works[f"{name}, {where}"] = Work(load, Task(name, shape, path), cache, beside, limit, num_ranks)
        speed = f"{SPEEDS[cache]}, {where}"
        works[speed] = Work(read, Task(cache, shape, path), cache, speed)
        works[f"verify_checkpoint, {where}"] = Work(verify, Task("", shape, path), cache, speed, MAX_VERIFY_RATIO)
    for name, source in ((COPY, path), (TO_DCP, path), (BACK, dcp)):
        limit = math.inf if name == COPY else MAX_CONVERT_RATIO
        works[name] = Work(convert, Task(name, shape, source, to), "cached", COPY, limit)
    return works


def measure(works: dict[str, Work], num_rounds: int) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
    """Seconds and digests of each task, for each round."""
    seconds: dict[str, list[float]] = {title: [] for title in works}
    digests: dict[str, list[int]] = {title: [] for title in works}
    for number in range(num_rounds):
        for title, work in reversed(works.items()) if number % 2 else works.items():
            os.sync()  # Written data must not slow down the next task. Dirty pages cannot be evicted from the cache.
            for file in files_of(work.task.path):
                with open(file, "rb") as opened:
                    if work.cache == "cold":
                        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    else:
                        while opened.read(4 << 20):
                            pass
            took, digest = on_ranks(work.function, work.num_ranks, "cpu", work.task)
            seconds[title].append(took)
            digests[title].append(digest)
            if work.task.to:
                shutil.rmtree(work.task.to) if os.path.isdir(work.task.to) else os.unlink(work.task.to)
    return seconds, digests


def files_of(path: str) -> list[str]:
    """The file, or all files in the folder."""
    return sorted(entry.path for entry in os.scandir(path)) if os.path.isdir(path) else [path]


# In new processes ----------------------------------------------------------------------------------------------------


def write(task: Task) -> int:
    """Write random values of the model and of AdamW's state, as a file and as DCP; returns their digest."""
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
    convert(Task(TO_DCP, task.shape, task.path, task.to))
    verify(Task("", task.shape, task.to, task.path))
    return _digest(weights | {f"{name} {key}": state[name][key] for name in weights for key in MOMENTS})


def _digest(tensors: dict[str, torch.Tensor]) -> int:
    """A digest of names and bits; the digests of shards add up to that of the full tensors."""
    sums = (zlib.crc32(name.encode()) * int(tensor.view(torch.int32).sum()) for name, tensor in tensors.items())
    return sum(sums) % (1 << 61)


def load(task: Task) -> tuple[float, int]:
    """The slowest rank's seconds, and the digest of all loaded values. Called on all ranks."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.AdamW([parameter]).step()  # imports torch._dynamo, which takes seconds
    model, optimizer, seconds = {OURS: _ours, BY_TORCH: _torch}[task.name](task)
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[name] = local(parameter.detach())
        tensors |= {f"{name} {key}": local(optimizer.state[parameter][key]) for key in MOMENTS}
    return max(gather(seconds)), sum(gather(_digest(tensors))) % (1 << 61)


_Loaded = tuple[nn.Module, torch.optim.Optimizer, float]


def _timed(call: Callable[[], Any]) -> float:
    dist.barrier()
    start = perf_counter()
    call()
    return perf_counter() - start


def _sharded(shape: Shape) -> tuple[Model, torch.optim.Optimizer]:
    """With real values, so the whole model is resident before the load; AdamW has no state yet."""
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
    """As in torch's documentation; rank 0 maps the file instead of reading all of it into memory."""
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


def read(task: Task) -> tuple[float, int]:
    """Read a file once, sequentially; from the cache, with its CRC32."""
    buffer, start = memoryview(bytearray(4 << 20)), perf_counter()
    with open(task.path, "rb", buffering=0) as file:
        while num_read := file.readinto(buffer):
            if task.name == "cached":
                zlib.crc32(buffer[:num_read])
    return perf_counter() - start, 0


def convert(task: Task) -> tuple[float, int]:
    """Converts until all data is on disk."""
    from composer_fsdp2 import convert_checkpoint

    start = perf_counter()
    if task.name == COPY:  # Byte by byte: a file system with block sharing would copy nothing.
        subprocess.run(["cp", "--reflink=never", task.path, task.to], check=True)
    else:
        convert_checkpoint(task.path, task.to, to="dcp" if task.name == TO_DCP else "monolithic")
    for path in files_of(task.to):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    return perf_counter() - start, 0


def verify(task: Task) -> tuple[float, int]:
    """Raises SystemExit if the checkpoint is damaged, or differs from the one at ``to``."""
    from composer_fsdp2 import verify_checkpoint

    start = perf_counter()
    found = verify_checkpoint(task.path, task.to or None)
    if not found.ok:
        raise SystemExit(str(found))
    return perf_counter() - start, 0


if __name__ == "__main__":
    sys.exit(main())
