"""Migrate files and folders of configurations in parallel processes. Results are written atomically."""

import codecs
import contextlib
import enum
import itertools
import os
import shutil
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from composer_fsdp2.atomic import replacing
from composer_fsdp2.config.findings import Finding
from composer_fsdp2.config.text import printable
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.documents import SUFFIXES, format_of, suffix_for
from composer_fsdp2.migration.migrate import (
    ForeignSystemError,
    Migration,
    NothingToMigrateError,
    may_configure,
    migrate_text,
)

_PARALLEL_FROM = 20  # files; for fewer, starting processes takes longer than it saves


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file to migrate.

    Args:
        place: The path relative to an output folder; the suffix may differ.
        is_named: Whether the user named the file, and not a folder that contains it.
        content: The content of standard input, if that is the source.
    """

    file: Path
    place: Path
    is_named: bool
    content: bytes | None = None


STANDARD_INPUT = Path("<stdin>")
_ENDINGS = ", ".join(SUFFIXES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where results are written: nowhere, to the source files, or to an output file or folder."""

    in_place: bool = False
    output: Path | None = None
    force: bool = False

    def folder(self, sources: Sequence[SourceFile]) -> Path | None:
        """Return the output if it is a folder; None if it is the file for the result of a single named source."""
        is_one = len(sources) == 1 and sources[0].is_named
        if self.output is None or (is_one and not self.output.is_dir() and self.output.suffix.lower() in SUFFIXES):
            return None
        return self.output

    def check(self, sources: Sequence[SourceFile]) -> None:
        """Check the destination before any file is read.

        Raises:
            ConfigError: the destination is invalid for these sources; names the file.
        """
        folder = self.folder(sources)
        has_standard_input = any(source.content is not None for source in sources)
        if has_standard_input and self.in_place:
            raise ConfigError("- is standard input, which --write cannot change; -o FILE writes the new text")
        if has_standard_input and folder is not None:
            raise ConfigError(
                f"{folder}: what comes from standard input has no name in a folder; give it alone, with -o FILE"
            )
        if folder is None and self.output is not None and _is_at(self.output, sources[0].file):
            raise ConfigError(f"{_name(self.output)} is the file itself; --write changes it, and keeps a copy")
        if folder is not None and folder.is_file():
            fault = f"there are {len(sources)} results" if len(sources) > 1 else f"its name ends in none of {_ENDINGS}"
            raise ConfigError(f"{_name(folder)} is a file, and {fault}; give a folder")


def _name(path: Path) -> str:
    """Return a path as printable text for messages."""
    return printable(str(path))


def _is_at(path: Path, file: Path) -> bool:
    return path.exists() and file.exists() and path.samefile(file)


