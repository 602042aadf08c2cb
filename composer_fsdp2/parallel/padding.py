"""Padding of sequences that several ranks share: read once, and masked only where necessary.

[Note: padding] A mask has an element for each pair of places, 32 GiB in bf16 for a row of 131,072, and kernels such as
flash attention take none. Under causal attention a token sees no place behind it. So with padding on the right tokens
have the same outputs and gradients without a mask; padded places have others, which reach no loss where their labels do
not count. With padding elsewhere attention gets the places of each row in another order, tokens first, and its output
is put back. The model makes its mask only where the label of a padded place counts, as that of the first token behind
padding on the left: the loss of one process includes it, with what such a place attends to under the mask.
"""

from collections.abc import Callable, Mapping
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
    def of(cls, mask: torch.Tensor | None, labels: torch.Tensor | None) -> "Padding":
        """Of a batch: its mask, 1 for each token, and its labels, which are not shifted; (rows, places).

        The host reads the device once, and not at all for what ``note_copies`` saw in host memory.
        """
        if mask is None:
            return cls(is_right=True, counts=False)
        given = [mask] if labels is None else [mask, labels]
        copies = [_host_copy(each) for each in given]
        seen = [each for each in copies if each is not None]
        tokens, *rest = seen if len(seen) == len(given) else given
        is_token = tokens != 0
        ends = ~is_token[:, :-1]  # places that predict a label, and are no tokens
        found = [(is_token[:, 1:] & ends).any(), *((ends & (each[:, 1:] != IGNORED_LABEL)).any() for each in rest)]
        begins_again, *counts = torch.stack(found).tolist()
        return cls(is_right=not begins_again, counts=any(counts))


@dataclass(frozen=True, slots=True)
class _Copy:
    """A tensor in host memory whose values were copied to a device, and the copy's version then."""

    tensor: torch.Tensor
    version: int


_COPIES = WeakTensorKeyDictionary()


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
                _COPIES[copy] = _Copy(source, copy._version)


def _is_copy(source: torch.Tensor, copy: torch.Tensor) -> bool:
    return source.device.type == "cpu" and copy.device.type != "cpu" and not copy.is_inference()


def _host_copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """None where the tensor is no copy, or was changed since."""
    found: _Copy | None = _COPIES.get(tensor)
    return found.tensor if found is not None and found.version == tensor._version else None


# ---------------------------------------------------------------------------------------------------------------------
# Masks


def order_of_rows(mask: torch.Tensor) -> torch.Tensor:
    """The places of each row with tokens first, as ``attend_in_order`` takes them.

    Args:
        mask: 1 for each token, (batch, places).
    Returns:
        int64, (batch, 1, 1, places): a form that layers hand on as if it were their mask.
    """
    return (mask != 0).to(torch.int8).argsort(dim=-1, descending=True, stable=True)[:, None, None, :]


def attend_in_order(
    attend: Callable[..., torch.Tensor],
    mask: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    dim: int,
) -> torch.Tensor:
    """What ``attend(query, key, value, mask)`` returns for whole rows, (batch, heads, places, features).

    Args:
        attend: Its mask is the model's, or None.
        mask: The model's, or what ``order_of_rows`` returned.
        dim: Of the places in what it returns, 1 or 2.
    """
    if mask is None or mask.dtype != torch.int64 or mask.dim() != 4 or mask.shape[2] != 1:
        return attend(query, key, value, mask)
    places = mask.transpose(2, 3)  # (batch, 1, places, 1)
    output = attend(*(each.take_along_dim(places, 2) for each in (query, key, value)), None)
    return output.take_along_dim(mask.argsort(dim=-1).transpose(dim, 3), dim)
