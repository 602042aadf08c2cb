"""The effective configuration of a section: its explicit keys, and the defaults of all others."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from composer_fsdp2.config.findings import Finding, Origin
from composer_fsdp2.config.rows import Row, finding_of, idle, undecided
from composer_fsdp2.migration.lens import Lens


@dataclass(frozen=True, slots=True, kw_only=True)
class Effective:
    """The effective values of the keys of one section.

    Args:
        given: The explicit keys, under the names used in the file.
        rows: The rows of the table by key name, aliases included.
        around: The values of the whole file.
    """

    given: Mapping[str, Any]
    rows: Mapping[str, Lens]
    around: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        row = self.rows[name]
        return next((self.given[each] for each in (name, *row.aliases) if each in self.given), row.default)

    def is_given(self, row: Row) -> bool:
        return any(name in self.given for name in (row.name, *row.aliases))

    def is_on(self, condition: str) -> bool:
        """Return whether a key is enabled; for ``key = value or value``, whether it has one of these values."""
        name, _, values = condition.partition(" = ")
        return self[name] in values.split(" or ") if values else not self.rows[name].is_neutral(self[name])

    def is_read(self, row: Row) -> bool:
        return not row.only_with or self.is_on(row.only_with)

    def problem(self, row: Row) -> str:
        """Return the reason why the value of a key is invalid, or "" if it is valid."""
        is_bad = self.is_given(row) and self.is_read(row) and not row.takes.fits(self[row.name])
        return f"this key takes {row.takes.text}" if is_bad else ""

    def finding(self, row: Row, key: str, value: Any) -> Finding:
        """Return the finding of a key with this explicit or default value."""
        if problem := self.problem(row):
            hint = "remove it" if row.default is None else f"its default is {row.default!r}"
            return undecided(row.usual(key, value), problem, hint)
        found = finding_of(row, key, value, is_read=self.is_read(row))
        return found if row.decide is None or not self.is_read(row) else row.decide(found, self)

    def findings(
        self, table: Sequence[Lens], name_of: Callable[[str], str], unknown: Callable[[str, Any], Finding]
    ) -> Iterator[Finding]:
        """Yield a finding for each explicit key, and for defaults that have an effect.

        Args:
            name_of: Returns the name of a key in the report.
            unknown: Returns the finding of a key without a row.
        """
        for key, value in self.given.items():
            row = self.rows.get(key)
            if row is None:
                yield unknown(key, value)
            elif key != row.name and row.name in self.given:
                yield idle(row.usual(name_of(key), value), f"{row.name} says it, too, and takes precedence")
            else:
                yield self.finding(row, name_of(key), value)
        for row in table:
            if row.is_told and not self.is_given(row) and self.is_read(row):
                yield replace(self.finding(row, row.name, row.default), origin=Origin.IMPLICIT)

    def fields(self, table: Sequence[Lens]) -> dict[str, Any]:
        """Return the fields of a run that the keys set, with their values."""
        return {name: read(self[row.name], self) for row in table for name, read in row.read.items()}
