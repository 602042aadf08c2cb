"""Check that a checkpoint's files, offsets, headers and metadata agree with each other. Does not read tensor data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from composer_fsdp2.checkpoint.archive.disk import Folder, read_at
from composer_fsdp2.checkpoint.archive.torch_archive import Archive, Blob, archive_start
from composer_fsdp2.checkpoint.differences import Fault, FaultKind
from composer_fsdp2.checkpoint.inventory import CheckpointInventory, Chunk, NestedArchive, Strided
from composer_fsdp2.checkpoint.layouts import LAYOUTS
from composer_fsdp2.checkpoint.pickles.stand_ins import StoredTensor
from composer_fsdp2.checkpoint.pickles.trust import read_pickle
from composer_fsdp2.config.text import and_more
from composer_fsdp2.errors import CheckpointError

_ZIP_MAGIC = b"PK\x03\x04"


@dataclass(frozen=True, slots=True)
class _Named:
    """An archive within a file that ``.metadata`` lists: a chunk of a tensor, or an object."""

    entry: NestedArchive
    name: str
    chunk: Chunk | None = None
    dtype: torch.dtype | None = None


def _entry(file: Path, offset: int, num_bytes: int) -> NestedArchive:
    return NestedArchive(Folder(file.parent), file.name, offset, num_bytes)


class _Everything(frozenset[str]):
    """Makes every name in a pickle inert. The structure can be checked without values, and therefore without trust."""

    def __contains__(self, name: object) -> bool:
        return True


@dataclass(slots=True)
class Structure:
    """A check of a checkpoint's structure.

    Args:
        faults: The contradictions that were found.
        unchecked: Parts that could not be checked, as text.
        records: The records whose contents can be checked, and the tensors or entries to which they belong.
    """

    faults: list[Fault] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    records: list[tuple[Blob, str]] = field(default_factory=list)
    _owners: dict[tuple[Path, int], list[str]] = field(default_factory=dict)  # names of tensors, by their record
    _without_crc: list[str] = field(default_factory=list)

    def fault(self, file: Path, name: str, expected: str, found: str) -> None:
        self.faults.append(Fault(kind=FaultKind.STRUCTURE, file=file, name=name, expected=expected, found=found))

    def look_at(self, inventory: CheckpointInventory | None, located: Path) -> None:
        """Check every file, and collect the records in it."""
        if inventory is None:
            files = [located] if located.is_file() else _files_in(located)
            named: dict[Path, list[_Named]] = {}
        else:
            files = [located] if inventory.compressed else [file for file, _ in inventory.files]
            named = _named_entries(inventory)
            self._note_owners(inventory)
        without_checksum = [file for file in files if not self._look_at_file(file, named, inventory)]
        shown = [str(file.relative_to(located)) if located.is_dir() else file.name for file in without_checksum]
        self._not_checked("content of files without a checksum", shown)
        if inventory is not None and inventory.path.is_dir():
            others = set(_files_in(inventory.path)) - set(files)
            self._not_checked("files that do not belong to it", sorted(file.name for file in others))
        self._not_checked(
            "content of archives saved without CRC32s (torch.serialization.set_crc32_options(False))", self._without_crc
        )

    def _look_at_file(
        self, file: Path, named: Mapping[Path, list[_Named]], inventory: CheckpointInventory | None
    ) -> bool:
        """Check one file. Returns False if nothing in it can be checked."""
        size = file.stat().st_size
        if file in named:
            self._entries(file, size, named[file])
        elif any(layout.contains_entries(file) for layout in LAYOUTS):  # also a file that was passed without its folder
            if inventory is not None:
                self.fault(file, "", "no such file (.metadata does not name it)", f"{size} bytes")
            self._unnamed(file, 0, size, is_fault=False)
        elif size >= len(_ZIP_MAGIC) and read_at(file, 0, len(_ZIP_MAGIC)) == _ZIP_MAGIC:
            self._archive(_Named(_entry(file, 0, size), ""))
        else:
            return False
        return True

    def _not_checked(self, what: str, names: Sequence[str]) -> None:
        if names:
            self.unchecked.append(f"{what}: {and_more(names, 8)}")

    def _note_owners(self, inventory: CheckpointInventory) -> None:
        for record in (*inventory.tensors.values(), *inventory.nested.values()):
            for chunk in record.chunks:
                if isinstance(chunk.source, Strided):
                    blob = chunk.source.blob
                    self._owners.setdefault((blob.path, blob.offset), []).append(record.name)

    def _entries(self, file: Path, size: int, named: list[_Named]) -> None:
        """Check a file of a DCP folder: its entries, and the bytes between them."""
        at = 0
        for one in sorted(named, key=lambda one: one.entry.offset):
            if one.entry.offset > at:
                self._unnamed(file, at, one.entry.offset, is_fault=True)
            at = max(at, one.entry.offset + one.entry.num_bytes)
            self._archive(one)
        if at < size:
            self._unnamed(file, at, size, is_fault=True)

    def _unnamed(self, file: Path, start: int, end: int, *, is_fault: bool) -> None:
        """Check bytes that the metadata does not list. If they are archives, their contents can still be checked."""
        archives, rest = _archives_between(file, start, end)
        for entry in archives:
            value = self._archive(_Named(entry, f"the entry at byte {entry.offset}"), is_named=False)
            # DTensor writes the empty shard of a rank beyond the last row, without a chunk.
            is_empty = isinstance(value, StoredTensor) and 0 in value.shape
            if is_fault and not is_empty:
                found = f"{entry.num_bytes} bytes, an archive of {_described(value)}"
                self.fault(file, f"byte {entry.offset}", "the next entry that .metadata names", found)
        if rest:
            self.fault(file, f"byte {start}", "an entry", f"{rest} bytes that are no archive (truncated?)")

    def _archive(self, one: _Named, *, is_named: bool = True) -> Any:
        """Collect the records of an archive, and compare its pickle with its records and with the metadata.

        Returns:
            The value of the pickle with inert classes; an error if it cannot be read.
        """
        entry = one.entry
        try:
            archive = entry.open()
        except CheckpointError as error:
            self.fault(entry.path, one.name, "an archive as torch.save writes it", str(error))
            return error
        for name, blob in archive.blobs.items():
            owner = one.name or and_more(self._owners.get((blob.path, blob.offset), []), 3)
            self.records.append((blob, f"{owner} (record {name})" if owner else f"record {name}"))
        if all(blob.crc32 is None for blob in archive.blobs.values()):
            self._without_crc.append(one.name or entry.path.name)
        value, unused = _skeleton(archive)
        if isinstance(value, CheckpointError):
            if one.chunk is not None:
                self.fault(entry.path, one.name, "a tensor", str(value))
            else:
                self.unchecked.append(f"which records are used: {value}")
        for name in sorted(unused):
            surplus = f"{archive.blobs[name].num_bytes} bytes that its pickle does not use"
            self.fault(entry.path, f"{one.name} record {name}".strip(), "no such record", surplus)
        if value is None or isinstance(value, CheckpointError):
            return value
        is_tensor = isinstance(value, StoredTensor)
        if one.chunk is None and is_named and one.name and is_tensor:
            self.fault(entry.path, one.name, "no tensor, as .metadata says", _described(value))
        if one.chunk is not None and not (is_tensor and (value.dtype, value.shape) == (one.dtype, one.chunk.sizes)):
            self.fault(entry.path, one.name, f"{one.dtype} of shape {one.chunk.sizes}", _described(value))
        return value


def _named_entries(inventory: CheckpointInventory) -> dict[Path, list[_Named]]:
    """The entries of a DCP directory, by file."""
    named: dict[Path, list[_Named]] = {}
    for record in inventory.tensors.values():
        for chunk in record.chunks:
            if isinstance(chunk.source, NestedArchive):
                name = record.name if len(record.chunks) == 1 else f"{record.name} at {chunk.offsets}"
                named.setdefault(chunk.source.path, []).append(_Named(chunk.source, name, chunk, record.dtype))
    # All empty dicts share one entry, which lists them.
    objects = {entry.source: entry.name for entry in reversed(inventory.objects.values()) if entry.source is not None}
    for source, name in objects.items():
        named.setdefault(source.path, []).append(_Named(source, name))
    return named


def _files_in(folder: Path) -> list[Path]:
    """All files below a folder, excluding links that lead out of it."""
    root = folder.resolve()
    return [f for f in sorted(folder.rglob("*")) if f.is_file() and f.resolve().is_relative_to(root)]


def _skeleton(archive: Archive) -> tuple[Any, set[str]]:
    """The value of an archive's pickle with inert classes, and the records that it does not use.

    An error if it cannot be read. None if its bytes are damaged, which is reported separately.
    """
    used = set()

    def num_bytes(key: str) -> int:
        used.add(f"data/{key}")
        return archive.storage(key).num_bytes

    try:
        data = archive.read("data.pkl")
    except CheckpointError as error:
        return None if "data.pkl" in archive.blobs else error, set()
    try:
        value = read_pickle(data, where=archive.where, inert=_Everything(), storages=num_bytes)
    except CheckpointError as error:
        return error, set()
    return value, {name for name in archive.blobs if name.startswith("data/")} - used


def _described(value: Any) -> str:
    if isinstance(value, StoredTensor):
        return f"{value.dtype} of shape {value.shape}"
    return str(value) if isinstance(value, CheckpointError) else f"a {type(value).__name__}"


def _archives_between(file: Path, start: int, end: int) -> tuple[list[NestedArchive], int]:
    """The archives that fill a range of a file up to its end, and the number of other bytes at its start.

    They are found from the end: a zip archive's last bytes contain the length of its directory and the directory's
    offset from the archive's start.
    """
    found: list[NestedArchive] = []
    while end > start:
        begin = archive_start(file, start, end)
        if begin is None:
            break
        found.append(_entry(file, begin, end - begin))
        end = begin
    return found[::-1], end - start
