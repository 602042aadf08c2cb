"""One training step, sharded by a hand-written loop, by us, by Composer's own FSDP2 and by FSDP1.

    python benchmarks/step.py
    python benchmarks/step.py --strategy SHARD_GRAD_OP --json
    python benchmarks/step.py --optimizer decoupled_adamw --clipping
    python benchmarks/step.py --pipelined 10                # on a GPU: ten steps without waiting for it in between
    python benchmarks/step.py --against REVISION            # ours beside ours of that commit; and the cost of votes
    python benchmarks/step.py --trainer                     # a Trainer's whole batch: trainer.py, with its options

Time, collectives and memory of a step, as a table. All variants live in the same processes and train the same batches
from the same values. A round trains one step of each, in an order drawn anew, so that whatever else the machine does
disturbs all of them alike; the ratios of a round are to the hand-written loop's step of that round. Exit code 0, or 1
if a bar does not hold.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import report
import torch
import torch.distributed as dist
import trainer
from counting import Collectives, StateBytes, gathered_bytes
from launch import on_ranks
from models import Shape, add_sizes, with_sizes
from report import Bar, machine, markdown, mib
from revision import checked_out
from timing import (
    FIRST,
    HAND,
    MAX_CLIPPED_LOSS_DIFFERENCE,
    MAX_LOSS_DIFFERENCE,
    MAX_NORM,
    MAX_RATIO,
    gather,
    loss_difference,
    over_ranks,
    quartiles,
    ratio_cells,
    ratios,
    time_bar,
    turns,
)
from variants import NAMES, OPTIMIZERS, STRATEGIES, Setting, Trainee, build, missing

from composer_fsdp2._torch.repairs import repair_cpu_collectives

TITLES = {
    HAND: "fully_shard by hand",
    "ours": "composer_fsdp2",
    "voting": "composer_fsdp2, voting",
    "in step": "composer_fsdp2, ranks in step",
    "revision": "composer_fsdp2 of the revision",
    "composer": "Composer's FSDP2",
    "fsdp1": "FSDP1",
}
BESIDE = ("ours", "composer", "fsdp1")
SHAPES = {
    "cpu": Shape(width=192, layers=4, heads=4, vocabulary=1024, sequence=64, batch=2),
    "cuda": Shape(width=2048, layers=18, heads=16, vocabulary=32000, sequence=1024, batch=8),  # 1.04e9 parameters
}
MAX_VOTING_RATIO = 1.02  # of a step without votes
MAX_REVISION_RATIO = 1.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What one run measures."""

    shape: Shape
    strategy: str
    device_type: str
    variants: tuple[str, ...]
    ranks: int
    steps: int
    warmup: int
    optimizer: str
    max_norm: float | None
    pipelined: int
    revision_folder: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--trainer" in words:
        return trainer.main([word for word in words if word != "--trainer"])
    parser = _parser()
    given = parser.parse_args(words)
    if given.optimizer != OPTIMIZERS[0]:
        if given.against is not None:
            parser.error("--against has torch's AdamW only: of a commit's package it takes the engine, not the shim")
        if (reason := missing("composer")) is not None:
            parser.error(f"--optimizer {given.optimizer}: {reason}")
    options = _options(given)
    absent = {name: reason for name in options.variants if (reason := missing(name))}
    options = replace(options, variants=tuple(name for name in options.variants if name not in absent))
    with checked_out(given.against) as folder:
        result = on_ranks(measure, options.ranks, options.device_type, replace(options, revision_folder=folder))
    bars = _bars(options, result)
    summary = {**_summary(options, result), "missing": absent}
    return report.conclude(given, bars, summary=summary, text=_text(options, result, absent))


def _parser() -> argparse.ArgumentParser:
    parser = report.parser(__doc__)
    parser.add_argument("--strategy", choices=STRATEGIES, default=STRATEGIES[0])
    parser.add_argument("--variants", nargs="+", choices=BESIDE, help="beside the hand-written loop; default: all")
    report.add_revision(parser, "compare with this commit of ours (default variants: ours)")
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
    parser.add_argument("--trainer", action="store_true", help="a Trainer's whole batch; --trainer --help for the rest")
    parser.add_argument("--steps", type=report.count, help="timed rounds; default: 50 on a GPU, 200 on the CPU")
    parser.add_argument("--warmup", type=report.count, default=5, help="rounds before them")
    add_sizes(parser)
    return parser


