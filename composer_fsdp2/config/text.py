"""Text for messages: shortened lists, the closest spelling, byte sizes."""

import difflib
import re
import shutil
import sys
from collections.abc import Iterable, Sequence

# Control characters except tab, bidirectional overrides, and unpaired surrogates.
_CONTROL = re.compile("[\x00-\x08\n-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def printable(text: str) -> str:
    """Return the text with line breaks, control characters and invalid characters escaped."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def nearest_names(name: object, known: Iterable[str], num_names: int, *, likeness: float = 0.6) -> list[str]:
    """Return at most ``num_names`` known names that resemble ``name``, ignoring case, best match first.

    Args:
        likeness: The minimum similarity from 0 to 1, as defined by ``difflib``.
    """
    lower = {each.lower(): each for each in known}
    return [lower[match] for match in difflib.get_close_matches(str(name).lower(), lower, num_names, likeness)]


def nearest(name: object, known: Iterable[str]) -> str | None:
    """The closest known name, or None if none is similar."""
    return next(iter(nearest_names(name, known, 1)), None)


def did_you_mean(name: object, known: Iterable[str], otherwise: str = "") -> str:
    """Return the end of an error message: ``; did you mean X?`` if a known name resembles ``name``, else ``;
    otherwise`` or "".
    """
    near = nearest(name, known)
    way_out = f"did you mean {near}?" if near else otherwise
    return f"; {way_out}" if way_out else ""


def and_more(names: Sequence[str], num_shown: int = 1, separator: str = ", ") -> str:
    """``a``, or ``a and 2 more``."""
    shown, rest = separator.join(names[:num_shown]), len(names) - num_shown
    return f"{shown} and {rest} more" if rest > 0 else shown


def lines_and_more(lines: Sequence[str], num_shown: int, indent: str = "") -> str:
    """The first ``num_shown`` lines, and the number of the others."""
    more = [f"{indent}... and {len(lines) - num_shown} more"] if len(lines) > num_shown else []
    return "\n".join([*(indent + line for line in lines[:num_shown]), *more])


def text_width(limit: int) -> int:
    """Return the maximum line length of a report: ``limit``, or the width of a narrower terminal."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return max(40, min(limit, shutil.get_terminal_size((limit, 24)).columns)) if is_terminal else limit


def human_bytes(num_bytes: float) -> str:
    """1536 as ``1.5 KiB``."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} bytes" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def one_line(error: BaseException) -> str:
    """Format an exception of another package on one line, at most 300 characters, to append it to an error message."""
    text = printable(" ".join(f"{type(error).__name__}: {error}".split()))
    text = text.removesuffix(":")  # an error without a message
    return text if len(text) <= 300 else f"{text[:297]}..."


def short(value: object) -> str:
    """``repr``, truncated to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
