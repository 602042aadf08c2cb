"""What all dialects have in common: a section of a file, the run that it describes, and how a target writes it.

A dialect *reads* a section into a ``RunConfig``, with a finding for every key: with what its system does with the key,
which may be nothing. A target *expresses* a run: keys with their values, and losses, the fields of the run that its
own reader does not find in them. ``splice`` puts each key where the old key stood that had decided the same field.

Imported by the dialects and ``migrate``; nothing here communicates.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.config.rows import Row, idle
from composer_fsdp2.config.text import and_more
from composer_fsdp2.migration.lens import Lens, Limitation, Loss, covers, decides, decides_alone, fault, kind_of, losses
from composer_fsdp2.migration.paths import Path, Settings, merged, nested, value_at, walk, without_path
from composer_fsdp2.migration.run import RunConfig, changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The part of a file that configures sharding.

    Args:
        path: Of its mapping, from the top of the file.
        given: Its entries with interpolations resolved.
        around: The whole file's values, for what is given elsewhere (precision, model, number of processes).
    """

    path: Path
    given: Mapping[str, Any]
    around: Mapping[str, Any]

    @classmethod
    def at(cls, path: Path, values: Mapping[str, Any]) -> "Section":
        """Raises KeyError, IndexError or TypeError: there is nothing at ``path``."""
        return cls(path=path, given=value_at(values, path), around=values)

    @property
    def place(self) -> str:
        return ".".join(map(str, self.path))

    def without(self, keys: Iterable[str]) -> "Section":
        """As if some of its entries were not there; those below others by name, with dots."""
        around = self.around
        for key in keys:
            around = without_path(around, (*self.path, *((key,) if key in self.given else key.split("."))))
        return Section.at(self.path, around)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The run that a section describes, unless something stands in the way, and a finding for each key.

    Args:
        rows: Of the keys that findings name.
        kept: Keys that do nothing, and whose place in the file a target's key may take all the same.
        details: For the dialect's own other methods.
    """

    run: RunConfig | None
    findings: tuple[Finding, ...]
    rows: Mapping[str, Row] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()
    details: Any = None

    @property
    def deciding(self) -> dict[str, Row]:
        """The keys that decide a field of the run, in the order of the table."""
        idle_keys = {
            each.key for each in self.findings if not each.asks or each.outcome is Outcome.UNNEEDED
        } - self.kept
        return {key: row for key, row in self.rows.items() if decides(row) and key not in idle_keys}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A key of a target with its value, and the fields of the run that it decides there."""

    key: str
    value: Any
    fields: tuple[str, ...] = ()

    def place_in(self, keys: Mapping[str, Row]) -> str | None:
        """The first of these keys that decides the same field before all else, or else the same kind; None if none."""
        first, kind = self.fields[:1], [kind_of(name) for name in self.fields[:1]]
        same = (key for key, row in keys.items() if meets(first, decides(row)[:1]))
        alike = (key for key, row in keys.items() if kind == [kind_of(name) for name in decides(row)[:1]])
        return next(chain(same, alike), None)


