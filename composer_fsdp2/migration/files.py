"""Files and folders of configurations: read, migrated on all cores, and written beside their target and renamed."""

import codecs
import contextlib
import enum
import itertools
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from composer_fsdp2.atomic import replacing
from composer_fsdp2.config.text import printable
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.dialect import Dialect
from composer_fsdp2.migration.documents import SUFFIXES, format_of, suffix_for
from composer_fsdp2.migration.migrate import (
    ForeignSystemError,
    Migration,
    NothingToMigrateError,
    may_configure,
    migrate_text,
)
from composer_fsdp2.migration.targets import TARGETS

_PARALLEL_FROM = 20  # files; below it starting processes takes longer than it saves


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file, and the folder that its place in an output folder is taken from.

    Args:
        is_named: Whether it was asked for, and not only found in a folder.
        standard_input: What came from there, where that is the file.
    """

    file: Path
    base: Path
    is_named: bool
    standard_input: bytes | None = None

    @property
    def is_standard_input(self) -> bool:
        return self.standard_input is not None

    def read(self) -> bytes:
        return self.file.read_bytes() if self.standard_input is None else self.standard_input


STANDARD_INPUT = Path("<stdin>")
_ENDINGS = ", ".join(SUFFIXES)
_PASSED_OVER = "nothing here configures sharding; passed over"


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """The place for the results: nowhere, in place of the sources, or to a file or folder."""

    in_place: bool = False
    output: Path | None = None
    force: bool = False

    def check(self, sources: Sequence[SourceFile], target: Dialect) -> None:
        """Refuse what may write two results to one file, before anything is written.

        Raises:
            ConfigError: names the file.
        """
        if any(source.is_standard_input for source in sources):
            self._check_standard_input(sources)
        if self.output is None:
            return
        if not self.is_folder(sources):
            if _is_at(self.output, sources[0].file):
                raise ConfigError(f"{_name(self.output)} is the file itself; --write changes it, and keeps a copy")
            return
        if self.output.is_file():
            fault = f"there are {len(sources)} results" if len(sources) > 1 else f"its name ends in none of {_ENDINGS}"
            raise ConfigError(f"{_name(self.output)} is a file, and {fault}; give a folder")
        folds = _folds_case(self.output)
        inputs = {
            _place(path, folds): each.file
            for each in sources
            for path in (each.file, Path(os.path.realpath(each.file)))
        }
        for source in sources:
            path = self.output / _result_name(source, target)
            for result in (path, path.with_suffix(target.suffix)):  # a new file may have another ending
                taken = inputs.get(_place(result, folds))
                if taken is not None:
                    whose = "" if taken == source.file else f" by the result of {_name(source.file)}"
                    raise ConfigError(
                        f"{_name(taken)} would be overwritten{whose}; --write changes files in place, and keeps copies"
                    )

    def _check_standard_input(self, sources: Sequence[SourceFile]) -> None:
        if self.in_place:
            raise ConfigError("- is standard input, which --write cannot change; -o FILE writes the new text")
        if self.output is not None and self.is_folder(sources):
            raise ConfigError(
                f"{self.output}: what comes from standard input has no name in a folder; give it alone, with -o FILE"
            )

    def is_folder(self, sources: Sequence[SourceFile]) -> bool:
        assert self.output is not None
        is_one = len(sources) == 1 and sources[0].is_named
        return not is_one or self.output.is_dir() or self.output.suffix.lower() not in SUFFIXES


def _name(path: Path) -> str:
    """A path as a message has it."""
    return printable(str(path))


def _is_at(path: Path, file: Path) -> bool:
    return path.exists() and file.exists() and path.samefile(file)


def _place(path: Path, folds_case: bool) -> str:
    """The path that a write to ``path`` changes: links among its folders are followed, and a final link is replaced."""
    place = os.path.join(os.path.realpath(path.parent), path.name)
    return place.casefold() if folds_case else place


def _folds_case(folder: Path) -> bool:
    """Whether names there that differ in upper and lower case are one file."""
    above = Path(os.path.realpath(folder))
    named = next(
        (each for each in (above, *above.parents) if each.exists() and each.name.swapcase() != each.name), None
    )
    return named is not None and _is_at(named.with_name(named.name.swapcase()), named)


def _result_name(source: SourceFile, target: Dialect) -> Path:
    """A file's place in an output folder, as far as it is known before the file is read."""
    place = source.file.relative_to(source.base)
    keeps_format = bool(target.heads) and format_of(place.name).takes_entries
    return place if keeps_format else place.with_suffix(target.suffix)


