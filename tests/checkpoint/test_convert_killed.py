"""Killed conversions: nothing incomplete has the destination's name, and the next call finishes the work."""

from __future__ import annotations

import gzip
import itertools
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.checkpoints.conversions import convert, loaded, staging_of
from support.checkpoints.samples import bytes_of, composer_state
from support.comparing import assert_same
from support.examples import IS_THOROUGH

from composer_fsdp2.checkpoint.convert import copying, unfinished

pytestmark = pytest.mark.any_torch

NUM_POINTS = 50 if IS_THOROUGH else 6


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "CHUNK_BYTES", 256)


def make_source(folder: Path) -> Path:
    state = composer_state()
    state["state"]["model"] |= {f"model.{n}": torch.randn(17, 9) for n in range(3)}
    torch.save(state, folder / "source.pt")
    return folder / "source.pt"


PATCHED = [
    (os, "pwrite", os.pwrite),
    (os, "fsync", lambda file: None),  # a kill does not lose the kernel's buffers
    (os, "rename", os.rename),
    (os, "mkdir", os.mkdir),
    (os, "truncate", os.truncate),
    (os, "unlink", os.unlink),
    (os, "rmdir", os.rmdir),
    (Path, "write_text", Path.write_text),
    (unfinished.Unfinished, "note", unfinished.Unfinished.note),
]


@contextmanager
def watched(at_each: Callable[..., Any]) -> Iterator[None]:
    """Every call that changes the disk runs through ``at_each(number, call, *its arguments)``."""
    numbers = itertools.count()

    def through(call: Callable[..., Any]) -> Callable[..., Any]:
        # A function and no partial, because some of them are methods.
        return lambda *arguments, **options: at_each(next(numbers), call, *arguments, **options)

    with ExitStack() as stack:
        for owner, name, call in PATCHED:
            stack.enter_context(mock.patch.object(owner, name, through(call)))
        yield


def count_of(source: Path, destination: Path, to: str, **options: Any) -> int:
    """The number of calls of a complete conversion."""
    seen: list[int] = []
    with watched(lambda number, call, *arguments, **more: seen.append(number) or call(*arguments, **more)):
        convert(source, destination, to, **options)
    return len(seen)


def killed(point: int, source: Path, destination: Path, to: str, **options: Any) -> bool:
    """Converts in a fork that kills itself at this call, after writing half of its data.

    Returns:
        Whether it reached the call.
    """

    def kill(number: int, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if number == point:
            if call is os.pwrite:
                file, data, at = arguments
                call(file, bytes(data)[: len(data) // 2], at)
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **options)

    child = os.fork()
    if child == 0:
        try:
            with watched(kill):
                convert(source, destination, to, **options)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def all_bytes(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else sorted(path.iterdir())
    return {file.name if path.is_dir() else "": file.read_bytes() for file in files}


@pytest.mark.parametrize(
    ("to", "files", "is_packed"),
    [("monolithic", None, False), ("dcp", 2, False), ("safetensors", 2, False), ("dcp", None, True)],
)
def test_killed_at_any_point_it_goes_on(tmp_path: Path, to: str, files: int | None, is_packed: bool):
    """A power cut or preemption costs at most the work since the last chunk, and leaves no invalid checkpoint."""
    source = make_source(tmp_path)
    if is_packed:
        source = tmp_path / "source.pt.gz"
        source.write_bytes(gzip.compress((tmp_path / "source.pt").read_bytes()))
    before = source.read_bytes()
    count = count_of(source, tmp_path / "expected", to, files=files)
    expected = all_bytes(tmp_path / "expected")
    # The last calls are clean-up, after all files have their names.
    points = sorted({*range(1, count, max(1, count // NUM_POINTS)), count - 2})
    num_resumed = num_published = 0
    for point in points:
        target = tmp_path / f"at-{point}"
        assert killed(point, source, target, to, files=files), f"call {point} of {count}"
        if target.exists():
            assert all_bytes(target) == expected, f"call {point}: published, and not whole"
            shutil.rmtree(target) if target.is_dir() else target.unlink()  # by its user
            num_published += 1
        else:
            killed(point // 2, source, target, to, files=files)  # killed again while it resumes
        if not target.exists():
            num_resumed += convert(source, target, to, files=files).kept_bytes > 0
            assert not staging_of(target).exists()
        assert all_bytes(target) == expected, f"call {point} of {count}"
    assert source.read_bytes() == before
    assert num_resumed > len(points) // 4 and num_published, points


def test_what_was_written_is_checked_before_it_is_kept(tmp_path: Path):
    """After a power cut the journal may be ahead of the disk; a chunk that differs from its journal entry is converted
    again."""
    source = make_source(tmp_path)
    target = tmp_path / "new.pt"
    count = count_of(source, tmp_path / "expected.pt", "monolithic")
    assert killed(count - 15, source, target, "monolithic")
    (journal,) = staging_of(target).glob("journal-*")
    noted = len(journal.read_text().splitlines())
    written = staging_of(target) / "files/new.pt"
    data = bytearray(written.read_bytes())
    place = data.index(bytes_of(loaded(source)["state"]["model"]["model.0"])[:64])
    data[place] ^= 1
    written.write_bytes(data)
    report = convert(source, target, "monolithic")
    assert target.read_bytes() == (tmp_path / "expected.pt").read_bytes()
    assert noted > 5 and 0 < report.read_bytes < 612


def test_a_copy_that_was_cut_short_is_unpacked_again(tmp_path: Path):
    """After a power cut the unpacked copy of a source may be empty; every further call failed on it."""
    source, target = tmp_path / "source.pt.gz", tmp_path / "new.pt"
    source.write_bytes(gzip.compress(make_source(tmp_path).read_bytes()))
    assert killed(40, source, target, "monolithic")
    [copy] = staging_of(target).glob("unpacked-*/*.pt")
    for size in (1000, 0):
        os.truncate(copy, size)
        convert(source, target, "monolithic")
        assert_same(loaded(target), loaded(tmp_path / "source.pt"), in_bits=True)
        target.unlink()
        assert killed(40, source, target, "monolithic")


def test_a_source_that_changed_is_read_again(tmp_path: Path):
    """After the source was replaced by another of the same size, the new checkpoint has no chunk of the old one."""
    source = make_source(tmp_path)
    target = tmp_path / "new.pt"
    assert killed(40, source, target, "monolithic")
    make_source(tmp_path)
    report = convert(source, target, "monolithic")
    count_of(source, tmp_path / "expected.pt", "monolithic")
    assert report.kept_bytes == 0
    assert target.read_bytes() == (tmp_path / "expected.pt").read_bytes()
