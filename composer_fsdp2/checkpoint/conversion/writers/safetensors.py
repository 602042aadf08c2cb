"""Hugging Face's weights: ``model.safetensors``, or shards and their index; config and tokenizer beside them."""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from composer_fsdp2.checkpoint.conversion.writers import OutputFile, TensorWrite, num_files_for
from composer_fsdp2.checkpoint.formats.safetensors_folder import DTYPES, INDEX, SINGLE
from composer_fsdp2.checkpoint.storage.archive_writer import Slot
from composer_fsdp2.errors import CheckpointError

__all__ = ["lay_out"]

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def lay_out(
    weights: Mapping[str, Slot], *, num_files: int | None, beside: Mapping[str, bytes]
) -> tuple[OutputFile, ...]:
    """The folder that ``from_pretrained`` reads.

    Args:
        num_files: Shards; a tensor is never split, so there may be fewer.
        beside: Further files.
    Raises:
        CheckpointError: safetensors has no name for some dtype.
    """
    unknown = {name: slot.dtype for name, slot in weights.items() if slot.dtype not in _NAMES}
    if unknown:
        found = ", ".join(f"{name} ({dtype})" for name, dtype in list(unknown.items())[:8])
        raise CheckpointError(f"safetensors has no name for the dtype of {found}; give a dtype, or leave them out")
    total = sum(slot.num_bytes for slot in weights.values())
    shards = _shards(weights, total, num_files or num_files_for(total))
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [SINGLE]
    output = [_output(name, shard) for name, shard in zip(names, shards, strict=True)]
    if len(shards) > 1:
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        output.append(OutputFile.of_bytes(INDEX, json.dumps(index, indent=2).encode()))
    return (*output, *(OutputFile.of_bytes(name, content) for name, content in beside.items()))


def _shards(weights: Mapping[str, Slot], total: int, num_shards: int) -> list[dict[str, Slot]]:
    """Neighbours together; a tensor goes where its middle falls."""
    shards: list[dict[str, Slot]] = [{} for _ in range(num_shards)]
    at = 0
    for name, slot in weights.items():
        middle = at + slot.num_bytes // 2
        shards[min(middle * num_shards // max(total, 1), num_shards - 1)][name] = slot
        at += slot.num_bytes
    return [shard for shard in shards if shard] or [{}]


def _output(name: str, weights: Mapping[str, Slot]) -> OutputFile:
    # The widest dtypes first, as the library does, so that each tensor is aligned to its own.
    ordered = sorted(weights.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    at, places = 0, {}
    for tensor, slot in ordered:
        places[tensor] = at
        span = [at, at + slot.num_bytes]
        header[tensor] = {"dtype": _NAMES[slot.dtype], "shape": list(slot.shape), "data_offsets": span}
        at += slot.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)

    def rest(crcs: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        yield 0, struct.pack("<Q", len(text)) + text

    writes = tuple(TensorWrite.whole(slot, start + places[tensor]) for tensor, slot in ordered)
    return OutputFile(name, start + at, writes, rest)
