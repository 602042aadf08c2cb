"""``composer-fsdp2 checkpoint verify PATH``: check a checkpoint against its checksums or another checkpoint."""

import logging
import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from composer_fsdp2.cli.models import CheckpointPath, Trust
from composer_fsdp2.cli.options import Command
from composer_fsdp2.cli.printing import bytes_bar, print_json, refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify(Command):
    """Check a checkpoint's structure, and its content by the CRC32s that torch wrote.

    Exit code: 1 if it is damaged, or differs from OTHER in more than clocks, paths and run names; 2 if no content could
    be checked (safetensors have no checksums; use --against).
    """

    path: CheckpointPath
    against: Annotated[
        str | None, typer.Option("--against", metavar="OTHER", help="Compare with another checkpoint, of any layout.")
    ] = None
    rtol: Annotated[float, typer.Option("--rtol", min=0.0, help="Relative tolerance of --against.")] = 0.0
    atol: Annotated[float, typer.Option("--atol", min=0.0, help="Absolute tolerance of --against.")] = 0.0
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False
    trust: Trust = False

    def __call__(self) -> None:
        # Imported here: torch takes seconds, and --help does not need it.
        from composer_fsdp2.checkpoint.verify.verification import verify_checkpoint
        from composer_fsdp2.errors import CheckpointError

        logging.basicConfig(
            format="composer-fsdp2: %(message)s", level=logging.WARNING
        )  # --trust logs each class that it runs
        try:
            with bytes_bar("verify") as progress:
                report = verify_checkpoint(
                    self.path, self.against, rtol=self.rtol, atol=self.atol, trust=self.trust, progress=progress
                )
        except CheckpointError as error:
            refuse(error)
        if self.as_json:
            print_json(report.to_json())
        else:
            print(report)
        sys.exit(1 if not report.ok else 0 if report.is_content_checked else 2)
