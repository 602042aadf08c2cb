"""Do the tests notice when the product is wrong? Draw mutations by a seed, and run the tests on each.

    make coverage                                            # which test file runs which line
    .venv/bin/python tools/mutate.py --seed 1 --count 20     # for each: caught by which test, or not
    .venv/bin/python tools/mutate.py --list                  # what would be changed

A mutation changes one place of one file: a comparison, a condition, a constant, an operator, a statement that is left
out. As many are drawn from each of ``ROOMS``. It is put into a copy of the checkout, and the test files that run its
line are run there until one fails (``--tests``: other ones; ``--checkout``: those of another revision, with the data of
its coverage). Equal programs are not recognised: a mutation that no test can notice is among those that are not caught.
The tests must pass without a mutation, as those of `make coverage` did; they run on the interpreter that runs this.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {
    "engine": ("composer_fsdp2/*.py", "composer_fsdp2/fsdp1/*.py", "composer_fsdp2/_torch/*.py"),
    "shim": ("compat/*.py",),
    "checkpoints": ("composer_fsdp2/checkpoint/**/*.py",),
    "migration": ("composer_fsdp2/migration/dialects/**/*.py", "composer_fsdp2/migration/*.py"),
}
COPIED = ("benchmarks", "compat", "composer_fsdp2", "demo", "migration_docs", "tests", "tools", "yamls")
COPIED_FILES = ("Makefile", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "pyproject.toml")
TIME_LIMIT_S = 1800
CAUGHT_CODES = (1, 2)  # of pytest: a test failed; a test file could not be imported

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "!=", ast.NotEq: "==", ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
OPERATORS: dict[type[ast.operator], str] = {ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Mod: "*"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One change of one file; the line is the first that it changes, counted from 1."""

    file: str
    line: int
    before: str
    after: str
    text: str  # the file with the change
    at_import: bool  # runs when the file is imported, which may happen in no test or in any

    def __str__(self) -> str:
        return f"{self.file}:{self.line}  {self.before}  →  {self.after}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Change the product in one place at a time, and run its tests.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=20, help="of all rooms together (20)")
    parser.add_argument("--data", type=Path, default=ROOT / ".coverage", help="what `make coverage` wrote")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="whose tests are run (this one's)")
    parser.add_argument("--only", type=int, nargs="*", metavar="N", help="by their numbers in the list")
    parser.add_argument("--tests", nargs="*", metavar="FILE", help="in place of those that run the line")
    parser.add_argument("--list", action="store_true", help="only say what would be changed")
    arguments = parser.parse_args()
    runs = {}
    if not arguments.list:
        assert_collected(arguments.checkout)
        runs = lines_of_tests(arguments.data, arguments.checkout.resolve())
    for number, mutation in enumerate(draw(arguments.seed, arguments.count), 1):
        if arguments.only and number not in arguments.only:
            continue
        print(f"{number:2} {mutation}", flush=True)
        if not arguments.list:
            tests = arguments.tests or tests_of(mutation, runs)
            print(f"   {caught(mutation, tests, arguments.checkout)}", flush=True)


# --- choosing


def lines_of_tests(path: Path, checkout: Path) -> dict[str, dict[int, set[str]]]:
    """By file and line: the test files that run it. A line that is run at import alone belongs to none, ``""``."""
    from coverage import CoverageData

    data = CoverageData(str(path))
    data.read()
    runs: dict[str, dict[int, set[str]]] = {}
    for file in data.measured_files():
        # compat/ is measured under its name and under that of the link to it.
        lines = runs.setdefault(os.path.relpath(os.path.realpath(file), checkout), {})
        for line, contexts in data.contexts_by_lineno(file).items():
            lines.setdefault(line, set()).update(contexts)
    return runs


def draw(seed: int, count: int) -> list[Mutation]:
    """As many of each room, the same ones for the same seed and sources."""
    choose = random.Random(seed)
    drawn: list[Mutation] = []
    for patterns in ROOMS.values():
        files = sorted({file for pattern in patterns for file in ROOT.glob(pattern)})
        drawn += choose.sample([each for file in files for each in mutations(file)], count // len(ROOMS))
    return drawn


def mutations(path: Path) -> Iterator[Mutation]:
    """Every change of a file that can be made."""
    source = path.read_text()
    tree = ast.parse(source)
    starts = [0, *itertools.accumulate(map(len, source.encode().splitlines(keepends=True)))]

    def place(line: int | None, column: int | None) -> int:
        assert line is not None and column is not None
        return starts[line - 1] + column

    data = source.encode()
    declared = {part for node in ast.walk(tree) for part in getattr(node, "decorator_list", ())}
    # What a dataclass is (frozen, slots) is no behaviour that a test could miss.
    left_out = {part for decorator in declared for part in ast.walk(decorator)}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    in_functions = {line for node in functions for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)}
    for node in (node for node in ast.walk(tree) if node not in left_out):
        for start, end, line, after in changes(node, data, place):
            changed = data[:start] + after.encode() + data[end:]
            before = data[start:end].decode()
            yield Mutation(
                file=os.path.relpath(path, ROOT),
                line=line,
                before=before,
                after=after,
                text=changed.decode(),
                at_import=line not in in_functions,
            )


