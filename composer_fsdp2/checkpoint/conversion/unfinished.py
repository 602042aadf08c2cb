"""A checkpoint on its way: a folder beside the destination, what is done in a journal, renamed at the end.

``.{name}.converting`` holds ``files/`` (the destination to be), ``plan`` (the plan's fingerprint) and journals: a line
for each finished unit. A process that was killed leaves it; the next call with the same plan goes on from there.
"""

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from composer_fsdp2.checkpoint.conversion.copying import Copied, Unit
from composer_fsdp2.checkpoint.conversion.writers import OutputFile
from composer_fsdp2.checkpoint.reading import Part
from composer_fsdp2.checkpoint.storage.archive import Blob
from composer_fsdp2.checkpoint.storage.archive_writer import sync_folder
from composer_fsdp2.errors import CheckpointError

__all__ = ["Unfinished", "writing"]

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

    def path(self, file: OutputFile) -> Path:
        """Where a file of the destination is written."""
        return self.files / (file.name or self.destination.name)

    def needed_bytes(self, files: Sequence[OutputFile]) -> int:
        """How much of the files is not on the disk yet."""
        there = sum(path.stat().st_blocks * 512 for path in self.files.glob("*")) if self.files.is_dir() else 0
        return max(0, sum(file.num_bytes for file in files) - there)

    def is_of(self, fingerprint: str) -> bool:
        try:
            return (self.folder / "plan").read_text() == fingerprint
        except OSError:
            return False

    def discard_others(self, fingerprint: str) -> None:
        """Remove what another plan left."""
        if self.folder.exists() and not self.is_of(fingerprint):
            log.warning("%s: of another conversion, or of a source that changed since; removed", self.folder)
            shutil.rmtree(self.folder)

    def prepare(self, files: Sequence[OutputFile], fingerprint: str) -> None:
        """Make the files at their full sizes, or keep those of an earlier run."""
        if self.folder.exists():
            return
        self.files.mkdir(parents=True)
        for file in files:
            self.path(file).touch()
            os.truncate(self.path(file), file.num_bytes)
        (self.folder / "plan").write_text(fingerprint)  # last: without it, the next run begins anew

    def is_unpacked(self) -> bool:
        return any(self.unpacked.glob("*.pt"))

    def unpacked_file(self) -> Path:
        """The source, where it was compressed."""
        return next(self.unpacked.glob("*.pt"))

    def journals(self) -> list[Path]:
        return sorted(self.folder.glob("journal-*"))

    def done(self, units: Sequence[Unit], sources: Sequence[Path]) -> dict[int, Copied]:
        """What earlier runs finished, as far as they noted; a last line may be cut short."""
        found: dict[int, Copied] = {}
        for journal in self.journals():
            for line in journal.read_text().splitlines():
                try:
                    number, crcs, parts = json.loads(line)
                    read = tuple(
                        Part(Blob(sources[file], offset, size, crc), start, end, part)
                        for file, offset, size, crc, start, end, part in parts
                    )
                    found[units[number].number] = Copied(tuple(crcs), read)
                except (ValueError, TypeError, IndexError):
                    break
        return found

    def journal(self, number: int) -> "Journal":
        return Journal(self.folder / f"journal-{number:06d}")

    def publish(self, files: Sequence[OutputFile]) -> None:
        """Give the destination its name. On one rank only, when all have written and synced."""
        if self.destination.exists():
            raise CheckpointError(f"{self.destination}: was made meanwhile by someone else; it was not replaced")
        is_one_file = not files[0].name
        shutil.rmtree(self.unpacked, ignore_errors=True)  # before: a kill after the rename leaves only journals
        os.rename(self.path(files[0]) if is_one_file else self.files, self.destination)
        sync_folder(self.destination.parent)
        self.discard()

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class Journal:
    """One rank's notes of one run."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "w")  # noqa: SIM115 - closed by close()

    def note(self, unit: Unit, copied: Copied, sources: Mapping[Path, int]) -> None:
        parts: list[Any] = [
            (sources[p.blob.path], p.blob.offset, p.blob.num_bytes, p.blob.crc32, p.start, p.end, p.crc32)
            for p in copied.parts
        ]
        self._file.write(json.dumps([unit.number, copied.crcs, parts]) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
