"""Open a checkpoint on all ranks: find it, recognize its layout, unpack it if necessary, and read its inventory."""

import contextlib
import gc
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import torch.distributed as dist

from composer_fsdp2.checkpoint.archive.disk import Folder, damage_in
from composer_fsdp2.checkpoint.budget import Budget
from composer_fsdp2.checkpoint.inventory import CheckpointInventory
from composer_fsdp2.checkpoint.layouts import Layout, listing, recognized, unrecognized
from composer_fsdp2.config.text import and_more
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.sharding.agree import agree, all_gather_object
from composer_fsdp2.sharding.hosts import first_ranks_of_hosts
from composer_fsdp2.sharding.long_work import long_work

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_RANKS = re.compile(r"\{(rank|local_rank|node_rank)\}")
_STEP = re.compile(r"ep(\d+)-ba(\d+)")
_FILE = re.compile(r"(\.(pt|tar|tgz)(\.\w+)?|rank\d+)$")
_FIRST_RANK = re.compile(r"rank0+(?!\d)")
_LATER_RANK = re.compile(r"rank0*[1-9]\d*")
_MAX_POINTER_BYTES = 4096
_MAX_DEPTH = 5  # run name, checkpoints, ep0-ba3, file


class NotACheckpointError(CheckpointError):
    """A path that does not exist, or is not a checkpoint."""


class NoCheckpointError(NotACheckpointError, FileNotFoundError):
    """A path that does not exist."""


@dataclass(frozen=True, slots=True)
class Located:
    """A checkpoint that was found: its file or folder, its layout, and remarks on how it was found.

    Args:
        unpacked_from: The user's packed file, if this is a temporary unpacked copy.
        fetch: Downloads a file of a folder unless it is already on this machine; None if all files are local.
    """

    path: Path
    layout: Layout
    remarks: tuple[str, ...] = ()
    unpacked_from: Path | None = None
    fetch: Callable[[Path], None] | None = None

    @property
    def files(self) -> list[Path]:
        """All files of the checkpoint, including those next to the path. Does not read metadata."""
        others = self.path.rglob("*") if self.path.is_dir() else self.layout.checkpoint_files(self.path)
        return [file for file in sorted({self.path, *others}) if file.is_file()]


@dataclass(frozen=True, slots=True, order=True)
class _Candidate:
    """The checkpoint of one step in a run folder. Comparison orders candidates by time."""

    batch: int
    epoch: int
    modified_s: float
    path: Path


def find(path: str | Path) -> Located:
    """Find the checkpoint to which a path leads.

    Follows symbolic links, Composer's ``.symlink`` files and other small files with a relative path (which must stay in
    their folder), ``{rank}`` (the first rank's file) and ``file://``. In a run folder it finds the newest complete
    checkpoint: by batch, then epoch, then modification time. If no name contains a step, it finds the target of a
    pointer to the latest checkpoint, or the only checkpoint.

    Raises:
        NotACheckpointError: the path does not exist, or a pointer leads to no file, in a circle or out of its folder.

    Does not communicate.
    """
    try:
        return _located(
            _existing(_local(path)), in_folder=lambda folder: _newest(folder) or _latest(folder) or _only(folder)
        )
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:  # no permission, a name that is too long or contains a NUL, a device
        raise NotACheckpointError(f"{path}: {error}") from error


def _located(existing: Path, in_folder: Callable[[Path], Located]) -> Located:
    """The checkpoint to which an existing path leads. ``in_folder`` finds it in a folder of checkpoints."""
    found = _follow(existing)
    layout = recognized(found)
    if layout is None and found.is_file() and (layout := recognized(existing)) is not None:
        found = existing  # a link whose name shows its layout: a Hugging Face cache names files by their hashes
    if layout is not None:
        return Located(found, layout)
    if found.is_dir():
        return in_folder(found)
    raise NotACheckpointError(f"{found}: {unrecognized(found)}")


# ---------------------------------------------------------------------------------------------------------------------
# Names


def _local(path: str | Path) -> Path:
    text = os.fspath(path)
    if _URI.match(text) and not os.path.lexists(text):
        parts = urlsplit(text)
        if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
            raise NotACheckpointError(
                f"{text}: not on this machine; load it with the Trainer's load_path, which fetches it, or download it "
                "first"
            )
        text = unquote(parts.path)
    return expanded(text)


