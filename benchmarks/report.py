"""Tables, bars and exit codes, alike for both benchmarks."""

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

__all__ = ["Bar", "bars_as_json", "finish", "machine", "markdown", "mib"]


@dataclass(frozen=True, slots=True)
class Bar:
    """One promise of the project, and whether this run kept it."""

    promise: str
    measured: str
    holds: bool


def finish(bars: Sequence[Bar], *, enforce: bool, show: bool) -> int:
    """Print the bars, if they are to be shown; the exit code: 1 if one that is enforced does not hold."""
    if show:
        for bar in bars:
            print(f"{'holds' if bar.holds else 'FAILS'}: {bar.promise}: {bar.measured}")
    return int(enforce and not all(bar.holds for bar in bars))


def bars_as_json(bars: Sequence[Bar]) -> list[dict[str, Any]]:
    return [asdict(bar) for bar in bars]


def machine() -> str:
    """Where and on which torch this runs, without the machine's name."""
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
