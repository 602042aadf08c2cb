"""Any box of any tensor in a file: the values equal torch's slice, and only the necessary bytes are read."""

from __future__ import annotations

import itertools
import math
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints.views import numbered, strided
from support.comparing import assert_same
from support.examples import examples

from composer_fsdp2.checkpoint import read, records
from composer_fsdp2.checkpoint.archive.disk import Folder
from composer_fsdp2.checkpoint.archive.torch_archive import Archive, Blob
from composer_fsdp2.checkpoint.boxes import Box
from composer_fsdp2.checkpoint.inventory import Chunk, FlatRange, NestedArchive, TensorRecord, of_stored_tensor
from composer_fsdp2.checkpoint.read import Reader, bytes_of
from composer_fsdp2.checkpoint.records import damage_of, shifted
from composer_fsdp2.errors import CheckpointError

pytestmark = pytest.mark.any_torch


DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


@contextmanager
def saved(tensor: torch.Tensor) -> Iterator[TensorRecord]:
    """The tensor's record in a torch.save file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.pt"
        torch.save(tensor, path)
        archive = Archive.open(path)
        yield of_stored_tensor(archive.unpickle(trust=False), archive, "w")


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    offsets = [draw(st.integers(0, size)) for size in shape]
    return tuple(offsets), tuple(draw(st.integers(0, n - o)) for o, n in zip(offsets, shape, strict=True))


def sliced(tensor: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    return tensor[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]


# The real limits, and small ones with which a tensor of a few bytes takes every path.
limits = st.sampled_from([(4 << 20, 1 << 20), (5, 16), (3, 0)])


@contextmanager
def limited(slice_bytes: int, gap_bytes: int) -> Iterator[None]:
    with mock.patch.object(read, "SLICE_BYTES", slice_bytes), mock.patch.object(read, "_GAP_BYTES", gap_bytes):
        yield


@given(tensor=strided(DTYPES), limit=limits, data=st.data())
@examples(60)
def test_box_of_a_strided_tensor(tensor: torch.Tensor, limit: tuple[int, int], data: st.DataObject):
    """A rank's shard of a tensor that was saved as a view of any kind has the view's values, not its storage's.

    A read into a part of a larger tensor fills that part and does not change the rest.
    """
    offsets, sizes = data.draw(boxes(tuple(tensor.shape)))
    around = torch.zeros([size + 2 for size in sizes], dtype=torch.float32).to(tensor.dtype)
    inside = around[(slice(1, -1),) * len(sizes)]
    expected = around.clone()
    expected[(slice(1, -1),) * len(sizes)] = sliced(tensor, offsets, sizes)
    with saved(tensor) as record, limited(*limit), Reader() as reader:
        assert record.shape == tuple(tensor.shape) and record.dtype == tensor.dtype
        reader.read(record, Box(offsets, sizes), inside)
        assert_same(around, expected, in_bits=True)
        assert_same(reader.read_full(record), tensor, in_bits=True)


@given(shape=st.lists(st.integers(1, 6), min_size=1, max_size=3), dtype=st.sampled_from(DTYPES), data=st.data())
@examples(40)
def test_rows_cost_their_own_bytes(shape: list[int], dtype: torch.dtype, data: st.DataObject):
    """A rank that needs some rows reads them and no other byte, in one run; together the ranks' reads give torch's
    CRC32."""
    tensor = numbered(math.prod(shape), dtype).view(shape)
    cuts = sorted({0, shape[0], *data.draw(st.lists(st.integers(0, shape[0]), max_size=4))})
    row_bytes, ranges = math.prod(shape[1:]) * dtype.itemsize, data.draw(st.permutations([*itertools.pairwise(cuts)]))
    with saved(tensor) as record, Reader() as reader:
        for first, last in ranges:
            sizes = (last - first, *shape[1:])
            reader.read(record, Box((first, *(0,) * (len(shape) - 1)), sizes), torch.empty(sizes, dtype=dtype))
    assert reader.num_bytes == shape[0] * row_bytes
    runs = [(first * row_bytes, last * row_bytes) for first, last in ranges]
    assert [(part.start, part.end) for part in reader.parts] == runs
    (blob,) = {part.blob for part in reader.parts}
    crc = 0
    for part in reader.parts:
        crc ^= shifted(part.crc32, blob.num_bytes - part.end)
    assert crc == blob.crc32 == zlib.crc32(bytes(bytes_of(tensor)))


# --- chunks of a DCP directory


def tiling(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})
    return [*itertools.pairwise(cuts)] or [(0, 0)]


@st.composite
def tilings(draw: st.DrawFn) -> tuple[torch.Tensor, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """A tensor and boxes that tile it, in one or two dimensions, in any order."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    tensor = numbered(math.prod(shape), draw(st.sampled_from(DTYPES))).view(shape)
    ranges = [tiling(draw, n) if dim < 2 else [(0, n)] for dim, n in enumerate(shape)]
    tiles = [
        (tuple(low for low, _ in corner), tuple(high - low for low, high in corner))
        for corner in itertools.product(*ranges)
    ]
    return tensor, draw(st.permutations(tiles))


