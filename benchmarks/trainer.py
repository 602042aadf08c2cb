"""A whole batch of Composer's Trainer: under the shim, over ``fully_shard`` by hand, Composer's FSDP2 and FSDP1.

    python benchmarks/trainer.py
    python benchmarks/step.py --trainer              # the same
    python benchmarks/trainer.py --microbatches 2 --steps 200 --json

Small blocks, DecoupledAdamW and gradient clipping, so that what is measured is what the processor does for each module
and each parameter. A batch is timed from where the Trainer has been given it to where it asks for the next one. All
Trainers live in the same processes and train the same batches from the same values. A round trains one batch of each,
in an order drawn anew; the ratios are of one round, of the processor time of all ranks (on GPUs, which the processor
waits for, of the time of the slowest rank). Exit code 0, or 1 if a bar does not hold.
"""

import argparse
import contextlib
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest import mock

import report
import torch
import torch.distributed as dist
from launch import on_ranks
from models import Shape, add_sizes, with_sizes
from report import Bar, machine, markdown
from timing import (
    FIRST,
    HAND,
    MAX_CLIPPED_LOSS_DIFFERENCE,
    MAX_LOSS_DIFFERENCE,
    MAX_NORM,
    MAX_RATIO,
    Result,
    loss_difference,
    over_ranks,
    quartiles,
    ratio_cells,
    ratios,
    time_bar,
    turns,
)
from torch import nn
from variants import missing

from composer_fsdp2._torch.repairs import repair_cpu_collectives

CLIPPING_BY_HAND = "clipping by hand"
SHAPE = Shape(width=32, layers=24, heads=2, vocabulary=64, sequence=16, batch=2)
# The clock that ratios and bars are of, and the one beside it.
CLOCKS = {"cpu": ("processor_seconds", "seconds"), "cuda": ("seconds", "processor_seconds")}
CLOCK_NAMES = {"seconds": "time", "processor_seconds": "processor time"}
_START_BATCHES = 3  # the first makes the optimizer's state, and whatever else is made at first use


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What one run measures."""

    shape: Shape
    device_type: str
    variants: tuple[str, ...]
    ranks: int
    rounds: int
    microbatches: int

    @property
    def clocks(self) -> tuple[str, str]:
        return CLOCKS[self.device_type]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    if (reason := missing("composer")) is not None:
        parser.error(reason)
    options = Options(
        shape=with_sizes(SHAPE, given),
        device_type=given.device,
        variants=(HAND, *(name for name in KINDS if name in (given.variants or KINDS) and name != HAND)),
        ranks=report.ranks_of(given),
        rounds=given.steps,
        microbatches=given.microbatches,
    )
    result = on_ranks(measure, options.ranks, options.device_type, options)
    bars = _bars(options, result)
    return report.conclude(given, bars, summary=_summary(options, result), text=_text(options, result))


def _parser() -> argparse.ArgumentParser:
    parser = report.parser(__doc__)
    parser.add_argument("--variants", nargs="+", choices=[name for name in KINDS if name != HAND], help="default: all")
    report.add_device(parser)
    parser.add_argument("--steps", type=report.count, default=200, help="timed rounds")
    parser.add_argument(
        "--microbatches", type=report.count, default=1, help="of a batch, each of --batch sequences on a rank"
    )
    add_sizes(parser)
    return parser


# The Trainers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One way to shard the Trainer's model.

    Args:
        parallelism: The Trainer's ``parallelism_config``.
        around: What must be in place while this Trainer is made and trains, and while no other does: the shim, say,
            replaces functions of Composer for everybody in the process.
        updates_by_hand: On local tensors; else Composer's optimizer as it is (which the shim changes).
        clips_by_hand: The same of clipping.
    """

    title: str
    parallelism: Callable[[], Any]
    around: Callable[[], AbstractContextManager[Any]]
    updates_by_hand: bool = False
    clips_by_hand: bool = False


def _fsdp1_config() -> Any:
    return {"fsdp": {}}


def _fsdp2_config() -> Any:
    from composer.utils import FSDP2Config, ParallelismConfig

    return ParallelismConfig(fsdp2=FSDP2Config())


def _shim() -> AbstractContextManager[None]:
    from composer_fsdp2.compat import fsdp2

    return fsdp2()


def _sharding_by_hand() -> AbstractContextManager[Any]:
    """The Trainer shards where its own FSDP2 would, and asks this instead."""
    return mock.patch("composer.distributed.prepare_distributed.parallelize_composer_model", _shard_by_hand)


