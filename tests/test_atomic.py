"""Files that replace others atomically."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer_fsdp2.atomic import replacing


def test_what_was_there_stays_until_all_is_written(tmp_path: Path):
    """A reader, or a killed run, must not find a partial file under the name."""
    path = tmp_path / "run.yaml"
    path.write_text("old")
    with replacing(path) as beside:
        beside.write_text("new")
        assert (path.read_text(), beside.parent) == ("old", tmp_path)
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_after_an_error_nothing_is_left(tmp_path: Path):
    """Each failed attempt would leave a file as large as a checkpoint."""
    path = tmp_path / "state.pt"
    path.write_text("old")

    def write_half() -> None:
        with replacing(path) as beside:
            beside.write_text("half")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_process_left_is_no_hindrance(tmp_path: Path):
    """After a kill between the two steps, the latest link must still be replaceable."""
    link = tmp_path / "latest"
    (tmp_path / ".latest.new").symlink_to("an older checkpoint")
    with replacing(link, ending=".new") as beside:
        beside.symlink_to("the newest")
    assert link.readlink() == Path("the newest")
    assert list(tmp_path.iterdir()) == [link]
