"""``composer-fsdp2 migrate FILE|DIR ...``: configurations for FSDP2, with comments kept and every key accounted for."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from composer_fsdp2.errors import ComposerFSDP2Error
from composer_fsdp2.migration.dialects import DIALECTS
from composer_fsdp2.migration.targets import TARGETS

if TYPE_CHECKING:
    from composer_fsdp2.migration.files import FileResult

# typer shows an enum's values as the choices.
Dialect = enum.Enum("Dialect", {name: name for name in DIALECTS})  # type: ignore[misc]
To = enum.Enum("To", {name: name for name in TARGETS})  # type: ignore[misc]


class Show(enum.Enum):
    """What goes to standard output."""

    TEXT = "text"
    DIFF = "diff"
    REPORT = "report"
    JSON = "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one run of the verb."""

    to: str
    dialect: str | None
    at: str | None
    write: bool
    output: Path | None
    show: Show
    report: Path | None
    force: bool
    jobs: int


def migrate(
    context: typer.Context,
    paths: list[Path] = typer.Argument(metavar="FILE|DIR ...", help="YAML files, or folders of them."),
    to: To = typer.Option("composer", "--to", help="The system whose FSDP2 configuration to write."),
    dialect: Dialect = typer.Option(
        None, "--dialect", help="The system that the configuration is for; detected if not given."
    ),
    at: str = typer.Option(None, "--at", metavar="PATH", help="Where the section is, as in trainer.fsdp_config."),
    write: bool = typer.Option(False, "--write", help="Change the files in place; the original is kept as FILE.bak."),
    output: Path = typer.Option(None, "-o", "--output", metavar="PATH", help="Write to this file or folder."),
    diff: bool = typer.Option(False, "--diff", help="Print what would change."),
    check: bool = typer.Option(False, "--check", help="Print the report, and change nothing."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
    report: Path = typer.Option(None, "--report", metavar="FILE.md", help="Write the report to a file, too."),
    force: bool = typer.Option(False, "--force", help="Write also where something needs a decision."),
    jobs: int = typer.Option(0, "--jobs", min=0, help="Processes for many files; 0 for one a core."),
) -> None:
    """Turn configurations for FSDP1 into ones for FSDP2, and say what became of each key.

    Without --write or -o the new text goes to standard output and the report to standard error. In a folder, files
    that configure no sharding are passed over.

    Exit code: 0 if every key has its counterpart or needs none, 1 if something needs a decision or cannot be expressed
    (nothing is written then, without --force), 2 if a file cannot be used.
    """
    outputs = [name for name, value in (("--diff", diff), ("--check", check), ("--json", as_json)) if value]
    if len(outputs) > 1 or (write and output is not None) or (check and (write or output is not None)):
        raise typer.BadParameter(
            "choose one of --diff, --check and --json, and one of --write and -o; --check writes nothing"
        )
    show = Show.DIFF if diff else Show.JSON if as_json else Show.REPORT if check or write or output else Show.TEXT
    if show is Show.TEXT and (len(paths) > 1 or paths[0].is_dir()):
        raise typer.BadParameter("several files need --write, -o FOLDER, --diff, --check or --json")
    options = Options(
        to=to.value,
        dialect=dialect.value if dialect else None,
        at=at,
        write=write,
        output=output,
        show=show,
        report=report,
        force=force,
        jobs=jobs,
    )
    context.obj.append(partial(_migrate, paths, options))


def _migrate(paths: Sequence[Path], options: Options) -> None:
    # Here and not above: --help and completion need no parser.
    from composer_fsdp2.migration.files import Destination, migrate_files, sources_of

    destination = Destination(in_place=options.write, output=options.output, force=options.force)
    results = []
    try:
        sources = sources_of(paths, output=options.output)
        work = migrate_files(
            sources, destination, to=options.to, dialect=options.dialect, at=options.at, jobs=options.jobs
        )
        for result in _with_progress(work, len(sources)):
            results.append(result)
            _show(result, options, is_one=len(sources) == 1)
        if options.show is Show.JSON:
            print(json.dumps([result.to_json() for result in results], indent=2))
        if options.report is not None:
            options.report.write_text("\n\n".join(result.markdown() for result in results) + "\n")
    except ComposerFSDP2Error as error:
        _fail(str(error))
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        _fail(f"{error.filename}: {error.strerror}")
    if len(results) > 1:
        print(_summary(results), file=sys.stderr)
        if options.show is Show.REPORT and options.report is None:
            print("--report FILE.md has what became of every key", file=sys.stderr)
    sys.exit(max(result.exit_code for result in results))


def _fail(message: str) -> NoReturn:
    print(f"composer-fsdp2: {message}", file=sys.stderr)
    sys.exit(2)


def _show(result: FileResult, options: Options, *, is_one: bool) -> None:
    """Print everything on one file; on several only what is left to decide, since --report and --json have the rest."""
    if result.migration is None:
        if not result.is_skipped:
            print(f"composer-fsdp2: {result.error}", file=sys.stderr)
    elif options.show is Show.TEXT:
        print(result.migration, file=sys.stderr)
        if result.exit_code == 0 or options.force:
            print(result.migration.after, end="")
        else:
            print("composer-fsdp2: something needs a decision; --force prints the text all the same", file=sys.stderr)
    elif options.show is Show.DIFF:
        print(result.migration.diff(), end="")
        for finding in result.migration.blocking:
            print(finding, file=sys.stderr)
    elif options.show is Show.REPORT:
        if is_one:
            print(result.migration)
        print(f"{result.path}: {result.done}")
        for finding in () if is_one else result.migration.blocking:
            print(f"  {finding}")


def _summary(results: Sequence[FileResult]) -> str:
    counts = {code: sum(result.exit_code == code and not result.is_skipped for result in results) for code in (0, 1, 2)}
    parts = [
        f"{counts[0]} without anything to decide",
        f"{counts[1]} with",
        f"{counts[2]} unusable",
        f"{sum(result.is_skipped for result in results)} that configure no sharding",
    ]
    return f"{len(results)} files: {', '.join(parts)}"


def _with_progress(results: Iterator[FileResult], total: int) -> Iterator[FileResult]:
    """A bar on stderr, if that is a terminal."""
    if total > 1:
        from rich.console import Console  # here and not above: one file needs no bar
        from rich.progress import track

        console = Console(stderr=True)
        if console.is_terminal:
            results = track(results, "migrate", total=total, console=console, transient=True)  # type: ignore[assignment]
    yield from results
