"""All-to-all of tokens between the ranks of an expert-parallel group."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from composer_fsdp2._torch.collectives import launch
from composer_fsdp2.parallel.expert_products import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of a layer, divided evenly and in order over the ranks of a group.

    Args:
        is_even: Assume that each expert gets an equal number of rows, for tensors without values (fake tensors).
    """

    num_experts: int
    group: dist.ProcessGroup
    is_even: bool = False

    @property
    def own(self) -> range:
        """The indices of this rank's experts."""
        num_own = self.num_experts // dist.get_world_size(self.group)
        first = dist.get_rank(self.group) * num_own
        return range(first, first + num_own)


def exchange(
    rows: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    experts: Experts,
    compute: Callable[[Rows], torch.Tensor],
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Send each token to the ranks of its experts, and return the weighted sum of the experts' outputs.

    Computes the same result as the loop over experts in the original layer.

    Args:
        rows: [tokens, width].
        weights: [tokens, choices], from the router: the weight of each chosen expert.
        chosen: [tokens, choices], from the router: the index of each chosen expert.
        compute: Applies this rank's experts to rows. Must accept zero rows.
        dtype: The dtype of the sums; None means that of ``rows``.
    Returns:
        [tokens, width].

    Called on all ranks; three all-to-alls, and two more in backward. The host synchronizes once with the device.
    """
    num_choices, chosen = chosen.shape[-1], chosen.flatten()
    order = chosen.argsort(stable=True)
    tokens = order // num_choices
    # bincount would synchronize with the device to read the largest number.
    counts = chosen.new_zeros(experts.num_experts).scatter_add_(0, chosen, torch.ones_like(chosen))
    num_arriving, sent, received, num_rows_per_expert = _agree(counts, len(tokens), experts)
    arrived = _Exchange.apply(rows[tokens], sent, received, experts.group)
    computed = _by_expert(arrived, num_arriving, num_rows_per_expert, compute)
    back = _Exchange.apply(computed, received, sent, experts.group)
    weighted = back * weights.flatten()[order].unsqueeze(-1)
    out = torch.zeros_like(rows, dtype=dtype, memory_format=torch.contiguous_format)
    return out.index_add_(0, tokens, weighted.to(out.dtype))


def _by_expert(
    arrived: torch.Tensor,
    num_arriving: torch.Tensor,
    num_rows_per_expert: list[int],
    compute: Callable[[Rows], torch.Tensor],
) -> torch.Tensor:
    """Sort the received rows by expert and compute them. They arrive ordered by source rank, and then by expert.

    An expert without rows is computed on zero rows, so that all ranks exchange the gradients in the same order.
    """
    num_ranks, num_own = num_arriving.shape
    numbers = torch.arange(num_own, device=arrived.device).repeat(num_ranks)
    numbers = numbers.repeat_interleave(num_arriving.flatten(), output_size=len(arrived))
    order = numbers.argsort(stable=True)
    return compute(Rows(arrived[order], num_rows_per_expert, numbers[order]))[order.argsort()]


def _agree(
    counts: torch.Tensor, num_rows: int, experts: Experts
) -> tuple[torch.Tensor, list[int], list[int], list[int]]:
    """All-to-all of the numbers of rows that ranks will exchange.

    Args:
        counts: The number of this rank's rows for each expert of all ranks.
        num_rows: Their sum.
    Returns:
        The numbers of rows that arrive, [ranks, own experts], on the device. On the host, the numbers of rows that this
        rank sends to each rank, receives from each rank, and computes with each of its experts.

    Called on all ranks. Synchronizes once with the device.
    """
    num_ranks, num_arriving = dist.get_world_size(experts.group), torch.empty_like(counts)
    launch(dist.all_to_all_single, num_arriving, counts, group=experts.group)
    num_arriving = num_arriving.view(num_ranks, -1)
    numbers = torch.cat([counts.view(num_ranks, -1).sum(1), num_arriving.sum(1), num_arriving.sum(0)])
    if experts.is_even:
        sent = _even_split(num_rows, num_ranks)
        received = [sent[dist.get_rank(experts.group)]] * num_ranks
        return num_arriving, sent, received, _even_split(sum(received), len(experts.own))
    on_host = numbers.tolist()
    return num_arriving, on_host[:num_ranks], on_host[num_ranks : 2 * num_ranks], on_host[2 * num_ranks :]


def _even_split(number: int, num_parts: int) -> list[int]:
    """Divide ``number`` into ``num_parts`` integers that differ by at most 1, the larger ones first."""
    return [-(-(number - place) // num_parts) for place in range(num_parts)]


class _Exchange(torch.autograd.Function):
    """All-to-all of rows, with the given counts per rank. Backward returns their gradients."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.back = (received, sent, group)
        arrived = rows.new_empty((sum(received), *rows.shape[1:]))
        launch(dist.all_to_all_single, arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _Exchange.apply(grad, *ctx.back), None, None, None
