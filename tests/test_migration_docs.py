"""Every block of ``migration_docs/*.md`` behaves as the page shows.

Two gloo ranks (or one, `ON_ONE_RANK`) run a page from top to bottom in a temporary folder. The info string sets a
block's kind:

| fence | test |
|---|---|
| ``python`` | runs it on both ranks, as torchrun would; the blocks of a page share their names |
| ``python file=net.py`` | writes it to the page's folder; so do ``yaml file=...`` and ``toml file=...``, parsed first |
| ``yaml migrated=run.yaml`` | compares it, bytes and all, with what ``composer-fsdp2 migrate run.yaml`` prints |
| ``console`` | runs each line after ``$ `` in bash and compares what it prints with the lines below it |
| ``text output`` | compares it with the output of the previous python block on rank 0 |
| ``text error=NAME`` | compares it with the error that NAME in ``documented_errors.py`` raises |

``...`` matches any text within a line; a line with only ``...`` matches any number of lines. A failing command must
show it (``...; echo $?``), and a python block that raises must catch the error. ``skip="reason"`` skips a block: the
reason names its requirement (GPUs, nodes, another torch), and ``MAX_SKIPPED`` limits their number. A fence without a
language fails.

The folder initially contains the files of ``START``: old checkpoints, ``net.py``, whose ``build_model`` is their
model, two scripts and a YAML.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml
from documented_errors import OTHERS, OURS, check_errors
from support import commands
from support.forked_commands import add_command
from support.forked_scripts import add_launchers
from support.ranks import WITH_COMPOSER, run_ranks

pytestmark = [pytest.mark.composer, pytest.mark.foundry]

TESTS = Path(__file__).resolve().parent
PAGES = sorted((TESTS.parent / "migration_docs").glob("*.md"))
FIXTURES = TESTS / "fixtures"
# Path in a page's folder -> its source.
START = {
    "net.py": FIXTURES / "migration-docs" / "net.py",
    "train.py": FIXTURES / "migration-docs" / "train.py",
    "wraps.py": FIXTURES / "migration-docs" / "wraps.py",
    "mpt-1b.yaml": TESTS.parent / "yamls" / "mpt" / "mpt-1b-fsdp1.yaml",
    "full": FIXTURES / "legacy-checkpoints" / "c172" / "full",  # Composer 0.17.2, torch 2.1
    "sharded": FIXTURES / "legacy-checkpoints" / "c172" / "sharded",
    "sharded-mesh": FIXTURES / "legacy-checkpoints" / "c220" / "sharded-mesh",  # Composer 0.22.0, torch 2.3
    "local": FIXTURES / "legacy-checkpoints" / "c172" / "local-flat",
    "per-rank": FIXTURES / "per-rank-checkpoints",  # Composer 0.13's layout
}
MAX_SKIPPED = 3
# Generous, because the machine may be busy.
COMMAND_S = 400
PAGE_S = 500
ERRORS_S = 400

FENCE = re.compile(r"(?P<indent> *)(?P<ticks>`{3,})(?P<info>.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    language: str
    options: Mapping[str, str]
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(slots=True)
class Session:
    """State of one rank while it runs a page."""

    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    printed: str = ""


# --- reading pages


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    opening: re.Match[str] | None = None
    start, body = 0, []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = FENCE.fullmatch(line)
        if opening is None and fence:
            opening, start, body = fence, number, []
        elif opening is not None and line.strip() == opening["ticks"]:
            language, options = parse_info(opening["info"])
            text = "".join(each.removeprefix(opening["indent"]) + "\n" for each in body)
            found.append(Block(page=page.name, line=start, language=language, options=options, text=text))
            opening = None
        else:
            body.append(line)
    assert opening is None, f"{page.name}:{start}: the block has no end"
    return found


def parse_info(info: str) -> tuple[str, dict[str, str]]:
    """``python skip="needs 8 GPUs"`` is ``("python", {"skip": "needs 8 GPUs"})``."""
    words = shlex.split(info)
    options = (word.partition("=") for word in words[1:])
    return words[0] if words else "", {name: value for name, _, value in options}


def commands_of(text: str) -> list[tuple[str, str]]:
    """The commands of a console block, each with its expected output."""
    found: list[tuple[str, str]] = []
    for line in text.splitlines(keepends=True):
        if line.startswith("$ "):
            found.append((line[2:], ""))
        elif line.startswith("> "):
            found[-1] = (found[-1][0] + line[2:], found[-1][1])
        else:
            found[-1] = (found[-1][0], found[-1][1] + line)
    return found


# --- comparing


def matches(shown: str, printed: str) -> bool:
    """Whether ``printed`` matches the page's ``shown``, where ``...`` matches any text."""
    pattern = "".join(map(pattern_of, lines_of(shown)))
    return re.fullmatch(pattern, "".join(line + "\n" for line in lines_of(printed))) is not None