def expanded(path: str | Path) -> Path:
    """Expand ``~`` in a path. ``~name`` of an unknown user stays unchanged, as in a shell.

    Raises:
        NotACheckpointError: the path is not valid on the file system.
    """
    try:
        os.fsencode(path)
        found = Path(path).expanduser()
    except UnicodeEncodeError as error:
        raise NotACheckpointError(f"{str(path)!r}: not a valid path ({error.reason})") from error
    except RuntimeError:
        found = Path(path)
    if "\0" in str(found):
        raise NotACheckpointError(f"{str(path)!r}: not a valid path: it contains a NUL")
    return found


def _existing(path: Path) -> Path:
    """Replace ``{rank}`` by the first rank's number; if there is no such file, try Composer's ``.symlink`` file."""
    if not os.path.lexists(path):
        path = Path(_RANKS.sub("0", str(path)))
    if os.path.lexists(path):
        return path
    pointer = path.with_name(path.name + ".symlink")
    if path.name and pointer.is_file():
        return pointer
    if "{" in path.name:
        raise NotACheckpointError(f"{path}: only {{rank}} is filled in; name the folder, and the newest in it is found")
    if not path.parent.is_dir():
        raise NoCheckpointError(f"{path}: no such file or folder; {path.parent} does not exist either")
    raise NoCheckpointError(f"{path}: no such file or folder; {path.parent} holds {listing(path.parent)}")


# ---------------------------------------------------------------------------------------------------------------------
# Pointers


def _follow(path: Path) -> Path:
    """Follow links and pointer files to their end."""
    seen = set()
    while True:
        try:
            found = path.resolve(strict=True)
        except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, until Python 3.13
            leads_to = f" -> {os.readlink(path)}" if path.is_symlink() else ""
            raise NoCheckpointError(f"{path}{leads_to}: a broken or circular link ({error})") from error
        target = _pointed_to(found)
        if target is None:
            return path if not path.is_symlink() else found
        if found in seen:
            raise NotACheckpointError(f"{path}: its pointer files form a cycle")
        seen.add(found)
        path = target


def _pointed_to(file: Path) -> Path | None:
    """The target of a pointer file; None for other files."""
    is_declared = file.suffix == ".symlink"
    if not file.is_file() or file.stat().st_size > _MAX_POINTER_BYTES:
        return None
    try:
        text = file.read_text().strip()
    except ValueError:
        return None
    if not text or len(text.splitlines()) != 1 or not text.isprintable():
        if is_declared:
            raise NotACheckpointError(f"{file}: a .symlink file that holds no path")
        return None
    if _URI.match(text):
        raise NotACheckpointError(f"{file}: points to {text}, which is not on this machine")
    target = _relative_target(file, Path(text).parts)
    if target is None:
        if is_declared:
            raise NotACheckpointError(f"{file}: points to {text}, which is not beside it")
        return None
    if not target.resolve().is_relative_to(file.parent.resolve()):
        raise NotACheckpointError(f"{file}: points to {text}, outside of its folder; name that checkpoint itself")
    return target


def _relative_target(file: Path, parts: tuple[str, ...]) -> Path | None:
    """The target of a relative path in the file's folder, or in a parent folder whose name starts the path.

    Composer writes paths relative to the bucket: run/checkpoints/ep0-ba3, in run/checkpoints.
    """
    for skipped in range(len(parts)):
        target = file.parent.joinpath(*parts[skipped:])
        if (not skipped or file.parent.parts[-skipped:] == parts[:skipped]) and os.path.lexists(target):
            return target
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Run folders


def _newest(folder: Path) -> Located | None:
    """The newest complete checkpoint in a run folder; None if no name contains a step."""
    skipped: list[str] = []
    for candidate in sorted(_candidates(folder), reverse=True):
        path, layout = _first_rank_file(candidate.path)
        reason = unrecognized(path) if layout is None else layout.incomplete(path)
        if reason is None and layout is not None:
            return Located(path, layout, tuple(f"skipped a newer one: {text}" for text in skipped))
        skipped.append(f"{path.relative_to(folder)}: {reason}")
    if skipped:
        raise NotACheckpointError(f"{folder}: no complete checkpoint in it; {and_more(skipped, 8, '; ')}")
    return None


