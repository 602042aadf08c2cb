"""``composer-fsdp2 compare FILE|SCRIPT``: the same run on FSDP1 and on FSDP2, side by side, with a verdict."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from composer_fsdp2.errors import ConfigError

if TYPE_CHECKING:
    from composer_fsdp2.comparing.comparison import Options


def _print_schema(is_asked: bool) -> None:
    if is_asked:
        from composer_fsdp2.comparing.outcome import SCHEMA

        print(SCHEMA.read_text(), end="")
        raise typer.Exit


def compare(
    context: typer.Context,
    file: str = typer.Argument(metavar="YAML|SCRIPT", help="An LLM Foundry training YAML, or a script with a Trainer."),
    arguments: list[str] = typer.Argument(
        None, metavar="[KEY=VALUE]...", help="What overrides the YAML's keys; after -- a script's own arguments."
    ),
    ranks: int = typer.Option(2, "-n", "--ranks", min=2, help="Ranks on this machine, one for each GPU."),
    batches: int = typer.Option(10, "--batches", min=1, help="How many batches to train."),
    repeat: int = typer.Option(1, "--repeat", min=1, help="How often FSDP1 is run again, for the noise."),
    seed: int = typer.Option(17, "--seed", min=0, help="Of random numbers, where the file gives none."),
    tolerance: float = typer.Option(
        1e-6, "--tolerance", min=0.0, help="The largest relative distance that is no difference."
    ),
    load_path: str = typer.Option("", "--load-path", metavar="CHECKPOINT", help="Begin from this checkpoint."),
    deterministic: bool = typer.Option(
        True, "--deterministic/--any-kernels", help="On GPUs, only kernels whose results repeat."
    ),
    output: Path = typer.Option(None, "-o", "--output", metavar="FOLDER", help="Write the reports and logs there."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as one JSON object."),
    json_schema: bool = typer.Option(
        False, "--json-schema", callback=_print_schema, is_eager=True, help="Print the JSON schema of that object."
    ),
) -> None:
    """Train a file, as it is, on FSDP1, on FSDP2 and on FSDP1 again, and say whether it is the same run.

    Compares the data, losses, gradient norms before clipping, parameters and optimizer state; the second run on FSDP1
    shows how far the run is from itself. Nothing is saved or logged but the report.

    Exit code:

    0: same.

    1: different; the report names what and where.

    2: a run failed or was interrupted, or an option is wrong.
    """
    if not Path(file).is_file():
        raise typer.BadParameter(f"no such file: {file}", param_hint="YAML|SCRIPT")
    from composer_fsdp2.comparing.comparison import Options

    options = Options(
        file=file,
        arguments=tuple(arguments or ()),
        num_ranks=ranks,
        batches=batches,
        repeat=repeat,
        seed=seed,
        tolerance=tolerance,
        load_path=load_path,
        is_deterministic=deterministic,
        output=output,
    )
    context.obj.append(partial(_compare, options, as_json))


def _compare(options: Options, as_json: bool) -> None:
    from composer_fsdp2.comparing.comparison import compare

    try:
        with _progress(options) as show:
            outcome = compare(options, show)
    except (ConfigError, OSError) as error:
        print(f"composer-fsdp2: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # before the first run
        print("composer-fsdp2: interrupted", file=sys.stderr)
        sys.exit(2)
    if as_json:
        print(json.dumps(outcome.to_json(), indent=2))
    elif outcome.judgement is not None:
        print(outcome.summary())
    if outcome.judgement is None:
        print(f"composer-fsdp2: {outcome.error or outcome.headline}", file=sys.stderr)
    if options.output is not None:
        print(f"report: {options.output / 'report.md'}", file=sys.stderr)
    elif outcome.error:
        print("with -o FOLDER the logs are kept", file=sys.stderr)
    sys.exit(outcome.exit_code)


@contextlib.contextmanager
def _progress(options: Options) -> Iterator[Callable[[str, int], None]]:
    """Told of each run's batches: a bar on a terminal, else a line when one begins."""
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
