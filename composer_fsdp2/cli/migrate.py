"""``composer-fsdp2 migrate FILE|DIR|-``: configurations for FSDP2, with comments kept and every key accounted for."""

from __future__ import annotations

import enum
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from composer_fsdp2.errors import ComposerFSDP2Error, ConfigError
from composer_fsdp2.migration.dialects import DIALECTS
from composer_fsdp2.migration.targets import TARGETS

if TYPE_CHECKING:
    from composer_fsdp2.migration.files import FileResult
    from composer_fsdp2.migration.report import Report

# typer shows an enum's values as the choices.
Dialect = enum.Enum("Dialect", {name: name for name in DIALECTS})  # type: ignore[misc]
To = enum.Enum("To", {name: name for name in TARGETS})  # type: ignore[misc]
Format = enum.Enum("Format", {name: name for name in ("yaml", "toml", "json")})  # type: ignore[misc]


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
    suffix: str
    write: bool
    output: Path | None
    show: Show
    report: Path | None
    force: bool
    fail_on_change: bool
    allow_unconfigured: bool
    jobs: int

    @property
    def writes(self) -> bool:
        return self.write or self.output is not None


def _print_schema(is_asked: bool) -> None:
    if is_asked:
        from composer_fsdp2.migration.report import SCHEMA

        print(SCHEMA.read_text(), end="")
        raise typer.Exit


def migrate(
    context: typer.Context,
    names: list[str] = typer.Argument(
        metavar="FILE|DIR|- ...", help="YAML, TOML and JSON files, folders of them, or - for standard input."
    ),
    to: To = typer.Option("composer", "--to", help="The system whose FSDP2 configuration to write."),
    dialect: Dialect = typer.Option(
        None, "--dialect", help="The system that the configuration is for; detected if not given."
    ),
    at: str = typer.Option(None, "--at", metavar="PATH", help="Where the section is, as in trainer.fsdp_config."),
    file_format: Format = typer.Option(
        None, "--format", help="The format of the files that are named; by their endings, or by what - holds."
    ),
    write: bool = typer.Option(False, "--write", help="Change the files in place; the original is kept as FILE.bak."),
    output: Path = typer.Option(None, "-o", "--output", metavar="PATH", help="Write to this file or folder."),
    diff: bool = typer.Option(False, "--diff", help="Print what would change."),
    check: bool = typer.Option(False, "--check", help="Print the report, and change nothing."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as one JSON object."),
    json_schema: bool = typer.Option(
        False, "--json-schema", callback=_print_schema, is_eager=True, help="Print the JSON schema of that object."
    ),
    report: Path = typer.Option(None, "--report", metavar="FILE.md", help="Write the report to a file, too."),
    force: bool = typer.Option(False, "--force", help="Write also where something needs a decision."),
    fail_on_change: bool = typer.Option(
        False, "--fail-on-change", help="Exit with 1 where a file would change, or did."
    ),
    allow_unconfigured: bool = typer.Option(
        False,
        "--allow-unconfigured",
        help="Pass over named files without a section, too; those of a folder always are.",
    ),
    jobs: int = typer.Option(0, "--jobs", min=0, help="Processes for many files; 0 for one a core."),
) -> None:
    """Turn configurations for FSDP1 into ones for FSDP2, and say what became of each key.

    A file of Composer, LLM Foundry, Hugging Face, axolotl, ROLL or TorchTitan is recognized, and becomes one for
    Composer, or for the system that --to names, which may be its own. Without --write or -o the new text goes to
    standard output and the report to standard error. In a folder, files that configure no sharding are passed over.

    Of each key the report says what becomes of it: exact, approximate (and how the run differs), unneeded, needs
    decision or unsupported. (implicit) is what the old run did without a key; a name in brackets is what the new one
    lacks or does in its own way.

    Exit code, the largest of all files':

    0: every key has its counterpart, or needs none.

    1: something needs a decision or cannot be expressed (nothing is written then, without --force); with
    --fail-on-change also where a file would change.

    2: a file cannot be used, or an option is wrong.
    """
    if (diff and (check or as_json)) or (write and output is not None) or (check and (write or output is not None)):
        raise typer.BadParameter(
            "choose one of --diff, --check and --json, and one of --write and -o; --check writes nothing"
        )
    show = Show.DIFF if diff else Show.JSON if as_json else Show.REPORT if check or write or output else Show.TEXT
    if "" in names:  # as from an unset variable; as a path it would be the folder that one stands in
        raise typer.BadParameter("a name is empty; . is this folder")
    if output is not None and str(output) == "-":
        raise typer.BadParameter("without -o the new text goes to standard output; ./- is a file of that name")
    if show is Show.TEXT and (len(names) > 1 or (names[0] != "-" and Path(names[0]).is_dir())):
        raise typer.BadParameter("several files need --write, -o FOLDER, --diff, --check or --json")
    options = Options(
        to=to.value,
        dialect=dialect.value if dialect else None,
        at=at,
        suffix=f".{file_format.value}" if file_format else "",
        write=write,
        output=output,
        show=show,
        report=report,
        force=force,
        fail_on_change=fail_on_change,
        allow_unconfigured=allow_unconfigured,
        jobs=jobs,
    )
    context.obj.append(partial(_migrate, names, options))


def _migrate(names: Sequence[str], options: Options) -> None:
    report = _report_on(names, options)
    if options.show is Show.JSON:
        print(json.dumps(report.to_json(), indent=2))
    elif len(report.results) == 1 and not report.error:
        _show_one(report.results[0], options)
    else:
        _show_several(report, options)
    print(end="", flush=True)  # here, where somebody who has seen enough is expected
    _tell(report, options)
    sys.exit(report.exit_code)


def _report_on(names: Sequence[str], options: Options) -> Report:
    """Do the work; nothing is printed but a bar, which would stand between the lines."""
    # Here and not above: --help and completion need no parser.
    from composer_fsdp2.migration.files import STANDARD_INPUT, Destination, migrate_files, sources_of
    from composer_fsdp2.migration.report import Report

    results: list[FileResult] = []
    try:
        paths = [STANDARD_INPUT if name == "-" else Path(name) for name in names]  # ./- is a file of that name
        if options.report is not None:
            _check_report(options.report)
        sources = sources_of(paths, output=options.output, standard_input=_standard_input)
        work = migrate_files(
            sources,
            Destination(in_place=options.write, output=options.output, force=options.force),
            to=options.to,
            dialect=options.dialect,
            at=options.at,
            suffix=options.suffix,
            allow_unconfigured=options.allow_unconfigured,
            jobs=options.jobs,
        )
        results.extend(_with_progress(work, len(sources)))
        if options.report is not None:
            options.report.write_text(Report(results=results).markdown(), encoding="utf-8")
        error = ""
    except KeyboardInterrupt:
        error = f"interrupted; files done: {len(results)}"
    except ComposerFSDP2Error as problem:
        error = str(problem)
    except OSError as problem:
        error = f"{problem.filename or options.report}: {problem.strerror}"  # a full disk gives no name
    return Report(results=results, error=error, fails_on_change=options.fail_on_change)


def _standard_input() -> bytes:
    if sys.stdin is None:
        raise ConfigError("- is standard input, which is closed")
    try:
        return sys.stdin.buffer.read()
    except OSError as problem:
        raise ConfigError(f"- is standard input, which cannot be read: {problem.strerror}") from problem


def _check_report(path: Path) -> None:
    """Before anything is written, since a report that nobody gets would be missed most where files were changed."""
    from composer_fsdp2.migration.documents import SUFFIXES

    if not path.parent.is_dir():
        raise ConfigError(f"{path}: No such file or directory")
    if path.is_dir():
        raise ConfigError(f"{path}: Is a directory")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path}: Permission denied")
    if path.suffix.lower() in SUFFIXES:  # and may be a source, or where a result goes
        raise ConfigError(
            f"{path} has a configuration's name, and the report is Markdown; give a name such as report.md"
        )


