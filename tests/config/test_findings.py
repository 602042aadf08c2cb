"""The text about each setting for the user."""

from __future__ import annotations

import json

from composer_fsdp2 import Finding, Outcome
from composer_fsdp2.config.findings import format_findings

FINDING = Finding(
    key="ignored_modules",
    value=[1, 2],
    outcome=Outcome.UNSUPPORTED,
    target="",
    reason="not carried over yet",
    hint="leave it out",
    where="run.yaml:92",
)


def test_a_finding_says_all_of_itself():
    """A user who reads one line of the log, or a tool, knows the outcome and the next step, whatever the value."""
    for part in ("ignored_modules", "[1, 2]", "unsupported", "not carried over yet", "leave it out", "run.yaml:92"):
        assert part in str(FINDING)
    told = json.loads(json.dumps(FINDING.to_json()))
    assert (told["value"], told["outcome"]) == ("[1, 2]", "unsupported")
    assert [each.value for each in Outcome if each.blocks] == ["unsupported", "needs decision"]


def test_the_table_has_every_finding_and_cuts_long_values():
    """The report has every setting, one large object does not hide the others, and an empty report states that it is
    empty."""
    long = Finding(key="save_planner", value="x" * 500, outcome=Outcome.EXACT, target="kept", reason="as before")
    text = format_findings([FINDING, long])
    assert [part in text for part in ("ignored_modules", "leave it out", "save_planner", "as before")] == [True] * 4
    assert max(map(len, text.splitlines())) < 160
    assert "FSDP1's defaults apply" in format_findings([])


def test_what_needs_a_decision_comes_first_and_hidden_outcomes_are_counted():
    """Nine exact keys above the one that blocks the migration would fill the first screen."""
    exact = Finding(key="cpu_offload", value=True, outcome=Outcome.EXACT, target="kept", reason="as before")
    text = format_findings([exact, FINDING, exact])
    assert text.index("ignored_modules") < text.index("cpu_offload") and text.count("cpu_offload") == 2
    folded = format_findings([exact, FINDING, exact], hidden=[Outcome.EXACT])
    assert folded.splitlines()[-1] == "  2 exact (--all lists them)" and "cpu_offload" not in folded
    assert "ignored_modules" in folded and "not carried over yet" in folded
    assert format_findings([exact], hidden=[Outcome.EXACT]) == "  1 exact (--all lists them)"
