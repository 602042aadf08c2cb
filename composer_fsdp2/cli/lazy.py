"""Import each command's module only when the command runs or ``--help`` lists it."""

import importlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import typer
from typer.core import TyperGroup

from composer_fsdp2.cli.options import typer_function


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """A command's name, and the module of this package that defines its ``Command`` class.

    Args:
        settings: Passed to ``Typer.command``.
    """

    name: str
    file: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def command(self) -> Any:
        """Import and return the click command.

        Its return type is ``Any`` because newer typer releases made the type private.
        """
        command = getattr(importlib.import_module(f"{__package__}.{self.file}"), self.name.capitalize())
        # typer keeps line breaks; with one line per paragraph it wraps at the terminal's width.
        text = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(command) or "")
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(self.name, help=text, **self.settings)(typer_function(command))
        return typer.main.get_command(single)


def lazy_typer(*verbs: Verb, **settings: Any) -> typer.Typer:
    """Return a Typer with these commands, without importing them."""
    by_name = {verb.name: verb for verb in verbs}

    class Group(TyperGroup):
        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            return by_name[cmd_name].command() if cmd_name in by_name else super().get_command(ctx, cmd_name)

    made = typer.Typer(cls=Group, no_args_is_help=True, pretty_exceptions_enable=False, **settings)
    for name in by_name:  # for --help and for suggestions after a typo
        made.command(name)(_not_imported_yet)
    return made


def _not_imported_yet() -> None:
    raise AssertionError("Group.get_command returns the real command")
