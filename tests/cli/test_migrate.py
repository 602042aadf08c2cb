"""``composer-fsdp2 migrate`` as a user types it: what it writes, prints and exits with."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import yaml

from composer_fsdp2.cli.main import main
from composer_fsdp2.migration.files import Destination, migrate_files, sources_of

GOOD = "fsdp_config:\n  sharding_strategy: FULL_SHARD  # all\n  limit_all_gathers: true\n"
MIGRATED = "fsdp_config:\n  reshard_after_forward: true  # all\n"
TO_DECIDE = "fsdp_config:\n  sharding_stratgy: FULL_SHARD\n  limit_all_gathers: true\n"
BROKEN = "fsdp_config: [1\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "good.yaml").write_text(GOOD)
    (tmp_path / "decide.yaml").write_text(TO_DECIDE)
    (tmp_path / "broken.yaml").write_text(BROKEN)
    (tmp_path / "data.yaml").write_text("a: 1\n")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "good.yml").write_text(GOOD)
    (tmp_path / "notes.txt").write_text("fsdp_config: {}\n")
    return tmp_path


@dataclass(frozen=True)
class Done:
    """What a run of the command left behind."""

    returncode: int
    stdout: str
    stderr: str


def run(folder: Path, *arguments: object) -> Done:
    """The command in this process, since a new one imports torch first; ``run_alone`` starts one."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["composer-fsdp2", "migrate", *map(str, arguments)]),
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    code = ended.value.code
    assert isinstance(code, int)
    return Done(code, out.getvalue(), err.getvalue())


def run_alone(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "composer_fsdp2", "migrate", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, check=False)


