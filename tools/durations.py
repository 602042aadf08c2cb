"""Where the time of a test run goes, in Markdown: by folder, and the slowest tests.

    make test ARGS=--junitxml=durations.xml
    python3.11 tools/durations.py durations.xml [--slowest 20]

A test's seconds are those of its lane, fixtures included; two lanes run at once, so that they add up to about twice
the time that a run takes. Uses the standard library only.
"""

from __future__ import annotations

import argparse
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """One test, as pytest's JUnit report has it."""

    file: str  # tests/sharding/test_plan.py
    name: str
    seconds: float

    @property
    def folder(self) -> str:
        return self.file.rpartition("/")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="Where the time of a test run goes.")
    parser.add_argument("report", type=Path, help="what pytest --junitxml wrote")
    parser.add_argument("--slowest", type=int, default=20, metavar="N", help="tests to list (20)")
    arguments = parser.parse_args()
    tests = read(arguments.report)
    for line in report(tests, arguments.slowest):
        print(line)


def read(path: Path) -> list[Test]:
    """The tests of a JUnit report."""
    return [
        Test(
            file=case.attrib["classname"].replace(".", "/") + ".py",
            name=case.attrib["name"],
            seconds=float(case.attrib["time"]),
        )
        for case in ElementTree.parse(path).getroot().iter("testcase")
    ]


def report(tests: list[Test], num_slowest: int) -> Iterator[str]:
    total = sum(test.seconds for test in tests)
    yield f"{len(tests)} tests, {total:.0f} s in all lanes together"
    yield ""
    yield from table("folder", tests, lambda test: test.folder, total)
    yield ""
    yield from table("file", tests, lambda test: test.file, total, num_slowest)
    yield ""
    yield "| test | s |"
    yield "|---|---:|"
    for test in sorted(tests, key=lambda test: -test.seconds)[:num_slowest]:
        yield f"| {test.file}::{test.name} | {test.seconds:.1f} |".replace("tests/", "", 1)


def table(
    title: str, tests: Iterable[Test], key: Callable[[Test], str], total: float, most: int | None = None
) -> Iterator[str]:
    """A row for each group, the longest first."""
    groups: dict[str, list[float]] = {}
    for test in tests:
        groups.setdefault(key(test), []).append(test.seconds)
    yield f"| {title} | tests | s | part |"
    yield "|---|---:|---:|---:|"
    for name, seconds in sorted(groups.items(), key=lambda group: -sum(group[1]))[:most]:
        yield f"| {name} | {len(seconds)} | {sum(seconds):.0f} | {sum(seconds) / total:.0%} |"


if __name__ == "__main__":
    main()
