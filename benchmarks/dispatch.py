"""CPU time of a step outside forward and backward: for sharded parameters, and for plain ones.

    python benchmarks/dispatch.py
    python benchmarks/dispatch.py --layers 32 80 --json

Decoders with few elements, so the measurement shows dispatch overhead rather than arithmetic: on a GPU, the time before
a kernel is launched. Optimizers, clipping and OptimizerMonitor run on the DTensors of one rank of 8 under the shim, in
a fake process group that sends nothing. The reference is Composer's and torch's code on plain tensors of the same
sizes, as FSDP1 with ``use_orig_params`` has them. A round runs each once, in random order; ratios are of processor time
within a round. Exit code 0, or 1 if a bar fails.
"""

import functools
import operator
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import report
import torch
from models import Model, Shape
from report import Bar, machine, markdown
from setup import one_rank_of
from timing import turns
from torch import nn
from variants import missing

from composer_fsdp2 import clip_grad_norm_, prepare_fully_shard
from composer_fsdp2._torch.local_tensors import local_tensor

NUM_RANKS = 8
LAYERS = (32, 80)
MAX_RATIO = 1.2
MAX_NORM = 1.0
_START_ROUNDS = 2  # they create state and run first-use initialisation

Work = Callable[[], object]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser(__doc__)
    parser.add_argument(
        "--layers", type=report.count, nargs="+", default=LAYERS, help="of the models; 9 parameters each"
    )
    parser.add_argument("--rounds", type=report.count, default=20)
    given = parser.parse_args(arguments)
    if (reason := missing("composer")) is not None:
        parser.error(reason)
    torch.set_num_threads(1)  # Otherwise the time of idle threads would count.
    with one_rank_of(NUM_RANKS):
        measured = [measure(layers, given.rounds) for layers in given.layers]
    rows, bars = ([each for part in parts for each in part] for parts in zip(*measured, strict=True))
    header = ["in a step", "layers", "sharded", "plain tensors", "median of ratios"]
    text = f"{machine()}\n\n{markdown(header, rows)}"
    return report.conclude(given, bars, summary={"rows": rows}, text=text)


@dataclass(frozen=True, slots=True)
class Pair:
    """The same work on DTensors and on plain tensors."""

    sharded: Work
    plain: Work
    has_bar: bool = True


def measure(layers: int, rounds: int) -> tuple[list[list[str]], list[Bar]]:
    """A row of the table for each operation, on models with so many layers: median processor times."""
    pairs = _pairs(*_models(layers))
    times: dict[str, dict[str, list[float]]] = {name: {"sharded": [], "plain": []} for name in pairs}
    works = [(name, kind) for name, kinds in times.items() for kind in kinds]
    for (name, kind), is_timed in turns(works, rounds, warmup=_START_ROUNDS):
        start = time.process_time()
        getattr(pairs[name], kind)()
        if is_timed:
            times[name][kind].append(1e3 * (time.process_time() - start))
    rows, bars = [], []
    for name, each in times.items():
        ratio = statistics.median(map(operator.truediv, each["sharded"], each["plain"]))
        medians = (f"{statistics.median(of_kind):.1f} ms" for of_kind in each.values())
        rows.append([name, str(layers), *medians, f"{ratio:.2f}"])
        if pairs[name].has_bar:
            promise = f"{name}, {layers} layers: at most {MAX_RATIO} of plain tensors"
            bars.append(Bar(promise, f"{ratio:.2f}", ratio <= MAX_RATIO))
    return rows, bars


def _models(layers: int) -> tuple[nn.Module, nn.Module]:
    """A sharded model, and one with plain parameters as large as this rank's shards; both with gradients."""
    shape = Shape(width=16, layers=layers, heads=2, vocabulary=32, sequence=8, batch=1)
    sharded, plain = Model(shape), Model(shape)
    prepare_fully_shard(sharded, None, {}, "fp32", torch.device("cpu"))
    parts = {name: local_tensor(parameter.detach()) for name, parameter in sharded.named_parameters()}
    for name, part in parts.items():
        path, _, own = name.rpartition(".")
        setattr(plain.get_submodule(path), own, nn.Parameter(part.clone()))
    sharded(shape.tokens(0)).backward()  # makes gradients as in a step; this group sends no values
    for parameter in plain.parameters():
        parameter.grad = torch.empty_like(parameter)
    for parameter in (*sharded.parameters(), *plain.parameters()):
        assert parameter.grad is not None
        local_tensor(parameter.grad).fill_(1e-3)
    return sharded, plain


def _pairs(sharded: nn.Module, plain: nn.Module) -> dict[str, Pair]:
    from composer.callbacks import OptimizerMonitor
    from composer.optim import DecoupledAdamW

    from composer_fsdp2.compat import monitors, optimizers

    pairs = {}
    of_composer = OptimizerMonitor.batch_end
    for kind in _optimizers():
        own, other, untouched = kind(sharded.parameters()), kind(plain.parameters()), kind(sharded.parameters())
        optimizers.update_local_shards(own)
        pairs[kind.__name__] = Pair(own.step, other.step)
        pairs[f"{kind.__name__}, without the shim"] = Pair(untouched.step, other.step, has_bar=False)
        if kind is DecoupledAdamW:
            on_plain = _monitor(plain, other, of_composer)
            ours = functools.partial(monitors.batch_end, of_composer)
            pairs["OptimizerMonitor"] = Pair(_monitor(sharded, own, ours), on_plain)
    for is_fused in (False, True):
        pairs[f"torch.optim.AdamW, {'fused' if is_fused else 'foreach'}"] = Pair(
            torch.optim.AdamW(sharded.parameters(), foreach=not is_fused, fused=is_fused).step,
            torch.optim.AdamW(plain.parameters(), foreach=not is_fused, fused=is_fused).step,
            has_bar=False,
        )
    # Both look up the parameters each time.
    pairs["clip_grad_norm_"] = Pair(
        lambda: clip_grad_norm_(sharded, MAX_NORM),
        lambda: nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM, foreach=True),
    )
    return pairs


def _optimizers() -> list[Any]:
    from composer.optim import DecoupledAdamW

    try:
        from llmfoundry.optim import DecoupledLionW
    except ModuleNotFoundError:
        return [DecoupledAdamW]
    return [DecoupledAdamW, DecoupledLionW]


def _monitor(model: nn.Module, optimizer: torch.optim.Optimizer, batch_end: Callable[..., None]) -> Work:
    """OptimizerMonitor's work when it logs, without FSDP1's all-reduce of each metric."""
    from composer.callbacks import OptimizerMonitor

    monitor = OptimizerMonitor(batch_log_interval=1)
    state: Any = SimpleNamespace(
        model=model,
        optimizers=[optimizer],
        timestamp=SimpleNamespace(batch=SimpleNamespace(value=1)),
        fsdp_enabled=False,
        fsdp_config=None,
    )
    logger: Any = SimpleNamespace(log_metrics=lambda metrics: None)
    return lambda: batch_end(monitor, state, logger)


if __name__ == "__main__":
    sys.exit(main())
