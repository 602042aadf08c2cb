"""A checkpoint: found and recognized once, unpacked where it must be, read into an inventory, on all ranks alike."""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from composer_fsdp2.checkpoint.archive.disk import Folder, damage_in
from composer_fsdp2.checkpoint.budget import Budget
from composer_fsdp2.checkpoint.inventory import CheckpointInventory
from composer_fsdp2.checkpoint.layouts import recognized, unrecognized
from composer_fsdp2.checkpoint.locate import Located
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.sharding.agree import agree, gather
from composer_fsdp2.sharding.hosts import first_ranks_of_hosts
from composer_fsdp2.sharding.long_work import long_work

T = TypeVar("T")
_PREFIX = "composer_fsdp2-"  # of temporary folders


@contextlib.contextmanager
def as_errors_of(path: Path, unpacked_file: Path) -> Iterator[None]:
    """Errors that name the packed file, which the user knows, and not what was unpacked from it and is gone."""
    try:
        yield
    except CheckpointError as error:
        error.args = (str(error).replace(str(unpacked_file), str(path)),)
        raise


def inventory_of(located: Located, *, trust: bool = False) -> CheckpointInventory:
    """What lies in a checkpoint, without reading tensor data or running a pickle; does not communicate.

    Raises:
        CheckpointError: damaged, incomplete, or with more than plain data and not trusted.
    """
    packed = located.unpacked_from
    with as_errors_of(packed or located.path, located.path):
        with damage_in(located.path, f"{located.layout.name} as its writers leave it"):
            if located.fetch is not None and located.layout.metadata is not None:
                _, read = located.layout.metadata
                inventory = read(Folder(located.path, located.fetch), trust)
            else:
                inventory = located.layout.read(located.path, trust)
        _refuse_repeats(inventory)
    if packed is not None:
        files = ((packed, packed.stat().st_size),)
        inventory = inventory.replaced(path=packed, layout=f"{inventory.layout}, packed", files=files, compressed=True)
    return inventory.replaced(remarks=(*located.remarks, *inventory.remarks))


def unpack(located: Located, folder: Path) -> Located:
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
    with as_errors_of(located.path, file):
        if len(layout.files_beside(file)) > 1:
            raise CheckpointError(
                f"{file}: one rank's part of a checkpoint, packed; unpack the files of all ranks into one folder first"
            )
    return Located(file, layout, unpacked_from=located.path)


@contextlib.contextmanager
def unpacked(located: Located) -> Iterator[Located]:
    """``unpack`` into a temporary folder for the length of a with block; does not communicate."""
    with contextlib.ExitStack() as stack:
        if located.layout.unpack is not None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=_PREFIX))
            located = unpack(located, Path(folder))
        yield located


@contextlib.contextmanager
def opened_checkpoint(located: Located, *, trust: bool = False) -> Iterator[CheckpointInventory]:
    """A checkpoint whose tensors can be read; a compressed one is unpacked, once on each host, for the with block.

    Raises:
        CheckpointError: on all ranks; see ``inventory_of``.
    Called on all ranks, or in one process without a group; gathers a word from each.
    """
    if all(gather(located.layout.unpack is None)):
        yield _read_together(located, trust)
        return
    firsts = first_ranks_of_hosts()
    with folder_per_host(firsts) as folder:
        copy = once_per_host(lambda: unpack(located, folder), "unpacking a checkpoint", firsts)
        with as_errors_of(located.path, copy.path):
            yield _read_together(copy, trust)


def _read_together(located: Located, trust: bool) -> CheckpointInventory:
    found = long_together(lambda: inventory_of(located, trust=trust), "reading a checkpoint's metadata")
    return together(lambda: found, lambda inventory: inventory.layout)


def together(decide: Callable[[], T], fingerprint: Callable[[T], str] = lambda _: "") -> T:
    """``decide`` on all ranks; if it raises on one, all raise CheckpointError. See ``agree``.

    The others wait in a collective: for what takes seconds.
    """
    return agree(_with_our_errors(decide), fingerprint, CheckpointError)


def long_together(work: Callable[[], T], what: str, *, ranks: Collection[int] | None = None) -> T:
    """``work`` that may take hours, on ``ranks``; if it raises on one, all raise CheckpointError. See ``long_work``.

    Returns:
        What ``work`` returned; None on a rank that is not in ``ranks``.
    """
    return long_work(_with_our_errors(work), what, ranks=ranks, error_type=CheckpointError)  # type: ignore[return-value]


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
    folder = Path(once_per_host(lambda: tempfile.mkdtemp(prefix=_PREFIX), "making a folder", firsts))
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


# A tensor may be a view that repeats what it is a view of, and several may be views of the same; but all of a
# checkpoint is hardly more than its files.
_REPEATS = 8


def _refuse_repeats(inventory: CheckpointInventory) -> None:
    """Raise where tensors would take far more memory than the files have bytes."""
    num_bytes = sum(record.num_bytes for record in (*inventory.tensors.values(), *inventory.nested.values()))
    budget = Budget.of(inventory.path, more_bytes=_REPEATS * inventory.num_bytes)
    budget.spend(f"its tensors, views of the same bytes, of {num_bytes} bytes", num_bytes=num_bytes)
