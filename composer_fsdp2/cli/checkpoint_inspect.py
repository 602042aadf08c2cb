"""``composer-fsdp2 checkpoint inspect PATH``: print a checkpoint's layout, writer and tensors from its metadata."""

import logging
import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from composer_fsdp2.cli.models import MODEL_HELP, CheckpointPath, Trust, model_from
from composer_fsdp2.cli.options import Command
from composer_fsdp2.cli.printing import print_json, refuse

_SHOWN_TENSORS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect(Command):
    """Print the layout, writer and contents of a checkpoint, without reading its tensors or running its pickles.

    Exit code: 1 if the checkpoint is damaged, incomplete, untrusted or does not fit the model, 2 if PATH has none.
    """

    path: CheckpointPath
    tensors: Annotated[bool, typer.Option("--tensors", help=f"List all tensors, not the first {_SHOWN_TENSORS}.")] = (
        False
    )
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="FUNCTION", help=f"Report whether the weights load into this model. {MODEL_HELP}"
        ),
    ] = None
    trust: Trust = False

    def __call__(self) -> None:
        # Imported here: torch takes seconds, and --help does not need it.
        from composer_fsdp2.checkpoint.describe import as_data, as_text
        from composer_fsdp2.checkpoint.inspect import inspect_checkpoint
        from composer_fsdp2.checkpoint.open import NotACheckpointError
        from composer_fsdp2.errors import CheckpointError, ConfigError

        logging.basicConfig(
            format="composer-fsdp2: %(message)s", level=logging.WARNING
        )  # --trust logs each class that it runs
        try:
            inventory = inspect_checkpoint(self.path, model=model_from(self.model), trust=self.trust)
            if self.as_json:
                print_json(as_data(inventory))
            else:
                print(as_text(inventory, max_tensors=None if self.tensors else _SHOWN_TENSORS))
        except (CheckpointError, ConfigError) as error:
            refuse(error, 2 if isinstance(error, NotACheckpointError | ConfigError) else 1)
        if inventory.fit is not None and not inventory.fit.fits:
            sys.exit(1)
