"""Convert the text of a configuration file of any system to FSDP2, with a report. Does not write files.

Called by ``composer-fsdp2 migrate``.
"""

import codecs
import difflib
import re
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from composer_fsdp2.config.findings import Finding, Outcome, format_findings
from composer_fsdp2.config.text import nearest_names, printable, short
from composer_fsdp2.config.value import Value
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.changes import Change, change_section
from composer_fsdp2.migration.dialect import Dialect, Section
from composer_fsdp2.migration.dialects import DIALECTS
from composer_fsdp2.migration.dialects.fingerprints import FOREIGN_KEY_PREFIXES, foreign_system
from composer_fsdp2.migration.dialects.huggingface.deepspeed_file import ReadsFile, with_settings
from composer_fsdp2.migration.documents import Document, nearest_line, open_document, referenced_mapping
from composer_fsdp2.migration.interpolated import has_interpolation, leaves
from composer_fsdp2.migration.interpolation import Resolved, as_written, resolve
from composer_fsdp2.migration.lens import Loss, fault
from composer_fsdp2.migration.paths import Path, has_path, value_at, walk
from composer_fsdp2.migration.references import read_again, with_shared
from composer_fsdp2.migration.targets import TARGETS


class NothingToMigrateError(ConfigError):
    """A file without a section; skipped in a folder."""


class ForeignSystemError(NothingToMigrateError):
    """The file is for a system that is identified but cannot be read.

    In a folder, the file is skipped with a message.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionReport(Value):
    """The findings of one section.

    Args:
        place: The dotted path of the section in the file.
    """

    dialect: str
    to: str
    place: str
    line: int
    findings: tuple[Finding, ...]

    @property
    def blocking(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.outcome.blocks)

    def text(self, *, hidden: Container[Outcome] = ()) -> str:
        """Return the findings as lines below a heading. Findings with a hidden outcome are only counted."""
        head = f"{self.place or 'the whole file'}, line {self.line}: {self.dialect} -> {self.to}"
        return "\n".join([head, format_findings(self.findings, hidden=hidden)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """The result of migrating one file: the new text, and a report for each section.

    Args:
        suffix: The file name suffix for the new text.
        is_new_file: Whether the new text is a separate file, which must not replace the old one.
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
        """Return 0 if no finding requires an action of the user, else 1."""
        return int(bool(self.blocking))

    @property
    def is_changed(self) -> bool:
        return self.after != self.before

    def diff(self) -> str:
        """Return a unified diff; empty if nothing changes."""
        lines = difflib.unified_diff(_lines(self.before), _lines(self.after), fromfile=self.name, tofile=self.name)
        return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)

    def text(self, *, hidden: Container[Outcome] = ()) -> str:
        """Return the report of all sections. Findings with a hidden outcome are only counted."""
        return "\n\n".join(f"{self.name}: {section.text(hidden=hidden)}" for section in self.sections)

    def __str__(self) -> str:
        return self.text()


def _lines(text: str) -> list[str]:
    """Split a text into printable lines that include their line ends."""
    found = re.finditer(r"([^\n]*?)(\r?\n|\Z)", text)
    return [printable(each[1]) + each[2] for each in found if each[0]]


def may_configure(content: bytes) -> bool:
    """Return whether a file may have a section: one of its keys has a prefix in ``Dialect.key_prefixes``.

    A fast first filter for the files of a folder, most of which do not configure sharding.
    """
    is_wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    text = content.decode("utf-16" if is_wide else "utf-8", errors="ignore").lower()
    return _KEY.search(text) is not None


# A key of a section, or an escape sequence, which may encode characters of one.
_KEY_PREFIXES = "|".join(
    sorted({*FOREIGN_KEY_PREFIXES, *(prefix for dialect in DIALECTS.values() for prefix in dialect.key_prefixes)})
)
_KEY = re.compile(rf"""\b(?:{_KEY_PREFIXES})[\w.]{{0,1000}}["']?\s*[:=\]]|\\[xu]""")