def _candidates(folder: Path, depth: int = 0) -> Iterator[_Candidate]:
    """Folders and files whose names contain a step, in this folder and below."""
    for entry in sorted(_entries(folder)):
        step = _STEP.search(entry.name)
        if step is None:
            if entry.is_dir() and not entry.is_symlink() and depth < _MAX_DEPTH:
                yield from _candidates(entry, depth + 1)
        elif entry.is_dir() or (_FILE.search(entry.name) and not _LATER_RANK.search(entry.name)):
            epoch, batch = map(int, step.groups())
            yield _Candidate(batch, epoch, entry.stat().st_mtime, entry)


def _first_rank_file(entry: Path) -> tuple[Path, Layout | None]:
    """The first rank's file in the folder of a step, in which Composer 0.15 wrote one file per rank."""
    layout = recognized(entry)
    if layout is None and entry.is_dir():
        file = next((file for file in sorted(_entries(entry)) if _FIRST_RANK.search(file.name)), None)
        if file is not None:
            return file, recognized(file)
    return entry, layout


def _latest(folder: Path) -> Located | None:
    """The target of a pointer to the latest checkpoint; None if there is no pointer."""
    for pointer in sorted(folder.glob("latest*")):
        if not _LATER_RANK.search(pointer.name) and _follow(pointer) != pointer:
            # In the target folder no pointer is followed, because it could lead back.
            return _located(pointer, in_folder=lambda found: _newest(found) or _only(found))
    return None


def _only(folder: Path) -> Located:
    """The only file in a folder that is a checkpoint."""
    files = [
        Located(file, layout)
        for file in sorted(_entries(folder))
        if file.is_file() and not _LATER_RANK.search(file.name) and (layout := recognized(file)) is not None
    ]
    if len(files) == 1:
        return files[0]
    if files:
        folders = [each for each in sorted(_entries(folder)) if each.is_dir() and recognized(each) is not None]
        names = [each.name for each in (*folders, *(file.path for file in files))]
        raise NotACheckpointError(f"{folder}: contains {len(names)} checkpoints; name one: {and_more(names, 8)}")
    raise NotACheckpointError(f"{folder}: {unrecognized(folder)}")


def _entries(folder: Path) -> list[Path]:
    try:
        return [entry for entry in folder.iterdir() if entry.exists()]
    except OSError as error:
        raise NotACheckpointError(f"{folder}: {error.strerror or error}") from error


T = TypeVar("T")
_PREFIX = "composer_fsdp2-"  # of temporary folders


