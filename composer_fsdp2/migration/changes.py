"""Changes to a file for one of its sections: edits of its text or a separate text, and findings."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.config.rows import Row, idle
from composer_fsdp2.migration.dialect import (
    Dialect,
    Expression,
    MappingEdit,
    Reading,
    ReplacedBlock,
    Section,
    meets,
    splice,
    with_losses,
)
from composer_fsdp2.migration.documents import Document, Edit, NewEntry, entries_of
from composer_fsdp2.migration.documents.yaml import flow_text
from composer_fsdp2.migration.interpolated import has_interpolation
from composer_fsdp2.migration.lens import Loss, covers, decides
from composer_fsdp2.migration.paths import Path, Settings, has_path, value_at
from composer_fsdp2.migration.run import RunConfig
from composer_fsdp2.migration.targets import file_text
from composer_fsdp2.migration.training import is_of_training

Tell = Callable[[Sequence[Loss]], tuple[Finding, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Changes for one section.

    Args:
        tell: Returns the findings for the losses of the new text.
        meant: The edits' intended changes of the values.
        text: Text of a separate file, where the target's section cannot be part of the source's file.
        values: Values of ``text``.
        gone: Removed paths.
        come: Paths that are new or have a new value.
        run: The run that the section configures, where a text is written for it.
        place: Path of the new section; None for a separate file.
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
    passing: tuple[Finding, ...] = ()
    if unresolved and all(_passes(each, of, section, target) for each in unresolved):
        passing = tuple(_passing(each, of) for each in unresolved)
        reading, unresolved = of.read(section.without(each.key for each in passing)), []
    if reading.run is None or unresolved:
        told = _of_sharding(reading, target.own_findings(reading, ()) if of is target else reading.findings)
        is_open = {each.key for each in unresolved}
        found = (*passing, *(_unresolved(each) if each.key in is_open else each for each in told))
        return Change(tell=lambda lost: found)
    change = (_rewritten if of is target else _translated)(document, of, section, reading, target)
    return replace(change, tell=partial(_with_passing, passing, change.tell), run=reading.run)


def _with_passing(passing: Sequence[Finding], tell: Tell, lost: Sequence[Loss]) -> tuple[Finding, ...]:
    given = {each.key for each in passing}
    return (*passing, *(each for each in tell(lost) if each.key not in given))


def _passes(finding: Finding, of: Dialect, section: Section, target: Dialect) -> bool:
    """Return whether the new text does not depend on a key's value, an interpolation that cannot be resolved here."""
    is_inside = finding.key.split(".")[0] in section.given
    return is_inside and (_asks_never(finding, of) or (of is target and of.keeps(finding.key)))


def _asks_never(finding: Finding, of: Dialect) -> bool:
    row = of.row_of(finding.key)
    return row is not None and row.outcome is Outcome.UNNEEDED and row.decide is None


def _passing(finding: Finding, of: Dialect) -> Finding:
    if _asks_never(finding, of):
        return idle(finding, "it asks for nothing, whatever its value")
    reason = "kept as it is written: its value is known where it runs, and nothing else here depends on it"
    return replace(finding, outcome=Outcome.EXACT, target="as it is", reason=reason, hint="")


