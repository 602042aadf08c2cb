"""``composer-fsdp2 migrate FILE|DIR|-``: convert configurations to FSDP2, and report the outcome of each key."""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from composer_fsdp2.cli.options import Command, schema_option
from composer_fsdp2.cli.printing import print_json, print_report, print_text
from composer_fsdp2.config.findings import Outcome
from composer_fsdp2.errors import ComposerFSDP2Error, ConfigError
from composer_fsdp2.migration.dialects import DIALECTS
from composer_fsdp2.migration.targets import TARGETS

if TYPE_CHECKING:
    from composer_fsdp2.migration.files import FileResult
    from composer_fsdp2.migration.report import Report

# typer shows an enum's values as the choices; its older releases take defaults that are strings.
Dialect = enum.StrEnum("Dialect", {name: name for name in DIALECTS})  # type: ignore[misc]
To = enum.StrEnum("To", {name: name for name in TARGETS})  # type: ignore[misc]
Format = enum.StrEnum("Format", {name: name for name in ("yaml", "toml", "json")})  # type: ignore[misc]


class Show(enum.Enum):
    """Content of standard output."""

    TEXT = "text"
    DIFF = "diff"
    REPORT = "report"
    JSON = "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Migrate(Command):
    """Convert configurations from FSDP1 to FSDP2, and report the outcome of each key.

    Reads files of Composer, LLM Foundry, Hugging Face, axolotl, ROLL and TorchTitan. The result is for the same system,
    or for the one that --to names. Without --write or -o, standard output gets the new text and standard error the
    report. In a folder, files without a sharding configuration are skipped.

    Outcomes: needs decision, unsupported, approximate (the run differs as described), unneeded, exact. "(implicit)"
    marks a default of the old system without a key in the file, and other names in parentheses mark features that the
    new system lacks or implements differently.

    Exit code, the largest of all files':

    0: every key is exact, approximate or unneeded.

    1: a finding needs a decision or is unsupported (without --force nothing is written); with --fail-on-change also if
    a file would change.

    2: a file cannot be read, a named one has no sharding section, or an option is wrong.
    """

    names: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE|DIR|- ...", help="YAML, TOML and JSON files, folders of them, or - for standard input."
        ),
    ]
    to: Annotated[
        To | None,
        typer.Option("--to", help="The system of the new configuration; default: the file's own."),
    ] = None
    dialect: Annotated[
        Dialect | None,
        typer.Option("--dialect", help="The system of the file; detected by default."),
    ] = None
    at: Annotated[
        str | None, typer.Option("--at", metavar="PATH", help="Path of the section, e.g. trainer.fsdp_config.")
    ] = None
    file_format: Annotated[
        Format | None,
        typer.Option(
            "--format", help="Format of the named files; by default from their suffixes, for - from the text."
        ),
    ] = None
    write: Annotated[
        bool, typer.Option("--write", help="Change the files in place; originals are saved as FILE.bak.")
    ] = False
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="PATH", help="Write to this file or folder.")
    ] = None
    diff: Annotated[bool, typer.Option("--diff", help="Print a unified diff, and change nothing.")] = False
    check: Annotated[bool, typer.Option("--check", "--dry-run", help="Print the report, and change nothing.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False
    json_schema: Annotated[bool, schema_option("composer_fsdp2.migration.report")] = False
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE.md", help="Also write the full report to a file.")
    ] = None
    everything: Annotated[
        bool, typer.Option("--all", help="List exact findings too, and every finding of several files.")
    ] = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the report's errors and decisions.")] = False
    force: Annotated[bool, typer.Option("--force", help="Write also if findings need a decision.")] = False
    fail_on_change: Annotated[
        bool, typer.Option("--fail-on-change", help="Exit with 1 if a file would change or did.")
    ] = False
    allow_unconfigured: Annotated[
        bool,
        typer.Option(
            "--allow-unconfigured", help="Skip named files without a sharding section, as those of a folder are."
        ),
    ] = False
    jobs: Annotated[int, typer.Option("--jobs", min=0, help="Number of processes; 0: one per core.")] = 0

    @property
    def hidden(self) -> tuple[Outcome, ...]:
        """Outcomes whose findings the report of a file only counts."""
        return () if self.everything else (Outcome.EXACT,)

    @property
    def writes(self) -> bool:
        return self.write or self.output is not None

    @property
    def show(self) -> Show:
        if self.diff or self.as_json:
            return Show.DIFF if self.diff else Show.JSON
        return Show.REPORT if self.check or self.writes else Show.TEXT

    def __post_init__(self) -> None:
        if (
            (self.diff and (self.check or self.as_json))
            or (self.write and self.output is not None)
            or ((self.check or self.diff) and self.writes)
        ):
            raise typer.BadParameter(
                "choose one of --diff, --check and --json, and one of --write and -o; --diff and --check write nothing"
            )
        if self.quiet and self.everything:
            raise typer.BadParameter("choose one of --quiet and --all")
        if "" in self.names:  # an unset variable; as a path it would be the current folder
            raise typer.BadParameter("a name is empty; use . for the current folder")
        if str(self.output) == "-":
            raise typer.BadParameter(
                "without -o the new text is printed to standard output; use ./- for a file named -"
            )
        is_one = len(self.names) == 1 and (self.names[0] == "-" or not Path(self.names[0]).is_dir())
        if self.show is Show.TEXT and not is_one:
            raise typer.BadParameter("several files need --write, -o FOLDER, --diff, --check or --json")

    def __call__(self) -> None:
        report = _report_on(self)
        if self.show is Show.JSON:
            print_json(report.to_json())
        elif len(report.results) == 1 and not report.error:
            _show_one(report.results[0], self)
        else:
            _show_several(report, self)
        print(end="", flush=True)  # raises BrokenPipeError here if the reader has ended
        for error in report.errors():
            print(f"composer-fsdp2: {error}", file=sys.stderr)
        for line in _notes(report, self):
            print(line, file=sys.stderr)
        sys.exit(report.exit_code)


def _report_on(options: Migrate) -> Report:
    """Migrate all files and return the report. Prints only a progress bar, because other lines would break it up."""
    # Imported here: --help and completion do not need the parsers.
    from composer_fsdp2.migration.files import STANDARD_INPUT, Destination, migrate_files, sources_of
    from composer_fsdp2.migration.report import Report

    results: list[FileResult] = []
    try:
        paths = [STANDARD_INPUT if name == "-" else Path(name) for name in options.names]  # ./- is a file of that name
        if options.report is not None:
            _check_report(options.report)
        standard_input = _standard_input() if "-" in options.names else None
        sources = sources_of(paths, output=options.output, standard_input=standard_input)
        work = migrate_files(
            sources,
            Destination(in_place=options.write, output=options.output, force=options.force),
            to=options.to and options.to.value,
            dialect=options.dialect and options.dialect.value,
            at=options.at,
            suffix=f".{options.file_format.value}" if options.file_format else "",
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
        error = f"{problem.filename or options.report}: {problem.strerror}"  # a full disk's error has no file name
    return Report(results=results, error=error, fails_on_change=options.fail_on_change)


def _standard_input() -> bytes:
    if sys.stdin is None:
        raise ConfigError("- is standard input, which is closed")
    try:
        return sys.stdin.buffer.read()
    except OSError as problem:
        raise ConfigError(f"- is standard input, which cannot be read: {problem.strerror}") from problem


def _check_report(path: Path) -> None:
    """Raise ConfigError if the report file cannot be written. Called before any file is changed."""
    from composer_fsdp2.migration.documents import SUFFIXES

    if not path.parent.is_dir():
        raise ConfigError(f"{path}: No such file or directory")
    if path.is_dir():
        raise ConfigError(f"{path}: Is a directory")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path}: Permission denied")
    if path.suffix.lower() in SUFFIXES:  # may be a source or a result
        raise ConfigError(f"{path} has a configuration's suffix, and the report is Markdown; use a name like report.md")


def _with_progress(results: Iterator[FileResult], total: int) -> Iterator[FileResult]:
    """Show a progress bar on stderr if that is a terminal."""
    if total > 1:
        from rich.console import Console  # imported here: one file needs no bar
        from rich.progress import track

        console = Console(stderr=True)
        if console.is_terminal:
            results = track(results, "migrate", total=total, console=console, transient=True)  # type: ignore[assignment]
    yield from results


# ---------------------------------------------------------------------------------------------------------------------
# Output


def _show_one(result: FileResult, options: Migrate) -> None:
    """Print everything about one file."""
    if result.migration is None:
        if result.is_skipped and options.show is Show.TEXT:
            print_text(result.content)
        return
    report = result.migration.text(hidden=options.hidden)
    if options.show is Show.DIFF:
        print_report(result.migration.diff(), is_diff=True)
    elif options.show is Show.REPORT and not options.quiet:
        print_report(f"{report}\n{result.path}: {result.done}")
    elif options.show is Show.TEXT:
        if not options.quiet:
            print_report(report, stream=sys.stderr)
        if result.exit_code == 0 or options.force:
            print_text(result.migration.after)


def _show_several(report: Report, options: Migrate) -> None:
    """Print one line for each file that changes or needs a decision, then each reason with the number of files.

    Only --report, --json and --all print all findings.
    """
    for result in report.results:
        if result.migration is None:
            continue
        if options.show is Show.DIFF:
            print_report(result.migration.diff(), is_diff=True)
        elif options.everything:
            print_report(f"{result.migration}\n{result.path}: {result.done}\n")
        elif result.exit_code or (result.is_changed and not options.quiet):
            print(f"{result.path}: {result.done}")
    if options.show is Show.REPORT and not options.quiet:
        for text in filter(None, (report.decisions(), report.differences())):
            print_report(text)


def _notes(report: Report, options: Migrate) -> Iterator[str]:
    """Yield the lines for standard error: skipped files, next steps, and how many files changed, failed or stayed the
    same.
    """
    is_one = len(report.results) == 1
    for result in report.results:
        if result.is_skipped and (result.is_foreign or (is_one and not options.quiet)):
            yield f"{result.path}: {result.done}" if is_one else result.done
    if (options.quiet or options.show is Show.DIFF) and (decisions := report.decisions()):
        yield decisions
    if options.show is Show.TEXT and not options.force and any(result.exit_code == 1 for result in report.results):
        yield "composer-fsdp2: a finding needs a decision; --force prints the new text anyway"
    if report.results and not is_one and not options.quiet:
        yield report.summary("written" if options.writes else "would change")
        if options.show is Show.REPORT and options.report is None and not options.everything:
            yield "--all prints the outcome of every key, and --report FILE.md writes it to a file"
    if options.fail_on_change and not options.writes and any(result.is_changed for result in report.results):
        yield "composer-fsdp2: files are still configured for FSDP1; --write changes them"
