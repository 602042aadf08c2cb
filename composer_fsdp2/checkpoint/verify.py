"""Whether a checkpoint is what was once written, and whether it equals another one.

``torch.load`` and DCP check neither: a flipped bit, or two entries swapped in ``.metadata``, load as wrong values. Yet
torch writes a CRC32 for every record of every archive, so that an old checkpoint can be checked without a manifest.
"""

import os
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from composer_fsdp2.checkpoint.archive import Archive, Blob, opened, read_at
from composer_fsdp2.checkpoint.comparing import compare
from composer_fsdp2.checkpoint.crc import shifted
from composer_fsdp2.checkpoint.faults import Fault, FaultKind
from composer_fsdp2.checkpoint.formats import compressed
from composer_fsdp2.checkpoint.inspect import inspect_checkpoint
from composer_fsdp2.checkpoint.inventory import CheckpointInventory, Chunk, Entry, Strided
from composer_fsdp2.checkpoint.locate import NotACheckpointError, locate
from composer_fsdp2.checkpoint.trust import StoredTensor, UntrustedError, read_pickle
from composer_fsdp2.errors import CheckpointError

__all__ = ["Fault", "FaultKind", "VerifyReport", "verify_checkpoint"]

_SLICE_BYTES = 256 << 10  # one read, small enough to lie in the cache when its CRC is computed
_PIECE_BYTES = 64 << 20  # what one thread takes at a time
_NUM_THREADS = 2  # a copy from the page cache takes about as long as the CRC
_ZIP_MAGIC = b"PK\x03\x04"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What ``verify_checkpoint`` found.

    Args:
        layout: As ``inspect_checkpoint`` says it.
        faults: Of the checkpoint itself: its structure and its content.
        differences: From the other one.
        unchecked: What could not be checked, in words; it does not count against ``ok``.
        num_records: Records whose CRC32 was computed, and their bytes.
    """

    path: Path
    against: Path | None
    layout: str
    faults: tuple[Fault, ...]
    differences: tuple[Fault, ...]
    unchecked: tuple[str, ...]
    num_records: int
    num_bytes: int
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.faults and not self.differences

    def __str__(self) -> str:
        lines = [
            f"{self.path}: {self.layout}, {self.num_records} records, {self.num_bytes} bytes, {self.seconds:.1f} s"
        ]
        for fault in (*self.faults, *self.differences):
            lines.append(f"{fault.kind.value}: {fault}")
        lines += [f"not checked: {text}" for text in self.unchecked]
        equal = f", equal to {self.against}" if self.against else ""
        found = [f"{len(of)} {what}" for what, of in (("faults", self.faults), ("differences", self.differences)) if of]
        return "\n".join([*lines, f"ok{equal}" if self.ok else ", ".join(found)])

    def to_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "against": str(self.against) if self.against else None,
            "ok": self.ok,
            "layout": self.layout,
            "faults": [fault.to_json() for fault in self.faults],
            "differences": [fault.to_json() for fault in self.differences],
            "unchecked": list(self.unchecked),
            "num_records": self.num_records,
            "num_bytes": self.num_bytes,
            "seconds": self.seconds,
        }


def verify_checkpoint(
    path: str | Path,
    against: str | Path | None = None,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    trust: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Check a checkpoint of any layout: its structure, its content, and whether it equals another one.

    Structure: every file is there, what the metadata says lies within it, chunks tile each tensor, each entry's own
    header has the shape and dtype that ``.metadata`` says, nothing overlaps, and nothing is there that nobody names.
    Content: the CRC32 of every record of every archive. All faults come together, as far as the damage leaves the rest
    readable. Memory is a few MiB, whatever the size of the checkpoint; compressed files and tar files are unpacked
    into the folder for temporary files (``TMPDIR``).

    What nobody can find in a checkpoint alone, and ``against`` shows:

    - Two entries of one shape and dtype, swapped in ``.metadata``, or a key renamed there: a DCP file does not say
      whose bytes it holds, and ``.metadata`` has no checksum.
    - Changed tensor bytes in safetensors files, which have no checksums, and in archives that were saved after
      ``torch.serialization.set_crc32_options(False)``: there torch writes 0 for each CRC32. ``unchecked`` names them.
    - A change made together with its CRC32: this finds accidents, not forgers.

    Args:
        against: A checkpoint of any layout. Tensors are matched by name, without FSDP1's and other wrappers' prefixes,
            and compared as they are read, bit for bit or within the tolerance; so are optimizer state and all other
            entries. Safetensors hold weights alone, so that only weights are compared with them. Only the structure of
            the other checkpoint is checked.
        rtol, atol: As in ``torch.isclose``. A difference in dtype is a difference under any tolerance.
        trust: Unpickle what is not on the allow-list, where the layout or a comparison needs its value.
        progress: Called now and then with the bytes done and the bytes to do.
    Raises:
        CheckpointError: nothing to verify: no checkpoint of a known layout, not trusted, or flat parameters to be
            compared with named ones. Damage is no error but a fault in the report.
    Every process that calls it works alone; it does not communicate.
    """
    started = time.perf_counter()
    located = locate(path)
    with ExitStack() as stack:
        other = _readable(inspect_checkpoint(against, trust=trust), trust, stack) if against is not None else None
        check = _Check()
        inventory = check.read(located, trust, stack)
        if inventory is not None and other is not None and inventory.flat != other.flat:
            raise CheckpointError(
                f"{inventory.path if inventory.flat else other.path}: holds flat parameters, which have no names to "
                "compare by; convert it first (convert_checkpoint(..., model=...))"
            )
        check.structure(inventory, located)
        content_bytes = sum(record.blob.num_bytes for record in check.records)
        compared_bytes = _compared_bytes(inventory, other)
        advance = _Advance(content_bytes + compared_bytes, progress)
        check.content(advance)
        differences: tuple[Fault, ...] = ()
        if inventory is not None and other is not None:
            differences, notes = compare(inventory, other, rtol=rtol, atol=atol, advance=advance)
            check.unchecked += notes
        elif other is not None:
            check.unchecked.append(f"not compared with {against}: {located} cannot be read")
    return VerifyReport(
        path=located,
        against=Path(against) if against is not None else None,
        layout=check.layout,
        faults=check.found(located),
        differences=differences,
        unchecked=tuple(check.unchecked),
        num_records=len(check.records),
        num_bytes=content_bytes,
        seconds=time.perf_counter() - started,
    )