@contextlib.contextmanager
def as_errors_of(path: Path, unpacked_file: Path) -> Iterator[None]:
    """Within the block, replace the temporary unpacked copy by the user's packed file in error messages."""
    try:
        yield
    except CheckpointError as error:
        error.args = (str(error).replace(str(unpacked_file), str(path)),)
        raise


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    """Disable garbage collection within the block. It would take half of the time to create millions of objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def inventory_of(located: Located, *, trust: bool = False) -> CheckpointInventory:
    """Read the contents of a checkpoint, without reading tensor data or executing a pickle. Does not communicate.

    Raises:
        CheckpointError: the checkpoint is damaged, incomplete, or contains more than plain data and is not trusted.
    """
    packed = located.unpacked_from
    kind = f"{located.layout.name} as its writers leave it"
    with _without_gc(), as_errors_of(packed or located.path, located.path), damage_in(located.path, kind):
        if located.fetch is not None and located.layout.metadata is not None:
            _, read = located.layout.metadata
            inventory = read(Folder(located.path, located.fetch), trust)
        else:
            inventory = located.layout.read(located.path, trust)
            _refuse_repeated_views(inventory)
    if packed is not None:
        files = ((packed, packed.stat().st_size),)
        inventory = inventory.replaced(path=packed, layout=f"{inventory.layout}, packed", files=files, compressed=True)
    return inventory.replaced(remarks=(*located.remarks, *inventory.remarks))


def unpack(located: Located, folder: Path) -> Located:
    """Unpack a compressed or tar file into a folder. Other checkpoints are returned unchanged. Does not communicate.

    Raises:
        CheckpointError: the file is damaged, or does not contain a checkpoint; names the packed file.
    """
    if located.layout.unpack is None:
        return located
    return located_copy(located, located.layout.unpack(located.path, folder))


def located_copy(located: Located, file: Path) -> Located:
    """The unpacked copy of a packed checkpoint as a ``Located``. Raises CheckpointError as ``unpack`` does."""
    layout = recognized(file)
    if layout is None or layout.unpack is not None:
        raise CheckpointError(f"{located.path}: what is packed in it is {unrecognized(file)}")
    with as_errors_of(located.path, file):
        if len(layout.checkpoint_files(file)) > 1:
            raise CheckpointError(
                f"{file}: one rank's part of a checkpoint, packed; unpack the files of all ranks into one folder first"
            )
    return Located(file, layout, unpacked_from=located.path)


@contextlib.contextmanager
def unpacked(located: Located) -> Iterator[Located]:
    """Call ``unpack`` with a temporary folder, which exists within the block. Does not communicate."""
    with contextlib.ExitStack() as stack:
        if located.layout.unpack is not None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=_PREFIX))
            located = unpack(located, Path(folder))
        yield located


@contextlib.contextmanager
def opened_checkpoint(located: Located, *, trust: bool = False) -> Iterator[CheckpointInventory]:
    """Open a checkpoint so that its tensors can be read within the block. A packed one is unpacked once per host.

    Raises:
        CheckpointError: on all ranks; see ``inventory_of``.

    Called on all ranks, or in one process without a group; gathers a bool from each.
    """
    if all(all_gather_object(located.layout.unpack is None)):
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
    """Run ``decide`` on all ranks; if it raises on one, all raise CheckpointError. See ``agree``.

    The other ranks wait in a collective, so ``decide`` should take no more than seconds.
    """
    return agree(_raising_checkpoint_errors(decide), fingerprint, CheckpointError)


def long_together(work: Callable[[], T], what: str, *, ranks: Collection[int] | None = None) -> T:
    """Run ``work``, which may take hours, on ``ranks`` (see ``long_work``). If it raises, all raise CheckpointError.

    Returns:
        The result of ``work``; None on a rank that is not in ``ranks``.
    """
    return long_work(_raising_checkpoint_errors(work), what, ranks=ranks, error_type=CheckpointError)  # type: ignore[return-value]


def once_per_host(work: Callable[[], T], what: str, firsts: Sequence[int]) -> T:
    """Run ``work`` on the first rank of each host, and return its result on all ranks of the host.

    See ``long_together``.

    Args:
        firsts: For each rank, the first rank on its host.

    Called on all ranks; gathers the values.
    """
    values: list[Any] = all_gather_object(long_together(work, what, ranks=set(firsts)))
    found: T = values[firsts[_rank()]]
    return found


@contextlib.contextmanager
def folder_per_host(firsts: Sequence[int]) -> Iterator[Path]:
    """Create a temporary folder that the ranks of a host share. It is removed after all ranks have left the block.

    Args:
        firsts: As in ``once_per_host``.
    Raises:
        CheckpointError: on all ranks, if a host cannot create one.

    Called on all ranks.
    """
    folder = Path(once_per_host(lambda: tempfile.mkdtemp(prefix=_PREFIX), "making a folder", firsts))
    try:
        yield folder
        all_gather_object(None)  # until every rank has read
    finally:
        if firsts[_rank()] == _rank():
            shutil.rmtree(folder, ignore_errors=True)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _raising_checkpoint_errors(work: Callable[[], T]) -> Callable[[], T]:
    def attempt() -> T:
        try:
            return work()
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"{error.filename or 'reading'}: {error.strerror or error}") from error

    return attempt


# A tensor may be a view that repeats its storage, and several may be views of one storage; but all tensors of a
# checkpoint are hardly larger than its files.
_MAX_REPEATS = 8


def _refuse_repeated_views(inventory: CheckpointInventory) -> None:
    """Raise if tensors would take far more memory than the files have bytes, as views of the same bytes do."""
    num_bytes = sum(record.num_bytes for record in (*inventory.tensors.values(), *inventory.nested.values()))
    budget = Budget.of(inventory.path, more_bytes=_MAX_REPEATS * inventory.num_bytes)
    budget.spend(f"its tensors, views of the same bytes, of {num_bytes} bytes", num_bytes=num_bytes)
