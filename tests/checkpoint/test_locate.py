"""Finding the checkpoint from the paths that users have: links, pointers, patterns, run folders."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.checkpoints.samples import LEGACY, composer_state, write_safetensors
from torch import nn

from composer_fsdp2 import (
    CheckpointError,
    convert_checkpoint,
    inspect_checkpoint,
    load_checkpoint,
    verify_checkpoint,
)
from composer_fsdp2.checkpoint.open import NotACheckpointError, find

pytestmark = pytest.mark.any_torch

DCP = LEGACY / "c220" / "sharded" / "ep0-ba3"


def save(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(composer_state(), path)
    return path


def save_dcp(path: Path, *, complete: bool = True) -> Path:
    shutil.copytree(DCP, path)
    if not complete:
        (path / ".metadata").unlink()
    return path


# --- one checkpoint


@pytest.mark.parametrize("kind", ["c172/full", "c172/sharded", "c220/sharded-mesh"])
def test_latest_of_an_old_run_is_found(kind: str):
    """Composer's own files, with links that git or an object store has converted to text."""
    expected = "ep0-ba3-rank0.pt" if "full" in kind else "ep0-ba3"
    for named in ("latest-rank0.pt", "latest-rank{rank}.pt", "."):
        assert find(LEGACY / kind / named).path.name == expected