def _readable(inventory: CheckpointInventory, trust: bool, stack: ExitStack) -> CheckpointInventory:
    """The inventory, of an unpacked copy where the checkpoint is compressed or in a tar file."""
    if not compressed.recognise(inventory.path):
        return inventory
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="composer-fsdp2-"))
    return inspect_checkpoint(compressed.unpacked(inventory.path, Path(folder)), trust=trust)


def _compared_bytes(inventory: CheckpointInventory | None, other: CheckpointInventory | None) -> int:
    if inventory is None or other is None:
        return 0
    return sum(record.num_bytes for i in (inventory, other) for record in i.tensors.values())


@dataclass(slots=True)
class _Advance:
    """Counts bytes for ``progress``; threads may call it, the first one reports."""

    total: int
    report: Callable[[int, int], None] | None
    done: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: int = field(default_factory=threading.get_ident)

    def __call__(self, num_bytes: int) -> None:
        with self._lock:
            self.done += num_bytes
        if self.report is not None and threading.get_ident() == self._thread:
            self.report(min(self.done, self.total), self.total)


# ---------------------------------------------------------------------------------------------------------------------
# Structure


@dataclass(frozen=True, slots=True)
class _Record:
    """A record of an archive, and whose it is."""

    blob: Blob
    name: str


@dataclass(frozen=True, slots=True)
class _Named:
    """An archive within a file, as ``.metadata`` names it; a chunk of a tensor, or an object."""

    entry: Entry
    name: str
    chunk: Chunk | None = None
    dtype: torch.dtype | None = None


class _Everything(frozenset[str]):
    """All names: whatever a pickle names stays a name. Structure needs no values, so nothing needs trust."""

    def __contains__(self, name: object) -> bool:
        return True


