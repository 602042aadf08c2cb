"""``composer-fsdp2 run``: a script as Python would run it, with FSDP2 under it, by every launcher."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from support.cases import for_each
from support.commands import BIN, LAUNCHERS, PYTHON, SCRIPT, Ended, run_all, run_forked
from support.oracle import FSDP1
from support.ranks import run_ranks
from support.trainers import largest_difference

pytestmark = pytest.mark.composer

COMMAND = [str(BIN / "composer-fsdp2")]
AS_MODULE = [*PYTHON, "-m", "composer_fsdp2"]
# What must reach the script as it is: flags that are also ours, a terminator, a space.
ARGUMENTS = ["--help", "-m", "--exit-code", "7", "key=value", "--", "a b"]

PROBE = """
import json, os, sys
seen = {"argv": sys.argv, "file": __file__, "name": __name__, "package": __package__,
        "main": vars(sys.modules["__main__"]) is globals(),
        # What can shadow an installed package; imports append to the rest.
        "path": sys.path[: next(i for i, folder in enumerate(sys.path) if folder.endswith("site-packages"))]}
ours = sys.modules.get("composer_fsdp2.compat")
if ours is not None:
    from composer.distributed import prepare_fsdp_module
    code = prepare_fsdp_module.__code__.co_filename
    seen_shim = {"installed": ours.is_installed(), "is ours": os.path.dirname(code) == os.path.dirname(ours.__file__)}
beside = os.listdir(os.path.dirname(__file__))
print(json.dumps({"seen": seen, "shim": seen_shim if ours else None, "beside": beside}))
sys.exit(7)
"""


# --- the script's surroundings


def write_scripts(folder: Path) -> None:
    (folder / "scripts").mkdir()
    (folder / "users").mkdir()
    (folder / "users" / "__init__.py").touch()
    for path in ("scripts/probe.py", "users/probe.py"):
        (folder / path).write_text(PROBE)
    (folder / "fails.py").write_text("def f():\n    raise ValueError('the script failed')\nf()\n")


PYTHONS = {
    "python script": [*PYTHON, "scripts/probe.py", *ARGUMENTS],
    "python module": [*PYTHON, "-m", "users.probe", *ARGUMENTS],
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """The probe and a script that fails, run by Python and by ours."""
    folder = tmp_path_factory.mktemp("cli")
    write_scripts(folder)
    ours = {
        "our script": ["run", "scripts/probe.py", *ARGUMENTS],
        "our module": ["run", "-m", "users.probe", *ARGUMENTS],
        "our failure": ["run", "fails.py"],
        "our only rank": ["run", SCRIPT, "--out", "alone.json", "--batches", "3", "--clip", "0.1"],
    }
    done = run_all(PYTHONS, folder) | run_forked(ours, folder)
    if (folder / "alone.json").exists():
        done["our only rank"].out += "\n" + (folder / "alone.json").read_text()
    return done


def assert_sees_the_same(ours: Ended, python: Ended) -> None:
    assert ours.last["seen"] == python.last["seen"], ours.err
    assert ours.last["shim"] == {"installed": True, "is ours": True}
    assert ours.code == python.code == 7, ours.err


def test_script_sees_what_python_gives(ended: dict[str, Ended]):
    """A script that parses flags, finds files beside itself or imports its neighbours runs unchanged.

    Composer that it imports is ours, and schedulers restart or stop by its own exit code.
    """
    assert_sees_the_same(ended["our script"], ended["python script"])


def test_module_sees_what_python_gives(ended: dict[str, Ended]):
    """``python -m package.train`` becomes ``composer-fsdp2 run -m package.train``."""
    assert_sees_the_same(ended["our module"], ended["python module"])


def test_nothing_is_left_beside_the_script(ended: dict[str, Ended]):
    """A read-only or version-controlled folder of scripts stays as it was."""
    assert ended["our script"].last["beside"] == ["probe.py"]


@pytest.mark.slow  # each imports Composer
def test_installed_commands_do_what_forked_ones_do(tmp_path: Path):
    """The console script and ``python -m composer_fsdp2`` leave a script what Python gives it."""
    write_scripts(tmp_path)
    ours = {
        "our script": [*COMMAND, "run", "scripts/probe.py", *ARGUMENTS],
        "our script by -m": [*AS_MODULE, "run", "scripts/probe.py", *ARGUMENTS],
        "our module": [*COMMAND, "run", "-m", "users.probe", *ARGUMENTS],
    }
    done = run_all(PYTHONS | ours, tmp_path)
    for name in ("our script", "our script by -m"):
        assert_sees_the_same(done[name], done["python script"])
        assert done[name].last["beside"] == ["probe.py"]
    assert_sees_the_same(done["our module"], done["python module"])


def test_exception_ends_with_its_traceback(ended: dict[str, Ended]):
    """The last lines say what failed and where, as Python's do."""
    failure = ended["our failure"]
    assert failure.code == 1
    assert failure.err.strip().endswith("ValueError: the script failed")
    assert 'fails.py", line 2, in f' in failure.err


