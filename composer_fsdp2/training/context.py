"""Sequences that several ranks compute together: the ranks, the part that each has, and what they exchange.

[Note: context parallelism] Ranks of a context group have the same rows, and each the same number of consecutive places
of them. Embeddings, norms, MLPs and the head work on a place at a time, so on a part as on the whole. Attention alone
does not: there the ranks exchange, by all-to-all, their places of all heads for all places of some heads, attend, and
exchange back (Ulysses, arXiv 2309.14509). Parameters are sharded over all ranks, and their gradients averaged, as
without it.

The objective is the mean over ranks of their losses. Before the first layer a rank takes its part of the rows
(``part``); behind the last it gathers those of all ranks (``to_whole``). Any head and any loss then computes whole
rows, the same on each rank of a group, and autograd sums the ranks' gradients of each part. A causal language
model's loss need not gather: each rank's is the sum over its own places, divided by the number of all places that are
counted, times the number of ranks. Labels are shifted before they are cut, since the last place of a part is to predict
the first of the next one.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from composer_fsdp2._torch.collectives import all_gather_single, launch

IGNORED_LABEL = -100  # torch's, Hugging Face's and LLM Foundry's


@dataclass(slots=True, kw_only=True, eq=False)
class ContextGroup:
    """The ranks that share this rank's sequences.

    Args:
        size: How many they are.
        index: Which of the parts of a sequence this rank has.
        weight: What the mean of the batch that comes next will be multiplied by before its gradients are averaged over
            ranks, such as its number of rows; the same on all ranks of the group. A tensor is on the batch's device.
        divides_losses: Whether a model that gets labels returns the loss and logits of this rank's part. Otherwise all
            that a model returns is of whole rows.
        in_parts: Whether the forward that runs now returns parts.
    """

    group: dist.ProcessGroup
    size: int
    index: int
    weight: float | torch.Tensor = 1.0
    divides_losses: bool = True
    in_parts: bool = False

    @contextlib.contextmanager
    def returning_parts(self) -> Iterator[None]:
        """In the block forwards return this rank's part of whole rows, with the places that fill them up."""
        before, self.in_parts = self.in_parts, True
        try:
            yield
        finally:
            self.in_parts = before

    def padded(self, tensor: torch.Tensor, dim: int, fill: float) -> torch.Tensor:
        """``tensor`` with so many more places at the end of ``dim`` that the ranks can divide it evenly."""
        missing = -tensor.shape[dim] % self.size
        if not missing:
            return tensor
        shape = [missing if each == dim else length for each, length in enumerate(tensor.shape)]
        return torch.cat([tensor, tensor.new_full(shape, fill)], dim)

    def part(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This rank's part of a tensor whose ``dim`` the ranks can divide evenly."""
        length = tensor.shape[dim] // self.size
        return tensor.narrow(dim, self.index * length, length)

    def to_whole(self, tensor: torch.Tensor, length: int, dim: int = 1) -> torch.Tensor:
        """The first ``length`` places of ``dim``, of the parts of all ranks in order. One all-gather, and an all-to-all
        in backward, whose gradients are the sums of those of all ranks."""
        whole: torch.Tensor = _Gather.apply(self, dim, tensor)
        return whole.narrow(dim, 0, length)

    def shifted_labels(self, labels: torch.Tensor, *, is_shifted: bool = False) -> torch.Tensor:
        """For each place of this rank's part the label that it is to predict, from the labels of whole rows.

        Args:
            is_shifted: Whether each label stands already at the place that is to predict it.
        """
        if not is_shifted:
            labels = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
        return self.part(self.padded(labels, 1, IGNORED_LABEL)).contiguous()

    def items(self, labels: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """By what the sum of this rank's losses is to be divided, so that averaging over ranks gives the mean's.

        Over all ranks of the world, whose batches may count different numbers of places, and have other weights.

        Args:
            labels: For each place of this rank's part, ``IGNORED_LABEL`` where it does not count.
        Called on all ranks; one all-reduce of two numbers, for which the host does not wait.
        """
        numbers = torch.zeros(2, dtype=torch.float64, device=labels.device)
        numbers[0] = (labels != IGNORED_LABEL).sum()
        numbers[1] = self.weight
        launch(dist.all_reduce, numbers)
        items = numbers[0] * self.weight / numbers[1]
        return torch.where(items > 0, items, torch.ones_like(items)).to(dtype)

    def to_heads(self, tensors: Sequence[torch.Tensor], heads: int, sequence: int) -> tuple[torch.Tensor, ...]:
        """From all heads of this rank's places to all places of some heads; ``heads`` and ``sequence`` are dims.

        Heads of keys or values that are too few to be divided are repeated: every rank gets those of its query heads,
        as these are consecutive, too. One exchange for all tensors of a dtype, and one in backward.
        """
        repeated = [_repeated_heads(each, self.size, heads) for each in tensors]
        exchanged: tuple[torch.Tensor, ...] = _Exchange.apply(self, heads, sequence, *repeated)
        return exchanged

    def to_sequence(self, tensor: torch.Tensor, heads: int, sequence: int) -> torch.Tensor:
        """Back, from all places of some heads to all heads of this rank's places."""
        [exchanged] = _Exchange.apply(self, sequence, heads, tensor)
        return exchanged


class _Exchange(torch.autograd.Function):
    """One dimension is divided over the ranks, and the parts of another joined; in backward the other way round."""

    @staticmethod
    def forward(
        ctx: Any, group: ContextGroup, divided: int, joined: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.arguments = group, divided, joined
        return tuple(_exchange(tensors, group, divided, joined))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        group, divided, joined = ctx.arguments
        is_needed = ctx.needs_input_grad[3:]
        back = iter(_exchange([*itertools.compress(gradients, is_needed)], group, joined, divided))
        return None, None, None, *(next(back) if each else None for each in is_needed)


class _Gather(torch.autograd.Function):
    """The parts of all ranks along one dimension; in backward each rank gets all ranks' gradients of its own."""

    @staticmethod
    def forward(ctx: Any, group: ContextGroup, dim: int, part: torch.Tensor) -> torch.Tensor:
        ctx.arguments = group, dim
        sent = part.movedim(dim, 0).contiguous()
        whole = sent.new_empty(group.size * sent.shape[0], *sent.shape[1:])
        launch(all_gather_single, whole, sent, group=group.group)
        return whole.movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        group, dim = ctx.arguments
        sent = gradients[0].movedim(dim, 0).contiguous()
        received = torch.empty_like(sent)
        # gloo has no reduce-scatter.
        launch(dist.all_to_all_single, received, sent, group=group.group)
        return None, None, received.unflatten(0, (group.size, -1)).sum(0).movedim(0, dim)


def _exchange(tensors: Sequence[torch.Tensor], group: ContextGroup, divided: int, joined: int) -> list[torch.Tensor]:
    """All tensors of a dtype in one all-to-all: what a rank gets of each stands in one row."""
    parts = [each.unflatten(divided, (group.size, -1)).movedim(divided, 0) for each in tensors]  # (ranks, ...)
    exchanged = list(parts)
    for dtype in dict.fromkeys(part.dtype for part in parts):
        numbers = [number for number, part in enumerate(parts) if part.dtype == dtype]
        sizes = [parts[number][0].numel() for number in numbers]
        sent = parts[numbers[0]].new_empty(group.size, sum(sizes))
        for number, row in zip(numbers, sent.split(sizes, 1), strict=True):
            row.view(parts[number].shape).copy_(parts[number])
        received = torch.empty_like(sent)
        launch(dist.all_to_all_single, received, sent, group=group.group)
        for number, row in zip(numbers, received.split(sizes, 1), strict=True):
            exchanged[number] = row.view(parts[number].shape).movedim(0, joined).flatten(joined, joined + 1)
    return exchanged


def _repeated_heads(tensor: torch.Tensor, degree: int, dim: int) -> torch.Tensor:
    """In such a number that the ranks can divide them evenly: of too few heads each one several times."""
    num_heads = tensor.shape[dim]
    return tensor.repeat_interleave(math.lcm(num_heads, degree) // num_heads, dim) if num_heads % degree else tensor
