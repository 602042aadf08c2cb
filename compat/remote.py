"""Checkpoints in object stores and behind URLs: what the ranks of a machine need of one, in a folder that they share.

Of a layout that has its metadata in one file, that is downloaded first, and each other file when a rank of this machine
opens it; of every other layout all files are, by the ranks of a machine together.
"""

import contextlib
import fcntl
import functools
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from composer.utils import dist, maybe_create_object_store_from_uri, parse_uri
from composer.utils.checkpoint import _ensure_valid_checkpoint
from composer.utils.file_helpers import _get_file
from composer.utils.retrying import retry

from composer_fsdp2.checkpoint.archive.disk import inside
from composer_fsdp2.checkpoint.layouts import LAYOUTS, Layout, recognized
from composer_fsdp2.checkpoint.open import (
    Located,
    NoCheckpointError,
    find,
    folder_per_host,
    long_together,
    once_per_host,
    together,
)
from composer_fsdp2.config.text import and_more
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.sharding.agree import gather

_LINK = ".symlink"
_LINK_FILE = "link"  # of this machine, with a downloaded link's text
_RANKS = re.compile(r"\{(rank|local_rank|node_rank)\}")
_MAX_LINKS = 8
_DOWNLOADING = "downloading a checkpoint"


@contextlib.contextmanager
def local_checkpoint(path: str, object_store: Any, progress_bar: bool) -> Iterator[Located]:
    """A checkpoint, wherever it lies, for the length of a with block. Called on all ranks.

    Args:
        path: On this machine; a URL or a URI; or an object's name, a prefix of names (a folder), or a ``.symlink``
            to either, in ``object_store``.
        object_store: One of Composer's, or a LoggerDestination that can download.
    Raises:
        CheckpointError: on all ranks; there is nothing, or it cannot be downloaded. Names the objects.
    """
    is_url = path.lower().startswith(("http://", "https://"))
    if object_store is None and not is_url:
        object_store = maybe_create_object_store_from_uri(path)
        path = parse_uri(path)[2] if object_store is not None else path
    if object_store is None and not is_url:
        local = _find_on_local_rank_0(path)
        located = together(lambda: local if isinstance(local, Located) else find(local))
        long_together(lambda: _validate_share(located), "validating a checkpoint")
        yield located
        return
    firsts = _first_ranks_of_machines()
    with folder_per_host(firsts) as folder:
        source = _Store(object_store, progress_bar, folder / "incomplete")
        found = once_per_host(lambda: _find(source, path, folder), _DOWNLOADING, firsts)
        together(lambda: found, lambda path: path.name)  # a link may have changed between two machines' reading
        long_together(functools.partial(_download_share, source, found), _DOWNLOADING)
        if found.layout is not None:
            yield Located(found.local, found.layout, fetch=functools.partial(_fetch, source, found))
        else:
            yield found.located or together(lambda: find(found.local))


def _find_on_local_rank_0(path: str) -> str | Located:
    """What all ranks of this machine read, as under Composer: what its first rank finds.

    Each rank may have named a folder of its own (``tempfile.mkdtemp()``), of which the first one's was written to.
    Where the first rank finds nothing each rank names its own path in its error.
    Called on all ranks, gathers what they found.
    """
    found = None
    if dist.get_local_rank() == 0:
        with contextlib.suppress(CheckpointError):
            found = find(path)
            found = replace(found, path=found.path.absolute())
    return gather(found)[_first_ranks_of_machines()[dist.get_global_rank()]] or path


def _first_ranks_of_machines() -> list[int]:
    """For each rank, the first one of its machine, as Composer's launcher counts them. Called on all ranks."""
    return gather(dist.get_global_rank() - dist.get_local_rank())


def _validate_share(located: Located) -> None:
    """The user's own check of a checkpoint's files, which the ranks of a machine share between them."""
    for file in located.files[dist.get_local_rank() :: dist.get_local_world_size()]:
        _validate(file)


def _validate(file: Path) -> None:
    """The user's own check of a file, which CHECKPOINT_VALIDATION_FUNCTION names, before anything of it is read.

    Raises:
        CheckpointError: it refused the file.
    """
    try:
        _ensure_valid_checkpoint(file)
    except ValueError as error:
        raise CheckpointError(f"CHECKPOINT_VALIDATION_FUNCTION: {error}") from error


# ---------------------------------------------------------------------------------------------------------------------
# The store


