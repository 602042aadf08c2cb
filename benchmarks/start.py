"""Start-up of the command line, and the cost of importing the package, in processor time.

    python benchmarks/start.py
    python benchmarks/start.py --only version explain --json

A round starts every command once, in random order. Ratios are to the same round's import of the libraries that the
command line needs, or of torch's FSDP; the tables show the median over all rounds. Processor time, user and system, of
a process and its children, because other load affects it less. Exit code 0, or 1 if a bar fails.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import report
from migrate import FILES, file_text, used_by_children
from report import machine, markdown
from timing import quartiles, ratios, time_bar, turns

ROOT = Path(__file__).resolve().parents[1]
# By the reference import: the maximum ratio.
LIMITS = {"import typer, rich, yaml, omegaconf": 3.0, "import torch.distributed.fsdp": 1.15}
LIBRARIES, TORCH = LIMITS
STARTS = {
    "version": "composer-fsdp2 --version",
    "help": "composer-fsdp2 --help",
    "explain": "composer-fsdp2 explain sharding_strategy",
    "migrate": "composer-fsdp2 migrate run.yaml",
    "plan": "composer-fsdp2 plan --help",
    "run": "composer-fsdp2 run --help",
    "checkpoint": "composer-fsdp2 checkpoint --help",
    "inspect": "composer-fsdp2 checkpoint inspect --help",
    "convert": "composer-fsdp2 checkpoint convert --help",
    "verify": "composer-fsdp2 checkpoint verify --help",
    "import": "from composer_fsdp2 import prepare_fully_shard",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=report.count, default=11)
    parser.add_argument("--only", nargs="+", choices=list(STARTS), default=list(STARTS))
    given = parser.parse_args(arguments)
    bases = {STARTS[name]: TORCH if name == "import" else LIBRARIES for name in given.only}
    result: dict[str, dict[str, list[float]]] = {each: {"seconds": []} for each in (*bases, *set(bases.values()))}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "run.yaml").write_text(file_text(0))
        for command, counts in turns(list(result), given.rounds, warmup=1):  # the warm-up compiles the files
            seconds = processor_seconds(command, folder)
            if counts:
                result[command]["seconds"].append(seconds)
    medians = {command: statistics.median(each["seconds"]) for command, each in result.items()}
    bars, rows = [], []
    for command, base in bases.items():
        each = ratios(result, command, to=base)
        bars.append(time_bar(f"{command}: at most the time of {base!r}", each, LIMITS[base]))
        cells = [f"{statistics.median(each):.2f}", "{:.2f} to {:.2f}".format(*quartiles(each))]
        rows.append([command, f"{medians[command]:.2f} s", *cells, f"{base}: {medians[base]:.2f} s"])
    header = ["a start", "processor time", "median of ratios", "their quartiles", "to"]
    text = f"{machine()}; run.yaml is {FILES[0].name}\n\n{markdown(header, rows)}\n"
    return report.conclude(given, bars, summary={"processor_s": medians}, text=text)


def processor_seconds(command: str, folder: str) -> float:
    """Processor time of a command in this folder, user and system; all Python variables are unset.

    Raises:
        subprocess.CalledProcessError: the command failed, which may take less time.
    """
    program, *words = command.split()
    words = ["-m", "composer_fsdp2", *words] if program == "composer-fsdp2" else ["-c", command]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["PYTHONPATH"] = str(ROOT)
    used = used_by_children()
    subprocess.run([sys.executable, *words], cwd=folder, env=environment, check=True, capture_output=True)
    return used_by_children() - used


if __name__ == "__main__":
    sys.exit(main())
