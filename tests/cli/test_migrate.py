"""``composer-fsdp2 migrate`` as a user types it: the files, the output and the exit codes."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import tty
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import pytest
import yaml
from support.commands import Ended, run_here

from composer_fsdp2.migration import files
from composer_fsdp2.migration.files import Destination, migrate_files, sources_of
from composer_fsdp2.migration.report import SCHEMA

GOOD = "fsdp_config:\n  sharding_strategy: FULL_SHARD  # all\n  limit_all_gathers: true\n"
MIGRATED = "fsdp_config:\n  reshard_after_forward: true  # all\n"
TO_DECIDE = "fsdp_config:\n  sharding_stratgy: FULL_SHARD\n  limit_all_gathers: true\n"
BROKEN = "fsdp_config: [1\n"


FILES = {
    "good.yaml": GOOD,
    "decide.yaml": TO_DECIDE,
    "broken.yaml": BROKEN,
    "data.yaml": "a: 1\n",
    "deep/good.yml": GOOD,
    "notes.txt": "fsdp_config: {}\n",
}


def write(folder: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path, FILES)


def run(folder: Path, *arguments: object) -> Ended:
    """The command in this process; ``run_alone`` starts a new one."""
    return run_here(folder, "migrate", *arguments)


def run_with_input(folder: Path, text: str | bytes, *arguments: object) -> Ended:
    content = text.encode() if isinstance(text, str) else text
    with mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(content))):
        return run(folder, *arguments)


ALONE = [sys.executable, "-m", "composer_fsdp2"]


def test_standard_output_is_the_file(folder: Path):
    """``migrate run.yaml > new.yaml`` works and the report stays on the screen; ``| head`` and a full disk work too.

    These cases exited with 1, which to a CI means that a decision is open, or with a traceback.
    """
    done = subprocess.run([*ALONE, "migrate", "good.yaml"], cwd=folder, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, MIGRATED.encode())
    assert b"limit_all_gathers: True" in done.stderr
    assert files_in(folder)["good.yaml"] == GOOD
    command = [*ALONE, "migrate", "good.yaml"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.close()
    assert process.returncode == 128 + signal.SIGPIPE
    for arguments in (["migrate", "good.yaml"], ["explain", "fsdp_size"], ["migrate", ".", "--check", "--json"]):
        with open("/dev/full", "w") as full:
            ended = subprocess.run([*ALONE, *arguments], cwd=folder, stdout=full, stderr=subprocess.PIPE, text=True)
        assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr
        assert ended.stderr.endswith("composer-fsdp2: standard output cannot be written: No space left on device\n")


def files_in(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_write_keeps_a_copy_and_runs_twice(folder: Path):
    """``--write`` backs up the original with its mode and owner, also through a link; a hook can run it again."""
    os.chmod(folder / "good.yaml", 0o640)
    if os.geteuid() == 0:  # a container that runs as root over a mounted home
        os.chown(folder / "good.yaml", 1234, 1235)
    (folder / "link.yaml").symlink_to("good.yaml")
    (folder / "good.yaml.bak").write_text("mine")
    before = (folder / "good.yaml").stat()
    assert run(folder, "link.yaml", "--write", "--fail-on-change").code == 1  # exit code 1: the file did change
    files = files_in(folder)
    assert (files["good.yaml"], files["good.yaml.bak"], files["good.yaml.bak2"]) == (MIGRATED, "mine", GOOD)
    for name in ("good.yaml", "good.yaml.bak2"):
        now = (folder / name).stat()
        assert (now.st_mode, now.st_uid, now.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert (folder / "link.yaml").is_symlink()
    again = run(folder, "good.yaml", "--write", "--fail-on-change")
    assert again.code == 0 and "nothing to change" in again.out
    assert files_in(folder) == files


def test_nothing_is_written_that_needs_a_decision_unless_forced(folder: Path):
    """Exit code 1 means that the user must decide; a pipe would otherwise train with a partially migrated file."""
    before, done = files_in(folder), run(folder, "decide.yaml")
    assert (done.code, done.out) == (1, "")
    printed = " ".join(done.err.split())
    assert "did you mean sharding_strategy?" in printed and "--force" in printed
    done = run(folder, "decide.yaml", "--write")
    assert done.code == 1 and "--force" in done.out and files_in(folder) == before
    text = "fsdp_config:\n  limit_all_gathers: true\ndeepspeed_config: {zero_optimization: {stage: 3}}\n"
    (folder / "decide.yaml").write_text(text)
    assert run(folder, "decide.yaml", "--write", "--force").code == 1
    assert files_in(folder)["decide.yaml.bak"] == text


def test_output_to_a_file_and_to_a_folder(folder: Path):
    """The sources stay unchanged, folders keep their structure, and a file without a section is not copied."""
    before = files_in(folder)
    assert run(folder, "good.yaml", "-o", "new/run.yaml").code == 0
    assert files_in(folder)["new/run.yaml"] == MIGRATED
    done = run(folder, "deep", "good.yaml", "-o", "out")
    assert done.code == 0, done.err
    assert files_in(folder / "out") == {"good.yaml": MIGRATED, "good.yml": MIGRATED}
    assert {name: text for name, text in files_in(folder).items() if name in before} == before


def test_a_folder_goes_on_past_bad_files(folder: Path):
    """One bad file among a thousand does not stop the run; the worst file sets the exit code."""
    done = run(folder, ".", "--check")
    assert done.code == 2
    assert "broken.yaml:2:1" in done.err and "data.yaml" not in done.err
    assert "did you mean sharding_strategy?" in done.out and "limit_all_gathers" not in done.out
    summary = "5 files: 2 would change, 1 to decide, 1 unusable, 1 without a section for sharding"
    assert summary in done.err


def test_the_diff_can_be_applied(folder: Path):
    """``patch`` applies the output of ``--diff``; like ``--check``, ``--diff`` changes no file."""
    for text in (GOOD, GOOD.rstrip("\n"), GOOD.replace("\n", "\r\n")):
        (folder / "good.yaml").write_bytes(text.encode())
        done = run(folder, "good.yaml", "--diff")
        assert done.code == run(folder, "good.yaml", "--check").code == 0
        assert (folder / "good.yaml").read_bytes() == text.encode()
        patch = ["patch", "--binary", "-p0"]
        subprocess.run(patch, cwd=folder, input=done.out.encode(), check=True, capture_output=True)
        migrated = text.replace("sharding_strategy: FULL_SHARD", "reshard_after_forward: true")
        assert (folder / "good.yaml").read_bytes() == migrated[: migrated.index("  limit_all")].encode()


# ---------------------------------------------------------------------------------------------------------------------
# For programs


def report_of(done: Ended) -> dict[str, Any]:
    """The output of ``--json``, validated against its schema."""
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    report = json.loads(done.out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    jsonschema.validate(report, schema)
    assert report["exit_code"] == done.code
    return report


def test_json_is_one_object_with_a_version(folder: Path):
    """A program reads the outcome of every file, including bad ones, and the version of the format."""
    report = report_of(run(folder, ".", "--json"))
    assert report["version"] == 1 and report["error"] == ""
    files = {Path(each["file"]).name: each for each in report["files"]}
    assert {name: (each["state"], each["exit_code"], each["changed"]) for name, each in files.items()} == {
        "good.yaml": ("ready", 0, True),
        "decide.yaml": ("needs decision", 1, False),
        "broken.yaml": ("unusable", 2, False),
        "data.yaml": ("unconfigured", 0, False),
        "good.yml": ("ready", 0, True),
    }
    counts = {"files": 5, "ready": 2, "needs_decision": 1, "unusable": 1, "unconfigured": 1, "changed": 2}
    assert report["summary"] == counts
    (folder / "decide.yaml").write_text(
        GOOD + "  tensor_parallel: 2\ndeepspeed_config: {zero_optimization: {stage: 3}}\n"
    )
    assert report_of(run(folder, ".", "--json"))["summary"] == counts  # new text, not written
    (section,) = files["good.yaml"]["sections"]
    assert {each["key"]: each["target"] for each in section["findings"]}["limit_all_gathers"] == "removed"
    assert "broken.yaml:2:1" in files["broken.yaml"]["error"]
    assert files["data.yaml"]["error"] == ""
    done = run(folder, "--json-schema")  # available with the command alone, without this repository
    assert done.code == 0 and json.loads(done.out) == json.loads(SCHEMA.read_text())


def test_json_is_an_object_whatever_happens(folder: Path):
    """A program that parses the output would fail on text or on empty output, and this when a file is wrong."""
    (folder / "odd.yaml").write_text(
        "fsdp_config:\n  min_params: .inf\n  flatten_parameters: {a: [.nan, 2020-01-01]}\n"
    )
    for arguments, code, error in (
        (["nobody.yaml"], 2, ""),  # of the file itself
        (["nobody.yaml", "good.yaml", "--check"], 2, ""),
        (["empty"], 2, "no file ends in"),
        (["good.yaml", "-o", "good.yaml"], 2, "is the file itself"),
        (["good.yaml", "deep", "-o", "data.yaml"], 2, "is a file, and there are 2 results"),
        (["good.yaml", "--report", "no/where.md"], 2, "no/where.md"),
        (["odd.yaml", "--to", "accelerate"], 1, ""),
        (["good.yaml", "--write", "--fail-on-change"], 1, ""),
        (["good.yaml", "--fail-on-change"], 0, ""),  # the previous command wrote it
    ):
        (folder / "empty").mkdir(exist_ok=True)
        report = report_of(run(folder, *arguments, "--json"))
        assert report["exit_code"] == code, arguments
        assert (error in report["error"]) if error else not report["error"], arguments


# Calls of a CI or a hook, which change nothing: the exit code and the printed text.
ASKED: dict[tuple[str, ...], tuple[int, str]] = {
    ("good.yaml", "--check"): (0, "good.yaml: would change"),
    # A new FSDP1 configuration in the repository is reported, although it could be migrated.
    ("good.yaml", "--check", "--fail-on-change"): (1, "--write changes them"),
    ("good.yaml", "--diff", "--fail-on-change"): (1, "-  limit_all_gathers: true"),
    ("decide.yaml", "--check", "--fail-on-change"): (1, "needs a decision"),
    ("broken.yaml", "good.yaml", "--check", "--fail-on-change"): (2, "broken.yaml:2:1"),
    ("decide.yaml", "good.yaml", "--check"): (1, "to decide"),  # the largest exit code of all files
    ("good.yaml", "decide.yaml", "--check"): (1, "to decide"),
    ("good.yaml", "data.yaml", "--check"): (2, "data.yaml"),  # named on the command line
    # pre-commit passes all YAML files of a commit: one without a section is no mistake, a broken one is.
    ("data.yaml", "--check", "--allow-unconfigured"): (0, "data.yaml: nothing here configures sharding; passed over"),
    ("data.yaml", "good.yaml", "--check", "--allow-unconfigured"): (0, "1 without a section for sharding"),
    ("broken.yaml", "--check", "--allow-unconfigured"): (2, "broken.yaml:2:1"),
    ("nobody.yaml", "--check", "--allow-unconfigured"): (2, "nobody.yaml"),
    ("data.yaml", "--allow-unconfigured"): (0, "a: 1\n"),  # unchanged: the output of a filter
    ("data.yaml", "--allow-unconfigured", "--write"): (0, ""),
    ("-", "--check"): (0, "<stdin>: would change"),
    ("-", "--diff"): (0, "+++ <stdin>"),
}


@pytest.mark.parametrize("words", ASKED, ids=" ".join)
def test_exit_codes(folder: Path, words: tuple[str, ...]):
    """A file's exit code 0 never hides the exit code of another file."""
    before, (code, said) = files_in(folder), ASKED[words]
    done = run_with_input(folder, GOOD, *words)
    assert done.code == code and said in done.out + done.err, done
    assert files_in(folder) == before


