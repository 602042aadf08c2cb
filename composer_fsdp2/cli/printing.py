"""What verbs print beside prose: texts of files, JSON, errors, and a bar."""

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn


def print_text(text: str | bytes) -> None:
    """Print the text of a file with the ends of its lines as they are, in UTF-8, whatever the locale or the terminal.

    In another encoding a path in it would name another folder.
    """
    content = text.encode() if isinstance(text, str) else text
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.flush()
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
    else:  # closed, or a caller's
        print(content.decode(errors="replace"), end="")


def print_json(value: Any) -> None:
    print_text(json.dumps(value, indent=2) + "\n")


def refuse(why: object, code: int = 2) -> NoReturn:
    """End with one line on standard error."""
    print(f"composer-fsdp2: {why}", file=sys.stderr)
    sys.exit(code)


@contextlib.contextmanager
def bytes_bar(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar with bytes and time left on stderr, told of bytes done and to do; None where that is no terminal."""
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
