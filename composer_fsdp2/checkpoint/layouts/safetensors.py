"""Hugging Face's weights: ``model.safetensors``, or its shards with ``model.safetensors.index.json``."""

import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from composer_fsdp2.checkpoint.archive.disk import damage_in, inside, read_at, read_json
from composer_fsdp2.checkpoint.archive.torch_archive import Blob
from composer_fsdp2.checkpoint.archive.writer import Slot
from composer_fsdp2.checkpoint.boxes import row_major
from composer_fsdp2.checkpoint.hugging_face import (
    HuggingFaceForm,
    form_of_folder,
    has_config,
    hugging_face_form,
    without_ties,
)
from composer_fsdp2.checkpoint.inventory import (
    MODEL,
    OPTIMIZERS,
    CheckpointInventory,
    Strided,
    TensorRecord,
    Writer,
)
from composer_fsdp2.checkpoint.layouts._composer import file_sizes
from composer_fsdp2.checkpoint.layouts._layout import (
    Layout,
    LayoutWriter,
    Output,
    OutputFile,
    TensorWrite,
    WriteRequest,
    num_files_for,
)
from composer_fsdp2.checkpoint.names import MODEL_PREFIX
from composer_fsdp2.checkpoint.trees import EntryPath, dotted
from composer_fsdp2.config.text import and_more
from composer_fsdp2.errors import CheckpointError

_NAME = "safetensors"
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# What accelerate's save_state writes beside the weights.
_ACCELERATE = re.compile(r"(optimizer|scheduler|sampler|scaler)(_\d+)?\.(bin|pt)|random_states_\d+\.pkl")

