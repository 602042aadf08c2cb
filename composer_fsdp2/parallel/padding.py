"""Padding of sequences that several ranks share: read once, and masked only where necessary.

[Note: padding] A mask has an element for each pair of places, 32 GiB in bf16 for a row of 131,072, and kernels such as
flash attention take none. Under causal attention a token sees no place behind it. So with padding on the right tokens
have the same outputs and gradients without a mask; padded places have others, which reach no loss where their labels do
not count. With padding elsewhere attention gets the places of each row in another order, tokens first, and its output
is put back. The model makes its mask only where the label of a padded place counts, as that of the first token behind
padding on the left: the loss of one process includes it, with what such a place attends to under the mask.
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
    """How the padding of a batch is masked.

    Args:
        is_right: Behind all tokens of its row, or none.
        counts: Whether a padded place predicts a label that counts.
    """

    is_right: bool
    counts: bool

    @classmethod
    def of(cls, mask: torch.Tensor, labels: torch.Tensor) -> "Padding":
        """Of a batch: its mask, 1 for each token, and its labels, which are not shifted; (rows, places).

        The host reads the device once, and not at all for what ``note_copies`` saw in host memory.
        """
        mask, labels = _in_host_memory(mask, labels)
        is_token = mask != 0
        ends = ~is_token[:, :-1]  # places that predict a label, and are no tokens
        found = (is_token[:, 1:] & ends).any(), (ends & (labels[:, 1:] != IGNORED_LABEL)).any()
        begins_again, counts = torch.stack(found).tolist()
        return cls(is_right=not begins_again, counts=counts)


# By a tensor on a device, the one in host memory that it is a copy of, and the copy's version then.
_SOURCES = WeakTensorKeyDictionary()


def note_copies(batch: Any, moved: Any) -> None:
    """Remember where a batch on a device came from, so that ``Padding.of`` need not wait for the device.

    Args:
        batch: In host memory; must not be modified in place.
        moved: The same on the device.
    """
    if isinstance(batch, Mapping) and isinstance(moved, Mapping):
        for name in _FEATURES:
            source, copy = batch.get(name), moved.get(name)
            if isinstance(source, torch.Tensor) and isinstance(copy, torch.Tensor) and _is_copy(source, copy):
                _SOURCES[copy] = source, copy._version


def _is_copy(source: torch.Tensor, copy: torch.Tensor) -> bool:
    return source.device.type == "cpu" and copy.device.type != "cpu" and not copy.is_inference()


def _in_host_memory(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """Their sources; the tensors themselves where one is no copy, or was changed since."""
    found = [(each, *_SOURCES[each]) for each in tensors if each in _SOURCES]
    sources = [source for copy, source, version in found if copy._version == version]
    return sources if len(sources) == len(tensors) else tensors


# ---------------------------------------------------------------------------------------------------------------------
# Masks


def order_of_rows(mask: torch.Tensor) -> torch.Tensor:
    """The places of each row with tokens first, as ``DividedLayers.exchanged`` takes them.

    Args:
        mask: 1 for each token, (batch, places).
    Returns:
        int64, (batch, 1, 1, places): a form that layers hand on as if it were their mask.
    """
    return (mask != 0).to(torch.int8).argsort(dim=-1, descending=True, stable=True)[:, None, None, :]


def is_order(mask: torch.Tensor) -> bool:
    """Whether ``order_of_rows`` made it, and not the model."""
    return mask.dtype == torch.int64 and mask.dim() == 4 and mask.shape[2] == 1
