"""Files of a checkpoint: CheckpointErrors for missing and short ones, names that stay in a folder, and syncing."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any

from composer_fsdp2.checkpoint.budget import Budget
from composer_fsdp2.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Folder:
    """The files of a checkpoint: on this machine, or fetched to it when one is first opened.

    Args:
        fetch: Gets a file that is perhaps not there yet, and raises CheckpointError; None where all are there.
    """

    path: Path
    fetch: Callable[[Path], None] | None = field(default=None, compare=False, repr=False)

    def file(self, name: str) -> Path:
        """A file of the folder, on this machine."""
        file = self.path / name
        if self.fetch is not None:
            self.fetch(file)
        return file


def read_at(path: Path, offset: int, num_bytes: int) -> bytes:
    """Exactly these bytes of a file.

    Raises:
        CheckpointError: the file is missing, too short, or cannot be read.
    """
    with opened(path) as file:
        try:
            file.seek(offset)
            data = file.read(num_bytes)
        except (OSError, OverflowError, ValueError) as error:  # no file system has such a place
            raise CheckpointError(f"{path}: cannot read {num_bytes} bytes at {offset} ({error})") from error
    if len(data) != num_bytes:
        raise CheckpointError(f"{path}: ends at {offset + len(data)}, needs {offset + num_bytes} bytes (truncated?)")
    return data


@contextmanager
def damage_in(file: Path, what: str) -> Iterator[None]:
    """Python's own errors in the block as a CheckpointError: a damaged file can have any type anywhere.

    Args:
        what: The file's kind.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (AttributeError, TypeError, KeyError, IndexError, ValueError, RecursionError, OverflowError) as error:
        text = f"{type(error).__name__}: {error}"[:300]
        raise CheckpointError(f"{file}: damaged, or not {what} ({text})") from error


_JSON_BYTES_PER_BYTE = 16  # of memory for each byte of a text


def read_json(path: Path, offset: int = 0, num_bytes: int | None = None) -> Any:
    """The value of the JSON text in these bytes of a file (to its end without ``num_bytes``).

    Raises:
        CheckpointError: it is damaged, or its lists and objects would fill the memory.
    """
    if num_bytes is None:
        num_bytes = path.stat().st_size - offset
    budget = Budget.of(path, path.stat().st_size)
    budget.spend(f"a JSON text of {num_bytes} bytes", num_bytes=_JSON_BYTES_PER_BYTE * num_bytes)
    text = read_at(path, offset, num_bytes)
    budget.spend("its lists and objects", num_objects=text.count(b"{") + text.count(b"["))
    with damage_in(path, "JSON"):
        return json.loads(text)


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The file, for reading, with our error where it cannot be opened."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below, where its own errors stay what they are
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    with file:
        yield file


def write_all(file: IO[bytes], data: bytes | memoryview, at: int) -> None:
    """``os.pwrite`` until everything is written; the file's own position stays."""
    left = memoryview(data)
    while left:
        written = os.pwrite(file.fileno(), left, at)
        left, at = left[written:], at + written


def sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Sync a folder: names in it then survive a power cut."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# Names from a listing, an index or an archive, which must be files in one folder.


def inside(folder: Path, name: object, *, named_by: object, may_link: bool = False) -> Path:
    """The path in ``folder`` that a name stands for.

    Args:
        named_by: The file with the name, for the message.
        may_link: The file itself may be a link to somewhere else, as in a Hugging Face cache; a user made it.
    Raises:
        CheckpointError: it is not a relative path without ``..``, or leads out of the folder over a link. Nothing was
            opened or written.
    """
    if not isinstance(name, str):
        raise CheckpointError(f"{named_by}: names a {type(name).__name__} as a file")
    path = folder / name
    if is_plain(name):
        real = path.parent.resolve() / path.name if may_link else path.resolve()
        if real.is_relative_to(folder.resolve()):
            return path
    raise CheckpointError(f"{named_by}: names {name!r}, which lies outside of the folder; it was not opened")


def is_plain(name: str) -> bool:
    """Whether this is a relative path, without ``..``, that every file system takes."""
    path = PurePosixPath(name)
    try:
        os.fsencode(name)
    except UnicodeEncodeError:  # half a character
        return False
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name
