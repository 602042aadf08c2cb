"""Run every GPU test and benchmark that this machine's GPUs allow, and write the tables of benchmarks/README.md.

    make gpu
    .venv/bin/python tools/gpu.py [--no-benchmarks] [--readme FILE]

Tests run one after the other, because each takes all GPUs that it can use. A skipped test reports its requirement, and
the summary counts these. Exit code 0, 1 if a test or a bar failed, and 2 without a GPU: then it lists the tests and
leaves the page unchanged. For some of the tests: python -m pytest -m gpu -n 0 FILE.
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
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]

from report import markdown  # noqa: E402  The benchmarks' own.

# The tests' messages about missing hardware. Not an import statement, which would make mypy check the tests.
lacking: Callable[[int], str] = importlib.import_module("support.gpus").lacking

README = ROOT / "benchmarks" / "README.md"
ENGINE_TESTS = ["tests/sharding", "tests/training", "tests/checkpoint", "tests/gpu"]
NO_GPU = 2
PYTEST_ENDED = (0, 1, 5)  # all passed, some failed, none found
PASSED, FAILED, LEFT_OUT, BAR_FAILS = "passed", "failed", "left out", "a bar fails"
OUTCOMES = {"skipped": LEFT_OUT, "failure": FAILED, "error": FAILED}  # by pytest's name
ON_ALL = "--ranks {gpus}"
# By block of the page: the number of GPUs, and the command line.
BENCHMARKS = {
    "step, one GPU": (1, "step.py --layers 12"),  # four models with their optimizers on one GPU of 80 GB
    "step": (2, f"step.py {ON_ALL}"),
    "step, SHARD_GRAD_OP": (2, f"step.py {ON_ALL} --strategy SHARD_GRAD_OP"),
    "step, pipelined": (1, "step.py --layers 12 --optimizer decoupled_adamw --clipping --pipelined 10"),
    "setup": (1, "setup.py"),
    "dispatch": (1, "dispatch.py"),
    "trainer": (1, f"step.py --trainer {ON_ALL}"),
    "checkpoint": (1, "checkpoint.py"),
    "saving": (1, f"saving.py {ON_ALL} --mib 8192"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One test of one stack, or one benchmark.

    Args:
        kind: Its row in the summary: the stack, or ``benchmarks``.
        name: pytest's name, or the command line.
        rows: The test's measurements: a table's title, and cells by column.
        block: Of the page, with the ``output`` for it.
    """

    kind: str
    name: str
    outcome: str
    reason: str = ""
    rows: tuple[tuple[str, dict[str, str]], ...] = ()
    block: str = ""
    output: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--no-benchmarks", action="store_true", help="tests alone")
    parser.add_argument("--readme", type=Path, default=README, help="the page with the blocks")
    parser.add_argument("--engine-python", default=".venv-engine/bin/python", help="of the newer torch")
    given = parser.parse_args(arguments)
    replaced(given.readme.read_text(), dict.fromkeys(("tests", "measured by tests", *BENCHMARKS), ""))
    entries = run_tests("official", sys.executable, ["tests"])
    entries += run_tests("newer torch", given.engine_python, ENGINE_TESTS)
    entries += [] if given.no_benchmarks else map(run_benchmark, BENCHMARKS)
    print(f"\n{summary_table(entries)}", *(f"{each.reason}: {each.name}" for each in entries if each.reason), sep="\n")
    if reason := lacking(1):
        print(f"\ntorch {torch.__version__} {reason}: nothing ran, and {given.readme.name} is as it was.")
        return NO_GPU
    unfinished = given.readme.with_name(given.readme.name + ".unfinished")
    unfinished.write_text(replaced(given.readme.read_text(), blocks(machine(), entries)))
    os.replace(unfinished, given.readme)  # an interrupted run leaves the old page
    return int(any(entry.outcome in (FAILED, BAR_FAILS) for entry in entries))


def machine() -> str:
    """The place and time of a measurement, without the machine's name."""
    names = Counter(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))
    driver = first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    changes = " and changes" if first_line("git", "status", "--porcelain", "--untracked-files=no") else ""
    commit = first_line("git", "rev-parse", "--short", "HEAD") + changes
    gpus = ", ".join(f"{count} × {name}" for name, count in names.items())
    return f"{gpus}, driver {driver}, torch {torch.__version__}, {datetime.now(UTC):%Y-%m-%d}, commit {commit}"


