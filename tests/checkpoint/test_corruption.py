"""Every row of the table of damage: who finds it, and what they say."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from support.checkpoints.corruptions import CORRUPTIONS, Corruption, FoundBy, prepared
from support.checkpoints.samples import values_of
from support.comparing import assert_same

from composer_fsdp2.checkpoint.differences import FaultKind
from composer_fsdp2.checkpoint.inspect import inspect_checkpoint
from composer_fsdp2.checkpoint.verify.verification import verify_checkpoint
from composer_fsdp2.errors import CheckpointError

pytestmark = pytest.mark.any_torch


def rows(*found_by: FoundBy) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("corruption", [c for c in CORRUPTIONS if c.found_by in found_by], ids=str)


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
    """What torch loads as wrong values, and inspect cannot see, verify names with its file and tensor.

    Where the structure tells, so does whoever reads the values; of content the CRC32s tell.
    """
    whole, damaged = prepared(corruption, tmp_path)
    inventory = inspect_checkpoint(damaged)
    report = verify_checkpoint(damaged)
    text = [fault for fault in report.faults if re.search(corruption.says, str(fault))]
    assert text and not report.ok, str(report)
    assert text[0].kind.value == corruption.found_by.value
    assert all(str(damaged) in str(fault.file) for fault in report.faults)
    # One thing was damaged: what follows from it stays few, so that it is seen.
    assert len(report.faults) <= 4, str(report)
    if corruption.found_by is FoundBy.STRUCTURE:
        expected = values_of(inspect_checkpoint(whole))
        with contextlib.suppress(CheckpointError):
            found = values_of(inventory)
            assert_same(found, {path: expected[path] for path in found}, in_bits=True)


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
    assert_same(values_of(inspect_checkpoint(damaged)), values_of(inspect_checkpoint(whole)), in_bits=True)
