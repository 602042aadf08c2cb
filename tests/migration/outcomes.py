"""Outcomes of every file that the tests migrate, to compare two versions of the package.

``pytest -p tests.migration.outcomes tests/migration`` with ``OUTCOMES=FILE`` in the environment adds a line of JSON to
FILE for each call of ``migrate_text``; ``python -m tests.migration.outcomes BEFORE AFTER`` prints the differences.
"""

from __future__ import annotations

import json
import os
import sys
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration import files, migrate
from composer_fsdp2.migration.migrate import Migration

# Tests that corrupt texts or writers on purpose.
_SPOILT = ("test_rewording", "test_a_setting_that_is_not_written")
Outcomes = dict[str, dict[str, Any]]


def pytest_configure(config: pytest.Config) -> None:
    """In each worker, before any test module imports the function."""
    path = os.environ.get("OUTCOMES")
    if path:
        recorded = _recorded(migrate.migrate_text, Path(path))
        migrate.migrate_text = files.migrate_text = recorded


def _recorded(migrate_text: Any, path: Path) -> Any:
    @wraps(migrate_text)
    def record(text: str, name: str = "<text>", **options: Any) -> Migration:
        if any(each in os.environ.get("PYTEST_CURRENT_TEST", "") for each in _SPOILT):
            return migrate_text(text, name, **options)
        said = {key: value for key, value in options.items() if key not in ("read", "alone")}
        call = json.dumps([text, name, said], sort_keys=True, default=str)
        try:
            migration: Migration = migrate_text(text, name, **options)
        except ConfigError as error:
            _append(path, {"call": call, "error": str(error)})
            raise
        sections: dict[str, dict[str, list[str]]] = {}
        for section in migration.sections:
            told = sections.setdefault(section.place, {})
            for each in section.findings:  # several may have one key
                told.setdefault(each.key, []).append(f"{each.outcome.value}: {each}")
        _append(path, {"call": call, "sections": sections, "after": migration.after})
        return migration

    return record


def _append(path: Path, outcome: dict[str, Any]) -> None:
    """One write, so the lines of several processes do not mix."""
    with path.open("ab", buffering=0) as file:
        file.write((json.dumps(outcome) + "\n").encode())


def read(path: Path) -> Outcomes:
    return {outcome.pop("call"): outcome for outcome in map(json.loads, path.read_text().splitlines())}


def differences(before: Outcomes, after: Outcomes) -> list[str]:
    """A paragraph for each call in both with a different outcome."""
    told = []
    for call in before.keys() & after.keys():
        old, new = before[call], after[call]
        if old != new:
            text, name, options = json.loads(call)
            lines = [f"--- {name} {options}", text, *_changed(old, new)]
            told.append("\n".join(lines))
    return sorted(told)


def _changed(old: Any, new: Any, place: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = dict.fromkeys((*old, *new))
        return [line for key in keys for line in _changed(old.get(key), new.get(key), f"{place}/{key}")]
    return [] if old == new else [f"{place}:", f"  before: {old}", f"  after:  {new}"]


if __name__ == "__main__":
    first, second = (read(Path(each)) for each in sys.argv[1:])
    found = differences(first, second)
    print("\n\n".join([*found, f"{len(first.keys() & second.keys())} calls in both, {len(found)} differ"]))