def test_one_rank_needs_no_launcher(ended: dict[str, Ended]):
    """A first try on one device is ``composer-fsdp2 run train.py``."""
    assert ended["our only rank"].code == 0, ended["our only rank"].err
    assert "FSDPModule" in ended["our only rank"].last["kinds"]
    assert len(ended["our only rank"].last["losses"]) == 3


# --- inside a rank, where Composer is imported already


def main_of(arguments: list[str]) -> tuple[Any, str, str]:
    """What ``composer-fsdp2 arguments`` ends with, prints and complains of."""
    from composer_fsdp2.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["composer-fsdp2", *arguments]),
        mock.patch.dict("os.environ", {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            return end.code or 0, out.getvalue(), err.getvalue()
        except BaseException:
            return 1, out.getvalue(), err.getvalue() + traceback.format_exc()
    return 0, out.getvalue(), err.getvalue()


def check_end_of_file(folder: str) -> None:
    script = Path(folder) / "reads.py"
    script.write_text("def f():\n    raise EOFError('Ran out of input')\nf()\n")
    code, _, err = main_of(["run", str(script)])
    assert code == 1, code
    assert err.strip().endswith("EOFError: Ran out of input"), err
    assert 'reads.py", line 2, in f' in err, err


def test_end_of_file_shows_its_traceback_too(tmp_path: Path):
    """Reading a truncated checkpoint raises EOFError, which command line libraries answer with "Aborted." alone."""
    run_ranks(check_end_of_file, 2, str(tmp_path))


# What is typed, and what the one line must say.
NOTHING_TO_RUN = {
    ("run", "not_there.py", "--flag"): "no such file: not_there.py",
    ("run", "-m"): "-m needs the name of a module",
    ("run",): "SCRIPT",
    ("train", "not_there.yaml", "key=value"): "no such file: not_there.yaml",
    ("rum", "script.py"): "run",
}


def check_nothing_to_run() -> None:
    def check(arguments: tuple[str, ...], text: str) -> None:
        code, _, err = main_of([*arguments])
        assert code == 2, f"{arguments}: {code}, {err}"
        assert text in err, f"{arguments}: {err}"
        assert "Traceback" not in err, f"{arguments}: {err}"

    for_each(check, {f"{arguments}": (arguments, text) for arguments, text in NOTHING_TO_RUN.items()})


def test_nothing_to_run_is_said_in_a_line():
    """A typo in a path ends at once, with exit code 2 and without a traceback."""
    run_ranks(check_nothing_to_run, 2)


def check_help() -> None:
    code, out, _ = main_of(["--help"])
    assert code == 0, code
    for word in ("run", "train", "FSDP1", "FSDP2", "SCRIPT", "YAML"):
        assert word in out, out
    code, out, _ = main_of(["run", "--help"])
    assert code == 0, code
    for words in ("composer -n 8 -m composer_fsdp2 run SCRIPT", "torchrun --nproc-per-node 8 -m composer_fsdp2"):
        assert words in " ".join(out.split()), out
    code, out, _ = main_of(["train", "--help"])
    assert (code, "composer -n 8 -m composer_fsdp2 train YAML" in " ".join(out.split())) == (0, True), out


def test_help():
    """The verbs, and how to start several ranks, are one --help away."""
    run_ranks(check_help, 2)


def check_left_behind(folder: str) -> None:
    import composer.distributed

    from composer_fsdp2.compat import is_installed

    original = composer.distributed.prepare_fsdp_module
    script = Path(folder) / "script.py"

    def check(source: str, code: int) -> None:
        if os.environ["RANK"] == "0":
            script.write_text(source)
        dist.barrier()
        assert main_of(["run", str(script)])[0] == code
        assert not is_installed(), source
        assert composer.distributed.prepare_fsdp_module is original, source
        dist.barrier()

    cases = {"pass": 0, "raise SystemExit(3)": 3, "raise ValueError": 1}
    for_each(check, {source: (source, code) for source, code in cases.items()})


def test_shim_is_gone_after_the_script(tmp_path: Path):
    """Whoever calls main() from Python has Composer as it was when the script has ended, however it ended."""
    run_ranks(check_left_behind, 2, str(tmp_path))


# --- several ranks

TRAINING = ["--fsdp", '{"sharding_strategy": "SHARD_GRAD_OP"}', "--batches", "6", "--microbatch", "2", "--eval"]
TRAINING += ["--clip", "0.1"]


def check_on_fsdp1(out: str) -> None:
    import runpy

    arguments = [str(SCRIPT), "--out", out, *TRAINING]
    with FSDP1(), mock.patch.object(sys, "argv", arguments), contextlib.suppress(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.fixture(scope="module")
def fsdp1(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the unchanged script does under Composer's FSDP1."""
    out = tmp_path_factory.mktemp("fsdp1") / "out.json"
    run_ranks(check_on_fsdp1, 2, str(out))
    trained = json.loads(out.read_text())
    assert "FullyShardedDataParallel" in trained["kinds"]
    return trained


# Before the script's first line: what it was given, by rank; and no further under plain Python.
LOOK = """
import json, os, sys
seen = {"argv": sys.argv, "file": __file__, "name": __name__, "package": __package__,
        "main": vars(sys.modules["__main__"]) is globals(),
        "path": sys.path[: next(i for i, folder in enumerate(sys.path) if folder.endswith("site-packages"))]}
with open(f"seen-{os.environ.get('RANK', 'python')}.json", "w") as file:
    json.dump(seen, file)
if "RANK" not in os.environ:
    sys.exit()
"""


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers_train_the_unchanged_script(tmp_path: Path, fsdp1: dict[str, Any], launcher: str):
    """The launch line gets one more word; the curve stays, and on each rank the script sees what Python gives it."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text(LOOK + SCRIPT.read_text())
    script = ["scripts/train.py", "--out", "out.json", *TRAINING]
    ended = run_all({"python": [*PYTHON, *script], "ours": [*LAUNCHERS[launcher], "run", *script]}, tmp_path)
    assert ended["python"].code == ended["ours"].code == 0, f"{ended['ours'].out}\n{ended['ours'].err}"
    expected = json.loads((tmp_path / "seen-python.json").read_text())
    for rank in range(2):
        assert json.loads((tmp_path / f"seen-{rank}.json").read_text()) == expected, f"rank {rank}"
    assert [path.name for path in (tmp_path / "scripts").iterdir()] == ["train.py"]
    trained = json.loads((tmp_path / "out.json").read_text())
    assert "FullyShardedDataParallel" not in trained["kinds"]
    assert "FSDPModule" in trained["kinds"]
    assert trained["types"] == [["DTensor"]] * len(trained["types"])
    difference = largest_difference(trained["losses"], fsdp1["losses"])
    assert difference <= 1e-6, f"{trained['losses']}, FSDP1 {fsdp1['losses']}"


@pytest.mark.slow
def test_exit_code_passes_through_composers_launcher(tmp_path: Path):
    """The launcher ends with the code of the rank that failed, and ends the other ranks."""
    script = tmp_path / "fails.py"
    # The other rank waits: the launcher returns the code of the lowest rank that did not end well.
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '0': sys.exit(7)\ntime.sleep(200)\n")
    done = run_all({"it": [*LAUNCHERS["composer"], "run", script]}, tmp_path)["it"]
    assert done.code == 7, f"{done.out}\n{done.err}"