@dataclass(slots=True)
class _Check:
    """One pass over a checkpoint; faults gather, and records to be read."""

    faults: list[Fault] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    records: list[_Record] = field(default_factory=list)
    layout: str = ""
    _unpacked: Path | None = None
    _owners: dict[tuple[Path, int], list[str]] = field(default_factory=dict)  # names of tensors, by their record
    _without_crc: list[str] = field(default_factory=list)

    def fault(self, file: Path, name: str, expected: str, found: str, kind: FaultKind = FaultKind.STRUCTURE) -> None:
        self.faults.append(Fault(kind=kind, file=file, name=name, expected=expected, found=found))

    def found(self, located: Path) -> tuple[Fault, ...]:
        """The faults, in the names that the user gave."""
        if self._unpacked is None:
            return tuple(self.faults)
        unpacked = str(self._unpacked)
        return tuple(replace(f, file=located, found=f.found.replace(unpacked, str(located))) for f in self.faults)

    def read(self, located: Path, trust: bool, stack: ExitStack) -> CheckpointInventory | None:
        """The inventory; None (and faults) where it is damaged."""
        self.layout = "unreadable"
        try:
            inventory = inspect_checkpoint(located, trust=trust)
            self.layout = inventory.layout
            readable = _readable(inventory, trust, stack)
        except (NotACheckpointError, UntrustedError):
            raise
        except CheckpointError as error:
            for line in str(error).splitlines():
                self.fault(located, "", "a readable checkpoint", line)
            return None
        if readable is not inventory:
            self._unpacked = readable.path
        return readable

    def structure(self, inventory: CheckpointInventory | None, located: Path) -> None:
        """Look at every file, and note what can be read of it."""
        if inventory is None:
            files = [located] if located.is_file() else _files_in(located)
            named: dict[Path, list[_Named]] = {}
        else:
            files = [file for file, _ in inventory.files]
            named = _named_entries(inventory)
            self._note_owners(inventory)
        without_checksum = []
        for file in files:
            size = file.stat().st_size
            if file in named:
                self._entries(file, size, named[file])
            elif file.suffix == ".distcp":
                if inventory is not None:
                    self.fault(file, "", "no such file (.metadata does not name it)", f"{size} bytes")
                self._unnamed(file, 0, size, is_fault=False)
            elif size >= len(_ZIP_MAGIC) and read_at(file, 0, len(_ZIP_MAGIC)) == _ZIP_MAGIC:
                self._archive(_Named(Entry(file, 0, size), ""))
            else:
                without_checksum.append(str(file.relative_to(located)) if located.is_dir() else file.name)
        if without_checksum:
            self.unchecked.append(f"content of files without a checksum: {_some(without_checksum)}")
        if inventory is not None and inventory.path.is_dir():
            others = sorted(f.name for f in set(_files_in(inventory.path)) - set(files))
            if others:
                self.unchecked.append(f"files that do not belong to it: {_some(others)}")
        if self._without_crc:
            self.unchecked.append(
                "content of archives saved without CRC32s (torch.serialization.set_crc32_options(False)): "
                f"{_some(self._without_crc)}"
            )

    def _note_owners(self, inventory: CheckpointInventory) -> None:
        for record in (*inventory.tensors.values(), *inventory.nested.values()):
            for chunk in record.chunks:
                if isinstance(chunk.source, Strided):
                    blob = chunk.source.blob
                    self._owners.setdefault((blob.path, blob.offset), []).append(record.name)

    def _entries(self, file: Path, size: int, named: list[_Named]) -> None:
        """A file of a DCP directory: its entries, and what lies between them."""
        at = 0
        for one in sorted(named, key=lambda one: one.entry.offset):
            if one.entry.offset > at:
                self._unnamed(file, at, one.entry.offset, is_fault=True)
            at = max(at, one.entry.offset + one.entry.num_bytes)
            self._archive(one)
        if at < size:
            self._unnamed(file, at, size, is_fault=True)

    def _unnamed(self, file: Path, start: int, end: int, *, is_fault: bool) -> None:
        """Bytes that no metadata speaks of: perhaps archives, whose content can be checked all the same."""
        archives, rest = _archives_between(file, start, end)
        for entry in archives:
            value = _skeleton(entry)
            # A DTensor's empty part, of a rank beyond the last row, is written and has no chunk.
            is_empty = isinstance(value, StoredTensor) and 0 in value.shape
            if is_fault and not is_empty:
                found = f"{entry.num_bytes} bytes, an archive of {_described(value)}"
                self.fault(file, f"byte {entry.offset}", "the next entry that .metadata names", found)
            self._archive(_Named(entry, f"the entry at byte {entry.offset}"), is_named=False)
        if rest:
            self.fault(file, f"byte {start}", "an entry", f"{rest} bytes that are no archive (truncated?)")

    def _archive(self, one: _Named, *, is_named: bool = True) -> None:
        """Note the records of an archive, and compare its pickle with its records and with the metadata."""
        entry = one.entry
        try:
            archive = Archive.open(entry.path, entry.offset, entry.num_bytes)
        except CheckpointError as error:
            self.fault(entry.path, one.name, "an archive as torch.save writes it", str(error))
            return
        for name, blob in archive.blobs.items():
            owners = self._owners.get((blob.path, blob.offset), [])
            owner = one.name or _some(owners, limit=3)
            self.records.append(_Record(blob, f"{owner} (record {name})" if owner else f"record {name}"))
        if all(blob.crc32 is None for blob in archive.blobs.values()):
            self._without_crc.append(one.name or entry.path.name)
        skeleton = _skeleton_of(archive)
        if skeleton is None:
            return  # its content is damaged, which is reported as that
        if isinstance(skeleton.value, CheckpointError):
            if one.chunk is not None:
                self.fault(entry.path, one.name, "a tensor", str(skeleton.value))
            else:
                self.unchecked.append(f"which records are used: {skeleton.value}")
            return
        for name in sorted(skeleton.unused):
            surplus = f"{archive.blobs[name].num_bytes} bytes that its pickle does not use"
            self.fault(entry.path, f"{one.name} record {name}".strip(), "no such record", surplus)
        self._header(one, skeleton.value, is_named)

    def _header(self, one: _Named, value: Any, is_named: bool) -> None:
        if one.chunk is not None:
            expected = f"{one.dtype} of shape {one.chunk.sizes}"
            is_same = isinstance(value, StoredTensor) and (value.dtype, value.shape) == (one.dtype, one.chunk.sizes)
            if not is_same:
                self.fault(one.entry.path, one.name, expected, _described(value))
        elif is_named and one.name and isinstance(value, StoredTensor):
            self.fault(one.entry.path, one.name, "no tensor, as .metadata says", _described(value))

    # -----------------------------------------------------------------------------------------------------------------
    # Content

    def content(self, advance: Callable[[int], None]) -> None:
        """Compare the CRC32 of every record."""
        self.records.sort(key=lambda record: (str(record.blob.path), record.blob.offset))
        computed, errors = _checksums([record.blob for record in self.records], advance)
        for record, crc32 in zip(self.records, computed, strict=True):
            if record.blob.crc32 is not None and crc32 != record.blob.crc32:
                path, expected = record.blob.path, f"CRC32 {record.blob.crc32:08x}"
                if (error := errors.get(path)) is not None:
                    self.fault(path, record.name, expected, error, FaultKind.CONTENT)
                else:
                    self.fault(path, record.name, expected, f"CRC32 {crc32:08x}", FaultKind.CONTENT)


