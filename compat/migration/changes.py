"""What is to be changed in a file for one of its sections: edits of its text, or a text of its own, and findings."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer_fsdp2.compat.dialects import DIALECTS, Section
from composer_fsdp2.compat.dialects.base import Entry, Expression, Frame, MappingEdit, Part, Path, Reading, splice
from composer_fsdp2.compat.migration.interpolation import has_interpolation
from composer_fsdp2.compat.migration.targets import Target
from composer_fsdp2.compat.migration.text_edit import Edit
from composer_fsdp2.compat.migration.toml_edit import TomlDocument, edit_table
from composer_fsdp2.compat.migration.yaml_document import Document, is_mapping
from composer_fsdp2.compat.migration.yaml_edit import edit_mapping, flow_text, rebuild_entry, stands_here
from composer_fsdp2.findings import ASKS_FOR_NOTHING, OFF, Finding, Outcome

__all__ = ["Change", "change_section"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What one section needs.

    Args:
        text: A whole file, where the target cannot stand in the source's.
        gone: Paths that are no longer there.
        come: Paths that were not there, or hold something else.
    """

    findings: tuple[Finding, ...]
    edits: tuple[Edit, ...] = ()
    text: str | None = None
    gone: tuple[Path, ...] = ()
    come: tuple[Path, ...] = ()


def change_section(document: Document | TomlDocument, of: str, section: Section, target: Target) -> Change:
    """The section in the target's words.

    Args:
        of: The name of its dialect.
    """
    reading = DIALECTS[of].read(section)
    if reading.run is None or any(has_interpolation(finding.value) for finding in reading.findings):
        told = target.words.own_findings(reading) if of == target.dialect else reading.findings
        return Change(findings=tuple(_unresolved(each) if has_interpolation(each.value) else each for each in told))
    if of == target.dialect:
        return _rewritten(document, section, reading, target)
    return _translated(document, DIALECTS[of].frame(section), section, reading, target)


def _unresolved(finding: Finding) -> Finding:
    return dataclasses.replace(
        finding,
        outcome=Outcome.NEEDS_DECISION,
        target="",
        reason="what it stands for is not in this file, nor in an environment variable that is set here",
        hint="set the variable, or write the value",
    )


# ---------------------------------------------------------------------------------------------------------------------
# In the same system's words


def _rewritten(document: Document | TomlDocument, section: Section, reading: Reading, target: Target) -> Change:
    words = target.words
    mapping_edits = words.rewrite(section, reading)
    edits: list[Edit] = []
    for each in mapping_edits:
        if isinstance(document, TomlDocument):
            edits += edit_table(document, each.path, each.replacements, each.additions)
        else:
            said = _below(section, each.path)
            edits += edit_mapping(document, each.path, each.replacements, each.additions, said=said)
    became = {
        ".".join(map(str, (*each.path[len(section.path) :], key))): new
        for each in mapping_edits
        for key, new in each.replacements.items()
    }
    unchanged = {key: [(str(key), value)] for key, value in section.said.items() if key not in became}
    findings = (_with_words(finding, became | unchanged, target) for finding in words.own_findings(reading))
    return Change(
        findings=tuple(findings),
        edits=tuple(edits),
        gone=tuple(_gone(mapping_edits)),
        come=tuple(each.path for each in mapping_edits),
    )


def _below(section: Section, path: Path) -> Mapping[str, Any] | None:
    values: Any = section.around
    for key in path:
        values = values.get(key) if isinstance(values, Mapping) else values[key]
    return values if isinstance(values, Mapping) else None


def _gone(edits: Iterable[MappingEdit]) -> Iterable[Path]:
    for each in edits:
        for key, new in each.replacements.items():
            if key not in dict(new):
                yield (*each.path, key)


