"""Every GPU test and benchmark, on whatever this machine has; what was left out; the tables of benchmarks/README.md.

    make gpu
    .venv/bin/python tools/gpu.py [tests/gpu/test_replicas.py ...] [--no-benchmarks] [--readme FILE]

Tests run one after the other, because each takes all GPUs that it can use. What is skipped says what it needs; that is
summed up here. Exit code 0, 1 if a test or a bar failed, and 2 where there is no GPU: then it says what would have run.
The page stays as it is where there is no GPU, or where tests were named and so not all of them ran.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]

from report import markdown  # noqa: E402  The benchmarks' own.

# What the tests say that this machine lacks. Not imported by its name, which would have mypy check the tests.
lacking: Callable[[int], str] = importlib.import_module("support.gpus").lacking

README = ROOT / "benchmarks" / "README.md"
ALL_TESTS = ["tests"]
ENGINE_TESTS = ["tests/sharding", "tests/training", "tests/checkpoint", "tests/benchmarks", "tests/gpu"]
NO_GPU = 2
PYTEST_ENDED = (0, 1, 5)  # all passed, some failed, there was none


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A command line of ``benchmarks/``, and the block of README that its tables go to."""

    block: str
    words: tuple[str, ...]  # {gpus} is how many there are
    num_gpus: int = 1  # at least


BENCHMARKS = (
    # Four models with their optimizers on one GPU of 80 GB.
    Benchmark(block="step, one GPU", words=("step.py", "--layers", "12")),
    Benchmark(block="step", words=("step.py", "--ranks", "{gpus}"), num_gpus=2),
    Benchmark(
        block="step, SHARD_GRAD_OP", words=("step.py", "--ranks", "{gpus}", "--strategy", "SHARD_GRAD_OP"), num_gpus=2
    ),
    Benchmark(
        block="step, pipelined",
        words=("step.py", "--layers", "12", "--optimizer", "decoupled_adamw", "--clipping", "--pipelined", "10"),
    ),
    Benchmark(block="votes", words=("step.py", "--ranks", "{gpus}", "--against", "HEAD"), num_gpus=2),
    Benchmark(block="setup", words=("setup.py",)),
    Benchmark(block="dispatch", words=("dispatch.py",)),
    Benchmark(block="trainer", words=("step.py", "--trainer", "--ranks", "{gpus}")),
    Benchmark(block="checkpoint", words=("checkpoint.py",)),
    Benchmark(block="saving", words=("saving.py", "--ranks", "{gpus}", "--mib", "8192")),
)


class Outcome(Enum):
    """How a test or a benchmark ended."""

    PASSED = "passed"
    FAILED = "failed"
    LEFT_OUT = "left out"
    BAR_FAILS = "a bar fails"  # a benchmark's: it measured all the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where and when something was measured, without the machine's name."""

    gpus: tuple[str, ...]
    driver: str
    torch: str
    date: str
    commit: str

    @classmethod
    def present(cls) -> Machine:
        gpus = tuple(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))
        return cls(
            gpus=gpus,
            driver=_first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) or "unknown",
            torch=torch.__version__,
            date=f"{datetime.now(UTC):%Y-%m-%d}",
            commit=_commit(),
        )

    def __str__(self) -> str:
        gpus = ", ".join(f"{count} × {name}" for name, count in Counter(self.gpus).items())
        return f"{gpus}, driver {self.driver}, torch {self.torch}, {self.date}, commit {self.commit}"


def _commit() -> str:
    commit = _first_line(["git", "rev-parse", "--short", "HEAD"]) or "unknown"
    return commit + (" and changes" if _first_line(["git", "status", "--porcelain", "--untracked-files=no"]) else "")


