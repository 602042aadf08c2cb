"""Apply changes of a run to the text of its file, in the file's own keys.

Called by ``plan --suggest``; does not write files.

Candidate sets of keys are written and read again. The first one that results in exactly the changed run is used.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import Any

from composer_fsdp2.config.value import Value
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.changes import edits_of, mapping_at
from composer_fsdp2.migration.dialect import Dialect, MappingEdit, Reading, Section, overlaps
from composer_fsdp2.migration.documents import Document, differences, open_document
from composer_fsdp2.migration.documents.yaml import flow_text
from composer_fsdp2.migration.interpolation import resolve
from composer_fsdp2.migration.lens import decides, kind_of, title_of
from composer_fsdp2.migration.migrate import Migration, find_sections, migrate_text
from composer_fsdp2.migration.paths import Path, Settings, has_path, merged, nested, value_at, with_entries
from composer_fsdp2.migration.run import OF_TRAINING, RunConfig, changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch(Value):
    """Changes of a run.

    Args:
        fields: Field of the run -> new value.
        keys: Path of a key that sets no field of the run -> new value; None removes the key.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[Path, Any] = field(default_factory=dict)

    def leaves_open(self, name: str) -> bool:
        """Return whether a field may differ from the patched run.

        This is the number of ranks; options of activation checkpointing if the patch changes it; batches and
        accumulation if the patch changes keys.
        """
        kind = kind_of(name)
        is_detail = kind == "activation_checkpointing" and kind in map(kind_of, self.fields)
        is_of_batches = name in OF_TRAINING or name.startswith("accumulation.")
        return name == "num_ranks" or is_detail or (bool(self.keys) and is_of_batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChange(Value):
    """The change of one key, named by its dotted path from the top of the file. None means that the key is absent."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        if self.after is None:
            return f"without {self.key}"
        was = "" if self.before is None else f" (was {flow_text(self.before)})"
        return f"{self.key}: {flow_text(self.after)}{was}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchedFile:
    """The text of a file with a patch applied, or the reason why the patch cannot be applied.

    Args:
        after: The patched text; equal to ``before`` if the patch cannot be applied.
        is_migrated: Whether the text was also migrated to FSDP2's keys, because FSDP1's keys cannot express the patch.
        missing: The reason why the patch cannot be applied, or "".
    """

    name: str
    before: str
    after: str
    changes: tuple[KeyChange, ...] = ()
    is_migrated: bool = False
    missing: str = ""

    def diff(self) -> str:
        """A unified diff; empty if nothing changes."""
        return Migration(name=self.name, before=self.before, after=self.after, sections=(), suffix="").diff()


def apply_patch(
    text: str, name: str, patch: Patch, *, dialect: str | None = None, at: str | None = None
) -> PatchedFile:
    """Apply a patch to one section of a file.

    If FSDP1's keys cannot express it, first migrate the file within its system.

    Args:
        dialect, at: As in ``migrate_text``; if several sections are found, the first is patched.
    Raises:
        ConfigError: the text has no section.
    """
    document, sections = find_sections(text, name, dialect=dialect, at=at)
    system, section = sections[0]
    found = _patched(document, system, section, patch)
    if found.missing:
        try:
            migrated = migrate_text(text, name, to=system.target, dialect=system.name, at=section.place or None)
        except ConfigError:  # it cannot be edited
            return found
        if migrated.is_changed and not migrated.is_new_file and not migrated.blocking:
            again = apply_patch(migrated.after, name, patch, dialect=system.name, at=section.place or None)
            return found if again.missing else replace(again, before=text, is_migrated=True)
    return found


def _patched(document: Document, system: Dialect, section: Section, patch: Patch) -> PatchedFile:
    """Apply the first set of candidate keys that results in the patched run."""
    found = PatchedFile(name=document.name, before=document.original, after=document.original)
    before = system.read(section)
    if before.run is None:
        return replace(found, missing="what the section asks for is not known")
    try:
        requested = before.run.with_fields(patch.fields)
        candidates = [*_candidates(system, section, before, requested, patch.fields)]
    except ConfigError as error:
        return replace(found, missing=str(error))
    for assigned, _ in groupby(candidates):
        try:
            after = _patched_text(document, section, {**assigned, **_assignments(patch.keys)})
            _, sections = find_sections(after, document.name, dialect=system.name, at=section.place or None)
        except ConfigError as error:
            found = replace(found, missing=str(error))
            continue
        again = sections[0][1]
        found = replace(found, missing=_mismatch(system, requested, before, system.read(again), patch))
        if not found.missing:
            return replace(found, after=after, changes=tuple(_changes(section.around, again.around)))
    return found


def _changes(before: Any, after: Any) -> Iterator[KeyChange]:
    for path in differences(before, after):
        old, new = (value_at(each, path) if has_path(each, path) else None for each in (before, after))
        yield KeyChange(key=".".join(map(str, path)), before=old, after=new)


# ---------------------------------------------------------------------------------------------------------------------
# Candidate keys

# Maps the path of a key, from the top of the file, to the entries that replace it; a key that the file lacks is added.
_Assigned = dict[Path, Settings]


def _assignments(values: Mapping[Path, Any]) -> _Assigned:
    """Return assignments of new values to keys; None removes a key."""
    return {path: [] if value is None else [(str(path[-1]), value)] for path, value in values.items()}


def _candidates(
    system: Dialect, section: Section, before: Reading, requested: RunConfig, fields: Mapping[str, Any]
) -> Iterator[_Assigned]:
    """Yield sets of keys to try, the fewest changes first.

    First existing keys, then also new keys, then a rewrite of all keys that set the patched fields.
    """
    assert before.run is not None
    old = {
        system.path_of(section, each.key): each for each in system.settings_in(before, before.run.without_training())
    }
    new = {system.path_of(section, each.key): each for each in system.settings_in(before, requested.without_training())}
    rows = {system.path_of(section, key): row for key, row in before.deciding.items()}
    rows = {path: row for path, row in rows.items() if has_path(section.around, path)}

    def place_of(path: Path) -> Path:
        """Return the path at which to write a key.

        A new key replaces an existing one in its mapping with the same first field.
        """
        first, others = new[path].fields[:1], (each for each in rows if each not in old | new)
        same = (each for each in others if each[:-1] == path[:-1] and decides(rows[each])[:1] == first)
        return path if has_path(section.around, path) else next(same, path)

    def written(paths: Iterable[Path]) -> _Assigned:
        found: dict[Path, list[tuple[str, Any]]] = {}
        for path in paths:
            found.setdefault(place_of(path), []).append((str(path[-1]), new[path].value))
        return {**found}

    other = [path for path, each in new.items() if each != old.get(path)]
    own = written(path for path in other if has_path(section.around, path))
    idle = [path for path in rows if path in old and path not in new and overlaps(old[path].fields, [*fields])]
    first = {new[path].fields[:1]: path for path in reversed(other)}
    yield {}
    if new != old:
        yield own
        yield own | _assignments({path: rows[path].default for path in idle})
        yield written(path for path in other if path in first.values())
        yield written(other)
        names = [*fields, *changed(before.run, requested)]
        if not requested.config.activation_checkpointing.enabled:
            names.append("activation_checkpointing")  # and its details
        removed = [path for path, row in rows.items() if path not in new and overlaps(decides(row), names)]
        names += chain.from_iterable(decides(rows[path]) for path in removed)
        yield _assignments(dict.fromkeys(removed)) | written(
            path for path, each in new.items() if overlaps(each.fields, names)
        )


def _mismatch(system: Dialect, requested: RunConfig, before: Reading, after: Reading, patch: Patch) -> str:
    """Return why the new text does not result in the patched run, or "" if it does."""
    known = {each.key for each in before.findings if each.outcome.blocks}
    if found := next((each for each in after.findings if each.outcome.blocks and each.key not in known), None):
        return found.reason
    if after.run is None:
        return "its keys contradict each other then"
    lost = [name for name in changed(requested, after.run) if name in patch.fields or not patch.leaves_open(name)]
    if not lost:
        return ""
    lacking = (each for each in system.express(requested).losses if not (each.is_kept or each.is_fault))
    reasons = (each.finding.reason for each in lacking if overlaps(each.fields, lost))
    return next(reasons, f"such a file has no key for it ({title_of(lost[0])})")


# ---------------------------------------------------------------------------------------------------------------------
# Edits


def _patched_text(document: Document, section: Section, assigned: _Assigned) -> str:
    """Return the text with the keys changed.

    Raises:
        ConfigError: the new text does not have the intended values.
    """
    edits = list(_mapping_edits(document, section, assigned))
    after = document.edited(edits_of(document, section, edits))
    values = document.values
    for each in edits:
        values = with_entries(values, each.path, each.replacements, each.additions)
    reread = open_document(after, document.name).values
    written = list(differences(document.values, reread))
    resolved = differences(resolve(reread).values, resolve(document.values).values)
    is_shared = not all(any(path[: len(each)] == each[: len(path)] for each in written) for path in resolved)
    if is_shared or next(differences(values, reread), None) is not None:
        what = "what would be changed stands for something else in the file as well"
        raise ConfigError(f"{what}, by an alias or an interpolation")
    return after


def _mapping_edits(document: Document, section: Section, assigned: _Assigned) -> Iterator[MappingEdit]:
    """Yield one edit per mapping.

    A key whose mapping does not exist is added, nested, to the nearest existing mapping.
    """
    replaced: dict[Path, dict[str, Settings]] = {}
    added: dict[Path, dict[str, Any]] = {}
    for path, entries in assigned.items():
        *above, key = path
        if not has_path(section.around, path):
            depths = range(len(above), -1, -1) if document.takes_entries else [len(above)]
            depth = next((depth for depth in depths if mapping_at(section, path[:depth]) is not None), depths[0])
            for _, value in entries:
                entry = nested(".".join(map(str, path[depth:])), value)
                added[path[:depth]] = merged(added.get(path[:depth], {}), entry)
        elif repr(entries) != repr([(key, value_at(section.around, path))]):
            replaced.setdefault(tuple(above), {})[str(key)] = entries
    for path in dict.fromkeys((*replaced, *added)):
        new = added.get(path, {})
        # Existing keys whose values were not mappings.
        existing = {key: [(key, new[key])] for key in new if has_path(section.around, (*path, key))}
        additions = [(key, value) for key, value in new.items() if key not in existing]
        yield MappingEdit(path=path, replacements=replaced.get(path, {}) | existing, additions=additions)
