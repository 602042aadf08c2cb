"""Download checkpoints from object stores and URLs to a folder that the ranks of a node share.

If a layout has one metadata file, it is downloaded first, and each other file once a rank of the node opens it. For
other layouts, each rank of a node downloads a part of the files.
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
from composer_fsdp2.sharding.agree import all_gather_object

_LINK = ".symlink"
_LINK_FILE = "link"  # a local file with a downloaded link's text
_RANKS = re.compile(r"\{(rank|local_rank|node_rank)\}")
_MAX_LINKS = 8
_DOWNLOADING = "downloading a checkpoint"


@contextlib.contextmanager
def local_checkpoint(path: str, object_store: Any, progress_bar: bool) -> Iterator[Located]:
    """Yield a checkpoint from any location as local files. Called on all ranks; downloads are deleted after the block.

    Args:
        path: A local path; a URL or a URI; or, in ``object_store``, the name of an object, a prefix of names (a
            folder), or a ``.symlink`` to either.
        object_store: A store of Composer, or a LoggerDestination that supports downloads.
    Raises:
        CheckpointError: on all ranks, if it does not exist or cannot be downloaded; names the objects.
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
        together(lambda: found, lambda path: path.name)  # a link may have changed between the reads of two machines
        long_together(functools.partial(_download_share, source, found), _DOWNLOADING)
        if found.layout is not None:
            yield Located(found.local, found.layout, fetch=functools.partial(_fetch, source, found))
        else:
            yield found.located or together(lambda: find(found.local))


def _find_on_local_rank_0(path: str) -> str | Located:
    """Return the checkpoint that the first rank of this node finds. All ranks of the node read it, as in Composer.

    Ranks may pass different folders (``tempfile.mkdtemp()``), and only the first rank's has the checkpoint. If that
    rank finds nothing, this returns each rank's own ``path``, for its error.

    Called on all ranks; all-gathers the results.
    """
    found = None
    if dist.get_local_rank() == 0:
        with contextlib.suppress(CheckpointError):
            found = find(path)
            found = replace(found, path=found.path.absolute())
    return all_gather_object(found)[_first_ranks_of_machines()[dist.get_global_rank()]] or path


def _first_ranks_of_machines() -> list[int]:
    """Return, for each rank, the first rank of its node, computed from local ranks.

    Called on all ranks; all-gathers them.
    """
    return all_gather_object(dist.get_global_rank() - dist.get_local_rank())


def _validate_share(located: Located) -> None:
    """Run the user's validation function on this rank's part of a checkpoint's files. Local ranks divide the files."""
    for file in located.files[dist.get_local_rank() :: dist.get_local_world_size()]:
        _validate(file)


def _validate(file: Path) -> None:
    """Run the user's function in CHECKPOINT_VALIDATION_FUNCTION on a file before it is read.

    Raises:
        CheckpointError: the function rejected the file.
    """
    try:
        _ensure_valid_checkpoint(file)
    except ValueError as error:
        raise CheckpointError(f"CHECKPOINT_VALIDATION_FUNCTION: {error}") from error


# ---------------------------------------------------------------------------------------------------------------------
# The store


class _Store:
    """An object store or server from which checkpoints are downloaded."""

    def __init__(self, object_store: Any, progress_bar: bool, incomplete: Path) -> None:
        self._store, self._progress_bar, self._incomplete = object_store, progress_bar, incomplete

    def __str__(self) -> str:
        return type(self._store).__name__ if self._store is not None else "the server"

    def download(self, name: str, file: Path) -> bool:
        """Download an object to ``file``; return False if the store has no such object.

        Raises:
            CheckpointError: five attempts failed, or the user's validation function rejected the file.
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

    @retry(num_attempts=5)  # like Composer's download_object_or_file, but a missing object is not retried
    def _download(self, name: str, file: Path) -> bool:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            _get_file(name, str(file), self._store, overwrite=True, progress_bar=self._progress_bar)
        except FileNotFoundError:
            return False
        return True

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """A lock on the object among the ranks of this machine."""
        (folder := self._folder_of(name)).mkdir(parents=True, exist_ok=True)
        with open(folder / ".lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _folder_of(self, name: str) -> Path:
        """Return the folder for an incomplete download: a hash, because object names may be longer than file names."""
        return self._incomplete / hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()

    def names_below(self, folder: str) -> list[str]:
        """Return the names of the objects in a folder; an empty list if the store cannot list objects."""
        try:
            return sorted(self._store.list_objects(f"{folder}/"))
        except (AttributeError, NotImplementedError):
            return []


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """An object or folder in a store, and its local copy.

    Args:
        name: The name in the store.
        local: The local path.
        located: The local checkpoint, if the name is that of an object.
        layout: The layout of a folder of which only the metadata file was downloaded.
        missing: Local paths of files that must be downloaded before reading.
    """

    name: str
    local: Path
    located: Located | None = None
    layout: Layout | None = None
    missing: tuple[Path, ...] = ()

    def name_of(self, file: Path) -> str:
        """Return the object name of the local ``file``: in the folder, or in the same folder as the object."""
        if file.is_relative_to(self.local):
            return f"{self.name}/{file.relative_to(self.local).as_posix()}"
        return str(PurePosixPath(self.name).with_name(file.name))


def _download_share(source: _Store, found: _Found) -> None:
    """Download this rank's part of the missing files. Local ranks divide the files."""
    for file in found.missing[dist.get_local_rank() :: dist.get_local_world_size()]:
        _fetch(source, found, file)


def _fetch(source: _Store, found: _Found, file: Path) -> None:
    """Download a file, unless another rank of this node already has; if one is downloading it, wait."""
    name = found.name_of(file)
    if not file.exists():
        with source.locked(name):
            if not file.exists() and not source.download(name, file):
                raise NoCheckpointError(f"{source} has no {name}, which belongs to {found.name}")


def _find(source: _Store, path: str, folder: Path) -> _Found:
    """Follow links to an object or a folder, then download the object, or the folder's metadata file."""
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
    """Return the target of a ``.symlink`` object, which Composer writes beside its checkpoints; None if there is no
    such object."""
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
        others = set(layout.checkpoint_files(file)) - {file}
        return _Found(name=name, local=file, located=Located(file, layout), missing=tuple(sorted(others)))

    def try_folder() -> _Found | None:
        for layout in LAYOUTS:
            if layout.metadata is not None:
                file, _ = layout.metadata
                tried.append(f"{name}/{file}")
                if source.download(tried[-1], local / file):
                    return _Found(name=name, local=local, layout=layout)
        return _listed_folder(source, name, local)

    # A name with a suffix is usually a file, and each request to a store takes time.
    attempts = (try_object, try_folder) if PurePosixPath(name).suffix else (try_folder, try_object)
    return attempts[0]() or attempts[1]()


def _listed_folder(source: _Store, name: str, local: Path) -> _Found | None:
    """A folder in another layout: safetensors, or Composer's checkpoint package."""
    # Names that end with a slash are not files: stores' web interfaces create them for folders.
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
