"""``composer-fsdp2 checkpoint convert SOURCE DESTINATION --to LAYOUT``: write a checkpoint in another layout."""

import logging
import os
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from composer_fsdp2.cli.models import MODEL_HELP, Trust, model_from
from composer_fsdp2.cli.options import Command
from composer_fsdp2.cli.printing import bytes_bar, print_json, refuse

_LAYOUTS = ("monolithic", "dcp", "safetensors")
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Convert(Command):
    """Write a checkpoint in another layout: monolithic (one .pt), dcp (a sharded folder) or safetensors.

    Needs a few megabytes of memory at any size; a killed conversion resumes.

    Exit code: 1 if the conversion fails, 2 if SOURCE has no checkpoint or an option is wrong.
    """

    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A checkpoint of any layout; not changed.")]
    destination: Annotated[str, typer.Argument(metavar="DESTINATION", help="File or folder to write; must not exist.")]
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="LAYOUT",
            help=f"{', '.join(_LAYOUTS[:-1])} or {_LAYOUTS[-1]}.",
            autocompletion=lambda: _LAYOUTS,
        ),
    ]
    optimizer: Annotated[bool, typer.Option("--optimizer/--no-optimizer", help="Keep the optimizer's state.")] = True
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", help="Cast the weights: bf16, fp16, fp32, or torch's name.", autocompletion=lambda: _DTYPES
        ),
    ] = None
    files: Annotated[
        int | None,
        typer.Option(
            "--files", min=1, help="Number of files to split the tensors into; by default each stays below 5 GB."
        ),
    ] = None
    include: Annotated[
        list[str] | None,
        typer.Option(
            "--include",
            metavar="PATTERN",
            help="Keep only weights whose names match, e.g. model.blocks.*; may be repeated.",
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="FUNCTION", help=f"Needed for flat parameters, which have no names. {MODEL_HELP}"
        ),
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be written, and change nothing.")] = False
    trust: Trust = False
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False

    def __call__(self) -> None:
        # Imported here: torch takes seconds, and --help does not need it.
        from composer_fsdp2.checkpoint.convert.conversion import ConversionReport, convert_checkpoint
        from composer_fsdp2.checkpoint.open import NotACheckpointError
        from composer_fsdp2.errors import CheckpointError, ConfigError

        logging.basicConfig(format="composer-fsdp2: %(message)s", level=logging.WARNING)
        if os.environ.get("RANK", "0") != "0":  # under torchrun one process converts, in threads
            return
        try:
            dtype, model = _dtype(self.dtype), model_from(self.model)
            with bytes_bar("convert") as progress:
                done = convert_checkpoint(
                    self.source,
                    self.destination,
                    to=self.to,
                    optimizer=self.optimizer,
                    dtype=dtype,
                    files=self.files,
                    include=self.include or None,
                    model=model,
                    dry_run=self.dry_run,
                    trust=self.trust,
                    progress=progress,
                )
        except (CheckpointError, ConfigError) as error:
            refuse(error, 2 if isinstance(error, NotACheckpointError | ConfigError) else 1)
        if self.as_json:
            print_json(done.as_dict())
        elif isinstance(done, ConversionReport):
            print(f"{done.destination}: {done.num_tensors} tensors, {done.written_bytes} bytes, {done.seconds:.1f} s")
            if done.unchecked_bytes:
                print(f"{done.unchecked_bytes} bytes could not be checked: the source has no CRC32 of them")
        else:
            print(done)


def _dtype(name: str | None) -> Any:
    import torch

    from composer_fsdp2.errors import ConfigError

    if name is None:
        return None
    dtype = getattr(torch, _DTYPES.get(name, name), None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"--dtype {name}: no dtype of torch; use one of {', '.join(_DTYPES)}")
    return dtype
