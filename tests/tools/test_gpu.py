"""``make gpu``: what it says where there is no GPU, and what it writes where there are some.

There is none here, so the machine is played: its name, its results of pytest (a real report of small tests) and its
benchmarks (small scripts).
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support import gpus
from support.forked_scripts import run_script
from support.ranks import WITH_COMPOSER

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ROOT / "tools" / "gpu.py"
PAGE = (ROOT / "benchmarks" / "README.md").read_text()

# What a machine with two GPUs would report.
TESTS = """
import pytest
from support.gpus import Ranks, lacking

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
    spec = importlib.util.spec_from_file_location("gpu_command", COMMAND)
    assert spec is not None and spec.loader is not None
    module = sys.modules["gpu_command"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def machine(command: ModuleType) -> object:
    return command.Machine(
        gpus=("Played GPU 80GB",) * 2, driver="550.54", torch="2.7.0", date="2026-11-23", commit="1234567"
    )


@pytest.fixture(scope="module")
def tests(command: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> object:
    """What pytest itself reports of TESTS, read as that of a stack."""
    folder = tmp_path_factory.mktemp("played")
    (folder / "test_played.py").write_text(TESTS)
    options = ["-q", "-p", "no:cacheprovider", f"--rootdir={folder}", f"--junitxml={folder}/report.xml"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "test_played.py"],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT / "tests")}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    return command.TestRun(stack="played", tests=command.read_report(folder / "report.xml"))


def without_blocks(page: str) -> str:
    return re.sub(r"(<!-- gpu: (.*?) -->\n).*?(<!-- end of gpu: \2 -->)", r"\1\3", page, flags=re.S)


