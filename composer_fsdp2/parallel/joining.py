"""The rows of several batches one after another, as one batch: what one loader would have given for all of them.

A row is what lies along dimension 0 of a tensor with as many, or in one place of a list. Batches of text that were
padded to different lengths are padded to the longest, as their collator would have.
"""

import copy
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from composer_fsdp2._torch.passing import tensors_in
from composer_fsdp2.config.text import short
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.parallel.contents import digest_of, parts_of

# What Hugging Face's and LLM Foundry's collators put in places that attention_mask leaves out; the token there is read
# from the batch.
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
_BATCH = "batch"  # the path of the whole
# Places of a batch in a batch, which would be those of other rows afterwards (LLM Foundry's in-context learning tasks;
# where packed rows begin, which flash attention is told).
_OF_ROWS = ("choice_groupings", "cu_seq_lens_q", "cu_seq_lens_k")
# Pieces of pictures and sounds, of which rows have any number, in the order of rows (the later ones of Qwen's models).
_OF_MEDIA = re.compile(r"(pixel|image|video|audio|patch|second_per_grid|input_feature|feature_attention)\w*('\])?$")

_OTHERWISE = (
    "set broadcast_batch: first, under which the ranks of a group take its first rank's batch, or give these ranks the "
    "same data"
)


def join_rows(batches: Sequence[Any]) -> Any:
    """One batch of the rows of all, in order.

    Raises:
        ConfigError: they cannot be put together; names the place, and what to do.
    """
    return batches[0] if len(batches) == 1 else _join(batches, [_num_rows(batch) for batch in batches], _BATCH)


def _join(values: Sequence[Any], rows: Sequence[int | None], path: str) -> Any:
    first = values[0]
    if len({type(value) for value in values}) > 1:
        raise _cannot(path, f"is of different types: {', '.join(sorted({type(v).__name__ for v in values}))}")
    if isinstance(first, torch.Tensor) and first.ndim:
        return _join_tensors(values, rows, path)
    if isinstance(first, Mapping):
        return _join_mappings(values, rows, path)
    if isinstance(first, list | tuple) and not isinstance(first, PackedSequence):
        return _join_sequences(values, rows, path)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first) if field.init]
        return dataclasses.replace(
            first, **{name: _join([getattr(v, name) for v in values], rows, f"{path}.{name}") for name in names}
        )
    contents = [parts_of(value, path) for value in values]
    if any(each != contents[0] for each in contents):
        raise _cannot(path, f"is {short(first)} on one rank and {short(values[-1])} on another, and has no rows")
    return first


def _join_tensors(tensors: Sequence[torch.Tensor], rows: Sequence[int | None], path: str) -> torch.Tensor:
    if any(len(tensor) != number for tensor, number in zip(tensors, rows, strict=True)) and not _OF_MEDIA.search(path):
        return _of_no_rows(tensors, rows, path)
    kinds = {(tensor.dtype, tensor.shape[1:]) for tensor in tensors}
    if len(kinds) > 1 or tensors[0].layout is not torch.strided:
        shapes = ", ".join(f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in tensors)
        raise _cannot(path, f"has rows that do not fit together ({shapes})")
    joined = torch.cat(list(tensors))
    # As the loader's own: a copy to the device from other memory waits for it.
    return joined.pin_memory() if any(tensor.is_pinned() for tensor in tensors) else joined


def _of_no_rows(tensors: Sequence[torch.Tensor], rows: Sequence[int | None], path: str) -> torch.Tensor:
    """A tensor that is the batch's as a whole, such as a mask that all rows have: once, if all have the same.

    A vector of whole numbers is likelier places in the batch, as offsets are, which would be those of one rank's rows.
    """
    first = tensors[0]
    is_places = first.ndim == 1 and not first.is_floating_point() and first.dtype != torch.bool
    if is_places or len({digest_of(parts_of(tensor)) for tensor in tensors}) > 1:
        why = "may say places of rows" if is_places else "is not the same on all ranks"
        raise _cannot(
            path, f"has {_listed(map(len, tensors))} in dimension 0, where batches have {_listed(rows)} rows, and {why}"
        )
    return first


def _join_mappings(values: Sequence[Mapping[Any, Any]], rows: Sequence[int | None], path: str) -> Any:
    first = values[0]
    keys = dict.fromkeys(key for value in values for key in value)
    having = {key: [rank for rank, value in enumerate(values) if value.get(key) is not None] for key in keys}
    odd = [key for key, ranks in having.items() if 0 < len(ranks) < len(values)]
    if others := [key for key in odd if not _OF_MEDIA.search(str(key))]:
        raise _cannot(path, f"has {', '.join(sorted(map(repr, others)))} on some ranks only")
    if found := [key for key in _OF_ROWS if key in first]:
        raise _cannot(f"{path}[{found[0]!r}]", "says places of rows, which others take")
    values = _padded(values, path)
    joined = {}
    for key, ranks in having.items():
        taken = ranks or range(len(values))  # of rows without pictures there is nothing to join
        own = [values[rank].get(key) for rank in taken]
        joined[key] = _join_member(own, [rows[rank] for rank in taken], f"{path}[{key!r}]")
    if type(first) is dict:
        return joined
    try:
        like: Any = copy.copy(first)  # such as a BatchEncoding
        for key, value in joined.items():
            like[key] = value
    except TypeError:
        return joined
    return like


