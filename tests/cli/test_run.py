"""``composer-fsdp2 run``: a script runs as under Python, with FSDP2, from every launcher."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from support.cases import for_each
from support.commands import BIN, LAUNCHERS, PYTHON, SCRIPT, Ended, run_all, run_forked
from support.forked_scripts import add_launchers
from support.on_ranks import on_ranks
from support.oracle import FSDP1
from support.ranks import WITH_COMPOSER, run_ranks
from support.trainers import largest_difference

pytestmark = pytest.mark.composer

# The script must receive these unchanged: flags that the command has too, a terminator, a space.
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


FAILURES = {"ValueError": "the script failed", "EOFError": "Ran out of input"}
# For each command line, its one-line error.
NOTHING_TO_RUN = {
    ("run", "not_there.py", "--flag"): "no such file: not_there.py",
    ("run", "-m"): "-m needs the name of a module",
    ("run",): "SCRIPT",
    ("train", "not_there.yaml", "key=value"): "no such file: not_there.yaml",
    ("rum", "script.py"): "run",
}
HELP = {
    "": ("run", "train", "FSDP1", "FSDP2", "SCRIPT", "YAML"),
    "run": ("composer -n 8 -m composer_fsdp2 run SCRIPT", "torchrun --nproc-per-node 8 -m composer_fsdp2"),
    "train": ("composer -n 8 -m composer_fsdp2 train YAML",),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """The results of the probe script under Python and under ``run``, of failing scripts, of no script, and of
    --help."""
    folder = tmp_path_factory.mktemp("cli")
    for package in ("scripts", "users"):
        (folder / package).mkdir()
        (folder / package / "probe.py").write_text(PROBE)
    (folder / "users" / "__init__.py").touch()
    anew: dict[str, list[Any]] = {
        "python script": [*PYTHON, "scripts/probe.py", *ARGUMENTS],
        "python module": [*PYTHON, "-m", "users.probe", *ARGUMENTS],
        # The others are forked from a process that has imported Composer; this one imports everything itself.
        "our script": [BIN / "composer-fsdp2", "run", "scripts/probe.py", *ARGUMENTS],
    }
    ours: dict[str, list[Any]] = {
        "our module": ["run", "-m", "users.probe", *ARGUMENTS],
        "our only rank": ["run", SCRIPT, "--out", "alone.json", "--batches", "3", "--clip", "0.1"],
        **{f"{words}": [*words] for words in NOTHING_TO_RUN},
        **{f"help {verb}": [*verb.split(), "--help"] for verb in HELP},
    }
    for error, message in FAILURES.items():
        (folder / f"{error}.py").write_text(f"def f():\n    raise {error}({message!r})\nf()\n")
        ours[error] = ["run", f"{error}.py"]
    done = run_all(anew, folder) | run_forked(ours, folder)
    if (folder / "alone.json").exists():
        done["our only rank"].out += "\n" + (folder / "alone.json").read_text()
    return done


@pytest.mark.parametrize("kind", ["script", "module"])
def test_script_sees_what_python_gives(kind: str, ended: dict[str, Ended]):
    """A script that parses flags, reads files in its folder or imports modules from it runs unchanged.

    Its imported Composer has the seams, its exit code reaches the scheduler, and its folder is unchanged.
    """
    ours, python = ended[f"our {kind}"], ended[f"python {kind}"]
    assert ours.last["seen"] == python.last["seen"], ours.err
    assert ours.last["shim"] == {"installed": True, "is ours": True}
    assert ours.code == python.code == 7, ours.err
    assert kind == "module" or ours.last["beside"] == ["probe.py"]


@pytest.mark.parametrize("error", FAILURES)
def test_exception_ends_with_its_traceback(error: str, ended: dict[str, Ended]):
    """The last lines name the error and its location, as Python's do; command line libraries print "Aborted." for
    EOFError."""
    assert ended[error].code == 1
    assert ended[error].err.strip().endswith(f"{error}: {FAILURES[error]}")
    assert f'{error}.py", line 2, in f' in ended[error].err


def test_one_rank_needs_no_launcher(ended: dict[str, Ended]):
    """A first try on one device is ``composer-fsdp2 run train.py``."""
    assert ended["our only rank"].code == 0, ended["our only rank"].err
    assert "FSDPModule" in ended["our only rank"].last["kinds"]
    assert len(ended["our only rank"].last["losses"]) == 3


def test_nothing_to_run_is_said_in_a_line(ended: dict[str, Ended]):
    """A misspelt path ends at once, with exit code 2 and without a traceback."""
    for words, said in NOTHING_TO_RUN.items():
        done = ended[f"{words}"]
        assert done.code == 2 and said in done.err and "Traceback" not in done.err, done


@pytest.mark.parametrize("verb", HELP)
def test_help(verb: str, ended: dict[str, Ended]):
    """--help lists the verbs and shows how to start several ranks."""
    done = ended[f"help {verb}"]
    assert done.code == 0 and all(words in " ".join(done.out.split()) for words in HELP[verb]), done.out


@on_ranks(2)
def test_shim_is_gone_after_the_script(folder: str) -> None:
    """A Python caller of main() has the original Composer after the script has ended, also after an error."""
    import composer.distributed

    from composer_fsdp2.cli.main import main
    from composer_fsdp2.compat import is_installed

    original = composer.distributed.prepare_fsdp_module
    script = Path(folder) / f"script{dist.get_rank()}.py"

    def check(source: str) -> None:
        script.write_text(source)
        argv = mock.patch.object(sys, "argv", ["composer-fsdp2", "run", str(script)])
        with argv, contextlib.suppress(SystemExit, ValueError):
            main()
        assert not is_installed(), source
        assert composer.distributed.prepare_fsdp_module is original, source

    for_each(check, {source: (source,) for source in ("pass", "raise SystemExit(3)", "raise ValueError")})


# --- several ranks

TRAINING = ["--fsdp", '{"sharding_strategy": "SHARD_GRAD_OP"}', "--batches", "4", "--microbatch", "2", "--eval"]
TRAINING += ["--clip", "0.1"]


def check_on_fsdp1(out: str) -> None:
    import runpy

    arguments = [str(SCRIPT), "--out", out, *TRAINING]
    with FSDP1(), mock.patch.object(sys, "argv", arguments), contextlib.suppress(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.fixture(scope="module")
def fsdp1(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The losses of the unchanged script under Composer's FSDP1."""
    out = tmp_path_factory.mktemp("fsdp1") / "out.json"
    run_ranks(check_on_fsdp1, 2, str(out))
    trained = json.loads(out.read_text())
    assert "FullyShardedDataParallel" in trained["kinds"]
    return trained