def entry_at(file: Path, offset: int, num_bytes: int) -> NestedArchive:
    return NestedArchive(Folder(file.parent), file.name, offset, num_bytes)


def write_entries(path: Path, tensors: list[torch.Tensor]) -> list[NestedArchive]:
    """Writes archives end to end into one file, as DCP's writer does."""
    entries = []
    with open(path, "wb") as file:
        for tensor in tensors:
            start = file.tell()
            torch.save(tensor, file)
            entries.append(entry_at(path, start, file.tell() - start))
    return entries


@given(tiled=tilings(), limit=limits, data=st.data())
@examples(40)
def test_box_across_chunks(tiled: tuple, limit: tuple[int, int], data: st.DataObject):
    """A shard for another world size, across the old ranks' chunks, has each element in its place."""
    tensor, tiles = tiled
    offsets, sizes = data.draw(boxes(tuple(tensor.shape)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "__0_0.distcp"
        entries = write_entries(path, [sliced(tensor, *tile).clone() for tile in tiles])
        chunks = tuple(Chunk(*tile, entry) for tile, entry in zip(tiles, entries, strict=True))
        record = TensorRecord(name="w", shape=tuple(tensor.shape), dtype=tensor.dtype, chunks=chunks)
        assert record.untiled() is None
        out = torch.empty(sizes, dtype=tensor.dtype)
        with limited(*limit), Reader() as reader:
            reader.read(record, Box(offsets, sizes), out)
    assert_same(out, sliced(tensor, offsets, sizes), in_bits=True)


@given(tiled=tilings(), data=st.data())
@examples(40)
def test_tilings_that_do_not_tile(tiled: tuple, data: st.DataObject):
    """A chunk that is missing, duplicated, moved or enlarged is found; DCP silently skips the affected rows."""
    tensor, tiles = tiled
    shape = tuple(tensor.shape)
    number = data.draw(st.integers(0, len(tiles) - 1))
    offsets, sizes = tiles[number]
    kind = data.draw(st.sampled_from(["missing", "twice", "moved", "grown"]))
    dim = data.draw(st.integers(0, len(shape) - 1))
    moved = [*offsets], [*sizes]
    if kind in ("moved", "grown"):
        moved[kind == "grown"][dim] += data.draw(st.integers(1, 3))
    changed = {
        "missing": tiles[:number] + tiles[number + 1 :],
        "twice": [*tiles, tiles[number]],
    }.get(kind, [*tiles[:number], (tuple(moved[0]), tuple(moved[1])), *tiles[number + 1 :]])
    entry = entry_at(Path("file"), 0, 0)
    record = TensorRecord(
        name="w", shape=shape, dtype=tensor.dtype, chunks=tuple(Chunk(*tile, entry) for tile in changed)
    )
    # By counting, which is slow but certain.
    count = torch.zeros([n + 8 for n in shape], dtype=torch.int)
    for at, extent in changed:
        sliced(count, at, extent).add_(1)
    inside = sliced(count, (0,) * len(shape), shape)
    is_whole = bool((inside == 1).all()) and int(count.sum()) == tensor.numel()
    assert (record.untiled() is None) == is_whole


def chunks_of(shape: tuple[int, ...], size: int) -> TensorRecord:
    """A tensor in chunks of this number of elements along each dimension."""
    entry = entry_at(Path("file"), 0, 0)
    corners = itertools.product(*(range(0, extent, size) for extent in shape))
    chunks = tuple(Chunk(corner, (size,) * len(shape), entry) for corner in corners)
    return TensorRecord(name="w", shape=shape, dtype=torch.float32, chunks=chunks)


def test_chunks_along_many_dimensions():
    """Six dimensions are more than any mesh can shard; a layout that would take minutes to check is refused with that
    reason."""
    assert chunks_of((4,) * 6, 2).untiled() is None
    assert "too many to check" in (chunks_of((2,) * 11, 1).untiled() or "")


# --- flat parameters


@given(shape=st.lists(st.integers(0, 5), max_size=3), before=st.integers(0, 7), limit=limits, data=st.data())
@examples(40)
def test_box_of_a_flat_parameters_range(shape: list[int], before: int, limit: tuple[int, int], data: st.DataObject):
    """A parameter of an FSDP1 `local` checkpoint, a range of a flat parameter that the old ranks sharded at any
    offset."""
    tensor = numbered(math.prod(shape), torch.float32).view(shape)
    flat = torch.cat([torch.full((before,), -1.0), tensor.reshape(-1), torch.full((3,), -2.0)])
    cut = data.draw(st.integers(0, flat.numel()))
    offsets, sizes = data.draw(boxes(tuple(shape)))
    with tempfile.TemporaryDirectory() as folder:
        entries = write_entries(Path(folder) / "__0_0.distcp", [flat[:cut].clone(), flat[cut:].clone()])
        tiles = [((0,), (cut,)), ((cut,), (flat.numel() - cut,))]
        chunks = tuple(Chunk(*tile, entry) for tile, entry in zip(tiles, entries, strict=True))
        whole = TensorRecord(name="_flat_param", shape=(flat.numel(),), dtype=flat.dtype, chunks=chunks)
        record = TensorRecord(name="w", shape=tuple(shape), dtype=flat.dtype, flat=FlatRange(whole, before))
        out = torch.empty(sizes)
        with limited(*limit), Reader() as reader:
            reader.read(record, Box(offsets, sizes), out)
    assert_same(out, sliced(tensor, offsets, sizes), in_bits=True)


# --- errors


def test_file_that_shrank(tmp_path: Path):
    """A file that was truncated between inspecting and reading is an error with its name, not zeros."""
    torch.save(torch.ones(1000), tmp_path / "file.pt")
    archive = Archive.open(tmp_path / "file.pt")
    record = of_stored_tensor(archive.unpickle(trust=False), archive, "w")
    with open(tmp_path / "file.pt", "r+b") as file:
        file.truncate(2000)
    with Reader() as reader, pytest.raises(CheckpointError, match=r"file\.pt: ends at byte 2000"):
        reader.read_full(record)


@pytest.mark.parametrize(
    ("held", "text"),
    [
        (torch.ones(3), "holds torch.float32 of shape (3,), where .metadata says torch.float32 of shape (2,)"),
        (torch.ones(2, dtype=torch.int32), "holds torch.int32 of shape (2,), where .metadata says torch.float32"),
        ({"step": 1}, "holds no tensor"),
    ],
)
def test_entry_that_holds_something_else(held: object, text: str, tmp_path: Path):
    """An entry whose shape, dtype or kind differs from .metadata is an error with the names of the tensor and the
    file."""
    path = tmp_path / "__0_0.distcp"
    torch.save(held, path)
    entry = entry_at(path, 0, path.stat().st_size)
    record = TensorRecord(name="wte.weight", shape=(2,), dtype=torch.float32, chunks=(Chunk((0,), (2,), entry),))
    with Reader() as reader, pytest.raises(CheckpointError) as raised:
        reader.read_full(record)
    assert str(raised.value).startswith("wte.weight: ") and str(path) in str(raised.value)
    assert text in str(raised.value)


def test_a_view_that_overlaps_itself():
    """A view (3, 3) with strides (2, 2) spans nine elements, but not nine contiguous ones, as which it was read."""
    tensor = numbered(9, torch.int16).as_strided((3, 3), (2, 2))
    with saved(tensor) as record, Reader() as reader:
        assert_same(reader.read_full(record), tensor.contiguous())


def test_an_empty_tensor():
    """An empty tensor has no address to read from."""
    with saved(torch.empty(0, 3)) as record, Reader() as reader:
        assert_same(reader.read_full(record), torch.empty(0, 3))


# --- CRC32s combined from parts, without the bytes


binaries = st.binary(max_size=300)


@given(part=binaries, zeros=st.sampled_from([0, 1, 2, 255, 256, 65537, 1 << 20]))
@examples(40)
def test_far_shifts(part: bytes, zeros: int):
    """The shift for a part far from the end of a large record equals zlib's; one shift is the sum of two, beyond 4
    GiB."""
    assert shifted(crc := zlib.crc32(part), zeros) ^ zlib.crc32(bytes(zeros)) == zlib.crc32(part + bytes(zeros))
    far = (1 << 33) + 12345
    assert shifted(shifted(crc, far - zeros), zeros) == shifted(crc, far)


# --- a record's CRC32 from the parts that were read


NUM_BYTES, OFFSET = 97, 13


BEFORE, AFTER = b"b" * OFFSET, b"a" * 20


ranges = st.lists(st.tuples(st.integers(0, NUM_BYTES), st.integers(0, NUM_BYTES)).map(sorted), max_size=6)


@examples(60)
@given(
    data=st.binary(min_size=NUM_BYTES, max_size=NUM_BYTES),
    ranges=ranges,
    flipped=st.none() | st.integers(0, NUM_BYTES * 8 - 1),
    slice_bytes=st.integers(1, 40),
)
def test_a_flipped_bit_is_seen_wherever_it_lies(
    data: bytes, ranges: list[list[int]], flipped: int | None, slice_bytes: int
):
    """The record is damaged if and only if one of its bits is flipped, whether that bit was read once, twice or
    never."""
    now = bytearray(data)
    if flipped is not None:
        now[flipped // 8] ^= 1 << flipped % 8
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(records, "_SLICE_BYTES", slice_bytes):
        blob = Blob(Path(folder, "file"), OFFSET, NUM_BYTES, zlib.crc32(data))
        blob.path.write_bytes(BEFORE + now + AFTER)
        found = damage_of(blob, [(a, b, zlib.crc32(now[a:b])) for a, b in ranges])
        assert (found is None) == (flipped is None), found


@examples(60)
@given(data=st.binary(min_size=NUM_BYTES, max_size=NUM_BYTES), ranges=ranges, number=st.integers(0, 5))
def test_what_was_read_must_be_what_is_there(data: bytes, ranges: list[list[int]], number: int):
    """A range that was read with different content is damage, although the file may be complete by now."""
    read = [(a, b, zlib.crc32(data[a:b])) for a, b in ranges if a < b]
    if not read:
        return
    start, end, crc32 = read[number % len(read)]
    with tempfile.TemporaryDirectory() as folder:
        blob = Blob(Path(folder, "file"), OFFSET, NUM_BYTES, zlib.crc32(data))
        blob.path.write_bytes(BEFORE + data + AFTER)
        assert damage_of(blob, read) is None
        assert damage_of(blob, [*read, (start, end, crc32 ^ 1)]) is not None


def test_what_lies_between_is_read_and_nothing_twice(tmp_path: Path):
    """Padding of a few bytes costs a few bytes, not a second read of the record."""
    data = bytes(range(200))
    blob = Blob(tmp_path / "file", 0, 200, zlib.crc32(data))
    blob.path.write_bytes(data)
    with mock.patch.object(records, "_slices", wraps=records._slices) as slices:
        assert damage_of(blob, [(0, 90, zlib.crc32(data[:90])), (100, 195, zlib.crc32(data[100:195]))]) is None
    read = [call.args[1:] for call in slices.call_args_list]
    assert [(start, end) for start, end in read if start < end] == [(90, 100), (195, 200)]


@pytest.mark.parametrize("found", ["gone", "cut"])
def test_a_file_that_cannot_be_read(found: str, tmp_path: Path):
    """The error has the reason."""
    blob = Blob(tmp_path / "file", 0, 200, 7)
    if found == "cut":
        blob.path.write_bytes(b"short")
    text = damage_of(blob, [(0, 4, 0)])
    assert text is not None and ("No such file" if found == "gone" else "ends at byte 5, needs 200") in text