def lines_of(text: str) -> list[str]:
    """Lines without trailing blanks, and without empty lines at both ends."""
    return [line.rstrip() for line in text.strip("\n").splitlines()]


def pattern_of(line: str) -> str:
    if line.strip() == "...":
        return r"(?:[^\n]*\n)*"
    return r"[^\n]*".join(map(re.escape, line.split("..."))) + r"\n"


def compare(shown: str, printed: str, what: str) -> None:
    assert matches(shown, printed), f"{what} is shown as\n{shown}\nand is\n{printed}"


# --- running blocks; each function is called on both ranks


def run_python(block: Block, session: Session) -> None:
    if "file" in block.options:
        write_file(block)
        return
    code = compile("\n" * block.line + block.text, block.page, "exec")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, session.names)
    session.printed = printed.getvalue()


def run_console(block: Block, session: Session) -> None:
    assert block.text.startswith("$ "), "a console block begins with a command"
    if dist.get_rank() != 0:
        return
    for command, shown in commands_of(block.text):
        done = subprocess.run(
            ["bash", "-c", command], env=environment(), text=True, timeout=COMMAND_S, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, f"{command.strip()} ended with {done.returncode}:\n{done.stdout}"
        compare(shown, done.stdout, command.strip())


def environment() -> dict[str, str]:
    """Uses this checkout's code, wherever the package is installed from. torchrun gets a free port, as with
    --standalone."""
    more = {"PYTHONPATH": str(TESTS.parent), "PET_STANDALONE": "1", "PET_LOCAL_ADDR": "127.0.0.1"}
    return commands.environment() | more


PARSERS: dict[str, Callable[[str], object]] = {"yaml": yaml.safe_load, "toml": tomllib.loads}


def run_file(block: Block, session: Session) -> None:
    PARSERS[block.language](block.text)
    if "migrated" in block.options:
        check_migrated(block)
    else:
        write_file(block)


def check_migrated(block: Block) -> None:
    if dist.get_rank() == 0:
        command = ["composer-fsdp2", "migrate", *shlex.split(block.options["migrated"])]
        done = subprocess.run(command, env=environment(), text=True, capture_output=True, timeout=COMMAND_S)
        wanted = int(block.options.get("exit", 0))
        assert done.returncode == wanted, f"{shlex.join(command)} ended with {done.returncode}:\n{done.stderr}"
        assert done.stdout == block.text, f"{shlex.join(command)} printed\n{done.stdout}"


def write_file(block: Block) -> None:
    """Rank 0 writes; a barrier follows each block."""
    if dist.get_rank() == 0:
        Path(block.options["file"]).write_text(block.text)


def run_text(block: Block, session: Session) -> None:
    if "output" in block.options and dist.get_rank() == 0:
        compare(block.text, session.printed, "the output of the block before")


RUNNERS: dict[str, Callable[[Block, Session], None]] = {
    "python": run_python,
    "console": run_console,
    "yaml": run_file,
    "toml": run_file,
    "text": run_text,
}
# Each kind of block by language and by the option that selects it.
KINDS = {("python", ""), ("console", ""), ("text", "output"), ("text", "error")} | {
    (language, option) for language in ("python", "yaml", "toml") for option in ("file", "migrated")
} - {("python", "migrated")}


def check_page(page: Path) -> int:
    """Run every block; returns the number of blocks run. Called on all ranks."""
    session, num_run = Session(), 0
    sys.path.insert(0, os.getcwd())
    for block in blocks_of(page):
        if "skip" in block.options:
            continue
        try:
            RUNNERS[block.language](block, session)
        except BaseException as error:
            error.add_note(f"in the block at {block.place}")
            raise AssertionError(f"{block.place}: {type(error).__name__}: {error}") from error
        dist.barrier()
        num_run += 1
    return num_run


def start_folder(folder: Path) -> None:
    for name, source in START.items():
        if source.is_dir():
            shutil.copytree(source, folder / name, symlinks=True)
        else:
            shutil.copy(source, folder / name)


# --- tests


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks_of(page)]