def first_line(*command: str) -> str:
    """The first line that a command prints; '' where it cannot run."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    except OSError:
        return ""
    return done.stdout.strip().partition("\n")[0] if done.returncode == 0 else ""


# Running --------------------------------------------------------------------------------------------------------------


def run_tests(stack: str, python: str, tests: Sequence[str]) -> list[Entry]:
    """Run those of ``tests`` that are marked gpu in this environment; without a GPU each reports its requirement."""
    version = first_line(python, "-c", "from importlib.metadata import version; print(version('torch'))")
    if not version:
        return [Entry(kind=stack, name="all", outcome=LEFT_OUT, reason=f"no environment with torch: {python}")]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.xml")
        # xunit1: the default family refuses recorded properties.
        options = ["-m", "gpu", "-n", "0", "-q", "-o", "junit_family=xunit1", f"--junitxml={file}"]
        code = subprocess.run([python, "-m", "pytest", *options, *tests], cwd=ROOT).returncode
        kind = f"tests, {stack}, torch {version}"
        found = read_report(file, kind) if file.is_file() else []
    if code not in PYTEST_ENDED:
        found.append(Entry(kind=kind, name="pytest", outcome=FAILED, reason=f"it ended with exit code {code}"))
    return found


def read_report(path: Path, kind: str) -> list[Entry]:
    """The tests in a file of pytest --junitxml."""
    found = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        ends = [(OUTCOMES[each.tag], each.get("message", "")) for each in case if each.tag in OUTCOMES]
        outcome, reason = ends[-1] if ends else (PASSED, "")
        recorded = ((each.attrib["name"].partition("table: "), each.attrib["value"]) for each in case.iter("property"))
        rows = tuple((title, json.loads(value)) for (_, is_row, title), value in recorded if is_row)
        name = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
        found.append(Entry(kind=kind, name=name, outcome=outcome, reason=reason.partition("\n")[0], rows=rows))
    return found


def run_benchmark(block: str) -> Entry:
    """Run it on all GPUs, or return the number of missing ones."""
    num_gpus, line = BENCHMARKS[block]
    script, *words = line.format(gpus=max(torch.cuda.device_count(), num_gpus)).split()
    command = " ".join(["python", f"benchmarks/{script}", *words])
    if reason := lacking(num_gpus):
        return Entry(kind="benchmarks", name=command, outcome=LEFT_OUT, reason=reason)
    print(f"$ {command}", flush=True)
    path = ROOT / "benchmarks" / script
    done = subprocess.run([sys.executable, path, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    outcome = PASSED if done.returncode == 0 else FAILED
    if done.returncode == 1 and "FAILS: " in done.stdout:
        outcome = BAR_FAILS
    return Entry(kind="benchmarks", name=command, outcome=outcome, block=block, output=done.stdout.strip())


# The summary --------------------------------------------------------------------------------------------------------


def summary_table(entries: Iterable[Entry]) -> str:
    """A benchmark that fails a bar still counts as measured."""
    counts: dict[str, Counter[str]] = {}
    for entry in entries:
        counts.setdefault(entry.kind, Counter())[entry.outcome] += 1
    outcomes = (PASSED, FAILED, LEFT_OUT, BAR_FAILS)
    rows = [[kind, *(str(count[outcome]) for outcome in outcomes)] for kind, count in counts.items()]
    return markdown(["on GPUs", *outcomes], rows)


def blocks(where: str, entries: Sequence[Entry]) -> dict[str, str]:
    """The text of each measured block of README; the others keep the results of an earlier machine."""
    needs = sorted(Counter(entry.reason for entry in entries if entry.outcome == LEFT_OUT).items())
    needed = [[need, str(number)] for need, number in needs]
    failures = [[entry.name, entry.kind] for entry in entries if entry.outcome == FAILED]
    tables = [(["left out", "tests and benchmarks"], needed), (["failed", "on"], failures)]
    texts = [f"{where}, `make gpu`:", summary_table(entries), *(markdown(*each) for each in tables if each[1])]
    found = {"tests": "\n\n".join(texts)}
    measured: dict[str, list[dict[str, str]]] = {}
    for entry in entries:
        for title, cells in entry.rows:
            measured.setdefault(title, []).append({title: entry.kind, **cells})
        if entry.block and entry.outcome != FAILED:
            found[entry.block] = f"{where}, `{entry.name}`:\n\n{entry.output}"
    if measured:
        found["measured by tests"] = "\n\n".join([f"{where}:", *map(measured_table, measured.values())])
    return found


def measured_table(rows: Sequence[dict[str, str]]) -> str:
    """One column for each key of the rows; '' where a row lacks it."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    return markdown(columns, [[row.get(column, "") for column in columns] for row in rows])


def replaced(page: str, texts: Mapping[str, str]) -> str:
    """The page with new texts between these blocks' markers, otherwise unchanged.

    Raises:
        SystemExit: a block has no markers in the page.
    """
    for name, text in texts.items():
        start, end = f"<!-- gpu: {name} -->\n", f"<!-- end of gpu: {name} -->"
        if page.count(start) != 1 or page.count(end) != 1:
            raise SystemExit(f"the page needs this block once: {start}...{end}")
        before, _, rest = page.partition(start)
        page = f"{before}{start}\n{text}\n\n{end}{rest.partition(end)[2]}"
    return page


if __name__ == "__main__":
    sys.exit(main())