def files_in(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_standard_output_is_the_file(folder: Path):
    """``migrate run.yaml > new.yaml`` works, with the report still on the screen."""
    done = run_alone(folder, "good.yaml")
    assert (done.returncode, done.stdout) == (0, MIGRATED.encode())
    assert b"limit_all_gathers: True" in done.stderr
    assert files_in(folder)["good.yaml"] == GOOD


def test_nothing_is_printed_that_needs_a_decision(folder: Path):
    """A half-migrated file in a pipe would be trained with."""
    done = run(folder, "decide.yaml")
    assert (done.returncode, done.stdout) == (1, "")
    printed = " ".join(done.stderr.split())
    assert "did you mean sharding_strategy?" in printed and "--force" in printed


def test_write_keeps_a_copy_and_runs_twice(folder: Path):
    """What was there can be had back, and a hook may run it again."""
    os.chmod(folder / "good.yaml", 0o640)
    assert run(folder, "good.yaml", "--write").returncode == 0
    files = files_in(folder)
    assert (files["good.yaml"], files["good.yaml.bak"]) == (MIGRATED, GOOD)
    assert (folder / "good.yaml").stat().st_mode & 0o777 == 0o640
    again = run(folder, "good.yaml", "--write")
    assert again.returncode == 0 and "nothing to change" in again.stdout
    assert files_in(folder) == files


def test_write_overwrites_no_copy_of_the_users(folder: Path):
    """FILE.bak may be what someone kept before."""
    (folder / "good.yaml.bak").write_text("mine")
    assert run(folder, "good.yaml", "--write").returncode == 0
    files = files_in(folder)
    assert (files["good.yaml.bak"], files["good.yaml.bak2"]) == ("mine", GOOD)


def test_write_through_a_link(folder: Path):
    """A link to the file stays one."""
    (folder / "link.yaml").symlink_to("good.yaml")
    assert run(folder, "link.yaml", "--write").returncode == 0
    assert (folder / "link.yaml").is_symlink() and (folder / "good.yaml").read_text() == MIGRATED


def test_nothing_is_written_that_needs_a_decision_unless_forced(folder: Path):
    """Exit code 1 is the user's turn."""
    before = files_in(folder)
    done = run(folder, "decide.yaml", "--write")
    assert done.returncode == 1 and "--force" in done.stdout and files_in(folder) == before
    text = "fsdp_config:\n  limit_all_gathers: true\ntp_config: {tensor_parallel_degree: 2}\n"
    (folder / "decide.yaml").write_text(text)
    assert run(folder, "decide.yaml", "--write", "--force").returncode == 1
    assert files_in(folder)["decide.yaml.bak"] == text


def test_output_to_a_file_and_to_a_folder(folder: Path):
    """The sources stay, folders keep their form, and a file without a section is not copied."""
    before = files_in(folder)
    assert run(folder, "good.yaml", "-o", "new/run.yaml").returncode == 0
    assert files_in(folder)["new/run.yaml"] == MIGRATED
    done = run(folder, "deep", "good.yaml", "-o", "out")
    assert done.returncode == 0, done.stderr
    assert files_in(folder / "out") == {"good.yaml": MIGRATED, "good.yml": MIGRATED}
    assert {name: text for name, text in files_in(folder).items() if name in before} == before


def test_a_folder_goes_on_past_bad_files(folder: Path):
    """One bad file of a thousand would cost the run; the worst one decides the exit code."""
    done = run(folder, ".", "--check")
    assert done.returncode == 2
    assert "broken.yaml:2:1" in done.stderr and "data.yaml" not in done.stderr
    assert "did you mean sharding_strategy?" in done.stdout and "limit_all_gathers" not in done.stdout
    assert "5 files: 2 without anything to decide, 1 with, 1 unusable, 1 that configure no sharding" in done.stderr
    (folder / "broken.yaml").unlink()
    assert run(folder, ".", "--check").returncode == 1
    (folder / "decide.yaml").unlink()
    assert run(folder, ".", "--check").returncode == 0


def test_check_and_diff_change_nothing(folder: Path):
    """A CI asks without touching the checkout."""
    before = files_in(folder)
    done = run(folder, "good.yaml", "--diff")
    assert done.returncode == 0 and "-  limit_all_gathers: true" in done.stdout
    assert run(folder, "good.yaml", "--check").returncode == 0
    assert files_in(folder) == before


def test_the_diff_can_be_applied(folder: Path):
    """The diff is the edit, not a picture of it."""
    for text in (GOOD, GOOD.rstrip("\n"), GOOD.replace("\n", "\r\n")):
        (folder / "good.yaml").write_bytes(text.encode())
        patch = run(folder, "good.yaml", "--diff").stdout.encode()
        subprocess.run(["patch", "--binary", "-p0"], cwd=folder, input=patch, check=True, capture_output=True)
        migrated = text.replace("sharding_strategy: FULL_SHARD", "reshard_after_forward: true")
        assert (folder / "good.yaml").read_bytes() == migrated[: migrated.index("  limit_all")].encode()


def test_json_is_one_document(folder: Path):
    """A program reads every file's outcome, of the bad ones, too."""
    done = run(folder, ".", "--json")
    report = {Path(each["file"]).name: each for each in json.loads(done.stdout)}
    assert {name: each["exit_code"] for name, each in report.items()} == {
        "good.yaml": 0,
        "decide.yaml": 1,
        "broken.yaml": 2,
        "data.yaml": 0,
        "good.yml": 0,
    }
    (section,) = report["good.yaml"]["sections"]
    assert {each["key"]: each["target"] for each in section["findings"]}["limit_all_gathers"] == "removed"
    assert "broken.yaml:2:1" in report["broken.yaml"]["error"]


def test_the_report_is_a_page(folder: Path):
    """Reviewers read it beside the change."""
    assert run(folder, "good.yaml", "decide.yaml", "--check", "--report", "report.md").returncode == 1
    text = (folder / "report.md").read_text()
    assert "| `sharding_strategy: FULL_SHARD` | exact | reshard_after_forward: true |" in text
    assert "| `sharding_stratgy: FULL_SHARD` | needs decision |" in text


BAD_INPUT: list[tuple[Sequence[str], str]] = [
    (["nobody.yaml"], "nobody.yaml: No such file or directory"),
    (["broken.yaml"], "broken.yaml:2:1: "),
    (["data.yaml"], "data.yaml:1:1: nothing here configures sharding"),
    (["notes.txt", "--dialect", "roll"], "nothing here configures sharding for roll"),
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
    (["good.yaml", "--check", "--write"], "--check writes nothing"),
    (["good.yaml", "deep"], "several files"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT, ids=[" ".join(words) for words, _ in BAD_INPUT])
def test_bad_input(folder: Path, arguments: Sequence[str], message: str):
    """Exit code 2, one message that says what is wrong, no traceback, and nothing written."""
    (folder / "empty").mkdir()
    (folder / "twin").mkdir()
    (folder / "twin" / "good.yaml").write_text(GOOD)
    (folder / "bytes.yaml").write_bytes(b"a: \xff\n")
    before = files_in(folder / "deep") | {"good.yaml": (folder / "good.yaml").read_text()}
    done = run(folder, *arguments)
    printed = " ".join(done.stderr.replace("│", " ").split())
    assert done.returncode == 2
    assert message in printed, done.stderr
    assert "Traceback" not in done.stderr
    assert before == files_in(folder / "deep") | {"good.yaml": (folder / "good.yaml").read_text()}
    assert not (folder / "out").exists()


def test_many_files_on_all_cores(tmp_path: Path):
    """Results come in order, whichever process was done first."""
    for number in range(40):
        (tmp_path / f"{number:02}.yaml").write_text(GOOD.replace("# all", f"# {number}"))
    results = list(migrate_files(sources_of([tmp_path]), Destination(in_place=True), jobs=2))
    assert [Path(result.path).name for result in results] == [f"{number:02}.yaml" for number in range(40)]
    for number in range(40):
        values = yaml.safe_load((tmp_path / f"{number:02}.yaml").read_text())
        assert values == {"fsdp_config": {"reshard_after_forward": True}}


def test_a_full_disk_leaves_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A file that is half written would be lost. Stands in for a full disk: the write itself fails."""

    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    (result,) = migrate_files(sources_of([folder / "good.yaml"]), Destination(in_place=True))
    assert result.exit_code == 2 and "No space left" in result.error
    assert (folder / "good.yaml").read_text() == GOOD
    assert not list(folder.glob(".*"))