def changes(
    node: ast.AST, data: bytes, place: Callable[[int | None, int | None], int]
) -> Iterator[tuple[int, int, int, str]]:
    """First and last byte, line and replacement of each change of one node."""

    def whole(part: ast.expr | ast.stmt) -> tuple[int, int, str]:
        start, end = place(part.lineno, part.col_offset), place(part.end_lineno, part.end_col_offset)
        return start, end, data[start:end].decode()

    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        start, end, _ = whole(node)
        left, right = whole(node.left)[2], whole(node.comparators[0])[2]
        yield start, end, node.lineno, f"({left}) {COMPARISONS[type(node.ops[0])]} ({right})"
    elif isinstance(node, ast.BoolOp):
        start, end, _ = whole(node)
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield start, end, node.lineno, "(" + word.join(f"({whole(value)[2]})" for value in node.values) + ")"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        start, end, _ = whole(node)
        yield start, end, node.lineno, f"bool({whole(node.operand)[2]})"
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        start, end, text = whole(node.test)
        yield start, end, node.test.lineno, f"(not ({text}))"
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        start, end, _ = whole(node)
        yield start, end, node.lineno, str(not node.value) if isinstance(node.value, bool) else str(node.value + 1)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and not isinstance(node.left, ast.Constant):
        start, end, _ = whole(node)
        yield start, end, node.lineno, f"({whole(node.left)[2]}) {OPERATORS[type(node.op)]} ({whole(node.right)[2]})"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        start, end, _ = whole(node)
        yield start, end, node.lineno, "pass"
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        start, end, _ = whole(node)
        yield start, end, node.lineno, "return None"


def tests_of(mutation: Mutation, runs: dict[str, dict[int, set[str]]]) -> list[str]:
    """The test files that run the line, those first that run the fewest lines: they are about something near.

    Of a line that runs when its file is imported, or in no test, the test files that run any line of the file.
    """
    sizes: dict[str, int] = {}
    for lines in runs.values():
        for tests in lines.values():
            for test in tests:
                sizes[test] = sizes.get(test, 0) + 1
    lines = runs.get(mutation.file, {})
    of_line = set[str]() if mutation.at_import else lines.get(mutation.line, set()) - {""}
    return sorted(of_line or set().union(*lines.values()) - {""}, key=lambda test: sizes[test])


# --- running


def assert_collected(checkout: Path) -> None:
    """A test file that cannot be imported as it is would catch everything."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=checkout, text=True, capture_output=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(f"without a mutation, the tests cannot be collected:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def caught(mutation: Mutation, tests: list[str], checkout: Path) -> str:
    """By which test of ``checkout``, in words."""
    if not tests:
        return "NOT CAUGHT: no test runs the line"
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutated-") as folder:
        copy = Path(folder)
        for name in COPIED:
            shutil.copytree(checkout / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        for name in COPIED_FILES:
            shutil.copy(checkout / name, copy / name)
        (copy / mutation.file).write_text(mutation.text)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", *tests]
        environ = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                command,
                cwd=copy,
                env=environ,
                text=True,
                capture_output=True,
                timeout=TIME_LIMIT_S,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            return f"NOT DECIDED: still running after {TIME_LIMIT_S} s"
    seconds = time.monotonic() - began
    lines = (done.stdout + done.stderr).splitlines()
    if done.returncode == 0:
        return f"NOT CAUGHT by {len(tests)} files in {seconds:.0f} s"
    if done.returncode not in CAUGHT_CODES:
        return f"NOT RUN: pytest ended with {done.returncode}: {lines[-1] if lines else '?'}"
    first = next((line for line in lines if line.startswith(("FAILED ", "ERROR "))), lines[-1] if lines else "?")
    return f"caught in {seconds:.0f} s: {first[:150]}"


if __name__ == "__main__":
    main()
