"""Names that somebody else wrote, in a listing, an index or an archive: a file in one folder each, or nothing."""

import os
from pathlib import Path, PurePosixPath

from composer_fsdp2.errors import CheckpointError


def inside(folder: Path, name: object, *, named_by: object, may_link: bool = False) -> Path:
    """The path in ``folder`` that a name stands for.

    Args:
        named_by: Who says it, for the message.
        may_link: The file itself may be a link to somewhere else, as in a Hugging Face cache; a user made it.
    Raises:
        CheckpointError: it is not a relative path without ``..``, or leads out of the folder over a link. Nothing was
            opened or written.
    """
    if not isinstance(name, str):
        raise CheckpointError(f"{named_by}: names a {type(name).__name__} as a file")
    path = folder / name
    if is_plain(name):
        real = path.parent.resolve() / path.name if may_link else path.resolve()
        if real.is_relative_to(folder.resolve()):
            return path
    raise CheckpointError(f"{named_by}: names {name!r}, which lies outside of the folder; it was not opened")


def is_plain(name: str) -> bool:
    """Whether this is a relative path, without ``..``, that every file system takes."""
    path = PurePosixPath(name)
    try:
        os.fsencode(name)
    except UnicodeEncodeError:  # half a character
        return False
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name