def _join_member(values: Sequence[Any], rows: Sequence[int | None], path: str) -> Any:
    """A list in a mapping or a pair has a value for each row, also where these have as many rows: Composer splits it
    so."""
    kind = type(values[0])
    if kind in (list, tuple) and all(type(v) is kind and len(v) == n for v, n in zip(values, rows, strict=True)):
        return kind(each for value in values for each in value)
    return _join(values, rows, path)


def _join_sequences(values: Sequence[Any], rows: Sequence[int | None], path: str) -> Any:
    first, is_batch = values[0], path == _BATCH
    if all(_is_of_rows(value, None if is_batch else number) for value, number in zip(values, rows, strict=True)):
        return type(first)(each for value in values for each in value)
    if len({len(value) for value in values}) > 1:
        raise _cannot(path, f"has {' and '.join(str(len(value)) for value in values)} values")
    # (x, y) as Composer splits it: a list in it has a value for each row.
    is_pair = is_batch and all(isinstance(each, torch.Tensor | list | tuple) for each in first)
    join = _join_member if is_pair else _join
    joined = [join(each, rows, f"{path}[{number}]") for number, each in enumerate(zip(*values, strict=True))]
    return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)


def _is_of_rows(value: Sequence[Any], rows: int | None) -> bool:
    """Whether each of its values belongs to one row, as Composer splits a list; else each is a part of the batch.

    Args:
        rows: Of the batch around it; None where it is the batch, or nothing says how many.
    """
    if rows is None:
        return not any(isinstance(each, torch.Tensor | Mapping | list | tuple) for each in value)
    has_all_rows = bool(value) and all(_num_rows(each) == rows for each in value)
    return len(value) == rows and not has_all_rows and not hasattr(value, "_fields")


def _num_rows(batch: Any) -> int | None:
    """The rows of its first tensor, in a mapping that of tokens; None without any."""
    return next((len(tensor) for tensor in _tensors(batch) if tensor.ndim), None)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, Mapping):
        first = [value[_TOKENS]] if _TOKENS in value else []
        yield from (tensor for each in (*first, *value.values()) for tensor in _tensors(each))
    elif isinstance(value, list | tuple):
        yield from (tensor for each in value for tensor in _tensors(each))
    else:
        yield from tensors_in(value)


# ---------------------------------------------------------------------------------------------------------------------
# Text of different lengths


def _padded(values: Sequence[Mapping[Any, Any]], path: str) -> Sequence[Mapping[Any, Any]]:
    """Batches of text at the length of the longest; others as they are."""
    tokens = [value.get(_TOKENS) for value in values]
    if not all(isinstance(each, torch.Tensor) and each.ndim == 2 for each in tokens):
        return values
    lengths = [each.shape[1] for each in tokens]  # type: ignore[union-attr]
    if len(set(lengths)) == 1:
        return values
    if _MASK not in values[0]:
        raise _cannot(
            path, f"has rows of {_listed(lengths)} tokens and no {_MASK}, so that nothing says which would be padding"
        )
    left, fill = _is_padded_left(values), {**_FILL, _TOKENS: _pad_token(values)}
    longest = max(lengths)
    return [_pad(value, own, longest, fill, left, path) for value, own in zip(values, lengths, strict=True)]


def _pad(
    value: Mapping[Any, Any], length: int, longest: int, fill: Mapping[str, int], left: bool, path: str
) -> Mapping[Any, Any]:
    padded = dict(value)
    for key, tensor in value.items():
        if not isinstance(tensor, torch.Tensor) or tensor.ndim < 2 or tensor.shape[1] != length:
            continue
        if key not in fill or tensor.ndim > 2:
            raise _cannot(f"{path}[{key!r}]", f"has rows of {length} places on one rank and {longest} on another")
        padded[key] = tensor.new_full((len(tensor), longest), fill[key])
        place = slice(longest - length, None) if left else slice(length)
        padded[key][:, place] = tensor
        padded[key] = padded[key].pin_memory() if tensor.is_pinned() else padded[key]
    return padded


def _is_padded_left(values: Iterable[Mapping[Any, Any]]) -> bool:
    """Whether a row begins with padding, and none ends with it."""
    masks = [value[_MASK].bool() for value in values if value[_MASK].numel()]
    return any(not mask[:, 0].all() for mask in masks) and all(bool(mask[:, -1].all()) for mask in masks)


def _pad_token(values: Iterable[Mapping[Any, Any]]) -> int:
    """The token in places that the mask leaves out; 0 where there is no such place."""
    found = (value[_TOKENS][~value[_MASK].bool()] for value in values if value[_MASK].shape == value[_TOKENS].shape)
    return next((int(tokens[0]) for tokens in found if tokens.numel()), 0)


def _listed(numbers: Iterable[object]) -> str:
    return " and ".join(map(str, dict.fromkeys(numbers)))


def _cannot(path: str, what: str) -> ConfigError:
    return ConfigError(f"broadcast_batch: gather: {path} {what}; {_OTHERWISE}", keys=("broadcast_batch",))
