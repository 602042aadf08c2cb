"""From a configuration file of any system to one for FSDP2: text in, text and report out; writes no file.

Called by ``composer-fsdp2 migrate``.
"""

import codecs
import difflib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from composer_fsdp2.config.findings import Finding, Outcome, format_findings
from composer_fsdp2.config.text import printable, short
from composer_fsdp2.config.value import Value
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.changes import Change, change_section
from composer_fsdp2.migration.dialect import Dialect, Section
from composer_fsdp2.migration.dialects import DIALECTS
from composer_fsdp2.migration.dialects.fingerprints import FOREIGN_WORDS, foreign_system
from composer_fsdp2.migration.documents import Document, differences, open_document, referred
from composer_fsdp2.migration.interpolated import has_interpolation
from composer_fsdp2.migration.interpolation import Resolved, resolve, shown
from composer_fsdp2.migration.paths import Path, has_path, value_at, walk
from composer_fsdp2.migration.read_back import lost_findings
from composer_fsdp2.migration.references import not_as_meant, shared_findings, with_shared
from composer_fsdp2.migration.targets import TARGETS


class NothingToMigrateError(ConfigError):
    """A file without a section; in a folder it is passed over."""


class ForeignSystemError(NothingToMigrateError):
    """A file for a system that is known by name only; in a folder it is passed over, and told of."""


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
        lines = difflib.unified_diff(_lines(self.before), _lines(self.after), fromfile=self.name, tofile=self.name)
        return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)

    def __str__(self) -> str:
        return "\n\n".join(f"{self.name}: {section}" for section in self.sections)


def _lines(text: str) -> list[str]:
    """The lines that may be printed, with their ends."""
    found = re.finditer(r"([^\n]*?)(\r?\n|\Z)", text)
    return [printable(each[1]) + each[2] for each in found if each[0]]


def may_configure(content: bytes) -> bool:
    """Whether a file may have a section: a key is in it that begins as some dialect's do.

    The first look at the files of a folder, of which most have nothing to do with sharding, and may be anything.
    """
    is_wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    text = content.decode("utf-16" if is_wide else "utf-8", errors="ignore").lower()
    return _KEY.search(text) is not None


# A key of a section, or an escape with which one may be written in other letters.
_WORDS = "|".join(sorted({*FOREIGN_WORDS, *(word for dialect in DIALECTS.values() for word in dialect.words)}))
_KEY = re.compile(rf"""\b(?:{_WORDS})[\w.]{{0,1000}}["']?\s*[:=\]]|\\[xu]""")


