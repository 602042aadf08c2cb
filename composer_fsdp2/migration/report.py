"""Results of a migration of several files, for programs and CI (JSON), reviewers (Markdown) and the terminal."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from composer_fsdp2.config.text import and_more, lines_and_more
from composer_fsdp2.migration.files import FileResult, State

# Version of the object that ``--json`` prints, which SCHEMA describes; a new version means that programs must change.
VERSION = 1
SCHEMA = Path(__file__).with_name("migrate.schema.json")
_SHOWN_DECISIONS = 20
_SHOWN_PLACES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The results of one run.

    Args:
        error: The error that stopped the run or prevented its start.
        fails_on_change: Whether a file that would change, or did, makes the exit code nonzero.
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
        """Return the number of files of each kind.

        Args:
            changed: Label of files whose text changes.
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
        """Return the findings that need a decision, each once with its places, below a heading; "" if none do."""
        places: dict[str, list[str]] = {}
        migrations = (result.migration for result in self.results if result.migration is not None)
        for finding in (finding for migration in migrations for finding in migration.blocking):
            places.setdefault(str(replace(finding, where="")), []).append(finding.where)
        texts = [f"{text}\n      {and_more(where, _SHOWN_PLACES)}" for text, where in places.items()]
        return f"to decide:\n{lines_and_more(texts, _SHOWN_DECISIONS, indent='  ')}" if texts else ""