def _first_line(command: Sequence[str]) -> str:
    """The first line that a command prints; '' where it cannot run."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    except OSError:
        return ""
    return done.stdout.strip().partition("\n")[0] if done.returncode == 0 else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """One test of one run of pytest, as its report has it."""

    name: str  # tests/gpu/test_replicas.py::test_x[gpus]
    outcome: Outcome
    reason: str = ""
    rows: tuple[tuple[str, dict[str, str]], ...] = ()  # measured: a table's title, and cells by column


@dataclass(frozen=True, slots=True, kw_only=True)
class TestRun:
    """What one stack ran; nothing where ``lacking`` says why."""

    stack: str
    tests: tuple[Test, ...] = ()
    lacking: str = ""

    def of(self, outcome: Outcome) -> list[Test]:
        return [test for test in self.tests if test.outcome == outcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkRun:
    """What a benchmark printed; nothing where ``lacking`` says why."""

    benchmark: Benchmark
    command: str
    output: str = ""
    outcome: Outcome = Outcome.LEFT_OUT
    lacking: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """All that one call of this command ran."""

    machine: Machine
    tests: tuple[TestRun, ...]
    benchmarks: tuple[BenchmarkRun, ...] = ()

    @property
    def exit_code(self) -> int:
        if not self.machine.gpus:
            return NO_GPU
        failed = any(run.of(Outcome.FAILED) for run in self.tests)
        return int(failed or any(run.outcome in (Outcome.FAILED, Outcome.BAR_FAILS) for run in self.benchmarks))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "tests", nargs="*", default=ALL_TESTS, help="files or folders; default: all that are marked gpu"
    )
    parser.add_argument("--no-benchmarks", action="store_true", help="tests alone")
    parser.add_argument("--readme", type=Path, default=README, help="the page with the blocks")
    parser.add_argument(
        "--engine-python", type=Path, default=ROOT / ".venv-engine/bin/python", help="of the newer torch"
    )
    given = parser.parse_args(arguments)
    machine = Machine.present()
    check_blocks(given.readme.read_text())
    engine_tests = ENGINE_TESTS if given.tests == ALL_TESTS else given.tests
    runs = (
        run_tests("official", Path(sys.executable), given.tests),
        run_tests("newer torch", given.engine_python, engine_tests),
    )
    benchmarks = () if given.no_benchmarks else tuple(run_benchmark(each, machine) for each in BENCHMARKS)
    results = Results(machine=machine, tests=runs, benchmarks=benchmarks)
    print("\n".join(report(results)))
    if not machine.gpus:
        print(
            f"\nNo CUDA device is visible to torch {torch.__version__}: nothing ran; {given.readme.name} is as it was."
        )
    elif given.tests != ALL_TESTS:
        print(f"\nNot all tests ran: {given.readme.name} is as it was.")
    else:
        write(given.readme, replaced(given.readme.read_text(), blocks(results)))
    return results.exit_code


# Running --------------------------------------------------------------------------------------------------------------


def run_tests(stack: str, python: Path, tests: Sequence[str]) -> TestRun:
    """Run all of ``tests`` that are marked gpu in this environment; without a GPU each says what it lacks."""
    asked = _first_line([str(python), "-c", "import torch; print(torch.__version__, torch.version.cuda)"]).split()
    if len(asked) != 2:
        return TestRun(stack=stack, lacking=f"no environment with torch: {_shown(python)}")
    if asked[1] == "None":
        return TestRun(stack=f"{stack}, torch {asked[0]}", lacking="its torch is built without CUDA")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.xml")
        # xunit1: what tests record is refused in the default family.
        options = ["-m", "gpu", "-n", "0", "-q", "-o", "junit_family=xunit1", f"--junitxml={file}"]
        code = subprocess.run([python, "-m", "pytest", *options, *tests], cwd=ROOT).returncode
        found = read_report(file) if file.is_file() else ()
    if code not in PYTEST_ENDED:
        found = (*found, Test(name="pytest", outcome=Outcome.FAILED, reason=f"it ended with exit code {code}"))
    return TestRun(stack=f"{stack}, torch {asked[0]}", tests=found, lacking="" if found else "no such test")


def read_report(path: Path) -> tuple[Test, ...]:
    """The tests of what pytest --junitxml wrote."""
    return tuple(map(_read_test, ElementTree.parse(path).getroot().iter("testcase")))


_OUTCOMES = {"skipped": Outcome.LEFT_OUT, "failure": Outcome.FAILED, "error": Outcome.FAILED}


def _read_test(case: ElementTree.Element) -> Test:
    outcome, reason = Outcome.PASSED, ""
    for tag, means in _OUTCOMES.items():
        if (found := case.find(tag)) is not None:
            outcome, reason = means, found.get("message", "").partition("\n")[0]
    rows = tuple(
        (each.attrib["name"].removeprefix("table: "), json.loads(each.attrib["value"]))
        for each in case.iter("property")
        if each.attrib["name"].startswith("table: ")
    )
    file = case.attrib["classname"].replace(".", "/") + ".py"
    return Test(name=f"{file}::{case.attrib['name']}", outcome=outcome, reason=reason, rows=rows)


def run_benchmark(benchmark: Benchmark, machine: Machine) -> BenchmarkRun:
    """Run it on all GPUs, or say how many it lacks."""
    words = [word.format(gpus=max(len(machine.gpus), benchmark.num_gpus)) for word in benchmark.words]
    command = " ".join(["python", f"benchmarks/{words[0]}", *words[1:]])
    if reason := lacking(benchmark.num_gpus):
        return BenchmarkRun(benchmark=benchmark, command=command, lacking=reason)
    print(f"$ {command}", flush=True)
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / words[0], *words[1:]], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    print(done.stdout, flush=True)
    outcome = Outcome.PASSED if done.returncode == 0 else Outcome.FAILED
    if done.returncode == 1 and "FAILS: " in done.stdout:
        outcome = Outcome.BAR_FAILS
    return BenchmarkRun(benchmark=benchmark, command=command, output=done.stdout.strip(), outcome=outcome)


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


# What is said of it ---------------------------------------------------------------------------------------------------


def report(results: Results) -> Iterable[str]:
    """For the terminal: what ran, what failed, and everything that was left out, by what it needs."""
    yield ""
    yield summary_table(results)
    for run in results.tests:
        yield from (f"FAILED ({run.stack}): {test.name}: {test.reason}" for test in run.of(Outcome.FAILED))
    yield from (f"FAILED: {run.command}" for run in results.benchmarks if run.outcome is Outcome.FAILED)
    left_out = left_out_by_need(results)
    if left_out:
        yield ""
        yield "Left out:"
    for need, names in left_out.items():
        yield f"{need}:"
        yield from (f"    {name}" for name in names)


def summary_table(results: Results) -> str:
    outcomes = (Outcome.PASSED, Outcome.FAILED, Outcome.LEFT_OUT)
    rows = [
        [f"tests, {run.stack}", *(str(len(run.of(outcome))) for outcome in outcomes), run.lacking]
        for run in results.tests
    ]
    if results.benchmarks:
        kinds = Counter(run.outcome for run in results.benchmarks)
        num_fails = kinds[Outcome.BAR_FAILS]
        kinds[Outcome.PASSED] += num_fails
        remark = f"{num_fails} with a bar that fails" if num_fails else ""
        rows.append(["benchmarks", *(str(kinds[outcome]) for outcome in outcomes), remark])
    return markdown(["on GPUs", *(outcome.value for outcome in outcomes), "remark"], rows)


def left_out_by_need(results: Results) -> dict[str, list[str]]:
    """The names of what was left out by its reason; a test of two stacks once."""
    found: dict[str, list[str]] = {}
    tests = ((test.reason, test.name) for run in results.tests for test in run.of(Outcome.LEFT_OUT))
    benchmarks = ((run.lacking, run.command) for run in results.benchmarks if run.lacking)
    for need, name in (*tests, *benchmarks):
        names = found.setdefault(need, [])
        if name not in names:
            names.append(name)
    return dict(sorted(found.items()))


def blocks(results: Results) -> dict[str, str]:
    """The text of each block of README that was measured; the others stay as an earlier machine left them."""
    needs = [[need, str(len(names))] for need, names in left_out_by_need(results).items()]
    failures = [[test.name, run.stack] for run in results.tests for test in run.of(Outcome.FAILED)]
    failures += [[run.command, ""] for run in results.benchmarks if run.outcome is Outcome.FAILED]
    lists = [(["left out", "tests and benchmarks"], needs), (["failed", "on"], failures)]
    texts = [f"{results.machine}, `make gpu`:", summary_table(results), *(markdown(*each) for each in lists if each[1])]
    found = {"tests": "\n\n".join(texts)}
    if measured := measured_tables(results):
        found["measured by tests"] = "\n".join([f"{results.machine}:", "", measured])
    for run in results.benchmarks:
        if run.outcome in (Outcome.PASSED, Outcome.BAR_FAILS):
            found[run.benchmark.block] = f"{results.machine}, `{run.command}`:\n\n{run.output}"
    return found


def measured_tables(results: Results) -> str:
    """What the tests measured, a table for each title; columns as the rows have them, '' where one has none."""
    tables: dict[str, list[dict[str, str]]] = {}
    for run in results.tests:
        for title, cells in (row for test in run.tests for row in test.rows):
            tables.setdefault(title, []).append({title: run.stack, **cells})
    texts = []
    for rows in tables.values():
        columns = list(dict.fromkeys(column for row in rows for column in row))
        texts.append(markdown(columns, [[row.get(column, "") for column in columns] for row in rows]))
    return "\n\n".join(texts)


# The page -------------------------------------------------------------------------------------------------------------


def markers(block: str) -> tuple[str, str]:
    return f"<!-- gpu: {block} -->\n", f"<!-- end of gpu: {block} -->"


def check_blocks(page: str) -> None:
    """Before hours of measuring.

    Raises:
        SystemExit: the page has no place for something; names it.
    """
    names = ["tests", "measured by tests", *(benchmark.block for benchmark in BENCHMARKS)]
    missing = [name for name in names if any(page.count(marker) != 1 for marker in markers(name))]
    if missing:
        raise SystemExit(f"the page needs these blocks once each, as {' ... '.join(markers('NAME'))!r}: {missing}")


def replaced(page: str, texts: Mapping[str, str]) -> str:
    """The page with other texts between these blocks' markers, and nothing else changed."""
    for name, text in texts.items():
        start, end = markers(name)
        before, _, rest = page.partition(start)
        _, _, after = rest.partition(end)
        page = f"{before}{start}\n{text}\n\n{end}{after}"
    return page


def write(path: Path, page: str) -> None:
    """Beside the page first: an interrupted run leaves it as it was."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(page)
    os.replace(unfinished, path)


if __name__ == "__main__":
    sys.exit(main())