# safetensors' own names (its README, "Format").
_DTYPES = {
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
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def _recognize(path: Path) -> bool:
    if path.is_dir():
        return (path / _INDEX).is_file() or (path / _SINGLE).is_file()
    return path.suffix == ".safetensors" and path.is_file()


def _read(path: Path, trust: bool) -> CheckpointInventory:
    files = _files(path)
    tensors: dict[EntryPath, TensorRecord] = {}
    for file in files:
        for name, record in read_header(file).items():
            if ("state", "model", name) in tensors:
                raise CheckpointError(f"{file}: {name} is in another file as well")
            tensors["state", "model", name] = record
    folder = path if path.is_dir() else path.parent
    extra = [path / _INDEX] if path.is_dir() and (path / _INDEX).is_file() else []
    if extra:
        listed = _index(path)
        differing = sorted(set(listed) ^ {str(key[2]) for key in tensors})
        if differing:
            raise CheckpointError(f"{path / _INDEX} and the files disagree about {and_more(differing, 8)}")
    return CheckpointInventory(
        path=path,
        layout=_NAME,
        tensors=tensors,
        objects={},
        files=file_sizes(*files, *extra),
        writer=Writer(),
        remarks=(_remark(folder),),
        holds_only=MODEL,
        name_prefix=MODEL_PREFIX,
        hugging_face=folder if has_config(folder) else None,
    )


def _remark(folder: Path) -> str:
    """State that the weights have no training state, or that it is in files of accelerate beside them."""
    names = sorted(file.name for file in folder.iterdir() if _ACCELERATE.fullmatch(file.name))
    if names:
        return f"weights alone: accelerate's files beside them are not read: {and_more(names, 8)}"
    return "weights alone: no optimizer state, schedulers, timestamp or random states"


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not (path / _INDEX).is_file():
        return [path / _SINGLE]
    files = []
    for name in sorted(set(_index(path).values())):
        file = inside(path, name, named_by=path / _INDEX, may_link=True)
        if not file.is_file():
            raise CheckpointError(f"{file}: missing; {_INDEX} names it")
        files.append(file)
    return files


def _index(path: Path) -> dict[str, str]:
    with damage_in(path / _INDEX, "an index of weights"):
        return {str(name): str(file) for name, file in read_json(path / _INDEX)["weight_map"].items()}


def read_header(path: Path) -> dict[str, TensorRecord]:
    """Read the tensors' names, shapes and byte ranges from the header of one file.

    Raises:
        CheckpointError: the header is damaged, or its ranges do not tile the rest of the file.
    """
    size = path.stat().st_size
    header_bytes = int.from_bytes(read_at(path, 0, 8), "little")
    if header_bytes > size - 8:
        raise CheckpointError(f"{path}: its header should have {header_bytes} bytes; no safetensors file, or truncated")
    start = 8 + header_bytes
    header = read_json(path, 8, header_bytes)
    with damage_in(path, "a header of safetensors"):
        header.pop("__metadata__", None)
        tensors = {name: _tensor(path, name, entry, start) for name, entry in header.items()}
    at = start
    for record in sorted(tensors.values(), key=lambda r: (_blob(r).offset, _blob(r).num_bytes)):
        if _blob(record).offset != at:
            raise CheckpointError(f"{path}: {record.name} begins at byte {_blob(record).offset}, expected {at}")
        at = _blob(record).end
    if at != size:
        raise CheckpointError(f"{path}: its tensors end at byte {at}, the file at {size}")
    return tensors


def _tensor(path: Path, name: str, entry: dict[str, Any], start: int) -> TensorRecord:
    dtype, shape = _DTYPES.get(entry["dtype"]), tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if dtype is None:
        raise CheckpointError(f"{path}: {name} has dtype {entry['dtype']}, which this torch does not know")
    if not all(isinstance(n, int) and 0 <= n < 1 << 63 for n in (*shape, begin, end)):
        raise ValueError(f"{name}: {entry}")
    blob = Blob(path, start + begin, end - begin)
    record = TensorRecord.in_one_chunk(name, shape, dtype, Strided(blob, dtype, 0, row_major(shape)))
    if record.num_bytes != blob.num_bytes:
        raise CheckpointError(f"{path}: {name} needs {record.num_bytes} bytes, its range has {blob.num_bytes}")
    return record


def _blob(record: TensorRecord) -> Blob:
    source = record.chunks[0].source
    assert isinstance(source, Strided)
    return source.blob


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def _lay_out(request: WriteRequest) -> Output:
    """Compute a folder that ``from_pretrained`` reads: weights under Hugging Face's names. Drops all other entries.

    A tensor is never split, so the number of shards may be below the requested number of files.

    Raises:
        CheckpointError: no weights, or a dtype that safetensors does not support.
    """
    inventory, model = request.inventory, request.model
    weights = {name: slot for name, slot in model.items() if isinstance(slot, Slot)}
    if not weights:
        raise CheckpointError(f"{inventory.path}: contains no weights, and safetensors can store nothing else")
    form, weights, renamed, remarks = _with_hugging_face_names(request, weights)
    weights, ties = without_ties(weights, form.config if form else None)
    remarks.extend(f"leaves out {tie}, which is the same bytes" for tie in ties)
    remarks.extend(f"leaves out {what}" for what in (form.left_out if form else ()))
    other_files = [OutputFile.of_bytes(name, content) for name, content in (form.other_files if form else {}).items()]
    return Output(
        files=(*_weight_files(weights, request.num_files), *other_files),
        renamed=renamed,
        dropped=_dropped(request),
        remarks=tuple(remarks),
    )


def _with_hugging_face_names(
    request: WriteRequest, weights: dict[str, Slot]
) -> tuple[HuggingFaceForm | None, dict[str, Slot], dict[str, str], list[str]]:
    """The files of the Hugging Face model, its weights under its own names, the renamed parameters, and remarks."""
    renamed = dict(request.renamed)
    if (
        folder := request.inventory.hugging_face
    ) is not None:  # only split differently: names and other files are unchanged
        return form_of_folder(folder, request.dtype), weights, renamed, []
    form = hugging_face_form(request.inventory, request.dtype)
    if form is None:
        remark = "the checkpoint records no Hugging Face model: names are kept, and no config.json is written"
        return None, weights, renamed, [remark]
    if not all(name.startswith(MODEL_PREFIX) for name in weights):
        return form, weights, renamed, []
    old_names = {new: old for old, new in renamed.items()}
    weights = {name.removeprefix(MODEL_PREFIX): slot for name, slot in weights.items()}
    renamed = {old_names.get(MODEL_PREFIX + name, MODEL_PREFIX + name): name for name in weights}
    return (
        form,
        weights,
        renamed,
        [f"removes the prefix {MODEL_PREFIX!r} of Composer's HuggingFaceModel from every name"],
    )


def _dropped(request: WriteRequest) -> tuple[str, ...]:
    """The keys that are dropped: the model's entries without tensors, and the topmost keys of all other entries."""
    inventory = request.inventory
    others = [path for path in (*inventory.tensors, *inventory.objects) if path[:2] != MODEL]
    return (
        *(dotted((*MODEL, name)) for name, value in request.model.items() if not isinstance(value, Slot)),
        *(dotted(path[: 3 if path[:2] == OPTIMIZERS else 2 if path[0] == "state" else 1]) for path in others),
    )


def _weight_files(weights: Mapping[str, Slot], num_files: int | None) -> list[OutputFile]:
    unknown = [f"{name} ({slot.dtype})" for name, slot in weights.items() if slot.dtype not in _DTYPE_NAMES]
    if unknown:
        raise CheckpointError(
            f"safetensors has no name for the dtype of {and_more(unknown, 8)}; give a dtype, or leave them out"
        )
    total = sum(slot.num_bytes for slot in weights.values())
    shards = _shards(weights, total, num_files or num_files_for(total))
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [_SINGLE]
    output = [_output(name, shard) for name, shard in zip(names, shards, strict=True)]
    if len(shards) > 1:
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        output.append(OutputFile.of_bytes(_INDEX, json.dumps(index, indent=2).encode()))
    return output


def _shards(weights: Mapping[str, Slot], total: int, num_shards: int) -> list[dict[str, Slot]]:
    """Distribute consecutive tensors over shards. A tensor belongs to the shard of its middle byte."""
    shards: list[dict[str, Slot]] = [{} for _ in range(num_shards)]
    at = 0
    for name, slot in weights.items():
        middle = at + slot.num_bytes // 2
        shards[min(middle * num_shards // max(total, 1), num_shards - 1)][name] = slot
        at += slot.num_bytes
    return [shard for shard in shards if shard] or [{}]


def _output(name: str, weights: Mapping[str, Slot]) -> OutputFile:
    # The widest dtypes first, as the library does: each tensor is aligned to its own.
    ordered = sorted(weights.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    at, places = 0, {}
    for tensor, slot in ordered:
        places[tensor] = at
        span = [at, at + slot.num_bytes]
        header[tensor] = {"dtype": _DTYPE_NAMES[slot.dtype], "shape": list(slot.shape), "data_offsets": span}
        at += slot.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)

    def rest(crcs: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        yield 0, struct.pack("<Q", len(text)) + text

    writes = tuple(TensorWrite.full(slot, start + places[tensor]) for tensor, slot in ordered)
    return OutputFile(name, start + at, writes, rest)


LAYOUT = Layout(
    name=_NAME,
    recognize=_recognize,  # transformers writes the index last, and without it a folder of shards is not recognized
    read=_read,
    has_names=lambda names: any(name.endswith(".safetensors") for name in names),
    written=LayoutWriter(name="safetensors", lay_out=_lay_out, holds_only=MODEL, name_prefix=MODEL_PREFIX),
)
