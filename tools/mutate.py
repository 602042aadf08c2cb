"""Check that the tests detect faults: draw mutations by a seed, and run the tests on each.

    make coverage                                            # which test file runs which line
    .venv/bin/python tools/mutate.py --seed 1 --count 40     # for each: caught by which test, or not
    .venv/bin/python tools/mutate.py --list                  # what would be changed

A mutation changes one place of one file: a comparison, a condition, a constant, an operator, or a deleted statement.
The rooms of the package take turns until ``--count`` are drawn. A mutation is made in a copy of the checkout, and the
test files that run its line are run there until one fails (``--tests``: other ones). Equivalent programs are not
recognised: a mutation that no test can detect counts as not caught. The tests must pass without a mutation, as those of
`make coverage` did. If they already fail (on a test that cannot be imported, for instance), every mutation counts as
caught.

mutmut 3 records the tests of a function within pytest's own process, so code that runs only on forked ranks has no
tests for it. cosmic-ray runs the same tests for each mutation, and deletes no statements.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "composer_fsdp2"
NOT_COPIED = (".git", ".venv*", "__pycache__", ".*_cache", ".coverage*", ".hypothesis", "build", "dist")
TIME_LIMIT_S = 1800
OPTIONS = ("-m", "not slow and not others", "-p", "no:cacheprovider")
CAUGHT_CODES = (1, 2)  # pytest's codes: a test failed; a test file could not be imported

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "!=", ast.NotEq: "==", ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
OPERATORS: dict[type[ast.operator], str] = {ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Mod: "*"}


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of a file's byte range; ``at_import``: outside of functions."""

    file: str
    line: int
    start: int
    end: int
    before: str
    after: str
    at_import: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line}  {self.before}  →  {self.after}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Change the product in one place at a time, and run its tests.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40, help="of all rooms together (40)")
    parser.add_argument("--data", type=Path, default=ROOT / ".coverage", help="what `make coverage` wrote")
    parser.add_argument("--tests", nargs="*", metavar="FILE", help="in place of those that run the line")
    parser.add_argument("--list", action="store_true", help="only say what would be changed")
    arguments = parser.parse_args()
    runs = {} if arguments.list or arguments.tests else lines_of_tests(arguments.data)
    for number, mutation in enumerate(draw(arguments.seed, arguments.count), 1):
        print(f"{number:2} {mutation}", flush=True)
        if not arguments.list:
            print(f"   {caught(mutation, arguments.tests or tests_of(mutation, runs))}", flush=True)


# --- choosing


def rooms() -> dict[str, list[Path]]:
    """The package's files by folder; nested folders are separate entries."""
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    files += sorted((ROOT / "compat").glob("*.py"))  # the target of a link in the package
    found: dict[str, list[Path]] = {}
    for file in files:
        parts = file.relative_to(ROOT).parts
        found.setdefault("/".join(parts[:2]) if len(parts) > 2 else parts[0], []).append(file)
    return found


def draw(seed: int, count: int) -> Iterator[Mutation]:
    """A mutation of each room in turn, the same ones for the same seed and sources."""
    choose = random.Random(seed)
    of_rooms = [[each for file in files for each in mutations(file)] for files in rooms().values()]
    for each in of_rooms:
        choose.shuffle(each)
    choose.shuffle(of_rooms)
    for number in range(count):
        if of_room := of_rooms[number % len(of_rooms)]:
            yield of_room.pop()


def mutations(path: Path) -> Iterator[Mutation]:
    """Every possible change of a file."""
    data = path.read_bytes()
    tree, lines = ast.parse(data), data.splitlines(keepends=True)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    in_functions = {line for node in functions for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)}
    # A dataclass's options (frozen, slots) are not behaviour that a test could miss.
    left_out = {
        part for node in ast.walk(tree) for each in getattr(node, "decorator_list", ()) for part in ast.walk(each)
    }

    starts = [0, *itertools.accumulate(map(len, lines))]

    def ends(node: Any) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def text(node: ast.AST) -> str:
        return data[slice(*ends(node))].decode()

    for node in (node for node in ast.walk(tree) if node not in left_out):
        for part, after in changes(node, text):
            file, at_import = os.path.relpath(path, ROOT), part.lineno not in in_functions
            yield Mutation(file, part.lineno, *ends(part), text(part), after, at_import)


