"""Padding of sequences that several ranks share: read once, and masked only where necessary.

[Note: padding] A mask has an element for each pair of places, 32 GiB in bf16 for a row of 131,072, and kernels such as
flash attention take none. Under causal attention a token sees no place behind it. So with padding on the right tokens
have the same outputs and gradients without a mask; padded places have others, which reach no loss where their labels do
not count. With padding elsewhere attention gets the places of each row in another order, tokens first, and its output
is put back. A mask is built only where the label of a padded place counts, as that of the first token behind padding on
the left: the loss of one process includes it, with what such a place attends to under the mask.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from composer_fsdp2.training.context import IGNORED_LABEL

log = logging.getLogger(__name__)

_FEATURES = ("attention_mask", "labels")
_CAUSAL = ("sdpa", "flash_attention_2")  # without a mask


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


def mask_of_rows(
    given: torch.Tensor | None, padding: Padding, name: str, length: int, device: torch.device
) -> torch.Tensor | None:
    """What attention needs to know of whole rows, in a form that a model hands on as it is; None for causal alone.

    Args:
        given: 1 for each place to attend to, (batch, places), or None for all.
        name: Of the attention.
        length: Of rows that ranks can divide, with places at their ends that no other sees.
    Returns:
        For ``attend_padded``, (batch, 1, 1, length): int8, 1 for a place to attend to, 0 for padding, -1 for a place
        that was added; or int64, the places of each row with tokens first. For flash attention (batch, length), as
        given. Not floating point, which a unit would cast.
    """
    if given is None or (padding.is_right and not padding.counts):
        return None if name in _CAUSAL else torch.ones(1, 1, 1, length, dtype=torch.int8, device=device)
    missing = length - given.shape[1]
    if name == "flash_attention_2":
        return nn.functional.pad(given, (0, missing))
    rows = nn.functional.pad((given != 0).to(torch.int8), (0, missing), value=-1)[:, None, None, :]
    if name == "sdpa" and not padding.counts:
        return rows.argsort(dim=-1, descending=True, stable=True)
    if name == "sdpa":
        _say_mask(len(given), length)
    return rows


def attend_padded(
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
        attend: Its mask is one to add to scores, flash attention's own, or None for causal alone.
        mask: Of ``mask_of_rows``.
        dim: Of the places in what it returns, 1 or 2.
    """
    if mask is None or mask.dim() != 4:
        return attend(query, key, value, mask)
    if mask.dtype != torch.int64:
        return attend(query, key, value, _additive_mask(mask, query.dtype))
    places = mask.transpose(2, 3)  # (batch, 1, places, 1)
    output = attend(*(each.take_along_dim(places, 2) for each in (query, key, value)), None)
    return output.take_along_dim(mask.argsort(dim=-1).transpose(dim, 3), dim)


def _additive_mask(places: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The causal mask to add to scores, made once for all layers: it stays with what all layers get."""
    made: dict[torch.dtype, torch.Tensor] = vars(places).setdefault("_additive", {})
    if dtype not in made:
        length = places.shape[-1]
        is_seen = torch.ones(length, length, dtype=torch.bool, device=places.device).tril() & (places > 0)
        if places.device.type != "cpu":  # kernels return NaN for a place that sees nothing, such as padding on the left
            is_seen |= ~is_seen.any(-1, keepdim=True)
        mask = torch.zeros(is_seen.shape, dtype=dtype, device=places.device)
        # A place that sees nothing attends to its row alike, in one process as well: not to what was added to the row.
        made[dtype] = mask.masked_fill_(~is_seen, torch.finfo(dtype).min).masked_fill_(places < 0, -torch.inf)
    return made[dtype]


@functools.cache
def _say_mask(num_rows: int, length: int) -> None:
    log.warning(
        "context_parallel_degree: a label counts at a padded place of the batch, so attention needs a mask of "
        f"{num_rows} x {length} x {length} elements, and kernels without one (flash attention) are not used; set the "
        "labels of padding to -100, and with padding on the left those of first tokens, too, or pad on the right"
    )