def meets(some: Iterable[str], others: Sequence[str]) -> bool:
    """Whether a field of the first is one of the second, or nested in one, or the other way round."""
    return any(covers(others, each) or any(covers((each,), other) for other in others) for each in some)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """A run as a target's keys, and what the target loses of it or does otherwise.

    Args:
        beside: Keys beside the section.
    """

    settings: tuple[Setting, ...]
    beside: tuple[Setting, ...] = ()
    losses: tuple[Loss, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(each.finding for each in self.losses)


@dataclass(frozen=True, slots=True, kw_only=True)
class MappingEdit:
    """For a document's ``edit_mapping``: by old key what comes in its place, and what is new at the end."""

    path: Path
    replacements: Mapping[str, Settings]
    additions: Settings = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacedBlock:
    """The part of a file that another system's section replaces.

    Args:
        entry: The path of the key that goes with all that it holds.
        inner: The mapping in it that has the section's keys; None if there is none.
        prefix: What a finding's key has before the name in ``inner``.
        beside: Keys in the mapping around ``entry`` that belong to the section, too.
    """

    entry: Path
    inner: Path | None
    prefix: str = ""
    beside: tuple[str, ...] = ()


class Dialect:
    """One system's words.

    Attributes:
        name: That users choose it by.
        title: Of its table in the documents.
        rows: Its keys.
        limits: What its FSDP2 cannot configure, or does in its own way.
        target: That ``--to`` chooses its FSDP2 by.
        suffix: Of its files.
        heads: The keys that a section of its own stands under, outermost first, each with what comes before in its
            mapping. Empty, if a section is a file of its own.
        elsewhere: What the system makes of a key without composer_fsdp2; "" if it is told nowhere.
        unfinished: Findings for what a file that was another system's lacks, by the keys beside its new section.
        readers: Who may read a file, where there are several.
        interpolates: Whether its files are read by OmegaConf, for which ``${...}`` is no text.
        words: In small letters; with one of them begins a key of every file that has a section.
        keeps_implicit: Whether its FSDP2 does what FSDP1 did without being told, so that the report tells of that, too.
        keeps_files: Whether its files, which train with FSDP2 already, stay byte for byte where it is the target.
        silent: Files that turn sharding on, and leave the rest to what is implicit.
        companions: By key, the others that must stand beside it for it to mean something.
        has_own_models: Whether its models are none of transformers', so that the classes in its files are not either.
    """

    name: str
    title: str
    rows: Sequence[Row]
    limits: Sequence[Limitation] = ()
    target: str
    suffix: str = ".yaml"
    heads: tuple[tuple[str, Settings], ...] = ()
    elsewhere: Callable[[str], str] = staticmethod(lambda key: "")
    unfinished: Callable[[Sequence[str]], Iterable[Finding]] = staticmethod(lambda keys: ())
    readers: Sequence[str] = ()
    interpolates: bool = False
    words: Sequence[str] = ("fsdp",)
    keeps_implicit: bool = False
    keeps_files: bool = False
    silent: Sequence[Section] = ()
    companions: Mapping[str, Mapping[str, Any]] = {}
    has_own_models: bool = False

    def find(self, path: Path, values: Mapping[str, Any], parent: Mapping[str, Any]) -> Path | None:
        """The path of the section, if the mapping ``values`` at ``path`` is one, or holds one."""
        raise NotImplementedError

    def read(self, section: Section) -> Reading:
        """What a section asks for; every key of ``section.given`` has a finding."""
        raise NotImplementedError

    def settings(self, run: RunConfig) -> Iterator[Setting]:
        """A run as this dialect's FSDP2 keys."""
        for row in self.rows:
            if isinstance(row, Lens) and (value := row.write(run)) is not None:
                yield Setting(key=row.name, value=value, fields=row.decides)

    def beside(self, run: RunConfig) -> Iterator[Setting]:
        """Those that stand beside the section."""
        return iter(())

    def is_own(self, finding: Finding) -> bool:
        """Whether a key has no counterpart in other systems, unless a target's keys or losses do."""
        return False

    def keeps(self, key: str) -> bool:
        """Whether a key of a section that stays in this dialect is written as before, whatever its value."""
        return False

    def row_of(self, key: str) -> Row | None:
        """The row of a key as a report names it."""
        return next((row for row in self.rows if key in (row.name, *row.aliases)), None)

    def holder(self, path: Path) -> Path:
        """The path of the section that a user means who names a mapping in it; the mapping itself, if it is one."""
        return path

    def replaced_block(self, section: Section) -> ReplacedBlock | None:
        """What goes where another system's section comes; None where that has no place in such a file."""
        return ReplacedBlock(entry=section.path, inner=section.path)

    def sections(self, values: Mapping[str, Any]) -> list[Path]:
        """The paths of this dialect's sections in a file with these values."""
        return list(walk(values, self.find))

    def express(self, run: RunConfig) -> Expression:
        """A run as this dialect's FSDP2 keys, and what a file with them loses of it."""
        new = Expression(settings=tuple(self.settings(run)), beside=tuple(self.beside(run)))
        values = self.file_values(new)
        path = next(iter(self.sections(values)), ())
        return replace(new, losses=self.losses(run, self.read(Section.at(path, values))))

    def file_values(self, new: Expression) -> dict[str, Any]:
        """The values of a file with this section only."""
        values: dict[str, Any] = {}
        for setting in new.settings:
            values = merged(values, nested(setting.key, setting.value))
        for name, first in reversed(self.heads):
            values = {name: {**dict(first), **values}}
        return {setting.key: setting.value for setting in new.beside} | values

    def losses(self, run: RunConfig, again: Reading) -> tuple[Loss, ...]:
        """What became of the run in a file of this dialect.

        Args:
            again: Of that file.
        """
        if again.run is not None:
            return tuple(losses(self.limits, run, changed(run, again.run)))
        refused = [str(each) for each in again.findings if each.outcome.blocks]
        reason = f"its own reader refuses it: {and_more(refused, 3)}"
        return (Loss(fields=(), finding=fault("the new text", "", reason), is_fault=True),)

    def rewrite(self, section: Section, reading: Reading) -> list[MappingEdit]:
        """A section of this very dialect in its FSDP2 words, with as few changes as possible; nothing by default, for
        systems that train with FSDP2 already."""
        return []

    def settings_in(self, reading: Reading, run: RunConfig) -> Iterator[Setting]:
        """A run as keys of a file that was read, which its system reads, under the names that the file has for them."""
        names = {row.name: key for key, row in reversed([*reading.rows.items()])}
        return (replace(each, key=names.get(each.key, each.key)) for each in self.settings(run))

    def path_of(self, section: Section, key: str) -> Path:
        """Where a key stands in a file with this section, or would stand."""
        return (*section.path, *key.split("."))

    def own_findings(self, reading: Reading, lost: Sequence[Loss]) -> tuple[Finding, ...]:
        """What became of each key where a section stays in this dialect: by default all keys hold as before.

        Args:
            lost: What the new text loses; nothing if it is the old one.
        """
        told = (finding for finding in reading.findings if finding.origin is Origin.KEY)
        kept = (self._as_before(finding, reading.rows.get(finding.key)) for finding in told)
        return (*kept, *(each.finding for each in lost))

    def _as_before(self, finding: Finding, row: Row | None) -> Finding:
        """Only what no value of a key would settle, or this value does not, is left to decide."""
        is_of_others = row is not None and row.outcome is finding.outcome and row.takes.fits(finding.value)
        outcomes = (Outcome.APPROXIMATE, Outcome.UNSUPPORTED, *([Outcome.NEEDS_DECISION] if is_of_others else []))
        if finding.outcome not in outcomes or not finding.known:
            return finding
        reason = f"{self.title.split()[0]}'s FSDP2 reads it, as before"
        return replace(finding, outcome=Outcome.EXACT, target="as it is", reason=reason, hint="")

    # What ``explain`` and the documents ask

    def places(self, row: Row) -> tuple[str, ...]:
        """The places of a key in a file, with dots; the usual one first, names of earlier releases last."""
        return (row.name, *row.aliases)

    def values(self, row: Row) -> tuple[Any, ...]:
        """The values of a key whose outcomes are worth telling."""
        default = () if row.default is None else (row.default,)
        # By their looks, since 1 equals True and a list has no hash.
        return tuple({repr(value): value for value in (*row.takes.choices, *row.neutral, *default)}.values())

    def defaults(self, row: Row) -> Mapping[str, Any]:
        """What holds where a file says nothing, by who reads it; "" is everyone."""
        return {"": row.default}

    def aliases(self, row: Row) -> tuple[str, ...]:
        """Other names of a key, such as those of earlier releases."""
        return row.aliases

    def read_by(self, row: Row) -> tuple[str, ...]:
        """Who reads it; empty if there is one reader only."""
        return ()

    def instead(self, row: Row) -> Mapping[str, str]:
        """What does the same for each reader that passes over the key."""
        return {}

    def files(self, row: Row, value: Any) -> Mapping[str, Section]:
        """The smallest files in which a key means something, by reader; "" if there is one only."""
        return {"": self.silent[0]}

    def place(self, row: Row, section: Section) -> str:
        """The place of a key in such a file, with dots."""
        return self.places(row)[0]

    def with_key(self, row: Row, value: Any, section: Section) -> Section:
        """Such a file with this value of a key, and with those keys without which it is not read."""
        given = {**self.companions.get(row.name, {}), **self.switched_on(row)}
        beside = [(each, given[each.name]) for each in self.rows if each.name in given]
        values = section.around
        for each, its_value in (*beside, (row, value)):
            values = merged(values, nested(self.place(each, section), its_value))
        return Section.at(section.path, values)

    def switched_on(self, row: Row) -> dict[str, Any]:
        """The key without which ``row`` is not read, with a value that asks for something."""
        if not row.only_with:
            return {}
        name, _, values = row.only_with.partition(" = ")
        value = values.split(" or ")[-1]
        switch = next(each for each in self.rows if each.name == name)
        is_on = (each for each in (True, 2, ["float8"]) if switch.takes.fits(each) and not switch.is_neutral(each))
        return {name: value or next(is_on)}


# ---------------------------------------------------------------------------------------------------------------------
# Findings, and where settings go


def implicit(name: str, outcome: Outcome, reason: str, hint: str = "", *, value: Any = "", target: str = "") -> Finding:
    """What a system does that no key of the file asks for."""
    return Finding(
        key=name, value=value, outcome=outcome, target=target, reason=reason, hint=hint, origin=Origin.IMPLICIT
    )


def with_losses(
    told: Sequence[Finding], found: Sequence[Loss], reading: Reading, target: Dialect
) -> tuple[tuple[Finding, ...], list[Finding]]:
    """A key's finding with what the target loses of the fields that it decides.

    Returns:
        The findings of the section, and those of losses that no key alone decides.
    """
    rows = {
        each.key: row for each in told if (row := reading.rows.get(each.key)) and decides(row) and _is_usual(each, row)
    }
    # Details of what another key turns on come last.
    alone = dict(
        sorted(
            ((key, row) for key, row in rows.items() if decides_alone(row)), key=lambda each: bool(each[1].only_with)
        )
    )
    owners = _owners(found, alone)
    settled = [_settled(each, rows.get(each.key), found, owners) for each in told]
    by_name = {row.name: finding for finding in settled if (row := reading.rows.get(finding.key)) is not None}
    details = tuple(
        each if each.key in owners else _as_detail(each, reading.rows.get(each.key), by_name, target)
        for each in settled
    )
    return details, [each.finding for each, owner in zip(found, owners, strict=True) if owner is None]


def _owners(found: Sequence[Loss], alone: Mapping[str, Row]) -> list[str | None]:
    """The keys whose findings losses are told with, one a key: those that stop the user first."""
    owners: dict[int, str] = {}
    for number in sorted(range(len(found)), key=lambda number: not found[number].finding.outcome.blocks):
        key = _owner(found[number], alone)
        if key is not None and key not in owners.values():
            owners[number] = key
    return [owners.get(number) for number in range(len(found))]


def _owner(loss: Loss, alone: Mapping[str, Row]) -> str | None:
    """The key that decides the first field of a loss and no other, or before all others, or at all."""
    first = loss.fields[:1]
    exact = (key for key, row in alone.items() if decides(row) == first)
    main = (key for key, row in alone.items() if meets(first, decides(row)[:1]))
    any_ = (key for key, row in alone.items() if meets(loss.fields, decides(row)))
    return next(chain(exact, main, any_), None)


def _is_usual(finding: Finding, row: Row) -> bool:
    """Whether a key asks for something, and a target decides what becomes of it, not its value."""
    return finding.asks and (not finding.outcome.blocks or finding.outcome is row.outcome)


def _settled(finding: Finding, row: Row | None, found: Sequence[Loss], owners: Sequence[str | None]) -> Finding:
    if row is None:
        return finding
    if finding.key in owners:
        loss = found[owners.index(finding.key)].finding
        hint = loss.hint or (finding.hint if loss.outcome.blocks else "")  # no way out is worse than its system's own
        return replace(finding, outcome=loss.outcome, target=loss.target, reason=loss.reason, hint=hint)
    others = [
        owner or each.finding.name
        for each, owner in zip(found, owners, strict=True)
        if meets((*each.fields, *each.covered), decides(row))
    ]
    if others and finding.outcome is Outcome.EXACT:
        hint = "; ".join(filter(None, (finding.hint, f"see {', '.join(dict.fromkeys(others))}")))
        return replace(finding, outcome=Outcome.APPROXIMATE, hint=hint)
    if finding.outcome.blocks and not others:
        reason = f"{row.meaning or row.name}, there as here"
        return replace(finding, outcome=Outcome.EXACT, target="", reason=reason, hint="")
    return finding


def _as_detail(finding: Finding, row: Row | None, by_name: Mapping[str, Finding], target: Dialect) -> Finding:
    """A detail of what another key turns on says nothing of its own where that is refused."""
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
    """Each setting in the place of the first old key that decides the same, the others at the end; all old keys go.

    Args:
        keys: The old ones, of one mapping.
        deciding: A reading's.
        prefix: What a key has in ``deciding`` before its name in ``keys``.
    """
    replacements: dict[str, list[tuple[str, Any]]] = {key: [] for key in keys}
    named = {
        key: row
        for key, row in deciding.items()
        if key.startswith(prefix) and key.removeprefix(prefix).split(".")[0] in replacements
    }
    additions: list[tuple[str, Any]] = []
    for setting in settings:
        key = setting.place_in(named)
        place = additions if key is None else replacements[key.removeprefix(prefix).split(".")[0]]
        place.append((setting.key, setting.value))
    return replacements, additions
