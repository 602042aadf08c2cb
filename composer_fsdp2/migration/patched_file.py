"""A file's text with a patch of its run, in its own keys; writes no file. Called by ``plan --suggest``."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.config.sharding import Accumulation, ShardingConfig
from composer_fsdp2.config.value import Value
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.dialect import Dialect, MappingEdit, Reading, Section
from composer_fsdp2.migration.documents import Document, differences, open_document, with_entries
from composer_fsdp2.migration.migrate import Migration, find_sections, migrate_text
from composer_fsdp2.migration.patch import Assignment, Patch, Unavailable
from composer_fsdp2.migration.paths import Path, Settings, has_path, nested, value_at
from composer_fsdp2.migration.run import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChange(Value):
    """A key of the file, from its top with dots; None where it is not there."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        if self.after is None:
            return f"without {self.key}"
        was = "" if self.before is None else f" (was {_word(self.before)})"
        return f"{self.key}: {_word(self.after)}{was}"


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchedFile:
    """The text with the patch, or why there is none.

    Args:
        after: The same as ``before`` where there is none.
        is_migrated: Whether the text is in FSDP2's words now, because FSDP1's have none for the patch.
        missing: What the file's system has no word for, each a reason.
    """

    name: str
    before: str
    after: str
    changes: tuple[KeyChange, ...] = ()
    is_migrated: bool = False
    missing: tuple[str, ...] = ()

    def diff(self) -> str:
        """A unified diff; empty if nothing changes."""
        return Migration(name=self.name, before=self.before, after=self.after, sections=(), suffix="").diff()


def apply_patch(
    text: str, name: str, patch: Patch, *, dialect: str | None = None, at: str | None = None
) -> PatchedFile:
    """Write a patch into one section of a file.

    Args:
        dialect, at: As ``migrate_text`` takes them; where several sections are found, the first is meant.
    Raises:
        ConfigError: the text is no such file.
    """
    document, sections = find_sections(text, name, dialect=dialect, at=at)
    of, section = sections[0]
    reading = of.read(section)
    patch_steps = list(of.patch_steps(patch, section, reading))
    missing = [answer for answer in patch_steps if isinstance(answer, Unavailable)]
    if any(each.until_migrated for each in missing):
        migrated = migrate_text(text, name, to=of.target, dialect=of.name, at=section.place or None)
        if migrated.is_changed and not migrated.is_new_file and not migrated.blocking:
            found = apply_patch(migrated.after, name, patch, dialect=of.name, at=section.place or None)
            if not found.missing:
                return replace(found, before=text, is_migrated=True)
            missing = [Unavailable(reason=each) for each in found.missing]
    if missing:
        return PatchedFile(name=name, before=text, after=text, missing=tuple(each.reason for each in missing))
    asked = [each for each in patch_steps if isinstance(each, Assignment) and _asks(document, each)]
    edits = list(_edits_of(document, section, asked))
    after = _edited(document, section, edits)
    problem = _SHARED if after is None else _unlike(of, section, after, name, reading, patch)
    if after is None or problem:
        return PatchedFile(name=name, before=text, after=text, missing=(problem,))
    return PatchedFile(name=name, before=text, after=after, changes=tuple(_changes(section, asked)))


def _asks(document: Document, asked: Assignment) -> bool:
    return asked.value is not None or has_path(document.values, asked.path)


def _changes(section: Section, asked: Iterable[Assignment]) -> Iterator[KeyChange]:
    for each in asked:
        before = value_at(section.around, each.path) if has_path(section.around, each.path) else None
        if before != each.value or type(before) is not type(each.value):
            yield KeyChange(key=".".join(map(str, each.path)), before=before, after=each.value)
        for other in each.instead:
            path = (*each.path[:-1], other)
            if has_path(section.around, path):
                yield KeyChange(key=".".join(map(str, path)), before=value_at(section.around, path), after=None)


# ---------------------------------------------------------------------------------------------------------------------
# Edits


