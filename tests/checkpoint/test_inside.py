"""Names from listings, indices and archives of any form never lead outside of the folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from composer_fsdp2.checkpoint.archive.disk import inside
from composer_fsdp2.errors import CheckpointError

pytestmark = pytest.mark.any_torch

OUTSIDE = [
    "/etc/passwd",
    "//etc/passwd",
    "/",
    "",
    ".",
    "..",
    "../beside",
    "a/../../beside",
    "a/..",
    "link/file",
    "a\0b",
    "half \ud800",
    None,
    7,
    b"bytes",
]


@pytest.mark.parametrize("name", OUTSIDE, ids=repr)
def test_a_name_that_leads_out(name: object, tmp_path: Path):
    """A key ``run//abs/path`` in a bucket was written to ``/abs/path``."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match=r"^the list: names ") as raised:
        inside(folder, name, named_by="the list")
    str(raised.value).encode()  # a message that every terminal and file can encode


def test_a_file_that_is_a_link(tmp_path: Path):
    """The files in a Hugging Face cache are links to its blobs; a link from an archive is refused."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "blob").write_bytes(b"")
    (tmp_path / "folder" / "model").symlink_to(tmp_path / "blob")
    (tmp_path / "folder" / "own").symlink_to("other")
    assert inside(tmp_path / "folder", "model", named_by="", may_link=True) == tmp_path / "folder" / "model"
    assert inside(tmp_path / "folder", "own", named_by="") == tmp_path / "folder" / "own"
    with pytest.raises(CheckpointError, match="outside"):
        inside(tmp_path / "folder", "model", named_by="")


@examples(80)
@given(st.lists(st.sampled_from(["..", ".", "", "a", "b.c", "~", " ", "\\", "C:", "link"]), max_size=6))
def test_any_name(parts: list[str]):
    """An accepted name is below the folder, by the file system's own rules."""
    name, folder = "/".join(parts), Path("/nowhere/folder")
    try:
        path = inside(folder, name, named_by="")
    except CheckpointError:
        assert name.startswith("/") or ".." in parts or not name.replace("/", "").strip(".")
    else:
        assert os.path.normpath(path).startswith("/nowhere/folder/")
