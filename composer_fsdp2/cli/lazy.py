"""Groups of verbs that import the file of a verb when it is asked for: to run it, or for its line in --help."""

import importlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import typer
from typer.core import TyperGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """A verb, or a group of verbs, in a file of this folder that has it under its own name.

    Args:
        settings: How typer is to take it, as in ``Typer.command``.
    """

    name: str
    file: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def command(self) -> Any:
        """What runs it; the type is click's, which newer releases of typer carry under a private name."""
        found = getattr(importlib.import_module(f"{__package__}.{self.file}"), self.name)
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            alone.command(self.name, help=_paragraphs(found), **self.settings)(found)
            found = alone
        return typer.main.get_command(found)


def _paragraphs(function: Any) -> str:
    """A docstring with each paragraph on one line, for typer to break, which keeps what breaks it finds."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(function) or "")


def lazy_typer(*verbs: Verb, **settings: Any) -> typer.Typer:
    """A Typer of these verbs, of which none is imported yet."""
    by_name = {verb.name: verb for verb in verbs}

    class Group(TyperGroup):
        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            return by_name[cmd_name].command() if cmd_name in by_name else None

    made = typer.Typer(cls=Group, no_args_is_help=True, pretty_exceptions_enable=False, **settings)
    for name in by_name:  # typer lists these, and looks for a mistyped name among them
        made.command(name)(_not_imported_yet)
    return made


def _not_imported_yet() -> None:
    raise AssertionError("the command of its file stands for it")
