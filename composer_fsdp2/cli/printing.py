"""Print the output of commands: file contents, reports, JSON, errors, and a progress bar."""

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TextIO


def print_text(text: str | bytes) -> None:
    """Print a file's contents as UTF-8 without converting line endings, regardless of locale.

    Another encoding would change non-ASCII paths in the contents.
    """
    content = text.encode() if isinstance(text, str) else text
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.flush()
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
    else:  # closed, or replaced by a caller
        print(content.decode(errors="replace"), end="")


# Outcome as its own column, or a line of a diff -> rich's style.
_STYLES = {
    r"(?<=  )(needs decision|unsupported)(?=  |: |$)": "bold red",
    r"(?<=  )approximate(?=  |: |$)": "yellow",
    r"(?<=  )(exact|unneeded)(?=  |: |$)": "green",
}
_DIFF_STYLES = {r"^\+.*$": "green", r"^-.*$": "red", r"^@@.*$": "cyan"}


def print_report(text: str, *, stream: TextIO | None = None, is_diff: bool = False) -> None:
    """Print a report or a diff to ``stream`` (default: standard output), in colour on a terminal."""
    stream = sys.stdout if stream is None else stream
    if stream is None or not stream.isatty():
        print_text(text) if is_diff else print(text, file=stream)
        return
    from rich.console import Console  # imported here: a redirected report does not need it
    from rich.text import Text

    coloured = Text(text)
    for pattern, style in (_DIFF_STYLES if is_diff else _STYLES).items():
        coloured.highlight_regex(re.compile(pattern, re.MULTILINE), style)
    Console(file=stream).print(coloured, soft_wrap=True, end="" if is_diff else "\n")


def print_json(value: Any) -> None:
    print_text(json.dumps(value, indent=2) + "\n")


def refuse(why: object, code: int = 2) -> NoReturn:
    """Exit after one line on standard error."""
    print(f"composer-fsdp2: {why}", file=sys.stderr)
    sys.exit(code)


@contextlib.contextmanager
def bytes_bar(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show a progress bar on stderr; yield a function to call with (bytes done, total bytes), or None without a
    terminal.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