def kind_of(block: Block) -> tuple[str, str]:
    return block.language, next((name for name in block.options if name != "skip"), "")


def test_every_block_says_what_it_is():
    """A block of unknown kind would be shown to readers and never executed."""
    unknown = [f"{block.place}: {kind_of(block)}" for block in all_blocks() if kind_of(block) not in KINDS]
    assert unknown == []


def test_few_blocks_are_left_out():
    """Without a limit, skipped blocks would accumulate until the pages are untested prose."""
    skipped = [block for block in all_blocks() if "skip" in block.options]
    reason = re.compile(r"needs .*(GPU|node|rank|another torch)")
    unreasoned = [block.place for block in skipped if not reason.search(block.options["skip"])]
    assert unreasoned == []
    assert len(skipped) <= MAX_SKIPPED, [block.place for block in skipped]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PATH, with a fast ``composer-fsdp2`` and fast launchers before the commands of this environment."""
    quick = tmp_path_factory.mktemp("commands")
    add_command(quick)
    add_launchers(quick, WITH_COMPOSER)
    return os.pathsep.join([str(quick), str(Path(sys.executable).parent), os.environ.get("PATH", "")])


# Three trainings in separate processes; tests/compat/test_comparing.py covers them as well.
SLOW = {"compare"}
# It plans without training; a second rank would compute the same plan.
ON_ONE_RANK = {"memory-tables"}
PAGES_WITH_BLOCKS = [
    pytest.param(page, id=page.stem, marks=[pytest.mark.slow] if page.stem in SLOW else [])
    for page in PAGES
    if blocks_of(page)
]


@pytest.mark.parametrize("page", PAGES_WITH_BLOCKS)
def test_page(page: Path, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A reader who types a page's commands gets the page's output."""
    wanted = sum("skip" not in block.options for block in blocks_of(page))
    start_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", path)
    ranks = 1 if page.stem in ON_ONE_RANK else 2
    assert run_ranks(check_page, ranks, page, timeout_s=PAGE_S, fresh=True) == [wanted] * ranks


@pytest.fixture(scope="module")
def raised(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Mapping[str, str]]:
    """The error of each entry of ``OURS`` or ``OTHERS`` by name, formatted like the end of a traceback."""

    @cache
    def of(is_ours: bool) -> Mapping[str, str]:
        folder = tmp_path_factory.mktemp("errors")
        start_folder(folder)
        with contextlib.chdir(folder):
            return run_ranks(check_errors, 2, is_ours, timeout_s=ERRORS_S, fresh=True)[0]

    return of


ERROR_BLOCKS = [
    pytest.param(block, id=block.options["error"], marks=() if block.options["error"] in OURS else pytest.mark.others)
    for block in all_blocks()
    if "error" in block.options
]


@pytest.mark.parametrize("block", ERROR_BLOCKS)
def test_error_text(block: Block, raised: Callable[[bool], Mapping[str, str]]):
    """A user who searches the page for an error message finds it."""
    name = block.options["error"]
    compare(block.text, raised(name in OURS)[name], name)


def test_every_known_error_is_on_a_page():
    """Every error reproduced here must be explained on a page."""
    assert sorted(str(each.id) for each in ERROR_BLOCKS) == sorted([*OURS, *OTHERS])


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a ... c", "a b c", True),
        ("a ... c", "a b\nc", False),
        ("a\n...\nd", "a\nb\nc\nd", True),
        ("a\n...\nd", "a\nd", True),
        ("a\n...", "a\nb\nc", True),
        ("...\nd", "a\nd", True),
        ("...\nd", "d", True),
        ("a.c", "abc", False),
        ("a\nb", "a\nx\nb", False),
        ("", "a", False),
    ],
)
def test_what_dots_stand_for(shown: str, printed: str, same: bool):
    """A pattern that matches too much would let a page show output that no command prints."""
    assert matches(shown, printed) is same
