"""A checkpoint: found and recognized once, unpacked where it must be, read into an inventory, on all ranks alike."""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from composer_fsdp2.checkpoint.archive.packed import as_errors_of
from composer_fsdp2.checkpoint.inventory import CheckpointInventory
from composer_fsdp2.checkpoint.layouts import recognized
from composer_fsdp2.checkpoint.locate import Located, find
from composer_fsdp2.checkpoint.unrecognized import unrecognized
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.sharding.agree import agree, gather
from composer_fsdp2.sharding.hosts import first_ranks_of_hosts
from composer_fsdp2.sharding.long_work import long_work

T = TypeVar("T")
_UNPACKING = "unpacking a checkpoint"


def inventory_of(located: Located, *, trust: bool = False) -> CheckpointInventory:
    """What lies in a checkpoint, without reading tensor data or running a pickle; does not communicate.

    Raises:
        CheckpointError: damaged, incomplete, or with more than plain data and not trusted.
    """
    with as_errors_of(located.unpacked_from or located.path, located.path):
        inventory = _read(located, trust)
        _refuse_repeats(inventory)
    return inventory.replaced(remarks=(*located.remarks, *inventory.remarks))


def _read(located: Located, trust: bool) -> CheckpointInventory:
    try:
        return located.layout.read(located.path, trust)
    except CheckpointError:
        raise
    except (AttributeError, TypeError, KeyError, IndexError, ValueError, RecursionError, OverflowError) as error:
        # A pickle may hold anything anywhere: a list where Composer has a dict, or itself.
        raise CheckpointError(
            f"{located.path}: {located.layout.name}, but not as Composer writes it ({error!r})"
        ) from error


def unpacked_checkpoint(located: Located, folder: Path) -> Located:
    """The checkpoint itself, or a copy in a folder where it is compressed or in a tar file; does not communicate.

    Raises:
        CheckpointError: damaged, or what is packed is no checkpoint; names the packed file.
    """
    if located.layout.unpack is None:
        return located
    file = located.layout.unpack(located.path, folder)
    layout = recognized(file)
    if layout is None or layout.unpack is not None:
        raise CheckpointError(f"{located.path}: what is packed in it is {unrecognized(file)}")
    return Located(file, layout, unpacked_from=located.path)


@dataclass(frozen=True, slots=True)
class Opened:
    """An inventory, and whether its file is gone after the with block."""

    inventory: CheckpointInventory
    is_temporary: bool


@contextlib.contextmanager
def opened_checkpoint(path: str | Path | Located, *, trust: bool = False) -> Iterator[Opened]:
    """A checkpoint whose tensors can be read; a compressed one is unpacked, once on each host, for the with block.

    Raises:
        CheckpointError: on all ranks; see ``inventory_of``.
    Called on all ranks, or in one process without a group; gathers a word from each.
    """
    located = together(lambda: path if isinstance(path, Located) else find(path))
    if all(gather(located.layout.unpack is None)):
        yield Opened(_together_read(located, trust), is_temporary=False)
        return
    firsts = first_ranks_of_hosts()
    with folder_per_host(firsts) as folder:
        copy = once_per_host(lambda: unpacked_checkpoint(located, folder), _UNPACKING, firsts)
        with as_errors_of(located.path, copy.path):
            yield Opened(_together_read(copy, trust), is_temporary=True)


def read_together(located: Located, *, trust: bool = False) -> CheckpointInventory:
    """The inventory on all ranks; a compressed file is unpacked for that by one rank of each host.

    Raises:
        CheckpointError: on all ranks; see ``inventory_of``.
    Called on all ranks, or in one process without a group; gathers the inventory of a compressed file.
    """
    if all(gather(located.layout.unpack is None)):
        return _together_read(located, trust)
    return once_per_host(lambda: inventory_of(located, trust=trust), _UNPACKING, first_ranks_of_hosts())


def _together_read(located: Located, trust: bool) -> CheckpointInventory:
    return together(lambda: inventory_of(located, trust=trust), lambda found: found.layout)


def together(decide: Callable[[], T], fingerprint: Callable[[T], str] = lambda _: "") -> T:
    """``decide`` on all ranks; if it raises on one, all raise CheckpointError. See ``agree``.

    The others wait in a collective: for what takes seconds.
    """
    return agree(_with_our_errors(decide), fingerprint, CheckpointError)


def long_together(work: Callable[[], T], what: str, *, ranks: Collection[int] | None = None) -> T | None:
    """``work`` that may take hours, on ``ranks``; if it raises on one, all raise CheckpointError. See ``long_work``."""
    return long_work(_with_our_errors(work), what, ranks=ranks, error_type=CheckpointError)


def once_per_host(work: Callable[[], T], what: str, firsts: Sequence[int]) -> T:
    """What ``work`` returns on the first rank of each host, on all ranks of the host; see ``long_together``.

    Args:
        firsts: For each rank, the first one on its host.
    Called on all ranks; gathers the values.
    """
    values: list[Any] = gather(long_together(work, what, ranks=set(firsts)))
    found: T = values[firsts[_rank()]]
    return found


@contextlib.contextmanager
def folder_per_host(firsts: Sequence[int]) -> Iterator[Path]:
    """A temporary folder that the ranks of a host share, removed once all ranks have left the with block.

    Args:
        firsts: As in ``once_per_host``.
    Raises:
        CheckpointError: on all ranks: a host cannot make one.
    """
    folder = Path(once_per_host(lambda: tempfile.mkdtemp(prefix="composer_fsdp2-"), "making a folder", firsts))
    try:
        yield folder
        gather(None)  # until every rank has read
    finally:
        if firsts[_rank()] == _rank():
            shutil.rmtree(folder, ignore_errors=True)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _with_our_errors(work: Callable[[], T]) -> Callable[[], T]:
    def attempt() -> T:
        try:
            return work()
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"{error.filename or 'reading'}: {error.strerror or error}") from error

    return attempt


# A tensor may be a view that repeats what it is a view of (as the limit for one in ``pickles`` says), and several may
# be views of the same; but all of a checkpoint is hardly more than its files.
_MAX_REPEATED_BYTES, _MAX_REPEATS = 256 << 20, 8


def _refuse_repeats(inventory: CheckpointInventory) -> None:
    """Raise where tensors would take far more memory than the files have bytes; packed ones show once unpacked."""
    num_bytes = sum(record.num_bytes for record in (*inventory.tensors.values(), *inventory.nested.values()))
    most = _MAX_REPEATED_BYTES + _MAX_REPEATS * inventory.num_bytes
    if num_bytes > most and not inventory.compressed:
        raise CheckpointError(
            f"{inventory.path}: its tensors are views of the same bytes and would take {num_bytes} bytes, but the "
            f"files have {inventory.num_bytes}; refused"
        )