def _options(given: argparse.Namespace) -> Options:
    on_gpu = given.device == "cuda"
    return Options(
        shape=with_sizes(SHAPES[given.device], given),
        strategy=given.strategy,
        device_type=given.device,
        variants=(HAND, *(name for name in NAMES if name in _variants(given))),
        ranks=report.ranks_of(given),
        steps=given.steps or (50 if on_gpu else 200),
        warmup=given.warmup,
        optimizer=given.optimizer,
        max_norm=MAX_NORM if given.clipping else None,
        pipelined=given.pipelined,
    )


def _variants(given: argparse.Namespace) -> tuple[str, ...]:
    if given.against is None:
        return tuple(given.variants or BESIDE)
    return ("ours", "voting", "in step", "revision", *(given.variants or ()))


# On the ranks ---------------------------------------------------------------------------------------------------------


def measure(options: Options) -> dict[str, dict[str, Any]]:
    """Everything about each variant, the same on all ranks; called on all ranks."""
    if options.device_type == "cpu":
        # For all variants alike, so that they learn the same: by themselves hand and Composer would train on sums.
        repair_cpu_collectives()
    on_gpu = options.device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    setting = Setting(
        shape=options.shape,
        strategy=options.strategy,
        device=device,
        low_precision=on_gpu,
        optimizer=options.optimizer,
        max_norm=options.max_norm,
        revision_folder=options.revision_folder,
    )
    runs = {name: _Run(name, setting) for name in options.variants}
    for run in runs.values():
        run.count_collectives()
        run.measure_state()
    for name, is_warm in turns(options.variants, options.steps, warmup=options.warmup):
        runs[name].time_steps(options.pipelined, is_warm=is_warm)
    return {name: run.result() for name, run in runs.items()}


class _Run:
    """One variant with what was seen of it on this rank. Each method that trains takes the next batch."""

    def __init__(self, name: str, setting: Setting) -> None:
        self.setting = setting
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.processor_seconds: list[float] = []
        self.collectives: dict[str, dict[str, int]] = {}
        self.state_bytes: dict[str, int] = {}
        before = self._allocated_bytes()
        self.trainee: Trainee = build(name, setting)
        self._train()  # makes the optimizer's state, and whatever else is made at first use
        self.resident_bytes = self._allocated_bytes() - before

    def count_collectives(self) -> None:
        mode = Collectives()
        with mode:
            self._train()
        self.collectives = mode.counts

    def measure_state(self) -> None:
        if self.setting.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            others_bytes = self._allocated_bytes() - self.resident_bytes
            self._train()
            self.state_bytes["allocated"] = torch.cuda.max_memory_allocated() - others_bytes
        mode = StateBytes(self.trainee.model, self.trainee.optimizer)
        with mode:
            self._train()
        self.state_bytes |= {"peak": mode.peak, **mode.at_peak}

    def time_steps(self, number: int, *, is_warm: bool) -> None:
        batches = [self._tokens(later) for later in range(number)]
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
        """Bytes are the largest of any rank; losses are means."""
        return {
            **over_ranks(self.seconds, self.processor_seconds),
            "losses": [statistics.fmean(each) for each in zip(*gather(self.losses), strict=True)],
            "collectives": self.collectives,
            "state_bytes": max(gather(self.state_bytes), key=lambda sizes: sizes["peak"]),
        }

    def _train(self) -> None:
        self.losses.append(self.trainee.step(self._tokens()).item())

    def _tokens(self, later: int = 0) -> torch.Tensor:
        """The next batch, or one after it: another one on each rank, the same for all variants."""
        seed = (len(self.losses) + later) * dist.get_world_size() + dist.get_rank()
        return self.setting.shape.tokens(seed).to(self.setting.device)

    def _synchronize(self) -> None:
        if self.setting.device.type == "cuda":
            torch.cuda.synchronize()

    def _allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated() if self.setting.device.type == "cuda" else 0


# What is said of it ---------------------------------------------------------------------------------------------------


def _summary(options: Options, result: dict[str, dict[str, Any]]) -> dict[str, Any]:
    others = [name for name in result if name != HAND]
    of_hand = {name: ratios(result, name, to=HAND) for name in others}
    of_processor = {name: ratios(result, name, "processor_seconds", to=HAND) for name in others}
    return {
        "options": asdict(options),
        "ratio": {name: statistics.median(each) for name, each in of_hand.items()},
        "ratio_quartiles": {name: quartiles(each) for name, each in of_hand.items()},
        "processor_ratio": {name: statistics.median(each) for name, each in of_processor.items()},
        "step_s": {name: statistics.median(each["seconds"]) for name, each in result.items()},
        "loss_difference": {name: loss_difference(result, name, HAND) for name in others},
        "collectives": {name: each["collectives"] for name, each in result.items()},
        "state_bytes": {name: each["state_bytes"] for name, each in result.items()},
    }


