"""A large monolithic checkpoint: loaded on two ranks, converted to DCP and back, verified; beside torch and Composer.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --gib 1 --rounds 1 --json

The checkpoint is one ``torch.save`` file of a decoder with AdamW's state. Each load, copy, conversion and verification
has processes of its own; a round makes one of each, in an order that is turned around from round to round, and its
ratios are to what was measured in the same round. Needs Linux, the disk for three checkpoints and, for torch's and
Composer's parts, the memory for two. Exit code 0, or 1 if a bar does not hold.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import report
from converting import ConvertTask, VerifyTask, convert, crc32_rate, verify, write_rate
from launch import on_ranks
from loading import LOADERS, LoadTask, load, shape_of, write_checkpoint
from models import Shape
from report import Bar, machine, markdown, mib
from usage import Usage, available_bytes, drop_from_cache, in_new_process, read_through
from variants import missing

LOAD_TITLES = {
    "ours": "load_checkpoint",
    "replicated": "load_checkpoint, NO_SHARD",
    "torch": "torch, from rank 0",
    "composer": "Composer's Trainer",
}
CACHES = {"cached": "in the page cache", "cold": "on the disk alone"}
OVERHEAD_BYTES = 256 << 20
MAX_READ = 1.01  # of the shard
MAX_LOAD_RATIO = 1.0
MAX_CONVERT_RATIO = 1.5
MIN_VERIFY_RATE = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What one run measures."""

    gib: float
    ranks: int
    rounds: int
    folder: Path
    loaders: tuple[str, ...]
    converters: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return int(self.gib * 2**30)

    @property
    def shape(self) -> Shape:
        return shape_of(self.num_bytes)


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    absent = _absent(int(given.gib * 2**30))
    options = Options(
        gib=given.gib,
        ranks=given.ranks,
        rounds=given.rounds,
        folder=given.folder,
        loaders=tuple(name for name in LOADERS if name in ("ours", "torch", *given.beside) and name not in absent),
        converters=tuple(name for name in _CONVERSIONS if name not in absent),
    )
    result = measure(options)
    bars = _bars(result)
    summary = {**_summary(options, result), "missing": absent}
    return report.conclude(given, bars, summary=summary, text=_text(options, result, absent))


def _parser() -> argparse.ArgumentParser:
    parser = report.parser(__doc__)
    parser.add_argument("--gib", type=report.positive, default=4.0, help="size of the checkpoint; default: 4")
    parser.add_argument("--ranks", type=report.count, default=2)
    parser.add_argument("--rounds", type=report.count, default=3)
    parser.add_argument(
        "--beside", nargs="*", choices=["composer", "replicated"], default=["composer"], help="further loads"
    )
    parser.add_argument(
        "--folder", type=report.folder, default=tempfile.gettempdir(), help="on the disk to be measured"
    )
    return parser


def _absent(num_bytes: int) -> dict[str, str]:
    """What is not measured here, and why."""
    absent = {"composer": reason} if (reason := missing("composer")) else {}
    if (available := available_bytes()) < 2 * num_bytes:
        reason = f"needs about {mib(2 * num_bytes)} of memory, {mib(available)} are free"
        absent |= dict.fromkeys(("composer", "torch to DCP", "torch to monolithic"), reason)
    return absent


# The rounds -----------------------------------------------------------------------------------------------------------

Run = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """Every list has an element for each round.

    Args:
        rates: Bytes a second, by what was measured.
        loads: By cache, then by loader; each with a ``Usage`` and the shard's bytes for each rank.
        conversions: By converter.
        verifications: By cache.
        digests: By loader, of what each load left; ``file``: of what was written.
    """

    file_bytes: int
    rates: dict[str, list[float]]
    loads: dict[str, dict[str, list[Run]]]
    conversions: dict[str, list[Usage]]
    verifications: dict[str, list[Usage]]
    digests: dict[str, list[int]]