def _edits_of(document: Document, section: Section, asked: Iterable[Assignment]) -> Iterator[MappingEdit]:
    """One for each mapping; what has no mapping yet is added, nested, to the nearest that there is."""
    replacements: dict[Path, dict[str, Settings]] = {}
    additions: dict[Path, dict[str, Any]] = {}
    for each in asked:
        parent, key = each.path[:-1], str(each.path[-1])
        here = _mapping_at(section, parent)
        if here is None and document.takes_entries:
            place, new = _nearest(section, each)
            key = str(new[0])
            if has_path(section.around, (*place, key)):  # there is something else than a mapping
                replacements.setdefault(place, {})[key] = [new]
            else:
                added = additions.setdefault(place, {})
                added[key] = {**added.get(key, {}), **new[1]}
            continue
        old = [other for other in (key, *each.instead) if other in (here or {})]
        entry: Settings = [] if each.value is None else [(key, each.value)]
        if old:
            replacements.setdefault(parent, {}).update({old[0]: entry, **{other: [] for other in old[1:]}})
        else:
            additions.setdefault(parent, {})[key] = each.value
    for place in dict.fromkeys((*replacements, *additions)):
        yield MappingEdit(
            path=place, replacements=replacements.get(place, {}), additions=list(additions.get(place, {}).items())
        )


def _mapping_at(section: Section, path: Path) -> Mapping[str, Any] | None:
    values = value_at(section.around, path) if has_path(section.around, path) else None
    return values if isinstance(values, Mapping) else None


def _nearest(section: Section, asked: Assignment) -> tuple[Path, tuple[str, Any]]:
    depth = next(depth for depth in range(len(asked.path) - 1, -1, -1) if _mapping_at(section, asked.path[:depth]))
    names = ".".join(map(str, asked.path[depth + 1 :]))
    return asked.path[:depth], (str(asked.path[depth]), nested(names, asked.value))


def _edited(document: Document, section: Section, edits: Sequence[MappingEdit]) -> str | None:
    """The new text; None if it does not say what was meant."""
    meant = document.values
    changes = []
    for edit in edits:
        meant = with_entries(meant, edit.path, edit.replacements, edit.additions)
        given = _mapping_at(section, edit.path)
        changes += document.edit_mapping(edit.path, edit.replacements, edit.additions, given=given)
    try:
        after = document.edited(changes)
        again = open_document(after, document.name)
    except ConfigError:
        return None
    return None if next(differences(meant, again.values), None) is not None else after


# ---------------------------------------------------------------------------------------------------------------------
# What the new text asks for

_SHARED = "what would be changed stands for something else in the file as well, by an alias or an interpolation"


def _unlike(of: Dialect, section: Section, after: str, name: str, before: Reading, patch: Patch) -> str:
    """What the new text asks for that was not wanted, or not that was; "" if it is as wanted."""
    _, sections = find_sections(after, name, dialect=of.name, at=section.place or None)
    reading = of.read(sections[0][1])
    run, blocking = reading.run, {each.key for each in before.findings if each.outcome.blocks}
    if before.run is None:
        return "what the section asks for is not known"
    if found := next((each for each in reading.findings if each.outcome.blocks and each.key not in blocking), None):
        return found.reason
    if run is None:
        return "its words contradict each other then"
    if _without_patched(run, patch) != _without_patched(before.run, patch):
        return "it would change something else as well"
    return "" if all(_is_applied(run, patch)) else "it would not do it"


def _without_patched(run: RunConfig, patch: Patch) -> RunConfig:
    config, plain = run.config, ShardingConfig()
    recomputed = plain.activation_checkpointing if patch.activations else config.activation_checkpointing
    config = replace(
        config,
        mesh=MeshSpec() if patch.degrees else config.mesh,
        reshard_after_forward=True if patch.reshard_after_forward is not None else config.reshard_after_forward,
        activation_checkpointing=recomputed,
        cpu_offload=False if patch.cpu_offload is not None else config.cpu_offload,
        # A Trainer with one microbatch puts nothing off.
        accumulation=Accumulation() if patch.microbatches else config.accumulation,
    )
    selective = None if patch.activations else run.selective_checkpointing
    return replace(run, config=config, selective_checkpointing=selective)


def _is_applied(run: RunConfig, patch: Patch) -> Iterator[bool]:
    config, recomputes = run.config, run.config.activation_checkpointing
    if patch.reshard_after_forward is not None:
        yield config.reshard_after_forward is patch.reshard_after_forward or (
            type(config.reshard_after_forward) is int and config.reshard_after_forward == patch.reshard_after_forward
        )
    if patch.degrees is not None:
        mesh = config.mesh.resolve(patch.degrees.shards * patch.degrees.replicas)
        yield (mesh.shard_degree, mesh.replicate_degree) == (patch.degrees.shards, patch.degrees.replicas)
    if patch.activations is not None and patch.activations.every:
        yield (recomputes.checkpoint, recomputes.cpu_offload) == (
            patch.activations.recompute,
            patch.activations.offload,
        )
    elif patch.activations is not None:
        yield not recomputes.enabled
    if patch.cpu_offload is not None:
        yield config.cpu_offload is patch.cpu_offload
