"""Compute the changes of a file for one of its sections: edits of the text, or the text of a separate file, and
findings."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.config.rows import Row, idle, undecided
from composer_fsdp2.migration.dialect import (
    Dialect,
    Expression,
    MappingEdit,
    Reading,
    Section,
    overlaps,
    splice,
    with_losses,
)
from composer_fsdp2.migration.documents import Document, Edit, NewEntry, entries_of
from composer_fsdp2.migration.documents.yaml import flow_text
from composer_fsdp2.migration.interpolated import has_interpolation
from composer_fsdp2.migration.lens import Loss, covers, decides
from composer_fsdp2.migration.paths import Path, Settings, find_at, has_path
from composer_fsdp2.migration.run import RunConfig
from composer_fsdp2.migration.targets import file_text
from composer_fsdp2.migration.training import is_of_training

_UNRESOLVED = (
    "it cannot be resolved: the value is neither in this file nor in an environment variable set here",
    "set the variable, or write the value",
)
FindingsFor = Callable[[Sequence[Loss]], tuple[Finding, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The changes of a file that convert one section.

    Args:
        findings_for: Returns the findings for the losses of the new text.
        value_edits: The edits' intended changes of the values.
        text: Text of a separate file, where the target's section cannot be part of the source's file.
        values: Values of ``text``.
        removed_paths: Removed paths.
        written_paths: Paths that are new or have a new value.
        run: The run that the section configures, where a text is written for it.
        place: Path of the new section; None for a separate file.
    """

    findings_for: FindingsFor
    edits: tuple[Edit, ...] = ()
    value_edits: tuple[MappingEdit, ...] = ()
    text: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    removed_paths: tuple[Path, ...] = ()
    written_paths: tuple[Path, ...] = ()
    run: RunConfig | None = None
    place: Path | None = None


def change_section(document: Document, source: Dialect, section: Section, target: Dialect) -> Change:
    """Convert a section of a dialect to the target's keys."""
    reading = source.read(section)
    unresolved = [
        each
        for each in reading.findings
        if source.interpolates and has_interpolation(each.value) and not is_of_training(reading.rows.get(each.key))
    ]
    unaffected = tuple(filter(None, (_unaffected_finding(each, source, section, target) for each in unresolved)))
    if len(unaffected) < len(unresolved):
        unaffected = ()
    elif unaffected:
        reading = source.read(section.without(each.key for each in unaffected))
        unresolved = []
    if reading.run is None or unresolved:
        findings = _without_training_keys(
            reading, target.own_findings(reading, ()) if source is target else reading.findings
        )
        unresolved_keys = {each.key for each in unresolved}
        found = (
            *unaffected,
            *(undecided(each, *_UNRESOLVED) if each.key in unresolved_keys else each for each in findings),
        )
        return Change(findings_for=lambda lost: found)
    change = (_change_in_place if source is target else _change_to_target)(document, source, section, reading, target)
    return replace(change, findings_for=partial(_with_unaffected, unaffected, change.findings_for), run=reading.run)


def _with_unaffected(
    unaffected: Sequence[Finding], findings_for: FindingsFor, lost: Sequence[Loss]
) -> tuple[Finding, ...]:
    given = {each.key for each in unaffected}
    return (*unaffected, *(each for each in findings_for(lost) if each.key not in given))


def _unaffected_finding(finding: Finding, source: Dialect, section: Section, target: Dialect) -> Finding | None:
    """Return the finding for a key with an unresolvable interpolation, if its value does not affect the new text;
    else None."""
    row = source.row_of(finding.key)
    if finding.key.split(".")[0] not in section.given:
        return None
    if row is not None and row.outcome is Outcome.UNNEEDED and row.decide is None:
        return idle(finding, "it asks for nothing, whatever its value")
    if source is not target or not source.keeps(finding.key):
        return None
    reason = "kept as it is written: its value is known where it runs, and nothing else here depends on it"
    return replace(finding, outcome=Outcome.EXACT, target="as it is", reason=reason, hint="")