_RATES = {"read": "disk, reading", "write": "disk, writing", "cache": "page cache, reading", "crc32": "zlib.crc32"}
_CONVERSIONS = {
    "cp": "cp and fsync",
    "ours to DCP": "convert_checkpoint, to DCP",
    "ours to monolithic": "convert_checkpoint, back",
    "torch to DCP": "torch_save_to_dcp",
    "torch to monolithic": "dcp_to_torch_save",
}


def measure(options: Options) -> Result:
    """All rounds, in a folder that is removed."""
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="checkpoint-benchmark-") as name:
        folder = Path(name)
        source = LoadTask(loader="", path=folder / "checkpoint.pt", shape=options.shape)
        digest = in_new_process(write_checkpoint, source)
        result = Result(
            file_bytes=source.path.stat().st_size,
            rates={rate: [] for rate in _RATES},
            loads={cache: {loader: [] for loader in options.loaders} for cache in CACHES},
            conversions={converter: [] for converter in options.converters},
            verifications={cache: [] for cache in CACHES},
            digests={"file": [digest]} | {loader: [] for loader in options.loaders},
        )
        rounds = _Rounds(options, folder, source.path, result)
        rounds.prepare()
        for number in range(options.rounds):
            rounds.run(is_turned=number % 2 == 1)
        return result


class _Rounds:
    def __init__(self, options: Options, folder: Path, path: Path, result: Result) -> None:
        self.options, self.folder, self.path, self.result = options, folder, path, result
        self.dcp = folder / "dcp"

    def prepare(self) -> None:
        """The DCP folder that is converted back; and that the way there and back changes nothing."""
        back = self.folder / "back.pt"
        in_new_process(convert, ConvertTask(converter="ours to DCP", source=self.path, destination=self.dcp))
        in_new_process(convert, ConvertTask(converter="ours to monolithic", source=self.dcp, destination=back))
        in_new_process(verify, VerifyTask(path=back, against=self.path))
        back.unlink()

    def run(self, *, is_turned: bool) -> None:
        """One round."""
        steps: list[Callable[[], None]] = []
        for cache in CACHES:
            steps += [partial(self.load, loader, cache) for loader in self.options.loaders]
            steps.append(partial(self.verify, cache))
        steps += [partial(self.convert, converter) for converter in self.options.converters]
        for step in reversed(steps) if is_turned else steps:
            step()

    def load(self, loader: str, cache: str) -> None:
        self.to(cache, self.path)
        task = LoadTask(loader=loader, path=self.path, shape=self.options.shape)
        run = on_ranks(load, self.options.ranks, "cpu", task)
        self.result.digests[loader].append(run.pop("digest"))
        self.result.loads[cache][loader].append(run)

    def convert(self, converter: str) -> None:
        is_back = converter.endswith("monolithic")
        source, destination = self.dcp if is_back else self.path, self.folder / "converted"
        if converter == "cp":
            self.result.rates["write"].append(write_rate(destination, self.result.file_bytes))
        self.to("cached", source)
        task = ConvertTask(converter=converter, source=source, destination=destination)
        self.result.conversions[converter].append(in_new_process(convert, task))
        shutil.rmtree(destination) if destination.is_dir() else destination.unlink()

    def verify(self, cache: str) -> None:
        """With what it is compared to just before it."""
        rates = self.result.rates
        self.to(cache, self.path)
        if cache == "cold":
            rates["read"].append(read_through(self.path))
            self.to(cache, self.path)
        else:
            rates["cache"].append(read_through(self.path))
            rates["crc32"].append(crc32_rate(self.result.file_bytes))
        self.result.verifications[cache].append(in_new_process(verify, VerifyTask(path=self.path)))

    @staticmethod
    def to(cache: str, path: Path) -> None:
        os.sync()  # What was written before costs nobody else.
        drop_from_cache(path) if cache == "cold" else read_through(path)


# What is said of it ---------------------------------------------------------------------------------------------------


def _seconds(result: Result, kind: str, name: str) -> list[float]:
    """Of every round; ``kind``: a cache, for its loads, or ``convert``."""
    if kind == "convert":
        return [usage.seconds for usage in result.conversions[name]]
    return [run["seconds"] for run in result.loads[kind][name]]