def test_links_lead_to_what_they_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Composer's own latest-rank0.pt, Foundry's latest-sharded-rank0, and links to links on another disk.

    Paths are written as in launchers and YAMLs, also with spaces and non-ASCII letters.
    """
    folder, file = save_dcp(tmp_path / "disk" / "ep0-ba3"), save(tmp_path / "a run, größer" / "x.pt")
    run = tmp_path / "run"
    run.mkdir()
    for name, target in {
        "latest-sharded-rank0": "../disk/ep0-ba3",
        "latest-rank0.pt": "second",
        "second": file,
    }.items():
        (run / name).symlink_to(target)
    assert find(run / "latest-sharded-rank{rank}").path == folder
    monkeypatch.setenv("HOME", str(tmp_path))
    for named in (run / "latest-rank0.pt", f"file://{tmp_path}/a%20run,%20größer/x.pt", "~/a run, größer/x.pt", file):
        assert find(named).path == file


@pytest.mark.parametrize("content", ["ep0-ba3-rank0.pt", "run/checkpoints/ep0-ba3-rank0.pt\n"])
def test_symlink_files_of_object_stores_are_followed(tmp_path: Path, content: str):
    """In a bucket that was copied to a disk, a .symlink file contains the object's name, relative to the bucket's
    root."""
    file = save(tmp_path / "run" / "checkpoints" / "ep0-ba3-rank0.pt")
    pointer = file.with_name("latest-rank0.pt.symlink")
    pointer.write_text(content)
    assert find(pointer).path == file
    assert find(file.with_name("latest-rank0.pt")).path == file, "as named without the ending"
    assert find(file.with_name("latest-rank{rank}.pt")).path == file


# --- the newest of several


def test_newest_complete_checkpoint_of_a_run_is_found(tmp_path: Path):
    """A run that died while saving resumes from the previous checkpoint; batches are compared as numbers."""
    run = tmp_path / "run" / "checkpoints"
    save_dcp(run / "ep0-ba3")
    save_dcp(run / "ep1-ba9")
    save_dcp(run / "ep1-ba12", complete=False)
    (run / "latest-rank0.pt").symlink_to("ep0-ba3")  # stale: the run died before it updated the link
    found = find(tmp_path)
    assert found.path == run / "ep1-ba9"
    assert len(found.remarks) == 1 and "ep1-ba12" in found.remarks[0] and ".metadata" in found.remarks[0]


def test_files_and_folders_of_steps_are_compared(tmp_path: Path):
    """Full and sharded checkpoints in one folder are compared by step; other ranks' files and pointers are not separate
    checkpoints."""
    save_dcp(tmp_path / "ep0-ba9")
    _, newest, _ = (save(tmp_path / f"ep0-ba{name}.pt") for name in ("10-rank0", "11-rank0", "99-rank1"))
    (tmp_path / "ep0-ba99.symlink").write_text("nothing")
    (tmp_path / "ep0-ba98.json").write_text("{}")
    assert find(tmp_path).path == newest and find(tmp_path).remarks == ()


@pytest.mark.parametrize(
    "cut",
    [lambda data: b"", lambda data: data[: len(data) // 2], lambda data: data[:-10]],
    ids=["empty", "half", "end"],
)
def test_half_written_file_is_passed_over(tmp_path: Path, cut: Callable[[bytes], bytes]):
    """A full disk leaves an incomplete file with a valid name: the last complete one is used, and a remark names the
    other."""
    whole = save(tmp_path / "ep0-ba1-rank0.pt")
    half = save(tmp_path / "ep0-ba2-rank0.pt")
    half.write_bytes(cut(half.read_bytes()))
    found = find(tmp_path)
    assert found.path == whole and "ep0-ba2-rank0.pt" in found.remarks[0]
    whole.unlink()
    with pytest.raises(CheckpointError, match=r"no complete checkpoint.*ep0-ba2-rank0"):
        find(tmp_path)


def test_of_equal_steps_the_later_written_is_taken(tmp_path: Path):
    """For two runs in one folder, the batch decides, then the epoch, then the time."""
    older, newer = save(tmp_path / "b" / "ep0-ba3-rank0.pt"), save(tmp_path / "a" / "ep0-ba3-rank0.pt")
    os.utime(older, (1000, 1000))
    assert find(tmp_path).path == newer
    os.utime(newer, (500, 500))
    assert find(tmp_path).path == older
    save(tmp_path / "a" / "ep1-ba3-rank0.pt")
    os.utime(tmp_path / "a" / "ep1-ba3-rank0.pt", (1, 1))
    assert find(tmp_path).path.name == "ep1-ba3-rank0.pt"
    save(tmp_path / "b" / "ep0-ba4-rank0.pt")
    assert find(tmp_path).path.name == "ep0-ba4-rank0.pt"


def test_folder_with_names_of_ones_own(tmp_path: Path):
    """With any save_filename, the latest pointer decides, or the only checkpoint in the folder."""
    first = save(tmp_path / "batch3.pt")
    (tmp_path / "run.log").write_text("a\nlog")
    assert find(tmp_path).path == first
    second = save(tmp_path / "batch6.pt")
    with pytest.raises(CheckpointError, match=r"2 checkpoints.*batch3\.pt, batch6\.pt"):
        find(tmp_path)
    (tmp_path / "latest-rank0.pt").symlink_to(second.name)
    assert find(tmp_path).path == second


@pytest.mark.parametrize("name", ["batch6.pt", "ep0-ba6-rank0.pt"])
@pytest.mark.parametrize("as_link", [True, False])
def test_latest_may_be_a_folder(tmp_path: Path, name: str, as_link: bool):
    """A user's pointer to a folder, perhaps on another disk: the checkpoint in that folder is the latest."""
    run = tmp_path / "run"
    save(run / "batch3.pt")
    folder = tmp_path / "disk" if as_link else run / "weights"
    latest = save(folder / name)
    if as_link:
        (run / "latest").symlink_to(folder)
    else:
        (run / "latest").write_text("weights")
    assert find(run).path.resolve() == find(run / "latest").path.resolve() == latest
    assert inspect_checkpoint(run).path.samefile(latest) and verify_checkpoint(run).ok


def test_folders_that_lead_to_each_other(tmp_path: Path):
    """If pointers form a circle, the folder's own files are searched."""
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "latest").symlink_to(f"../{other}")
    with pytest.raises(NotACheckpointError, match="the folder holds latest"):
        find(tmp_path / "a")
    (tmp_path / "b" / "latest2").symlink_to(".")
    (tmp_path / "b" / "latest").unlink()
    file = save(tmp_path / "b" / "batch3.pt")
    assert find(tmp_path / "b").path == file


