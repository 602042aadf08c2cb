"""A checkpoint on its way: a folder beside the destination, what is done in a journal, renamed at the end.

``.{name}.converting`` holds ``files/`` (the destination to be), ``plan`` (the plan's fingerprint) and journals: a line
for each finished task. A process that was killed leaves it; the next call with the same plan goes on from there. While
it is worked on, ``.{name}.converting.lock`` beside it is locked, so that no two conversions write to one destination.
"""

import errno
import fcntl
import json
import logging
import os
import shutil
import socket
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from composer_fsdp2.checkpoint.archive.disk import sync_folder
from composer_fsdp2.checkpoint.archive.torch_archive import Blob
from composer_fsdp2.checkpoint.convert.copying import Copied, CopyTask
from composer_fsdp2.checkpoint.output import OutputFile
from composer_fsdp2.checkpoint.records import ReadRange
from composer_fsdp2.errors import CheckpointError

log = logging.getLogger(__name__)


@contextmanager
def writing(path: Path, staging: Path | None = None) -> Iterator[None]:
    """An ``OSError`` in the block as ours, naming the destination and what is kept."""
    try:
        yield
    except OSError as error:
        kept = f"; what is done is kept in {staging}: call again to go on, or remove it" if staging else ""
        raise CheckpointError(f"{path}: cannot be written: {error.strerror or error}{kept}") from error


class Unfinished:
    """The folder beside a destination. Of a shared file system, if several processes write."""

    def __init__(self, destination: Path) -> None:
        self.destination = destination
        self.folder = destination.with_name(f".{destination.name}.converting")
        self.files = self.folder / "files"
        self.unpacked = self.folder / "unpacked"
        self._owner = uuid.uuid4().hex

    def path(self, file: OutputFile) -> Path:
        """The path under which a file of the destination is written."""
        return self.files / (file.name or self.destination.name)

    def needed_bytes(self, files: Sequence[OutputFile]) -> int:
        """How much of the files is not on the disk yet."""
        there = sum(path.stat().st_blocks * 512 for path in self.files.glob("*")) if self.files.is_dir() else 0
        return max(0, sum(file.num_bytes for file in files) - there)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other process converts to this destination within the block. On one rank only.

        Raises:
            CheckpointError: another one does now; names it.
        """
        lock = self.folder.with_name(f"{self.folder.name}.lock")
        with writing(self.destination):
            self.destination.parent.mkdir(parents=True, exist_ok=True)
            file = _opened_lock(lock)
        with file:
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)  # while it is held: whoever waited for it makes another

    def is_of(self, fingerprint: str) -> bool:
        """Whether the next run would go on with what is there; a run that was killed may have published it."""
        try:
            return (self.folder / "plan").read_text() == fingerprint and self.files.is_dir()
        except OSError:
            return False

    def discard_others(self, fingerprint: str) -> None:
        """Remove what another plan left, or what is left of a finished one."""
        if self.folder.exists() and not self.is_of(fingerprint):
            log.warning("%s: of another conversion, or of a source that changed since; removed", self.folder)
            shutil.rmtree(self.folder)

    def prepare(self, fingerprint: str) -> None:
        """Make the folder, or keep that of an earlier run."""
        if not self.folder.exists():
            self.files.mkdir(parents=True)
            (self.folder / "plan").write_text(fingerprint)  # last: without it, the next run begins from nothing
        (self.folder / _OWNER).write_text(self._owner)

    def make_files(self, files: Sequence[OutputFile]) -> None:
        """Make the files at their full sizes, or keep those of an earlier run."""
        for file in files:
            self.path(file).touch()
            os.truncate(self.path(file), file.num_bytes)

    def is_unpacked(self) -> bool:
        return any(self.unpacked.glob("*.pt"))

    def unpacked_file(self) -> Path:
        """The source, where it was compressed."""
        return next(self.unpacked.glob("*.pt"))

    def journals(self) -> list[Path]:
        return sorted(self.folder.glob("journal-*"))

    def done(self, tasks: Sequence[CopyTask], sources: Sequence[Path]) -> dict[int, Copied]:
        """What earlier runs finished, as far as they noted; a last line may be cut short."""
        found: dict[int, Copied] = {}
        for journal in self.journals():
            for line in journal.read_text().splitlines():
                try:
                    number, crcs, parts = json.loads(line)
                    read = tuple(
                        ReadRange(Blob(sources[file], offset, size, crc), start, end, part)
                        for file, offset, size, crc, start, end, part in parts
                    )
                    found[tasks[number].number] = Copied(tuple(crcs), read)
                except (ValueError, TypeError, IndexError):
                    break
        return found

    def journal(self, number: int) -> "Journal":
        return Journal(self.folder / f"journal-{number:06d}")

    def publish(self, files: Sequence[OutputFile]) -> None:
        """Give the destination its name. On one rank only, when all have written and synced."""
        if self.destination.exists():
            raise CheckpointError(
                f"{self.destination}: was created by another process in the meantime; it was not replaced"
            )
        if (self.folder / _OWNER).read_text() != self._owner:  # on a file system without locks
            raise CheckpointError(f"{self.destination}: another process converts to it, too; it was not written")
        is_one_file = not files[0].name
        shutil.rmtree(self.unpacked, ignore_errors=True)  # before: a kill after the rename leaves only journals
        os.rename(self.path(files[0]) if is_one_file else self.files, self.destination)
        sync_folder(self.destination.parent)
        self.discard()

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


# In the folder: who writes to it now.
_OWNER = "owner"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


def _opened_lock(path: Path) -> IO[str]:
    """The file, locked as long as it is open, which ends with the process at the latest."""
    while True:
        file = open(path, "a+")  # noqa: SIM115 - closed by who asked for it
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip()
            file.close()
            raise CheckpointError(
                f"{path}: another process converts to this destination now{f' ({owner})' if owner else ''}; "
                "wait for it, or give another destination"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                file.close()
                raise
            log.warning("%s: cannot be locked here (%s); see that no other process converts to it", path, error)
            return file
        if _is_file_at(file, path):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            return file
        file.close()  # another process has removed it since it was opened


def _is_file_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


class Journal:
    """One rank's notes of one run."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "w")  # noqa: SIM115 - closed by close()

    def note(self, task: CopyTask, copied: Copied, sources: Mapping[Path, int]) -> None:
        parts: list[Any] = [
            (sources[p.blob.path], p.blob.offset, p.blob.num_bytes, p.blob.crc32, p.start, p.end, p.crc32)
            for p in copied.parts
        ]
        self._file.write(json.dumps([task.number, copied.crcs, parts]) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
