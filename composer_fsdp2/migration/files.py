"""Files and folders of configurations: read, migrated on all cores, and written beside their target and renamed."""

import codecs
import itertools
import multiprocessing
import os
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from composer_fsdp2.atomic import replacing
from composer_fsdp2.config.text import printable
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.dialect import Dialect
from composer_fsdp2.migration.documents import SUFFIXES, format_of
from composer_fsdp2.migration.migrate import Migration, NothingToMigrateError, may_configure, migrate_text
from composer_fsdp2.migration.targets import TARGETS

_PARALLEL_FROM = 20  # files; below it starting processes takes longer than it saves


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file, and the folder that its place in an output folder is taken from.

    Args:
        is_named: Whether it was asked for, and not only found in a folder.
    """

    file: Path
    base: Path
    is_named: bool


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
        if self.output is None:
            return
        if not self.is_folder(sources):
            if self.output.exists() and self.output.samefile(sources[0].file):
                raise ConfigError(f"{_name(self.output)} is the file itself; --write changes it, and keeps a copy")
            return
        if self.output.is_file():
            raise ConfigError(f"{_name(self.output)} is a file, and there are {len(sources)} results; give a folder")
        places = Counter(_result_name(source, target) for source in sources)
        own = [source.file for source in sources if _is_at(self.output / _result_name(source, target), source.file)]
        if own:
            raise ConfigError(f"{_name(own[0])} would be overwritten; --write changes files in place, and keeps copies")
        doubled = [_name(place) for place, count in places.items() if count > 1]
        if doubled:
            raise ConfigError(f"{_name(self.output)} would get several files of one name: {', '.join(doubled)}")

    def is_folder(self, sources: Sequence[SourceFile]) -> bool:
        assert self.output is not None
        is_one = len(sources) == 1 and sources[0].is_named
        return not is_one or self.output.is_dir() or self.output.suffix.lower() not in SUFFIXES


def _name(path: Path) -> str:
    """A path as a message has it."""
    return printable(str(path))


def _is_at(path: Path, file: Path) -> bool:
    return path.exists() and path.samefile(file)


def _result_name(source: SourceFile, target: Dialect) -> Path:
    """A file's place in an output folder, as far as it is known before the file is read."""
    place = source.file.relative_to(source.base)
    keeps_format = bool(target.heads) and format_of(place.name).takes_entries
    return place if keeps_format else place.with_suffix(target.suffix)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileResult:
    """What became of one file: its migration, or why there is none, and where the text went.

    Args:
        is_skipped: It has no section, and nobody asked for it by name.
    """

    path: str
    migration: Migration | None = None
    error: str = ""
    done: str = "nothing was written"
    is_skipped: bool = False

    @property
    def exit_code(self) -> int:
        if self.migration is None:
            return 0 if self.is_skipped else 2
        return self.migration.exit_code

    def to_json(self) -> dict[str, Any]:
        report = {"error": self.error} if self.migration is None else self.migration.to_json()
        return {"file": self.path, "exit_code": self.exit_code, "done": self.done} | report

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


def sources_of(paths: Sequence[Path], *, output: Path | None = None) -> list[SourceFile]:
    """The files, and those in the folders, each once.

    Folders whose names begin with a dot are passed over, and links to folders, which may lead in circles.

    Args:
        output: A folder whose files are results of an earlier run, and no sources of this one.
    Raises:
        ConfigError: there is no file at all.
    """
    found: dict[str, SourceFile] = {}
    for path in paths:
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
    jobs: int = 0,
) -> Iterator[FileResult]:
    """Each file's result, in order; a bad file does not end the others.

    Args:
        jobs: Processes for many files; 0 for one a core.
    Raises:
        ConfigError: two results would be written to one file.
    """
    destination.check(sources, TARGETS[to])
    is_folder = destination.output is not None and destination.is_folder(sources)
    work = partial(_migrate_file, destination=destination, is_folder=is_folder, to=to, dialect=dialect, at=at)
    if len(sources) < _PARALLEL_FROM or jobs == 1:
        yield from map(work, sources)
        return
    left = list(sources)
    try:
        with ProcessPoolExecutor(jobs or os.cpu_count(), initializer=_end_with_parent) as pool:
            for result in pool.map(work, sources, chunksize=8):
                left.pop(0)
                yield result
    except BrokenProcessPool:  # a process was killed, as by a machine without memory; one file each tells which it was
        yield from (_alone(work, source) for source in left)


def _end_with_parent() -> None:
    """Let this process end when the one that started it does, however that ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _alone(work: Callable[[SourceFile], FileResult], source: SourceFile) -> FileResult:
    with ProcessPoolExecutor(1, initializer=_end_with_parent) as pool:
        try:
            return pool.submit(work, source).result()
        except BrokenProcessPool:
            return FileResult(path=_name(source.file), error=f"{source.file}: its process was killed")


def _migrate_file(
    source: SourceFile, *, destination: Destination, is_folder: bool, to: str, dialect: str | None, at: str | None
) -> FileResult:
    path = _name(source.file)
    try:
        content = source.file.read_bytes()
        if not source.is_named and at is None and not may_configure(content):
            raise NothingToMigrateError(f"{path}:1:1: nothing here configures sharding")
        migration = migrate_text(_decoded(content, path), path, to=to, dialect=dialect, at=at)
        done = _write(migration, content, source, destination, is_folder=is_folder)
    except NothingToMigrateError as error:
        return FileResult(path=path, error=printable(str(error)), is_skipped=not source.is_named)
    except ConfigError as error:
        return FileResult(path=path, error=printable(str(error)))
    except OSError as error:
        return FileResult(path=path, error=printable(f"{path}: {error.strerror or error}"))
    except Exception as error:  # whatever it is: the other files have their results
        return FileResult(path=path, error=printable(f"{path}: {_unexpected(error)}"))
    return FileResult(path=path, migration=migration, done=printable(done))


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
    if not destination.in_place and destination.output is None:
        return "nothing was written"
    if destination.in_place and migration.is_new_file:
        raise ConfigError(
            f"{source.file}: the new configuration is a file of its own, which -o PATH writes; --write cannot"
        )
    if migration.exit_code and not destination.force:
        return "nothing was written: something needs a decision (--force writes all the same)"
    if destination.in_place:
        if not migration.is_changed:
            return "nothing to change"
        file = source.file.resolve()  # a link stays one
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
    target = _target(migration, source, destination, is_folder=is_folder)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    _replace(target, migration.after, like=source.file)
    return f"written to {target}"


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


def _replace(path: Path, text: str, *, like: Path) -> None:
    """Whole or not at all, with the permissions of another file.

    Raises:
        ConfigError: names what could not be written, which is not the file that was read.
    """
    try:
        with replacing(path, ending=f".{os.getpid()}.writing") as beside:
            beside.write_bytes(text.encode())
            beside.chmod(like.stat().st_mode & 0o7777)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error
