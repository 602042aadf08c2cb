"""CRC32s of parts give that of all bytes together, without these: what each rank read checks a record together.

The CRC of A followed by B is ``shifted(crc(A), len(B)) ^ crc(B)``: appending B multiplies A's remainder by x^(8 len(B))
modulo the CRC's polynomial (Mark Adler, zlib's ``crc32_combine``). So each part adds one number, whatever the order.
"""

import functools

_POLYNOMIAL = 0xEDB88320  # CRC-32 of zip and zlib, bits reflected: bit 31 is x^0
_ONE = 1 << 31


def shifted(crc: int, num_bytes: int) -> int:
    """What a part's CRC32 adds to that of all, when ``num_bytes`` follow it."""
    return _multiply(_power(num_bytes), crc) if num_bytes else crc


@functools.lru_cache(maxsize=4096)
def _power(num_bytes: int) -> int:
    """x^(8 num_bytes) modulo the polynomial."""
    result, square = _ONE, _ONE >> 8  # x^8
    while num_bytes:
        if num_bytes & 1:
            result = _multiply(square, result)
        square = _multiply(square, square)
        num_bytes >>= 1
    return result


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials modulo the CRC's."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product