def test_without_a_gpu(tmp_path: Path):
    """Nothing is claimed to be measured: the page stays, and one sees what a machine must have for each test."""
    page = tmp_path / "README.md"
    page.write_text(PAGE)
    chosen = "tests/gpu/test_replicas.py"
    done = subprocess.run(
        [sys.executable, COMMAND, chosen, "--no-benchmarks", "--readme", page, "--engine-python", "none"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    _, _, left_out = done.stdout.partition("Left out:")
    assert "needs 4 CUDA devices, none is visible:" in left_out
    for name in ("test_replicas_train_as_unsharded", "test_offloaded_gradients_are_those_of_their_backward"):
        assert f"{chosen}::{name}[gpus]" in left_out
    assert "No CUDA device is visible" in done.stdout
    assert "no environment with torch: none" in done.stdout
    assert page.read_text() == PAGE and os.listdir(tmp_path) == ["README.md"]


def test_a_report_becomes_tables(command: ModuleType, machine: object, tests: object):
    """Each outcome is counted, each reason is there once, and what tests measured stands beside each other."""
    results = command.Results(machine=machine, tests=(tests,))
    assert results.exit_code == 1
    blocks = command.blocks(results)
    assert blocks.keys() == {"tests", "measured by tests"}
    where = "2 × Played GPU 80GB, driver 550.54, torch 2.7.0, 2026-11-23, commit 1234567"
    assert all(text.startswith(where) for text in blocks.values())
    assert rows_of(blocks["tests"]) == [
        ["on GPUs", "passed", "failed", "left out", "remark"],
        ["tests, played", "2", "1", "2", ""],
        ["left out", "tests and benchmarks"],
        ["needs 4 CUDA devices, 2 are visible", "2"],
        ["failed", "on"],
        ["test_played.py::test_fails", "played"],
    ]
    assert rows_of(blocks["measured by tests"]) == [
        ["a step", "GPUs", "ours", "FSDP1", "peak"],
        ["played", "2", "10.0 ms", "11.0 ms", ""],
        ["played", "2", "12.0 ms", "", "3 GiB"],
    ]
    told = "\n".join(command.report(results))
    assert "FAILED (played): test_played.py::test_fails: AssertionError: of no use" in told
    assert "test_is_left_out[two]" in told


def rows_of(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("| ---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def script(folder: Path, name: str, body: str) -> str:
    (folder / name).write_text(body)
    return str(folder / name)


def test_benchmarks_are_told_by_how_they_end(
    command: ModuleType, machine: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A table with a bar that fails is a measurement; an error is none, and replaces none."""
    played(monkeypatch, 2)
    bodies = {
        "step": "import sys; print('| a table |', sys.argv[1:])",
        "votes": "print('| a table |\\nFAILS: a bar: 2'); raise SystemExit(1)",
        "setup": "print('half a table'); raise SystemExit('out of memory')",
    }
    lines = {name: (script(tmp_path, f"{name}.py", body), "--ranks", "{gpus}") for name, body in bodies.items()}
    runs = [command.run_benchmark(command.Benchmark(block=name, words=words), machine) for name, words in lines.items()]
    large = command.Benchmark(block="checkpoint", words=lines["step"], num_gpus=8)
    results = command.Results(machine=machine, tests=(), benchmarks=(*runs, command.run_benchmark(large, machine)))
    outcomes = [run.outcome.value for run in results.benchmarks]
    assert outcomes == ["passed", "a bar fails", "failed", "left out"]
    assert results.exit_code == 1
    blocks = command.blocks(results)
    assert blocks.keys() == {"tests", "step", "votes"}
    assert "['--ranks', '2']" in blocks["step"] and "FAILS: a bar: 2" in blocks["votes"]
    assert "needs 8 CUDA devices, 2 are visible" in blocks["tests"]


def test_the_page_changes_between_the_markers_alone(
    command: ModuleType, machine: object, tests: object, tmp_path: Path
):
    """A second run on the same machine changes nothing, and what it could not measure stays as it was."""
    command.check_blocks(PAGE)
    blocks = command.blocks(command.Results(machine=machine, tests=(tests,)))
    page = tmp_path / "README.md"
    command.write(page, command.replaced(PAGE, blocks))
    written = page.read_text()
    assert all(text in written for text in blocks.values())
    assert written != PAGE and without_blocks(written) == without_blocks(PAGE)
    for benchmark in command.BENCHMARKS:
        start, end = command.markers(benchmark.block)
        assert written.partition(start)[2].partition(end)[0] == PAGE.partition(start)[2].partition(end)[0]
    assert command.replaced(written, blocks) == written
    assert os.listdir(tmp_path) == ["README.md"]


def test_the_page_is_written_where_all_tests_ran(
    command: ModuleType, machine: object, tests: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A table of one chosen test would pass for that of the machine."""
    page = tmp_path / "README.md"
    page.write_text(PAGE)
    monkeypatch.setattr(command.Machine, "present", lambda: machine)
    monkeypatch.setattr(command, "run_tests", lambda stack, python, chosen: tests)
    monkeypatch.setattr(command, "run_benchmark", lambda benchmark, machine: left_out(command, benchmark))
    assert command.main(["tests/gpu/test_replicas.py", "--readme", str(page)]) == 1
    assert page.read_text() == PAGE
    assert command.main(["--readme", str(page)]) == 1
    assert "2 × Played GPU 80GB" in page.read_text()


def left_out(command: ModuleType, benchmark: object) -> object:
    return command.BenchmarkRun(benchmark=benchmark, command="python", lacking="needs 8 CUDA devices, 2 are visible")


def test_a_page_without_a_block_is_refused(command: ModuleType):
    """Before hours of measuring, not after."""
    with pytest.raises(SystemExit, match=r"\['setup'\]"):
        command.check_blocks(PAGE.replace("<!-- gpu: setup -->", ""))


# --- what a test says of the machine


def played(monkeypatch: pytest.MonkeyPatch, num_gpus: int, why_not: str = "") -> None:
    """The machine has so many GPUs, of compute capability 8.0; what is installed is what is."""
    monkeypatch.setattr(gpus, "_num_gpus", lambda: num_gpus)
    monkeypatch.setattr(gpus, "_why_no_gpu", lambda: why_not)
    monkeypatch.setattr(gpus, "_capability", lambda: (8, 0))


def test_a_skip_says_what_is_missing(monkeypatch: pytest.MonkeyPatch):
    """All of it at once: whoever rents a machine for a test rents it once."""
    played(monkeypatch, 1)
    assert gpus.lacking(1, ("torch",)) == ""
    assert gpus.lacking(4) == "needs 4 CUDA devices, 1 is visible"
    assert gpus.lacking(2, ("torch", "no-such-thing")) == "needs no-such-thing; 2 CUDA devices, 1 is visible"
    assert gpus.lacking(1, capability=(8, 9)) == "needs compute capability 8.9, the devices have 8.0"
    assert "needs 100000000 GiB of disk for temporary files (TMPDIR), " in gpus.lacking(1, disk_gib=10**8)
    played(monkeypatch, 0, "torch is built without CUDA")
    assert gpus.lacking(1, capability=(8, 9)) == "needs 1 CUDA device, torch is built without CUDA"


@pytest.mark.parametrize(
    ("visible", "on_two_to_four", "on_one_to_two"), [(1, None, 1), (2, 2, 2), (3, 3, 2), (8, 4, 2)]
)
def test_a_test_takes_the_gpus_that_it_can_use(
    monkeypatch: pytest.MonkeyPatch, visible: int, on_two_to_four: int | None, on_one_to_two: int
):
    """On a larger machine it is not skipped, nor run on more ranks than it was written for."""
    played(monkeypatch, visible)
    for mark, expected in ((gpus.on_gpus(2, 4), on_two_to_four), (gpus.on_gpus(1, 2), on_one_to_two)):
        on_devices, rehearsal = mark.args[1]
        is_skipped = any(each.name == "skipif" and each.args[0] for each in on_devices.marks)
        assert any(each.name == "gpu" for each in on_devices.marks)
        assert is_skipped == (expected is None)
        if expected is not None:
            assert on_devices.values == (gpus.Ranks("cuda", expected),)
        assert rehearsal.values[0].device == "cpu"
        assert not any(each.name == "gpu" for each in rehearsal.marks)


@pytest.mark.composer
def test_benchmarks_know_their_options(command: ModuleType):
    """A command line that its script refuses would be found out on the borrowed machine."""
    of_script: dict[tuple[str, ...], set[str]] = {}
    for benchmark in command.BENCHMARKS:
        name, *words = benchmark.words
        options = {word for word in words if word.startswith("--")}
        script = (name, "--trainer") if "--trainer" in options else (name,)  # which has options of its own
        of_script.setdefault(script, set()).update(options - set(script))
    for (name, *chosen), options in of_script.items():
        done = run_script(WITH_COMPOSER, ROOT / "benchmarks" / name, *chosen, "--help")
        assert done.returncode == 0, done.stderr
        unknown = [option for option in options if f"{option} " not in done.stdout]
        assert not unknown, f"{name} has no {unknown}"
