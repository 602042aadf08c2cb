"""Options that several commands share: the checkpoint, trust, and the function that builds a model."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from composer_fsdp2.config.text import one_line
from composer_fsdp2.errors import ConfigError

MODEL_HELP = "A function that builds the model: module:function or path.py:function."
CheckpointPath = Annotated[
    str, typer.Argument(metavar="PATH", help="A file, a folder, a link to one, or a run folder (its newest).")
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Unpickle classes that are not plain data, which can run any code; only for files whose author you trust.",
    ),
]


def model_from(name: str | None) -> Any:
    """Call ``module:function`` or ``path.py:function`` and return the model; None if ``name`` is None.

    Raises:
        ConfigError: the function does not exist.
    """
    if name is None:
        return None
    try:
        return function_from(name)()
    except (ImportError, OSError, AttributeError) as error:
        raise ConfigError(f"--model {name}: {error}") from error


def function_from(name: str) -> Callable[[], Any]:
    """Return the function ``module:function`` or ``path.py:function`` without calling it.

    Raises:
        ConfigError: the function does not exist.
    """
    place, colon, function = name.rpartition(":")
    if not colon:
        raise ConfigError(f"--model {name}: expected module:function or path.py:function")
    try:
        found: Callable[[], Any] = getattr(_module(place), function)
        return found
    except (ImportError, OSError, AttributeError) as error:
        raise ConfigError(f"--model {name}: {error}") from error
    except (Exception, SystemExit) as error:  # an invalid module name, or any error of the module's own code
        raise ConfigError(f"--model {name}: {one_line(error)}") from error


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        sys.path.insert(0, os.getcwd())  # as with python -m
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    assert spec is not None and spec.loader is not None  # a .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[Path(place).stem] = module
    spec.loader.exec_module(module)
    return module
