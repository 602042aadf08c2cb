"""``verify_checkpoint``: check that a checkpoint is intact, and optionally that it equals another one.

``torch.load`` and DCP check neither: a flipped bit, or two entries swapped in ``.metadata``, load as wrong values. But
torch writes a CRC32 for every record of every archive, so an old checkpoint can be checked without a manifest.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from composer_fsdp2.checkpoint.archive.torch_archive import Blob
from composer_fsdp2.checkpoint.differences import Fault, FaultKind
from composer_fsdp2.checkpoint.inventory import CheckpointInventory
from composer_fsdp2.checkpoint.open import Located, find, inventory_of, unpacked
from composer_fsdp2.checkpoint.pickles.trust import UntrustedError
from composer_fsdp2.checkpoint.records import damage_of
from composer_fsdp2.checkpoint.verify.comparing import Comparison
from composer_fsdp2.checkpoint.verify.structure import Structure
from composer_fsdp2.config.text import and_more, lines_and_more
from composer_fsdp2.config.value import Value
from composer_fsdp2.errors import CheckpointError

_SHOWN_FAULTS = 20
_NUM_THREADS = 2  # a copy from the page cache takes about as long as the CRC32


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport(Value):
    """The result of ``verify_checkpoint``.

    Args:
        layout: As in ``inspect_checkpoint``.
        faults: Faults of the structure and the contents of the checkpoint itself.
        differences: Differences from the other checkpoint.
        bookkeeping: Differences in times, paths and names of runs, which do not affect ``ok``.
        unchecked: Parts that could not be checked, as text. They do not affect ``ok``.
        num_records: The number of records whose CRC32 was computed.
        is_content_checked: Whether any contents were checked, by CRC32s or against the other checkpoint.

    Example:
        >>> torch.save({"state": {"model": nn.Linear(4, 2).state_dict()}}, "ep1.pt")
        >>> report = verify_checkpoint("ep1.pt")
        >>> report.ok, report.faults
        (True, ())
    """

    path: Path
    against: Path | None
    layout: str
    faults: tuple[Fault, ...]
    differences: tuple[Fault, ...]
    bookkeeping: tuple[Fault, ...]
    unchecked: tuple[str, ...]
    num_records: int
    num_bytes: int
    is_content_checked: bool
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.faults and not self.differences

    def __str__(self) -> str:
        lines = [
            f"{self.path}: {self.layout}, {self.num_records} records, {self.num_bytes} bytes, {self.seconds:.1f} s"
        ]
        found = [f"{fault.kind.value}: {fault}" for fault in (*self.faults, *self.differences)]
        if found:
            lines.append(lines_and_more(found, _SHOWN_FAULTS))
        if self.bookkeeping:
            names = and_more([each.name for each in self.bookkeeping], 3)
            lines.append(
                f"bookkeeping (clocks, paths, names of runs) differs in {len(self.bookkeeping)} entries: {names}"
            )
        lines += [f"not checked: {text}" for text in self.unchecked]
        if self.ok and not self.is_content_checked:
            return "\n".join([*lines, "the structure is ok; no content was checked: --against OTHER compares it"])
        equal = f", equal to {self.against}" if self.against else ""
        counts = {"fault": len(self.faults), "difference": len(self.differences)}
        totals = [f"{count} {noun}{'s' if count > 1 else ''}" for noun, count in counts.items() if count]
        return "\n".join([*lines, f"ok{equal}" if self.ok else ", ".join(totals)])

    def to_json(self) -> dict[str, Any]:
        return {**Value.to_json(self), "ok": self.ok}


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

    - Structure: every file exists and contains the ranges of the metadata, chunks tile each tensor, each entry's own
      header has the shape and dtype of ``.metadata``, no entries overlap, and the metadata lists all bytes.
    - Contents: the CRC32 of every record of every archive.

    All faults are reported together, as far as the damage leaves the other parts readable. It takes a few MiB of memory
    for any size of the checkpoint. Compressed files and tar files are unpacked into the folder for temporary files
    (``TMPDIR``).

    Faults that only a comparison with another checkpoint (``against``) can find:

    - Two entries of one shape and dtype, swapped in ``.metadata``, or a key renamed there: a DCP file does not contain
      the names of its tensors, and ``.metadata`` has no checksum.
    - Changed tensor bytes in safetensors files, which have no checksums, and in archives that were saved after
      ``torch.serialization.set_crc32_options(False)``: there torch writes 0 for each CRC32. ``unchecked`` names them.
    - A change made together with its CRC32: this finds accidents, not forgers.

    Args:
        against: A checkpoint of any layout. Tensors are matched by FQN, without FSDP1's and other wrappers' prefixes,
            and compared as they are read, bit for bit or within the tolerance; so are optimizer state and all other
            entries. Safetensors files contain only weights, so only weights are compared with them. Only the structure
            of the other checkpoint is checked.
        rtol, atol: As in ``torch.isclose``. A difference in dtype is a difference under any tolerance.
        trust: Unpickle names that are not on the allow-list, if the layout or a comparison needs the value.
        progress: Called repeatedly with the number of completed bytes and the total.
    Raises:
        CheckpointError: the checkpoint cannot be verified: it has no known layout, is not trusted, or has flat
            parameters that cannot be compared with named ones. Damage does not raise; the report lists it as a fault.
    Does not communicate; any single rank can call it.

    Example:
        >>> torch.save({"state": {"model": nn.Linear(4, 2).state_dict()}}, "ep1.pt")
        >>> verify_checkpoint("ep1.pt", against="ep1.pt").ok
        True
    """
    started = time.perf_counter()
    located = find(path)
    with ExitStack() as stack:
        other = None
        if against is not None:
            other = inventory_of(stack.enter_context(unpacked(find(against))), trust=trust)
        opened, inventory, faults = located, None, list[Fault]()
        try:
            opened = stack.enter_context(unpacked(located))
            inventory = inventory_of(opened, trust=trust)
        except UntrustedError:
            raise
        except CheckpointError as error:
            lines = str(error).splitlines()
            faults = [_fault(FaultKind.STRUCTURE, located.path, "", "a readable checkpoint", line) for line in lines]
        if inventory is not None and other is not None and inventory.flat != other.flat:
            raise CheckpointError(
                f"{inventory.path if inventory.flat else other.path}: holds flat parameters, which have no names to "
                "compare by; convert it first (convert_checkpoint(..., model=...))"
            )
        structure = Structure()
        structure.look_at(inventory, opened.path)
        unchecked = structure.unchecked
        content_bytes = sum(blob.num_bytes for blob, _ in structure.records)
        advance = _Advance(content_bytes + _compared_bytes(inventory, other), progress)
        damaged = _content(structure.records, advance)
        differences: tuple[Fault, ...] = ()
        bookkeeping: tuple[Fault, ...] = ()
        if inventory is not None and other is not None:
            comparison = Comparison(found=inventory, expected=other, rtol=rtol, atol=atol, advance=advance)
            comparison.run()
            differences, bookkeeping = tuple(comparison.faults), tuple(comparison.bookkeeping)
            unchecked += comparison.notes
        elif other is not None:
            unchecked.append(f"not compared with {against}: {located.path} cannot be read")
    return VerifyReport(
        path=located.path,
        against=Path(against) if against is not None else None,
        layout=inventory.layout if inventory is not None else "unreadable",
        faults=tuple(_with_user_path(fault, opened) for fault in (*faults, *structure.faults, *damaged)),
        differences=differences,
        bookkeeping=bookkeeping,
        unchecked=tuple(unchecked),
        num_records=len(structure.records),
        num_bytes=content_bytes,
        is_content_checked=(inventory is not None and other is not None)
        or any(blob.crc32 is not None for blob, _ in structure.records),
        seconds=time.perf_counter() - started,
    )


