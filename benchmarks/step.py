"""One training step, sharded by a hand-written loop, by composer_fsdp2, by Composer's own FSDP2 and by FSDP1.

    python benchmarks/step.py
    python benchmarks/step.py --strategy SHARD_GRAD_OP --json
    python benchmarks/step.py --optimizer decoupled_adamw --clipping
    python benchmarks/step.py --pipelined 10                # on a GPU: ten steps without waiting for it in between
    python benchmarks/step.py --trainer                     # a whole batch of Composer's Trainer, of small blocks

Prints a table of a step's time, collectives and memory. All variants run in the same processes and train the same
batches from the same values. A round trains one step of each in random order, and other load on the machine affects all
of them alike; ratios are to the hand-written loop's step of the same round. On a GPU, losses are compared in the steps
before the timed ones, with deterministic kernels. Exit code 0, or 1 if a bar fails.
"""

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import report
import torch
import torch.distributed as dist
from launch import on_ranks
from models import Shape, add_sizes, with_sizes
from report import Bar, machine, markdown, mib
from timing import (
    FIRST,
    HAND,
    MAX_CLIPPED_LOSS_DIFFERENCE,
    MAX_LOSS_DIFFERENCE,
    MAX_NORM,
    MAX_RATIO,
    Result,
    deterministic,
    gather,
    loss_difference,
    over_ranks,
    quartiles,
    ratio_cells,
    ratios,
    time_bar,
    turns,
)
from variants import NAMES, OPTIMIZERS, STRATEGIES, Setting, Trainee, missing

from composer_fsdp2._torch.repairs import repair_cpu_collectives
from composer_fsdp2.estimate._torch.counting import Collectives, StateBytes

TITLES = {
    HAND: "fully_shard by hand",
    "ours": "composer_fsdp2",
    "composer": "Composer's FSDP2",
    "fsdp1": "FSDP1",
}
SHAPES = {
    "cpu": Shape(width=192, layers=4, heads=4, vocabulary=1024, sequence=64, batch=2),
    "cuda": Shape(width=2048, layers=18, heads=16, vocabulary=32000, sequence=1024, batch=8),  # 1.04e9 parameters
    # With little arithmetic, the measurement shows the CPU time for each module and parameter.
    "trainer": Shape(width=32, layers=24, heads=2, vocabulary=64, sequence=16, batch=2),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.trainer and options.strategy != STRATEGIES[0]:
        parser.error(f"--trainer: with {STRATEGIES[0]} alone")
    if options.trainer:
        options.optimizer, options.clipping = OPTIMIZERS[1], True
    absent = {"composer": reason} if (reason := missing("composer")) else {}
    if absent and options.optimizer != OPTIMIZERS[0]:
        parser.error(f"{options.optimizer}: {absent['composer']}")
    options.shape = with_sizes(SHAPES["trainer" if options.trainer else options.device], options)
    options.variants = [name for name in NAMES if name in (HAND, *options.variants) and name not in absent]
    options.ranks = report.ranks_of(options)
    options.steps = options.steps or (50 if options.device == "cuda" else 200)
    # The clock of the bars: other load affects processor time less, but on a GPU the host waits.
    options.clock = "processor_seconds" if options.trainer and options.device == "cpu" else "seconds"
    result = on_ranks(measure, options.ranks, options.device, options)
    summary = {**_summary(options, result), "missing": absent}
    return report.conclude(options, _bars(options, result), summary=summary, text=_text(options, result, absent))


def _parser() -> argparse.ArgumentParser:
    parser = report.parser(__doc__)
    parser.add_argument("--strategy", choices=STRATEGIES, default=STRATEGIES[0])
    others = [name for name in NAMES if name != HAND]
    parser.add_argument(
        "--variants", nargs="+", choices=others, default=others, help="beside the hand-written loop; default: all"
    )
    report.add_device(parser)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default=OPTIMIZERS[0], help="torch's AdamW, or Composer's")
    parser.add_argument("--clipping", action="store_true", help=f"clip the gradients' norm to {MAX_NORM}")
    parser.add_argument(
        "--pipelined",
        type=report.count,
        default=1,
        metavar="STEPS",
        help="steps of each in a round, one after the other; on a GPU, without waiting for it in between",
    )
    parser.add_argument("--trainer", action="store_true", help="with DecoupledAdamW and clipping, in fp32")
    parser.add_argument("--steps", type=report.count, help="timed rounds; default: 50 on a GPU, 200 on the CPU")
    parser.add_argument(
        "--warmup", type=report.count, default=FIRST, help="steps before them, of which a GPU's losses are compared"
    )
    add_sizes(parser)
    return parser


