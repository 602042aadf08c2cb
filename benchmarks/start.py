"""How soon the command line answers, and what importing the package costs, in processor time.

    python benchmarks/start.py
    python benchmarks/start.py --against REVISION --rounds 5
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import report
from migrate import LINES, file_text
from report import machine, markdown
from revision import checked_out
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
    report.add_revision(parser)
    given = parser.parse_args(arguments)
    with checked_out(given.against) as folder:
        packages = {"": str(ROOT)} | ({"revision": folder} if given.against else {})
        result = measure(given.only, packages, given.rounds)
    measured = {name: ratios(result, name, "processor_seconds", to=STARTS[name].to) for name in given.only}
    bars = [
        time_bar(f"{STARTS[name]}: at most the time of {STARTS[name].to!r}", each, STARTS[name].limit)
        for name, each in measured.items()
    ]
    medians = {name: statistics.median(each["processor_seconds"]) for name, each in result.items()}
    summary = {"processor_s": medians, "ratio": {name: statistics.median(each) for name, each in measured.items()}}
    return report.conclude(given, bars, summary=summary, text=_text(given.only, result))


def measure(names: Sequence[str], packages: Mapping[str, str], num_rounds: int) -> Result:
    """Processor seconds of each start in each round, after one that compiles the files.

    Args:
        packages: Folders that our package lies in, by what is added to a start's name.
    """
    bases = dict.fromkeys(STARTS[name].to for name in names)
    commands: dict[str, tuple[tuple[str, ...], str]] = {base: (("-c", base), str(ROOT)) for base in bases}
    for added, folder in packages.items():
        commands |= {f"{name} {added}".strip(): (STARTS[name].words, folder) for name in names}
    result: Result = {name: {"processor_seconds": []} for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "run.yaml").write_text(file_text(0))
        for name, counts in turns(list(commands), num_rounds, warmup=1):
            seconds = processor_seconds(*commands[name], folder)
            if counts:
                result[name]["processor_seconds"].append(seconds)
    return result


def processor_seconds(words: Sequence[str], package_folder: str, folder: str) -> float:
    """What ``python words`` takes with the package from a folder; all variables of Python's are left out.

    Raises:
        SystemExit: our own command failed, which may be quick. An older commit may lack a verb.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env=environment | {"PYTHONPATH": package_folder},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode and package_folder == str(ROOT):
        raise SystemExit(f"python {' '.join(words)} ended with exit code {process.returncode}")
    return used.ru_utime + used.ru_stime


def _text(names: Sequence[str], result: Result) -> str:
    has_revision = any(f"{name} revision" in result for name in names)
    header = ["a start", "processor time", "median of ratios", "their quartiles", "to"]
    rows = []
    for name in names:
        base = STARTS[name].to
        each = ratios(result, name, "processor_seconds", to=base)
        first, third = quartiles(each)
        row = [
            str(STARTS[name]),
            _seconds(result, name),
            f"{statistics.median(each):.2f}",
            f"{first:.2f} to {third:.2f}",
        ]
        rows.append([*row, f"{base}: {_seconds(result, base)}"])
        if has_revision:
            other = f"{name} revision"
            each = ratios(result, other, "processor_seconds", to=base)
            rows[-1] += [_seconds(result, other), f"{statistics.median(each):.2f}"]
    if has_revision:
        header += ["the revision's", "its ratio"]
    return f"{machine()}; run.yaml has {LINES} lines\n\n{markdown(header, rows)}\n"


def _seconds(result: Result, name: str) -> str:
    return f"{statistics.median(result[name]['processor_seconds']):.2f} s"


if __name__ == "__main__":
    sys.exit(main())