# Inserted before the script's first line: writes the script's environment by rank, and exits under plain Python.
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


def assert_trains(folder: Path, launcher: list[Any], source: str, fsdp1: dict[str, Any]) -> None:
    """Checks that the script, launched with ``composer-fsdp2 run``, trains on FSDP2 with FSDP1's losses, saves a full
    checkpoint, and that its folder is unchanged."""
    (folder / "scripts").mkdir()
    (folder / "scripts" / "train.py").write_text(source)
    words = ["scripts/train.py", "--out", "out.json", "--save-folder", "saved", *TRAINING]
    ours = run_all({"ours": [*launcher, "run", *words]}, folder)["ours"]
    assert ours.code == 0 and (folder / "out.json").exists(), f"{ours.out}\n{ours.err}"
    assert [path.name for path in (folder / "scripts").iterdir()] == ["train.py"]
    assert (folder / "saved/ep0-ba4-rank0.pt").is_file()
    trained = json.loads((folder / "out.json").read_text())
    assert "FullyShardedDataParallel" not in trained["kinds"]
    assert "FSDPModule" in trained["kinds"]
    assert trained["types"] == [["DTensor"]] * len(trained["types"])
    difference = largest_difference(trained["losses"], fsdp1["losses"])
    assert difference <= 1e-6, f"{trained['losses']}, FSDP1 {fsdp1['losses']}"


def test_a_launcher_trains_the_unchanged_script(tmp_path: Path, fsdp1: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    """The launch line has one more argument, and the losses stay the same. The launcher and its ranks are forked."""
    quick = tmp_path / "quick"
    quick.mkdir()
    add_launchers(quick, WITH_COMPOSER)
    monkeypatch.setenv("PATH", str(quick), prepend=os.pathsep)
    assert_trains(tmp_path, ["composer", *LAUNCHERS["composer"][1:]], SCRIPT.read_text(), fsdp1)


@pytest.mark.slow  # the launcher and each of its ranks import Composer
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launched_ranks_see_what_python_gives(tmp_path: Path, fsdp1: dict[str, Any], launcher: str):
    """On each rank of a launcher, the script has the same environment as under Python."""
    assert_trains(tmp_path, LAUNCHERS[launcher], LOOK + SCRIPT.read_text(), fsdp1)
    python = run_all({"python": [*PYTHON, "scripts/train.py", "--out", "out.json", *TRAINING]}, tmp_path)["python"]
    assert python.code == 0, python.err
    expected = json.loads((tmp_path / "seen-python.json").read_text())
    for rank in range(2):
        assert json.loads((tmp_path / f"seen-{rank}.json").read_text()) == expected, f"rank {rank}"
