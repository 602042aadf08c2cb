"""From a configuration file of any system to one for FSDP2: text in, text and report out; writes no file.

Called by ``composer-fsdp2 migrate``.
"""

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any

from composer_fsdp2.config.findings import Finding, format_findings
from composer_fsdp2.config.value import Value
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.changes import change_section, shared_findings, with_shared
from composer_fsdp2.migration.dialect import Dialect, Path, Section, value_at
from composer_fsdp2.migration.dialects import DIALECTS
from composer_fsdp2.migration.documents import Document, open_document
from composer_fsdp2.migration.interpolation import resolved_values
from composer_fsdp2.migration.targets import TARGETS


class NothingToMigrateError(ConfigError):
    """A file without a section; in a folder it is passed over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionReport(Value):
    """What became of one section.

    Args:
        place: Its path in the file, with dots.
    """

    dialect: str
    to: str
    place: str
    line: int
    findings: tuple[Finding, ...]

    @property
    def blocking(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.outcome.blocks)

    def __str__(self) -> str:
        head = f"{self.place or 'the whole file'}, line {self.line}: {self.dialect} -> {self.to}"
        return "\n".join([head, format_findings(self.findings)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """What became of one file: its new text, and a report for each section.

    Args:
        suffix: Of a file with the new text.
        is_new_file: Whether the new text is another file than the old one, which cannot take its place.
    """

    name: str
    before: str
    after: str
    sections: tuple[SectionReport, ...]
    suffix: str
    is_new_file: bool = False

    @property
    def blocking(self) -> tuple[Finding, ...]:
        return tuple(finding for section in self.sections for finding in section.blocking)

    @property
    def exit_code(self) -> int:
        """0 if nothing is left for the user to do, else 1."""
        return int(bool(self.blocking))

    @property
    def is_changed(self) -> bool:
        return self.after != self.before

    def diff(self) -> str:
        """A unified diff; empty if nothing changes."""
        lines = difflib.unified_diff(
            self.before.splitlines(keepends=True),
            self.after.splitlines(keepends=True),
            fromfile=self.name,
            tofile=self.name,
        )
        return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)

    def __str__(self) -> str:
        return "\n\n".join(f"{self.name}: {section}" for section in self.sections)

    def to_json(self) -> dict[str, Any]:
        return {
            "file": self.name,
            "changed": self.is_changed,
            "exit_code": self.exit_code,
            "sections": [section.to_json() for section in self.sections],
        }


def migrate_text(
    text: str, name: str = "<text>", *, to: str = "composer", dialect: str | None = None, at: str | None = None
) -> Migration:
    """Migrate a text to FSDP2, and report what became of each key.

    Args:
        text: Of a YAML file; of a TOML file, if the name ends so.
        name: What messages call it.
        to: The system whose words the new text is in; a name of ``TARGETS``.
        dialect: Of its sections; None finds out.
        at: The path of its section, or of what the sections lie in, with dots; None finds all.
    Raises:
        ConfigError: it is no such file, or has no section (NothingToMigrateError); names file, line and column.
    """
    document = open_document(text, name)
    values = resolved_values(document)
    target = TARGETS[to]
    found = _sections(document, values, dialect, at)
    sections = [(DIALECTS[of], Section.at(path, values)) for of, path in found]
    _check(document, sections, target)
    changes = [change_section(document, of, section, target) for of, section in sections]
    paths = [section.path for _, section in sections]
    changes = [with_shared(document, path, paths, change) for path, change in zip(paths, changes, strict=True)]
    new_text = next((change.text for change in changes if change.text is not None), None)
    edits = [edit for change in changes for edit in change.edits]
    after = document.edited(edits) if new_text is None else new_text
    shared = tuple(shared_findings(document, after, paths, changes)) if new_text is None else ()
    reports = [
        SectionReport(
            dialect=of.name,
            to=target.target,
            place=section.place,
            line=document.line_of(section.path),
            findings=tuple(
                _placed(finding, document, section.path)
                for finding in (*change.findings, *(shared if number == 0 else ()))
            ),
        )
        for number, ((of, section), change) in enumerate(zip(sections, changes, strict=True))
    ]
    return Migration(
        name=name,
        before=text,
        after=after,
        sections=tuple(reports),
        suffix=_suffix(name, target, new_text),
        is_new_file=new_text is not None,
    )


def _suffix(name: str, target: Dialect, new_text: str | None) -> str:
    return target.suffix if new_text is not None else f".{name.rpartition('.')[2]}"


def _sections(
    document: Document, values: dict[str, Any], dialect: str | None, at: str | None
) -> list[tuple[str, Path]]:
    names = [dialect] if dialect else list(DIALECTS)
    found = [(name, path) for name in names for path in DIALECTS[name].sections(values)]
    if at is not None:
        found = _sections_at(document, values, found, dialect, at)
    if not found:
        raise NothingToMigrateError(
            f"{document.name}:1:1: nothing here configures sharding for {dialect or ' or '.join(DIALECTS)}; "
            "--at PATH and --dialect NAME say where it is and whose"
        )
    return found


def _sections_at(
    document: Document,
    values: dict[str, Any],
    found: list[tuple[str, Path]],
    dialect: str | None,
    at: str,
) -> list[tuple[str, Path]]:
    path: Path = tuple(int(part) if part.isdecimal() else part for part in at.split(".") if part)
    try:
        value = value_at(values, path)
    except (KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{document.name}:1:1: there is no {at}") from error
    below = [(name, each) for name, each in found if each[: len(path)] == path]
    if below:
        return below
    if not isinstance(value, dict):
        raise ConfigError(f"{document.name}:{document.line_of(path)}:1: {at} is not a mapping")
    if dialect is None:
        raise ConfigError(
            f"{document.name}:{document.line_of(path)}:1: {at} could be any system's; say --dialect "
            f"{', '.join(DIALECTS)}"
        )
    return [(dialect, path)]


def _check(document: Document, sections: list[tuple[Dialect, Section]], target: Dialect) -> None:
    """Raise for what cannot be migrated whatever it says."""
    for _, section in sections:
        if problem := document.duplicate(section.path):
            raise ConfigError(problem)
    is_new_file = any(of is not target and not (target.heads and document.takes_entries) for of, _ in sections)
    if is_new_file and len(sections) > 1:
        places = ", ".join(section.place for _, section in sections)
        raise ConfigError(
            f"{document.name}:1:1: a file for {target.target} holds one section, and here are {len(sections)}: "
            f"{places}; choose one with --at"
        )


def _placed(finding: Finding, document: Document, path: Path) -> Finding:
    """The finding with file and line; a key that stands beside the section is found there."""
    key = tuple(finding.key.split("."))
    line = document.line_of(path)
    for depth in range(len(path), -1, -1):
        try:
            line = document.line_of((*path[:depth], *key))
            break
        except (KeyError, IndexError):
            continue
    return dataclasses.replace(finding, where=f"{document.name}:{line}")
