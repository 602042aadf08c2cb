"""Damage to checkpoints: one table, each row applied to a copy, with the function that detects it.

    from support.checkpoints.corruptions import CORRUPTIONS, FoundBy, prepared

    @pytest.mark.parametrize("corruption", CORRUPTIONS, ids=str)
    def test_x(corruption, tmp_path):
        whole, damaged = prepared(corruption, tmp_path)

``whole`` is the original checkpoint, ``damaged`` the copy. The sources are fixtures (a monolithic file of Composer
0.17.2, a DCP directory of two ranks of 0.22.0) and a safetensors folder of two shards made here.
"""

from __future__ import annotations

import enum
import json
import pickle
import re
import shutil
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from support.checkpoints.samples import LEGACY, write_safetensors

TENSOR = "model.wte.weight"  # in all three, and large enough for a hundred flips


class FoundBy(enum.Enum):
    """The first function that detects it."""

    INSPECT = "inspect"  # CheckpointError from inspect_checkpoint; verify_checkpoint reports or raises it
    STRUCTURE = "structure"  # a fault in verify_checkpoint's report, of the structure
    CONTENT = "content"  # a fault in the report: a CRC32
    AGAINST = "against"  # undetectable in the checkpoint alone; comparing with the original detects it
    HARMLESS = "harmless"  # no value changed, and no reader uses these bytes


@dataclass(frozen=True)
class Corruption:
    """One row.

    Args:
        apply: Changes the checkpoint at a path.
        says: A regular expression that matches the error or the fault.
        why: The reason why the checkpoint alone does not reveal the damage.
    """

    layout: str
    name: str
    apply: Callable[[Path], None]
    found_by: FoundBy
    says: str = ""
    why: str = ""

    def __str__(self) -> str:
        return f"{self.layout}: {self.name}"


def prepared(corruption: Corruption, folder: Path) -> tuple[Path, Path]:
    """The checkpoint, and a damaged copy of it."""
    whole, damaged = folder / "whole", folder / "damaged"
    SOURCES[corruption.layout](whole)
    shutil.copytree(whole, damaged)
    names = {"monolithic": "ep0-ba3-rank0.pt", "dcp": "ep0-ba3", "safetensors": "."}
    corruption.apply(damaged / names[corruption.layout])
    return whole / names[corruption.layout], damaged / names[corruption.layout]


# ---------------------------------------------------------------------------------------------------------------------
# Sources


def _monolithic(folder: Path) -> None:
    folder.mkdir()
    shutil.copy(LEGACY / "c172" / "full" / "ep0-ba3-rank0.pt", folder)


def _dcp(folder: Path) -> None:
    shutil.copytree(LEGACY / "c220" / "sharded" / "ep0-ba3", folder / "ep0-ba3")


def _safetensors(folder: Path) -> None:
    folder.mkdir()
    torch.manual_seed(0)
    shards = [{TENSOR: torch.randn(11, 6), "model.b": torch.randn(3)}, {"model.c": torch.randn(2, 3)}]
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05}-of-00002.safetensors"
        write_safetensors(folder / name, tensors)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


SOURCES: dict[str, Callable[[Path], None]] = {"monolithic": _monolithic, "dcp": _dcp, "safetensors": _safetensors}
INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00002.safetensors"


# ---------------------------------------------------------------------------------------------------------------------
# Tools


