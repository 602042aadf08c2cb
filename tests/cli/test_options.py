"""The options of a command from the fields of its class."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from composer_fsdp2.cli.options import Command, typer_function


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Greet(Command):
    """Greet some people."""

    names: Annotated[list[str], typer.Argument(metavar="NAME ...", help="Who they are.")]
    times: Annotated[int | None, typer.Option("-n", "--times", min=1, help="How often.")] = None
    is_loud: Annotated[bool, typer.Option("--loud/--quiet", help="How.")] = True

    def __post_init__(self) -> None:
        if "" in self.names:
            raise typer.BadParameter("a name is empty")


def parsed(*words: str) -> tuple[int, str, list[Greet]]:
    app, commands = typer.Typer(add_completion=False), list[Greet]()
    app.command("greet")(typer_function(Greet))
    done = CliRunner().invoke(app, words, obj=commands)
    return done.exit_code, done.output, commands


def test_a_field_is_an_option():
    """An option that is defined twice could differ between the help and its use."""
    code, _, (greet,) = parsed("A", "B", "-n", "2", "--quiet")
    assert (code, greet.names, greet.times, greet.is_loud) == (0, ["A", "B"], 2, False)
    _, _, (greet,) = parsed("A")
    assert (greet.times, greet.is_loud) == (None, True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        greet.times = 3  # type: ignore[misc]
    text = parsed("--help")[1]
    assert all(part in text for part in ("NAME ...", "Who they are.", "--times", "How often.", "--quiet"))


@pytest.mark.parametrize(("words", "said"), [(["A", "-n", "0"], "--times"), ([""], "a name is empty"), ([], "NAME")])
def test_a_wrong_option_is_refused_before_any_work(words: list[str], said: str):
    """The exit code equals that of a misspelt option, and no command is created."""
    code, text, commands = parsed(*words)
    assert (code, commands) == (2, []) and said in text


# A command whose work stands for the hours of training before a report.
MUCH = """
import sys
from composer_fsdp2.cli import compare, main
compare.Compare.__call__ = lambda self: print("x" * 1_000_000)
sys.argv = ["composer-fsdp2", "compare", sys.argv[1]]
main.main()
"""


def test_a_reader_may_have_seen_enough():
    """`compare run.yaml | head` ended in a traceback."""
    command = [sys.executable, "-c", MUCH, __file__]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (128 + signal.SIGPIPE, "")