class State(enum.Enum):
    """Migration state of a file."""

    READY = "ready"
    NEEDS_DECISION = "needs decision"
    UNUSABLE = "unusable"
    UNCONFIGURED = "unconfigured"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileResult:
    """The result of one file: its migration or an error, and a message on where the text was written.

    Args:
        is_skipped: Whether the file has no section, and was not required to have one.
        content: The content of a skipped file that the user named.
        is_foreign: Whether the file is for a system that is identified but cannot be read. It is reported even in a
            folder.
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
        return {State.NEEDS_DECISION: 1, State.UNUSABLE: 2}.get(self.state, 0)

    @property
    def is_changed(self) -> bool:
        """Whether the new text differs from the old one, even if it was not written."""
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
                *map(_row, section.findings),
            ]
        return "\n".join(lines)


def _row(finding: Finding) -> str:
    cells = (
        f"`{finding.key}: {finding.value}`",
        finding.outcome.value,
        finding.target or "-",
        finding.reason + (f" ({finding.hint})" if finding.hint else ""),
        finding.where.rpartition(":")[2],
    )
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def sources_of(
    paths: Sequence[Path], *, output: Path | None = None, standard_input: bytes | None = None
) -> list[SourceFile]:
    """Return the files in ``paths`` and in their folders, each once.

    Skips folders whose names start with a dot, and links to folders, which may be circular.

    Args:
        output: The output folder. Results of an earlier run in it are not sources.
        standard_input: The content of STANDARD_INPUT.
    Raises:
        ConfigError: no file was found.
    """
    found: dict[str, SourceFile] = {}
    for path in paths:
        is_folder = path.is_dir()
        for file in _files(path, output) if is_folder else [path]:
            source = SourceFile(
                file=file,
                place=file.relative_to(path if is_folder else path.parent),
                is_named=not is_folder,
                content=standard_input if file is STANDARD_INPUT else None,
            )
            real = os.path.realpath(file)  # accepts circular links, which resolve() refuses
            if real not in found or (source.is_named and not found[real].is_named):
                found[real] = source
    if not found:
        raise ConfigError(f"{', '.join(map(str, paths))}: no file ends in {_ENDINGS}")
    return list(found.values())


def _files(folder: Path, output: Path | None) -> list[Path]:
    """Return the configuration files below a folder. Folders that cannot be read are returned too, and fail later."""
    results = os.path.realpath(output) if output is not None and not _is_at(output, folder) else ""
    found: list[Path] = []
    for above, folders, files in os.walk(folder, onerror=lambda error: found.append(Path(error.filename))):
        folders[:] = [
            name for name in folders if name[0] != "." and os.path.realpath(os.path.join(above, name)) != results
        ]
        each = (Path(above, name) for name in files)
        found.extend(file for file in each if file.suffix.lower() in SUFFIXES and file.is_file())
    return sorted(found)


def migrate_files(
    sources: Sequence[SourceFile],
    destination: Destination,
    *,
    to: str | None = None,
    dialect: str | None = None,
    at: str | None = None,
    suffix: str = "",
    allow_unconfigured: bool = False,
    jobs: int = 0,
) -> Iterator[FileResult]:
    """Migrate files, and yield their results in order. An error in one file does not stop the others.

    Args:
        to: The target system; None: each file's own.
        suffix: The suffix for the format of named files; "": that of their names.
        allow_unconfigured: Whether a named file may lack a section.
        jobs: The number of processes; 0: one per core.
    Raises:
        ConfigError: a result would overwrite a source or another result. Raised at the call.
    """
    destination.check(sources)
    folder = destination.folder(sources)
    work = partial(
        _migrate_file,
        destination=destination,
        folder=folder,
        suffix=suffix,
        allow_unconfigured=allow_unconfigured,
        arguments={"to": to, "dialect": dialect, "at": at},
    )
    if folder is not None:
        _refuse_overwrites(sources, folder, partial(work, destination=Destination()), force=destination.force)
    if len(sources) < _PARALLEL_FROM or jobs == 1:
        return map(work, sources)
    from composer_fsdp2.migration.processes import in_processes  # not at the top: one file needs no processes

    return in_processes(work, sources, num_processes=jobs or None, killed=_killed)


def _refuse_overwrites(
    sources: Sequence[SourceFile], folder: Path, migrate_only: Callable[[SourceFile], FileResult], *, force: bool
) -> None:
    """Raise ConfigError if a result would overwrite a source or another result.

    The suffix of a result is known only after migration. Files whose names differ only by suffix are therefore migrated
    here.

    Args:
        migrate_only: Migrates a file without writing.
    """
    inputs = {_place(path): each.file for each in sources for path in (each.file, Path(os.path.realpath(each.file)))}
    stems = [_place(folder / each.place).with_suffix("") for each in sources]
    near = Counter([*stems, *(place.with_suffix("") for place in inputs)])
    results: defaultdict[Path, list[Path]] = defaultdict(list)
    for source in (source for source, stem in zip(sources, stems, strict=True) if near[stem] > 1):
        migration = migrate_only(source).migration
        if migration is None or (migration.exit_code and not force):
            continue
        place = _place(_target(migration, source, folder))
        if place in inputs:
            cause = "" if inputs[place] == source.file else f" by the result of {_name(source.file)}"
            raise ConfigError(
                f"{_name(inputs[place])} would be overwritten{cause}; --write changes files in place, and keeps copies"
            )
        results[place].append(source.file)
    duplicates = [
        f"{_name(Path(place.name))} of {' and '.join(map(_name, files))}"
        for place, files in results.items()
        if len(files) > 1
    ]
    if duplicates:
        raise ConfigError(
            f"{_name(folder)} would get several files of one name: {', '.join(duplicates)}; rename one, or migrate "
            "them into different folders"
        )


def _place(path: Path) -> Path:
    """Return the path that a write to ``path`` changes, in lower case because some file systems ignore case.

    Links to folders are resolved; a link to a file is itself replaced.
    """
    return Path(os.path.realpath(path.parent).casefold(), path.name.casefold())


def _killed(source: SourceFile) -> FileResult:
    return FileResult(path=_name(source.file), error=f"{source.file}: its process was killed")


def _migrate_file(
    source: SourceFile,
    *,
    destination: Destination,
    folder: Path | None,
    suffix: str,
    allow_unconfigured: bool,
    arguments: Mapping[str, Any],
) -> FileResult:
    path, content = _name(source.file), b""
    may_pass = allow_unconfigured or not source.is_named
    try:
        content = source.file.read_bytes() if source.content is None else source.content
        if may_pass and arguments["at"] is None and not may_configure(content):
            raise NothingToMigrateError(f"{path}:1:1: nothing here configures sharding")
        text = _decoded(content, path)
        of_input = suffix_for(text) if source.content is not None else ""
        migration = migrate_text(
            text,
            path,
            suffix=(suffix if source.is_named else "") or of_input,
            read=partial(read_named, source.file.parent),
            allow_unreferenced=source.is_named,
            **arguments,
        )
        done = _write(migration, content, source, destination, folder)
        return FileResult(path=path, migration=migration, done=printable(done))
    except Exception as error:  # of any type: the other files still have results
        message = printable(_error_message(error, path))
        if not (may_pass and isinstance(error, NothingToMigrateError)):
            return FileResult(path=path, error=message)
        is_foreign = isinstance(error, ForeignSystemError)
        return FileResult(
            path=path,
            error=message,
            is_skipped=True,
            is_foreign=is_foreign,
            content=content if source.is_named else b"",
            done=f"{message if is_foreign else 'nothing here configures sharding'}; passed over",
        )


def _error_message(error: Exception, path: str) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or path}: {error.strerror or error}"
    where = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"{path}: {type(error).__name__} in {Path(where.filename).name}:{where.lineno}: {error}; this is a fault of "
        "composer-fsdp2's: please report it with the file"
    )


def read_named(folder: Path, path: str) -> str | None:
    """Read a file that a file in ``folder`` references; None if it does not exist.

    The path is relative to the working directory, as in accelerate, else to ``folder``.
    """
    with contextlib.suppress(OSError, ValueError):
        found = next((each for each in (Path(path), folder / path) if each.is_file()), None)
        return None if found is None else found.read_text(encoding="utf-8")
    return None


def _decoded(content: bytes, path: str) -> str:
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ConfigError(f"{path}:1:1: the file is in UTF-16, and every system reads UTF-8; save it as that")
    try:
        return content.decode()  # not read_text, which changes line ends
    except UnicodeDecodeError as error:
        *lines, last = content[: error.start].split(b"\n")
        raise ConfigError(f"{path}:{len(lines) + 1}:{len(last) + 1}: no UTF-8: {error.reason}") from error


def _write(
    migration: Migration, content: bytes, source: SourceFile, destination: Destination, folder: Path | None
) -> str:
    """Write the new text to the destination unless a finding blocks it, and return a message.

    Args:
        content: The content of the file when it was read.
        folder: The output folder; None if the output is a file.
    Raises:
        ConfigError: the destination cannot be written, or the file has changed since it was read.
    """
    if not destination.in_place and destination.output is None:
        would = "would change" if migration.is_changed else "nothing to change"
        return "a finding needs a decision" if migration.exit_code else would
    if destination.in_place and migration.is_new_file:
        raise ConfigError(
            f"{source.file}: the new configuration is a file of its own, which -o PATH writes; --write cannot"
        )
    if migration.exit_code and not destination.force:
        return "nothing was written: a finding needs a decision (--force writes anyway)"
    if destination.output is None:
        return _write_in_place(migration, content, source.file.resolve())  # a link stays a link
    target = destination.output if folder is None else _target(migration, source, folder)
    if format_of(target.name) is not format_of(migration.suffix):
        raise ConfigError(f"{target}: the new text is {migration.suffix[1:].upper()}; let its name end so")
    target.parent.mkdir(parents=True, exist_ok=True)
    _replace(target, migration.after, like=source.file if source.content is None else None)
    is_blocked = migration.exit_code and not migration.is_changed
    return f"written to {target}" + ("; unchanged, because a finding needs a decision" if is_blocked else "")


def _target(migration: Migration, source: SourceFile, folder: Path) -> Path:
    return (folder / source.place).with_suffix(migration.suffix)


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
    return f"written; the original is {backup.name}"


def _free_name(file: Path) -> Path:
    """Return FILE.bak, or the first of FILE.bak2, FILE.bak3, ... that does not exist."""
    names = (Path(f"{file}.bak{number if number > 1 else ''}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def _replace(path: Path, text: str, *, like: Path | None) -> None:
    """Write a file atomically. It gets the owner and permissions of ``like``, if set.

    Raises:
        ConfigError: the file cannot be written; names ``path``.
    """
    try:
        with replacing(path, ending=f".{os.getpid()}.writing") as temporary:
            temporary.write_bytes(text.encode())
            if like is not None:
                with contextlib.suppress(PermissionError):  # only root may give a file away
                    os.chown(temporary, like.stat().st_uid, like.stat().st_gid)
                shutil.copymode(like, temporary)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error
