"""A full checkpoint (``state_dict_type: full``) of a sharded model with AdamW's state: how long its save takes.

    python benchmarks/saving.py
    python benchmarks/saving.py --against REVISION          # beside our save of that commit
    python benchmarks/saving.py --ranks 4 --strategy HYBRID_SHARD
    python benchmarks/saving.py --simulate 512              # what would travel, counted; nothing is saved

All saves are made by the same processes of the same state, each until the file is on the disk. A round makes each
once, in an order drawn anew, and its ratios are to torch's: the state gathered whole on rank 0, tensor by tensor, and
saved by ``torch.save``, as Composer did for FSDP1. Exit code 0, or 1 if a bar does not hold.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report
import torch
import torch.distributed as dist
from launch import on_ranks
from loading import shape_of
from models import Model
from report import Bar, machine, markdown, mib
from revision import checked_out, imported_from
from timing import Result, ratios, turns
from torch.distributed.tensor import DTensor

from composer_fsdp2 import prepare_fully_shard, save_monolithic
from composer_fsdp2.checkpoint.boxes import Box
from composer_fsdp2.checkpoint.save.rounds import Routes, Timetable, numbered

TITLES = {"ours": "save_monolithic", "revision": "save_monolithic of the revision", "torch": "full_tensor, torch.save"}
STRATEGIES = ("FULL_SHARD", "HYBRID_SHARD", "NO_SHARD")
MAX_RATIO = 1.0  # of the revision's

Save = Callable[[Any, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What one run measures."""

    mib: int
    device_type: str
    ranks: int
    rounds: int
    strategy: str
    folder: str
    revision_folder: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    if given.simulate:
        counts = simulate(given.simulate)
        print(json.dumps(counts) if given.json else _counts_text(counts))
        return 0
    with checked_out(given.against) as revision_folder, tempfile.TemporaryDirectory(dir=given.folder) as folder:
        options = Options(
            mib=given.mib,
            device_type=given.device,
            ranks=report.ranks_of(given),
            rounds=given.rounds,
            strategy=given.strategy,
            folder=folder,
            revision_folder=revision_folder,
        )
        result = on_ranks(measure, options.ranks, options.device_type, options)
    summary = {
        "ratio": {name: statistics.median(ratios(result, name, to="torch")) for name in result},
        "seconds": {name: each["seconds"] for name, each in result.items()},
    }
    return report.conclude(given, _bars(result), summary=summary, text=_text(options, result))


def _parser() -> argparse.ArgumentParser:
    parser = report.parser(__doc__)
    parser.add_argument("--mib", type=report.count, default=512, help="size of the checkpoint; default: 512")
    report.add_device(parser)
    parser.add_argument("--rounds", type=report.count, default=10)
    parser.add_argument("--strategy", choices=STRATEGIES, default=STRATEGIES[0], help="HYBRID_SHARD: two replicas")
    report.add_revision(parser)
    parser.add_argument(
        "--folder", type=report.folder, default=tempfile.gettempdir(), help="on the disk to be measured"
    )
    parser.add_argument(
        "--simulate", type=report.count, metavar="RANKS", help="count for so many ranks, and save nothing"
    )
    return parser


# On the ranks ---------------------------------------------------------------------------------------------------------


def measure(options: Options) -> Result:
    """Of each save the seconds of rank 0, which is the last to be done. Called on all ranks."""
    state = _state(options)
    saves: dict[str, Save] = {"ours": save_monolithic, "torch": _save_by_torch}
    if options.revision_folder:
        with imported_from(options.revision_folder):
            from composer_fsdp2 import save_monolithic as of_revision
        saves["revision"] = of_revision
    path = f"{options.folder}/full.pt"
    result: Result = {name: {"seconds": []} for name in TITLES if name in saves}
    for name, is_timed in turns(list(result), options.rounds, warmup=1):  # which makes connections and imports
        Path(path).unlink(missing_ok=True)
        if options.device_type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        saves[name](state, path)
        if is_timed:
            result[name]["seconds"].append(time.perf_counter() - start)
    return result


