"""A pickle's opcodes, looked at before any of them is carried out."""

import pickle
import re

from composer_fsdp2.checkpoint.budget import Budget
from composer_fsdp2.checkpoint.pickles.stand_ins import UnsupportedPickleError

# What an opcode makes: a byte may make a set of 216 bytes.
_OBJECT_BYTES = {
    b"]": 72, b"}": 80, b"\x8f": 232, b"l": 72, b"d": 250, b"t": 64, b"\x85": 64, b"\x86": 72, b"\x87": 80,
    b"\x91": 232,
    b"N": 8, b"\x88": 8, b"\x89": 8, b")": 8, b"(": 8, b"2": 8,
}  # fmt: skip
_MAX_NUMBER_BYTES = 1024  # Python writes no number of more than 4,300 digits
_TEXT_BYTES = 192  # a text, bytes or number with a length, beside what it holds; and a turn of the loop below

# Opcodes by what follows them (pickletools): nothing or a fixed number of bytes; a length; lines of text.
_FIXED = re.compile(
    rb"(?:[(012NQRabd}elos\])tu\x81\x85-\x89\x8f-\x94]|[Khq\x80].|M..|[Jj]....|[G\x95].{8})*+", re.DOTALL
)
_LENGTH_BYTES = {
    **dict.fromkeys((b"U", b"C", b"\x8c", b"\x8a"), 1),
    **dict.fromkeys((b"T", b"B", b"X", b"\x8b"), 4),
    **dict.fromkeys((b"\x8e", b"\x8d", b"\x96"), 8),
}
_LINES = {**dict.fromkeys((b"I", b"F", b"L", b"S", b"V", b"P", b"g", b"p"), 1), b"c": 2, b"i": 2}


def scan(data: bytes, at: int, budget: Budget) -> None:
    """Walk over a pickle's opcodes without carrying them out.

    Python below 3.14 makes a table as long as the highest memo number that a pickle names, so ten bytes could ask for
    32 GiB (CPython issue 115952). No writer numbers more objects than its pickle has bytes. Also refused: a pickle
    whose many small objects would fill the memory, and extension codes, which would name what is imported by a number.
    """
    memo_number = 0
    while True:
        fixed = _FIXED.match(data, at)
        assert fixed is not None  # it matches nothing, too
        budget.spend("its many objects", num_bytes=_TEXT_BYTES + _bytes_of_objects(fixed.group()))
        opcode, at = data[fixed.end() : fixed.end() + 1], fixed.end() + 1
        if opcode == b".":
            return
        if opcode == b"r":
            memo_number, at = int.from_bytes(data[at : at + 4], "little"), at + 4
        elif opcode in _LENGTH_BYTES:
            width = _LENGTH_BYTES[opcode]
            length = int.from_bytes(data[at : at + width], "little")
            if opcode == b"\x8b" and length > _MAX_NUMBER_BYTES:
                raise UnsupportedPickleError(f"holds a number of {length} bytes, which is not supported")
            at += width + length
        elif opcode in _LINES:
            for _ in range(_LINES[opcode]):
                start, at = at, data.find(b"\n", at) + 1 or len(data)
            if opcode == b"p":
                memo_number = int(data[start:at])
        elif opcode and at <= len(data):
            raise pickle.UnpicklingError(f"an unsupported opcode {opcode!r}")
        if at >= len(data):
            raise pickle.UnpicklingError("truncated")
        if memo_number > len(data):
            raise pickle.UnpicklingError("a memo number beyond the pickle's length")


def _bytes_of_objects(opcodes: bytes) -> int:
    """What these make, at most: operands are counted as if they were opcodes."""
    if len(opcodes) < 16:  # between two texts; most are shorter, and their objects few
        return 32 * len(opcodes)
    return sum(num_bytes * opcodes.count(opcode) for opcode, num_bytes in _OBJECT_BYTES.items())
