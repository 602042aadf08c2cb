"""Small files that would take minutes or gigabytes to read: ``BOMBS[name](folder)`` writes one and returns its path.

``make test`` uses a sixteenth of their size, with limits scaled alike; THOROUGH=1 the full size.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from support.checkpoints.malicious import (
    STORAGE,
    archive,
    in_metadata,
    in_monolithic,
    integer,
    tensor,
    text,
    torch_records,
)
from support.examples import IS_THOROUGH

SCALE = 1 if IS_THOROUGH else 16
MIB = (1 << 20) // SCALE


def gz(path: Path, *parts: bytes, times: int = 1, then: bytes = b"") -> Path:
    """Parts in separate gzip members, the last one repeated; repeated data is compressed once."""
    *first, last = (gzip.compress(part, 1) for part in parts)
    return written(path, b"".join(first) + last * times + (gzip.compress(then, 1) if then else b""))


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def member(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """The header of a tar member with this size, which may be negative."""
    info = tarfile.TarInfo(name)
    info.type = kind
    info.size = max(size, 0)
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    if size < 0:
        header[124:136] = size.to_bytes(12, "big", signed=True)
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def pax(records: bytes) -> bytes:
    """An extended header with these records, such as ``12 size=-512\\n``."""
    return member("pax", len(records), tarfile.XHDTYPE) + records.ljust(-(-len(records) // 512) * 512, b"\0")


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


ZEROS = bytes(16 * MIB)
STATES = "composer_states.pt"


def tar_of_sparse_files(folder: Path) -> Path:
    records = b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n26 GNU.sparse.realsize=1\n"
    sizes = b"999999999\n" + b"1\n" * 255
    return gz(
        folder / "a.tar.gz", pax(records) + member(STATES, 1 << 30) + sizes.ljust(512, b"1"), b"1\n" * MIB, times=99
    )


def record_that_looks_like_its_end(folder: Path) -> Path:
    """Every four bytes of a record start a data descriptor."""
    data = saved({"state": {"model": {"w": torch.zeros(4 * MIB)}}})
    return gz(folder / "a.pt.gz", data.replace(bytes(8 * MIB), b"PK\7\x08" * (2 * MIB)))


def a_hundred_thousand_records(folder: Path) -> Path:
    """Like torch's records, without sizes in the local header, and never referenced."""
    start = saved({"state": {}})
    start = start[: start.index(b"PK\1\2")]
    one = struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 20, 8, 0, 0, 0, 0, 0, 0, 11, 0) + b"archive/%03d"
    records = [
        one % (number % 1000) + struct.pack("<4sIQQ", b"PK\7\x08", 0, 0, 0) for number in range(100_000 // SCALE)
    ]
    return gz(folder / "a.pt.gz", start + b"".join(records))


_METADATA = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81"


def one_array_again_and_again(folder: Path) -> Path:
    dtype = b"cnumpy\ndtype\n(" + text("f8") + b"\x89\x88tR"
    made = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tC\x01btR"
    state = b"(K\x01(" + integer(MIB // 8) + b"t" + dtype + b"\x89B" + struct.pack("<I", MIB) + bytes(MIB) + b"tp0\n0"
    return in_monolithic(folder, state + b"(" + (made + b"g0\nb") * 2000 + b"l.")


def views(folder: Path) -> Path:
    """A few bytes as 2,000 tensors of 256 MiB each."""
    one = tensor(integer(0), integer(64 * MIB), integer(0), STORAGE.replace(b"K\x04", integer(1)))
    items = b"".join(text(f"{number}") + one for number in range(2000))
    root = b"}(" + text("state") + b"}(" + text("callbacks") + b"}(" + items + b"uuu."
    return archive(folder / "a.pt", torch_records(root, {"0": bytes(4)}))


def overlapping_shards(folder: Path) -> Path:
    """Thousands of columns of a tensor that each share a row with the next one."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    number = 30_000 if SCALE == 1 else 8_000
    offsets = [torch.Size((0, column)) for column in range(number)]
    metadata = Metadata(
        state_dict_metadata={
            "state.model.w": TensorStorageMetadata(
                properties=TensorProperties(dtype=torch.float32),
                size=torch.Size((2, number + 1)),
                chunks=[ChunkStorageMetadata(offsets=offset, sizes=torch.Size((1, 2))) for offset in offsets],
            )
        },
        planner_data={"state.model.w": ("state", "model", "w")},
        storage_data={
            MetadataIndex("state.model.w", offset): _StorageInfo("__0_0.distcp", 8 * at, 8)
            for at, offset in enumerate(offsets)
        },
    )
    target = folder / "ep0-ba1"
    target.mkdir()
    (target / ".metadata").write_bytes(pickle.dumps(metadata))
    (target / "__0_0.distcp").write_bytes(bytes(8 * number))
    return target


def long_directory(folder: Path) -> Path:
    path = folder / "a.pt"
    with zipfile.ZipFile(path, "w") as file:
        for number in range(4):
            info = zipfile.ZipInfo(f"archive/{number}")
            info.extra = b""
            file.writestr(info, b"")
        data_end = file.fp.tell()  # type: ignore[union-attr]
    line = (
        struct.pack("<4s4B4HL2L5H2L", b"PK\1\2", 20, 0, 20, 0, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0) + b"archive/0"
    )
    directory = line * (40 * MIB // len(line))
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF - 1, 0xFFFF - 1, len(directory), data_end, 0)
    path.write_bytes(path.read_bytes()[:data_end] + directory + end)
    return path


def header_of_lists(folder: Path, number: int) -> Path:
    header = b'{"w":' + b"[" + b"[]," * number + b"0]}"
    return written(folder / "model.safetensors", struct.pack("<Q", len(header)) + header)


def long_index(folder: Path) -> Path:
    target = folder / "weights"
    target.mkdir()
    (target / "model.safetensors.index.json").write_text('{"weight_map": {}, "x": [' + "{}," * (20 * MIB) + "0]}")
    (target / "model-1.safetensors").write_bytes(b"")
    return target


def long_json(folder: Path) -> Path:
    target = folder / "ep0-ba1"
    target.mkdir()
    (target / "composer_metadata.json").write_text(json.dumps({"x": 1})[:-1] + ', "y": [' + "{}," * (20 * MIB) + "0]}")
    (target / "resumption.pkl").write_bytes(pickle.dumps({"run_name": "x"}))
    return target


BOMBS: dict[str, Callable[[Path], Path]] = {
    "tar of negative size": lambda folder: gz(folder / "a.tar.gz", member(STATES, -1024) + bytes(1024)),
    "tar of negative size in a header": lambda folder: gz(
        folder / "a.tar.gz", pax(b"14 size=-1024\n") + member(STATES, 0) + bytes(1024)
    ),
    "tar of endless header": lambda folder: gz(
        folder / "a.tar.gz", member("pax", 40 * len(ZEROS), tarfile.XHDTYPE), ZEROS, times=40
    ),
    "tar of endless name": lambda folder: gz(
        folder / "a.tar.gz", member("././@LongLink", 40 * len(ZEROS), tarfile.GNUTYPE_LONGNAME), ZEROS, times=40
    ),
    "tar of a million members": lambda folder: gz(folder / "a.tar.gz", member("x", 0) * (1 << 14), times=64 // SCALE),
    "tar of sparse files": tar_of_sparse_files,
    "after its end": lambda folder: gz(folder / "a.pt.gz", saved({"state": {"model": {}}}), ZEROS, times=60),
    "nothing but zeros": lambda folder: gz(folder / "a.pt.gz", ZEROS, times=200),
    "in bz2": lambda folder: written(
        folder / "a.pt.bz2",
        bz2.compress(saved({"state": {"model": {"w": torch.ones(3)}}})[:300]) + bz2.compress(ZEROS) * 200,
    ),
    "in xz": lambda folder: written(
        folder / "a.pt.xz", lzma.compress(saved({"state": {}})[:300]) + lzma.compress(ZEROS, preset=0) * 200
    ),
    "record that looks like its end": record_that_looks_like_its_end,
    "a hundred thousand records": a_hundred_thousand_records,
    "many small sets": lambda folder: in_monolithic(folder, b"\x80\x04(" + b"\x8f" * (4 * MIB) + b"l."),
    "many small texts": lambda folder: in_monolithic(folder, b"\x80\x04(" + b"\x8c\x02ab" * (8 * MIB) + b"l."),
    "appended one by one": lambda folder: in_metadata(folder, _METADATA + b"Na" * MIB + b"."),
    # A set of a long list, a million times.
    "copied again and again": lambda folder: in_monolithic(
        folder, b"(" + b"N" * MIB + b"tp0\n0cbuiltins\nset\np1\n0" + b"g1\ng0\n\x85R0" * (MIB // 2) + b"N."
    ),
    "one array again and again": one_array_again_and_again,
    "called again and again": lambda folder: in_monolithic(
        folder, b"ccollections\nOrderedDict\np0\n0)p1\n0" + b"g0\ng1\nR0" * (2 * MIB) + b"N."
    ),
    "views": views,
    "overlapping shards": overlapping_shards,
    "long directory": long_directory,
    "long header": lambda folder: header_of_lists(folder, 20 * MIB),
    "header of many lists": lambda folder: header_of_lists(folder, 7 * MIB),
    "long index": long_index,
    "long json": long_json,
}
