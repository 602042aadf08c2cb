"""``composer-fsdp2 checkpoint inspect PATH``: what a checkpoint is, from its metadata."""

import json
import logging
import sys
from functools import partial

import typer

from composer_fsdp2.cli.models import MODEL_HELP, TRUST_HELP, model_from

_SHOWN_TENSORS = 20


def inspect(
    context: typer.Context,
    path: str = typer.Argument(metavar="PATH", help="A file, a folder, a link to one, or a run folder (its newest)."),
    tensors: bool = typer.Option(False, "--tensors", help=f"List all tensors, not the first {_SHOWN_TENSORS}."),
    as_json: bool = typer.Option(False, "--json", help="Print everything as JSON."),
    model: str = typer.Option(
        None, "--model", metavar="FUNCTION", help=f"Report whether the weights load into this model. {MODEL_HELP}"
    ),
    trust: bool = typer.Option(False, "--trust", help=TRUST_HELP),
) -> None:
    """Tell what a checkpoint holds and who wrote it, without reading its tensors or running its pickles.

    Exit code: 1 if it is a checkpoint that is damaged, incomplete, not trusted or does not fit the model, 2 if there is
    none.
    """
    context.obj.append(partial(_inspect, path, tensors=tensors, as_json=as_json, model=model, trust=trust))


def _inspect(path: str, *, tensors: bool, as_json: bool, model: str | None, trust: bool) -> None:
    # Here and not above: torch takes seconds, which --help need not wait for.
    from composer_fsdp2.checkpoint.describe import as_data, as_text
    from composer_fsdp2.checkpoint.inspect import inspect_checkpoint
    from composer_fsdp2.checkpoint.open import NotACheckpointError
    from composer_fsdp2.errors import CheckpointError, ConfigError

    logging.basicConfig(format="composer-fsdp2: %(message)s", level=logging.WARNING)  # what --trust runs
    try:
        inventory = inspect_checkpoint(path, model=model_from(model), trust=trust)
        if as_json:
            print(json.dumps(as_data(inventory), indent=2))
        else:
            print(as_text(inventory, max_tensors=None if tensors else _SHOWN_TENSORS))
    except (CheckpointError, ConfigError) as error:
        print(f"composer-fsdp2: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, NotACheckpointError | ConfigError) else 1)
    if inventory.fit is not None and not inventory.fit.fits:
        sys.exit(1)
