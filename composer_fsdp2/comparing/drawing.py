"""Losses and gradient norms of the runs as a picture, where matplotlib is installed."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from composer_fsdp2.comparing.judging import relative
from composer_fsdp2.comparing.run_record import RunRecord

_LACKS = "There is no picture: matplotlib is not installed (pip install matplotlib)."
_LEAST = 1e-9  # where a difference of 0 is drawn


def draw(path: Path, runs: Sequence[RunRecord]) -> str:
    """Write the picture; "" or why there is none."""
    try:
        # By name: nothing else needs it, so it is not installed with the project.
        backend: Any = importlib.import_module("matplotlib.backends.backend_agg")
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError:
        return _LACKS
    figure = figures.Figure(figsize=(9, 6), layout="constrained")
    backend.FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2, sharex=True, height_ratios=(3, 2))
    for column, (title, what) in enumerate((("loss", "loss"), ("gradient norm", "gradient_norm"))):
        _draw(axes[0][column], axes[1][column], runs, what)
        axes[0][column].set_title(f"{title}, by batch")
    axes[1][0].set_ylabel("difference, relative to FSDP1\n(none is drawn at 1e-9)")
    axes[0][0].legend(frameon=False)
    figure.savefig(path, dpi=120)
    return ""


def _draw(top: Any, bottom: Any, runs: Sequence[RunRecord], what: str) -> None:
    first = runs[0]
    styles = (
        {"color": "tab:gray", "linewidth": 5, "alpha": 0.5},
        {"color": "tab:blue", "marker": "o", "markersize": 3},
    )
    again = {"color": "tab:orange", "linestyle": ":"}
    for number, run in enumerate(runs):
        style: Any = styles[number] if number < len(styles) else again
        batches = [batch.batch for batch in run.batches]
        top.plot(batches, [getattr(batch, what) for batch in run.batches], label=run.title, **style)
        if number:
            pairs = list(zip(run.batches, first.batches, strict=False))
            apart = [max(_LEAST, relative(getattr(ours, what), getattr(theirs, what))) for ours, theirs in pairs]
            bottom.plot(batches[: len(apart)], apart, label=run.title, **style)
    bottom.set_yscale("log")
    bottom.set_xlabel("batch")