def migrate_text(
    text: str,
    name: str = "<text>",
    *,
    to: str | None = None,
    dialect: str | None = None,
    at: str | None = None,
    suffix: str = "",
    read: ReadsFile = lambda path: None,
    allow_unreferenced: bool = True,
) -> Migration:
    """Migrate a text to FSDP2, and report the outcome of each key.

    Args:
        text: Text of a YAML file, or of a TOML file if the name ends so.
        name: File name for messages.
        suffix: Suffix of the file format, where the name has none or another.
        to: Target system, a name of ``TARGETS``; None is the file's own system.
        dialect: Dialect of the sections; None detects it.
        at: Dotted path of the section, or of a value that contains the sections; None finds all.
        read: Reads other files that the text names; by default none.
        allow_unreferenced: Whether to migrate a DeepSpeed file, which other files name, without such a file.
    Raises:
        ConfigError: the file is invalid or has no section (NothingToMigrateError); names file, line and column.
    """
    file = given = _File.of(open_document(text, name, suffix))
    deepspeed = with_settings(file.document, read, to=to, allow_unreferenced=allow_unreferenced)
    if deepspeed is not None:
        suffix = deepspeed.suffix or suffix
        file = _File.of(open_document(deepspeed.text, name, suffix))
    found = _sections(file, dialect, at)
    target = TARGETS[to] if to is not None else _own_system(file, found)
    _check(file, found, target)
    new = _new_text(file, found, target, suffix)
    reports = new.sections
    if file.resolved.public != file.resolved.values:
        public = _new_text(replace(file, is_public=True), found, target, suffix).sections
        reports = tuple(map(_without_secrets, reports, public))
    under_given_keys = deepspeed.findings_of_file if deepspeed is not None else iter
    located = (
        replace(
            report,
            line=nearest_line(given.document, path),
            findings=tuple(under_given_keys(_with_location(each, given, path, new.after) for each in report.findings)),
        )
        for (_, path), report in zip(found, reports, strict=True)
    )
    return replace(
        new,
        before=text,
        after=new.after if new.is_changed else text,
        sections=tuple(located),
        is_new_file=new.is_new_file or (deepspeed is not None and deepspeed.suffix != ""),
    )


