"""Compute the effective configuration of a section: its explicit keys, and the defaults of all others."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.config.rows import Row, idle, undecided
from composer_fsdp2.migration.lens import Lens


@dataclass(frozen=True, slots=True, kw_only=True)
class Effective:
    """The effective value of each key of a section, explicit or default.

    Args:
        given: The explicit keys, by the names used in the file.
        rows: Key name -> row of the table, including aliases.
        around: The values of the whole file.
        mappings: Names of mappings without a row. Their keys have rows; an entry that is not a mapping is an error.
    """

    given: Mapping[str, Any]
    rows: Mapping[str, Lens]
    around: Mapping[str, Any]
    mappings: Collection[str] = ()

    @property
    def table(self) -> list[Lens]:
        return [row for name, row in self.rows.items() if name == row.name]

    @property
    def is_valid(self) -> bool:
        """Return whether the explicit keys describe a run."""
        problems = map(self.problem, filter(self.is_read, self.table))
        return not any(problems) and self.given.keys().isdisjoint(self.mappings)

    def __getitem__(self, name: str) -> Any:
        row = self.rows[name]
        return next((self.given[each] for each in (name, *row.aliases) if each in self.given), row.default)

    def is_given(self, row: Row) -> bool:
        return any(name in self.given for name in (row.name, *row.aliases))

    def is_on(self, condition: str) -> bool:
        """Return whether a key has a value with an effect; for ``key = value or value``, whether it has one of these
        values."""
        name, _, values = condition.partition(" = ")
        return self[name] in values.split(" or ") if values else not self.rows[name].is_neutral(self[name])

    def is_read(self, row: Row) -> bool:
        return not row.only_with or self.is_on(row.only_with)

    def problem(self, row: Lens) -> str:
        """Return why the explicit value of a key is invalid; "" if it is valid or the key is not set."""
        if not self.is_given(row):
            return ""
        value = self[row.name]
        return row.wrong(value, self) if row.takes.fits(value) else f"this key takes {row.takes.text}"

    def finding(self, row: Lens, key: str, value: Any) -> Finding:
        """Return the finding of a key with this value, which may be the default."""
        finding = row.usual(key, value)
        if problem := self.problem(row):
            return undecided(
                finding, problem, "remove it" if row.default is None else f"its default is {row.default!r}"
            )
        if not self.is_read(row):
            return idle(finding, f"it is read only together with {row.only_with}, which is off")
        finding = idle(finding) if row.is_neutral(value) else finding
        return finding if row.decide is None else row.decide(finding, self)

    def findings(
        self, unknown: Callable[[str, Any], Finding], name_of: Callable[[str], str] = str
    ) -> Iterator[Finding]:
        """Yield a finding for each explicit key, and for each default that has an effect.

        Args:
            unknown: Called with a key without a row and its value; returns the finding.
            name_of: Called with a key; returns its name in the report.
        """
        for key, value in self.given.items():
            row = self.rows.get(key)
            if key in self.mappings:
                reason, hint = "this key takes a mapping", "write its keys below it, or remove it"
                yield Finding(key=key, value=value, outcome=Outcome.NEEDS_DECISION, reason=reason, hint=hint)
            elif row is None:
                yield unknown(key, value)
            elif key != row.name and row.name in self.given:
                yield idle(row.usual(name_of(key), value), f"{row.name} says it, too, and takes precedence")
            else:
                yield self.finding(row, name_of(key), value)
        for row in self.table:
            if row.reports_default and not self.is_given(row) and self.is_read(row):
                yield replace(self.finding(row, row.name, row.default), origin=Origin.IMPLICIT)

    def fields(self) -> dict[str, Any]:
        """Return the fields of a run that the keys set, with their values."""
        return {name: read(self[row.name], self) for row in self.table for name, read in row.read.items()}