def _with_progress(results: Iterator[FileResult], total: int) -> Iterator[FileResult]:
    """A bar on stderr, if that is a terminal."""
    if total > 1:
        from rich.console import Console  # here and not above: one file needs no bar
        from rich.progress import track

        console = Console(stderr=True)
        if console.is_terminal:
            results = track(results, "migrate", total=total, console=console, transient=True)  # type: ignore[assignment]
    yield from results


# ---------------------------------------------------------------------------------------------------------------------
# What is printed


def _show_one(result: FileResult, options: Options) -> None:
    """Everything on one file."""
    if result.migration is None:
        if result.is_skipped and options.show is Show.TEXT:
            sys.stdout.buffer.write(result.content)
        return
    if options.show is Show.DIFF:
        print(result.migration.diff(), end="")
    elif options.show is Show.REPORT:
        print(result.migration)
        print(f"{result.path}: {result.done}")
    else:
        print(result.migration, file=sys.stderr)
        if result.exit_code == 0 or options.force:
            print(result.migration.after, end="")


def _show_several(report: Report, options: Options) -> None:
    """A line for each file with something to do or done; what is to decide follows once for all, and --report and
    --json have the rest."""
    for result in report.results:
        if result.migration is None:
            continue
        if options.show is Show.DIFF:
            print(result.migration.diff(), end="")
        elif result.is_changed or result.exit_code:
            print(f"{result.path}: {result.done}")
    for line in _decisions(report) if options.show is Show.REPORT else ():
        print(line)


def _tell(report: Report, options: Options) -> None:
    """What stands beside the output: errors, what to do next, and of several files how many are in which state."""
    for error in report.errors():
        print(f"composer-fsdp2: {error}", file=sys.stderr)
    for line in (_of_one if len(report.results) == 1 else _of_several)(report, options):
        print(line, file=sys.stderr)
    if options.fail_on_change and not options.writes and any(result.is_changed for result in report.results):
        print("composer-fsdp2: what would change still asks for FSDP1; --write changes it", file=sys.stderr)


def _of_one(report: Report, options: Options) -> Iterator[str]:
    (result,) = report.results
    if result.is_skipped:
        yield f"{result.path}: {result.done}"
    if options.show is Show.DIFF:
        yield from _decisions(report)
    if options.show is Show.TEXT and result.exit_code == 1 and not options.force:
        yield "composer-fsdp2: something needs a decision; --force prints the text all the same"


def _of_several(report: Report, options: Options) -> Iterator[str]:
    yield from (result.done for result in report.results if result.is_foreign and result.is_skipped)
    if options.show is Show.DIFF:
        yield from _decisions(report)
    if report.results:
        yield report.summary("written" if options.writes else "would change")
    if report.results and options.show is Show.REPORT and options.report is None:
        yield "--report FILE.md has what became of every key"


def _decisions(report: Report) -> Iterator[str]:
    if found := report.decisions():
        yield f"to decide:\n{found}"
