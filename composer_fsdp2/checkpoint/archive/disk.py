"""Read and write checkpoint files: CheckpointErrors for missing and short files, safe paths, and syncing to disk."""

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
    """The folder of a checkpoint, on this machine or downloaded file by file.

    Args:
        fetch: Downloads a file unless it is already on this machine; raises CheckpointError. None if all files are
            local.
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
    """Read exactly ``num_bytes`` bytes of a file, from ``offset``.

    Raises:
        CheckpointError: the file is missing, too short, or cannot be read.
    """
    with opened(path) as file:
        try:
            file.seek(offset)
            data = file.read(num_bytes)
        except (OSError, OverflowError, ValueError) as error:  # no file has such an offset
            raise CheckpointError(f"{path}: cannot read {num_bytes} bytes at {offset} ({error})") from error
    if len(data) != num_bytes:
        raise CheckpointError(f"{path}: ends at {offset + len(data)}, needs {offset + num_bytes} bytes (truncated?)")
    return data


@contextmanager
def damage_in(file: Path, what: str) -> Iterator[None]:
    """Within the block, convert any exception to a CheckpointError: parsing a damaged file can raise any type.

    Args:
        what: The kind of the file, for the message.
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
    """Parse the JSON text in these bytes of a file. Without ``num_bytes``, parse up to the end of the file.

    Raises:
        CheckpointError: the text is damaged, or its lists and objects would take too much memory.
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
    """Open a file for reading. Raises CheckpointError if that fails."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below, where its own errors stay what they are
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    with file:
        yield file


def write_all(file: IO[bytes], data: bytes | memoryview, at: int) -> None:
    """Call ``os.pwrite`` until everything is written. The position of ``file`` does not change."""
    left = memoryview(data)
    while left:
        written = os.pwrite(file.fileno(), left, at)
        left, at = left[written:], at + written


def sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Sync a folder to disk, so that new names in it survive a power failure."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# Names from a listing, an index or an archive must be files in one folder.


def inside(folder: Path, name: object, *, named_by: object, may_link: bool = False) -> Path:
    """The path that ``name`` has in ``folder``, checked to be inside of it.

    Args:
        named_by: The file that contains the name, for the message.
        may_link: The file itself may be a symbolic link out of the folder, as in a Hugging Face cache. Users create
            such links.
    Raises:
        CheckpointError: the name is not a relative path without ``..``, or leads out of the folder through a link.

    Does not open or write the file.
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
    """Whether this is a relative path without ``..`` that is valid on every file system."""
    path = PurePosixPath(name)
    try:
        os.fsencode(name)
    except UnicodeEncodeError:  # half a character
        return False
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name