# On the ranks ---------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> Result:
    """The results of each variant, equal on all ranks. Called on all ranks."""
    on_gpu = options.device == "cuda"
    if not on_gpu:
        # The same for all variants, for equal training: by default hand and Composer would train on sums.
        repair_cpu_collectives()
    setting = Setting(
        shape=options.shape,
        strategy=options.strategy,
        device=torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"),
        low_precision=on_gpu and not options.trainer,
        optimizer=options.optimizer,
        max_norm=MAX_NORM if options.clipping else None,
    )
    build = importlib.import_module("trainer" if options.trainer else "variants").build
    with deterministic():
        runs = {name: _Run(partial(build, name, setting), setting, options.warmup) for name in options.variants}
    for run in () if options.trainer else runs.values():
        run.count()
    for name, is_warm in turns(options.variants, options.steps, warmup=1):
        runs[name].time_steps(options.pipelined, is_warm=is_warm)
    return {name: run.result() for name, run in runs.items()}


class _Run:
    """One variant and its measurements on this rank. Each method that trains takes the next batches.

    Args:
        warmup: Initial steps; the first one creates the optimizer's state and runs first-use initialisation.
    """

    def __init__(self, build: Callable[[], Trainee], setting: Setting, warmup: int) -> None:
        self.setting, self.warmup = setting, warmup
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.processor_seconds: list[float] = []
        self.collectives: dict[str, dict[str, int]] = {}
        self.state_bytes: dict[str, int] = {}
        before = self._allocated_bytes()
        self.trainee = build()
        self._train(warmup)
        self.resident_bytes = self._allocated_bytes() - before

    def count(self) -> None:
        """Count the collectives and bytes of one step."""
        with Collectives() as collectives:
            self._train()
        self.collectives = collectives.counts
        if self.setting.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            others_bytes = self._allocated_bytes() - self.resident_bytes
            self._train()
            self.state_bytes["allocated"] = torch.cuda.max_memory_allocated() - others_bytes
        with StateBytes(self.trainee.model, self.trainee.optimizer) as state:
            self._train()
        self.state_bytes |= {"peak": state.peak, **state.at_peak}

    def time_steps(self, number: int, *, is_warm: bool) -> None:
        batches = self._batches(number)
        with self.trainee.around():
            dist.barrier()
            self._synchronize()
            start, processor_start = time.perf_counter(), time.process_time()
            losses = [self.trainee.step(tokens) for tokens in batches]
            self._synchronize()
            seconds, processor_seconds = time.perf_counter() - start, time.process_time() - processor_start
        self.losses.extend(loss.item() for loss in losses)
        if is_warm:
            self.seconds.append(seconds / number)
            self.processor_seconds.append(processor_seconds / number)

    def result(self) -> dict[str, Any]:
        """Bytes are the maximum over ranks; losses are means, on a GPU those of the deterministic steps."""
        losses = [statistics.fmean(each) for each in zip(*gather(self.losses), strict=True)]
        return {
            **over_ranks(self.seconds, self.processor_seconds),
            "losses": losses[: self.warmup] if self.setting.device.type == "cuda" else losses,
            "collectives": self.collectives,
            "state_bytes": max(gather(self.state_bytes), key=lambda sizes: sizes.get("peak", 0)),
        }

    def _train(self, number: int = 1) -> None:
        with self.trainee.around():
            self.losses.extend(self.trainee.step(tokens).item() for tokens in self._batches(number))

    def _batches(self, number: int) -> list[torch.Tensor]:
        """The next batches: different on each rank, equal for all variants."""
        seeds = (len(self.losses) + later for later in range(number))
        tokens = [self.setting.shape.tokens(seed * dist.get_world_size() + dist.get_rank()) for seed in seeds]
        return [each.to(self.setting.device) for each in tokens]

    def _synchronize(self) -> None:
        if self.setting.device.type == "cuda":
            torch.cuda.synchronize()

    def _allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated() if self.setting.device.type == "cuda" else 0


# The report -----------------------------------------------------------------------------------------------------------


