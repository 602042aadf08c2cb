"""Report the migration of several files: JSON for programs and CI, Markdown for reviewers, text for the terminal."""

import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_fsdp2.config.findings import Finding, Outcome
from composer_fsdp2.config.text import and_more, lines_and_more, short, text_width
from composer_fsdp2.migration.files import FileResult, State

# Version of the object that ``--json`` prints, which SCHEMA describes; a new version means that programs must change.
VERSION = 1
SCHEMA = Path(__file__).with_name("migrate.schema.json")
_SHOWN_REASONS = 20
_SHOWN_PLACES = 5
_SHOWN_VALUES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The results of one call of ``composer-fsdp2 migrate``.

    Args:
        error: The error that stopped the migration; "" without one.
        fails_on_change: Whether the exit code is nonzero if a file would change or was changed.
    """

    results: Sequence[FileResult] = ()
    error: str = ""
    fails_on_change: bool = False

    @property
    def exit_code(self) -> int:
        """The largest exit code of the run and of all files."""
        return max(
            2 if self.error else 0,
            int(self.fails_on_change and any(result.is_changed for result in self.results)),
            *(result.exit_code for result in self.results),
        )

    def counts(self) -> dict[State, int]:
        found = Counter(result.state for result in self.results)
        return {state: found[state] for state in State}

    def to_json(self) -> dict[str, Any]:
        counts, states = self.counts(), [result.state for result in self.results if result.is_changed]
        return {
            "version": VERSION,
            "exit_code": self.exit_code,
            "error": self.error,
            "summary": {
                "files": len(self.results),
                **{state.value.replace(" ", "_"): count for state, count in counts.items()},
                "changed": states.count(State.READY),
            },
            "files": [result.to_json() for result in self.results],
        }

    def markdown(self) -> str:
        return "\n\n".join(result.markdown() for result in self.results) + "\n"

    def summary(self, changed: str) -> str:
        """Return the number of files in each state as text.

        Args:
            changed: The label for files whose text changes.
        """
        counts = self.counts()
        num_changed = sum(result.is_changed for result in self.results if result.state is State.READY)
        kinds = (
            (num_changed, changed),
            (counts[State.READY] - num_changed, "nothing to change"),
            (counts[State.NEEDS_DECISION], "to decide"),
            (counts[State.UNUSABLE], "unusable"),
            (counts[State.UNCONFIGURED], "without a section for sharding"),
        )
        return f"{len(self.results)} files: {', '.join(f'{count} {what}' for count, what in kinds if count)}"

    def errors(self) -> list[str]:
        """Return the errors of unusable files and of the run."""
        of_files = [result.error for result in self.results if result.state is State.UNUSABLE]
        return [*of_files, self.error] if self.error else of_files

    def decisions(self) -> str:
        """Return the findings that need a decision, one line per reason with count and places; "" without any."""
        return self._by_reason("to decide", lambda outcome: outcome.blocks, num_places=_SHOWN_PLACES)

    def differences(self) -> str:
        """Return the findings with outcome approximate, one line per reason with their number; "" without any."""
        return self._by_reason("approximate", lambda outcome: outcome is Outcome.APPROXIMATE, num_places=0)

    def _by_reason(self, heading: str, is_shown: Callable[[Outcome], bool], num_places: int) -> str:
        by_reason: defaultdict[str, list[Finding]] = defaultdict(list)
        for section in (each for result in self.results if result.migration for each in result.migration.sections):
            for finding in section.findings:
                if is_shown(finding.outcome):
                    by_reason[finding.sentence("")].append(finding)
        width = text_width(sys.maxsize)
        texts = []
        for findings in sorted(by_reason.values(), key=len, reverse=True):
            values = and_more(list(dict.fromkeys(short(each.value) for each in findings)), _SHOWN_VALUES)
            text = f"  {len(findings)} x {findings[0].sentence(values)}"
            texts.append(textwrap.fill(text, width, subsequent_indent=" " * 6, break_on_hyphens=False))
            if num_places:
                texts[-1] += f"\n      {and_more([each.where for each in findings], num_places)}"
        return f"{heading}:\n{lines_and_more(texts, _SHOWN_REASONS)}" if texts else ""
