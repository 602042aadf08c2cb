"""Declare a command's options as fields of a frozen dataclass. Each field's annotation has its typer settings."""

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
    """Base class of commands.

    The docstring is the help text, ``__post_init__`` validates, ``__call__`` runs the command.
    """

    context: typer.Context


def typer_function(command: type[Command]) -> Callable[..., None]:
    """Return a function for typer whose parameters are the command's fields.

    It appends the command to ``context.obj``.
    """

    def parsed(**given: Any) -> None:
        given["context"].obj.append(command(**given))

    parsed.__signature__ = inspect.signature(command, eval_str=True)  # type: ignore[attr-defined]
    return parsed


def schema_option(module: str) -> Any:
    """Return the option ``--json-schema``, which prints the file at ``SCHEMA`` of a module.

    The module is imported on use.
    """

    def show(is_asked: bool) -> None:
        if is_asked:
            print_text(importlib.import_module(module).SCHEMA.read_bytes())
            raise typer.Exit

    help_text = "Print the JSON schema of that object."
    return typer.Option("--json-schema", callback=show, is_eager=True, help=help_text)