def _some(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _named_entries(inventory: CheckpointInventory) -> dict[Path, list[_Named]]:
    """The entries of a DCP directory, by file."""
    named: dict[Path, list[_Named]] = {}
    for record in inventory.tensors.values():
        for chunk in record.chunks:
            if isinstance(chunk.source, Entry):
                name = record.name if len(record.chunks) == 1 else f"{record.name} at {chunk.offsets}"
                named.setdefault(chunk.source.path, []).append(_Named(chunk.source, name, chunk, record.dtype))
    for entry in inventory.objects.values():
        if entry.source is not None:
            named.setdefault(entry.source.path, []).append(_Named(entry.source, entry.name))
    return named


def _files_in(folder: Path) -> list[Path]:
    """All files below a folder, without links that lead out of it."""
    root = folder.resolve()
    return [f for f in sorted(folder.rglob("*")) if f.is_file() and f.resolve().is_relative_to(root)]


@dataclass(frozen=True, slots=True)
class _Skeleton:
    """A pickle with every class inert: its value (or why it cannot be read), and the records that it does not use."""

    value: Any
    unused: set[str]


def _skeleton_of(archive: Archive) -> _Skeleton | None:
    """None where the pickle's bytes are damaged."""
    used = set()

    def num_bytes(key: str) -> int:
        used.add(f"data/{key}")
        return archive.storage(key).num_bytes

    try:
        data = archive.read("data.pkl")
    except CheckpointError as error:
        return None if "data.pkl" in archive.blobs else _Skeleton(error, set())
    try:
        value = read_pickle(data, where=archive.where, inert=_Everything(), storages=num_bytes)
    except CheckpointError as error:
        return _Skeleton(error, set())
    return _Skeleton(value, {name for name in archive.blobs if name.startswith("data/")} - used)


def _skeleton(entry: Entry) -> Any:
    try:
        skeleton = _skeleton_of(Archive.open(entry.path, entry.offset, entry.num_bytes))
    except CheckpointError as error:
        return error
    return skeleton.value if skeleton is not None else None


def _described(value: Any) -> str:
    if isinstance(value, StoredTensor):
        return f"{value.dtype} of shape {value.shape}"
    return str(value) if isinstance(value, CheckpointError) else f"a {type(value).__name__}"


def _archives_between(file: Path, start: int, end: int) -> tuple[list[Entry], int]:
    """Archives that lie end to end in a range of a file, found from its end; and how many bytes at its start are none.

    A zip archive's last bytes say how long its directory is and where, from the archive's start, it begins.
    """
    found: list[Entry] = []
    while end > start:
        begin = _archive_start(file, start, end)
        if begin is None:
            break
        found.append(Entry(file, begin, end - begin))
        end = begin
    return found[::-1], end - start


def _archive_start(file: Path, start: int, end: int) -> int | None:
    """Where the archive that ends at ``end`` begins (zip's end records, without a comment, of 22, 20 and 56 bytes)."""
    tail = read_at(file, max(start, end - 98), end - max(start, end - 98))
    last, locator, wide = tail[-22:], tail[-42:-22], tail[-98:-42]
    if last[:4] != b"PK\x05\x06":
        return None
    if locator[:4] == b"PK\x06\x07" and wide[:4] == b"PK\x06\x06":
        length, offset = int.from_bytes(wide[40:48], "little"), int.from_bytes(wide[48:56], "little")
        begin = end - 98 - length - offset
    else:
        length, offset = int.from_bytes(last[12:16], "little"), int.from_bytes(last[16:20], "little")
        begin = end - 22 - length - offset
    return begin if start <= begin < end else None


def _checksums(blobs: list[Blob], advance: Callable[[int], None]) -> tuple[list[int], dict[Path, str]]:
    """The CRC32 of each run of bytes, and what went wrong in reading a file; the caller works as one of the threads."""
    crcs, errors = [0] * len(blobs), dict[Path, str]()
    pieces, lock = _pieces(blobs), threading.Lock()

    def work() -> None:
        buffer = memoryview(bytearray(_SLICE_BYTES))
        with ExitStack() as stack:
            file: Any = None
            path: Path | None = None
            while True:
                with lock:
                    number, start, end = next(pieces, (-1, 0, 0))
                if number < 0:
                    return
                blob = blobs[number]
                try:
                    if path != blob.path:
                        stack.close()
                        path, file = blob.path, stack.enter_context(opened(blob.path))
                    crc = _checksum(file.fileno(), blob.offset + start, end - start, buffer)
                except (OSError, CheckpointError) as error:
                    path = None
                    with lock:
                        errors[blob.path] = str(error)
                    continue
                with lock:
                    crcs[number] ^= shifted(crc, blob.num_bytes - end)
                advance(end - start)

    others = [threading.Thread(target=work, daemon=True) for _ in range(_NUM_THREADS - 1)]
    for thread in others:
        thread.start()
    work()
    for thread in others:
        thread.join()
    return crcs, errors


def _pieces(blobs: Iterable[Blob]) -> Iterator[tuple[int, int, int]]:
    """(number of the blob, start, end), small enough to be shared out."""
    for number, blob in enumerate(blobs):
        for start in range(0, blob.num_bytes, _PIECE_BYTES):
            yield number, start, min(start + _PIECE_BYTES, blob.num_bytes)


def _checksum(fd: int, offset: int, num_bytes: int, buffer: memoryview) -> int:
    crc, end = 0, offset + num_bytes
    while offset < end:
        num_read = os.preadv(fd, [buffer[: min(len(buffer), end - offset)]], offset)
        if num_read == 0:
            raise OSError(f"the file ends at byte {offset}")
        crc = zlib.crc32(buffer[:num_read], crc)
        offset += num_read
    return crc