def changes(node: ast.AST, text: Callable[[ast.AST], str]) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """The replaced node and its replacement, for each change of a node."""
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            yield node, f"({text(left)}) {COMPARISONS[type(operator)]} ({text(right)})"
        case ast.BoolOp(op=operator, values=values):
            word = " or " if isinstance(operator, ast.And) else " and "
            yield node, "(" + word.join(f"({text(value)})" for value in values) + ")"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, f"bool({text(operand)})"
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            yield test, f"(not ({text(test)}))"
        case ast.Constant(value=bool() as value):
            yield node, str(not value)
        case ast.Constant(value=int() as value):
            yield node, str(value + 1)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in OPERATORS and not isinstance(
            left, ast.Constant
        ):
            yield node, f"({text(left)}) {OPERATORS[type(operator)]} ({text(right)})"
        case ast.Expr(value=ast.Call()):
            yield node, "pass"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield node, "return None"


def lines_of_tests(path: Path) -> dict[str, dict[int, set[str]]]:
    """By file and line: the test files that run it. A line run only at import belongs to none, ``""``."""
    from coverage import CoverageData

    data = CoverageData(str(path))
    data.read()
    runs: dict[str, dict[int, set[str]]] = {}
    for file in data.measured_files():
        # compat/ is measured under its own path and under the link's.
        lines = runs.setdefault(os.path.relpath(os.path.realpath(file), ROOT), {})
        for line, contexts in data.contexts_by_lineno(file).items():
            lines.setdefault(line, set()).update(contexts)
    return runs


def tests_of(mutation: Mutation, runs: dict[str, dict[int, set[str]]]) -> list[str]:
    """The test files that run the line, those with the fewest covered lines first, as these are the most specific.

    For a line that runs on import, or in no test, the test files that run any line of the file.
    """
    sizes = Counter(test for lines in runs.values() for tests in lines.values() for test in tests)
    lines = runs.get(mutation.file, {})
    of_line = set[str]() if mutation.at_import else lines.get(mutation.line, set()) - {""}
    return sorted(of_line or set().union(*lines.values()) - {""}, key=lambda test: sizes[test])


# --- running


def caught(mutation: Mutation, tests: list[str]) -> str:
    """The test that caught it, as text."""
    if not tests:
        return "NOT CAUGHT: no test runs the line"
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutated-") as folder:
        copy = Path(folder, "checkout")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
        data = (ROOT / mutation.file).read_bytes()
        (copy / mutation.file).write_bytes(data[: mutation.start] + mutation.after.encode() + data[mutation.end :])
        command = ["timeout", str(TIME_LIMIT_S), sys.executable, "-m", "pytest", "-q", "-x", *OPTIONS, *tests]
        environ = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=copy, env=environ, text=True, capture_output=True, stdin=subprocess.DEVNULL
        )  # fmt: skip
    seconds = time.monotonic() - began
    lines = (done.stdout + done.stderr).splitlines() or ["?"]
    if done.returncode == 0:
        return f"NOT CAUGHT by {len(tests)} files in {seconds:.0f} s"
    if done.returncode not in CAUGHT_CODES:  # 124 after the time limit
        return f"NOT DECIDED: pytest ended with {done.returncode}: {lines[-1]}"
    first = next((line for line in lines if line.startswith(("FAILED ", "ERROR "))), lines[-1])
    return f"caught in {seconds:.0f} s: {first[:150]}"


if __name__ == "__main__":
    main()