def _of_sharding(reading: Reading, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Drop findings for training keys, which remain in a file that stays in its system, unless they block."""
    return (each for each in findings if each.outcome.blocks or not is_of_training(reading.rows.get(each.key)))


def _unresolved(finding: Finding) -> Finding:
    return replace(
        finding,
        outcome=Outcome.NEEDS_DECISION,
        target="",
        reason="it cannot be resolved: the value is neither in this file nor in an environment variable set here",
        hint="set the variable, or write the value",
    )


# ---------------------------------------------------------------------------------------------------------------------
# The same target system


def _rewritten(document: Document, of: Dialect, section: Section, reading: Reading, target: Dialect) -> Change:
    dead: dict[Path, str] = {}
    if not target.keeps_files:
        keys = (each.key for each in target.own_findings(reading, ()) if _is_dead(each))
        dead = {path: key for key in keys if (path := _path_of(key, section))}
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
        gone=tuple(_gone(edits)),
        come=tuple(each.path for each in edits),
        place=section.path,
    )


def edits_of(document: Document, section: Section, meant: Iterable[MappingEdit]) -> Iterator[Edit]:
    for each in meant:
        given = mapping_at(section, each.path)
        yield from document.edit_mapping(each.path, each.replacements, each.additions, given=given)


def _is_dead(finding: Finding) -> bool:
    """Return whether no release of the system knows the key or one with a similar name."""
    return finding.origin is Origin.KEY and finding.outcome is Outcome.UNNEEDED and not finding.known


def _path_of(key: str, section: Section) -> Path | None:
    """Return the path in the file of a report's key, which is relative to the section or to the top of the file.

    None for a key that is not a string, which is not removed.
    """
    for above in (section.path, ()):
        *outer, last = key.split(".")
        for parent, name in (((*above,), key), ((*above, *outer), last)):
            values = mapping_at(section, parent)
            if values is not None and name in values:
                return (*parent, name)
    return None


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
    """Return the mapping at the path; None if the file has none, and an edit adds it."""
    values = value_at(section.around, path) if has_path(section.around, path) else None
    return values if isinstance(values, Mapping) else None


def _gone(edits: Iterable[MappingEdit]) -> Iterable[Path]:
    for each in edits:
        for key, new in each.replacements.items():
            if key not in dict(new):
                yield (*each.path, key)


def _with_keys(finding: Finding, became: Mapping[str, Settings], target: Dialect) -> Finding:
    """Return the finding with the new keys as its target, and a hint on how their system reads them without
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
    """Yield how the target's own FSDP2 treats the new keys: each sentence once, with its keys if there are several."""
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
    block = of.replaced_block(section)
    if block is None or not target.heads or not document.takes_entries:
        source = document.name.replace("\\", "/").rpartition("/")[2]
        values = target.file_values(expression)
        text = file_text(target, values, source)
        beside = tuple(target.unfinished(list(values)))
        return Change(tell=partial(_told, of, target, reading, expression, beside), text=text, values=values)
    replacement = _replacement(block, section, reading, target, expression)
    parent = block.entry[:-1]
    edits = [
        *document.replace_entry(block.entry, replacement.new, given=mapping_at(section, parent)),
        *edits_of(document, section, replacement.within),
    ]
    into = {str(block.entry[-1]): entries_of(replacement.new), **replacement.new.around}
    rest = [str(key) for key in mapping_at(section, parent) or () if key not in (block.entry[-1], *replacement.going)]
    unfinished = target.unfinished([*rest, *(each.key for each in expression.beside)])
    beside = (*_taken(replacement, target), _left(of, target), *unfinished)
    return Change(
        tell=partial(_told, of, target, reading, expression, beside),
        edits=tuple(edits),
        meant=(MappingEdit(path=parent, replacements=into), *replacement.within),
        gone=(block.entry, *((*parent, key) for key in replacement.going)),
        come=tuple((*parent, key) for key in (target.heads[0][0], *(each.key for each in expression.beside))),
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
    # The target's losses report its implicit settings, unless it keeps those of FSDP1.
    told = [each for each in reading.findings if target.keeps_implicit or not _is_kept(each)]
    told = [each for each in told if not _stays(each.key, reading, expression)]
    if not target.keeps_implicit:  # hints of a reading are about composer_fsdp2
        told = [each if each.outcome.blocks else replace(each, hint="") for each in told]
    own = {each.key: decides(reading.rows[each.key]) for each in told if of.is_own(each)}
    of_own = [name for names in own.values() for name in names]
    lost = [
        _dropped_with(each, target) if each.is_fault and covers(of_own, next(iter(each.fields), "")) else each
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
    """Return whether a key is a training key that the target lacks: it stays in the file, and a loss reports it."""
    row = reading.rows.get(key)
    settings = (*expression.settings, *expression.beside)
    return is_of_training(row) and not any(meets(decides(row), each.fields) for each in settings)


def _became(reading: Reading, expression: Expression) -> dict[str, list[tuple[str, Any]]]:
    """Map each old key that has an effect to the target's settings that decide the same field."""
    asking = {each.key for each in reading.findings if each.asks and not each.outcome.blocks}
    keys: dict[str, Row] = {key: row for key, row in reading.deciding.items() if key in asking}
    became: dict[str, list[tuple[str, Any]]] = {}
    for setting in (*expression.beside, *expression.settings):
        if (key := setting.place_in(keys)) is not None:
            became.setdefault(key, []).append((setting.key, setting.value))
    return became


def _dropped(finding: Finding, target: Dialect) -> Finding:
    """Return the finding for a key that only its own system has; the run trains without its effect."""
    reason = f"a key of composer_fsdp2's own, and {target.title.split(':')[0]} has none like it"
    return replace(finding, outcome=Outcome.APPROXIMATE, target="", reason=reason, hint="")


def _dropped_with(loss: Loss, target: Dialect) -> Loss:
    return replace(loss, finding=replace(_dropped(loss.finding, target), origin=Origin.LACKING), is_fault=False)


def _is_kept(finding: Finding) -> bool:
    """Return whether this is an implicit setting that composer_fsdp2 keeps by default."""
    return finding.origin is Origin.IMPLICIT and finding.outcome is Outcome.EXACT


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replacement:
    """The target's keys that replace a block.

    Args:
        going: Keys beside the block that are removed with it.
        taken: Old and new value of each of the target's keys that the file already contained.
        within: Edits of those keys in ``taken`` that are mappings, whose other entries stay.
    """

    new: NewEntry
    going: Sequence[str]
    taken: Mapping[str, tuple[Any, Any]]
    within: tuple[MappingEdit, ...]


def _replacement(
    block: ReplacedBlock, section: Section, reading: Reading, target: Dialect, expression: Expression
) -> _Replacement:
    *parent, main = block.entry
    told = {finding.key.split(".")[0] for finding in reading.findings if finding.origin is Origin.KEY}
    going = [key for key in block.beside if key in told and key != main and not _stays(key, reading, expression)]
    around, added = splice(expression.beside, going, reading.deciding)
    present = mapping_at(section, tuple(parent)) or {}
    come = dict([*(each for into in around.values() for each in into), *added])
    taken = {name: value for name, value in come.items() if name in present and name not in (main, *going)}
    within = {
        name
        for name, value in taken.items()
        if isinstance(value, Mapping) and isinstance(present[name], Mapping)
        if name != "optimizer" or "name" in present[name]  # else another library's, whose options are not LLM Foundry's
    }
    around = {key: [each for each in into if each[0] not in taken] for key, into in around.items()}
    keys = list(mapping_at(section, block.inner) or ()) if block.inner is not None else []
    replacements, additions = splice(expression.settings, keys, reading.deciding, block.prefix)
    new = NewEntry(
        heads=target.heads,
        beside=[each for each in added if each[0] not in taken],
        inner=block.inner,
        replacements=replacements,
        additions=additions,
        around=around | {name: [(name, value)] for name, value in taken.items() if name not in within},
    )
    edits = (_adding(taken[name], (*parent, name), present[name]) for name in within)
    before = {name: (present[name], value) for name, value in taken.items()}
    return _Replacement(new=new, going=going, taken=before, within=tuple(edits))


def _left(of: Dialect, target: Dialect) -> Finding:
    """Return a finding for the rest of a file, which its source system no longer uses."""
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
    """Return an edit that adds entries to a mapping, and replaces those with the same keys."""
    return MappingEdit(
        path=path,
        replacements={key: [(key, value)] for key, value in entries.items() if key in present},
        additions=[(key, value) for key, value in entries.items() if key not in present],
    )


def _taken(replacement: _Replacement, target: Dialect) -> Iterator[Finding]:
    """Yield findings for keys beside the section that were not the source system's, and are now the target's."""
    whose = f"it stood there already, and is a key of {target.title.split(':')[0]}'s"
    within = {edit.path[-1] for edit in replacement.within}
    for key, (present, value) in replacement.taken.items():
        is_same = key in within or present == value
        yield Finding(
            key=key,
            value=present,
            outcome=Outcome.EXACT if is_same else Outcome.APPROXIMATE,
            target=f"{key}: {flow_text(value)}",
            reason=f"{whose}: it {'has' if is_same else 'says'} now what the section asks for",
            origin=Origin.WRITING,
        )
