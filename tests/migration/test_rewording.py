"""The report's texts decide nothing: with every text of every table replaced, migrations are the same."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st
from support.examples import IS_THOROUGH, examples

from composer_fsdp2.config.findings import Finding, Origin
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration import lens
from composer_fsdp2.migration.dialects import DIALECTS
from composer_fsdp2.migration.migrate import migrate_text
from composer_fsdp2.migration.targets import TARGETS
from tests.migration.generated import ANY_FILE

YAMLS = Path(__file__).resolve().parents[2] / "yamls"
FILES = sorted(path for path in YAMLS.rglob("*.*ml"))
# Text fields of a row, a limitation or a finding, which no code may read for a decision.
TEXTS = ("reason", "hint", "target", "meaning", "elsewhere")


def told_at_import() -> Iterator[Finding]:
    """The findings in the dialects' tables."""
    for module in [each for name, each in sys.modules.items() if name.startswith("composer_fsdp2.")]:
        tables = [value for value in vars(module).values() if isinstance(value, Finding | tuple)]
        for value in tables:
            rows = value if isinstance(value, tuple) else (value,)
            cells = [cell for row in rows for cell in (row if isinstance(row, tuple) else (row,))]
            yield from (cell for cell in cells if isinstance(cell, Finding))


@contextlib.contextmanager
def reworded(seed: int) -> Iterator[None]:
    """Replaces the texts of table rows, of a run's field values, and of every finding as soon as it is made."""
    rng = random.Random(seed)

    def other_words(text: Any) -> Any:
        if not isinstance(text, str) or not text:
            return text
        return " ".join(rng.choices(("(no", "unsaid", "remove", "it's", "null)"), k=rng.randint(1, 5)))

    shown = lens.shown

    def other_value(run: Any, name: str) -> Any:
        return other_words(shown(run, name))

    usual = Finding.__init__

    def init(self: Finding, **fields: Any) -> None:
        usual(self, **{name: other_words(value) if name in TEXTS else value for name, value in fields.items()})

    rows = [row for dialect in DIALECTS.values() for row in (*dialect.rows, *dialect.limits)]
    tables = (*rows, *told_at_import())
    before = [(row, name, getattr(row, name)) for row in tables for name in TEXTS if hasattr(row, name)]
    try:
        for row, name, text in before:
            object.__setattr__(row, name, other_words(text))
        with mock.patch.object(Finding, "__init__", init), mock.patch.object(lens, "shown", other_value):
            yield
    finally:
        for row, name, text in before:
            object.__setattr__(row, name, text)


def what_happens(text: str, name: str, to: str) -> object:
    """A migration's result without its texts."""
    try:
        migration = migrate_text(text, name, to=to)
    except ConfigError as error:  # two sections, for a target with one section a file
        return type(error), error.keys
    findings = [
        (each.name, each.origin is Origin.LACKING or str(each.value), each.outcome, each.where, each.asks, each.known)
        for section in migration.sections
        for each in section.findings
    ]
    return migration.after, migration.exit_code, migration.is_new_file, findings


def check(text: str, name: str, to: str, seed: int) -> None:
    expected = what_happens(text, name, to)
    with reworded(seed):
        assert what_happens(text, name, to) == expected


def test_real_files() -> None:
    """Otherwise correcting a sentence of the report would change the outcome for a configuration."""
    assert len(FILES) > 40
    for seed, file in enumerate(FILES):
        for to in TARGETS if IS_THOROUGH else [[*TARGETS][seed % len(TARGETS)]]:
            check(file.read_text(), file.name, to, seed)


@examples(40)
@given(ANY_FILE, st.sampled_from(sorted(TARGETS)), st.integers(0, 99))
def test_any_file(file: Any, to: str, seed: int) -> None:
    """The same, with combinations of keys and values that no real file has."""
    check(file.text, f"run{file.suffix}", to, seed)


def test_findings_are_reworded() -> None:
    """Proof that texts are replaced; otherwise the tests above would always pass."""
    message = [section.findings for section in migrate_text("fsdp_config: {verbose: true, x: 1}").sections]
    with reworded(1):
        again = [section.findings for section in migrate_text("fsdp_config: {verbose: true, x: 1}").sections]
    assert {each.reason for each in message[0]}.isdisjoint(each.reason for each in again[0])
