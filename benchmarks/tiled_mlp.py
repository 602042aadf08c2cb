"""What an MLP computed in pieces of the sequence takes of memory and time, beside the whole and beside recomputing it.

    python benchmarks/tiled_mlp.py
    python benchmarks/tiled_mlp.py --width 4096 --hidden 14336 --tokens 65536 --dtype bfloat16

One MLP as Llama's, forward and backward of one sequence, in one process. "Kept" is what lies in memory between forward
and backward, "peak" the most at any moment, of all that forward and backward made: activations and gradients, without
the weights and the input. Exit code 0, or 1 if a bar does not hold.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import report
import torch
from counting import LiveBytes
from report import Bar, machine, markdown, mib
from torch import nn
from torch.utils.checkpoint import checkpoint

from composer_fsdp2 import tile_mlp

CHUNKS = 8


class MLP(nn.Module):
    """Llama's."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Of forward and backward; ``error`` is the largest difference to the whole MLP's gradients, relative to the
    largest of the tensor."""

    kept_bytes: int
    peak_bytes: int
    seconds: float
    error: float


def main(words: Sequence[str] | None = None) -> int:
    parser = report.parser(__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default, help="default: %(default)s")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: %(default)s")
    for name, size in {"width": 128, "hidden": 512, "tokens": 4096, "rounds": 10}.items():
        parser.add_argument(f"--{name}", type=report.count, default=size, help="default: %(default)s")
    options = parser.parse_args(words)
    found = measure(options)
    share = found[f"{CHUNKS} pieces"].peak_bytes / found["whole"].peak_bytes
    error = max(each.error for each in found.values())
    bars = [
        Bar(f"the peak with {CHUNKS} pieces is below a third of the whole MLP's", f"{share:.3f}", share < 1 / 3),
        Bar("the gradients are those of the whole MLP", f"{error:.1e}", error < _tolerance(options.dtype)),
    ]
    summary = {"options": vars(options), "measured": {name: asdict(each) for name, each in found.items()}}
    return report.conclude(options, bars, summary=summary, text=_text(found))


def measure(options: Any) -> dict[str, Measured]:
    """By the name of each way; times are medians over rounds in which each way has its turn."""
    make = partial(_mlp, options)
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "whole": make(),
        "whole, recomputed": partial(checkpoint, make(), use_reentrant=False),
        **{f"{chunks} pieces": make(chunks) for chunks in (2, 4, CHUNKS, 2 * CHUNKS)},
    }
    torch.manual_seed(1)
    x = torch.randn(1, options.tokens, options.width, device=options.device, dtype=getattr(torch, options.dtype))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            seconds[name].append(_seconds(way, x))
    expected = _gradients(ways["whole"], x)
    return {
        name: Measured(
            **_bytes(way, x),
            seconds=statistics.median(seconds[name]),
            error=max(
                float((a - b).abs().max() / b.abs().max()) for a, b in zip(_gradients(way, x), expected, strict=True)
            ),
        )
        for name, way in ways.items()
    }


def _mlp(options: Any, chunks: int = 0) -> MLP:
    torch.manual_seed(0)
    mlp = MLP(options.width, options.hidden).to(options.device, getattr(torch, options.dtype))
    if chunks:
        tile_mlp(mlp, classes=[MLP], chunks=chunks)
    return mlp


def _step(way: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The input, with its gradient."""
    x = x.detach().requires_grad_()
    way(x).sum().backward()
    return x


def _seconds(way: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    wait = torch.cuda.synchronize if x.is_cuda else lambda: None
    wait()
    start = time.perf_counter()
    _step(way, x)
    wait()
    return time.perf_counter() - start


def _gradients(way: Any, x: torch.Tensor) -> list[torch.Tensor]:
    mlp = way if isinstance(way, MLP) else way.args[0]
    mlp.zero_grad()
    x = _step(way, x)
    return [parameter.grad for parameter in (x, *mlp.parameters())]


def _bytes(way: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> dict[str, int]:
    _gradients(way, x)  # gradients of weights are there by now, and are added to
    x = x.detach().requires_grad_()
    with LiveBytes() as live:
        loss = way(x).sum()
        kept = live.now
        loss.backward()
    return {"kept_bytes": kept, "peak_bytes": live.peak}


def _tolerance(dtype: str) -> float:
    return 1e-5 if dtype == "float32" else 3e-2


def _text(found: dict[str, Measured]) -> str:
    whole = found["whole"]
    table = markdown(
        ["an MLP", "kept for backward", "peak", "of the whole's", "time", "of the whole's", "gradients differ by"],
        [
            [
                name,
                mib(each.kept_bytes),
                mib(each.peak_bytes),
                f"{each.peak_bytes / whole.peak_bytes:.2f}",
                f"{1e3 * each.seconds:.1f} ms",
                f"{each.seconds / whole.seconds:.2f}",
                f"{each.error:.0e}",
            ]
            for name, each in found.items()
        ],
    )
    return f"{machine()}\n\n{table}"


if __name__ == "__main__":
    sys.exit(main())
