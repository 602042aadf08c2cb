"""The base class of dialects (the configuration formats of systems), and the types that they share.

A section is the part of a file that configures sharding. ``Dialect.read`` converts it to a ``RunConfig`` and one
finding per key. ``Dialect.express`` of the target converts the run to keys with values. Then the target reads these
keys again: fields of the run that it does not find are lost, and reported. ``splice`` puts each new key at the position
of the old key that set the same field.

Imported by the dialects and ``migrate``; nothing here communicates.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.config.rows import Row, idle
from composer_fsdp2.config.text import and_more
from composer_fsdp2.migration.lens import Lens, Limitation, Loss, covers, decides, fault, kind_of, losses
from composer_fsdp2.migration.paths import Path, Settings, merged, nested, value_at, walk, without_path
from composer_fsdp2.migration.run import RunConfig, changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The part of a file that configures sharding.

    Args:
        path: The path of the section's mapping from the top of the file.
        given: The entries of the mapping, with interpolations resolved.
        around: The values of the whole file, for settings outside the section, such as the precision and the number of
            processes.
    """

    path: Path
    given: Mapping[str, Any]
    around: Mapping[str, Any]

    @classmethod
    def at(cls, path: Path, values: Mapping[str, Any]) -> "Section":
        """Return the section at ``path`` in the values of a file.

        Raises:
            KeyError, IndexError or TypeError: the values have no such path.
        """
        return cls(path=path, given=value_at(values, path), around=values)

    @property
    def place(self) -> str:
        return ".".join(map(str, self.path))

    def path_of(self, key: str) -> Path:
        """Return the path from the top of the file of a key of the section. ``key`` may be dotted."""
        return (*self.path, *((key,) if key in self.given else key.split(".")))

    def without(self, keys: Iterable[str]) -> "Section":
        """Return the section without some of its entries."""
        around = self.around
        for key in keys:
            around = without_path(around, self.path_of(key))
        return Section.at(self.path, around)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The result of reading a section: the run, and one finding per key.

    Args:
        run: The run that the section describes; None if it cannot be determined.
        rows: The row of each key for which there is a finding.
        kept: Keys without effect at whose position a new key may be written.
        details: Data for other methods of the same dialect.
    """

    run: RunConfig | None
    findings: tuple[Finding, ...]
    rows: Mapping[str, Row] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()
    details: Any = None

    @property
    def deciding(self) -> dict[str, Row]:
        """The keys that set a field of the run, with their rows, in the order of ``rows``."""
        idle_keys = {
            each.key for each in self.findings if not each.asks or each.outcome is Outcome.UNNEEDED
        } - self.kept
        return {key: row for key, row in self.rows.items() if decides(row) and key not in idle_keys}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A key of the target with its value, and the fields of the run that it sets."""

    key: str
    value: Any
    fields: tuple[str, ...] = ()

    def matching_key(self, keys: Mapping[str, Row]) -> str | None:
        """Return the key in ``keys`` at whose position this setting is written, or None.

        This is the first key whose main (first) field is the same, else the first whose main field is of the same kind.
        """
        first, kind = self.fields[:1], [kind_of(name) for name in self.fields[:1]]
        same_field = (key for key, row in keys.items() if overlaps(first, decides(row)[:1]))
        same_kind = (key for key, row in keys.items() if kind == [kind_of(name) for name in decides(row)[:1]])
        return next(chain(same_field, same_kind), None)


def overlaps(some: Iterable[str], others: Sequence[str]) -> bool:
    """Return whether a field in one sequence equals a field in the other, or is nested in it."""
    return any(covers(others, each) or any(covers((each,), other) for other in others) for each in some)


