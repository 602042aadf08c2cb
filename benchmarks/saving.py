"""Save time of a full checkpoint (``state_dict_type: full``) of a sharded model with AdamW's state.

    python benchmarks/saving.py
    python benchmarks/saving.py --ranks 4 --strategy HYBRID_SHARD

The same processes make all saves of the same state, each until the file is on disk. A round makes each once in random
order. Ratios are to torch's save: the state gathered on rank 0, tensor by tensor, and saved by ``torch.save``, as
Composer did for FSDP1. Exit code 0, or 1 if ours takes longer.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import report
import torch
import torch.distributed as dist
from launch import on_ranks
from models import Model, shape_of
from report import Bar, machine, markdown
from timing import Result, ratios, turns
from torch.distributed.tensor import DTensor

from composer_fsdp2 import prepare_fully_shard, save_monolithic

TITLES = {"ours": "save_monolithic", "torch": "full_tensor, torch.save"}
STRATEGIES = ("FULL_SHARD", "HYBRID_SHARD", "NO_SHARD")
MAX_RATIO = 1.0  # of torch's

Save = Callable[[Any, str], None]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--mib", type=report.count, default=512, help="size of the checkpoint; default: 512")
    report.add_device(parser)
    parser.add_argument("--rounds", type=report.count, default=10)
    parser.add_argument("--strategy", choices=STRATEGIES, default=STRATEGIES[0], help="HYBRID_SHARD: two replicas")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk to be measured")
    options = parser.parse_args(arguments)
    options.ranks = report.ranks_of(options)
    with tempfile.TemporaryDirectory(dir=options.folder) as options.folder:
        result = on_ranks(measure, options.ranks, options.device, options)
    of_rounds = ratios(result, "ours", to="torch")
    ratio = statistics.median(of_rounds)
    bars = [Bar(f"the time of {TITLES['torch']}, times {MAX_RATIO} at most", f"{ratio:.3f}", ratio <= MAX_RATIO)]
    summary = {"ratio": ratio, "seconds": {name: each["seconds"] for name, each in result.items()}}
    medians = {name: f"{statistics.median(each['seconds']):.2f} s" for name, each in result.items()}
    extent = f"{min(of_rounds):.2f} to {max(of_rounds):.2f}"
    rows = [[TITLES["ours"], medians["ours"], f"{ratio:.2f}", extent], [TITLES["torch"], medians["torch"], "1", ""]]
    table = markdown(["a full checkpoint", "median", "median of ratios", "from least to most"], rows)
    text = (
        f"{machine()}; {options.ranks} ranks, {options.device}, {options.strategy}, {options.mib} MiB, "
        f"{options.rounds} rounds\n\n{table}"
    )
    return report.conclude(options, bars, summary=summary, text=text)


# On the ranks ---------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> Result:
    """For each save, the seconds of rank 0, which finishes last. Called on all ranks."""
    state = _state(options)
    saves: dict[str, Save] = {"ours": save_monolithic, "torch": _save_by_torch}
    path = f"{options.folder}/full.pt"
    result: Result = {name: {"seconds": []} for name in saves}
    for name, is_timed in turns(list(saves), options.rounds, warmup=1):  # the warm-up makes connections and imports
        Path(path).unlink(missing_ok=True)
        if options.device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        saves[name](state, path)
        if is_timed:
            result[name]["seconds"].append(time.perf_counter() - start)
    return result


def _state(options: argparse.Namespace) -> dict[str, Any]:
    shape, device = shape_of(options.mib << 20), torch.device(options.device)
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


if __name__ == "__main__":
    sys.exit(main())