class State(enum.Enum):
    """Where a file is on its way to FSDP2."""

    READY = "ready"
    NEEDS_DECISION = "needs decision"
    UNUSABLE = "unusable"
    UNCONFIGURED = "unconfigured"

    @property
    def exit_code(self) -> int:
        return {State.NEEDS_DECISION: 1, State.UNUSABLE: 2}.get(self, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileResult:
    """What became of one file: its migration, or why there is none, and where the text went.

    Args:
        is_skipped: It has no section, and nobody said that it has one.
        content: What it holds, where it is skipped although it was named.
        is_foreign: It is for a system that is known by name only, of which a user wants to hear in a folder as well.
    """

    path: str
    migration: Migration | None = None
    error: str = ""
    done: str = "nothing was written"
    is_skipped: bool = False
    content: bytes = b""
    is_foreign: bool = False

    @property
    def state(self) -> State:
        if self.migration is None:
            return State.UNCONFIGURED if self.is_skipped else State.UNUSABLE
        return State.NEEDS_DECISION if self.migration.blocking else State.READY

    @property
    def exit_code(self) -> int:
        return self.state.exit_code

    @property
    def is_changed(self) -> bool:
        """Whether the new text is another one, whether it was written or not."""
        return self.migration is not None and self.migration.is_changed

    def to_json(self) -> dict[str, Any]:
        return {
            "file": self.path,
            "state": self.state.value,
            "exit_code": self.exit_code,
            "changed": self.is_changed,
            "done": self.done,
            "error": "" if self.is_skipped else self.error,
            "sections": [] if self.migration is None else [section.to_json() for section in self.migration.sections],
        }

    def markdown(self) -> str:
        if self.migration is None:
            return f"## {self.path}\n\n{self.error}"
        lines = [f"## {self.path}", "", self.done]
        for section in self.migration.sections:
            lines += [
                "",
                f"### {section.place or 'the whole file'} ({section.dialect} to {section.to})",
                "",
                "| key | outcome | becomes | why | line |",
                "|---|---|---|---|---|",
            ]
            lines += [
                _row(
                    f"`{finding.key}: {finding.value}`",
                    finding.outcome.value,
                    finding.target or "-",
                    finding.reason + (f" ({finding.hint})" if finding.hint else ""),
                    finding.where.rpartition(":")[2],
                )
                for finding in section.findings
            ]
        return "\n".join(lines)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def sources_of(
    paths: Sequence[Path], *, output: Path | None = None, standard_input: Callable[[], bytes] = bytes
) -> list[SourceFile]:
    """The files, and those in the folders, each once.

    Folders whose names begin with a dot are passed over, and links to folders, which may lead in circles.

    Args:
        output: A folder whose files are results of an earlier run, and no sources of this one.
        standard_input: Reads what STANDARD_INPUT stands for.
    Raises:
        ConfigError: there is no file at all.
    """
    found: dict[str, SourceFile] = {}
    for path in paths:
        if path is STANDARD_INPUT:
            if str(path) not in found:
                content = standard_input()
                found[str(path)] = SourceFile(file=path, base=Path(), is_named=True, standard_input=content)
            continue
        is_folder = path.is_dir()
        for file in _files(path, output) if is_folder else [path]:
            source = SourceFile(file=file, base=path if is_folder else path.parent, is_named=not is_folder)
            real = os.path.realpath(file)  # of links in a circle, too, which resolve() refuses
            if real not in found or (source.is_named and not found[real].is_named):
                found[real] = source
    if not found:
        raise ConfigError(f"{', '.join(map(str, paths))}: no file ends in {', '.join(SUFFIXES)}")
    return list(found.values())


def _files(folder: Path, output: Path | None) -> list[Path]:
    """The configurations below a folder, and folders that cannot be read."""
    results = os.path.realpath(output) if output is not None and not _is_at(output, folder) else ""
    found: list[Path] = []
    unreadable: list[OSError] = []
    for above, folders, files in os.walk(folder, onerror=unreadable.append):
        folders[:] = [
            name for name in folders if name[0] != "." and os.path.realpath(os.path.join(above, name)) != results
        ]
        each = (Path(above, name) for name in files)
        found += [file for file in each if file.suffix.lower() in SUFFIXES and file.is_file()]
    return sorted([*found, *(Path(error.filename) for error in unreadable)])


def migrate_files(
    sources: Sequence[SourceFile],
    destination: Destination,
    *,
    to: str = "composer",
    dialect: str | None = None,
    at: str | None = None,
    suffix: str = "",
    allow_unconfigured: bool = False,
    jobs: int = 0,
) -> Iterator[FileResult]:
    """Each file's result, in order; a bad file does not end the others.

    Where results may get one name, which their texts decide, those files are migrated twice: once to see.

    Args:
        suffix: The ending of the format of files that were named; "" goes by their names.
        allow_unconfigured: Whether a file that was named need not have a section.
        jobs: Processes for many files; 0 for one a core.
    Raises:
        ConfigError: two results would be written to one file.
    """
    destination.check(sources, TARGETS[to])
    is_folder = destination.output is not None and destination.is_folder(sources)
    look = partial(
        _migrate_file,
        suffix=suffix,
        allow_unconfigured=allow_unconfigured,
        words={"to": to, "dialect": dialect, "at": at},
    )
    if is_folder:
        _refuse_doubled(sources, destination, partial(look, destination=Destination(), is_folder=False))
    work = partial(look, destination=destination, is_folder=is_folder)
    if len(sources) < _PARALLEL_FROM or jobs == 1:
        yield from map(work, sources)
        return
    from composer_fsdp2.migration.processes import in_processes  # here and not above: one file needs none

    yield from in_processes(work, sources, num_processes=jobs or None, killed=_killed)


def _refuse_doubled(
    sources: Sequence[SourceFile], destination: Destination, look: Callable[[SourceFile], FileResult]
) -> None:
    """Raise where two results would be one file: names that differ in their endings only may do so.

    Args:
        look: Migrates a file, and writes nothing.
    """
    output = destination.output or Path()
    folds = _folds_case(output)
    alike: dict[str, list[SourceFile]] = {}
    for source in sources:
        path = output / source.file.relative_to(source.base).with_suffix("")
        alike.setdefault(_place(path, folds), []).append(source)
    found: dict[str, tuple[Path, list[Path]]] = {}
    for source in (each for group in alike.values() if len(group) > 1 for each in group):
        migration = look(source).migration
        if migration is not None and (migration.exit_code == 0 or destination.force):
            target = _target(migration, source, destination, is_folder=True)
            found.setdefault(_place(target, folds), (target, []))[1].append(source.file)
    doubled = [
        f"{_name(path.relative_to(output))} of {' and '.join(map(_name, files))}"
        for path, files in found.values()
        if files[1:]
    ]
    if doubled:
        raise ConfigError(
            f"{_name(output)} would get several files of one name: {', '.join(doubled)}; rename "
            "one, or migrate them into different folders"
        )


def _killed(source: SourceFile) -> FileResult:
    return FileResult(path=_name(source.file), error=f"{source.file}: its process was killed")


def _migrate_file(
    source: SourceFile,
    *,
    destination: Destination,
    is_folder: bool,
    suffix: str,
    allow_unconfigured: bool,
    words: Mapping[str, Any],
) -> FileResult:
    path, content = _name(source.file), b""
    may_pass = allow_unconfigured or not source.is_named
    try:
        content = source.read()
        if may_pass and words["at"] is None and not may_configure(content):
            raise NothingToMigrateError(f"{path}:1:1: nothing here configures sharding")
        text = _decoded(content, path)
        migration = migrate_text(text, path, suffix=_suffix_of(source, suffix, text), **words)
        done = _write(migration, content, source, destination, is_folder=is_folder)
    except NothingToMigrateError as error:
        done = _PASSED_OVER if may_pass else "nothing was written"
        kept = content if source.is_named else b""
        is_foreign = isinstance(error, ForeignSystemError)
        done = f"{error}; passed over" if may_pass and is_foreign else done
        return FileResult(
            path=path,
            error=printable(str(error)),
            is_skipped=may_pass,
            is_foreign=is_foreign,
            content=kept,
            done=printable(done),
        )
    except ConfigError as error:
        return FileResult(path=path, error=printable(str(error)))
    except OSError as error:
        return FileResult(path=path, error=printable(f"{path}: {error.strerror or error}"))
    except Exception as error:  # whatever it is: the other files have their results
        return FileResult(path=path, error=printable(f"{path}: {_unexpected(error)}"))
    return FileResult(path=path, migration=migration, done=printable(done))


def _suffix_of(source: SourceFile, given: str, text: str) -> str:
    if given and source.is_named:
        return given
    return suffix_for(text) if source.is_standard_input else ""


def _decoded(content: bytes, path: str) -> str:
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ConfigError(f"{path}:1:1: the file is in UTF-16, and every system reads UTF-8; save it as that")
    try:
        return content.decode()  # not read_text, which changes line ends
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - content.rfind(b"\n", 0, error.start)
        raise ConfigError(f"{path}:{line}:{column}: no UTF-8: {error.reason}") from error


def _unexpected(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"{type(error).__name__} in {Path(where.filename).name}:{where.lineno}: {error}; this is a fault of "
        "composer-fsdp2's: please report it with the file"
    )


def _write(
    migration: Migration, content: bytes, source: SourceFile, destination: Destination, *, is_folder: bool
) -> str:
    """Write the new text where it is to go, if it may; says what was done.

    Args:
        content: Of the file, as it was read.
    Raises:
        ConfigError: it cannot be written there, or the file is another one by now.
    """
    if not destination.in_place and destination.output is None:
        if migration.exit_code:
            return "something needs a decision"
        return "would change" if migration.is_changed else "nothing to change"
    if destination.in_place and migration.is_new_file:
        raise ConfigError(
            f"{source.file}: the new configuration is a file of its own, which -o PATH writes; --write cannot"
        )
    if migration.exit_code and not destination.force:
        return "nothing was written: something needs a decision (--force writes all the same)"
    if destination.in_place:
        return _write_in_place(migration, content, source.file.resolve())  # a link stays one
    target = _target(migration, source, destination, is_folder=is_folder)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    _replace(target, migration.after, like=None if source.is_standard_input else source.file)
    return f"written to {target}"


def _write_in_place(migration: Migration, content: bytes, file: Path) -> str:
    if not migration.is_changed:
        return "nothing to change"
    if file.read_bytes() != content:
        raise ConfigError(f"{file}: it was changed while it was being migrated, and is left as it is; run it again")
    backup = _free_name(file)
    _replace(backup, migration.before, like=file)
    try:
        _replace(file, migration.after, like=file)
    except ConfigError:
        backup.unlink()
        raise
    return f"written; {backup.name} is what was there"


def _free_name(file: Path) -> Path:
    """FILE.bak, or the first of FILE.bak2 ... that is nobody's."""
    names = itertools.chain([".bak"], (f".bak{number}" for number in itertools.count(2)))
    return next(path for path in (Path(f"{file}{name}") for name in names) if not path.exists())


def _target(migration: Migration, source: SourceFile, destination: Destination, *, is_folder: bool) -> Path:
    output = destination.output
    assert output is not None
    if is_folder:
        return (output / source.file.relative_to(source.base)).with_suffix(migration.suffix)
    if format_of(output.name) is not format_of(migration.suffix):
        raise ConfigError(f"{output}: the new text is {migration.suffix[1:].upper()}; let its name end so")
    return output


def _replace(path: Path, text: str, *, like: Path | None) -> None:
    """Whole or not at all, with the owner and the permissions of another file, if there is one.

    Raises:
        ConfigError: names what could not be written, which is not the file that was read.
    """
    try:
        with replacing(path, ending=f".{os.getpid()}.writing") as beside:
            beside.write_bytes(text.encode())
            if like is not None:
                state = like.stat()
                with contextlib.suppress(PermissionError):  # only root may give a file away
                    os.chown(beside, state.st_uid, state.st_gid)
                beside.chmod(state.st_mode & 0o7777)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error
