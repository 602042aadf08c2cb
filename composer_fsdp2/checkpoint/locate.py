"""From what a user names to the checkpoint that is meant: links, pointer files, run folders, ``{rank}``."""

from pathlib import Path

from composer_fsdp2.errors import CheckpointError

__all__ = ["locate"]


def locate(path: str | Path) -> Path:
    """The file or folder that holds the checkpoint."""
    found = Path(path)
    if not found.exists():
        raise CheckpointError(f"{found}: no such file or folder")
    return found
