"""Padding of sequences in context parallelism: read once per batch, and masked only if necessary.

[Note: padding] A mask has one element per pair of positions: 32 GiB in bf16 for a row of 131,072. Kernels such as flash
attention accept none. With causal attention, a token does not attend to later positions. With padding on the right,
tokens therefore have the same outputs and gradients without a mask. Padding positions have different outputs, which do
not affect the loss if their labels do not count. With padding elsewhere, attention gets the positions of each row in a
different order, tokens first, and its output is reordered back. The model creates its mask only if the label of a
padding position counts, such as that of the first token after padding on the left: the loss of one process includes it,
computed from what that position attends to under the mask.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from composer_fsdp2.training.context import IGNORED_LABEL

_FEATURES = ("attention_mask", "labels")


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """Where the padding of a batch is, and whether it needs a mask.

    Args:
        is_right: Whether all padding follows the tokens of its row, or the batch has none.
        counts: Whether a padding position predicts a label that counts.
    """

    is_right: bool
    counts: bool

    @classmethod
    def of(cls, mask: torch.Tensor, labels: torch.Tensor) -> "Padding":
        """The padding of a batch, from its mask (1 for each token) and its unshifted labels; (rows, positions).

        Synchronizes once with the device, unless ``note_copies`` has recorded the tensors in host memory.
        """
        mask, labels = _in_host_memory(mask, labels)
        is_token = mask != 0
        ends = ~is_token[:, :-1]  # positions that predict a label, and are not tokens
        found = (is_token[:, 1:] & ends).any(), (ends & (labels[:, 1:] != IGNORED_LABEL)).any()
        begins_again, counts = torch.stack(found).tolist()
        return cls(is_right=not begins_again, counts=counts)


# By a tensor on a device: its source in host memory, and the tensor's version at the time of the copy.
_SOURCES = WeakTensorKeyDictionary()


def note_copies(batch: Any, moved: Any) -> None:
    """Record the batch in host memory of which ``moved`` is a copy, so that ``Padding.of`` need not synchronize.

    Args:
        batch: The batch in host memory; must not be modified in place.
        moved: Its copy on the device.
    """
    if isinstance(batch, Mapping) and isinstance(moved, Mapping):
        for name in _FEATURES:
            source, copy = batch.get(name), moved.get(name)
            if isinstance(source, torch.Tensor) and isinstance(copy, torch.Tensor) and _is_copy(source, copy):
                _SOURCES[copy] = source, copy._version


def _is_copy(source: torch.Tensor, copy: torch.Tensor) -> bool:
    return source.device.type == "cpu" and copy.device.type != "cpu" and not copy.is_inference()


def _in_host_memory(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """The recorded tensors in host memory; the tensors themselves if one is no copy or was modified."""
    found = [(each, *_SOURCES[each]) for each in tensors if each in _SOURCES]
    sources = [source for copy, source, version in found if copy._version == version]
    return sources if len(sources) == len(tensors) else tensors


# ---------------------------------------------------------------------------------------------------------------------
# Masks


def order_of_rows(mask: torch.Tensor) -> torch.Tensor:
    """A permutation of the positions of each row with tokens first, for ``DividedLayers.exchanged``.

    Args:
        mask: 1 for each token, (batch, positions).
    Returns:
        int64, (batch, 1, 1, positions): layers pass this shape through like a mask.
    """
    return (mask != 0).to(torch.int8).argsort(dim=-1, descending=True, stable=True)[:, None, None, :]


def is_order(mask: torch.Tensor) -> bool:
    """Whether this is the result of ``order_of_rows``, not a mask of the model."""
    return mask.dtype == torch.int64 and mask.dim() == 4 and mask.shape[2] == 1
