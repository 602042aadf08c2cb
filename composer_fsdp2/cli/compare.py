"""``composer-fsdp2 compare FILE|SCRIPT``: the same run on FSDP1 and on FSDP2, side by side, with a verdict."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from composer_fsdp2.cli.options import Command, schema_option
from composer_fsdp2.cli.printing import print_json, refuse
from composer_fsdp2.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Compare(Command):
    """Train a file, as it is, on FSDP1, on FSDP2 and on FSDP1 again, and decide whether it is the same run.

    Compares the data, losses, gradient norms before clipping, parameters and optimizer state; the second run on FSDP1
    shows how far the run is from itself. Nothing is saved or logged but the report.

    Exit code:

    0: same.

    1: different; the report names what and where.

    2: a run failed or was interrupted, or an option is wrong.
    """

    # Named as the fields of ``comparing.job.Options``, which does without typer.
    file: Annotated[
        str, typer.Argument(metavar="YAML|SCRIPT", help="An LLM Foundry training YAML, or a script with a Trainer.")
    ]
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="What overrides the YAML's keys; after -- a script's own arguments."
        ),
    ] = None
    num_ranks: Annotated[int, typer.Option("-n", "--ranks", min=2, help="Ranks on this machine, one for each GPU.")] = 2
    batches: Annotated[int, typer.Option("--batches", min=1, help="How many batches to train.")] = 10
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="How often FSDP1 is run again, for the noise.")] = 1
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of random numbers, where the file gives none.")] = 17
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0.0, help="The largest relative distance that is no difference.")
    ] = 1e-6
    load_path: Annotated[str, typer.Option("--load-path", metavar="CHECKPOINT", help="Begin from this checkpoint.")] = (
        ""
    )
    is_deterministic: Annotated[
        bool, typer.Option("--deterministic/--any-kernels", help="On GPUs, only kernels whose results repeat.")
    ] = True
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FOLDER", help="Write the reports and logs there: a new folder."),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False
    json_schema: Annotated[bool, schema_option("composer_fsdp2.comparing.outcome")] = False

    def __post_init__(self) -> None:
        if not Path(self.file).is_file():
            raise typer.BadParameter(f"no such file: {self.file}", param_hint="YAML|SCRIPT")

    def __call__(self) -> None:
        from composer_fsdp2.comparing.comparison import compare
        from composer_fsdp2.comparing.job import Options

        given = {field.name: getattr(self, field.name) for field in fields(Options)}
        options = Options(**given | {"arguments": tuple(self.arguments or ())})
        try:
            with _progress(self) as show:
                outcome = compare(options, self.output, show)
        except (ConfigError, OSError) as error:
            refuse(error)
        except KeyboardInterrupt:  # before the first run
            refuse("interrupted")
        if self.as_json:
            print_json(outcome.to_json())
        elif outcome.quantities:
            print(outcome.summary())
        if not outcome.quantities:
            print(f"composer-fsdp2: {outcome.error or outcome.headline}", file=sys.stderr)
        if self.output is not None:
            print(f"report: {self.output / 'report.md'}", file=sys.stderr)
        elif outcome.error:
            print("with -o FOLDER the logs are kept", file=sys.stderr)
        sys.exit(outcome.verdict.exit_code)


@contextlib.contextmanager
def _progress(options: Compare) -> Iterator[Callable[[str, int], None]]:
    """Yields a function that shows a run's progress: a bar on a terminal, else a line when it begins."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}

    def say(title: str, done: int) -> None:
        if not done:
            print(f"{title}: {options.batches} batches on {options.num_ranks} ranks", file=sys.stderr)

    if not console.is_terminal:
        yield say
        return
    with Progress(*columns, console=console) as bars:

        def show(title: str, done: int) -> None:
            if title not in tasks:
                tasks[title] = bars.add_task(f"{title}: starting {options.num_ranks} ranks", total=options.batches)
            if done:
                bars.update(tasks[title], completed=done, description=f"{title}: batches")

        yield show