def _summary(options: argparse.Namespace, result: Result) -> dict[str, Any]:
    others = [name for name in result if name != HAND]
    of_hand = {name: ratios(result, name, options.clock, to=HAND) for name in others}
    return {
        "options": vars(options) | {"shape": asdict(options.shape)},
        "ratio": {name: statistics.median(each) for name, each in of_hand.items()},
        "ratio_quartiles": {name: quartiles(each) for name, each in of_hand.items()},
        "step_s": {name: statistics.median(each["seconds"]) for name, each in result.items()},
        "loss_difference": {name: loss_difference(result, name) for name in others},
        "collectives": {name: each["collectives"] for name, each in result.items()},
        "state_bytes": {name: each["state_bytes"] for name, each in result.items()},
    }


def _bars(options: argparse.Namespace, result: Result) -> list[Bar]:
    if "ours" not in result:
        return []
    ours, hand = result["ours"]["collectives"], result[HAND]["collectives"]
    told = _in_words(ours) if ours == hand else f"{_in_words(ours)}; by hand {_in_words(hand)}"
    limit, first, of = MAX_LOSS_DIFFERENCE, None, ""
    if options.clipping:
        limit, first, of = MAX_CLIPPED_LOSS_DIFFERENCE, FIRST, f" of the first {FIRST} steps"
    difference = loss_difference(result, "ours", first=first)
    bars = [Bar(f"its losses{of}, to {limit:.0e}", f"{difference:.1e}", difference <= limit)]
    if ours:
        bars.append(Bar("the collectives and bytes of the hand-written loop", told, ours == hand))
    for other in (HAND, "composer") if options.trainer else (HAND,):
        if other in result:
            what = f"the {options.clock.replace('_', ' ')} of a step with {TITLES[other]}"
            bars.append(time_bar(what, ratios(result, "ours", options.clock, to=other), MAX_RATIO))
    if "composer" in result and options.strategy == "SHARD_GRAD_OP":
        gathered, theirs = (_gathered_bytes(result[name]["collectives"]) for name in ("ours", "composer"))
        promise = "fewer gathered bytes than Composer's FSDP2, which ignores sharding_strategy"
        bars.append(Bar(promise, f"{mib(gathered)}, Composer's {mib(theirs)}", gathered < theirs))
    return bars


def _gathered_bytes(counts: dict[str, dict[str, int]]) -> int:
    return sum(count["bytes"] for name, count in counts.items() if "gather" in name)


def _in_words(counts: dict[str, dict[str, int]]) -> str:
    each = (f"{count['calls']} {name}, {mib(count['bytes'])} in all" for name, count in counts.items())
    return "; ".join(each) or "none"


def _text(options: argparse.Namespace, result: Result, absent: dict[str, str]) -> str:
    shape = options.shape
    precision = "bf16 (kept in fp32)" if options.device == "cuda" and not options.trainer else "fp32"
    where = ", in a Trainer" if options.trainer else ""
    clipped = f", clipped to {MAX_NORM}" if options.clipping else ""
    pipelined = "" if options.pipelined == 1 else f" of {options.pipelined} steps"
    return "\n\n".join(
        [
            f"{machine()}; {options.ranks} ranks, {options.strategy}, {precision}, "
            f"{options.optimizer}{clipped}{where}; "
            f"{shape.layers} layers of width {shape.width}, vocabulary {shape.vocabulary}, {shape.batch} × "
            f"{shape.sequence} tokens a rank; {options.steps} rounds{pipelined}",
            *_tables(result),
            *(f"without {TITLES[name]}: {reason}" for name, reason in absent.items()),
            "",
        ]
    )


def _tables(result: Result) -> list[str]:
    """Times, collectives and state."""
    operators = sorted({name for each in result.values() for name in each["collectives"]})
    kinds = list(result[HAND]["state_bytes"])
    times, counts, states = [], [], []
    for name, each in result.items():
        cells = ["1", "", "1", ""]
        if name != HAND:
            cells = ratio_cells(result, name, ("seconds", "processor_seconds"), to=HAND)
            cells.append(f"{loss_difference(result, name):.1e}")
        times.append([TITLES[name], f"{1000 * statistics.median(each['seconds']):.1f} ms", *cells])
        called = (each["collectives"].get(operator) for operator in operators)
        counts.append([TITLES[name], *(f"{c['calls']}: {mib(c['bytes'])}" if c else "0" for c in called)])
        states.append([TITLES[name], *(mib(each["state_bytes"][kind]) for kind in kinds)])
    header = ["a step", "median", "median of ratios", "their quartiles", "of processor time", "losses differ by"]
    tables = [markdown(header, times)]
    if kinds:
        tables.append(markdown(["collectives a step, and their full buffers", *operators], counts))
        tables.append(markdown(["state on a rank, where its sum is largest", *kinds], states))
    return tables


if __name__ == "__main__":
    sys.exit(main())
