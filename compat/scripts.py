"""Run scripts and modules in this process as Python would."""

import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType


def run_file(script: str, arguments: Sequence[str]) -> None:
    """Run a file as ``python script arguments`` does, with sys.argv, sys.path and ``__main__`` set.

    ``runpy.run_path`` would set a different ``__package__`` and ``__file__``, and remove ``__main__`` before atexit
    handlers run.
    """
    path = os.path.abspath(script)
    loader = SourceFileLoader("__main__", path)
    code = loader.source_to_code(loader.get_data(path), path)  # not get_code, which writes a __pycache__
    main = ModuleType("__main__")
    main.__dict__.update(__file__=path, __loader__=loader, __package__=None, __cached__=None, __builtins__=__builtins__)
    _set_first_on_path(os.path.dirname(os.path.realpath(script)))
    sys.argv = [script, *arguments]
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Run a module like ``python -m name arguments``."""
    _set_first_on_path(os.getcwd())
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _set_first_on_path(folder: str) -> None:
    """Replace the first entry of sys.path, the folder of the console script or the working directory, by ``folder``."""
    if not sys.flags.safe_path:
        sys.path[0] = folder
