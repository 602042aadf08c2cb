"""``composer-fsdp2 compare FILE|SCRIPT``: train the same run on FSDP1 and on FSDP2, and compare the results."""

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
    """Train an unchanged file on FSDP1, on FSDP2 and on FSDP1 again, and decide whether the runs are the same.

    Compares data, losses, gradient norms before clipping, parameters and optimizer state; the second FSDP1 run measures
    the run's own noise. The runs save no checkpoints and log to no services; only -o writes files.

    Exit code:

    0: same.

    1: different; the report names the first difference.

    2: a run failed or was interrupted, or an option is wrong.
    """

    # Same names as the fields of ``comparing.job.Options``, which does not import typer.
    file: Annotated[
        str, typer.Argument(metavar="YAML|SCRIPT", help="An LLM Foundry training YAML, or a script with a Trainer.")
    ]
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Override keys of the YAML; after -- the script's own arguments."
        ),
    ] = None
    num_ranks: Annotated[int, typer.Option("-n", "--ranks", min=2, help="Ranks on this machine, one for each GPU.")] = 2
    batches: Annotated[int, typer.Option("--batches", min=1, help="Number of batches to train.")] = 10
    repeat: Annotated[
        int, typer.Option("--repeat", min=1, help="Number of repeated FSDP1 runs, which measure the noise.")
    ] = 1
    seed: Annotated[int, typer.Option("--seed", min=0, help="Random seed, if the file has none.")] = 17
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0.0, help="Largest relative distance that counts as equal.")
    ] = 1e-6
    load_path: Annotated[str, typer.Option("--load-path", metavar="CHECKPOINT", help="Start from this checkpoint.")] = (
        ""
    )
    is_deterministic: Annotated[
        bool, typer.Option("--deterministic/--any-kernels", help="On GPUs, use deterministic kernels only.")
    ] = True
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FOLDER", help="Write reports and logs to this new folder."),
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
            print("-o FOLDER keeps the logs", file=sys.stderr)
        sys.exit(outcome.verdict.exit_code)


@contextlib.contextmanager
def _progress(options: Compare) -> Iterator[Callable[[str, int], None]]:
    """Yield a function that shows the progress of a run: a bar on a terminal, otherwise one line when the run
    starts."""
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