# --- invalid paths


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("../secret.pt", "outside of its folder"),
        ("{folder}/secret.pt", "outside of its folder"),  # a user may name this path directly
        ("link-out", "outside of its folder"),
        ("gone.pt", "not beside it"),
        ("b.symlink", "cycle"),
        ("s3://bucket/run/ep0-ba3", "not on this machine"),
        ("two\nlines", "no path"),
        ("", "no path"),
    ],
)
def test_pointers_stay_in_their_folder(tmp_path: Path, content: str, text: str):
    """A pointer file comes with a checkpoint, possibly from a stranger, so it opens no other file on the machine."""
    save(tmp_path / "secret.pt")
    run = tmp_path / "run"
    run.mkdir()
    (run / "link-out").symlink_to("../secret.pt")
    (run / "b.symlink").write_text("a.symlink")
    (run / "a.symlink").write_text(content.format(folder=tmp_path))
    with pytest.raises(NotACheckpointError, match=text):
        find(run / "a.symlink")


MISSING = {
    "ep0-ba4-rank0.pt": r"ep0-ba3-rank0\.pt",  # shows a typing error at a glance
    "ep{epoch}-ba{batch}-rank{rank}.pt": "name the folder",
    **dict.fromkeys(("s3://b/ep0-ba3", "hf://org/model", "file://other-machine/x"), r"not on this machine.*load_path"),
    **{name: f"{name} -> .*a broken or circular link" for name in ("latest-rank0.pt", "a")},
}


@pytest.mark.parametrize("named", MISSING)
def test_missing_path_says_what_is_there(named: str, tmp_path: Path):
    """A broken link is distinguished from a missing file; a remote path is not looked up here."""
    save(tmp_path / "ep0-ba3-rank0.pt")
    for name, target in {"latest-rank0.pt": "ep0-ba3", "a": "b", "b": "a"}.items():
        (tmp_path / name).symlink_to(target)
    with pytest.raises(NotACheckpointError, match=MISSING[named]):
        find(named if ":" in named else tmp_path / named)


def test_a_file_of_a_hugging_face_cache(tmp_path: Path):
    """The link's name has the suffix that identifies the format; its target is named by a hash."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    write_safetensors(blobs / "0123", {"w": torch.ones(3)})
    save(blobs / "4567")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    (snapshot / "weights.pt").symlink_to("../../blobs/4567")
    for path in (snapshot / "model.safetensors", snapshot):
        assert [key[2] for key in inspect_checkpoint(path).tensors] == ["w"]
    assert find(snapshot / "weights.pt").path == blobs / "4567"
    (tmp_path / "latest.safetensors").symlink_to("blobs/0123")  # also in a folder, the suffix of the link counts
    assert find(tmp_path) == find(tmp_path / "latest.safetensors")


NO_PATHS = {
    "~nosuchuser/run.pt": "no such file",
    "a\0b": "it contains a NUL",
    "half \ud800": "not a valid path",
    "half a name \udcff": "no such file",
    "x" * 5000: "too long",
    "file:///a%00b": "it contains a NUL",
}


@pytest.mark.parametrize("path", NO_PATHS, ids=lambda path: ascii(path)[:20])
def test_what_no_file_can_be_called(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An invalid path of any kind raises CheckpointError, which scripts catch."""
    monkeypatch.chdir(tmp_path)
    source = save(tmp_path / "run.pt")
    for action in (
        lambda: inspect_checkpoint(path),
        lambda: verify_checkpoint(path),
        lambda: verify_checkpoint(source, path),
        lambda: load_checkpoint(path, nn.Linear(1, 1)),
        lambda: convert_checkpoint(path, tmp_path / "new", to="dcp"),
    ):
        with pytest.raises(CheckpointError, match=NO_PATHS[path]):
            action()
    if NO_PATHS[path] != "no such file":  # valid names for a destination
        with pytest.raises(CheckpointError, match=NO_PATHS[path]):
            convert_checkpoint(source, path.removeprefix("file://").replace("%00", "\0"), to="dcp")
    assert list(tmp_path.iterdir()) == [source]
