"""Options that several verbs have: a checkpoint, trust, and a model that a command line names."""

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
    """What ``module:function`` or ``path.py:function`` returns; None for None.

    Raises:
        ConfigError: there is no such function.
    """
    if name is None:
        return None
    try:
        return function_from(name)()
    except (ImportError, OSError, AttributeError) as error:
        raise ConfigError(f"--model {name}: {error}") from error


def function_from(name: str) -> Callable[[], Any]:
    """``module:function`` or ``path.py:function`` itself, not yet called.

    Raises:
        ConfigError: there is no such function.
    """
    place, colon, function = name.rpartition(":")
    if not colon:
        raise ConfigError(f"--model {name}: expected module:function or path.py:function")
    try:
        found: Callable[[], Any] = getattr(_module(place), function)
        return found
    except (ImportError, OSError, AttributeError) as error:
        raise ConfigError(f"--model {name}: {error}") from error
    except (Exception, SystemExit) as error:  # what is no name of a module, and whatever the module's own code does
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
