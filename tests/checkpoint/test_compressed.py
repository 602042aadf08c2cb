"""Tar files and compressed checkpoints: inspected, unpacked on request, damage detected."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints.corruptions import record_at
from support.checkpoints.samples import bytes_read, composer_state, leaves, values_of

from composer_fsdp2 import CheckpointError, convert_checkpoint, inspect_checkpoint, verify_checkpoint
from composer_fsdp2.atomic import replacing
from composer_fsdp2.checkpoint import budget
from composer_fsdp2.checkpoint.inventory import TensorRecord
from composer_fsdp2.checkpoint.layouts import packed
from composer_fsdp2.checkpoint.layouts.packed import unpacked

pytestmark = pytest.mark.any_torch

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "lzma": lambda data: lzma.compress(data, format=lzma.FORMAT_ALONE),
}
TAR_MODES = {"tar": "w", "tar.gz": "w:gz", "tar.bz2": "w:bz2", "tar.lzma": "w:xz"}


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "plain.pt"
    torch.save(composer_state(), path)
    return path


def in_tar(plain: Path, path: Path, mode: str, name: str = "composer_states.pt") -> Path:
    """A tar file as Composer writes it: the folder is added under the name ''."""
    folder = path.parent / "in tar"
    (folder / name).parent.mkdir(parents=True)
    shutil.copy(plain, folder / name)
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        tar.add(folder, arcname="")
    return path


def compressed(plain: Path, ending: str) -> Path:
    """A file compressed for this suffix, by Python or by the tool that Composer uses."""
    path = plain.with_name(f"ep0-ba3-rank0.pt.{ending}")
    if ending in COMPRESS:
        path.write_bytes(COMPRESS[ending](plain.read_bytes()))
        return path
    tool = {"zst": "zstd", "lz4": "lz4", "lzo": "lzop"}[ending]
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    path.write_bytes(subprocess.run([tool, "-c"], input=plain.read_bytes(), capture_output=True, check=True).stdout)
    return path


def assert_described(path: Path, plain: Path) -> None:
    """Checks that the inventory of a compressed file equals the contents of torch.load."""
    inventory = inspect_checkpoint(path)
    expected = dict(leaves(torch.load(plain, weights_only=False)))
    described = dict(inventory.tensors)
    others: dict[Any, Any] = {}
    for entry, record in inventory.objects.items():
        others |= {entry + below: value for below, value in leaves(record.value())}
    described |= {entry: value for entry, value in others.items() if isinstance(value, TensorRecord)}
    assert {e: (list(r.shape), r.dtype) for e, r in described.items()} == {
        e: (list(v.shape), v.dtype) for e, v in expected.items() if isinstance(v, torch.Tensor)
    }
    assert {e: v for e, v in others.items() if not isinstance(v, TensorRecord)} == {
        e: v for e, v in expected.items() if not isinstance(v, torch.Tensor)
    }


@pytest.mark.parametrize("ending", [*COMPRESS, "zst", "lz4", "lzo"])
def test_compressed_file_is_described_and_unpacked(plain: Path, tmp_path: Path, ending: str):
    """A save_filename with .gz, .zst or a similar suffix: the checkpoint can be inspected, and is unpacked bit for
    bit."""
    path = compressed(plain, ending)
    assert inspect_checkpoint(path).compressed
    assert_described(path, plain)
    (tmp_path / "out").mkdir()
    file = unpacked(path, tmp_path / "out")
    assert file == tmp_path / "out" / "ep0-ba3-rank0.pt" and file.read_bytes() == plain.read_bytes()
    assert list((tmp_path / "out").iterdir()) == [file]


@pytest.mark.parametrize("ending", TAR_MODES)
def test_tar_file_is_described_and_unpacked(plain: Path, tmp_path: Path, ending: str):
    """save_filename with .tar and .tar.gz, the only compression that Composer supported for years."""
    path = in_tar(plain, tmp_path / f"ep0-ba3-rank0.{ending}", TAR_MODES[ending])
    assert_described(path, plain)
    (tmp_path / "out").mkdir()
    file = unpacked(path, tmp_path / "out")
    assert file.name == "ep0-ba3-rank0.pt" and file.read_bytes() == plain.read_bytes()
    inventory = inspect_checkpoint(path)
    assert inventory.compressed
    # Its records refer to a deleted copy, never to bytes of the compressed file.
    with pytest.raises(CheckpointError, match="No such file"):
        values_of(inventory)


def test_inspecting_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Inspecting removes the unpacked file; the checkpoint's own folder, perhaps read-only, is unchanged."""
    plain = tmp_path / "plain.pt"
    torch.save({"state": {"model": {"w": torch.randn(1 << 20)}}}, plain)  # 4 MiB that do not compress
    path = compressed(plain, "gz")
    (scratch := tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    size, before, files = path.stat().st_size, bytes_read(), set(tmp_path.iterdir())
    inspect_checkpoint(path)
    assert set(tmp_path.iterdir()) == files and not any(scratch.iterdir())
    assert size <= bytes_read() - before < 2.2 * size + 100_000, "once packed, and once to check the records"


class Unseekable(io.BytesIO):
    """A file without seek: zipfile writes a descriptor after each record, as torch does."""

    def seek(self, *place: int) -> int:
        raise io.UnsupportedOperation


@pytest.mark.parametrize("is_zip64", [False, True])
def test_records_end_where_zipfile_ends_them(plain: Path, is_zip64: bool):
    """Beyond 4 GiB sizes take 8 bytes: written here by another program, for records of any size."""
    out = Unseekable()
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(out, "w") as target:
        for name in source.namelist():
            with target.open(zipfile.ZipInfo(name), "w", force_zip64=is_zip64) as record:
                record.write(source.read(name))
    path = plain.with_name("x.pt.gz")
    path.write_bytes(gzip.compress(out.getvalue()))
    assert_described(path, plain)


@pytest.mark.parametrize("slice_bytes", [None, 32, 33, 37])
def test_records_may_end_between_two_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slice_bytes: int | None):
    """Reads may end anywhere in the file: small ones split every zip signature, also bytes in weights that look like
    one."""
    marks = torch.frombuffer(bytearray(b"PK\7\x08" * 7 + b"PK\3\4" + b"PK\1\2PK\5\6PK\7"), dtype=torch.uint8)
    plain = tmp_path / "plain.pt"
    torch.save({"state": {**composer_state()["state"], "model": {"marks": marks, "after": torch.ones(3)}}}, plain)
    if slice_bytes is not None:
        monkeypatch.setattr(packed, "_SLICE_BYTES", slice_bytes)
    assert_described(compressed(plain, "gz"), plain)


