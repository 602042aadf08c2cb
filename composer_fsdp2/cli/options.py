"""Command-line options as fields of frozen dataclasses; each field's type has the settings for typer."""

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
    """A command with its options: the docstring is the help, ``__post_init__`` validates, ``__call__`` runs it."""

    context: typer.Context


def typer_function(command: type[Command]) -> Callable[..., None]:
    """Return a function for typer with the fields as parameters; it appends the command to ``context.obj``."""

    def parsed(**given: Any) -> None:
        given["context"].obj.append(command(**given))

    parsed.__signature__ = inspect.signature(command, eval_str=True)  # type: ignore[attr-defined]
    return parsed


def schema_option(module: str) -> Any:
    """Return ``--json-schema``, which prints the file ``SCHEMA`` of a module; the module is imported on use."""

    def show(is_asked: bool) -> None:
        if is_asked:
            print_text(importlib.import_module(module).SCHEMA.read_bytes())
            raise typer.Exit

    help_text = "Print the JSON schema of that object."
    return typer.Option("--json-schema", callback=show, is_eager=True, help=help_text)
