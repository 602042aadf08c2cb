"""Sharding a large model as one rank of 64: with composer_fsdp2, and with a bare loop of ``fully_shard`` over the same
units.

    python benchmarks/setup.py
    python benchmarks/setup.py --json

Decoders of about 1,000, 4,000 and 16,000 modules on the meta device, in a fake process group that sends nothing. Times
are processor time, which other load affects less than wall time. Our work beside the calls of ``fully_shard`` has two
parts: initialising meta parameters (which the bare loop omits), and translating, planning, comparing, checking and
updating an optimizer. Exit code 0, or 1 if a bar fails.
"""

import contextlib
import gc
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any
from unittest import mock

import report
import torch
import torch.distributed as dist
from models import Model, Shape
from report import Bar, machine, markdown
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from composer_fsdp2 import prepare_fully_shard
from composer_fsdp2.sharding.materialize import Materializer

NUM_RANKS = 64
NUM_MODULES = (1_000, 4_000, 16_000)
MODULES_A_LAYER = 12
MAX_OWN_PART = 0.20
# The exponent with which our own part grows in the number of modules; 1 is linear, and clocks are not exact.
MAX_EXPONENT = 1.1


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds for one model: of the bare loop, and of our three parts, which add up to the whole call."""

    modules: int
    units: int
    bare_s: float
    fully_shard_s: float
    materialising_s: float
    own_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--modules", type=report.count, nargs="+", default=NUM_MODULES, help="sizes, in rising order")
    parser.add_argument("--repeat", type=report.count, default=3, help="how often each is timed; the least counts")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # Otherwise the time of idle threads would count.
    with one_rank_of(NUM_RANKS):
        time_model(MODULES_A_LAYER * 4)  # Imports and first-use initialisation are in no row.
        timings = [
            least_of([time_model(size, ours_first=number % 2 == 1) for number in range(given.repeat)])
            for size in given.modules
        ]
    summary = {"ranks": NUM_RANKS, "timings": [asdict(timing) for timing in timings]}
    return report.conclude(given, _bars(timings), summary=summary, text=_text(timings))


@contextlib.contextmanager
def one_rank_of(num_ranks: int) -> Iterator[None]:
    """A process group with this process as rank 0; the other ranks do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    # A fake collective does not change its output, so the values to gather are put there. Its time does not count as
    # ours: two or three small collectives, whatever the model.
    with (
        mock.patch("composer_fsdp2.sharding.agree.all_gather_object", gather_own),
        mock.patch("composer_fsdp2.sharding.materialize.all_gather_object", gather_own),
    ):
        yield
    dist.destroy_process_group()


def gather_own(value: Any) -> list[Any]:
    return [value] * dist.get_world_size()


def build(num_modules: int) -> Model:
    """A decoder with about so many modules on the meta device.

    Narrow, because the number of modules matters, but with at least one row of each matrix for each rank: for a rank
    with an empty shard ``fully_shard`` makes an empty tensor, which would slow down the bare loop.
    """
    layers = max(1, round(num_modules / MODULES_A_LAYER))
    with torch.device("meta"):
        return Model(Shape(width=NUM_RANKS, layers=layers, heads=2, vocabulary=NUM_RANKS, sequence=8, batch=1))


def time_model(num_modules: int, *, ours_first: bool = False) -> Timing:
    """Shard two equal models, one by the bare loop and one by our code."""
    bare, ours = build(num_modules), build(num_modules)
    optimizer = torch.optim.AdamW(ours.parameters())  # built before sharding, as Composer's users build it
    with (
        _timed("composer_fsdp2.sharding.apply.fully_shard", fully_shard) as in_shard,
        _timed(
            "composer_fsdp2.sharding.apply.Materializer.materialize_unit", Materializer.materialize_unit
        ) as materialising,
    ):
        calls: dict[str, Callable[[], object]] = {
            "bare": lambda: shard_bare(bare),
            "ours": lambda: prepare_fully_shard(ours, optimizer, {"sharding_strategy": "FULL_SHARD"}, "fp32", "cpu"),
        }
        seconds = {name: _seconds(calls[name]) for name in (reversed(calls) if ours_first else calls)}
    units = sum(isinstance(module, FSDPModule) for module in bare.modules())
    assert len(in_shard) == units, (len(in_shard), units)
    parts = sum(in_shard), sum(materialising)
    return Timing(sum(1 for _ in ours.modules()), units, seconds["bare"], *parts, seconds["ours"] - sum(parts))


def shard_bare(model: Model) -> None:
    """The same calls as ours with the same arguments, and nothing else."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("data_parallel_shard",))
    below, root = MixedPrecisionPolicy(cast_forward_inputs=False), MixedPrecisionPolicy(cast_forward_inputs=True)
    for block in model.decoder.blocks:
        _fully_shard(block, mesh, reshard_after_forward=True, mp_policy=below)
    _fully_shard(model.decoder, mesh, reshard_after_forward=False, mp_policy=root)


def _fully_shard(module: nn.Module, mesh: Any, **options: Any) -> None:
    fully_shard(module, mesh=mesh, offload_policy=OffloadPolicy(), ignored_params=None, **options)


@contextlib.contextmanager
def _timed(name: str, function: Callable[..., Any]) -> Iterator[list[float]]:
    """The seconds of each call of the function with this name in our package."""
    seconds: list[float] = []

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            seconds.append(time.process_time() - start)

    with mock.patch(name, timed):
        yield seconds


def _seconds(call: Callable[[], object]) -> float:
    gc.collect()
    gc.freeze()  # Excludes existing objects from garbage collections during the call.
    start = time.process_time()
    call()
    seconds = time.process_time() - start
    gc.unfreeze()
    return seconds


def least_of(timings: Sequence[Timing]) -> Timing:
    """The minimum of each part: disturbances only add time."""
    columns = zip(*map(astuple, timings), strict=True)
    return Timing(*map(min, columns))


def _bars(timings: Sequence[Timing]) -> list[Bar]:
    worst = max(timing.own_s / timing.bare_s for timing in timings)
    bars = [Bar(f"our own part, {MAX_OWN_PART:.0%} of the bare loop at most", f"{worst:.1%}", worst <= MAX_OWN_PART)]
    first, last = timings[0], timings[-1]
    if len(timings) > 1:  # of the power law through the smallest and the largest model
        exponent = math.log(last.own_s / first.own_s) / math.log(last.modules / first.modules)
        bars.append(Bar("our own part grows linearly", f"modules ** {exponent:.2f}", exponent <= MAX_EXPONENT))
    return bars


def _text(timings: Sequence[Timing]) -> str:
    header = ["modules", "units", "bare loop", "ours: in fully_shard", "giving values", "own part"]
    header += ["own part / bare loop", "with giving values", "own part a module"]
    rows = [
        [
            f"{timing.modules:,}",
            f"{timing.units:,}",
            *(f"{s:.3f} s" for s in (timing.bare_s, timing.fully_shard_s, timing.materialising_s, timing.own_s)),
            f"{timing.own_s / timing.bare_s:.1%}",
            f"{(timing.own_s + timing.materialising_s) / timing.bare_s:.1%}",
            f"{1e6 * timing.own_s / timing.modules:.0f} µs",
        ]
        for timing in timings
    ]
    return f"{machine()}; rank 0 of {NUM_RANKS}, fake process group\n\n{markdown(header, rows)}\n"


if __name__ == "__main__":
    sys.exit(main())