# --- damage


def test_every_truncation_and_flip_of_content_is_seen(plain: Path):
    """Inspecting checks each record against its CRC32 and names a damaged archive."""
    content = plain.read_bytes()
    path = plain.with_name("x.pt.bz2")
    with zipfile.ZipFile(plain) as archive:
        records = [info for info in archive.infolist() if info.file_size]
    starts = [record_at(plain, i.filename.partition("/")[2])[1] + i.file_size // 2 for i in records]
    damaged = [content[:at] for at in (*range(5, len(content), len(content) // 12), -200, -10)]
    damaged += [content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :] for at in starts]
    assert len(damaged) >= 14
    for data in damaged:
        path.write_bytes(bz2.compress(data))
        with pytest.raises(CheckpointError, match=r"x\.pt\.bz2"):
            inspect_checkpoint(path)


@pytest.mark.parametrize("ending", ["gz", "xz", "zst", "tar", "tar.gz"])
def test_truncated_compressed_file_is_refused(plain: Path, tmp_path: Path, ending: str):
    """A truncated file is reported when it is inspected or unpacked, and no partial file is left."""
    path = in_tar(plain, tmp_path / f"x.{ending}", TAR_MODES[ending]) if "tar" in ending else compressed(plain, ending)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (tmp_path / "out").mkdir()
    for look in (inspect_checkpoint, lambda path: unpacked(path, tmp_path / "out")):
        with pytest.raises(CheckpointError, match=path.name):
            look(path)
    assert list((tmp_path / "out").iterdir()) == []


def test_missing_tool_is_named(plain: Path, monkeypatch: pytest.MonkeyPatch):
    """Without the zstd tool, the error names it."""
    path = compressed(plain, "zst")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CheckpointError, match="zstd"):
        inspect_checkpoint(path)


def test_unpacking_needs_space(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Unpacking checks the free space first, and does not replace a compressed file without a suffix by its own
    contents."""
    path = in_tar(plain, tmp_path / "x.tar.gz", "w:gz")
    (tmp_path / "out").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10, 0, 10))  # type: ignore[attr-defined]
        with pytest.raises(CheckpointError, match=f"{plain.stat().st_size} bytes.*10 free"):
            unpacked(path, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    packed_bytes = gzip.compress(plain.read_bytes())
    (tmp_path / "x.pt").write_bytes(packed_bytes)
    with pytest.raises(CheckpointError, match="another folder"):
        unpacked(tmp_path / "x.pt", tmp_path)
    assert (tmp_path / "x.pt").read_bytes() == packed_bytes


# --- other contents


def in_tars(folder: Path, mode: str, content: Path, *names: str, kind: bytes = tarfile.REGTYPE) -> Path:
    path = folder / f"x.tar{mode[1:].replace(':', '.')}"
    with tarfile.open(path, mode) as tar, content.open("rb") as file:  # type: ignore[call-overload]
        for name in names:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/elsewhere"
            member.size = content.stat().st_size if kind == tarfile.REGTYPE else 0
            file.seek(0)
            tar.addfile(member, file)
    return path


# Composer before 0.28 wrote DeepSpeed's files into the same tar, with the weights at another key.
OTHERS = {
    "DeepSpeed": ((packed.STATES, "deepspeed/mp_rank_00_model_states.pt"), "DeepSpeed"),
    "a path": (("../../evil.pt",), r"without composer_states\.pt.*evil"),
    "twice": ((packed.STATES, packed.STATES), "twice"),
    "a pipe": ((packed.STATES,), "is not a regular file"),
    "a link": ((packed.STATES,), "is not a regular file"),  # as in some backups
}
KINDS = {"a pipe": tarfile.FIFOTYPE, "a link": tarfile.SYMTYPE}


@pytest.mark.parametrize("mode", ["w", "w:gz"])
@pytest.mark.parametrize("kind", OTHERS)
def test_tar_of_other_things_is_refused_and_extracts_nothing(kind: str, mode: str, plain: Path, tmp_path: Path):
    """A member named ../../evil is not extracted; the error describes the contents instead."""
    names, says = OTHERS[kind]
    path = in_tars(tmp_path, mode, plain, *names, kind=KINDS.get(kind, tarfile.REGTYPE))
    (tmp_path / "a" / "b").mkdir(parents=True)
    for look in (inspect_checkpoint, lambda path: unpacked(path, tmp_path / "a" / "b")):
        with pytest.raises(CheckpointError, match=says):
            look(path)
    assert not verify_checkpoint(path).ok
    assert not list(tmp_path.rglob("evil.pt")) and not list((tmp_path / "a" / "b").iterdir())


@pytest.fixture
def shrunk(tmp_path: Path) -> Path:
    """Weights of zeros, compressed to about a hundredth of their size."""
    file = io.BytesIO()
    torch.save({"state": {"model": {"weight": torch.zeros(4 << 20)}}}, file)
    path = tmp_path / "zeros.pt.gz"
    path.write_bytes(gzip.compress(file.getvalue(), compresslevel=1))
    return path


def test_a_file_that_shrank_well_is_no_bomb(shrunk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An untrained model's checkpoint, or an optimizer's initial state, would be refused as overlapping views."""
    monkeypatch.setattr(budget, "BASE_BYTES", 2 << 20)  # otherwise the file would have to exceed 384 MiB
    assert inspect_checkpoint(shrunk).tensors["state", "model", "weight"].num_bytes == 16 << 20
    assert verify_checkpoint(shrunk).ok
    convert_checkpoint(shrunk, tmp_path / "converted.pt", to="monolithic")
    assert torch.load(tmp_path / "converted.pt", weights_only=False)["state"]["model"]["weight"].count_nonzero() == 0


def test_unpacked_no_oftener_than_needed(shrunk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each unpacking takes a minute and the space of the checkpoint."""
    targets: list[Path] = []

    def counted(target: Path) -> Any:
        targets.append(target)
        return replacing(target)

    monkeypatch.setattr(packed, "replacing", counted)
    inspect_checkpoint(shrunk)
    assert len(targets) == 1
    verify_checkpoint(shrunk)
    assert len(targets) == 2
    # Beside the destination, where a restarted conversion finds it.
    convert_checkpoint(shrunk, tmp_path / "converted.pt", to="monolithic")
    assert len(targets) == 3


@pytest.mark.parametrize("place", ["before", "of", "after"])
@pytest.mark.parametrize("size", [1 << 33, (1 << 63) - 1, 1 << 63, 1 << 80])
def test_a_header_of_more_bytes_than_a_file_may_have(place: str, size: int, plain: Path, tmp_path: Path):
    """One flipped bit in a tar header raised seek()'s OSError instead of a CheckpointError."""
    data = plain.read_bytes()
    states = tarfile.TarInfo(packed.STATES)
    states.size = size if place == "of" else len(data)
    other = tarfile.TarInfo("other")
    other.size = size
    content = states.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % tarfile.BLOCKSIZE)
    header = other.tobuf(tarfile.GNU_FORMAT)
    path = tmp_path / "a.tar"
    path.write_bytes({"before": header + content, "of": content, "after": content + header}[place])
    (tmp_path / "folder").mkdir()
    for action in (inspect_checkpoint, lambda path: unpacked(path, tmp_path / "folder")):
        with pytest.raises(CheckpointError, match=r"a\.tar"):
            action(path)
    assert not verify_checkpoint(path).ok