def _with_user_path(fault: Fault, located: Located) -> Fault:
    """Replace the path of an unpacked copy in a fault by the user's file."""
    packed = located.unpacked_from
    if packed is None:
        return fault
    return replace(fault, file=packed, found=fault.found.replace(str(located.path), str(packed)))


def _fault(kind: FaultKind, file: Path, name: str, expected: str, found: str) -> Fault:
    return Fault(kind=kind, file=file, name=name, expected=expected, found=found)


def _content(records: list[tuple[Blob, str]], advance: Callable[[int], None]) -> list[Fault]:
    """Compare every record with its CRC32. Return a fault for each that differs."""
    in_order = sorted(records, key=lambda record: (str(record[0].path), record[0].offset))
    faults = []
    threads = ThreadPoolExecutor(_NUM_THREADS)
    try:
        damages = threads.map(lambda record: damage_of(record[0], ()), in_order)
        for (blob, name), damage in zip(in_order, damages, strict=True):
            advance(blob.num_bytes)
            if damage is not None:
                found = damage.removesuffix(f", the file says {blob.crc32:08x}")
                faults.append(_fault(FaultKind.CONTENT, blob.path, name, f"CRC32 {blob.crc32:08x}", found))
    finally:
        threads.shutdown(cancel_futures=True)  # progress may raise, for example on Ctrl-C
    return faults


def _compared_bytes(inventory: CheckpointInventory | None, other: CheckpointInventory | None) -> int:
    if inventory is None or other is None:
        return 0
    return sum(record.num_bytes for i in (inventory, other) for record in i.tensors.values())


@dataclass(slots=True)
class _Advance:
    """Counts bytes for ``progress``."""

    total: int
    report: Callable[[int, int], None] | None
    done: int = 0

    def __call__(self, num_bytes: int) -> None:
        self.done += num_bytes
        if self.report is not None:
            self.report(min(self.done, self.total), self.total)
