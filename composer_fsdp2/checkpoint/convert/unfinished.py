"""The folder of an unfinished conversion, next to the destination, with a journal of completed tasks.

``.{name}.converting`` contains ``files/`` (the future destination), ``plan`` (the plan's fingerprint) and journals: one
line per completed task. It is renamed at the end. If the process is killed, the folder remains; the next call with the
same plan resumes. During a conversion ``.{name}.converting.lock`` is locked, so that no two conversions write to one
destination.
"""

import errno
import fcntl
import json
import logging
import os
import shutil
import socket
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from composer_fsdp2.checkpoint.archive.disk import sync_folder
from composer_fsdp2.checkpoint.archive.torch_archive import Blob
from composer_fsdp2.checkpoint.convert.copying import Copied, CopyTask
from composer_fsdp2.checkpoint.layouts._layout import OutputFile
from composer_fsdp2.checkpoint.open import Located, located_copy, unpack
from composer_fsdp2.checkpoint.records import ReadRange
from composer_fsdp2.errors import CheckpointError

log = logging.getLogger(__name__)


@contextmanager
def writing(path: Path, staging: Path | None = None) -> Iterator[None]:
    """Within the block, convert an ``OSError`` to a CheckpointError with the destination and the unfinished folder."""
    try:
        yield
    except OSError as error:
        kept = f"; what is done is kept in {staging}: call again to go on, or remove it" if staging else ""
        raise CheckpointError(f"{path}: cannot be written: {error.strerror or error}{kept}") from error


# Files in the folder: the plan's fingerprint, and the mark of the process that currently writes to it.
_PLAN, _OWNER = "plan", "owner"


class Unfinished:
    """The folder beside a destination."""

    def __init__(self, destination: Path) -> None:
        self.destination = destination
        self.folder = destination.with_name(f".{destination.name}.converting")
        self.files = self.folder / "files"
        self._owner = uuid.uuid4().hex
        self._copy: Path | None = None  # the folder with the copy of a packed source

    def path(self, file: OutputFile) -> Path:
        """The path at which a file of the destination is written before the rename."""
        return self.files / (file.name or self.destination.name)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Within the block, prevent other processes from converting to this destination.

        Raises:
            CheckpointError: another process is converting to it; names it.
        """
        lock = self.folder.with_name(f"{self.folder.name}.lock")
        new_folders = [folder for folder in self.destination.parents if not folder.exists()]
        with writing(self.destination):
            self.destination.parent.mkdir(parents=True, exist_ok=True)
            file = _opened_lock(lock)
        with file:
            try:
                if self.folder.is_symlink():
                    raise CheckpointError(f"{self.folder}: a link, where unfinished conversions are; remove it")
                if os.path.lexists(self.destination):  # another process has finished it
                    raise CheckpointError(f"{self.destination}: exists; remove it, or give another destination")
                yield
            finally:
                lock.unlink(missing_ok=True)  # while it is locked: a waiting process then creates a new one
                for folder in new_folders:
                    with suppress(OSError):  # it is not empty
                        folder.rmdir()

    @contextmanager
    def discarded_unless_begun(self) -> Iterator[None]:
        """If the block raises, remove the folder, unless it contains completed tasks of an earlier run."""
        try:
            yield
        except CheckpointError:
            if not (self.folder / _PLAN).exists():
                self.discard()
            raise

    def unpacked(self, located: Located) -> Located:
        """The source; if it is a packed file, a copy in the folder, which an earlier run may have unpacked."""
        if located.layout.unpack is None:
            return located
        packed = located.path.stat()
        folder = self._copy = self.folder / f"unpacked-{packed.st_size}-{packed.st_mtime_ns}"
        if not folder.is_dir():  # perhaps of another source
            self.discard()
        with writing(self.destination):
            folder.mkdir(parents=True, exist_ok=True)
        for file in folder.glob("*.pt"):
            with suppress(CheckpointError):  # damaged since
                copy = located_copy(located, file)
                if copy.layout.incomplete(file) is None:
                    return copy
        return unpack(located, folder)

    def begin(self, fingerprint: str, files: Sequence[OutputFile]) -> None:
        """Create the files at their full sizes, or keep those of an earlier run of the same plan.

        Raises:
            CheckpointError: not enough space for the rest of the files.
        """
        plan, parent = self.folder / _PLAN, self.destination.parent
        with writing(self.destination):
            if not plan.is_file() or plan.read_text() != fingerprint or not self.files.is_dir():
                others = [each for each in self.folder.glob("*") if each != self._copy]
                if others:
                    log.warning("%s: of another conversion, or of a source that changed since; removed", self.folder)
                for other in others:
                    shutil.rmtree(other) if other.is_dir() else other.unlink()
            there = sum(path.stat().st_blocks * 512 for path in self.files.glob("*"))
            needed, free = sum(file.num_bytes for file in files) - there, shutil.disk_usage(parent).free
            if needed > free:
                raise CheckpointError(f"{self.destination}: needs {needed} bytes, {parent} has {free} free")
            self.files.mkdir(parents=True, exist_ok=True)
            plan.write_text(fingerprint)  # after the folder: without the plan, the next run starts again
            (self.folder / _OWNER).write_text(self._owner)
        with writing(self.destination, self.folder):
            for file in files:
                self.path(file).touch()
                os.truncate(self.path(file), file.num_bytes)

    def done(self, tasks: Sequence[CopyTask]) -> dict[int, Copied]:
        """The tasks that the journals of earlier runs list as completed. A truncated last line is ignored."""
        found: dict[int, Copied] = {}
        for journal in self.folder.glob("journal-*"):
            for line in journal.read_text(errors="replace").splitlines():
                try:
                    number, crc32, parts = json.loads(line)
                    read = tuple(ReadRange(Blob(Path(path), *blob), *part) for path, blob, part in parts)
                    found[tasks[number].number] = Copied(crc32, read)
                except (ValueError, TypeError, IndexError):
                    break
        return found

    def journal(self) -> IO[str]:
        """Open the journal file for ``note``. Each line is written immediately, without buffering."""
        return open(self.folder / f"journal-{self._owner}", "w", buffering=1)

    def note(self, journal: IO[str], task: CopyTask, copied: Copied) -> None:
        """Record a finished task."""
        parts = [
            (str(p.blob.path), (p.blob.offset, p.blob.num_bytes, p.blob.crc32), (p.start, p.end, p.crc32))
            for p in copied.parts
        ]
        journal.write(json.dumps([task.number, copied.crc32, parts]) + "\n")

    def publish(self, files: Sequence[OutputFile]) -> None:
        """Rename the folder to the destination, after everything is written and synced."""
        if self.destination.exists():
            raise CheckpointError(
                f"{self.destination}: was created by another process in the meantime; it was not replaced"
            )
        if (self.folder / _OWNER).read_text() != self._owner:  # on a file system without locks
            raise CheckpointError(f"{self.destination}: another process converts to it, too; it was not written")
        if self._copy is not None:  # before the rename: if the process is killed after it, only journals remain
            shutil.rmtree(self._copy, ignore_errors=True)
        os.rename(self.files if files[0].name else self.path(files[0]), self.destination)
        sync_folder(self.destination.parent)
        self.discard()

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


def _opened_lock(path: Path) -> IO[str]:
    """Open and lock the lock file. The lock is released when the file is closed or the process exits."""
    while True:
        file = open(path, "a+")  # noqa: SIM115 - closed by the caller
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
