"""A plot of the losses and gradient norms of the runs, if matplotlib is installed."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from composer_fsdp2.comparing.judging import relative
from composer_fsdp2.comparing.run_record import RunRecord

_MIN_DIFFERENCE = 1e-9  # where a difference of 0 is drawn
_STYLES: Sequence[dict[str, Any]] = (
    {"color": "tab:gray", "linewidth": 5, "alpha": 0.5},
    {"color": "tab:blue", "marker": "o", "markersize": 3},
    {"color": "tab:orange", "linestyle": ":"},
)


def draw(path: Path, runs: Sequence[RunRecord]) -> str:
    """Write the plot. Return "", or the reason why it was not written."""
    try:
        # Nothing else needs it, so it is not installed with the project.
        backend: Any = importlib.import_module("matplotlib.backends.backend_agg")
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError:
        return "There is no picture: matplotlib is not installed (pip install matplotlib)."
    figure = figures.Figure(figsize=(9, 6), layout="constrained")
    backend.FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2, sharex=True, height_ratios=(3, 2))
    for top, bottom, what in zip(*axes, ("loss", "gradient_norm"), strict=True):
        for number, run in enumerate(runs):
            style = _STYLES[min(number, 2)]
            batches, values = zip(*((each.batch, getattr(each, what)) for each in run.batches), strict=True)
            top.plot(batches, values, label=run.title, **style)
            if number:
                expected = (getattr(each, what) for each in runs[0].batches)
                differences = [max(_MIN_DIFFERENCE, relative(*pair)) for pair in zip(values, expected, strict=False)]
                bottom.plot(batches[: len(differences)], differences, label=run.title, **style)
        top.set_title(f"{what.replace('_', ' ')}, by batch")
        bottom.set_yscale("log")
        bottom.set_xlabel("batch")
    axes[1][0].set_ylabel("difference, relative to FSDP1\n(none is drawn at 1e-9)")
    axes[0][0].legend(frameon=False)
    figure.savefig(path, dpi=120)
    return ""