def written(rows: Iterable[Row], run: RunConfig) -> Iterator[Setting]:
    """Yield the keys of a table with the values that express ``run``; keys at their default are omitted."""
    for row in rows:
        if isinstance(row, Lens) and (value := row.write(run)) is not None:
            yield Setting(key=row.name, value=value, fields=row.decides)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """A run expressed as keys of a target, and the fields that the target loses or implements differently.

    Args:
        settings: Keys in the section.
        beside: Keys in the file outside of the section.
    """

    settings: tuple[Setting, ...]
    beside: tuple[Setting, ...] = ()
    losses: tuple[Loss, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(each.finding for each in self.losses)


@dataclass(frozen=True, slots=True, kw_only=True)
class MappingEdit:
    """The arguments of ``Document.edit_mapping``: new entries instead of each old key, and entries to append."""

    path: Path
    replacements: Mapping[str, Settings]
    additions: Settings = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacedBlock:
    """The part of a file that is replaced when a section is converted to another system.

    Args:
        entry: The path of the key that is replaced, with its value.
        inner: The path of the mapping inside ``entry`` that has the section's keys, or None.
        prefix: The prefix that the key of a finding has before the name in ``inner``.
        beside: Keys next to ``entry`` that also belong to the section.
    """

    entry: Path
    inner: Path | None
    prefix: str = ""
    beside: tuple[str, ...] = ()


class Dialect:
    """The configuration format of one system: its table of keys, and how files are read and written.

    Attributes:
        name: The value of ``--dialect`` that selects it.
        title: The title of its table in the documentation.
        rows: The table of its keys.
        rows_beside: Keys outside the section that are written for a run, and not listed by ``explain``.
        limits: Fields of a run that the system's FSDP2 cannot configure, or implements differently.
        target: The value of ``--to`` that selects its FSDP2.
        suffix: The suffix of its files.
        heads: The keys that enclose a new section of this dialect, outermost first, each with the entries that precede
            the section. Empty if the section is a whole file.
        elsewhere: Called with a key; returns a note on how the system treats it without composer_fsdp2, or "".
        unfinished: Called with the keys outside a new section; returns findings for keys that a file of this system
            still lacks.
        readers: The programs that read its files differently (such as releases), if there is more than one.
        interpolates: Whether its files are read by OmegaConf, which resolves ``${...}``.
        key_prefixes: Lowercase prefixes; every file with a section has a key that starts with one of them.
        keeps_implicit: Whether its FSDP2 preserves implicit behavior of FSDP1, which the report then lists as well.
        keeps_files: Whether its files, which already train with FSDP2, stay byte for byte the same if it is the target.
        silent: Minimal files that enable sharding and leave everything else at implicit settings.
        companions: For a key, the other keys that it requires to take effect.
        has_own_models: Whether its models, and so the classes in its files, are not those of transformers.
        closed_degree: The degree of a mesh with replicas that its files cannot leave open, if any.
    """

    name: str
    title: str
    rows: Sequence[Row]
    rows_beside: Sequence[Row] = ()
    limits: Sequence[Limitation] = ()
    target: str
    suffix: str = ".yaml"
    heads: tuple[tuple[str, Settings], ...] = ()
    elsewhere: Callable[[str], str] = staticmethod(lambda key: "")
    unfinished: Callable[[Sequence[str]], Iterable[Finding]] = staticmethod(lambda keys: ())
    readers: Sequence[str] = ()
    interpolates: bool = False
    key_prefixes: Sequence[str] = ("fsdp",)
    keeps_implicit: bool = False
    keeps_files: bool = False
    silent: Sequence[Section] = ()
    companions: Mapping[str, Mapping[str, Any]] = {}
    has_own_models: bool = False
    closed_degree: str = ""

    def find(self, path: Path, values: Mapping[str, Any], parent: Mapping[str, Any]) -> Path | None:
        """Return the path of the section if the mapping ``values`` at ``path`` is or contains one, else None."""
        raise NotImplementedError

    def read(self, section: Section) -> Reading:
        """Read a section into a run and a finding for each of its keys."""
        raise NotImplementedError

    def settings(self, run: RunConfig) -> Iterator[Setting]:
        """Yield the run as this dialect's FSDP2 keys in the section."""
        return written(self.rows, run)

    def is_own(self, finding: Finding) -> bool:
        """Return whether only this system has a finding's key.

        A conversion drops such a key unless it sets a field of the run.
        """
        return False

    def keeps(self, key: str) -> bool:
        """Return whether a key remains unchanged, at any value, if the file remains in this dialect."""
        return False

    def row_of(self, key: str) -> Row | None:
        """Return the row of a key as named in a report, or None."""
        return next((row for row in self.rows if key in (row.name, *row.aliases)), None)

    def holder(self, path: Path) -> Path:
        """Return the path of the section to which the mapping at ``path`` belongs.

        By default the mapping is the section.
        """
        return path

    def replaced_block(self, section: Section) -> ReplacedBlock | None:
        """Return the part of the file that another system's section replaces; None if such a file cannot contain
        that section."""
        return ReplacedBlock(entry=section.path, inner=section.path)

    def sections(self, values: Mapping[str, Any]) -> list[Path]:
        """Return the paths of this dialect's sections in a file with these values."""
        return list(walk(values, self.find))

    def express(self, run: RunConfig) -> Expression:
        """Express a run as keys of this dialect for FSDP2, with the fields of the run that such a file loses."""
        mesh = run.config.mesh
        if self.closed_degree and mesh.has_replicas and not mesh.is_grouped and getattr(mesh, self.closed_degree) == -1:
            run = run.with_degrees()
        new = Expression(settings=tuple(self.settings(run)), beside=tuple(written(self.rows_beside, run)))
        values = self.file_values(new)
        path = next(iter(self.sections(values)), ())
        return replace(new, losses=self.losses(run, self.read(Section.at(path, values))))

    def file_values(self, new: Expression) -> dict[str, Any]:
        """Return the values of a file that contains only this section."""
        values: dict[str, Any] = {}
        for setting in new.settings:
            values = merged(values, nested(setting.key, setting.value))
        for name, first in reversed(self.heads):
            values = {name: {**dict(first), **values}}
        return {setting.key: setting.value for setting in new.beside} | values

    def losses(self, run: RunConfig, again: Reading) -> tuple[Loss, ...]:
        """Return the fields of a run that a file of this dialect loses or implements differently, with findings.

        Args:
            again: The result of reading that file.
        """
        if again.run is not None:
            return tuple(losses(self.limits, run, changed(run, again.run)))
        refused = [str(each) for each in again.findings if each.outcome.blocks]
        reason = f"its own reader refuses it: {and_more(refused, 3)}"
        return (Loss(fields=(), finding=fault("the new text", "", reason), is_fault=True),)

    def rewrite(self, section: Section, reading: Reading) -> list[MappingEdit]:
        """Return minimal edits that convert a section of this dialect to its FSDP2 keys.

        By default none, for systems that already train with FSDP2.
        """
        return []

    def settings_in(self, reading: Reading, run: RunConfig) -> Iterator[Setting]:
        """Yield a run as keys that this section's reader knows, by the names (such as aliases) that are used in the
        file."""
        names = {row.name: key for key, row in reversed([*reading.rows.items()])}
        return (replace(each, key=names.get(each.key, each.key)) for each in self.settings(run))

    def path_of(self, section: Section, key: str) -> Path:
        """Return the path from the top of the file of a key, which may not exist yet."""
        return section.path_of(key)

    def own_findings(self, reading: Reading, lost: Sequence[Loss]) -> tuple[Finding, ...]:
        """Return the findings of a section that remains in this dialect. By default, its keys work as before.

        Args:
            lost: The lost fields of the new text; empty if the text is unchanged.
        """
        findings = (finding for finding in reading.findings if finding.origin is Origin.KEY)
        kept = (self._as_before(finding, reading.rows.get(finding.key)) for finding in findings)
        return (*kept, *(each.finding for each in lost))

    def _as_before(self, finding: Finding, row: Row | None) -> Finding:
        """Change the outcome to exact if only other systems lack the key.

        Findings on invalid values and unknown keys are unchanged.
        """
        is_of_others = row is not None and row.outcome is finding.outcome and row.takes.fits(finding.value)
        outcomes = (Outcome.APPROXIMATE, Outcome.UNSUPPORTED, *([Outcome.NEEDS_DECISION] if is_of_others else []))
        if finding.outcome not in outcomes or not finding.known:
            return finding
        reason = f"{self.title.split()[0]}'s FSDP2 reads it, as before"
        return replace(finding, outcome=Outcome.EXACT, target="as it is", reason=reason, hint="")

    # Used by ``explain`` and the documentation

    def places(self, row: Row) -> tuple[str, ...]:
        """Return the dotted paths at which a file may have a key: the usual one first, names of earlier releases
        last."""
        return (row.name, *row.aliases)

    def values(self, row: Row) -> tuple[Any, ...]:
        """Return the values of a key whose outcomes are listed."""
        default = () if row.default is None else (row.default,)
        # Keyed by repr, since 1 equals True and lists are not hashable.
        return tuple({repr(value): value for value in (*row.takes.choices, *row.neutral, *default)}.values())

    def defaults(self, row: Row) -> Mapping[str, Any]:
        """Return the default of a key for each reader. The key "" is the default for all readers."""
        return {"": row.default}

    def aliases(self, row: Row) -> tuple[str, ...]:
        """Return other names of a key, such as those of earlier releases."""
        return row.aliases

    def read_by(self, row: Row) -> tuple[str, ...]:
        """Return the readers of a key; empty if the dialect has one reader only."""
        return ()

    def instead(self, row: Row) -> Mapping[str, str]:
        """Return, for each reader that ignores a key, the key that has the same effect there."""
        return {}

    def files(self, row: Row, value: Any) -> Mapping[str, Section]:
        """Return, for each reader, the smallest file in which a key has an effect.

        The key "" is used if there is only one reader.
        """
        return {"": self.silent[0]}

    def place(self, row: Row, section: Section) -> str:
        """Return the dotted path of a key in such a file."""
        return self.places(row)[0]

    def with_key(self, row: Row, value: Any, section: Section) -> Section:
        """Return a file with a key set to ``value``, and with the keys without which it has no effect."""
        given = {**self.companions.get(row.name, {}), **self.switched_on(row)}
        beside = [(each, given[each.name]) for each in self.rows if each.name in given]
        values = section.around
        for each, its_value in (*beside, (row, value)):
            values = merged(values, nested(self.place(each, section), its_value))
        return Section.at(section.path, values)

    def switched_on(self, row: Row) -> dict[str, Any]:
        """Return the key that ``row`` requires (``only_with``), with a value that enables it."""
        if not row.only_with:
            return {}
        name, _, values = row.only_with.partition(" = ")
        value = values.split(" or ")[-1]
        switch = next(each for each in self.rows if each.name == name)
        is_on = (each for each in (True, 2, ["float8"]) if switch.takes.fits(each) and not switch.is_neutral(each))
        return {name: value or next(is_on)}


# ---------------------------------------------------------------------------------------------------------------------
# Findings, and the positions of settings


def implicit(name: str, outcome: Outcome, reason: str, hint: str = "", *, value: Any = "", target: str = "") -> Finding:
    """Return a finding for implicit behavior of a system that no key of the file configures."""
    return Finding(
        key=name, value=value, outcome=outcome, target=target, reason=reason, hint=hint, origin=Origin.IMPLICIT
    )


def with_losses(
    findings: Sequence[Finding], target_losses: Sequence[Loss], reading: Reading, target: Dialect
) -> tuple[tuple[Finding, ...], list[Finding]]:
    """Merge findings of lost fields into the findings of the keys that set these fields.

    Returns:
        The findings of the keys, and the findings of lost fields that no key reports.
    """
    rows = {
        each.key: row
        for each in findings
        if (row := reading.rows.get(each.key)) and decides(row) and _depends_on_target(each, row)
    }
    of_one_kind = {key: row for key, row in rows.items() if len(set(map(kind_of, decides(row)))) == 1}
    # Options of features that another key enables come last.
    keys = sorted(of_one_kind, key=lambda key: bool(of_one_kind[key].only_with))
    owners: dict[str, Loss] = {}
    for loss in sorted(target_losses, key=lambda each: not each.finding.outcome.blocks):
        owner = _owner(loss, {key: of_one_kind[key] for key in keys})
        if owner is not None:
            owners.setdefault(owner, loss)
    updated = [
        _with_loss(each, rows[each.key], target_losses, owners) if each.key in rows else each for each in findings
    ]
    by_name = {row.name: finding for finding in updated if (row := reading.rows.get(finding.key)) is not None}
    details = tuple(
        each if each.key in owners else _as_detail(each, reading.rows.get(each.key), by_name, target)
        for each in updated
    )
    return details, [each.finding for each in target_losses if each not in owners.values()]


def _owner(loss: Loss, rows: Mapping[str, Row]) -> str | None:
    """Return the key that reports a lost field: one that sets only this field, else one that mainly sets it, else
    any that sets it."""
    first = loss.fields[:1]
    exact = (key for key, row in rows.items() if decides(row) == first)
    main = (key for key, row in rows.items() if overlaps(first, decides(row)[:1]))
    any_ = (key for key, row in rows.items() if overlaps(loss.fields, decides(row)))
    return next(chain(exact, main, any_), None)


def _depends_on_target(finding: Finding, row: Row) -> bool:
    """Return whether a key has an effect, and its outcome depends on the target and not on its value."""
    return finding.asks and (not finding.outcome.blocks or finding.outcome is row.outcome)


def _with_loss(finding: Finding, row: Row, target_losses: Sequence[Loss], owners: Mapping[str, Loss]) -> Finding:
    """Return the finding of a key with the lost field that it reports, or with a note on fields that other keys report.

    Args:
        owners: Key -> the lost field that the finding of this key reports.
    """
    if finding.key in owners:
        loss = owners[finding.key].finding
        hint = loss.hint or (finding.hint if loss.outcome.blocks else "")  # else its own system's hint
        return replace(finding, outcome=loss.outcome, target=loss.target, reason=loss.reason, hint=hint)
    others = [
        next((key for key, each in owners.items() if each is loss), loss.finding.name)
        for loss in target_losses
        if overlaps((*loss.fields, *loss.covered), decides(row))
    ]
    if others and finding.outcome is Outcome.EXACT:
        hint = "; ".join(filter(None, (finding.hint, f"see {', '.join(dict.fromkeys(others))}")))
        return replace(finding, outcome=Outcome.APPROXIMATE, hint=hint)
    if finding.outcome.blocks and not others:
        reason = f"{row.meaning or row.name}, there as here"
        return replace(finding, outcome=Outcome.EXACT, target="", reason=reason, hint="")
    return finding


def _as_detail(finding: Finding, row: Row | None, by_name: Mapping[str, Finding], target: Dialect) -> Finding:
    """Change the finding of a blocking option of another key: to unneeded if that key blocks too, else to
    approximate."""
    switch = by_name.get(row.only_with.partition(" = ")[0]) if row is not None and row.only_with else None
    if switch is None or not finding.outcome.blocks:
        return finding
    if switch.outcome.blocks:
        return idle(finding, f"a detail of {switch.key}, and decided with it")
    reason = f"a detail of {switch.key}, which {target.title.split(':')[0]} does in its own way"
    return replace(finding, outcome=Outcome.APPROXIMATE, target="", reason=reason, hint="")


def splice(
    settings: Iterable[Setting], keys: Iterable[str], deciding: Mapping[str, Row], prefix: str = ""
) -> tuple[dict[str, list[tuple[str, Any]]], list[tuple[str, Any]]]:
    """Replace the old keys of a mapping: each new key takes the position of the first old key that set the same field,
    else the end.

    Args:
        keys: The old keys of the mapping. All are removed.
        deciding: ``Reading.deciding`` of the section.
        prefix: The prefix that a name in ``keys`` has in ``deciding``.

    Returns:
        The new entries instead of each old key, and those at the end.
    """
    replacements: dict[str, list[tuple[str, Any]]] = {key: [] for key in keys}
    named = {
        key: row
        for key, row in deciding.items()
        if key.startswith(prefix) and key.removeprefix(prefix).split(".")[0] in replacements
    }
    additions: list[tuple[str, Any]] = []
    for setting in settings:
        key = setting.matching_key(named)
        place = additions if key is None else replacements[key.removeprefix(prefix).split(".")[0]]
        place.append((setting.key, setting.value))
    return replacements, additions