def _state(options: Options) -> dict[str, Any]:
    shape, device = shape_of(options.mib << 20), torch.device(options.device_type)
    model = Model(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    replicas = {"data_parallel_replicate_degree": 2} if options.strategy == "HYBRID_SHARD" else {}
    prepare_fully_shard(model, optimizer, {"sharding_strategy": options.strategy, **replicas}, "fp32", device)
    model(shape.tokens(dist.get_rank()).to(device)).backward()
    optimizer.step()
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    of_optimizer = {names[parameter]: dict(values) for parameter, values in optimizer.state.items()}
    return {"state": {"model": model.state_dict(), "optimizers": {"AdamW": {"state": of_optimizer}}}}


def _save_by_torch(state: Any, path: str) -> None:
    whole = _whole(state)
    if dist.get_rank() == 0:
        with open(path, "wb") as file:
            torch.save(whole, file)
            file.flush()
            os.fsync(file.fileno())
    dist.barrier()


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole(part) for key, part in value.items()}
    if isinstance(value, DTensor):
        whole = value.full_tensor()
        return whole.cpu() if dist.get_rank() == 0 else None
    return value.cpu() if isinstance(value, torch.Tensor) else value


# What many ranks would send -------------------------------------------------------------------------------------------

# Llama 3.1 70B: (shape, how many tensors have it); three of each with Adam, in fp32.
LLAMA_70B = (
    ((8192, 8192), 160),
    ((1024, 8192), 160),
    ((28672, 8192), 160),
    ((8192, 28672), 80),
    ((8192,), 161),
    ((128256, 8192), 2),
)
_MESSAGE_BYTES = 16 << 20  # the largest of the point-to-point messages that rounds have taken the place of


def simulate(num_ranks: int) -> dict[str, Any]:
    """What ``num_ranks`` send for a model of 70B parameters; the part of each is its rows, as ``fully_shard`` cuts."""
    cuts = [_rows(shape, num_ranks) for shape, count in LLAMA_70B for _ in range(3 * count)]
    gathered = [numbered([of_ranks[rank] for of_ranks in cuts]) for rank in range(num_ranks)]
    start = time.process_time()
    routes = Routes(gathered, [4] * len(cuts))
    timetable = Timetable(routes, plain_bytes=0)
    seconds = time.process_time() - start
    sizes = timetable.sizes(0)
    parts = [part for part in itertools.chain(*cuts) if part.offsets[0] and 0 not in part.sizes]
    return {
        "ranks": num_ranks,
        "bytes": sum(routes.num_bytes()),
        "rounds": timetable.num_rounds,
        "bytes_a_round": max(sizes) * num_ranks,
        "messages_before": sum(-(-4 * math.prod(part.sizes) // _MESSAGE_BYTES) for part in parts),
        "planning_s": seconds,
    }


def _rows(shape: tuple[int, ...], num_ranks: int) -> list[Box]:
    rows = -(-shape[0] // num_ranks)
    firsts = [min(rank * rows, shape[0]) for rank in range(num_ranks)]
    return [Box((first, 0)[: len(shape)], (min(rows, shape[0] - first), *shape[1:])) for first in firsts]


def _counts_text(counts: dict[str, Any]) -> str:
    num_ranks = counts["ranks"]
    table = markdown(
        ["70B parameters with Adam, fp32", f"{num_ranks} ranks, simulated"],
        [
            ["bytes of the checkpoint", f"{counts['bytes'] / 2**30:,.0f} GiB"],
            ["collectives, with all ranks in each", f"{counts['rounds']:,}"],
            ["bytes of one, over all ranks", mib(counts["bytes_a_round"])],
            ["before: messages to rank 0", f"{counts['messages_before']:,}"],
            ["before: communicators of two ranks (NCCL)", f"{num_ranks - 1:,}"],
            ["to plan it, processor time of each rank", f"{counts['planning_s']:.2f} s"],
        ],
    )
    return f"{machine()}\n\n{table}"


# What is said of it ---------------------------------------------------------------------------------------------------


def _bars(result: Result) -> list[Bar]:
    if "revision" not in result:
        return []
    ratio = statistics.median(ratios(result, "ours", to="revision"))
    return [Bar(f"the revision's time, times {MAX_RATIO} at most", f"{ratio:.3f}", ratio <= MAX_RATIO)]


def _text(options: Options, result: Result) -> str:
    rows = []
    for name, each in result.items():
        of_rounds = ratios(result, name, to="torch")
        extent = "" if name == "torch" else f"{min(of_rounds):.2f} to {max(of_rounds):.2f}"
        median = f"{statistics.median(each['seconds']):.2f} s"
        rows.append([TITLES[name], median, f"{statistics.median(of_rounds):.2f}", extent])
    table = markdown(["a full checkpoint", "median", "median of ratios", "from least to most"], rows)
    return (
        f"{machine()}; {options.ranks} ranks, {options.device_type}, {options.strategy}, {options.mib} MiB, "
        f"{options.rounds} rounds\n\n{table}"
    )


if __name__ == "__main__":
    sys.exit(main())
