"""Groups of verbs that import the file of a verb when it is asked for: to run it, or for its line in --help."""

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
    """A verb, and the file of this folder with its ``Command``, a class of its name.

    Args:
        settings: How typer is to take it, as in ``Typer.command``.
    """

    name: str
    file: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def command(self) -> Any:
        """What runs it; the type is click's, which newer releases of typer carry under a private name."""
        command = getattr(importlib.import_module(f"{__package__}.{self.file}"), self.name.capitalize())
        # Each paragraph on one line, for typer to break, which keeps what breaks it finds.
        text = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(command) or "")
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        alone.command(self.name, help=text, **self.settings)(typer_function(command))
        return typer.main.get_command(alone)


def lazy_typer(*verbs: Verb, **settings: Any) -> typer.Typer:
    """A Typer of these verbs, of which none is imported yet."""
    by_name = {verb.name: verb for verb in verbs}

    class Group(TyperGroup):
        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            return by_name[cmd_name].command() if cmd_name in by_name else super().get_command(ctx, cmd_name)

    made = typer.Typer(cls=Group, no_args_is_help=True, pretty_exceptions_enable=False, **settings)
    for name in by_name:  # typer lists these, and looks for a mistyped name among them
        made.command(name)(_not_imported_yet)
    return made


def _not_imported_yet() -> None:
    raise AssertionError("the command of its file stands for it")
