"""Command lines, tables, bars and exit codes, alike for all benchmarks."""

import argparse
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Bar:
    """One limit that the project promises, and whether this run stayed within it."""

    promise: str
    measured: str
    holds: bool


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The script's docstring as its help, and the options common to all scripts."""
    summary, _, details = (doc or "").partition("\n")
    made = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", action="store_true", help="one object instead of the tables")
    made.add_argument("--no-bars", action="store_true", help="exit code 0 whatever was measured")
    return made


def count(text: str) -> int:
    """An option's ``type``: an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def add_device(made: argparse.ArgumentParser) -> None:
    """The model's device and the number of ranks; see ``ranks_of``."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    made.add_argument("--device", choices=("cpu", "cuda"), default=default, help="of the model; default: %(default)s")
    made.add_argument("--ranks", type=count, help="default: 1 on a GPU, 2 on the CPU")


def ranks_of(given: argparse.Namespace) -> int:
    """The number of ranks that the options of ``add_device`` select."""
    return given.ranks or (1 if given.device == "cuda" else 2)


def conclude(given: argparse.Namespace, bars: Sequence[Bar], *, summary: Mapping[str, Any], text: str) -> int:
    """Print the results as JSON or text; return the exit code: 1 if a bar fails, unless ``--no-bars`` was passed.

    Args:
        given: The parsed options.
        summary: The object of ``--json``, without the machine and the bars.
        text: The tables, without the bars, printed without ``--json``.
    """
    if given.json:
        print(json.dumps({"machine": machine(), **summary, "bars": [asdict(bar) for bar in bars]}))
    else:
        print(text)
        for bar in bars:
            print(f"{'holds' if bar.holds else 'FAILS'}: {bar.promise}: {bar.measured}")
    return int(not given.no_bars and not all(bar.holds for bar in bars))


def machine() -> str:
    """Hardware, torch and Python version, without the machine's name."""
    if torch.cuda.is_available():
        hardware = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}"
    else:
        hardware = f"{os.cpu_count()} CPU cores, no GPU"
    return f"torch {torch.__version__.split('+')[0]}, Python {platform.python_version()}, {hardware}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that can be read in a terminal and pasted into a page."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.2f} MiB"
