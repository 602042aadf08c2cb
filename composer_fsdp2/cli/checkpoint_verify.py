"""``composer-fsdp2 checkpoint verify PATH``: whether a checkpoint is what was written, or equals another one."""

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial

import typer

from composer_fsdp2.cli.models import TRUST_HELP


def verify(
    context: typer.Context,
    path: str = typer.Argument(metavar="PATH", help="A file, a folder, a link to one, or a run folder (its newest)."),
    against: str = typer.Option(
        None, "--against", metavar="OTHER", help="Compare with another checkpoint, of any layout."
    ),
    rtol: float = typer.Option(0.0, "--rtol", min=0.0, help="Relative tolerance of --against."),
    atol: float = typer.Option(0.0, "--atol", min=0.0, help="Absolute tolerance of --against."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
    trust: bool = typer.Option(False, "--trust", help=TRUST_HELP),
) -> None:
    """Check a checkpoint's structure, and its content by the CRC32s that torch wrote.

    Exit code: 1 if it is damaged or differs from OTHER, 2 if there is nothing that could be checked.
    """
    context.obj.append(partial(_verify, path, against, rtol=rtol, atol=atol, as_json=as_json, trust=trust))


def _verify(path: str, against: str | None, *, rtol: float, atol: float, as_json: bool, trust: bool) -> None:
    # Here and not above: torch takes seconds, which --help need not wait for.
    from composer_fsdp2.checkpoint.verify.verification import verify_checkpoint
    from composer_fsdp2.errors import CheckpointError

    logging.basicConfig(format="composer-fsdp2: %(message)s", level=logging.WARNING)  # what --trust runs
    try:
        with _progress() as progress:
            report = verify_checkpoint(path, against, rtol=rtol, atol=atol, trust=trust, progress=progress)
    except CheckpointError as error:
        print(f"composer-fsdp2: {error}", file=sys.stderr)
        sys.exit(2)
    print(json.dumps(report.to_json(), indent=2) if as_json else report)
    sys.exit(0 if report.ok else 1)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """A bar with bytes and time left on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("verify", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