def test_what_many_files_say_fits_on_a_screen(folder: Path):
    """The one file with a different problem would be lost among 300 copies of one sentence."""
    words = ["reshard_after_forward: true", *["sharding_stratgy: NO_SHARD"] * 2] * 100
    write(folder / "many", {f"{number:03}.yaml": f"fsdp_config:\n  {word}\n" for number, word in enumerate(words)})
    write(folder / "many", {"other.yaml": "fsdp_config:\n  sharding_strategy: NONE\n"})
    done = run(folder / "many", ".", "--check", "--jobs", "1")
    assert done.code == 1
    files, _, rest = done.out.partition("to decide:\n")
    decisions = rest.partition("approximate:\n")[0]
    assert "300 files" not in files and len(files.splitlines()) == 201  # files without an open decision are not listed
    assert decisions.count("did you mean sharding_strategy?") == 1 and "001.yaml:2" in decisions
    assert "and 195 more" in decisions and "other.yaml:2" in decisions
    assert len(decisions.splitlines()) == 4 and "  200 x sharding_stratgy: " in decisions
    assert "301 files: 100 nothing to change, 201 to decide" in done.err


def test_a_long_value_is_shortened_among_the_reasons(folder: Path):
    """A list of all layers would fill screens."""
    write(folder, {"list.yaml": f"fsdp_config:\n  sharding_stratgy: {list(range(1000))}\n"})
    decisions = run(folder, "list.yaml", "good.yaml", "--check").out.partition("to decide:\n")[2]
    assert "[0, 1, 2" in decisions and len(decisions.splitlines()[0]) < 300


