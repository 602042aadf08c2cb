"""Reports fit the terminal; in a pipe or a file lines are not wrapped, for programs that read them."""

from __future__ import annotations

import sys

import pytest

from composer_fsdp2.config.text import text_width
from composer_fsdp2.migration.explain import explain
from composer_fsdp2.migration.migrate import migrate_text

TEXT = "fsdp_config: {sharding_strategy: HYBRID_SHARD, backward_prefetch: BACKWARD_POST, cpu_offload: true}\n"


def longest() -> int:
    report = str(migrate_text(TEXT, "run.yaml"))
    return max(map(len, f"{report}\n{explain('HYBRID_SHARD', dialect='composer')[0]}".split("\n")))


@pytest.mark.parametrize("columns", [80, 60])
def test_reports_fit_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch):
    """At 80 columns every second line used to break inside a token."""
    piped = longest()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert longest() <= columns < piped
    monkeypatch.setenv("COLUMNS", "300")
    assert text_width(110) == 110


def test_an_outcome_is_not_broken_in_two(monkeypatch: pytest.MonkeyPatch):
    """It would be hard to find, and not in colour."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for columns in range(40, 90):
        monkeypatch.setenv("COLUMNS", str(columns))
        report = str(migrate_text("fsdp_config: {sharding_stratgy: NO_SHARD}\n", "run.yaml"))
        assert "needs decision" in report, report


def test_a_report_in_a_file_is_not_wrapped(monkeypatch: pytest.MonkeyPatch):
    """`migrate --check > report.txt` on a terminal, where standard error still is one."""
    piped = longest()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert longest() == piped > 80


def test_a_closed_stream_is_no_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert text_width(96) == 96
