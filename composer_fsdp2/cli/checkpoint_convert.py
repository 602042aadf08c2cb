"""``composer-fsdp2 checkpoint convert SOURCE DESTINATION --to LAYOUT``: a checkpoint in another layout."""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import typer

from composer_fsdp2.cli.models import MODEL_HELP, TRUST_HELP, model_from

_FILES_HELP = "Number of files to split the tensors into; by default each stays below 5 GB."
_LAYOUTS = ("monolithic", "dcp", "safetensors")
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def convert(
    context: typer.Context,
    source: str = typer.Argument(metavar="SOURCE", help="A checkpoint of any layout; it is left as it is."),
    destination: str = typer.Argument(metavar="DESTINATION", help="What to write; must not exist."),
    to: str = typer.Option(
        ...,
        "--to",
        metavar="LAYOUT",
        help=f"{', '.join(_LAYOUTS[:-1])} or {_LAYOUTS[-1]}.",
        autocompletion=lambda: _LAYOUTS,
    ),
    optimizer: bool = typer.Option(True, "--optimizer/--no-optimizer", help="Keep the optimizer's state."),
    dtype: str = typer.Option(
        None,
        "--dtype",
        help="Cast the weights: bf16, fp16, fp32, or torch's name.",
        autocompletion=lambda: _DTYPES,
    ),
    files: int = typer.Option(None, "--files", min=1, help=_FILES_HELP),
    include: list[str] = typer.Option(None, "--include", metavar="PATTERN", help="Only weights like model.blocks.*"),
    model: str = typer.Option(
        None,
        "--model",
        metavar="FUNCTION",
        help=f"Needed for flat parameters, which have no names. {MODEL_HELP}",
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print what would be written, and change nothing."),
    trust: bool = typer.Option(False, "--trust", help=TRUST_HELP),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> None:
    """Write a checkpoint in another layout: monolithic (one .pt), dcp (a sharded folder) or safetensors.

    Needs a few megabytes of memory, whatever the size, and resumes if it was killed.

    Exit code: 1 if it could not be converted, 2 if there is no checkpoint or an option is wrong.
    """
    options: dict[str, Any] = {"to": to, "optimizer": optimizer, "files": files, "include": include or None}
    options |= {"dry_run": dry_run, "trust": trust}
    context.obj.append(partial(_convert, source, destination, dtype, model, as_json, options))


def _convert(
    source: str, destination: str, dtype: str | None, model: str | None, as_json: bool, options: dict[str, Any]
) -> None:
    # Here and not above: torch takes seconds, which --help need not wait for.
    from composer_fsdp2.checkpoint.convert.conversion import ConversionReport, convert_checkpoint
    from composer_fsdp2.checkpoint.open import NotACheckpointError
    from composer_fsdp2.errors import CheckpointError, ConfigError

    logging.basicConfig(format="composer-fsdp2: %(message)s", level=logging.WARNING)
    if os.environ.get("RANK", "0") != "0":  # under torchrun one process converts, in threads
        return
    code = 0
    try:
        options |= {"dtype": _dtype(dtype), "model": model_from(model)}
        with _progress() as progress:
            done = convert_checkpoint(source, destination, progress=progress, **options)
        if as_json:
            print(json.dumps(done.as_dict(), indent=2))
        elif isinstance(done, ConversionReport):
            print(f"{done.destination}: {done.num_tensors} tensors, {done.written_bytes} bytes, {done.seconds:.1f} s")
            if done.unchecked_bytes:
                print(f"{done.unchecked_bytes} bytes have no CRC32 in the source that they could be checked against")
        else:
            print(done)
    except (CheckpointError, ConfigError) as error:
        print(f"composer-fsdp2: {error}", file=sys.stderr)
        code = 2 if isinstance(error, NotACheckpointError | ConfigError) else 1
    sys.exit(code)


def _dtype(name: str | None) -> Any:
    import torch

    from composer_fsdp2.errors import ConfigError

    if name is None:
        return None
    dtype = getattr(torch, _DTYPES.get(name, name), None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"--dtype {name}: no dtype of torch; use one of {', '.join(_DTYPES)}")
    return dtype


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar with bytes and time left, on a terminal; else nothing."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("convert", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
