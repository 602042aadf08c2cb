"""Files of a checkpoint: missing and short ones are our errors, and what is written can be waited for."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

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


def read_text(path: Path, *, max_bytes: int) -> str:
    """A small text file.

    Raises:
        CheckpointError: it is too large for what it should be, or not UTF-8 text.
    """
    with opened(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise CheckpointError(f"{path}: larger than {max_bytes} bytes, the limit for such a file")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text ({error})") from error


# A tenth of what 24 MiB of them would be; a model of 140,000 tensors in one file has 420,000.
_MAX_CONTAINERS = 1_000_000


def parsed_json(text: str | bytes, where: object) -> Any:
    """The value that a JSON text of some MiB stands for.

    Raises:
        CheckpointError: it has more lists and objects than fit in some hundred MiB.
        ValueError: it is not JSON.
    """
    braces: tuple[Any, Any] = ("{", "[") if isinstance(text, str) else (b"{", b"[")
    if text.count(braces[0]) + text.count(braces[1]) > _MAX_CONTAINERS:
        raise CheckpointError(f"{where}: more than {_MAX_CONTAINERS} lists and objects, the limit for such a file")
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
    """Sync a folder, so that names in it survive a power cut."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
