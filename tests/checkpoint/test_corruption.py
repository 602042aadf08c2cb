"""Every row of the table of corruptions: which function finds it, and its message."""

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
    """No function loads an inconsistent checkpoint; the error names the file and the problem, and is never zipfile's
    own."""
    _, damaged = prepared(corruption, tmp_path)
    with pytest.raises(CheckpointError, match=corruption.says) as raised:
        inspect_checkpoint(damaged)
    assert str(damaged.parent if corruption.layout == "monolithic" else damaged) in str(raised.value)
    assert re.search(corruption.says, _verdict(damaged))


def _verdict(path: Path) -> str:
    try:
        report = verify_checkpoint(path)
    except CheckpointError as error:  # the folder contains no checkpoint any more
        return str(error)
    return "" if report.ok else str(report)


@rows(FoundBy.STRUCTURE, FoundBy.CONTENT)
def test_damage_that_verify_finds(corruption: Corruption, tmp_path: Path):
    """verify names the file and tensor of damage that torch loads as wrong values and inspect cannot see.

    Reading the values also finds damage of the structure; CRC32s find damage of the content.
    """
    whole, damaged = prepared(corruption, tmp_path)
    inventory = inspect_checkpoint(damaged)
    report = verify_checkpoint(damaged)
    text = [fault for fault in report.faults if re.search(corruption.says, str(fault))]
    assert text and not report.ok, str(report)
    assert text[0].kind.value == corruption.found_by.value
    assert all(str(damaged) in str(fault.file) for fault in report.faults)
    # One corruption causes few faults, to stay readable.
    assert len(report.faults) <= 4, str(report)
    if corruption.found_by is FoundBy.STRUCTURE:
        expected = values_of(inspect_checkpoint(whole))
        with contextlib.suppress(CheckpointError):
            found = values_of(inventory)
            assert_same(found, {path: expected[path] for path in found}, in_bits=True)


@rows(FoundBy.AGAINST)
def test_damage_that_only_a_comparison_finds(corruption: Corruption, tmp_path: Path):
    """Documented limits: only a comparison with the original finds these."""
    assert corruption.why
    whole, damaged = prepared(corruption, tmp_path)
    alone = verify_checkpoint(damaged)
    assert alone.ok, str(alone)
    compared = verify_checkpoint(damaged, whole)
    assert not compared.ok and re.search(corruption.says, "\n".join(map(str, compared.differences))), str(compared)
    assert all(fault.kind is FaultKind.DIFFERENCE for fault in compared.differences)


@rows(FoundBy.HARMLESS)
def test_damage_that_changes_nothing(corruption: Corruption, tmp_path: Path):
    """Damage in unused bits is no reason to discard a checkpoint: its values equal the original's."""
    whole, damaged = prepared(corruption, tmp_path)
    assert verify_checkpoint(damaged, whole).ok
    assert_same(values_of(inspect_checkpoint(damaged)), values_of(inspect_checkpoint(whole)), in_bits=True)
