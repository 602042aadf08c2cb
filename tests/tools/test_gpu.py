"""``make gpu``: its report without a GPU, and its tables with some.

The test machine has no GPU, so these are faked: the machine's name, pytest's results (a real report of small tests) and
the benchmarks (small scripts).
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import gpus
from support.forked_scripts import run_script
from support.ranks import WITH_COMPOSER

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "benchmarks" / "README.md").read_text()
WHERE = "2 × Played GPU 80GB, commit 1234567"

# The report of a machine with two GPUs.
TESTS = """
import pytest
from support.gpus import Ranks

pytestmark = pytest.mark.gpu
ON_TWO = Ranks("cuda", 2)

def test_measures(record_property):
    ON_TWO.record(record_property, "a step", {"ours": "10.0 ms", "FSDP1": "11.0 ms"})
    Ranks("cpu", 2).record(record_property, "a step", {"ours": "of a rehearsal"})

def test_measures_again(record_property):
    ON_TWO.record(record_property, "a step", {"ours": "12.0 ms", "peak": "3 GiB"})

@pytest.mark.parametrize("case", ["one", "two"])
@pytest.mark.skip(reason="needs 4 CUDA devices, 2 are visible")
def test_is_left_out(case):
    raise AssertionError("ran")

def test_fails():
    raise AssertionError("of no use")
"""


@pytest.fixture(scope="module")
def command() -> ModuleType:
    """tools/gpu.py, imported."""
    spec = importlib.util.spec_from_file_location("gpu_command", ROOT / "tools" / "gpu.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["gpu_command"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tests(command: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """pytest's own report on TESTS, parsed like that of a stack."""
    folder = tmp_path_factory.mktemp("played")
    (folder / "test_played.py").write_text(TESTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "tests"))
        return command.run_tests("played", sys.executable, [f"--rootdir={folder}", str(folder)])


def rows_of(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("| ---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_report_becomes_tables(command: ModuleType, tests: list[Any]):
    """Each outcome is counted, each reason appears once, and measurements of related tests share a table."""
    blocks = command.blocks(WHERE, tests)
    assert blocks.keys() == {"tests", "measured by tests"} and all(text.startswith(WHERE) for text in blocks.values())
    header, [stack, *counts], *others = rows_of(blocks["tests"])
    assert header == ["on GPUs", "passed", "failed", "left out", "a bar fails"] and counts == ["2", "1", "2", "0"]
    assert others == [
        ["left out", "tests and benchmarks"],
        ["needs 4 CUDA devices, 2 are visible", "2"],
        ["failed", "on"],
        ["test_played.py::test_fails", stack],
    ]
    assert rows_of(blocks["measured by tests"]) == [
        ["a step", "GPUs", "ours", "FSDP1", "peak"],
        [stack, "2", "10.0 ms", "11.0 ms", ""],
        [stack, "2", "12.0 ms", "", "3 GiB"],
    ]


def test_the_page(command: ModuleType, tests: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The page changes only between the markers, and only after tests ran on a GPU."""
    page = tmp_path / "README.md"
    page.write_text(PAGE)
    monkeypatch.setattr(command, "machine", lambda: WHERE)
    monkeypatch.setattr(command, "run_tests", lambda stack, *_: tests[:] if stack == "official" else [])
    words = ["--no-benchmarks", "--readme", str(page)]
    played(monkeypatch, 0)
    assert command.main(words) == 2 and page.read_text() == PAGE
    played(monkeypatch, 2)
    assert command.main(words) == command.main(words) == 1  # a second run changes nothing
    written = page.read_text()
    assert written == command.replaced(PAGE, command.blocks(WHERE, tests)) != PAGE
    block = re.compile(r"(<!-- gpu: (tests|measured by tests) -->\n).*?(<!-- end of gpu: \2 -->)", re.S)
    assert block.sub("", written) == block.sub("", PAGE) and os.listdir(tmp_path) == ["README.md"]
    page.write_text(PAGE.replace("<!-- gpu: setup -->", ""))
    with pytest.raises(SystemExit, match="gpu: setup"):  # before hours of measuring
        command.main(words)


# --- skipping by number of GPUs


def played(monkeypatch: pytest.MonkeyPatch, num_gpus: int) -> None:
    """Pretends to have so many GPUs of compute capability 8.0; installed packages stay real."""
    monkeypatch.setattr(gpus, "_num_gpus", lambda: num_gpus)
    monkeypatch.setattr(gpus, "_why_no_gpu", lambda: "torch is built without CUDA" if not num_gpus else "")
    monkeypatch.setattr(gpus, "_capability", lambda: (8, 0))


@pytest.mark.parametrize(("visible", "expected"), [(1, (None, 1)), (3, (3, 2)), (8, (4, 2))])
def test_a_test_takes_the_gpus_that_it_can_use(
    monkeypatch: pytest.MonkeyPatch, visible: int, expected: tuple[int | None, int]
):
    """On a larger machine a test still runs, on the number of ranks that it was written for."""
    played(monkeypatch, visible)
    for mark, number in zip((gpus.on_gpus(2, 4), gpus.on_gpus(1, 2)), expected, strict=True):
        on_devices, rehearsal = mark.args[1]
        skips = [each.args[0] for each in on_devices.marks if each.name == "skipif"]
        assert skips == [number is None] and "gpu" in {each.name for each in on_devices.marks}
        assert number is None or on_devices.values == (gpus.Ranks("cuda", number),)
        assert rehearsal.values[0].device == "cpu" and "gpu" not in {each.name for each in rehearsal.marks}


@pytest.mark.composer
def test_benchmarks_know_their_options(command: ModuleType):
    """An invalid command line would be noticed only on the rented machine."""
    words_of: dict[str, set[str]] = {}
    for _, line in command.BENCHMARKS.values():
        script, *words = line.split()
        words_of.setdefault(script, set()).update(word for word in words if word.startswith("--"))
    for script, options in words_of.items():
        done = run_script(WITH_COMPOSER, ROOT / "benchmarks" / script, "--help")
        unknown = [option for option in options if f"{option} " not in done.stdout]
        assert done.returncode == 0 and not unknown, f"{script} has no {unknown}: {done.stderr}"