def _ratio(numbers: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(numbers, others, strict=True))


def _load_ratio(result: Result, cache: str, name: str) -> float:
    return _ratio(_seconds(result, cache, name), _seconds(result, cache, "torch"))


def _processor_ratio(result: Result, cache: str, name: str) -> float:
    sums = {
        each: [sum(rank["processor_seconds"] for rank in run["of_ranks"]) for run in result.loads[cache][each]]
        for each in (name, "torch")
    }
    return _ratio(sums[name], sums["torch"])


def _ranks_of(result: Result, cache: str, name: str) -> list[dict[str, Any]]:
    """Every rank of every round."""
    return [rank for run in result.loads[cache][name] for rank in run["of_ranks"]]


def _overhead_bytes(result: Result, cache: str, name: str) -> int:
    """The most that any rank's peak exceeded its shard, or what it took at all where the shard lay there before."""
    shards = 0 if name == "replicated" else 1
    return max(rank["anonymous_bytes"] - shards * rank["shard_bytes"] for rank in _ranks_of(result, cache, name))


def _read_part(result: Result, cache: str, name: str) -> float:
    """The most that any rank read, of its shard."""
    return max(rank["read_bytes"] / rank["shard_bytes"] for rank in _ranks_of(result, cache, name))


def _convert_ratio(result: Result, name: str) -> float:
    return _ratio(_seconds(result, "convert", name), _seconds(result, "convert", "cp"))


def _verify_part(result: Result, cache: str) -> float:
    """Of the speed of the disk, or of ``crc32`` where the file is cached."""
    rates = [result.file_bytes / usage.seconds for usage in result.verifications[cache]]
    return _ratio(rates, result.rates["read" if cache == "cold" else "crc32"])


def _bars(result: Result) -> list[Bar]:
    wrong = [name for name, digests in result.digests.items() if set(digests) != set(result.digests["file"])]
    bars = [Bar("what was loaded is what was written", ", ".join(wrong) or "by all", not wrong)]
    for cache, where in CACHES.items():
        overhead = _overhead_bytes(result, cache, "ours")
        read, ratio = _read_part(result, cache, "ours"), _load_ratio(result, cache, "ours")
        bars += [
            Bar(
                f"load, {where}: peak memory of a rank at most its shard and {mib(OVERHEAD_BYTES)}",
                f"its shard and {mib(overhead)}",
                overhead <= OVERHEAD_BYTES,
            ),
            Bar(f"load, {where}: a rank reads its shard and 1% at most", f"{read:.4f} of it", read <= MAX_READ),
            Bar(f"load, {where}: no slower than torch", f"{ratio:.2f} of its time", ratio <= MAX_LOAD_RATIO),
        ]
        if "replicated" in result.loads[cache]:
            bars.append(_replicated_bar(result, cache))
    for name in ("ours to DCP", "ours to monolithic"):
        peak, ratio = max(usage.anonymous_bytes for usage in result.conversions[name]), _convert_ratio(result, name)
        title = _CONVERSIONS[name]
        bars += [
            Bar(f"{title}: peak memory at most {mib(OVERHEAD_BYTES)}", mib(peak), peak <= OVERHEAD_BYTES),
            Bar(f"{title}: at most {MAX_CONVERT_RATIO} times cp and fsync", f"{ratio:.2f}", ratio <= MAX_CONVERT_RATIO),
        ]
    for cache, where in CACHES.items():
        part, of = _verify_part(result, cache), "the disk's" if cache == "cold" else "zlib.crc32's"
        bars.append(
            Bar(f"verify, {where}: at least {MIN_VERIFY_RATE} of {of} speed", f"{part:.2f}", part >= MIN_VERIFY_RATE)
        )
    return bars


def _replicated_bar(result: Result, cache: str) -> Bar:
    overhead = _overhead_bytes(result, cache, "replicated")
    promise = f"load into NO_SHARD, {CACHES[cache]}: peak memory of a rank at most {mib(OVERHEAD_BYTES)}"
    return Bar(promise, mib(overhead), overhead <= OVERHEAD_BYTES)