def migrate_text(
    text: str,
    name: str = "<text>",
    *,
    to: str = "composer",
    dialect: str | None = None,
    at: str | None = None,
    suffix: str = "",
) -> Migration:
    """Migrate a text to FSDP2, and report what became of each key.

    Args:
        text: Of a YAML file; of a TOML file, if the name ends so.
        name: What messages call it.
        suffix: The ending of its format, where the name has none or another.
        to: The system whose words the new text is in; a name of ``TARGETS``.
        dialect: Of its sections; None finds out.
        at: The path of its section, or of what the sections lie in, with dots; None finds all.
    Raises:
        ConfigError: it is no such file, or has no section (NothingToMigrateError); names file, line and column.
    """
    document = open_document(text, name, suffix)
    file = _File.of(document)
    target = TARGETS[to]
    sections = _sections_of(file, dialect, at)
    _check(file, sections, target)
    changes = [change_section(document, of, section, target) for of, section in sections]
    paths = [section.path for _, section in sections]
    changes = [with_shared(document, path, paths, change) for path, change in zip(paths, changes, strict=True)]
    whole = next((change for change in changes if change.text is not None), None)
    edits = [edit for change in changes for edit in change.edits]
    after = document.edited(edits) if whole is None or whole.text is None else whole.text
    suffix = _suffix(suffix or name, target, whole is not None)
    again = _as_meant(document, after, [section for _, section in sections], changes, whole, suffix)
    shared: tuple[Finding, ...] = ()
    if again is not None and whole is None:
        shared = tuple(shared_findings(document, again.values, [section for _, section in sections], changes))
    if again is not None:
        written = _File.of(again)
        changes = [replace(each, findings=(*each.findings, *_lost(written, target, each))) for each in changes]
    reports = [
        SectionReport(
            dialect=of.name,
            to=target.target,
            place=printable(section.place),
            line=_line_of(document, section.path),
            findings=tuple(
                _placed(finding, file, section.path, after)
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
        suffix=suffix,
        is_new_file=whole is not None,
    )


def find_sections(
    text: str, name: str = "<text>", *, dialect: str | None = None, at: str | None = None, suffix: str = ""
) -> tuple[Document, list[tuple[Dialect, Section]]]:
    """The document of a text, and what ``migrate_text`` would take for its sections, with the same arguments."""
    document = open_document(text, name, suffix)
    return document, _sections_of(_File.of(document), dialect, at)


def _sections_of(file: "_File", dialect: str | None, at: str | None) -> list[tuple[Dialect, Section]]:
    found = _sections(file, dialect, at)
    return [(DIALECTS[of], Section.at(path, file.values_for(of))) for of, path in found]


def _suffix(name: str, target: Dialect, is_new_file: bool) -> str:
    return target.suffix if is_new_file else f".{name.rpartition('.')[2]}"


def _as_meant(
    document: Document,
    after: str,
    sections: Sequence[Section],
    changes: Sequence[Change],
    whole: Change | None,
    suffix: str,
) -> Document | None:
    """The new text, read again; None if it is the old one.

    Raises:
        ConfigError: read again, it does not say what it was meant to, so that nobody may get it.
    """
    if whole is None and after == document.original:
        return None
    try:
        again = open_document(after, document.name, suffix)
    except ConfigError as error:
        raise not_as_meant(document, (), sections[0]) from error
    _refuse_doubled(document, again, changes)
    wrong = None if whole is None else next(differences(whole.values, again.values), None)
    if wrong is not None:
        raise not_as_meant(document, wrong, sections[0])
    return again


def _lost(again: "_File", target: Dialect, change: Change) -> Iterator[Finding]:
    """Findings for what the new text's own reader does not find in it, of what the old one asked for."""
    if change.run is None:
        return
    values = again.values_for(target.name)
    place = next(iter(target.sections(values)), ()) if change.place is None else change.place
    yield from lost_findings(change.run, target, Section.at(place, values), change.lacks)


def _refuse_doubled(document: Document, again: Document, changes: Sequence[Change]) -> None:
    """Raise for a key that the new text has twice, and the old one had once: not every reader refuses such a file."""
    for path in (edit.path for change in changes for edit in change.meant):
        if has_path(again.values, path) and (twice := again.duplicate(path)) and not document.duplicate(path):
            raise ConfigError(f"{twice} (of the new text); rename or remove the key that was there")


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A document, and its values as those systems see them that resolve interpolations."""

    document: Document
    resolved: Resolved

    @classmethod
    def of(cls, document: Document) -> "_File":
        try:
            return cls(document=document, resolved=resolve(document.values))
        except ConfigError as error:
            raise ConfigError(f"{document.name}:1:1: {error}") from error

    def values_for(self, dialect: str) -> Any:
        return self.resolved.values if DIALECTS[dialect].interpolates else self.document.values


def _sections(file: _File, dialect: str | None, at: str | None) -> list[tuple[str, Path]]:
    document, names = file.document, [dialect] if dialect else list(DIALECTS)
    other = None if dialect else foreign_system(file.document.values)
    if other is not None:
        raise ForeignSystemError(
            f"{document.name}:1:1: this is a configuration of {other.name}, which is not read here: {other.advice}"
        )
    found = [(name, path) for name in names for path in DIALECTS[name].sections(file.values_for(name))]
    if at is not None and not document.problem:
        found = _sections_at(file, found, dialect, at)
    else:
        found = _outermost(file, found)
    if not found:
        _refuse_unreadable(file, names)
        raise NothingToMigrateError(
            document.problem
            or f"{document.name}:1:1: nothing here configures sharding in the words of {_one_of(names)}; where a "
            "section stands under another name, --at PATH and --dialect NAME say where, and whose it is"
        )
    if document.problem:
        raise ConfigError(document.problem)
    here = [(name, path) for name, path in found if not path or has_path(document.values, path)]
    if not here:  # what it stands for is no section where it is written
        path = next(path for _, path in found)
        raise ConfigError(
            f"{document.name}:{_line_of(document, path)}:1: {'.'.join(map(str, path))} stands behind an interpolation; "
            "write it out there"
        )
    return here


def _outermost(file: _File, found: list[tuple[str, Path]]) -> list[tuple[str, Path]]:
    """Drop sections inside the mapping that another section replaces: that section's system reads them as its keys."""
    blocks = {each: DIALECTS[each[0]].replaced_block(Section.at(each[1], file.values_for(each[0]))) for each in found}
    kept = list(found)
    for inner in found:
        entries = (block.entry for each in kept if each != inner and (block := blocks[each]) is not None)
        if any(entry and inner[1][: len(entry)] == entry for entry in entries):
            kept.remove(inner)
    return kept


def _one_of(names: Sequence[str]) -> str:
    return " or ".join(", ".join(names).rsplit(", ", 1))


def _refuse_unreadable(file: _File, dialects: Sequence[str]) -> None:
    """Raise for a section that the file has, and of which nothing can be known here: an interpolation that nothing
    here resolves, or no mapping."""
    heads = {head for name in dialects if DIALECTS[name].interpolates for head, _ in DIALECTS[name].heads}

    def is_unreadable(path: Path, values: Mapping[str, Any], parent: Mapping[str, Any]) -> Path | None:
        return next(((*path, key) for key in values.keys() & heads if isinstance(values[key], str | list)), None)

    for path in walk(file.resolved.values, is_unreadable):
        written = value_at(file.resolved.values, path)
        problem = (
            f"{written}, which cannot be resolved here; write the section in this file"
            if has_interpolation(written)
            else f"{short(written)}, and takes a mapping of settings"
        )
        place = f"{file.document.name}:{_line_of(file.document, path)}:1"
        raise ConfigError(f"{place}: {'.'.join(map(str, path))} is {problem}")


def _sections_at(file: _File, found: list[tuple[str, Path]], dialect: str | None, at: str) -> list[tuple[str, Path]]:
    document = file.document
    path: Path = tuple(int(part) if part.isdecimal() else part for part in at.split(".") if part)
    try:
        value = value_at(file.resolved.values, path)
    except (KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{document.name}:1:1: there is no {at}") from error
    below = [(name, each) for name, each in found if each[: len(path)] == path]
    if below:
        return below
    around = [(name, each) for name, each in found if each != path and DIALECTS[name].holder(path) == each]
    if around:
        return around
    where = f"{document.name}:{_line_of(document, path)}:1: {at}"
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is not a mapping")
    if dialect is None:
        raise ConfigError(f"{where} could be any system's; say --dialect {', '.join(DIALECTS)}")
    return [(dialect, DIALECTS[dialect].holder(path))]


def _check(file: _File, sections: list[tuple[Dialect, Section]], target: Dialect) -> None:
    """Raise for what cannot be migrated whatever it says."""
    document, environment = file.document, file.resolved.environment
    for _, section in sections:
        above = (document.duplicate(section.path[:depth], key) for depth, key in enumerate(section.path))
        if problem := next(filter(None, above), "") or document.duplicate(section.path):
            raise ConfigError(problem)
        written = value_at(document.values, section.path)
        is_below = any(path[: len(section.path)] == section.path for path in environment)
        if isinstance(written, str) and is_below and referred(document.values, written) is None:
            raise ConfigError(
                f"{document.name}:{document.line_of(section.path)}:1: {section.place} is {written}; migrate what that "
                "holds"
            )
    is_new_file = any(of is not target and not (target.heads and document.takes_entries) for of, _ in sections)
    if is_new_file and len(sections) > 1:
        places = ", ".join(section.place for _, section in sections)
        raise ConfigError(
            f"{document.name}:1:1: a file for {target.target} holds one section, and here are {len(sections)}: "
            f"{places}; choose one with --at"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Where findings are, and what they may show


def _line_of(document: Document, path: Path) -> int:
    """The line of ``path``, or of the nearest above it that is written in the file."""
    for depth in range(len(path), -1, -1):
        try:
            return document.line_of(path[:depth])
        except (KeyError, IndexError):
            continue
    return 1


def _placed(finding: Finding, file: _File, section: Path, after: str) -> Finding:
    """The finding with file and line; a key that stands beside the section is found there."""
    key = tuple(finding.key.split("."))
    places = ((*section[:depth], *key) for depth in range(len(section), -1, -1))
    path = next((each for each in places if has_path(file.resolved.values, each)), None)
    line = _line_of(file.document, section if path is None else path)
    finding = shown(_settled(finding, path, file, after), path, file.resolved.environment, _words())
    return replace(
        finding,
        key=printable(finding.key),
        value=printable(finding.value) if isinstance(finding.value, str) else finding.value,
        target=printable(finding.target),
        reason=printable(finding.reason),
        hint=printable(finding.hint),
        where=f"{file.document.name}:{line}",
    )


@functools.cache
def _words() -> frozenset[str]:
    """What keys take, of all systems."""
    rows = (row for dialect in DIALECTS.values() for row in dialect.rows)
    return frozenset(str(choice).lower() for row in rows for choice in row.takes.choices)


def _settled(finding: Finding, path: Path | None, file: _File, after: str) -> Finding:
    """The finding, with a word where the new text no longer goes by an environment variable that the old one read."""
    if path is None or finding.outcome is not Outcome.EXACT:
        return finding
    before = file.document.original
    read = (text for each, (text, _) in file.resolved.environment.items() if each[: len(path)] == path)
    gone = next((text for text in read if after.count(text) < before.count(text)), None)
    if gone is None:
        return finding
    hint = f"the value that {gone} has here is written out, and the variable is read no more"
    return replace(finding, outcome=Outcome.APPROXIMATE, hint="; ".join(filter(None, (finding.hint, hint))))