def find_sections(
    text: str, name: str = "<text>", *, dialect: str | None = None, at: str | None = None, suffix: str = ""
) -> tuple[Document, list[tuple[Dialect, Section]]]:
    """Return the document of a text, and the sections that ``migrate_text`` finds with the same arguments."""
    file = _File.of(open_document(text, name, suffix))
    return file.document, [(system, file.section(system, path)) for system, path in _sections(file, dialect, at)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A document, and its values with interpolations resolved, for systems that resolve them.

    Args:
        is_public: Whether values of environment variables are omitted.
    """

    document: Document
    resolved: Resolved
    is_public: bool = False

    @classmethod
    def of(cls, document: Document, *, is_public: bool = False) -> "_File":
        resolved = resolve(document.values, _CHOICES, place=f"{document.name}:1:1: ")
        return cls(document=document, resolved=resolved, is_public=is_public)

    def values_for(self, dialect: Dialect) -> Any:
        resolved = self.resolved.public if self.is_public else self.resolved.values
        return resolved if dialect.interpolates else self.document.values

    def section(self, dialect: Dialect, path: Path) -> Section:
        return Section.at(path, self.values_for(dialect))

    def error(self, path: Path, text: str) -> ConfigError:
        """Return an error with the file and line of the path."""
        return ConfigError(f"{self.document.name}:{nearest_line(self.document, path)}:1: {text}")


# The enumerated values of all systems' keys, in lower case.
_CHOICES = frozenset(
    str(choice).lower() for dialect in DIALECTS.values() for row in dialect.rows for choice in row.takes.choices
)


# ---------------------------------------------------------------------------------------------------------------------
# The new text


def _new_text(file: _File, found: Sequence[tuple[Dialect, Path]], target: Dialect, suffix: str) -> Migration:
    """Return the migration with findings as returned by the dialects: without line numbers, and with secret values."""
    document, paths = file.document, [path for _, path in found]
    sections = [file.section(system, path) for system, path in found]
    changes = [
        with_shared(document, section.path, paths, change_section(document, system, section, target))
        for (system, _), section in zip(found, sections, strict=True)
    ]
    separate = next((change for change in changes if change.text is not None), None)
    edits = [edit for change in changes for edit in change.edits]
    after = document.edited(edits) if separate is None or separate.text is None else separate.text
    suffix = target.suffix if separate is not None else f".{(suffix or document.name).rpartition('.')[2]}"
    reread: _File | None = None
    shared: tuple[Finding, ...] = ()
    if separate is not None or after != document.original:
        new, shared = read_again(document, after, suffix, sections, changes)
        reread = _File.of(new, is_public=file.is_public)
    findings = [each.findings_for(_losses(reread, target, each)) for each in changes]
    findings[0] += shared
    reports = (
        SectionReport(
            dialect=system.name,
            to=target.target,
            place=printable(".".join(map(str, path))),
            line=nearest_line(document, path),
            findings=section_findings,
        )
        for (system, path), section_findings in zip(found, findings, strict=True)
    )
    return Migration(
        name=document.name,
        before=document.original,
        after=after,
        sections=tuple(reports),
        suffix=suffix,
        is_new_file=separate is not None,
    )


def _losses(reread: _File | None, target: Dialect, change: Change) -> Sequence[Loss]:
    """Read the new text with the target, and return the fields of the old run that it loses."""
    if change.run is None or reread is None:
        return ()
    values = reread.values_for(target)
    place = next(iter(target.sections(values)), ()) if change.place is None else change.place
    section = Section.at(place, values)
    unknown = [key for key, value in section.given.items() if target.interpolates and has_interpolation(value)]
    section = section.without(unknown)
    reading = target.read(section)
    if reading.run is not None and target.rewrite(section, reading):
        finding = fault("the new text", "", "its own reader does not take it for FSDP2's")
        return (Loss(fields=(), finding=finding, is_fault=True),)
    return target.losses(change.run, reading)


# ---------------------------------------------------------------------------------------------------------------------
# The sections of a file


def _sections(file: _File, dialect: str | None, at: str | None) -> list[tuple[Dialect, Path]]:
    document, dialects = file.document, [DIALECTS[dialect]] if dialect else list(DIALECTS.values())
    other = None if dialect else foreign_system(document.values)
    if other is not None:
        raise ForeignSystemError(
            f"{document.name}:1:1: this is a configuration of {other.name}, which is not read here: {other.advice}"
        )
    found = [(system, path) for system in dialects for path in system.sections(file.values_for(system))]
    is_placed = at is not None and not document.problem
    found = _sections_at(file, found, dialect, str(at)) if is_placed else _outermost(file, found)
    if not found:
        _refuse_unreadable(file, dialects)
        if not document.problem and (key := _misspelt_section(file.values_for(dialects[0]), dialects)):
            raise ForeignSystemError(
                f"{document.name}:{nearest_line(document, (key[0],))}:1: {key[0]} configures "
                f"nothing; did you mean {key[1]}?"
            )
        names = " or ".join(", ".join(system.name for system in dialects).rsplit(", ", 1))
        raise NothingToMigrateError(
            document.problem
            or f"{document.name}:1:1: nothing here configures sharding with keys of {names}; for a section "
            "with another name, give --at PATH and --dialect NAME"
        )
    if document.problem:
        raise ConfigError(document.problem)
    written = [(system, path) for system, path in found if has_path(document.values, path)]
    if not written:  # only in the value of an interpolation
        place = ".".join(map(str, found[0][1]))
        raise file.error(found[0][1], f"{place} stands behind an interpolation; write it out there")
    return written


def _misspelt_section(values: Any, dialects: Sequence[Dialect]) -> tuple[str, str] | None:
    """Return the first top-level mapping whose key resembles the name of an FSDP section, and that name."""
    heads = {head for system in dialects for head, _ in system.heads if "fsdp" in head}
    keys = [key for key, value in values.items() if isinstance(value, Mapping)] if isinstance(values, Mapping) else []
    near = ((key, next(iter(nearest_names(key, heads, 1, likeness=0.85)), None)) for key in keys)
    return next(((str(key), name) for key, name in near if name is not None), None)


def _own_system(file: _File, found: Sequence[tuple[Dialect, Path]]) -> Dialect:
    """Return the system of all sections of a file, which is the default target.

    Raises:
        ConfigError: the file has sections of several systems.
    """
    own, *others = dict.fromkeys(system for system, _ in found)
    if others:
        systems = " and ".join(system.target for system in (own, *others))
        raise file.error(found[0][1], f"here are sections of {systems}; choose one with --at, or say --to")
    return own


def _outermost(file: _File, found: list[tuple[Dialect, Path]]) -> list[tuple[Dialect, Path]]:
    """Drop sections inside a mapping that belongs to another section, whose system reads them as its keys."""
    kept = list(found)
    for inner in found:
        blocks = (system.replaced_block(file.section(system, path)) for system, path in kept if (system, path) != inner)
        if any(each is not None and each.entry and inner[1][: len(each.entry)] == each.entry for each in blocks):
            kept.remove(inner)
    return kept


def _refuse_unreadable(file: _File, dialects: Sequence[Dialect]) -> None:
    """Raise ConfigError if a section is an interpolation that cannot be resolved, or not a mapping."""
    heads = {head for system in dialects if system.interpolates for head, _ in system.heads}

    def is_unreadable(path: Path, values: Mapping[str, Any], parent: Mapping[str, Any]) -> Path | None:
        return next(((*path, key) for key in values.keys() & heads if isinstance(values[key], str | list)), None)

    for path in walk(file.resolved.values, is_unreadable):
        written = value_at(file.resolved.written, path)
        problem = (
            f"{written}, which cannot be resolved here; write the section in this file"
            if has_interpolation(value_at(file.resolved.values, path))
            else f"{short(written)}, and takes a mapping of settings"
        )
        raise file.error(path, f"{'.'.join(map(str, path))} is {problem}")


def _sections_at(
    file: _File, found: list[tuple[Dialect, Path]], dialect: str | None, at: str
) -> list[tuple[Dialect, Path]]:
    path: Path = tuple(int(part) if part.isdecimal() else part for part in at.split(".") if part)
    if not has_path(file.resolved.values, path):
        raise ConfigError(f"{file.document.name}:1:1: there is no {at}")
    below = [(system, each) for system, each in found if each[: len(path)] == path]
    if below or (below := [(system, each) for system, each in found if each != path and system.holder(path) == each]):
        return below
    if not isinstance(value_at(file.resolved.values, path), dict):
        raise file.error(path, f"{at} is not a mapping")
    if dialect is None:
        raise file.error(path, f"{at} could be any system's; say --dialect {', '.join(DIALECTS)}")
    return [(DIALECTS[dialect], DIALECTS[dialect].holder(path))]


def _check(file: _File, found: Sequence[tuple[Dialect, Path]], target: Dialect) -> None:
    """Raise ConfigError for sections that cannot be edited, regardless of their settings, such as those with
    duplicate keys."""
    document = file.document
    for _, path in found:
        above = (document.duplicate(path[:depth], key) for depth, key in enumerate(path))
        if problem := next(filter(None, above), "") or document.duplicate(path):
            raise ConfigError(problem)
        written = value_at(document.values, path)
        if (
            isinstance(written, str)
            and value_at(file.resolved.written, path) != value_at(file.resolved.values, path)
            and referenced_mapping(document.values, written) is None
        ):
            raise file.error(path, f"{'.'.join(map(str, path))} is {written}; migrate what that holds")
    is_new_file = any(system is not target and not (target.heads and document.takes_entries) for system, _ in found)
    if is_new_file and len(found) > 1:
        places = ", ".join(".".join(map(str, path)) for _, path in found)
        raise ConfigError(
            f"{document.name}:1:1: a file for {target.target} holds one section, and here are {len(found)}: "
            f"{places}; choose one with --at"
        )


# ---------------------------------------------------------------------------------------------------------------------
# File, line and public values of findings


_NOT_SHOWN = "it depends on an environment variable, whose value no report has"


def _without_secrets(report: SectionReport, public: SectionReport) -> SectionReport:
    """Return a report of which no finding shows values of environment variables, because a report may be published.

    Args:
        report: The report with these values, which determines the outcomes.
        public: The report of the same section, read without these values.
    """
    public_findings: defaultdict[object, list[Finding]] = defaultdict(list)
    for each in public.findings:
        public_findings[each.key, each.origin, each.outcome].append(each)
    findings = (
        matching.pop(0)
        if (matching := public_findings[each.key, each.origin, each.outcome])
        else replace(each, value="", target="", reason=_NOT_SHOWN, hint="")
        for each in report.findings
    )
    return replace(report, findings=tuple(findings))


def _with_location(finding: Finding, file: _File, section: Path, after: str) -> Finding:
    """Return the finding with file and line. Its key may be outside of the section."""
    key = tuple(finding.key.split("."))
    places = ((*section[:depth], *key) for depth in range(len(section), -1, -1))
    path = next((each for each in places if has_path(file.resolved.values, each)), None)
    if path is not None:
        finding = _with_references(finding, file, path, after)

    def text(each: str) -> str:
        return printable(as_written(each))

    return replace(
        finding,
        key=printable(finding.key),
        value=text(finding.value) if isinstance(finding.value, str) else finding.value,
        target=text(finding.target),
        reason=text(finding.reason),
        hint=text(finding.hint),
        where=f"{file.document.name}:{nearest_line(file.document, section if path is None else path)}",
    )


def _with_references(finding: Finding, file: _File, path: Path, after: str) -> Finding:
    """Return the finding with interpolations as in the file, and a hint on an interpolation that the new text no
    longer has."""
    written, values = (value_at(each, path) for each in (file.resolved.written, file.resolved.values))
    if written != values or finding.reason is _NOT_SHOWN:
        finding = replace(finding, value=written)
    before = file.document.original
    pairs = zip(leaves(written, ()), leaves(values, ()), strict=True)
    read = [text for (text, _), (value, _) in pairs if text is not value]
    lost_reference = next((text for text in read if after.count(text) < before.count(text)), None)
    if lost_reference is None or finding.outcome is not Outcome.EXACT:
        return finding
    hint = f"the value that {lost_reference} has here is written out, and the variable is read no more"
    return replace(finding, outcome=Outcome.APPROXIMATE, hint="; ".join(filter(None, (finding.hint, hint))))