def _summary(options: Options, result: Result) -> dict[str, Any]:
    return {
        "options": {**asdict(options), "folder": str(options.folder)},
        "load_ratio": {c: {name: _load_ratio(result, c, name) for name in options.loaders} for c in CACHES},
        "convert_ratio": {name: _convert_ratio(result, name) for name in options.converters},
        "verify_part": {cache: _verify_part(result, cache) for cache in CACHES},
        **asdict(result),
    }


def _text(options: Options, result: Result, absent: dict[str, str]) -> str:
    shape = options.shape
    lines = [
        f"{machine()}; {mib(result.file_bytes)} in one file, {shape.layers} layers of width {shape.width}, vocabulary "
        f"{shape.vocabulary}, fp32, AdamW; {options.ranks} ranks; {options.rounds} rounds",
        "",
        _rates_table(result),
        "",
        _load_table(result),
        "",
        _convert_table(result),
        "",
        _verify_table(result),
        "",
    ]
    lines.extend(f"without {name}: {reason}" for name, reason in absent.items())
    return "\n".join(lines)


def _rates_table(result: Result) -> str:
    rows = [
        [_RATES[name], _rate(statistics.median(rates)), f"{_rate(min(rates))} to {_rate(max(rates))}"]
        for name, rates in result.rates.items()
    ]
    return markdown(["speed of", "median", "from least to most"], rows)


def _rate(bytes_a_second: float) -> str:
    return f"{bytes_a_second / 2**20:,.0f} MiB/s"


def _load_table(result: Result) -> str:
    rows = []
    for cache, loads in result.loads.items():
        for name in loads:
            ranks = _ranks_of(result, cache, name)
            peaks = [max(r["anonymous_bytes"] for r in of_rank) for of_rank in _by_rank(result.loads[cache][name])]
            rows.append(
                [
                    f"{LOAD_TITLES[name]}, {CACHES[cache]}",
                    f"{statistics.median(_seconds(result, cache, name)):.1f} s",
                    f"{_load_ratio(result, cache, name):.2f}",
                    f"{_processor_ratio(result, cache, name):.2f}",
                    ", ".join(mib(peak) for peak in peaks),
                    mib(_overhead_bytes(result, cache, name)),
                    f"{_read_part(result, cache, name):.3f}",
                    mib(sum(rank["disk_bytes"] for rank in ranks) / len(result.loads[cache][name])),
                ]
            )
    header = ["a load", "median", "of torch's", "of processor time", "peak of each rank", "beyond the shard"]
    return markdown([*header, "read, of the shard", "from the disk"], rows)


def _by_rank(runs: Sequence[Run]) -> list[tuple[Any, ...]]:
    return list(zip(*(run["of_ranks"] for run in runs), strict=True))


def _convert_table(result: Result) -> str:
    rows = [
        [
            _CONVERSIONS[name],
            f"{statistics.median(usage.seconds for usage in usages):.1f} s",
            f"{_convert_ratio(result, name):.2f}",
            mib(max(usage.anonymous_bytes for usage in usages)) if name != "cp" else "",
        ]
        for name, usages in result.conversions.items()
    ]
    return markdown(["from the page cache to the disk", "median", "of cp and fsync", "peak memory"], rows)


def _verify_table(result: Result) -> str:
    rows = [
        [
            f"verify_checkpoint, {CACHES[cache]}",
            f"{statistics.median(usage.seconds for usage in usages):.1f} s",
            _rate(statistics.median(result.file_bytes / usage.seconds for usage in usages)),
            f"{_verify_part(result, cache):.2f} of {'the disk' if cache == 'cold' else 'zlib.crc32'}",
            mib(max(usage.anonymous_bytes for usage in usages)),
        ]
        for cache, usages in result.verifications.items()
    ]
    return markdown(["a check of all content", "median", "speed", "of the speed of", "peak memory"], rows)


if __name__ == "__main__":
    sys.exit(main())
