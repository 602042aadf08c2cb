"""What a step of ours communicates beside the same by hand, and whether its gradients are the same."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import report
import torch
import torch.distributed as dist
from by_hand import local
from counting import Collectives
from report import Bar, calls_text, collectives_table, machine
from torch import nn

from composer_fsdp2 import clip_grad_norm_

__all__ = ["compare", "conclude"]

OURS, BY_HAND, CLIPPED = "composer_fsdp2", "by hand", "composer_fsdp2, clipped"
_Loss = Callable[[Any], torch.Tensor]


def compare(ours: nn.Module, by_hand: nn.Module, loss: _Loss) -> dict[str, Any]:
    """The collectives of each way's second step, and how far gradients are apart. Called on all ranks.

    Args:
        ours, by_hand: Of the same values, each sharded alike, so that a rank has the same part of both.
    """
    collectives = {
        OURS: _step(ours, loss),
        BY_HAND: _step(by_hand, loss),
        CLIPPED: _step(ours, loss, lambda model: clip_grad_norm_(model, 1.0)),
    }
    for model in (ours, by_hand):
        model.zero_grad()
        loss(model).backward()
    pairs = zip(ours.parameters(), by_hand.parameters(), strict=True)
    difference = torch.stack([_difference(one.grad, other.grad) for one, other in pairs]).max()
    dist.all_reduce(difference, dist.ReduceOp.MAX)
    return {"collectives": collectives, "gradient_difference": difference.item()}


def _step(model: nn.Module, loss: _Loss, then: Callable[[nn.Module], object] = lambda model: None) -> dict[str, Any]:
    loss(model).backward()  # in the first step roots are found
    model.zero_grad()
    with Collectives() as collectives:
        loss(model).backward()
        then(model)
    return collectives.counts


def _difference(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor:
    assert one is not None and other is not None, "every parameter is trained"
    apart = local(one) - local(other)
    return apart.abs().max() if apart.numel() else apart.new_zeros(())


def conclude(given: argparse.Namespace, found: Mapping[str, Any]) -> int:
    """Print what ``compare`` found, with its bars; the exit code."""
    counts, difference = found["collectives"], found["gradient_difference"]
    added = {name: each for name, each in counts[CLIPPED].items() if each != counts[OURS].get(name)}
    bars = [
        Bar("the collectives and bytes of the same by hand", calls_text(counts[OURS]), counts[OURS] == counts[BY_HAND]),
        Bar("clipping adds one all-reduce", calls_text(added), added == {"allreduce_": {"calls": 1, "bytes": 8}}),
        Bar("the gradients of the same by hand", f"{difference:.1e}", difference < 1e-12),
    ]
    return report.conclude(given, bars, summary=found, text=f"{machine()}\n\n{collectives_table(counts)}")