class _Store:
    """An object store or server that checkpoints are downloaded from."""

    def __init__(self, object_store: Any, progress_bar: bool, incomplete: Path) -> None:
        self._store, self._progress_bar, self._incomplete = object_store, progress_bar, incomplete

    def __str__(self) -> str:
        return type(self._store).__name__ if self._store is not None else "the server"

    def download(self, name: str, file: Path) -> bool:
        """Whether there is such an object; it is in ``file`` then.

        Raises:
            CheckpointError: it could not be downloaded, also after five attempts, or the user's own check refused it.
        """
        incomplete = self._folder_of(name) / file.name
        try:
            is_there = self._download(name, incomplete)
        except Exception as error:
            raise CheckpointError(
                f"{name} could not be downloaded from {self}: {type(error).__name__}: {error}"
            ) from error
        if is_there:
            if file.name != _LINK_FILE:
                _validate(incomplete)
            file.parent.mkdir(parents=True, exist_ok=True)
            incomplete.replace(file)
        return is_there

    @retry(num_attempts=5)  # as Composer's download_object_or_file, but not where there is nothing
    def _download(self, name: str, file: Path) -> bool:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            _get_file(name, str(file), self._store, overwrite=True, progress_bar=self._progress_bar)
        except FileNotFoundError:
            return False
        return True

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """No other rank of this machine downloads the object within the block."""
        (folder := self._folder_of(name)).mkdir(parents=True, exist_ok=True)
        with open(folder / ".lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _folder_of(self, name: str) -> Path:
        """Where an object is until it is complete; names may be longer than a file's may."""
        return self._incomplete / hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()

    def names_below(self, folder: str) -> list[str]:
        """The objects whose names begin with a folder's; none where the store cannot list."""
        try:
            return sorted(self._store.list_objects(f"{folder}/"))
        except (AttributeError, NotImplementedError):
            return []


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What a name stands for.

    Args:
        name: Of the object, or of the folder.
        local: The same on this machine.
        located: Of an object that is a checkpoint.
        layout: Of a folder of which only the file with the metadata is there.
        missing: Other files on this machine that must be downloaded before it can be read.
    """

    name: str
    local: Path
    located: Located | None = None
    layout: Layout | None = None
    missing: tuple[Path, ...] = ()

    def name_of(self, file: Path) -> str:
        """The object's name of a file: in the folder that was found, or beside the file that was."""
        if file.is_relative_to(self.local):
            return f"{self.name}/{file.relative_to(self.local).as_posix()}"
        return str(PurePosixPath(self.name).with_name(file.name))


def _download_share(source: _Store, found: _Found) -> None:
    """This rank's share of the files that are needed before anything is read."""
    for file in found.missing[dist.get_local_rank() :: dist.get_local_world_size()]:
        _fetch(source, found, file)


def _fetch(source: _Store, found: _Found, file: Path) -> None:
    """Download a file, unless a rank of this machine has; the others that need it wait for the one that does."""
    name = found.name_of(file)
    if not file.exists():
        with source.locked(name):
            if not file.exists() and not source.download(name, file):
                raise NoCheckpointError(f"{source} has no {name}, which belongs to {found.name}")


def _find(source: _Store, path: str, folder: Path) -> _Found:
    """Follow links to an object or a folder, and download the object, or the folder's metadata."""
    name, tried = _RANKS.sub("0", path).rstrip("/"), list[str]()
    for _ in range(_MAX_LINKS):
        if not name.endswith(_LINK):
            if (found := _object_or_folder(source, name, folder, tried)) is not None:
                return found
            name += _LINK
        tried.append(name)
        target = _link_target(source, name, folder)
        if target is None:
            raise NoCheckpointError(f"{source} has nothing at {path}; tried {', '.join(tried)}")
        name = target
    raise CheckpointError(f"{path} in {source}: more than {_MAX_LINKS} links in a row; the last is {name}")


def _link_target(source: _Store, name: str, folder: Path) -> str | None:
    """The name in a ``.symlink`` object, which Composer writes beside its checkpoints; None if there is none."""
    file = folder / _LINK_FILE
    if not source.download(name, file):
        return None
    text = file.read_text().strip()
    target = (parse_uri(text)[2] if "://" in text else text).rstrip("/")
    if not target:
        raise CheckpointError(f"{name} in {source}: an empty link")
    return target


def _object_or_folder(source: _Store, name: str, folder: Path, tried: list[str]) -> _Found | None:
    basename = PurePosixPath(name).name
    file, local = (inside(folder / kind, basename, named_by=f"{source}") for kind in ("file", "folder"))

    def try_object() -> _Found | None:
        tried.append(name)
        if not source.download(name, file):
            return None
        if (layout := recognized(file)) is None:
            return _Found(name=name, local=file)
        others = set(layout.files_beside(file)) - {file}
        return _Found(name=name, local=file, located=Located(file, layout), missing=tuple(sorted(others)))

    def try_folder() -> _Found | None:
        for layout in LAYOUTS:
            if layout.metadata is not None:
                file, _ = layout.metadata
                tried.append(f"{name}/{file}")
                if source.download(tried[-1], local / file):
                    return _Found(name=name, local=local, layout=layout)
        return _listed_folder(source, name, local)

    # A name with an ending is a file's most often, and each question to a store costs time.
    attempts = (try_object, try_folder) if PurePosixPath(name).suffix else (try_folder, try_object)
    return attempts[0]() or attempts[1]()


def _listed_folder(source: _Store, name: str, local: Path) -> _Found | None:
    """Other layouts that are folders: safetensors, and Composer's checkpoint package."""
    # What ends with a slash is not a file: stores' own pages make such objects for folders.
    below = [below.removeprefix(f"{name}/") for below in source.names_below(name) if not below.endswith("/")]
    if not below:
        return None
    if not any(layout.has_names(below) for layout in LAYOUTS):
        links_first = sorted(below, key=lambda file: not file.endswith(_LINK))
        raise CheckpointError(
            f"{name} in {source}: a folder but not a checkpoint; name a checkpoint in it: {and_more(links_first, 8)}"
        )
    files = tuple(inside(local, file, named_by=f"the listing of {name} in {source}") for file in below)
    return _Found(name=name, local=local, missing=files)
