"""Concatenate the batches of several ranks, for ``broadcast_batch: gather``.

Supports the structures that Composer splits into microbatches: a tensor, a mapping, or a list or tuple of these.
Inside, a tensor has its rows along dimension 0, and a list has one value per row. Tokens are padded to the longest
batch, as a collator pads them.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from composer_fsdp2._torch.tensor_tree import tensors_in
from composer_fsdp2.config.text import short
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.parallel.contents import batch_values, digest_of

# The padding values of Hugging Face's and LLM Foundry's collators. The pad token itself is read from the batch.
_FILL = {
    "attention_mask": 0,
    "labels": -100,
    "sequence_id": -1,
    "bidirectional_mask": 0,
    "token_type_ids": 0,
    "position_ids": 0,
    "special_tokens_mask": 1,
}
_TOKENS, _MASK = "input_ids", "attention_mask"
_BATCH = "batch"  # the path of the whole batch
# Row or token offsets into one rank's batch, which would be wrong in the concatenated one: those of LLM Foundry's
# in-context learning tasks, and of flash attention on packed rows.
_OFFSETS = ("choice_groupings", "cu_seq_lens_q", "cu_seq_lens_k")
# Patches, frames and their sizes, in the order of rows, any number per row (Qwen2.5-VL, Qwen2-Audio).
_OF_MEDIA = re.compile(r"(pixel|image|video|audio|patch|second_per_grid|input_feature|feature_attention)\w*('\])?$")

_OTHERWISE = (
    "set broadcast_batch: first, under which the ranks of a group take its first rank's batch, or give these ranks the "
    "same data"
)


def join_rows(batches: Sequence[Any]) -> Any:
    """Concatenate the rows of all batches, in order. A mapping of any class becomes a dict.

    Raises:
        ConfigError: names the value that cannot be concatenated, and the alternatives.
    """
    return batches[0] if len(batches) == 1 else _join(batches, [_num_rows(batch) for batch in batches], _BATCH)


def _num_rows(batch: Any) -> int | None:
    """The number of rows of ``input_ids``, else of the first tensor; None without tensors."""
    mappings = [each for each in (batch if isinstance(batch, list | tuple) else [batch]) if isinstance(each, Mapping)]
    tokens = [each[_TOKENS] for each in mappings if _TOKENS in each]
    return next((len(tensor) for tensor in tensors_in([tokens, batch]) if tensor.ndim), None)


def _join(values: Sequence[Any], rows: Sequence[int | None], path: str) -> Any:
    first = values[0]
    is_alike = len({type(value) for value in values}) == 1
    if is_alike and isinstance(first, torch.Tensor) and first.ndim:
        has_rows = all(len(tensor) == number for tensor, number in zip(values, rows, strict=True))
        return _join_tensors(values, path) if has_rows or _OF_MEDIA.search(path) else _equal_on_all_ranks(values, path)
    if is_alike and isinstance(first, Mapping):
        return _join_mappings(values, rows, path)
    if is_alike and type(first) in (list, tuple):
        if path == _BATCH and len({len(value) for value in values}) == 1:
            places = enumerate(zip(*values, strict=True))
            return type(first)(_join(each, rows, f"{path}[{number}]") for number, each in places)
        if path != _BATCH and all(len(value) == number for value, number in zip(values, rows, strict=True)):
            return type(first)(each for value in values for each in value)
    return _equal_on_all_ranks(values, path)


def _join_tensors(tensors: Sequence[torch.Tensor], path: str) -> torch.Tensor:
    if len({(tensor.dtype, tensor.shape[1:]) for tensor in tensors}) > 1:
        shapes = ", ".join(f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in tensors)
        raise _join_error(path, f"has rows that do not fit together ({shapes})")
    return _pinned_like(torch.cat(list(tensors)), tensors)


def _equal_on_all_ranks(values: Sequence[Any], path: str) -> Any:
    """A value without rows, such as a mask for all rows: returned once if it is equal on all ranks.

    A vector of integers with a different length is rejected even if it is equal: it may contain offsets into one rank's
    rows.
    """
    first = values[0]
    is_vector = isinstance(first, torch.Tensor) and first.ndim == 1
    if is_vector and not first.is_floating_point() and first.dtype != torch.bool:
        raise _join_error(path, f"has {len(first)} numbers, not one per row, and may hold offsets into one rank's rows")
    if len({digest_of(batch_values(value)) for value in values}) > 1:
        shown = " and ".join(" ".join(short(value).split()) for value in values)
        raise _join_error(path, f"is not one value per row, and differs between ranks ({shown})")
    return first


def _join_mappings(values: Sequence[Mapping[Any, Any]], rows: Sequence[int | None], path: str) -> dict[Any, Any]:
    values = _padded(values, path)
    joined = {}
    for key in dict.fromkeys(key for value in values for key in value):
        if key in _OFFSETS:
            raise _join_error(f"{path}[{key!r}]", "holds offsets into one rank's rows")
        ranks_with_key = [rank for rank, value in enumerate(values) if value.get(key) is not None]
        if 0 < len(ranks_with_key) < len(values) and not _OF_MEDIA.search(str(key)):
            raise _join_error(path, f"has {key!r} on some ranks only")
        ranks = ranks_with_key or range(len(values))  # rows without images add nothing
        own = [values[rank].get(key) for rank in ranks]
        joined[key] = _join(own, [rows[rank] for rank in ranks], f"{path}[{key!r}]")
    return joined


# ---------------------------------------------------------------------------------------------------------------------
# Padding


def _padded(values: Sequence[Mapping[Any, Any]], path: str) -> Sequence[Mapping[Any, Any]]:
    """Pad tokens, masks and labels of the batches to the longest batch."""
    tokens = [value.get(_TOKENS) for value in values]
    if not all(isinstance(each, torch.Tensor) and each.ndim == 2 for each in tokens):
        return values
    lengths = [each.shape[1] for each in tokens]  # type: ignore[union-attr]
    if len(set(lengths)) == 1:
        return values
    if not all(_MASK in value for value in values):
        listed = " and ".join(map(str, dict.fromkeys(lengths)))
        raise _join_error(
            path, f"has rows of {listed} tokens and no {_MASK}, so that nothing says which would be padding"
        )
    pad_token = _pad_token(values)
    labels = [value.get("labels") for value in values]
    if pad_token is None and any(
        each is not None and not _has_token_shape(each, value) for each, value in zip(labels, values, strict=True)
    ):
        # A classifier uses it to find the last token of a row.
        raise _join_error(f"{path}[{_TOKENS!r}]", "is not padded on any rank, so that nothing says which token pads it")
    is_left, fill = _is_padded_left(values), {**_FILL, _TOKENS: pad_token or 0}
    return [
        {key: _pad(each, own, max(lengths), fill.get(key), is_left, f"{path}[{key!r}]") for key, each in value.items()}
        for value, own in zip(values, lengths, strict=True)
    ]


def _pad(value: Any, length: int, longest: int, fill: int | None, is_left: bool, path: str) -> Any:
    """Pad ``value`` along dimension 1, if it is a tensor whose dimension 1 is the sequence."""
    if not isinstance(value, torch.Tensor) or value.ndim < 2 or value.shape[1] != length:
        return value
    if fill is None or value.ndim > 2:
        raise _join_error(path, f"has rows of {length} places on one rank and {longest} on another")
    missing = (longest - length, 0) if is_left else (0, longest - length)
    return _pinned_like(F.pad(value, missing, value=fill), [value])


def _is_padded_left(values: Iterable[Mapping[Any, Any]]) -> bool:
    """Whether any row starts with padding and none ends with it."""
    masks = [value[_MASK].bool() for value in values if value[_MASK].numel()]
    return any(not mask[:, 0].all() for mask in masks) and all(bool(mask[:, -1].all()) for mask in masks)


def _pad_token(values: Iterable[Mapping[Any, Any]]) -> int | None:
    """The token at masked positions; None if no position is masked."""
    found = (value[_TOKENS][~value[_MASK].bool()] for value in values if _has_token_shape(value[_MASK], value))
    return next((int(tokens[0]) for tokens in found if tokens.numel()), None)


def _has_token_shape(tensor: Any, value: Mapping[Any, Any]) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.shape == value[_TOKENS].shape


def _pinned_like(tensor: torch.Tensor, sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """Pin the tensor's memory if a source is pinned, to keep copies to the device asynchronous."""
    return tensor.pin_memory() if any(each.is_pinned() for each in sources) else tensor


def _join_error(path: str, what: str) -> ConfigError:
    return ConfigError(f"broadcast_batch: gather: {path} {what}; {_OTHERWISE}", keys=("broadcast_batch",))
