"""How soon the command line answers, and what importing the package costs, in processor time.

    python benchmarks/start.py
    python benchmarks/start.py --only version explain --json

A round starts every command once, in an order drawn anew, and its ratios are to that round's import of the libraries
that the command line needs, or of torch's FSDP; the tables show the median over all rounds. Processor time, user and
system, of a process and of what it started, because other work on the machine disturbs it less. Exit code 0, or 1 if a
bar does not hold.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import report
from migrate import LINES, file_text
from report import machine, markdown
from timing import Result, quartiles, ratios, time_bar, turns

ROOT = Path(__file__).resolve().parents[1]
MAX_LIBRARIES_RATIO, MAX_TORCH_RATIO = 3.0, 1.15


LIBRARIES = "import typer, rich, yaml, omegaconf"
TORCH = "import torch.distributed.fsdp"


@dataclass(frozen=True, slots=True)
class Start:
    """Words for Python, and the import whose time is exceeded by no more than ``limit`` times."""

    words: tuple[str, ...]
    to: str
    limit: float

    def __str__(self) -> str:
        return " ".join(self.words).replace("-m composer_fsdp2", "composer-fsdp2").removeprefix("-c ")


def _verb(*words: str) -> Start:
    return Start(("-m", "composer_fsdp2", *words), LIBRARIES, MAX_LIBRARIES_RATIO)


STARTS = {
    "version": _verb("--version"),
    "help": _verb("--help"),
    "explain": _verb("explain", "sharding_strategy"),
    "migrate": _verb("migrate", "run.yaml"),
    "plan": _verb("plan", "--help"),
    "run": _verb("run", "--help"),
    "checkpoint": _verb("checkpoint", "--help"),
    "inspect": _verb("checkpoint", "inspect", "--help"),
    "convert": _verb("checkpoint", "convert", "--help"),
    "verify": _verb("checkpoint", "verify", "--help"),
    "import": Start(("-c", "from composer_fsdp2 import prepare_fully_shard"), TORCH, MAX_TORCH_RATIO),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=report.count, default=11)
    parser.add_argument("--only", nargs="+", choices=list(STARTS), default=list(STARTS))
    given = parser.parse_args(arguments)
    result = measure(given.only, given.rounds)
    measured = {name: ratios(result, name, "processor_seconds", to=STARTS[name].to) for name in given.only}
    bars = [
        time_bar(f"{STARTS[name]}: at most the time of {STARTS[name].to!r}", each, STARTS[name].limit)
        for name, each in measured.items()
    ]
    medians = {name: statistics.median(each["processor_seconds"]) for name, each in result.items()}
    summary = {"processor_s": medians, "ratio": {name: statistics.median(each) for name, each in measured.items()}}
    return report.conclude(given, bars, summary=summary, text=_text(given.only, result))


def measure(names: Sequence[str], num_rounds: int) -> Result:
    """Processor seconds of each start in each round, after one that compiles the files."""
    commands = {STARTS[name].to: ("-c", STARTS[name].to) for name in names}
    commands |= {name: STARTS[name].words for name in names}
    result: Result = {name: {"processor_seconds": []} for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "run.yaml").write_text(file_text(0))
        for name, counts in turns(list(commands), num_rounds, warmup=1):
            seconds = processor_seconds(commands[name], folder)
            if counts:
                result[name]["processor_seconds"].append(seconds)
    return result


def processor_seconds(words: Sequence[str], folder: str) -> float:
    """What ``python words`` takes in this folder; all variables of Python's are left out.

    Raises:
        SystemExit: it failed, which may be quick.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"python {' '.join(words)} ended with exit code {process.returncode}")
    return used.ru_utime + used.ru_stime


def _text(names: Sequence[str], result: Result) -> str:
    rows = []
    for name in names:
        start = STARTS[name]
        each = ratios(result, name, "processor_seconds", to=start.to)
        first, third = quartiles(each)
        own, base = (f"{statistics.median(result[key]['processor_seconds']):.2f} s" for key in (name, start.to))
        cells = [own, f"{statistics.median(each):.2f}", f"{first:.2f} to {third:.2f}", f"{start.to}: {base}"]
        rows.append([str(start), *cells])
    header = ["a start", "processor time", "median of ratios", "their quartiles", "to"]
    return f"{machine()}; run.yaml has {LINES} lines\n\n{markdown(header, rows)}\n"


if __name__ == "__main__":
    sys.exit(main())
