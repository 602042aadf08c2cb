"""Scripts and modules as Python would run them, in this process."""

import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType


def run_file(script: str, arguments: Sequence[str]) -> None:
    """Run a file as ``python script arguments`` does: with its own argv, folder on the path, and ``__main__``.

    ``runpy.run_path`` would give another ``__package__`` and ``__file__``, and take ``__main__`` away again before
    what runs at exit.
    """
    path = os.path.abspath(script)
    loader = SourceFileLoader("__main__", path)
    code = loader.source_to_code(loader.get_data(path), path)  # not get_code, which leaves a __pycache__ there
    main = ModuleType("__main__")
    main.__dict__.update(__file__=path, __loader__=loader, __package__=None, __cached__=None, __builtins__=__builtins__)
    _set_first_on_path(os.path.dirname(os.path.realpath(script)))
    sys.argv = [script, *arguments]
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Run a module as ``python -m name arguments`` does."""
    _set_first_on_path(os.getcwd())
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _set_first_on_path(folder: str) -> None:
    """Replace what Python put first for the command: the folder of the console script, or where it was called."""
    if not sys.flags.safe_path:
        sys.path[0] = folder
