"""Write files atomically: a path always has its old or its complete new content."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path, *, ending: str = ".partial") -> Iterator[Path]:
    """Yield a temporary path next to ``path``; rename it to ``path`` if the block succeeds, delete it otherwise.

    Args:
        ending: The suffix of the temporary name. Writers that check the suffix, or that run concurrently, pass their
            own.
    """
    beside = path.with_name(f".{path.name}{ending}")
    beside.unlink(missing_ok=True)  # Left by a killed process. Writers that create a link need the name to be free.
    try:
        yield beside
        os.replace(beside, path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
