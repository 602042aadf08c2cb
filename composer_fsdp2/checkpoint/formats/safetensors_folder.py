"""Hugging Face's weights: ``model.safetensors``, or its shards and ``model.safetensors.index.json``."""

from pathlib import Path
from typing import Any

import torch

from composer_fsdp2.checkpoint.formats._composer import file_sizes
from composer_fsdp2.checkpoint.inside import inside
from composer_fsdp2.checkpoint.inventory import CheckpointInventory, Chunk, EntryPath, Strided, TensorRecord, Writer
from composer_fsdp2.checkpoint.storage.archive import Blob, parsed_json, read_at, read_text
from composer_fsdp2.errors import CheckpointError

NAME = "safetensors"
ORDER = 20
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# safetensors' own names (its README, "Format").
DTYPES = {
    name: getattr(torch, attribute)
    for name, attribute in {
        "BOOL": "bool",
        "U8": "uint8",
        "I8": "int8",
        "U16": "uint16",
        "I16": "int16",
        "U32": "uint32",
        "I32": "int32",
        "U64": "uint64",
        "I64": "int64",
        "F16": "float16",
        "BF16": "bfloat16",
        "F32": "float32",
        "F64": "float64",
        "C64": "complex64",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E8M0": "float8_e8m0fnu",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
    }.items()
    if hasattr(torch, attribute)
}
# 100,000 tensors and more; the library's own limit is 100 MB, for which Python's reader takes gigabytes.
_MAX_HEADER_BYTES = 24 << 20


def recognise(path: Path) -> bool:
    if path.is_dir():
        return (path / INDEX).is_file() or (path / SINGLE).is_file()
    return path.suffix == ".safetensors" and path.is_file()


def incomplete(path: Path) -> str | None:
    return None  # transformers writes the index last, and without it a folder of shards is not recognised


def read(path: Path, *, trust: bool) -> CheckpointInventory:
    files = _files(path)
    tensors: dict[EntryPath, TensorRecord] = {}
    for file in files:
        for name, record in read_header(file).items():
            if ("state", "model", name) in tensors:
                raise CheckpointError(f"{file}: {name} is in another file as well")
            tensors["state", "model", name] = record
    extra = [path / INDEX] if path.is_dir() and (path / INDEX).is_file() else []
    remarks = ["weights alone: no optimizer state, schedulers, timestamp or random states"]
    if extra:
        listed = _index(path)
        differing = sorted(set(listed) ^ {str(key[2]) for key in tensors})
        if differing:
            raise CheckpointError(f"{path / INDEX} and the files disagree about {', '.join(differing[:8])}")
    return CheckpointInventory(
        path=path,
        layout=NAME,
        tensors=tensors,
        objects={},
        files=file_sizes(*files, *extra),
        writer=Writer(sharding="not sharded"),
        remarks=tuple(remarks),
    )


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not (path / INDEX).is_file():
        return [path / SINGLE]
    files = []
    for name in sorted(set(_index(path).values())):
        file = inside(path, name, said_by=path / INDEX, may_link=True)
        if not file.is_file():
            raise CheckpointError(f"{file}: missing; {INDEX} names it")
        files.append(file)
    return files


def _index(path: Path) -> dict[str, str]:
    try:
        weights: Any = parsed_json(read_text(path / INDEX, max_bytes=_MAX_HEADER_BYTES), path / INDEX)["weight_map"]
        if not all(isinstance(name, str) and isinstance(file, str) for name, file in weights.items()):
            raise ValueError("weight_map is not from names to files")
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path / INDEX}: damaged ({error!r})") from error
    return dict(weights)


def read_header(path: Path) -> dict[str, TensorRecord]:
    """The tensors of one file.

    Raises:
        CheckpointError: the header is damaged, or ranges do not tile the rest of the file.
    """
    size = path.stat().st_size
    header_bytes = int.from_bytes(read_at(path, 0, 8), "little")
    if header_bytes > min(size - 8, _MAX_HEADER_BYTES):
        raise CheckpointError(f"{path}: its header should have {header_bytes} bytes; no safetensors file, or truncated")
    start = 8 + header_bytes
    try:
        header = parsed_json(read_at(path, 8, header_bytes), path)
        header.pop("__metadata__", None)
        tensors = {name: _tensor(path, name, said, start) for name, said in header.items()}
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged header ({error!r})") from error
    at = start
    for record in sorted(tensors.values(), key=lambda r: (_blob(r).offset, _blob(r).num_bytes)):
        if _blob(record).offset != at:
            raise CheckpointError(f"{path}: {record.name} begins at byte {_blob(record).offset}, expected {at}")
        at = _blob(record).end
    if at != size:
        raise CheckpointError(f"{path}: its tensors end at byte {at}, the file at {size}")
    return tensors


def _tensor(path: Path, name: str, said: dict[str, Any], start: int) -> TensorRecord:
    dtype, shape = DTYPES.get(said["dtype"]), tuple(said["shape"])
    begin, end = said["data_offsets"]
    if dtype is None:
        raise CheckpointError(f"{path}: {name} has dtype {said['dtype']}, which this torch does not know")
    if not all(isinstance(n, int) and 0 <= n < 1 << 63 for n in (*shape, begin, end)):
        raise ValueError(f"{name}: {said}")
    blob = Blob(path, start + begin, end - begin)
    record = TensorRecord(
        name=name,
        shape=shape,
        dtype=dtype,
        chunks=(Chunk((0,) * len(shape), shape, Strided(blob, dtype, 0, row_major(shape))),),
    )
    if record.num_bytes != blob.num_bytes:
        raise CheckpointError(f"{path}: {name} needs {record.num_bytes} bytes, its range has {blob.num_bytes}")
    return record


def _blob(record: TensorRecord) -> Blob:
    source = record.chunks[0].source
    assert isinstance(source, Strided)
    return source.blob


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)
