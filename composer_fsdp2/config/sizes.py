"""Parse sizes, bandwidths and compute speeds such as ``80GiB``, ``400Gb/s`` and ``989TFLOPS``. A unit is required."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from composer_fsdp2.config.text import human_bytes
from composer_fsdp2.config.value import Value
from composer_fsdp2.errors import ConfigError

_STEPS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(.*?)\s*", re.DOTALL)
_SIZES = {f"{step}b": 1000**power for step, power in _STEPS.items() if step} | {
    f"{step}ib": 1024**power for step, power in _STEPS.items() if step
}
_SPEEDS = {f"{step}{word}": 1000**power for step, power in _STEPS.items() if step for word in ("flops", "flop/s")}


def parse_bytes(text: str, name: str) -> int:
    """Parse a size to bytes: ``80GiB`` (1024³) or ``80GB`` (1000³).

    Args:
        name: The name of the option, for the error message.
    Raises:
        ConfigError: the text is not a size, or has no unit.
    """
    return round(_measured(text, name, {**_SIZES, "bytes": 1}, "write 80GiB (1024³ bytes) or 80GB (1000³)"))


def parse_bandwidth(text: str, name: str) -> float:
    """Parse a bandwidth to bytes per second: ``450GB/s`` (bytes) or ``400Gb/s`` (bits).

    The case of the B is significant.

    Raises:
        ConfigError: the text is not a bandwidth, or has no unit.
    """
    bits = {f"{step}{word}": 1000**power / 8 for step, power in _STEPS.items() for word in _BITS if step}
    in_bytes = {f"{step}{word}": 1000**power for step, power in _STEPS.items() for word in ("B/s", "Bps") if step}
    both = {name[0].upper() + name[1:]: size for name, size in (bits | in_bytes).items()}
    way_out = "write 400Gb/s (gigabits, as of InfiniBand) or 450GB/s (gigabytes, as of NVLink)"
    return _measured(text, name, both | bits | in_bytes, way_out, ignores_case=False)


_BITS = ("b/s", "bps", "bit/s")


def parse_flops(text: str, name: str) -> float:
    """Parse floating-point operations per second, such as ``989TFLOPS``.

    Raises:
        ConfigError: the text is not a speed, or has no unit.
    """
    return _measured(text, name, _SPEEDS, "write 989TFLOPS")


def _measured(text: str, name: str, units: Mapping[str, float], way_out: str, *, ignores_case: bool = True) -> float:
    found = _NUMBER.fullmatch(text)
    if found is None:
        raise ConfigError(f"{name} {text!r} is no number with a unit; {way_out}")
    number, unit = float(found[1]), found[2].lower() if ignores_case else found[2]
    if not unit:
        raise ConfigError(f"{name} {text} has no unit; {way_out}")
    if unit not in units:
        raise ConfigError(f"{name} {text}: {found[2]!r} is no unit of it; {way_out}")
    if not number:
        raise ConfigError(f"{name} {text} is nothing; {way_out}")
    if not math.isfinite(number * units[unit]):
        raise ConfigError(f"{name} {text[:20]}... is more than a computer can count; {way_out}")
    return number * units[unit]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve(Value):
    """Device memory that an estimate must leave free: a fraction of the device's memory plus a constant.

    It covers memory that the estimate does not model: allocator fragmentation, NCCL's buffers and the CUDA context.
    """

    share: float = 0.05
    fixed_bytes: int = 2 * 2**30

    def of(self, memory_bytes: int) -> int:
        return round(self.share * memory_bytes) + self.fixed_bytes

    def __str__(self) -> str:
        parts = [f"{100 * self.share:g} %"] if self.share else []
        parts += [human_bytes(self.fixed_bytes)] if self.fixed_bytes else []
        return " + ".join(parts) or "nothing"


def parse_reserve(text: str, name: str) -> Reserve:
    """Parse ``5%+2GiB``, ``10%``, ``4GiB``, or ``0`` for no reserve.

    Raises:
        ConfigError: a term is neither a percentage nor a size with a unit, or the percentage is 100 or more.
    """
    share, fixed_bytes = 0.0, 0
    for part in map(str.strip, text.split("+")):
        if part == "0":
            continue
        if part.endswith("%"):
            share += _measured(part, name, {"%": 0.01}, "write 5%+2GiB")
        else:
            fixed_bytes += parse_bytes(part, name)
    if share >= 1:
        raise ConfigError(f"{name} {text} reserves all of the memory; write 5%+2GiB")
    return Reserve(share=share, fixed_bytes=fixed_bytes)
