"""CRC32s of parts, put together without the bytes."""

from __future__ import annotations

import itertools
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from composer_fsdp2.checkpoint.archive.crc import shifted

pytestmark = pytest.mark.any_torch

binaries = st.binary(max_size=300)


@given(whole=binaries, data=st.data())
@examples(100)
def test_parts_add_up_to_the_whole(whole: bytes, data: st.DataObject):
    """A record that many ranks read, in any split and order, is checked as one: a damaged one is never taken."""
    cuts = sorted({0, len(whole), *data.draw(st.lists(st.integers(0, len(whole)), max_size=6))})
    parts = data.draw(st.permutations([*itertools.pairwise(cuts)]))
    crc = 0
    for start, end in parts:
        crc ^= shifted(zlib.crc32(whole[start:end]), len(whole) - end)
    assert crc == zlib.crc32(whole)


@given(part=binaries, zeros=st.sampled_from([0, 1, 2, 255, 256, 65537, 1 << 20]))
@examples(100)
def test_far_shifts(part: bytes, zeros: int):
    """Parts far from the end of a large record count as zlib counts them."""
    padded = part + bytes(zeros)
    assert shifted(zlib.crc32(part), zeros) ^ zlib.crc32(bytes(zeros)) == zlib.crc32(padded)


def test_shift_beyond_4_gib():
    """A shift is the sum of two, so records of more than 32 bits of length come out right as well."""
    crc, far = zlib.crc32(b"weights"), (1 << 33) + 12345
    assert shifted(shifted(crc, far - 4096), 4096) == shifted(crc, far)
    steps = crc
    for _ in range(8):  # 2**30 is within what zlib's own combination was tested for
        steps = shifted(steps, 1 << 30)
    assert shifted(steps, 12345) == shifted(crc, far)