def test_a_diff_that_cannot_be_made_has_its_reason(folder: Path):
    """``migrate FILE --diff`` printed nothing and exited with 1."""
    done = run(folder, "decide.yaml", "--diff")
    assert (done.code, done.out) == (1, "") and "did you mean sharding_strategy?" in done.err


def test_a_forced_text_that_stays_the_same_is_named(folder: Path):
    """The user would take the file for migrated."""
    done = run(folder, "decide.yaml", "--force", "-o", "out.yaml")
    assert done.code == 1 and "written to out.yaml; unchanged, because a finding needs a decision" in done.out


def test_a_misspelt_section_is_named_in_a_folder(folder: Path):
    """Such a run trains without FSDP, and the file was only counted."""
    write(folder, {"runs/a.yaml": GOOD.replace("fsdp_config", "fsdp_confg"), "runs/b.yaml": GOOD})
    done = run(folder / "runs", ".", "--check")
    assert done.code == 0 and "a.yaml:1:1: fsdp_confg configures nothing; did you mean fsdp_config?" in done.err
    assert run(folder / "runs", "a.yaml", "--check").code == 2


def test_a_bar_takes_nothing_from_the_output(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A progress bar must not redirect the output: `migrate runs --diff > runs.patch` on a terminal would write an
    empty patch and show the diff on the screen."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal to rich
    (folder / "broken.yaml").unlink()
    done = run(folder, ".", "--diff")
    assert done.out.count("-  limit_all_gathers: true") == 2 and "limit_all" not in done.err
    assert report_of(run(folder, ".", "--json"))["exit_code"] == 1


def test_what_was_done_is_told_after_an_interrupt(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """After Ctrl-C during `--write`, the user can read which files were changed."""
    done_before = files.migrate_files

    def interrupted(*arguments: Any, **options: Any) -> Iterator[files.FileResult]:
        yield next(done_before(*arguments, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "migrate_files", interrupted)
    done = run(folder, "good.yaml", "deep", "--write")
    assert done.code == 2 and "interrupted; files done: 1" in done.err
    assert "good.yaml: written" in done.out and "good.yml" not in done.out


# ---------------------------------------------------------------------------------------------------------------------
# Standard input


TOML = "# of a run\n[parallelism]\ndata_parallel_shard_degree = 8\n"


def test_standard_input_is_a_file_without_a_name(folder: Path):
    """An editor or a script may have a text without a file; every mode reads it from standard input."""
    done = run_with_input(folder, GOOD, "-")
    assert (done.code, done.out) == (0, MIGRATED) and "<stdin>: fsdp_config, line 1" in done.err
    done = run_with_input(folder, GOOD.replace("\n", "\r\n"), "-")
    assert done.out == MIGRATED.replace("\n", "\r\n")
    report = report_of(run_with_input(folder, TO_DECIDE, "-", "--json"))
    assert [(each["file"], each["state"]) for each in report["files"]] == [("<stdin>", "needs decision")]
    assert run_with_input(folder, GOOD, "-", "-o", "new.yaml").code == 0
    assert files_in(folder)["new.yaml"] == MIGRATED
    report = report_of(run_with_input(folder, GOOD, "-", ".", "-", "--json"))  # read once, together with a folder
    assert [each["state"] for each in report["files"] if each["file"] == "<stdin>"] == ["ready"]
    assert len(report["files"]) == 7
    for nothing in ("a: 1\n", ""):
        done = run_with_input(folder, nothing, "-")
        assert done.code == 2 and "<stdin>:1:1: " in done.err
    done = run_with_input(folder, "a: 1  # as it was\n", "-", "--allow-unconfigured")
    assert (done.code, done.out) == (0, "a: 1  # as it was\n")
    (folder / "-").write_text(GOOD)
    assert run(folder, "./-").out == MIGRATED


def test_the_format_of_standard_input_is_seen(folder: Path):
    """YAML would parse TOML from a pipe as one long string."""
    report = report_of(run_with_input(folder, TOML, "-", "--to", "torchtitan", "--json"))
    assert report["files"][0]["sections"][0]["dialect"] == "torchtitan"
    done = run_with_input(folder, TOML, "-", "--to", "composer", "--force")
    assert yaml.safe_load(done.out)["fsdp_config"]["data_parallel_shard_degree"] == 8
    done = run_with_input(folder, json.dumps(yaml.safe_load(GOOD)), "-")
    assert json.loads(done.out) == yaml.safe_load(MIGRATED)
    long = json.dumps(yaml.safe_load(GOOD) | {"a" * 2000: 1})  # a key that is too long for YAML parsers
    assert run_with_input(folder, long, "-").code == 0
    assert "<stdin>:1:1" in run_with_input(folder, GOOD, "-", "--format", "toml").err
    (folder / "run.conf").write_text(TOML)
    assert "torchtitan -> composer" in run(folder, "run.conf", "--to", "composer", "--format", "toml", "--check").out
    assert run(folder, "run.conf", "--check").code == 2


def test_standard_input_that_cannot_be_read(folder: Path):
    """Standard input may be closed, as under cron, or not text. A call that names a file does not need it."""
    assert "<stdin>:1:4: no UTF-8" in run_with_input(folder, b"a: \xff", "-").err
    with mock.patch.object(sys, "stdin", None):
        assert "which is closed" in run(folder, "-").err
        assert run(folder, "good.yaml").code == 0


def test_the_report_is_a_page(folder: Path):
    """Reviewers read the report beside the change. On a full disk the error names the report, and the command still
    prints what it wrote."""
    assert run(folder, "good.yaml", "decide.yaml", "--check", "--report", "report.md").code == 1
    text = (folder / "report.md").read_text()
    assert "| `sharding_strategy: FULL_SHARD` | exact | reshard_after_forward: true |" in text
    assert "| `sharding_stratgy: FULL_SHARD` | needs decision |" in text
    done = run(folder, "good.yaml", "--write", "--report", "/dev/full")
    assert done.code == 2 and "/dev/full: No space left on device" in done.err and "good.yaml: written" in done.out


BAD_INPUT: list[tuple[Sequence[str], str]] = [
    (["nobody.yaml"], "nobody.yaml: No such file or directory"),
    (["broken.yaml"], "broken.yaml:2:1: "),
    (["data.yaml"], "data.yaml:1:1: nothing here configures sharding"),
    (["notes.txt", "--dialect", "roll"], "nothing here configures sharding with keys of roll"),
    (["empty", "--check"], "empty: no file ends in .yaml, .yml, .toml, .json"),
    (["bytes.yaml"], "bytes.yaml:1:4: no UTF-8"),
    (["good.yaml", "--at", "x.y"], "there is no x.y"),
    (["good.yaml", "--write", "--to", "torchtitan"], "which -o PATH writes"),
    (["good.yaml", "-o", "run.toml"], "the new text is YAML"),
    (["good.yaml", "-o", "good.yaml"], "is the file itself"),
    (["good.yaml", "deep", "-o", "data.yaml"], "is a file, and there are 2 results"),
    (["good.yaml", "twin", "-o", "out"], "several files of one name: good"),
    (["deep", "-o", "deep"], "good.yml would be overwritten; --write"),
    (["good.yaml", "-o", "."], "good.yaml would be overwritten; --write"),
    (["good.yaml", "--check", "--report", "no/where.md"], "no/where.md: No such file or directory"),
    (["good.yaml", "--to", "lightning"], "lightning"),
    (["good.yaml", "--diff", "--json"], "choose one of"),
    (["good.yaml", "--check", "--write"], "--diff and --check write nothing"),
    (["good.yaml", "--diff", "--write"], "--diff and --check write nothing"),
    (["good.yaml", "deep"], "several files"),
    (["", "--write"], "a name is empty"),  # `migrate "$FILE" --write` with FILE unset does not mean the current folder
    (["good.yaml", "-o", "-"], "without -o"),
    (["good.yaml", "-o", "notes.txt"], "notes.txt is a file, and its name ends in none of .yaml"),
    # A report never overwrites a configuration, and an unwritable report path is an error before any file changes.
    (["good.yaml", "--write", "--report", "good.yaml"], "good.yaml has a configuration's suffix"),
    (["good.yaml", "--write", "--report", "report.TOML"], "report.TOML has a configuration's suffix"),
    (["good.yaml", "--write", "--report", "no/where.md"], "no/where.md"),
    (["good.yaml", "--write", "--report", "deep"], "deep"),
    # Standard input is no file that could be changed, and has no name for an output folder.
    (["-", "--write"], "which --write cannot change"),
    (["-", "good.yaml", "-o", "out"], "has no name in a folder"),
    (["-", "-o", "deep"], "has no name in a folder"),
    (["-", "-o", "new.toml"], "the new text is YAML"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT, ids=[" ".join(words) for words, _ in BAD_INPUT])
def test_bad_input(folder: Path, arguments: Sequence[str], message: str):
    """Exit code 2, one message that names the mistake, no traceback, and no file written."""
    (folder / "empty").mkdir()
    write(folder, {"twin/good.yaml": GOOD})
    (folder / "bytes.yaml").write_bytes(b"a: \xff\n")
    before = files_in(folder / "deep") | {"good.yaml": (folder / "good.yaml").read_text()}
    done = run_with_input(folder, GOOD, *arguments)
    printed = " ".join(done.err.replace("│", " ").split())
    assert done.code == 2
    assert message in printed, done.err
    assert "Traceback" not in done.err
    assert before == files_in(folder / "deep") | {"good.yaml": (folder / "good.yaml").read_text()}
    assert not any((folder / name).exists() for name in ("out", "-", "new.toml", "good.yaml.bak"))


def test_many_files_on_all_cores(tmp_path: Path):
    """Results are printed in order, whichever process finished first."""
    write(tmp_path, {f"{number:02}.yaml": GOOD.replace("# all", f"# {number}") for number in range(40)})
    results = list(migrate_files(sources_of([tmp_path]), Destination(in_place=True), jobs=2))
    assert [Path(result.path).name for result in results] == [f"{number:02}.yaml" for number in range(40)]
    for number in range(40):
        values = yaml.safe_load((tmp_path / f"{number:02}.yaml").read_text())
        assert values == {"fsdp_config": {"reshard_after_forward": True}}


# ---------------------------------------------------------------------------------------------------------------------
# Misleading names


def test_a_dry_run_is_a_check(folder: Path):
    """Users try ``--dry-run`` first, before they change a folder."""
    assert run(folder, "good.yaml", "--dry-run") == run(folder, "good.yaml", "--check")


def test_exact_keys_are_folded_to_a_count(folder: Path):
    """The screen shows what differs; --all lists the rest, and --report has it in any case."""
    text = "fsdp_config:\n  cpu_offload: true\n  sharding_strategy: FULL_SHARD\n  limit_all_gathers: true\n"
    write(folder, {"run.yaml": text})
    short = run(folder, "run.yaml", "--check").out
    full = run(folder, "run.yaml", "--check", "--all").out
    assert "limit_all_gathers: True" in short and "cpu_offload" not in short and "(--all lists them)" in short
    assert "cpu_offload: True" in full and "--all" not in full
    num_exact = int(short.partition(" exact (--all")[0].split()[-1])
    assert full.count("  exact ") == num_exact > 2


def test_all_lists_every_finding_of_several_files(folder: Path):
    done = run(folder, "good.yaml", "deep/good.yml", "--check", "--all")
    assert done.out.count("sharding_strategy: FULL_SHARD") == 2 and "--all" not in done.err


def test_quiet_prints_what_needs_a_decision(folder: Path):
    """A script in CI logs nothing for files without problems, and the reason for the others."""
    assert run(folder, "good.yaml", "deep/good.yml", "--check", "-q") == Ended(0, "", "")
    assert run(folder, "good.yaml", "-q") == Ended(0, MIGRATED, "")
    done = run(folder, "decide.yaml", "good.yaml", "--check", "--quiet")
    assert done.code == 1 and done.out == "decide.yaml: a finding needs a decision\n"
    assert "did you mean sharding_strategy?" in done.err and "good" not in done.err
    assert run(folder, "good.yaml", "--check", "--quiet", "--all").code == 2
    assert run(folder, "data.yaml", "--check", "--quiet", "--allow-unconfigured") == Ended(0, "", "")


def test_a_folder_counts_the_reasons_by_which_runs_differ(folder: Path):
    """Nobody reads 300 reports; 3 of 4 files train with another prefetch, which is one line."""
    post, pre = (f"fsdp_config:\n  backward_prefetch: BACKWARD_{word}\n" for word in ("POST", "PRE"))
    write(folder / "many", {"0.yaml": pre, "1.yaml": post, "2.yaml": post, "3.yaml": post})
    done = run(folder / "many", ".", "--check")
    differences = done.out.partition("approximate:\n")[2]
    assert differences.startswith("  3 x backward_prefetch: 'BACKWARD_POST' is approximate: ")
    assert differences.count("backward_prefetch: 'BACKWARD") == 1


def test_colour_is_for_terminals(folder: Path):
    """A report on a terminal shows what blocks in red, and a file gets the same text without escapes."""
    from composer_fsdp2.cli.printing import print_report

    write(folder, {"run.yaml": TO_DECIDE})
    plain = run(folder, "run.yaml", "--check").out
    above, terminal = pty.openpty()
    tty.setraw(terminal)
    with (
        mock.patch.dict(os.environ, {"TERM": "xterm", "COLORTERM": ""}),
        os.fdopen(terminal, "w") as stream,
    ):
        os.environ.pop("NO_COLOR", None)
        print_report(plain.rstrip("\n"), stream=stream)
        stream.flush()
        coloured = os.read(above, 100_000).decode()
    os.close(above)
    assert "\x1b[1;31mneeds decision\x1b[0m" in coloured and "\x1b" not in plain
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


def test_a_script_is_told_how_it_trains(tmp_path: Path):
    """For a train.py, `a mapping is expected at the top of the file` would not help its user."""
    write(tmp_path, {"train.py": "import torch\n"})
    done = run(tmp_path, "train.py", "--check")
    assert done.code == 2 and "this is Python" in done.err
    assert "torchrun --nproc-per-node 8 -m composer_fsdp2 run train.py" in done.err
    write(tmp_path, {"train.py": "from composer import Trainer\n"})
    assert "composer -n 8 -m composer_fsdp2 run train.py" in run(tmp_path, "train.py", "--check").err


ROLL_WORKER = "strategy_args: {strategy_name: fsdp2_train, strategy_config: {fsdp_size: 2}}\n"


def test_files_stay_with_their_own_systems(tmp_path: Path):
    """`migrate DIR --write` turned accelerate's and axolotl's files into Composer's."""
    write(
        tmp_path,
        {
            "composer.yaml": "fsdp_config: {sharding_strategy: SHARD_GRAD_OP}\n",
            "accelerate.yaml": "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP}\n",
            "axolotl.yaml": "base_model: x\nfsdp_version: 1\nfsdp_config: {fsdp_reshard_after_forward: false}\n",
            "roll.yaml": ROLL_WORKER,
            "titan.toml": TOML,
        },
    )
    done = run(tmp_path, ".", "--json")
    systems = {file["file"]: {each["to"] for each in file["sections"]} for file in report_of(done)["files"]}
    assert systems == {
        "composer.yaml": {"composer"},
        "accelerate.yaml": {"accelerate"},
        "axolotl.yaml": {"axolotl"},
        "roll.yaml": {"roll"},
        "titan.toml": {"torchtitan"},
    }
    both = "fsdp_config: {sharding_strategy: NO_SHARD}\nworker:\n  " + ROLL_WORKER.replace("\n", "\n  ")
    write(tmp_path, {"both.yaml": both})
    done = run(tmp_path, "both.yaml", "--check")
    assert done.code == 2 and "sections of composer and roll; choose one with --at, or say --to" in done.err


def test_two_results_are_not_one_file(tmp_path: Path):
    """Two runs were written to the same `o/run.yaml`, so one result was lost."""
    text = "fsdp_config: {limit_all_gathers: true}\n"
    other = '{"transformer_layer_cls_to_wrap": ["A"], "fsdp": "full_shard auto_wrap", "bf16": true}'
    write(tmp_path, {"d/run.json": other, "d/run.yaml": text, "a/s/x.yaml": text, "a/t/x.yaml": text})
    done = run(tmp_path, "d", "-o", "o", "--to", "composer")
    assert done.code == 2 and not (tmp_path / "o").exists()
    assert "d/run.json and d/run.yaml" in done.err
    write(tmp_path, {"d/run.json": '{"fsdp_config": {"limit_all_gathers": true}}'})  # stays JSON
    assert run(tmp_path, "d", "-o", "o").code == 0
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == ["run.json", "run.yaml"]
    (tmp_path / "p" / "s").mkdir(parents=True)
    (tmp_path / "p" / "t").symlink_to("s")  # two names of one output folder
    done = run(tmp_path, "a", "-o", "p")
    assert done.code == 2 and "a/s/x.yaml and a/t/x.yaml" in done.err and not [*(tmp_path / "p" / "s").iterdir()]


def test_no_result_takes_the_place_of_another_input(tmp_path: Path):
    """The result of one run overwrote another run's configuration, without a backup."""
    text = "fsdp_config: {limit_all_gathers: true}\n"
    write(tmp_path, dict.fromkeys(("p/sub/x.yaml", "c/x.yaml", "q/y.yaml"), text))
    write(tmp_path, {"r/y.toml": "[training]\nlocal_batch_size = 8\n"})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "sub").symlink_to("../c")
    for arguments in (["p", "c", "-o", "o"], ["p/sub/x.yaml", "c", "-o", "c"]):
        done = run(tmp_path, *arguments)
        assert done.code == 2 and "c/x.yaml would be overwritten" in done.err, done.err
    done = run(tmp_path, "q/y.yaml", "r", "-o", "r", "--to", "torchtitan")
    assert done.code == 2 and "r/y.toml would be overwritten by the result of q/y.yaml" in done.err
    write(tmp_path, {"c/x.yaml": TO_DECIDE})  # undecided, so it has no result and its decision is reported
    done = run(tmp_path, "c", "-o", "c")
    assert done.code == 1 and "nothing was written: a finding needs a decision" in done.out and not done.err
    write(tmp_path, {"c/x.yaml": text})
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before


ASCII_ONLY = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}


def test_a_text_is_printed_as_it_would_be_written(tmp_path: Path):
    """`migrate f > g` escaped non-ASCII characters of a model's folder, and the training script took the escape
    literally. Text copied from a terminal had the same mistake. A container without a locale has it in every run."""
    kept, passed_over = "name: 学\r\nfsdp_config:\r\n  verbose: true\r\n".encode(), "a: é\r\nb: 学\n".encode()
    (tmp_path / "f.yaml").write_bytes(kept + b"  limit_all_gathers: true\r\n")
    (tmp_path / "other.yaml").write_bytes(passed_over)

    def printed(*arguments: str, to: int = subprocess.PIPE) -> bytes:
        command, variables = [*ALONE, *arguments], os.environ | ASCII_ONLY
        done = subprocess.run(command, cwd=tmp_path, env=variables, stdout=to, stderr=subprocess.PIPE, check=True)
        return done.stdout

    assert printed("migrate", "f.yaml") == kept
    assert printed("migrate", "other.yaml", "--allow-unconfigured") == passed_over
    lines = printed("migrate", "f.yaml", "--report", "r.md", "--diff").split(b"\n")
    assert {" name: 学\r".encode(), b"-  limit_all_gathers: true\r"} < {*lines}
    assert (tmp_path / "r.md").read_bytes().decode()
    assert json.loads(printed("migrate", "f.yaml", "--json"))["files"][0]["changed"]
    assert json.loads(printed("explain", "fsdp_size", "--json"))["keys"]
    above, terminal = pty.openpty()
    tty.setraw(terminal)  # raw mode changes no line ends
    printed("migrate", "f.yaml", to=terminal)
    assert os.read(above, 10_000) == kept
    os.close(above)
    os.close(terminal)
