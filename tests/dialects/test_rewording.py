"""Prose steers nothing: with every reason and hint of every table in other words, the same happens."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from composer_fsdp2.config.findings import Finding
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.dialects import DIALECTS
from composer_fsdp2.migration.migrate import migrate_text
from composer_fsdp2.migration.targets import TARGETS
from tests.dialects.documents import EVERY

YAMLS = Path(__file__).resolve().parents[2] / "yamls"
FILES = sorted(path for path in YAMLS.rglob("*.*ml"))
TEXTS = ("reason", "hint")


@contextlib.contextmanager
def reworded(seed: int) -> Iterator[None]:
    """The tables' rows in other words, and every finding as soon as it is made."""
    rng = random.Random(seed)

    def other_words(text: str) -> str:
        return text and " ".join(rng.choices(("(no", "unsaid", "remove", "it's", "null)"), k=rng.randint(1, 5)))

    usual = Finding.__init__

    def init(self: Finding, **fields: Any) -> None:
        usual(self, **{name: other_words(value) if name in TEXTS else value for name, value in fields.items()})

    tables = [table for dialect in DIALECTS.values() for table in (*dialect.rows, *dialect.lacks)]
    before = [(row, name, getattr(row, name)) for row in tables for name in TEXTS]
    try:
        for row, name, text in before:
            object.__setattr__(row, name, other_words(text))
        with mock.patch.object(Finding, "__init__", init):
            yield
    finally:
        for row, name, text in before:
            object.__setattr__(row, name, text)


def what_happens(text: str, name: str, to: str) -> object:
    """All of a migration but its prose."""
    try:
        migration = migrate_text(text, name, to=to)
    except ConfigError as error:  # two sections, where the target's files hold one
        return str(error)
    findings = [
        (each.name, str(each.value), each.outcome, each.target, each.where, each.asks, each.known)
        for section in migration.sections
        for each in section.findings
    ]
    return migration.after, migration.exit_code, migration.is_new_file, findings


def check(text: str, name: str, to: str, seed: int) -> None:
    expected = what_happens(text, name, to)
    with reworded(seed):
        assert what_happens(text, name, to) == expected


@pytest.mark.parametrize("to", TARGETS)
def test_real_files(to: str) -> None:
    """Who mends a sentence of a report would change what becomes of a configuration."""
    assert len(FILES) > 40
    for seed, file in enumerate(FILES):
        check(file.read_text(), file.name, to, seed)


@examples(100)
@given(st.sampled_from(sorted(EVERY)).flatmap(EVERY.__getitem__), st.sampled_from(sorted(TARGETS)), st.integers(0, 99))
def test_any_file(file: Any, to: str, seed: int) -> None:
    """The same, for keys and values that no real file has together."""
    check(file.text, f"run{file.suffix}", to, seed)


def test_findings_are_reworded() -> None:
    """The tests above would hold if nothing were changed."""
    message = [section.findings for section in migrate_text("fsdp_config: {verbose: true, x: 1}").sections]
    with reworded(1):
        again = [section.findings for section in migrate_text("fsdp_config: {verbose: true, x: 1}").sections]
    assert {each.reason for each in message[0]}.isdisjoint(each.reason for each in again[0])