def flip(path: Path, *offsets: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    for offset in offsets:
        data[offset] ^= 1 << bit
    path.write_bytes(bytes(data))


def truncate(path: Path, share: float = 0.5) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


def record_at(path: Path, name: str, start: int = 0, end: int | None = None) -> tuple[int, int, int]:
    """The position of a zip record within a range of a file: its local header, its bytes, its directory entry."""
    data, of_name = path.read_bytes()[start:end], b"[^/]{1,40}/" + re.escape(name.encode())  # in the archive's folder
    local, central = (
        re.search(header + of_name, data, re.DOTALL).start()  # type: ignore[union-attr]
        for header in (rb"PK\x03\x04.{26}", rb"PK\x01\x02.{42}")
    )
    name_length, extra_length = struct.unpack_from("<HH", data, local + 26)
    return start + local, start + local + 30 + name_length + extra_length, start + central


def storage_of(path: Path, name: str) -> str:
    """The record of a model's tensor in a monolithic file, found by its bytes."""
    tensor = torch.load(path, weights_only=False)["state"]["model"][name]
    content = struct.pack(f"<{tensor.numel()}f", *tensor.flatten().tolist())
    with zipfile.ZipFile(path) as file:
        return next(n.partition("/")[2] for n in file.namelist() if "/data/" in n and file.read(n) == content)


def resaved(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """A monolithic file saved with changed contents."""

    def apply(path: Path) -> None:
        state = torch.load(path, weights_only=False)
        change(state)
        torch.save(state, path)

    return apply


def repacked(change: Callable[[dict[str, bytes]], None]) -> Callable[[Path], None]:
    """A monolithic file with other records and valid CRC32s."""

    def apply(path: Path) -> None:
        with zipfile.ZipFile(path) as file:
            records = {name: file.read(name) for name in file.namelist()}
        change(records)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
            for name, data in records.items():
                file.writestr(zipfile.ZipInfo(name), data)

    return apply


def metadata(change: Callable[[Any], None]) -> Callable[[Path], None]:
    """A DCP directory with a changed ``.metadata``."""

    def apply(path: Path) -> None:
        value = pickle.loads((path / ".metadata").read_bytes())
        change(value)
        (path / ".metadata").write_bytes(pickle.dumps(value))

    return apply


def places(value: Any, name: str) -> list[Any]:
    """The keys of a tensor's or object's entries in ``storage_data``, by offset."""
    found = [index for index in value.storage_data if index.fqn == name]
    return sorted(found, key=lambda index: tuple(index.offset or ()))


KEY = f"state.model.{TENSOR}"


def first_entry(path: Path, name: str = KEY) -> tuple[Path, int, int]:
    """The file and range of a tensor's first chunk."""
    value = pickle.loads((path / ".metadata").read_bytes())
    info = value.storage_data[places(value, name)[0]]
    return path / info.relative_path, info.offset, info.offset + info.length


# ---------------------------------------------------------------------------------------------------------------------
# Monolithic files


def _flip_tensor(count: int) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        _, start, _ = record_at(path, storage_of(path, TENSOR))
        flip(path, *range(start, start + count))

    return apply


def _flip_record(name: str, where: str, offset: int, bit: int = 0) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        places = dict(zip(("local", "content", "central"), record_at(path, name), strict=True))
        flip(path, places[where] + offset, bit=bit)

    return apply


def _without_crcs(path: Path) -> None:
    """Written with ``torch.serialization.set_crc32_options(False)``, then damaged."""
    state = torch.load(path, weights_only=False)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, path)
    finally:
        torch.serialization.set_crc32_options(True)
    data = path.read_bytes()
    content = state["state"]["model"][TENSOR]
    at = data.index(struct.pack(f"<{content.numel()}f", *content.flatten().tolist()))
    flip(path, at)


def _set(state: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        state = state[key]
    if value is None:
        del state[path[-1]]
    else:
        state[path[-1]] = value


def _state(*path: str, to: Any) -> Callable[[Path], None]:
    return resaved(lambda state: _set(state, ["state", *path], to))


_ONLY_THE_MODEL = "a file alone does not say what should be in it; loading compares it with the model"

MONOLITHIC = [
    ("truncated", truncate, FoundBy.INSPECT, r"rank0\.pt.*truncated"),
    ("truncated by one byte", lambda path: path.write_bytes(path.read_bytes()[:-1]), FoundBy.INSPECT, "truncated"),
    ("empty", lambda path: path.write_bytes(b""), FoundBy.INSPECT, r"rank0\.pt"),
    ("missing", lambda path: path.unlink(), FoundBy.INSPECT, r"rank0\.pt: no such file"),
    ("a bit of a tensor", _flip_tensor(1), FoundBy.CONTENT, rf"{TENSOR}.*expected CRC32 \w+, found CRC32"),
    ("100 bits of a tensor", _flip_tensor(100), FoundBy.CONTENT, rf"{TENSOR}.*expected CRC32"),
    ("a bit of the pickle", _flip_record("data.pkl", "content", 50), FoundBy.INSPECT, r"data\.pkl is damaged.*CRC32"),
    ("a name in a header", _flip_record("data/1", "local", 36), FoundBy.INSPECT, "that record is not there"),
    ("a header's length", _flip_record("data/1", "local", 28, bit=5), FoundBy.CONTENT, "expected CRC32"),
    ("a CRC32 in the directory", _flip_record("data/1", "central", 17), FoundBy.CONTENT, "expected CRC32"),
    ("a size in the directory", _flip_record("data/1", "central", 21, bit=6), FoundBy.INSPECT, r"rank0\.pt"),
    ("an offset in the directory", _flip_record("data/1", "central", 43), FoundBy.INSPECT, r"rank0\.pt"),
    ("a name in the directory", _flip_record("data/1", "central", 53), FoundBy.INSPECT, "that record is not there"),
    ("a date in the directory", _flip_record("data/1", "central", 12), FoundBy.HARMLESS, ""),
    ("a date in a header", _flip_record("data/1", "local", 10), FoundBy.HARMLESS, ""),
    (
        "a record less",
        repacked(lambda records: records.pop("archive/data/1")),
        FoundBy.INSPECT,
        "the record of storage 1 is missing",
    ),
    (
        "a record more",
        repacked(lambda records: records.update({"archive/data/999": b"surplus"})),
        FoundBy.STRUCTURE,
        "record data/999: expected no such record, found 7 bytes",
    ),
    (
        "a record too short",
        repacked(lambda records: records.update({"archive/data/1": b"x"})),
        FoundBy.INSPECT,
        r"storage 1 should have \d+ bytes and has 1",
    ),
    ("a bit, and no CRC32s", _without_crcs, FoundBy.AGAINST, "1 of 66 elements differ"),
    ("a key less", _state("model", TENSOR, to=None), FoundBy.AGAINST, rf"{TENSOR}: expected .*, found nothing"),
    ("a key more", _state("model", "model.x", to=torch.ones(2)), FoundBy.AGAINST, "expected nothing, found"),
    ("another shape", _state("model", TENSOR, to=torch.ones(6, 11)), FoundBy.AGAINST, r"shape \(6, 11\)"),
    ("another dtype", _state("model", TENSOR, to=torch.ones(11, 6).half()), FoundBy.AGAINST, "float16"),
    ("a number for a tensor", _state("model", TENSOR, to=3), FoundBy.AGAINST, "found 3"),
    (
        "a tensor for a number",
        _state("timestamp", "Timestamp", "batch", to=torch.ones(2)),
        FoundBy.AGAINST,
        r"batch: expected 3, found torch\.float32",
    ),
    ("no model", _state("model", to={}), FoundBy.AGAINST, r"state\.model: expected \d+ entries, found nothing"),
    ("a list for the state", resaved(lambda state: state.update(state=[1])), FoundBy.INSPECT, r"rank0\.pt"),
]


# ---------------------------------------------------------------------------------------------------------------------
# DCP directories


def _in_first(where: str, record: str, *offsets: int, bit: int = 0) -> Callable[[Path], None]:
    """Flips bits in the first chunk's archive: in the local header, content or central directory of a record."""

    def apply(path: Path) -> None:
        file, start, end = first_entry(path)
        places = dict(zip(("local", "content", "central"), record_at(file, record, start, end), strict=True))
        flip(file, *(places[where] + offset for offset in offsets), bit=bit)

    return apply


def _swap(a: str, b: str) -> Callable[[Path], None]:
    def change(value: Any) -> None:
        one, other = places(value, a)[0], places(value, b)[0]
        value.storage_data[one], value.storage_data[other] = value.storage_data[other], value.storage_data[one]

    return metadata(change)


def _tensor(**changes: Any) -> Callable[[Path], None]:
    def change(value: Any) -> None:
        value.state_dict_metadata[KEY] = replace(value.state_dict_metadata[KEY], **changes)

    return metadata(change)


def _chunks(change: Callable[[list[Any]], Any]) -> Callable[[Path], None]:
    return metadata(lambda value: change(value.state_dict_metadata[KEY].chunks))


def _drop(value: Any, *, everywhere: bool) -> None:
    del value.state_dict_metadata[KEY]
    if everywhere:
        del value.planner_data[KEY]
        for index in places(value, KEY):
            del value.storage_data[index]


def _rename(value: Any) -> None:
    new = KEY.replace("wte", "wtx")
    value.state_dict_metadata[new] = value.state_dict_metadata.pop(KEY)
    value.planner_data[new] = (*value.planner_data.pop(KEY)[:-1], TENSOR.replace("wte", "wtx"))
    for index in places(value, KEY):
        value.storage_data[replace(index, fqn=new)] = value.storage_data.pop(index)


def _add(value: Any, *, at: str | None) -> None:
    new = "state.model.model.new"
    value.state_dict_metadata[new] = value.state_dict_metadata[KEY]
    value.planner_data[new] = ("state", "model", "model.new")
    for index in places(value, KEY) if at else []:
        value.storage_data[replace(index, fqn=new)] = value.storage_data[index]


def _move(**changes: int) -> Callable[[Path], None]:
    """Shifts the offset or the length of the first chunk by some bytes."""

    def change(value: Any) -> None:
        index = places(value, KEY)[0]
        info = value.storage_data[index]
        value.storage_data[index] = replace(info, **{name: getattr(info, name) + by for name, by in changes.items()})

    return metadata(change)


def _object_for_tensor(value: Any) -> None:
    """Replaces a tensor's entry by an object's."""
    value.state_dict_metadata[_SMALL] = value.state_dict_metadata[_OBJECT]
    (index,) = places(value, _SMALL)
    value.storage_data[replace(index, offset=None)] = value.storage_data.pop(index)


def _tensor_for_object(value: Any) -> None:
    """Replaces an object's entry by a tensor's."""
    value.state_dict_metadata[_OBJECT] = value.state_dict_metadata[_SMALL]
    (index,) = places(value, _OBJECT)
    offset = value.state_dict_metadata[_SMALL].chunks[0].offsets
    value.storage_data[replace(index, offset=offset)] = value.storage_data.pop(index)


def _smaller(value: Any) -> None:
    """A shape and chunks that match each other but not the stored entries."""
    declared = value.state_dict_metadata[KEY]
    rows, columns = declared.size
    for chunk in declared.chunks:
        chunk.sizes = torch.Size((chunk.sizes[0], columns - 1))
    value.state_dict_metadata[KEY] = replace(declared, size=torch.Size((rows, columns - 1)))


def _dtype(dtype: torch.dtype) -> Callable[[Path], None]:
    def change(value: Any) -> None:
        declared = value.state_dict_metadata[KEY]
        declared.properties.dtype = dtype

    return metadata(change)


def _copied(source: str, target: str) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        shutil.copy(path / source, path / target)

    return apply


_META = ".metadata"
_FILE = "__1_0.distcp"
_NOT_IN_THE_FILE = "a DCP file does not say whose bytes it holds, and .metadata has no checksum"
_SAME_SHAPE = ("state.model.model.blocks.0.up.weight", "state.model.model.blocks.1.up.weight")
_OTHER_SHAPE = (KEY, "state.model.model.blocks.0.up.weight")
_SMALL = "state.optimizers.DecoupledAdamW.state.model.wte.weight.step"  # with one chunk
_OBJECT = "state.timestamp"

DCP = [
    (
        "a file truncated",
        lambda path: truncate(path / _FILE),
        FoundBy.INSPECT,
        rf"{_FILE}: has .*truncated.*should hold",
    ),
    ("a file empty", lambda path: (path / _FILE).write_bytes(b""), FoundBy.INSPECT, rf"{_FILE}.* has 0 bytes"),
    (
        "a file missing",
        lambda path: (path / _FILE).unlink(),
        FoundBy.INSPECT,
        rf"{_FILE}: missing; \.metadata names it",
    ),
    (".metadata missing", lambda path: (path / _META).unlink(), FoundBy.INSPECT, "no .metadata, which is written last"),
    (".metadata truncated", lambda path: truncate(path / _META), FoundBy.INSPECT, r"\.metadata: damaged pickle"),
    (".metadata empty", lambda path: (path / _META).write_bytes(b""), FoundBy.INSPECT, r"\.metadata: damaged pickle"),
    ("a bit of a tensor", _in_first("content", "data/0", 0), FoundBy.CONTENT, rf"{TENSOR}.*expected CRC32 \w+, found"),
    ("100 bits of a tensor", _in_first("content", "data/0", *range(100)), FoundBy.CONTENT, rf"{TENSOR}.*CRC32"),
    ("a bit of a pickle", _in_first("content", "data.pkl", 30), FoundBy.CONTENT, r"data\.pkl.*expected CRC32"),
    ("a name in a header", _in_first("local", "data/0", 36), FoundBy.STRUCTURE, "that record is not there"),
    ("a CRC32 in a directory", _in_first("central", "data/0", 17), FoundBy.CONTENT, rf"{TENSOR}.*expected CRC32"),
    ("an offset in a directory", _in_first("central", "data/0", 43), FoundBy.STRUCTURE, TENSOR),
    ("a date in a directory", _in_first("central", "data/0", 12), FoundBy.HARMLESS, ""),
    (
        "entries of two shapes swapped",
        _swap(*_OTHER_SHAPE),
        FoundBy.STRUCTURE,
        rf"{TENSOR}.*expected .* shape .* found",
    ),
    ("entries of one shape swapped", _swap(*_SAME_SHAPE), FoundBy.AGAINST, r"blocks\.0\.up\.weight.*elements differ"),
    ("a chunk less", _chunks(lambda chunks: chunks.pop()), FoundBy.INSPECT, rf"{TENSOR} .*not complete"),
    ("no chunks", _chunks(lambda chunks: chunks.clear()), FoundBy.INSPECT, rf"{TENSOR} .*hold 0 of 66 elements"),
    ("a chunk twice", _chunks(lambda chunks: chunks.append(chunks[0])), FoundBy.INSPECT, rf"{TENSOR}.*overlap"),
    (
        "a key less, its place left",
        metadata(lambda value: _drop(value, everywhere=False)),
        FoundBy.INSPECT,
        rf"gives a location for {KEY} but no description",
    ),
    (
        "a key less",
        metadata(lambda value: _drop(value, everywhere=True)),
        FoundBy.STRUCTURE,
        r"expected the next entry that \.metadata names, found \d+ bytes, an archive of torch\.float32 of shape",
    ),
    ("a key renamed", metadata(_rename), FoundBy.AGAINST, r"wtx\.weight: expected nothing, found"),
    (
        "a key more, without a place",
        metadata(lambda value: _add(value, at=None)),
        FoundBy.INSPECT,
        "gives no usable location for state.model.model.new",
    ),
    (
        "a key more, at another's place",
        metadata(lambda value: _add(value, at=KEY)),
        FoundBy.INSPECT,
        "overlapping bytes for",
    ),
    (
        "a key at another's path",
        metadata(lambda value: value.planner_data.update({KEY: ("state", "model", "model.scale")})),
        FoundBy.INSPECT,
        rf"the path of {KEY}",
    ),
    (
        "another size",
        _tensor(size=torch.Size((12, 6))),
        FoundBy.INSPECT,
        rf"{TENSOR} of shape \(12, 6\) is not complete",
    ),
    ("a negative size", _tensor(size=torch.Size((-11, 6))), FoundBy.INSPECT, r"\.metadata"),
    ("another shape throughout", metadata(_smaller), FoundBy.STRUCTURE, rf"{TENSOR}.*shape \(\d+, 5\), found .*, 6\)"),
    ("another dtype", _dtype(torch.int32), FoundBy.STRUCTURE, rf"{TENSOR}.*expected torch.int32 .*found torch.float32"),
    ("a wider dtype", _dtype(torch.float64), FoundBy.STRUCTURE, rf"{TENSOR}.*torch.float64 .*found torch.float32"),
    ("a place moved", _move(offset=64, length=-64), FoundBy.STRUCTURE, TENSOR),
    ("a place too short", _move(length=-64), FoundBy.STRUCTURE, TENSOR),
    ("a place in the next one's", _move(length=64), FoundBy.INSPECT, "overlapping bytes"),
    ("a place beyond the file", _move(offset=10**9), FoundBy.INSPECT, r"should hold .* at byte 10000"),
    (
        "a tensor for an object",
        metadata(_object_for_tensor),
        FoundBy.STRUCTURE,
        "expected no tensor, as .metadata says",
    ),
    (
        "an object for a tensor",
        metadata(_tensor_for_object),
        FoundBy.STRUCTURE,
        r"expected torch\.float32.*found a dict",
    ),
    ("a surplus file", _copied("__0_0.distcp", "__7_0.distcp"), FoundBy.STRUCTURE, r"__7_0.distcp: expected no such"),
    (
        "bytes at a file's end",
        lambda path: (path / _FILE).write_bytes((path / _FILE).read_bytes() + b"x" * 100),
        FoundBy.STRUCTURE,
        "100 bytes that are no archive",
    ),
    (
        "a file of another run",
        lambda path: shutil.copy(LEGACY / "c172" / "sharded" / "ep0-ba3" / _FILE, path),
        FoundBy.INSPECT,
        rf"{_FILE}",
    ),
    # One error with a line for each, instead of one error a try.
    (
        "two files",
        lambda path: (truncate(path / "__0_0.distcp"), (path / _FILE).unlink()),
        FoundBy.INSPECT,
        rf"(?s)(?=.*{_FILE}: missing).*__0_0\.distcp: .*truncated",
    ),
]


# ---------------------------------------------------------------------------------------------------------------------
# Safetensors folders


def _header(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        data = (path / SHARD).read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        (path / SHARD).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return apply


def _index(change: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        index = json.loads((path / INDEX).read_text())
        change(index["weight_map"])
        (path / INDEX).write_text(json.dumps(index))

    return apply


_NO_CHECKSUM = "safetensors has no checksums"

SAFETENSORS = [
    ("a shard truncated", lambda path: truncate(path / SHARD), FoundBy.INSPECT, SHARD),
    ("a shard of four bytes", lambda path: (path / SHARD).write_bytes(b"abcd"), FoundBy.INSPECT, SHARD),
    ("a shard empty", lambda path: (path / SHARD).write_bytes(b""), FoundBy.INSPECT, SHARD),
    ("a shard missing", lambda path: (path / SHARD).unlink(), FoundBy.INSPECT, rf"{SHARD}: missing"),
    ("the index truncated", lambda path: truncate(path / INDEX), FoundBy.INSPECT, rf"{INDEX}: damaged"),
    ("the index empty", lambda path: (path / INDEX).write_text(""), FoundBy.INSPECT, rf"{INDEX}: damaged"),
    ("the index nested without end", lambda path: (path / INDEX).write_text("[" * 10**5), FoundBy.INSPECT, "damaged"),
    ("the index missing", lambda path: (path / INDEX).unlink(), FoundBy.INSPECT, "damaged"),
    (
        "a path in the index",
        _index(lambda files: files.update({TENSOR: "../x.safetensors"})),
        FoundBy.INSPECT,
        "outside",
    ),
    (
        "a key less in the index",
        _index(lambda files: files.pop("model.b")),
        FoundBy.INSPECT,
        r"disagree about model\.b",
    ),
    ("a key more in the index", _index(lambda files: files.update(x=SHARD)), FoundBy.INSPECT, "disagree about x"),
    ("a header's length", lambda path: flip(path / SHARD, 7), FoundBy.INSPECT, SHARD),
    ("a header's brace", lambda path: flip(path / SHARD, 8, bit=6), FoundBy.INSPECT, rf"{SHARD}: damaged"),
    (
        "another shape",
        _header(lambda header: header[TENSOR].update(shape=[11, 7])),
        FoundBy.INSPECT,
        rf"{SHARD}: {TENSOR} needs 308 bytes, its range has 264",
    ),
    (
        "a negative size",
        _header(lambda header: header[TENSOR].update(shape=[-11, -6])),
        FoundBy.INSPECT,
        SHARD,
    ),
    (
        "ranges that overlap",
        _header(lambda header: header["model.b"].update(data_offsets=[0, 12])),
        FoundBy.INSPECT,
        rf"{SHARD}.*begins at byte",
    ),
    ("a bit of a tensor", lambda path: flip(path / SHARD, -1), FoundBy.AGAINST, r"model\.b: .* 1 of 3 elements differ"),
    (
        "another dtype of that size",
        _header(lambda header: header[TENSOR].update(dtype="I32")),
        FoundBy.AGAINST,
        r"expected torch.float32 .* found torch.int32",
    ),
    (
        "a shard of another run",
        lambda path: write_safetensors(path / SHARD, {TENSOR: torch.zeros(11, 6), "model.other": torch.zeros(3)}),
        FoundBy.INSPECT,
        r"disagree about model\.b, model\.other",
    ),
    (
        "a shard of the same model's other run",
        lambda path: write_safetensors(path / SHARD, {TENSOR: torch.zeros(11, 6), "model.b": torch.zeros(3)}),
        FoundBy.AGAINST,
        "66 of 66 elements differ",
    ),
    ("a surplus file", _copied(SHARD, "model-00003-of-00002.safetensors"), FoundBy.HARMLESS, ""),
]

_WHY = {
    "monolithic": _ONLY_THE_MODEL,
    "dcp": _NOT_IN_THE_FILE,
    "safetensors": _NO_CHECKSUM,
}
CORRUPTIONS = [
    Corruption(layout, name, apply, found_by, says, _WHY[layout] if found_by is FoundBy.AGAINST else "")
    for layout, rows in (("monolithic", MONOLITHIC), ("dcp", DCP), ("safetensors", SAFETENSORS))
    for name, apply, found_by, says in rows
]
