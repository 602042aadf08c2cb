"""Files that take another's place at once, when they are complete."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path, *, ending: str = ".partial") -> Iterator[Path]:
    """A path beside ``path``, to be made in the block; then it takes that name. After an error nothing is left.

    Args:
        ending: Of its name until then, for a writer that goes by it, or of which several may be at work.
    """
    beside = path.with_name(f".{path.name}{ending}")
    beside.unlink(missing_ok=True)  # left by a process that was killed; a link is made only where there is nothing
    try:
        yield beside
        os.replace(beside, path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