def _shard_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, *unused: Any) -> None:
    """What an expert writes for this one model; the optimizer was made before."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    decoder: Any = model.model
    mesh = init_device_mesh("cuda" if _is_on_gpu() else "cpu", (dist.get_world_size(),))
    before = dict(model.named_parameters())
    for block in decoder.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(decoder, mesh=mesh, reshard_after_forward=False)
    (group,) = optimizer.param_groups
    assert list(before.values()) == group["params"]
    group["params"] = list(model.parameters())


def _is_on_gpu() -> bool:
    """Of this rank, by what its process group was started for."""
    return dist.get_backend() == "nccl"


def _fsdp1_anywhere() -> AbstractContextManager[Any]:
    """Composer asks for the current CUDA device; FSDP1 takes any."""
    if _is_on_gpu():
        return contextlib.nullcontext()
    return mock.patch("torch.cuda.current_device", return_value=torch.device("cpu"))


KINDS = {
    HAND: Kind(
        title="fully_shard and updates by hand",
        parallelism=_fsdp2_config,
        around=_sharding_by_hand,
        updates_by_hand=True,
    ),
    CLIPPING_BY_HAND: Kind(
        title="updates and clipping by hand",
        parallelism=_fsdp2_config,
        around=_sharding_by_hand,
        updates_by_hand=True,
        clips_by_hand=True,
    ),
    "ours": Kind(title="the shim", parallelism=_fsdp1_config, around=_shim),
    "composer": Kind(title="Composer's FSDP2", parallelism=_fsdp2_config, around=contextlib.nullcontext),
    "fsdp1": Kind(title="FSDP1", parallelism=_fsdp1_config, around=_fsdp1_anywhere),
}


class _Batches:
    """A dataloader that gives a batch when it is this Trainer's turn, and gives the turn back when asked for more.

    So several Trainers stand in the midst of their ``fit`` in one process, each in a thread of its own, and one of them
    runs. Processes of their own would need no shim that comes and goes, but one may be faster than its like for as long
    as it lives (where its memory lies, say), which no number of rounds evens out.
    """

    def __init__(self, shape: Shape, microbatches: int) -> None:
        self._shape = replace(shape, batch=shape.batch * microbatches)
        self._is_wanted, self._is_done = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        number = 0
        while True:
            seed = number * dist.get_world_size() + dist.get_rank()
            batch = [self._shape.tokens(seed)]
            self._is_done.release()
            self._is_wanted.acquire()
            yield batch
            number += 1

    def start(self, fit: Callable[[], None]) -> None:
        """In a thread of its own, up to the first batch."""
        device = torch.cuda.current_device() if _is_on_gpu() else None

        def run() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)  # which each thread has its own of
                fit()
            except BaseException as error:
                self._error = error
                self._is_done.release()

        threading.Thread(target=run, daemon=True).start()
        self._wait()

    def train(self) -> None:
        """Have the Trainer train one batch."""
        self._is_wanted.release()
        self._wait()

    def _wait(self) -> None:
        self._is_done.acquire()
        if self._error is not None:
            raise self._error


class _Run:
    """One Trainer, with what was seen of it on this rank. Every method is called on all ranks."""

    def __init__(self, kind: Kind, options: Options) -> None:
        self.kind = kind
        self.seconds: list[float] = []
        self.processor_seconds: list[float] = []
        self.losses: list[float] = []
        self._batches = _Batches(options.shape, options.microbatches)
        with kind.around():
            self.trainer = _trainer(kind, options, self._batches)
            self._batches.start(self.trainer.fit)

    def train(self, *, is_timed: bool) -> None:
        """The next batch."""
        with self.kind.around():
            dist.barrier()
            _wait_for_device()
            start, processor_start = time.perf_counter(), time.process_time()
            self._batches.train()
            _wait_for_device()
            seconds, processor_seconds = time.perf_counter() - start, time.process_time() - processor_start
        self.losses.append(self.trainer.state.total_loss_dict["loss/train/total"])
        if is_timed:
            self.seconds.append(seconds)
            self.processor_seconds.append(processor_seconds)

    def result(self) -> dict[str, Any]:
        return {**over_ranks(self.seconds, self.processor_seconds), "losses": self.losses}


def _wait_for_device() -> None:
    if _is_on_gpu():
        torch.cuda.synchronize()


def _trainer(kind: Kind, options: Options, batches: _Batches) -> Any:
    from composer import Trainer
    from composer.algorithms import GradientClipping
    from composer.optim import DecoupledAdamW
    from trainer_parts import ClippingByHand, Language, UpdatesByHand

    torch.manual_seed(0)
    model = Language(options.shape)
    optimizer = (UpdatesByHand if kind.updates_by_hand else DecoupledAdamW)(model.parameters(), lr=1e-3)
    return Trainer(
        model=model,
        optimizers=optimizer,
        train_dataloader=batches,
        max_duration=f"{10**9}ba",
        device="gpu" if options.device_type == "cuda" else "cpu",
        precision="fp32",  # on a GPU it would be amp_fp16 by default
        device_train_microbatch_size=options.shape.batch,
        parallelism_config=kind.parallelism(),
        algorithms=[ClippingByHand(MAX_NORM) if kind.clips_by_hand else GradientClipping("norm", MAX_NORM)],
        progress_bar=False,
        log_to_console=False,
        seed=17,
    )


def measure(options: Options) -> Result:
    """Everything about each variant, the same on all ranks; called on all ranks."""
    if options.device_type == "cpu":
        # For all variants alike, so that they learn the same: by themselves hand and Composer would train on sums.
        repair_cpu_collectives()
    runs = {name: _Run(KINDS[name], options) for name in options.variants}
    for name, is_timed in turns(options.variants, options.rounds, warmup=_START_BATCHES):
        runs[name].train(is_timed=is_timed)
    return {name: run.result() for name, run in runs.items()}


# What is said of it ---------------------------------------------------------------------------------------------------


def _summary(options: Options, result: Result) -> dict[str, Any]:
    others = [name for name in result if name != HAND]
    of_processor = {name: ratios(result, name, "processor_seconds", to=HAND) for name in others}
    return {
        "options": asdict(options),
        "processor_s": {name: statistics.median(each["processor_seconds"]) for name, each in result.items()},
        "processor_ratio": {name: statistics.median(each) for name, each in of_processor.items()},
        "processor_ratio_quartiles": {name: quartiles(each) for name, each in of_processor.items()},
        "ratio": {name: statistics.median(ratios(result, name, to=HAND)) for name in others},
        "loss_difference": {name: loss_difference(result, name, HAND, first=FIRST) for name in others},
    }


def _bars(options: Options, result: Result) -> list[Bar]:
    bars = []
    clock, _ = options.clocks
    if "ours" in result:
        for other in (name for name in (HAND, "composer") if name in result):
            what = f"under the shim: the {CLOCK_NAMES[clock]} of a batch of {KINDS[other].title}"
            bars.append(time_bar(what, ratios(result, "ours", clock, to=other), MAX_RATIO))
    difference = max((loss_difference(result, name, HAND, first=FIRST) for name in result), default=0.0)
    limit = max(MAX_LOSS_DIFFERENCE[options.device_type], MAX_CLIPPED_LOSS_DIFFERENCE)
    promise = f"all learn the same in the first {FIRST} batches, to {limit:.0e}"
    return [*bars, Bar(promise, f"{difference:.1e}", difference <= limit)]


def _text(options: Options, result: Result) -> str:
    shape = options.shape
    clock, beside = options.clocks
    rows = []
    for name, each in result.items():
        row = [KINDS[name].title, f"{1000 * statistics.median(each[clock]):.1f} ms", "1", "", "1", ""]
        if name != HAND:
            row[2:] = ratio_cells(result, name, options.clocks, to=HAND)
            row.append(f"{loss_difference(result, name, HAND, first=FIRST):.1e}")
        rows.append(row)
    if {"ours", CLIPPING_BY_HAND} <= result.keys():
        cells = ratio_cells(result, "ours", options.clocks, to=CLIPPING_BY_HAND)
        rows.append([f"{KINDS['ours'].title} / {KINDS[CLIPPING_BY_HAND].title}", "", *cells, ""])
    clocks = (CLOCK_NAMES[clock], f"of {CLOCK_NAMES[beside]}")
    header = ["a batch", clocks[0], "median of ratios", "their quartiles", clocks[1], "losses differ by"]
    return (
        f"{machine()}; {options.ranks} ranks, fp32, DecoupledAdamW, clipped to {MAX_NORM}; {shape.layers} layers of "
        f"width {shape.width}, vocabulary {shape.vocabulary}, {options.microbatches} × {shape.batch} × "
        f"{shape.sequence} tokens a rank; {options.rounds} rounds\n\n{markdown(header, rows)}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
