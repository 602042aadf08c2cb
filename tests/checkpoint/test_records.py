"""A record's CRC32, whatever parts of it were read."""

from __future__ import annotations

import tempfile
import zlib
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from composer_fsdp2.checkpoint import records
from composer_fsdp2.checkpoint.archive.torch_archive import Blob
from composer_fsdp2.checkpoint.records import damage_of

pytestmark = pytest.mark.any_torch

NUM_BYTES, OFFSET = 97, 13
BEFORE, AFTER = b"b" * OFFSET, b"a" * 20

ranges = st.lists(st.tuples(st.integers(0, NUM_BYTES), st.integers(0, NUM_BYTES)).map(sorted), max_size=6)


@examples(100)
@given(
    data=st.binary(min_size=NUM_BYTES, max_size=NUM_BYTES),
    ranges=ranges,
    flipped=st.none() | st.integers(0, NUM_BYTES * 8 - 1),
    slice_bytes=st.integers(1, 40),
)
def test_a_flipped_bit_is_seen_wherever_it_lies(
    data: bytes, ranges: list[list[int]], flipped: int | None, slice_bytes: int
):
    """Whatever was read, once, twice or not at all: the record is damaged if and only if a bit of it is flipped."""
    now = bytearray(data)
    if flipped is not None:
        now[flipped // 8] ^= 1 << flipped % 8
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(records, "_SLICE_BYTES", slice_bytes):
        blob = Blob(Path(folder, "file"), OFFSET, NUM_BYTES, zlib.crc32(data))
        blob.path.write_bytes(BEFORE + now + AFTER)
        found = damage_of(blob, [(a, b, zlib.crc32(now[a:b])) for a, b in ranges])
        assert (found is None) == (flipped is None), found


@examples(100)
@given(data=st.binary(min_size=NUM_BYTES, max_size=NUM_BYTES), ranges=ranges, number=st.integers(0, 5))
def test_what_was_read_must_be_what_is_there(data: bytes, ranges: list[list[int]], number: int):
    """The file may be whole by now: a range that was read with another content is damage."""
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
    """A padding of a few bytes costs a few bytes, not the record once more."""
    data = bytes(range(200))
    blob = Blob(tmp_path / "file", 0, 200, zlib.crc32(data))
    blob.path.write_bytes(data)
    with mock.patch.object(records, "_slices", wraps=records._slices) as slices:
        assert damage_of(blob, [(0, 90, zlib.crc32(data[:90])), (100, 195, zlib.crc32(data[100:195]))]) is None
    read = [call.args[1:] for call in slices.call_args_list]
    assert [(start, end) for start, end in read if start < end] == [(90, 100), (195, 200)]


@pytest.mark.parametrize("found", ["gone", "cut"])
def test_a_file_that_cannot_be_read(found: str, tmp_path: Path):
    """The error says why."""
    blob = Blob(tmp_path / "file", 0, 200, 7)
    if found == "cut":
        blob.path.write_bytes(b"short")
    text = damage_of(blob, [(0, 4, 0)])
    assert text is not None and ("No such file" if found == "gone" else "ends at byte 5, needs 200") in text
