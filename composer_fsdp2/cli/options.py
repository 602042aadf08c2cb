"""The options of a verb, each written once: a field of a frozen dataclass, with what typer is to know in its type."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import typer

from composer_fsdp2.cli.printing import print_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A verb with its options: its docstring is the help, ``__post_init__`` refuses options, a call does the work."""

    context: typer.Context


def typer_function(command: type[Command]) -> Callable[..., None]:
    """A function with the fields as parameters, for typer; it leaves the command in ``context.obj``, to be called."""

    def parsed(**given: Any) -> None:
        given["context"].obj.append(command(**given))

    parsed.__signature__ = inspect.signature(command, eval_str=True)  # type: ignore[attr-defined]
    return parsed


def schema_option(module: str) -> Any:
    """``--json-schema``, which prints the file that is SCHEMA of a module; that is imported then."""

    def show(is_asked: bool) -> None:
        if is_asked:
            print_text(importlib.import_module(module).SCHEMA.read_bytes())
            raise typer.Exit

    help_text = "Print the JSON schema of that object."
    return typer.Option("--json-schema", callback=show, is_eager=True, help=help_text)
