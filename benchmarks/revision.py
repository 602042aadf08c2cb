"""Our package as another commit had it: ``with checked_out(name) as folder``, ``with imported_from(folder)``."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

__all__ = ["checked_out", "imported_from"]


@contextmanager
def checked_out(name: str | None) -> Iterator[str]:
    """The folder that the package lies in as the commit had it; '' for None.

    Raises:
        SystemExit: there is no such commit.
    """
    if name is None:
        yield ""
        return
    with tempfile.TemporaryDirectory() as folder:
        root = Path(__file__).parents[1]
        archive = subprocess.run(["git", "archive", name, "composer_fsdp2", "compat"], cwd=root, capture_output=True)
        if archive.returncode:
            raise SystemExit(f"--against {name}: {archive.stderr.decode().strip()}")
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield folder


@contextmanager
def imported_from(folder: str) -> Iterator[None]:
    """In the block the package is imported from there, under its own name; what was imported so goes on to work."""
    present = _take_out()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        _take_out()
        sys.modules.update(present)


def _take_out() -> dict[str, ModuleType]:
    """Our package's modules, which are imported anew next time."""
    names = [name for name in sys.modules if name.partition(".")[0] == "composer_fsdp2"]
    return {name: sys.modules.pop(name) for name in names}
