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
    meets,
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
Tell = Callable[[Sequence[Loss]], tuple[Finding, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The changes of a file that convert one section.

    Args:
        tell: Called with the fields of the run that the new text loses; returns all findings of the section.
        meant: The edits as changes of the parsed values, to verify the new text.
        text: The text of a separate file, if the file cannot contain a section of the target; else None.
        values: The values in ``text``.
        gone: Paths that are removed.
        come: Paths that are new or have a new value.
        run: The run that the section configures; None if it is not converted.
        place: The path of the new section; None for a separate file.
    """

    tell: Tell
    edits: tuple[Edit, ...] = ()
    meant: tuple[MappingEdit, ...] = ()
    text: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    gone: tuple[Path, ...] = ()
    come: tuple[Path, ...] = ()
    run: RunConfig | None = None
    place: Path | None = None


def change_section(document: Document, of: Dialect, section: Section, target: Dialect) -> Change:
    """Convert a section of a dialect to the target's keys."""
    reading = of.read(section)
    unresolved = [
        each
        for each in reading.findings
        if of.interpolates and has_interpolation(each.value) and not is_of_training(reading.rows.get(each.key))
    ]
    passing = tuple(filter(None, (_passing(each, of, section, target) for each in unresolved)))
    if len(passing) < len(unresolved):
        passing = ()
    elif passing:
        reading = of.read(section.without(each.key for each in passing))
        unresolved = []
    if reading.run is None or unresolved:
        told = _of_sharding(reading, target.own_findings(reading, ()) if of is target else reading.findings)
        is_open = {each.key for each in unresolved}
        found = (*passing, *(undecided(each, *_UNRESOLVED) if each.key in is_open else each for each in told))
        return Change(tell=lambda lost: found)
    change = (_rewritten if of is target else _translated)(document, of, section, reading, target)
    return replace(change, tell=partial(_with_passing, passing, change.tell), run=reading.run)


def _with_passing(passing: Sequence[Finding], tell: Tell, lost: Sequence[Loss]) -> tuple[Finding, ...]:
    given = {each.key for each in passing}
    return (*passing, *(each for each in tell(lost) if each.key not in given))


def _passing(finding: Finding, of: Dialect, section: Section, target: Dialect) -> Finding | None:
    """Return the finding for a key with an unresolvable interpolation, if its value does not affect the new text;
    else None."""
    row = of.row_of(finding.key)
    if finding.key.split(".")[0] not in section.given:
        return None
    if row is not None and row.outcome is Outcome.UNNEEDED and row.decide is None:
        return idle(finding, "it asks for nothing, whatever its value")
    if of is not target or not of.keeps(finding.key):
        return None
    reason = "kept as it is written: its value is known where it runs, and nothing else here depends on it"
    return replace(finding, outcome=Outcome.EXACT, target="as it is", reason=reason, hint="")


def _of_sharding(reading: Reading, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Drop findings of training keys, which remain in the file when its system does not change, unless they block."""
    return (each for each in findings if each.outcome.blocks or not is_of_training(reading.rows.get(each.key)))


# ---------------------------------------------------------------------------------------------------------------------
# The same target system


def _rewritten(document: Document, of: Dialect, section: Section, reading: Reading, target: Dialect) -> Change:
    dead: dict[Path, str] = {}
    if not target.keeps_files:
        # No release of the system knows these keys, or others with similar names.
        own = (each for each in target.own_findings(reading, ()) if each.origin is Origin.KEY and not each.known)
        keys = (each.key for each in own if each.outcome is Outcome.UNNEEDED)
        dead = {path: key for key in keys if has_path(section.around, path := section.path_of(key))}
    rewriting = target.rewrite(section, reading)
    edits = _removing(dead, rewriting)
    became = {
        ".".join(map(str, (*each.path[len(section.path) :], key))): new
        for each in edits
        for key, new in each.replacements.items()
    }
    unchanged: dict[str, Settings] = {
        key: [(str(key), value)] for key, value in section.given.items() if key not in became
    }

    def tell(lost: Sequence[Loss]) -> tuple[Finding, ...]:
        return tuple(
            replace(each, target="removed", hint="")
            if each.key in dead.values()
            else _with_keys(each, became | unchanged, target)
            for each in _of_sharding(reading, target.own_findings(reading, lost if rewriting else ()))
        )

    return Change(
        tell=tell,
        edits=tuple(edits_of(document, section, edits)),
        meant=tuple(edits),
        gone=tuple(
            (*each.path, key) for each in edits for key, new in each.replacements.items() if key not in dict(new)
        ),
        come=tuple(each.path for each in edits),
        place=section.path,
    )


def edits_of(document: Document, section: Section, meant: Iterable[MappingEdit]) -> Iterator[Edit]:
    for each in meant:
        given = mapping_at(section, each.path)
        yield from document.edit_mapping(each.path, each.replacements, each.additions, given=given)


def _removing(dead: Iterable[Path], edits: Sequence[MappingEdit]) -> list[MappingEdit]:
    """Return the edits, extended to remove the dead keys."""
    by_path = {each.path: each for each in edits}
    written_anew = [(*each.path, key) for each in edits for key in each.replacements]
    for path in dead:
        if any(path[: len(each)] == each for each in written_anew):
            continue
        parent = path[:-1]
        edit = by_path.get(parent, MappingEdit(path=parent, replacements={}))
        by_path[parent] = replace(edit, replacements={**edit.replacements, str(path[-1]): []})
    return list(by_path.values())


def mapping_at(section: Section, path: Path) -> Mapping[str, Any] | None:
    """Return the mapping at ``path``; None if the file has none, and an edit must add it."""
    values = find_at(section.around, path)
    return values if isinstance(values, Mapping) else None


def _with_keys(finding: Finding, became: Mapping[str, Settings], target: Dialect) -> Finding:
    """Return the finding of a key with its new keys as target, and a hint on how the target reads these without
    composer_fsdp2."""
    new = became.get(finding.key) if finding.origin is Origin.KEY else None
    if finding.outcome.blocks or new is None:
        return finding
    words = ", ".join(
        key if isinstance(value, Mapping) and len(value) > 3 else f"{key}: {flow_text(value)}" for key, value in new
    )
    hints = [hint for hint in (finding.hint, *(_elsewhere(new, target) if finding.asks else ())) if hint]
    return replace(finding, target=words or "removed", hint="; ".join(hints))


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


def _translated(document: Document, of: Dialect, section: Section, reading: Reading, target: Dialect) -> Change:
    assert reading.run is not None
    expression = target.express(reading.run)
    tell = partial(_told, of, target, reading, expression)
    block = of.replaced_block(section)
    if block is None or not target.heads or not document.takes_entries:
        source = document.name.replace("\\", "/").rpartition("/")[2]
        values = target.file_values(expression)
        unfinished = tuple(target.unfinished(list(values)))
        return Change(tell=partial(tell, unfinished), text=file_text(target, values, source), values=values)
    parent, main = block.entry[:-1], str(block.entry[-1])
    present = mapping_at(section, parent) or {}
    told = {finding.key.split(".")[0] for finding in reading.findings if finding.origin is Origin.KEY}
    going = [key for key in block.beside if key in told and key != main and not _stays(key, reading, expression)]
    rest = {str(key): value for key, value in present.items() if key not in (main, *going)}
    taken = {each.key: each.value for each in expression.beside if each.key in rest}
    # The other entries of these mappings stay; those of another library's optimizer are not LLM Foundry's.
    within = {
        name: _adding(value, (*parent, name), rest[name])
        for name, value in taken.items()
        if isinstance(value, Mapping)
        and isinstance(rest[name], Mapping)
        and (name != "optimizer" or "name" in rest[name])
    }
    new_beside = [each for each in expression.beside if each.key not in taken]
    around, added = splice(new_beside, going, reading.deciding)
    around |= {name: [(name, value)] for name, value in taken.items() if name not in within}
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
        *(_taken(name, rest[name], value, name in within, target) for name, value in taken.items()),
        _left(of, target),
        *target.unfinished([*rest, *beside]),
    )
    return Change(
        tell=partial(tell, findings),
        edits=(
            *document.replace_entry(block.entry, new, given=present),
            *edits_of(document, section, within.values()),
        ),
        meant=(MappingEdit(path=parent, replacements={main: entries_of(new), **around}), *within.values()),
        gone=tuple((*parent, key) for key in (main, *going)),
        come=tuple((*parent, key) for key in (target.heads[0][0], *beside)),
        place=(*parent, *(name for name, _ in target.heads)),
    )


def _told(
    of: Dialect,
    target: Dialect,
    reading: Reading,
    expression: Expression,
    beside: Sequence[Finding],
    lost: Sequence[Loss],
) -> tuple[Finding, ...]:
    """Return the findings of a section converted to another system's keys."""
    told = [each for each in reading.findings if not _stays(each.key, reading, expression)]
    if not target.keeps_implicit:  # its losses report its implicit settings; hints of a reading are composer_fsdp2's
        others = (each for each in told if each.origin is not Origin.IMPLICIT or each.outcome is not Outcome.EXACT)
        told = [each if each.outcome.blocks else replace(each, hint="") for each in others]
    own = {each.key: decides(reading.rows[each.key]) for each in told if of.is_own(each)}
    of_own = [name for names in own.values() for name in names]
    lost = [
        replace(each, finding=replace(_dropped(each.finding, target), origin=Origin.LACKING), is_fault=False)
        if each.is_fault and covers(of_own, next(iter(each.fields), ""))
        else each
        for each in lost
    ]
    once, rest = with_losses(told, lost, reading, target)
    became = _became(reading, expression)
    return (
        *(_dropped(each, target) if own.get(each.key) == () else _with_keys(each, became, target) for each in once),
        *rest,
        *beside,
    )


def _stays(key: str, reading: Reading, expression: Expression) -> bool:
    """Return whether a key is a training key that the target lacks. It remains in the file, and is reported as lost."""
    row = reading.rows.get(key)
    settings = (*expression.settings, *expression.beside)
    return is_of_training(row) and not any(meets(decides(row), each.fields) for each in settings)


def _became(reading: Reading, expression: Expression) -> dict[str, list[tuple[str, Any]]]:
    """Map each old key that has an effect to the new keys that set the same field of the run."""
    asking = {each.key for each in reading.findings if each.asks and not each.outcome.blocks}
    keys: dict[str, Row] = {key: row for key, row in reading.deciding.items() if key in asking}
    became: dict[str, list[tuple[str, Any]]] = {}
    for setting in (*expression.beside, *expression.settings):
        if (key := setting.place_in(keys)) is not None:
            became.setdefault(key, []).append((setting.key, setting.value))
    return became


def _dropped(finding: Finding, target: Dialect) -> Finding:
    """Return the finding for a key that only the source system has. The run trains without its effect."""
    reason = f"a key of composer_fsdp2's own, and {target.title.split(':')[0]} has none like it"
    return replace(finding, outcome=Outcome.APPROXIMATE, target="", reason=reason, hint="")


def _left(of: Dialect, target: Dialect) -> Finding:
    """Return the finding for the rest of a file that is converted to another system: the source system no longer
    reads it."""
    whose, new = (each.title.split(":")[0] for each in (of, target))
    return Finding(
        key="the rest of the file",
        value="",
        outcome=Outcome.APPROXIMATE,
        target="as it is",
        reason=f"the file has {new}'s keys for sharding now, and none of {whose}, whose other keys are left for you "
        "to carry over",
        hint=f"--to {of.target} writes the FSDP2 of {whose} in its place",
        origin=Origin.WRITING,
    )


def _adding(entries: Mapping[str, Any], path: Path, present: Mapping[str, Any]) -> MappingEdit:
    """Return an edit that adds entries to a mapping; entries with the same key are replaced."""
    return MappingEdit(
        path=path,
        replacements={key: [(key, value)] for key, value in entries.items() if key in present},
        additions=[(key, value) for key, value in entries.items() if key not in present],
    )


def _taken(key: str, present: Any, value: Any, has_more: bool, target: Dialect) -> Finding:
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