def _bars(options: Options, result: dict[str, dict[str, Any]]) -> list[Bar]:
    bars = []
    if "ours" in result:
        ours, hand = result["ours"]["collectives"], result[HAND]["collectives"]
        bars.append(
            Bar(
                "the collectives and bytes of the hand-written loop",
                _in_words(ours) if ours == hand else f"{_in_words(ours)}; by hand {_in_words(hand)}",
                ours == hand,
            )
        )
        bars.append(_loss_bar(options, result))
        bars.append(time_bar("its time of a step", ratios(result, "ours", to=HAND), MAX_RATIO))
    if "voting" in result:
        of_ours = ratios(result, "voting", to="ours")
        bars.append(time_bar("with votes: our time of a step without", of_ours, MAX_VOTING_RATIO))
    if "revision" in result:
        of_revision = ratios(result, "ours", to="revision")
        bars.append(time_bar("the revision's time of a step", of_revision, MAX_REVISION_RATIO))
    if {"ours", "composer"} <= result.keys() and options.strategy == "SHARD_GRAD_OP":
        ours_bytes, composer_bytes = (gathered_bytes(result[name]["collectives"]) for name in ("ours", "composer"))
        bars.append(
            Bar(
                "fewer gathered bytes than Composer's FSDP2, which ignores sharding_strategy",
                f"{mib(ours_bytes)}, Composer's {mib(composer_bytes)}",
                ours_bytes < composer_bytes,
            )
        )
    return bars


def _loss_bar(options: Options, result: dict[str, dict[str, Any]]) -> Bar:
    limit = MAX_LOSS_DIFFERENCE[options.device_type]
    if options.max_norm is None:
        difference, of = loss_difference(result, "ours", HAND), ""
    else:
        limit, of = max(limit, MAX_CLIPPED_LOSS_DIFFERENCE), f" of the first {FIRST} steps"
        difference = loss_difference(result, "ours", HAND, first=FIRST)
    return Bar(f"its losses{of}, to {limit:.0e}", f"{difference:.1e}", difference <= limit)


def _in_words(counts: dict[str, dict[str, int]]) -> str:
    return (
        "; ".join(f"{count['calls']} {name}, {mib(count['bytes'])} in all" for name, count in counts.items()) or "none"
    )


def _text(options: Options, result: dict[str, dict[str, Any]], absent: dict[str, str]) -> str:
    shape = options.shape
    precision = "bf16 (kept in fp32)" if options.device_type == "cuda" else "fp32"
    clipped = "" if options.max_norm is None else f", clipped to {options.max_norm}"
    pipelined = "" if options.pipelined == 1 else f" of {options.pipelined} steps"
    lines = [
        f"{machine()}; {options.ranks} ranks, {options.strategy}, {precision}, {options.optimizer}{clipped}; "
        f"{shape.layers} layers of width {shape.width}, vocabulary {shape.vocabulary}, {shape.batch} × "
        f"{shape.sequence} tokens a rank; {options.steps} rounds{pipelined}",
        "",
        _time_table(result),
        "",
        _collectives_table(result),
        "",
        _state_table(result),
        "",
    ]
    lines.extend(f"without {TITLES[name]}: {reason}" for name, reason in absent.items())
    return "\n".join(lines)


def _time_table(result: dict[str, dict[str, Any]]) -> str:
    rows = []
    for name, each in result.items():
        seconds = statistics.median(each["seconds"])
        row = [TITLES[name], f"{1000 * seconds:.1f} ms", "1", "", "1", ""]
        if name != HAND:
            row[2:] = ratio_cells(result, name, ("seconds", "processor_seconds"), to=HAND)
            row.append(f"{loss_difference(result, name, HAND):.1e}")
        rows.append(row)
    return markdown(
        ["a step", "median", "median of ratios", "their quartiles", "of processor time", "losses differ by"],
        rows,
    )


def _collectives_table(result: dict[str, dict[str, Any]]) -> str:
    operators = sorted({name for each in result.values() for name in each["collectives"]})
    rows = []
    for name, each in result.items():
        counts = [each["collectives"].get(operator) for operator in operators]
        rows.append([TITLES[name], *(f"{c['calls']}: {mib(c['bytes'])}" if c else "0" for c in counts)])
    return markdown(["collectives a step, and their full buffers", *operators], rows)


def _state_table(result: dict[str, dict[str, Any]]) -> str:
    kinds = list(result[HAND]["state_bytes"])
    rows = [[TITLES[name], *(mib(each["state_bytes"][kind]) for kind in kinds)] for name, each in result.items()]
    return markdown(["state on a rank, where its sum is largest", *kinds], rows)


if __name__ == "__main__":
    sys.exit(main())