def _with_words(finding: Finding, became: Mapping[str, Sequence[tuple[str, Any]]], target: Target) -> Finding:
    """With the words that stand in the file now, and what their system makes of them without composer_fsdp2."""
    new = became.get(finding.key)
    if finding.outcome.blocks or new is None:
        return finding
    words = ", ".join(
        key if isinstance(value, Mapping) and len(value) > 3 else f"{key}: {flow_text(value)}" for key, value in new
    )
    asks = target.elsewhere and finding.reason not in (OFF, ASKS_FOR_NOTHING)
    notes = [target.elsewhere.get(key, target.elsewhere[""]) for key, _ in new] if asks else []
    hints = [hint for hint in (finding.hint, *dict.fromkeys(notes)) if hint]
    return dataclasses.replace(finding, target=words or "removed", hint="; ".join(hints))


# ---------------------------------------------------------------------------------------------------------------------
# In another system's words


def _translated(
    document: Document | TomlDocument, frame: Frame, section: Section, reading: Reading, target: Target
) -> Change:
    assert reading.run is not None
    expression = target.words.express(reading.run)
    by_part: dict[Part, list[Entry]] = {}
    for entry in (*expression.beside, *expression.entries):
        by_part.setdefault(entry.part, []).append(entry)
    became = {
        key: [(entry.key, entry.value) for entry in by_part[part]]
        for part, key in _deciding(reading).items()
        if part in by_part
    }
    told = [finding for finding in reading.findings if target.name == "composer" or not _is_kept_unsaid(finding)]
    findings = (*(_with_words(finding, became, target) for finding in told), *expression.findings)
    if target.is_file or isinstance(document, TomlDocument):
        source = document.name.replace("\\", "/").rpartition("/")[2]
        return Change(findings=findings, text=target.text(expression, source))
    edits, beside = _framed(document, frame, section, reading, target, expression)
    parent = frame.entry[:-1]
    return Change(
        findings=findings,
        edits=tuple(edits),
        gone=(frame.entry, *((*parent, key) for key in beside)),
        come=tuple((*parent, key) for key in (target.heads[0][0], *(entry.key for entry in expression.beside))),
    )


def _deciding(reading: Reading) -> dict[Part, str]:
    """By part of the run the key that decided it: the most important that asks for something."""
    asking = {finding.key for finding in reading.findings if finding.target and not finding.outcome.blocks}
    first: dict[Part, str] = {}
    for key, part in reading.parts.items():
        if key in asking and part is not Part.EXTRA:
            first.setdefault(part, key)
    return first


def _is_kept_unsaid(finding: Finding) -> bool:
    """Whether composer_fsdp2 keeps it without being told; of what another target does, its own findings tell."""
    return finding.key.startswith("(unsaid)") and finding.outcome is Outcome.EXACT


def _framed(
    document: Document, frame: Frame, section: Section, reading: Reading, target: Target, expression: Expression
) -> tuple[list[Edit], list[str]]:
    """Edits that put the target's words into the frame, and the keys beside it that go."""
    *above, main = frame.entry
    parent, inner = tuple(above), frame.inner
    told = {finding.key.split(".")[0] for finding in reading.findings}
    beside = [key for key in frame.beside if key in told and key != main]
    replaced, added = splice(expression.beside, beside, reading.parts)
    keys = list(_below(section, inner) or ()) if inner is not None else []
    replacements, additions = splice(expression.entries, keys, reading.parts, frame.prefix)
    if _is_plain(document, frame):
        rebuilt = rebuild_entry(
            document,
            frame.entry,
            target.heads,
            added,
            inner=inner,
            replacements=replacements,
            additions=additions,
        )
        return [rebuilt, *edit_mapping(document, parent, replaced)], beside
    nested: dict[str, Any] = dict((*(each for new in replacements.values() for each in new), *additions))
    for name, first in reversed(target.heads):
        nested = {name: {**dict(first), **nested}}
    whole = {str(main): [*nested.items(), *added], **replaced}
    return edit_mapping(document, parent, whole, said=_below(section, parent)), beside


def _is_plain(document: Document, frame: Frame) -> bool:
    """Whether all of it is written where it is, in lines of its own."""
    parent = document.node(frame.entry[:-1])
    is_block = is_mapping(parent) and not parent.flow_style
    return is_block and all(stands_here(document, path) for path in (frame.entry, frame.inner) if path is not None)
