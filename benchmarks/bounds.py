"""The bounds of a step that `composer-fsdp2 plan` gives, beside what a step takes.

    python benchmarks/bounds.py
    python benchmarks/bounds.py --strategy SHARD_GRAD_OP --width 768 --json

Measures how many floating-point operations a matrix product does in a second and how many bytes a collective moves,
the most of several sizes; bounds a step of the model with them; and times the step, its computation alone (the model
unsharded) and its collectives alone. On the CPU, over gloo, where ranks share the cores, so that no step comes near to
its bounds; but each has to hold, and none may be so low that it says nothing. Exit code 0, or 1 if a bar does not hold.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import report
import torch
import torch.distributed as dist
from launch import on_ranks
from models import Model, Shape, add_sizes, with_sizes
from report import Bar, machine, markdown
from timing import gather
from torch import nn
from variants import STRATEGIES, Setting, Trainee, build

from composer_fsdp2 import estimate_step, plan_sharding, translate
from composer_fsdp2._torch.repairs import repair_cpu_collectives
from composer_fsdp2.estimate.bounds import Bounds, Machine, step_bounds
from composer_fsdp2.estimate.step import CollectiveCall
from composer_fsdp2.estimate.trace import trace_microbatch

SHAPE = Shape(width=512, layers=4, heads=8, vocabulary=4096, sequence=128, batch=2)
LEAST_SHARE = 0.05  # of what was measured; a lower bound below it proves nothing
_PRODUCTS = (256, 512, 1024)  # rows and columns
_BUFFERS = (2**16, 2**18, 2**20, 2**22)  # elements
_REPEATS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    shape: Shape
    strategy: str
    ranks: int
    steps: int


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--strategy", choices=STRATEGIES, default=STRATEGIES[0])
    parser.add_argument("--ranks", type=report.count, default=2)
    parser.add_argument("--steps", type=report.count, default=5, help="timed steps; default: %(default)s")
    add_sizes(parser)
    given = parser.parse_args(arguments)
    options = _options(given)
    result = on_ranks(measure, options.ranks, "cpu", options)
    bars = [bar for name, row in result["rows"].items() for bar in _bars(name, row)]
    return report.conclude(given, bars, summary={"options": asdict(options), **result}, text=_text(options, result))


def _options(given: argparse.Namespace) -> Options:
    shape = with_sizes(SHAPE, given)
    return Options(shape=shape, strategy=given.strategy, ranks=given.ranks, steps=given.steps)


# On the ranks ---------------------------------------------------------------------------------------------------------


def measure(options: Options) -> dict[str, Any]:
    """Each bound and what was measured for it, of the slowest rank; called on all ranks."""
    repair_cpu_collectives()
    bounds, calls = predict(options, measured_machine())
    setting = Setting(shape=options.shape, strategy=options.strategy, device=torch.device("cpu"), low_precision=False)
    trainee, alone = build("ours", setting), Model(options.shape)
    tokens = options.shape.tokens(dist.get_rank())
    step_s = _timed(options.steps, lambda: _train(trainee, tokens))
    alone_s = _timed(options.steps, lambda: _compute(alone, tokens))
    sent_s = _timed(options.steps, lambda: _send(calls))
    return {
        "machine_speeds": {"flops": bounds.machine.flops, "bytes_per_s": bounds.machine.intra_bytes_per_s},
        "bounds": bounds.to_json(),
        "rows": _rows(bounds, step_s, alone_s, sent_s),
    }


def _rows(
    bounds: Bounds, step_s: Sequence[float], alone_s: Sequence[float], sent_s: Sequence[float]
) -> dict[str, dict[str, Any]]:
    """The fastest of all times is what a lower bound has to stay below."""
    assert bounds.machine.flops and bounds.mfu_at_most
    mfu = [bounds.model_flops / bounds.machine.flops / seconds for seconds in step_s]
    exposed_s = [step - statistics.median(alone_s) for step in step_s]
    return {
        "a step": _row(bounds.lower_s, step_s),
        "computing": _row(bounds.compute_s, alone_s),
        "sending": _row(bounds.intra_s, sent_s),
        "communication that no overlap hides": {**_row(bounds.exposed_s or 0, exposed_s), "may_be_small": True},
        "MFU": {"bound": bounds.mfu_at_most, "measured": statistics.median(mfu), "nearest": max(mfu), "is_upper": True},
        "one after the other (no bound)": {"bound": bounds.serial_s, "measured": statistics.median(step_s)},
    }


def _row(bound: float, seconds: Sequence[float]) -> dict[str, Any]:
    return {"bound": bound, "measured": statistics.median(seconds), "nearest": min(seconds)}


def measured_machine() -> Machine:
    """The most that any rank did; called on all ranks."""
    return Machine(
        flops=max(gather(max(_product_flops(size) for size in _PRODUCTS))),
        intra_bytes_per_s=max(gather(max(_gathered_bytes_per_s(size) for size in _BUFFERS))),
        sources=("measured: a matrix product, gloo's all-gather and reduce-scatter",),
    )


def _product_flops(size: int) -> float:
    one, other = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / min(_seconds_of(lambda: torch.mm(one, other)) for _ in range(_REPEATS))


def _gathered_bytes_per_s(size: int) -> float:
    """What a rank has to send, over the time of the faster of both collectives."""
    ranks = dist.get_world_size()
    full, own = torch.zeros(size * ranks), torch.zeros(size)
    best = min(
        _seconds_of(send)
        for send in (
            lambda: dist.all_gather_into_tensor(full, own),
            lambda: dist.reduce_scatter_tensor(own, full),
        )
        for _ in range(_REPEATS)
    )
    return size * (ranks - 1) * full.element_size() / best


def predict(options: Options, speeds: Machine) -> tuple[Bounds, tuple[CollectiveCall, ...]]:
    """What `plan` would say of the step."""
    with torch.device("meta"):
        model = Model(options.shape)
    translation = translate({"sharding_strategy": options.strategy}, device="cpu", world_size=options.ranks)
    assert translation.config is not None
    plan = plan_sharding(model, translation.config).resolve(options.ranks)
    trace = trace_microbatch(model, plan, _loss, rows=options.shape.batch, tokens=options.shape.sequence)
    estimate = estimate_step(plan, trace, world_size=options.ranks, gpus_per_node=options.ranks)
    return step_bounds(estimate, trace, speeds), estimate.calls


def _loss(model: nn.Module, rows: int, tokens: int) -> torch.Tensor:
    loss: torch.Tensor = model(torch.zeros(rows, tokens, dtype=torch.long))
    return loss


def _train(trainee: Trainee, tokens: torch.Tensor) -> None:
    trainee.step(tokens)


def _compute(model: nn.Module, tokens: torch.Tensor) -> None:
    model.zero_grad()
    model(tokens).backward()


def _send(calls: Sequence[CollectiveCall]) -> None:
    """The step's collectives one after the other."""
    ranks = dist.get_world_size()
    for call in calls:
        full = torch.empty(call.num_bytes // 4)
        own = torch.empty(len(full) // ranks)
        if call.op == "all_gather":
            dist.all_gather_into_tensor(full, own)
        else:
            dist.reduce_scatter_tensor(own, full)


def _timed(steps: int, work: Callable[[], None]) -> list[float]:
    """Each of the slowest rank, after one that does not count; called on all ranks."""
    _seconds_of(work)
    seconds = []
    for _ in range(steps):
        dist.barrier()
        seconds.append(_seconds_of(work))
    return [max(each) for each in zip(*gather(seconds), strict=True)]


def _seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# What is said of it ---------------------------------------------------------------------------------------------------


def _bars(name: str, row: dict[str, Any]) -> list[Bar]:
    if "nearest" not in row:
        return []
    bound, nearest, measured = row["bound"], row["nearest"], row["measured"]
    if row.get("is_upper"):
        return [Bar(f"{name}: at most its bound", f"{nearest:.1%}, bound {bound:.1%}", 0 < nearest <= bound)]
    bars = [Bar(f"{name}: at least its bound", f"{_ms(nearest)}, bound {_ms(bound)}", 0 < bound <= nearest)]
    if not row.get("may_be_small"):
        share = bound / measured
        bars.append(Bar(f"{name}: a bound of {LEAST_SHARE:.0%} of it or more", f"{share:.0%}", share >= LEAST_SHARE))
    return bars


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def _text(options: Options, result: dict[str, Any]) -> str:
    shape, speeds = options.shape, result["machine_speeds"]
    rows = []
    for name, row in result["rows"].items():
        show = "{:.1%}".format if row.get("is_upper") else _ms
        nearest = show(row["nearest"]) if "nearest" in row else ""
        rows.append([name, show(row["bound"]), nearest, show(row["measured"]), f"{row['bound'] / row['measured']:.2f}"])
    return "\n".join(
        [
            f"{machine()}; {options.ranks} ranks, {options.strategy}, fp32; {shape.layers} layers of width "
            f"{shape.width}, vocabulary {shape.vocabulary}, {shape.batch} × {shape.sequence} tokens a rank; "
            f"{options.steps} steps",
            f"a matrix product: {speeds['flops'] / 1e9:.1f} GFLOPS; gloo: {speeds['bytes_per_s'] / 1e9:.2f} GB/s",
            "",
            markdown(["", "bound", "nearest to it", "median", "bound / median"], rows),
            "",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