def _without_training_keys(reading: Reading, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Drop findings of training keys, which remain in the file when its system does not change, unless they block."""
    return (each for each in findings if each.outcome.blocks or not is_of_training(reading.rows.get(each.key)))


# ---------------------------------------------------------------------------------------------------------------------
# The same target system


def _change_in_place(
    document: Document, source: Dialect, section: Section, reading: Reading, target: Dialect
) -> Change:
    unknown_keys: dict[Path, str] = {}
    if not target.keeps_files:
        # No release of the system knows these keys, or others with similar names.
        own = (each for each in target.own_findings(reading, ()) if each.origin is Origin.KEY and not each.known)
        keys = (each.key for each in own if each.outcome is Outcome.UNNEEDED)
        unknown_keys = {path: key for key in keys if has_path(section.around, path := section.path_of(key))}
    rewriting = target.rewrite(section, reading)
    edits = _with_removals(unknown_keys, rewriting)
    new_settings = {
        ".".join(map(str, (*each.path[len(section.path) :], key))): new
        for each in edits
        for key, new in each.replacements.items()
    }
    unchanged: dict[str, Settings] = {
        key: [(str(key), value)] for key, value in section.given.items() if key not in new_settings
    }

    def findings_for(lost: Sequence[Loss]) -> tuple[Finding, ...]:
        return tuple(
            replace(each, target="removed", hint="")
            if each.key in unknown_keys.values()
            else _with_keys(each, new_settings | unchanged, target)
            for each in _without_training_keys(reading, target.own_findings(reading, lost if rewriting else ()))
        )

    return Change(
        findings_for=findings_for,
        edits=tuple(edits_of(document, section, edits)),
        value_edits=tuple(edits),
        removed_paths=tuple(
            (*each.path, key) for each in edits for key, new in each.replacements.items() if key not in dict(new)
        ),
        written_paths=tuple(each.path for each in edits),
        place=section.path,
    )


def edits_of(document: Document, section: Section, value_edits: Iterable[MappingEdit]) -> Iterator[Edit]:
    for each in value_edits:
        given = mapping_at(section, each.path)
        yield from document.edit_mapping(each.path, each.replacements, each.additions, given=given)


def _with_removals(unknown_keys: Iterable[Path], edits: Sequence[MappingEdit]) -> list[MappingEdit]:
    """Return the edits, extended to remove the dead keys."""
    by_path = {each.path: each for each in edits}
    rewritten_paths = [(*each.path, key) for each in edits for key in each.replacements]
    for path in unknown_keys:
        if any(path[: len(each)] == each for each in rewritten_paths):
            continue
        parent = path[:-1]
        edit = by_path.get(parent, MappingEdit(path=parent, replacements={}))
        by_path[parent] = replace(edit, replacements={**edit.replacements, str(path[-1]): []})
    return list(by_path.values())


def mapping_at(section: Section, path: Path) -> Mapping[str, Any] | None:
    """Return the mapping at ``path``; None if the file has none, and an edit must add it."""
    values = find_at(section.around, path)
    return values if isinstance(values, Mapping) else None


def _with_keys(finding: Finding, new_settings: Mapping[str, Settings], target: Dialect) -> Finding:
    """Return the finding of a key with its new keys as target, and a hint on how the target reads these without
    composer_fsdp2."""
    new = new_settings.get(finding.key) if finding.origin is Origin.KEY else None
    if finding.outcome.blocks or new is None:
        return finding
    text = ", ".join(
        key if isinstance(value, Mapping) and len(value) > 3 else f"{key}: {flow_text(value)}" for key, value in new
    )
    hints = [hint for hint in (finding.hint, *(_elsewhere(new, target) if finding.asks else ())) if hint]
    return replace(finding, target=text or "removed", hint="; ".join(hints))


def _elsewhere(new: Settings, target: Dialect) -> Iterator[str]:
    """Yield how the target's own FSDP2 treats the new keys. Keys with the same note are listed together."""
    keys: dict[str, list[str]] = {}
    for key, _ in new:
        keys.setdefault(target.elsewhere(key), []).append(key)
    for note, names in keys.items():
        if note:
            yield note if len(new) == 1 else f"{', '.join(names)}: {note}"


# ---------------------------------------------------------------------------------------------------------------------
# Another target system


def _change_to_target(
    document: Document, source: Dialect, section: Section, reading: Reading, target: Dialect
) -> Change:
    assert reading.run is not None
    expression = target.express(reading.run)
    findings_for = partial(_translated_findings, source, target, reading, expression)
    block = source.replaced_block(section)
    if block is None or not target.heads or not document.takes_entries:
        file_name = document.name.replace("\\", "/").rpartition("/")[2]
        values = target.file_values(expression)
        unfinished = tuple(target.unfinished(list(values)))
        return Change(
            findings_for=partial(findings_for, unfinished), text=file_text(target, values, file_name), values=values
        )
    parent, main = block.entry[:-1], str(block.entry[-1])
    present = mapping_at(section, parent) or {}
    read_keys = {finding.key.split(".")[0] for finding in reading.findings if finding.origin is Origin.KEY}
    removed = [
        key
        for key in block.beside
        if key in read_keys and key != main and not _remains_in_file(key, reading, expression)
    ]
    rest = {str(key): value for key, value in present.items() if key not in (main, *removed)}
    reused = {each.key: each.value for each in expression.beside if each.key in rest}
    # The other entries of these mappings stay; those of another library's optimizer are not LLM Foundry's.
    merged_entries = {
        name: _merging_edit(value, (*parent, name), rest[name])
        for name, value in reused.items()
        if isinstance(value, Mapping)
        and isinstance(rest[name], Mapping)
        and (name != "optimizer" or "name" in rest[name])
    }
    new_beside = [each for each in expression.beside if each.key not in reused]
    around, added = splice(new_beside, removed, reading.deciding)
    around |= {name: [(name, value)] for name, value in reused.items() if name not in merged_entries}
    keys = () if block.inner is None else mapping_at(section, block.inner) or ()
    replacements, additions = splice(expression.settings, keys, reading.deciding, block.prefix)
    new = NewEntry(
        heads=target.heads,
        beside=added,
        inner=block.inner,
        replacements=replacements,
        additions=additions,
        around=around,
    )
    beside = [each.key for each in expression.beside]
    findings = (
        *(
            _reused_key_finding(name, rest[name], value, name in merged_entries, target)
            for name, value in reused.items()
        ),
        _rest_of_file_finding(source, target),
        *target.unfinished([*rest, *beside]),
    )
    return Change(
        findings_for=partial(findings_for, findings),
        edits=(
            *document.replace_entry(block.entry, new, given=present),
            *edits_of(document, section, merged_entries.values()),
        ),
        value_edits=(
            MappingEdit(path=parent, replacements={main: entries_of(new), **around}),
            *merged_entries.values(),
        ),
        removed_paths=tuple((*parent, key) for key in (main, *removed)),
        written_paths=tuple((*parent, key) for key in (target.heads[0][0], *beside)),
        place=(*parent, *(name for name, _ in target.heads)),
    )


def _translated_findings(
    source: Dialect,
    target: Dialect,
    reading: Reading,
    expression: Expression,
    writing_findings: Sequence[Finding],
    lost: Sequence[Loss],
) -> tuple[Finding, ...]:
    """Return the findings of a section converted to another system's keys."""
    findings = [each for each in reading.findings if not _remains_in_file(each.key, reading, expression)]
    if not target.keeps_implicit:  # its losses report its implicit settings; hints of a reading are composer_fsdp2's
        others = (each for each in findings if each.origin is not Origin.IMPLICIT or each.outcome is not Outcome.EXACT)
        findings = [each if each.outcome.blocks else replace(each, hint="") for each in others]
    own = {each.key: decides(reading.rows[each.key]) for each in findings if source.is_own(each)}
    of_own = [name for names in own.values() for name in names]
    lost = [
        replace(each, finding=replace(_dropped_finding(each.finding, target), origin=Origin.LACKING), is_fault=False)
        if each.is_fault and covers(of_own, next(iter(each.fields), ""))
        else each
        for each in lost
    ]
    merged, rest = with_losses(findings, lost, reading, target)
    new_settings = _new_settings_by_key(reading, expression)
    return (
        *(
            _dropped_finding(each, target) if own.get(each.key) == () else _with_keys(each, new_settings, target)
            for each in merged
        ),
        *rest,
        *writing_findings,
    )


def _remains_in_file(key: str, reading: Reading, expression: Expression) -> bool:
    """Return whether a key is a training key that the target lacks. It remains in the file, and is reported as lost."""
    row = reading.rows.get(key)
    settings = (*expression.settings, *expression.beside)
    return is_of_training(row) and not any(overlaps(decides(row), each.fields) for each in settings)


def _new_settings_by_key(reading: Reading, expression: Expression) -> dict[str, list[tuple[str, Any]]]:
    """Map each old key that has an effect to the new keys that set the same field of the run."""
    effective_keys = {each.key for each in reading.findings if each.asks and not each.outcome.blocks}
    keys: dict[str, Row] = {key: row for key, row in reading.deciding.items() if key in effective_keys}
    new_settings: dict[str, list[tuple[str, Any]]] = {}
    for setting in (*expression.beside, *expression.settings):
        if (key := setting.matching_key(keys)) is not None:
            new_settings.setdefault(key, []).append((setting.key, setting.value))
    return new_settings


def _dropped_finding(finding: Finding, target: Dialect) -> Finding:
    """Return the finding for a key that only the source system has. The run trains without its effect."""
    reason = f"a key of composer_fsdp2's own, and {target.title.split(':')[0]} has none like it"
    return replace(finding, outcome=Outcome.APPROXIMATE, target="", reason=reason, hint="")


def _rest_of_file_finding(source: Dialect, target: Dialect) -> Finding:
    """Return the finding for the rest of a file that is converted to another system: the source system no longer
    reads it."""
    source_title, target_title = (each.title.split(":")[0] for each in (source, target))
    return Finding(
        key="the rest of the file",
        value="",
        outcome=Outcome.APPROXIMATE,
        target="as it is",
        reason=f"the file has {target_title}'s keys for sharding now, and none of {source_title}, whose other keys are "
        "left for you to carry over",
        hint=f"--to {source.target} writes the FSDP2 of {source_title} in its place",
        origin=Origin.WRITING,
    )


def _merging_edit(entries: Mapping[str, Any], path: Path, present: Mapping[str, Any]) -> MappingEdit:
    """Return an edit that adds entries to a mapping; entries with the same key are replaced."""
    return MappingEdit(
        path=path,
        replacements={key: [(key, value)] for key, value in entries.items() if key in present},
        additions=[(key, value) for key, value in entries.items() if key not in present],
    )


def _reused_key_finding(key: str, present: Any, value: Any, has_more: bool, target: Dialect) -> Finding:
    """Return the finding for an existing key outside the section that the source system ignored and the target reads.

    Args:
        has_more: Whether its value is a mapping in which other entries remain.
    """
    is_same = has_more or present == value
    return Finding(
        key=key,
        value=present,
        outcome=Outcome.EXACT if is_same else Outcome.APPROXIMATE,
        target=f"{key}: {flow_text(value)}",
        reason=f"it stood there already, and is a key of {target.title.split(':')[0]}'s: it "
        f"{'has' if is_same else 'says'} now what the section asks for",
        origin=Origin.WRITING,
    )
