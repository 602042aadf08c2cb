"""Small pieces of messages: names in a row, the likeliest spelling, values cut to length."""

import difflib
from collections.abc import Iterable, Sequence


def nearest(name: object, known: Iterable[str]) -> str | None:
    """The known name that ``name`` most likely stands for, in any case, or None if none is near."""
    lower = {each.lower(): each for each in known}
    matches = difflib.get_close_matches(str(name).lower(), lower, n=1, cutoff=0.6)
    return lower[matches[0]] if matches else None


def did_you_mean(name: object, known: Iterable[str], otherwise: str = "") -> str:
    """The end of a message: ``; did you mean X?``, or ``; `` and ``otherwise``, if that says something."""
    near = nearest(name, known)
    way_out = f"did you mean {near}?" if near else otherwise
    return f"; {way_out}" if way_out else ""


def and_more(names: Sequence[str], num_shown: int = 1, separator: str = ", ") -> str:
    """``a``, or ``a and 2 more``."""
    shown, rest = separator.join(names[:num_shown]), len(names) - num_shown
    return f"{shown} and {rest} more" if rest > 0 else shown


def lines_and_more(lines: Sequence[str], num_shown: int, indent: str = "") -> str:
    """A line each, and of those beyond ``num_shown`` how many there are."""
    more = [f"{indent}... and {len(lines) - num_shown} more"] if len(lines) > num_shown else []
    return "\n".join([*(indent + line for line in lines[:num_shown]), *more])


def human_bytes(num_bytes: float) -> str:
    """1536 as ``1.5 KiB``."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} bytes" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def short(value: object, length: int = 80) -> str:
    """``repr``, cut to so many characters."""
    text = repr(value)
    return text if len(text) <= length else f"{text[: length - 3]}..."
