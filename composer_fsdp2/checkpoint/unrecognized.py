"""A file or folder that no layout recognizes, described for the error that refuses it."""

from pathlib import Path

from composer_fsdp2.config.text import and_more


def unrecognized(path: Path) -> str:
    """A description of a path that is no checkpoint."""
    if path.is_dir():
        return f"no checkpoint of a known layout; the folder holds {listing(path)}"
    if not path.is_file():  # opening a pipe would block
        return "neither a file nor a folder, but a pipe, a socket or a device"
    with open(path, "rb") as file:
        head = file.read(40)
    return f"no checkpoint of a known layout; it begins with {head!r}" if head else "empty: its save was cut short"


def listing(folder: Path) -> str:
    """The first names in a folder."""
    names = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir())
    return and_more(names, 8) or "nothing"
