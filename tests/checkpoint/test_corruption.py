"""Every row of the table of damage: who finds it, and what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from support.checkpoints.corruptions import CORRUPTIONS, SOURCES, Corruption, FoundBy, prepared

from composer_fsdp2.checkpoint.inspect import inspect_checkpoint
from composer_fsdp2.checkpoint.read import Reader
from composer_fsdp2.checkpoint.verify.faults import FaultKind
from composer_fsdp2.checkpoint.verify.verification import verify_checkpoint
from composer_fsdp2.errors import CheckpointError

pytestmark = pytest.mark.any_torch


def rows(*found_by: FoundBy) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("corruption", [c for c in CORRUPTIONS if c.found_by in found_by], ids=str)


@pytest.mark.parametrize("layout", SOURCES)
def test_sources_are_whole(layout: str, tmp_path: Path):
    """The rows below find what was done to a checkpoint, and not what it had before."""
    whole, _ = prepared(Corruption(layout, "nothing", lambda path: None, FoundBy.HARMLESS), tmp_path)
    assert verify_checkpoint(whole).ok


@rows(FoundBy.INSPECT)
def test_damage_that_stops_everybody(corruption: Corruption, tmp_path: Path):
    """Nobody loads what cannot be right; the error names the file and what is wrong, and is never zipfile's own."""
    _, damaged = prepared(corruption, tmp_path)
    with pytest.raises(CheckpointError, match=corruption.says) as raised:
        inspect_checkpoint(damaged)
    assert str(damaged.parent if corruption.layout == "monolithic" else damaged) in str(raised.value)
    assert re.search(corruption.says, _verdict(damaged))


def _verdict(path: Path) -> str:
    try:
        report = verify_checkpoint(path)
    except CheckpointError as error:  # nothing is left that would be a checkpoint
        return str(error)
    return "" if report.ok else str(report)


@rows(FoundBy.STRUCTURE, FoundBy.CONTENT)
def test_damage_that_verify_finds(corruption: Corruption, tmp_path: Path):
    """What torch loads as wrong values, and inspect cannot see, verify names with its file and tensor."""
    _, damaged = prepared(corruption, tmp_path)
    inspect_checkpoint(damaged)
    report = verify_checkpoint(damaged)
    text = [fault for fault in report.faults if re.search(corruption.says, str(fault))]
    assert text and not report.ok, str(report)
    assert text[0].kind.value == corruption.found_by.value
    assert all(str(damaged) in str(fault.file) for fault in report.faults)
    # One thing was damaged: what follows from it stays few, so that it is seen.
    assert len(report.faults) <= 4, str(report)


@rows(FoundBy.AGAINST)
def test_damage_that_only_a_comparison_finds(corruption: Corruption, tmp_path: Path):
    """Stated limits: no file says these. Comparing with the original does."""
    assert corruption.why
    whole, damaged = prepared(corruption, tmp_path)
    alone = verify_checkpoint(damaged)
    assert alone.ok, str(alone)
    compared = verify_checkpoint(damaged, whole)
    assert not compared.ok and re.search(corruption.says, "\n".join(map(str, compared.differences))), str(compared)
    assert all(fault.kind is FaultKind.DIFFERENCE for fault in compared.differences)


@rows(FoundBy.HARMLESS)
def test_damage_that_changes_nothing(corruption: Corruption, tmp_path: Path):
    """Bits that nobody reads are no reason to throw a checkpoint away: its values are the original's."""
    whole, damaged = prepared(corruption, tmp_path)
    assert verify_checkpoint(damaged, whole).ok
    values, expected = _values(damaged), _values(whole)
    assert values.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in values.items())


def _values(path: Path) -> dict[object, torch.Tensor]:
    inventory = inspect_checkpoint(path)
    with Reader() as reader:
        return {key: reader.read_full(record) for key, record in inventory.tensors.items()}


def test_all_problems_at_once(tmp_path: Path):
    """Two files missing and one cut short are one error with three lines, not three tries."""
    _, damaged = prepared(Corruption("dcp", "several", _several, FoundBy.INSPECT), tmp_path)
    with pytest.raises(CheckpointError) as raised:
        inspect_checkpoint(damaged)
    assert "__1_0.distcp: missing" in str(raised.value) and "__0_0.distcp: " in str(raised.value)
    report = verify_checkpoint(damaged)
    assert len({str(fault.found).split(":")[0] for fault in report.faults}) > 1


def _several(path: Path) -> None:
    (path / "__1_0.distcp").unlink()
    data = (path / "__0_0.distcp").read_bytes()
    (path / "__0_0.distcp").write_bytes(data[: len(data) // 2])
