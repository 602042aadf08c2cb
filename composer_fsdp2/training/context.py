"""Context parallelism: the ranks that share sequences, the part of each rank, and what they exchange.

[Note: context parallelism] The ranks of a context group have the same rows, and each has an equal number of consecutive
positions. Embeddings, norms, MLPs and the head process each position independently, so they need no change. Attention
exchanges heads for sequence: by all-to-all, each rank sends its positions of all heads and receives all positions of
some heads, attends, and exchanges back (Ulysses, arXiv 2309.14509). Parameters are sharded over all ranks and their
gradients averaged, as without context parallelism.

The objective is the mean of the ranks' losses. Before the first layer a rank takes its part of the sequences
(``part``). After the last layer it gathers the parts of all ranks (``to_whole``). Any head and any loss then processes
full sequences, with equal results on each rank of a group, and autograd sums the ranks' gradients of each part. The
loss of a causal language model needs no gather: each rank's loss is the sum over its own positions, divided by the
number of all counted positions, times the number of ranks. Labels are shifted before they are divided, because the last
position of a part predicts the first of the next.
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
    """The ranks that share this rank's sequences. Model adapters receive one, see ``ModelAdapter.start``.

    Args:
        group: The process group of these ranks.
        size: The number of ranks.
        index: The index of this rank's part of a sequence.
        weight: The factor by which the next batch's mean loss is weighted before gradients are averaged over ranks,
            such as its number of rows. Equal on all ranks of the group. A tensor must be on the batch's device.
        divides_losses: Whether a model with labels returns the loss and logits of this rank's part. Otherwise all
            outputs are full sequences.
        in_parts: Whether the current forward returns this rank's part of the sequences.

    Example:
        >>> context = ContextGroup(group=torch.distributed.group.WORLD, size=1, index=0)
        >>> context.part(torch.arange(4)[None])
        tensor([[0, 1, 2, 3]])
        >>> context.shifted_labels(torch.tensor([[5, 6, 7]]))
        tensor([[   6,    7, -100]])
    """

    group: dist.ProcessGroup
    size: int
    index: int
    weight: float | torch.Tensor = 1.0
    divides_losses: bool = True
    in_parts: bool = False

    @contextlib.contextmanager
    def returning_parts(self) -> Iterator[None]:
        """Within the block, forwards return this rank's part of the sequences, including padding positions."""
        before, self.in_parts = self.in_parts, True
        try:
            yield
        finally:
            self.in_parts = before

    def padded(self, tensor: torch.Tensor, dim: int, fill: float) -> torch.Tensor:
        """Pad ``dim`` at its end to a multiple of the number of ranks. Does not communicate."""
        missing = -tensor.shape[dim] % self.size
        if not missing:
            return tensor
        shape = [missing if each == dim else length for each, length in enumerate(tensor.shape)]
        return torch.cat([tensor, tensor.new_full(shape, fill)], dim)

    def part(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This rank's part of a tensor whose ``dim`` is divisible by the number of ranks. Does not communicate."""
        length = tensor.shape[dim] // self.size
        return tensor.narrow(dim, self.index * length, length)

    def to_whole(self, tensor: torch.Tensor, length: int, dim: int = 1) -> torch.Tensor:
        """All-gather the parts of all ranks along ``dim``; return the first ``length`` positions.

        Called on all ranks of the group. One all-gather; in backward an all-to-all, which sums the gradients of all
        ranks.
        """
        whole: torch.Tensor = _Gather.apply(self, dim, tensor)
        return whole.narrow(dim, 0, length)

    def shifted_labels(self, labels: torch.Tensor, *, is_shifted: bool = False) -> torch.Tensor:
        """The label that each position of this rank's part predicts. Does not communicate.

        Args:
            labels: int64, (rows, positions): the labels of the full sequences.
            is_shifted: Whether each label is already at the position that predicts it.
        Returns:
            int64, (rows, positions of this rank's part).
        """
        if not is_shifted:
            labels = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
        return self.part(self.padded(labels, 1, IGNORED_LABEL)).contiguous()

    def items(self, labels: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The divisor of this rank's summed loss. The average of the quotients over ranks is the mean loss.

        Counts over all ranks of the world, whose batches may have different numbers of counted positions and different
        weights.

        Args:
            labels: The label of each position of this rank's part; ``IGNORED_LABEL`` if it does not count.
        Returns:
            A scalar on the labels' device.

        Called on all ranks of the world. One all-reduce of two numbers; the host does not wait for it.
        """
        numbers = torch.zeros(2, dtype=torch.float64, device=labels.device)
        numbers[0] = (labels != IGNORED_LABEL).sum()
        numbers[1] = self.weight
        launch(dist.all_reduce, numbers)
        items = numbers[0] * self.weight / numbers[1]
        return torch.where(items > 0, items, torch.ones_like(items)).to(dtype)

    def to_heads(self, tensors: Sequence[torch.Tensor], heads: int, sequence: int) -> tuple[torch.Tensor, ...]:
        """Exchange all heads of this rank's positions for all positions of some heads.

        Args:
            heads: The dimension of heads.
            sequence: The dimension of positions.

        If there are fewer key and value heads than ranks, they are repeated. Each rank then gets the key and value
        heads of its query heads, because both are consecutive. Called on all ranks of the group; one all-to-all for all
        tensors of a dtype, and one in backward.
        """
        repeated = [_repeated_heads(each, self.size, heads) for each in tensors]
        exchanged: tuple[torch.Tensor, ...] = _Exchange.apply(self, heads, sequence, *repeated)
        return exchanged

    def to_sequence(self, tensor: torch.Tensor, heads: int, sequence: int) -> torch.Tensor:
        """Exchange all positions of some heads for all heads of this rank's positions, the inverse of ``to_heads``.

        Called on all ranks of the group; one all-to-all, and one in backward.
        """
        [exchanged] = _Exchange.apply(self, sequence, heads, tensor)
        return exchanged


class _Exchange(torch.autograd.Function):
    """An all-to-all that divides one dimension and concatenates along another. Backward does the inverse."""

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
    """All-gather along one dimension. In backward, each rank receives all ranks' gradients of its own part."""

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
    """One all-to-all for all tensors of a dtype. Each row of its buffer is the data of one rank."""
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
    """Repeat each head until the number of heads is a multiple of ``degree``."""
    num_heads = tensor.shape[dim]
    return tensor.repeat_interleave(math.lcm(num_heads, degree) // num_heads, dim) if num_heads % degree else tensor
