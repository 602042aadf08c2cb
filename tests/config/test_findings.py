"""What a user reads about each setting."""

from __future__ import annotations

import json

import pytest

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


def test_a_finding_names_the_key_the_value_the_reason_and_the_way_out():
    """Somebody who reads one line of the log knows what happened and what to do."""
    text = str(FINDING)
    for part in ("ignored_modules", "[1, 2]", "unsupported", "not carried over yet", "leave it out", "run.yaml:92"):
        assert part in text


def test_the_table_has_every_finding_and_cuts_long_values():
    """No setting is missing from the report, and one large object does not bury the others."""
    long = Finding(key="save_planner", value="x" * 500, outcome=Outcome.EXACT, target="kept", reason="as before")
    text = format_findings([FINDING, long])
    assert [part in text for part in ("ignored_modules", "leave it out", "save_planner", "as before")] == [True] * 4
    assert max(map(len, text.splitlines())) < 160


def test_an_empty_table_says_so():
    """An empty section is no blank report."""
    assert "FSDP1's defaults apply" in format_findings([])


def test_findings_are_json_whatever_the_value():
    """A tool can read the report even where the value was an object."""
    assert json.loads(json.dumps(FINDING.to_json()))["value"] == "[1, 2]"
    assert json.loads(json.dumps(FINDING.to_json()))["outcome"] == "unsupported"


@pytest.mark.parametrize("outcome", Outcome)
def test_only_what_cannot_go_on_blocks(outcome: Outcome):
    """An approximation is reported and trains; what is lost stops the run unless the user says otherwise."""
    assert outcome.blocks == (outcome.value in ("unsupported", "needs decision"))
