"""Parsing of sizes and speeds with units, without guessing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from composer_fsdp2.config.sizes import Reserve, parse_bandwidth, parse_bytes, parse_flops, parse_reserve
from composer_fsdp2.errors import ConfigError

READ: list[tuple[Callable[[str, str], Any], str, Any]] = [
    (parse_bytes, "80GiB", 80 * 2**30),
    (parse_bytes, "80 gb", 80 * 10**9),
    (parse_bytes, "1.5TiB", 3 * 2**39),
    (parse_bandwidth, "400Gb/s", 50e9),
    (parse_bandwidth, "450GB/s", 450e9),
    (parse_bandwidth, "200 gbps", 25e9),  # bits: bytes are written with a B
    (parse_flops, "989TFLOPS", 989e12),
    (parse_reserve, "5%+2GiB", Reserve()),
    (parse_reserve, "10%", Reserve(share=0.1, fixed_bytes=0)),
    (parse_reserve, "0", Reserve(share=0, fixed_bytes=0)),
]
REFUSED: list[tuple[Callable[[str, str], Any], str, str]] = [
    (parse_bytes, "80", "has no unit; write 80GiB"),
    (parse_bytes, "80G", "'G' is no unit"),
    (parse_bytes, "much", "is no number with a unit"),
    (parse_bytes, "0GiB", "is nothing"),
    (parse_bytes, "", "is no number with a unit"),
    (parse_bytes, "-80GiB", "is no number with a unit"),
    (parse_bytes, "nanGiB", "is no number with a unit"),
    (parse_bytes, "9" * 400 + "GiB", "is more than a computer can count"),
    (parse_flops, "9" * 400 + "TFLOPS", "is more than a computer can count"),
    (parse_bandwidth, "400", "has no unit; write 400Gb/s"),
    (parse_bandwidth, "400Gi/s", "is no unit"),
    (parse_flops, "989", "has no unit; write 989TFLOPS"),
    (parse_reserve, "6", "has no unit"),
    (parse_reserve, "100%", "reserves all of the memory"),
]


def test_sizes_are_read():
    for parse, text, value in READ:
        assert parse(text, "--option") == value, text


def test_what_could_mean_two_things_is_refused():
    """80 in which unit? An estimate that guessed would silently be wrong by a factor of 8 or 1.07."""
    for parse, text, said in REFUSED:
        with pytest.raises(ConfigError) as caught:
            parse(text, "--option")
        assert said in str(caught.value) and "--option" in str(caught.value), (text, str(caught.value))


def test_a_reserve():
    assert Reserve().of(100 * 2**30) == 7 * 2**30
    assert str(Reserve()) == "5 % + 2.0 GiB" and str(Reserve(share=0, fixed_bytes=0)) == "nothing"
