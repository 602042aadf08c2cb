"""What all dialects have in common: a section of a file, the run that it asks for, and how a target says it.

A dialect *reads* a section into a ``RunConfig``, with a finding for every key: with what its system does with the key,
which may be nothing. A target *expresses* a run: settings, each for one aspect of the run, and findings for what it has
no word for. ``splice`` puts each setting where the old key stood that had decided the same aspect.

Imported by the dialects and ``migrate``; nothing here communicates.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.config.rows import Aspect, Row, idle
from composer_fsdp2.migration.capabilities import Lack, lacking
from composer_fsdp2.migration.patch import Patch, PatchStep, Unavailable
from composer_fsdp2.migration.paths import Path, Settings, value_at, walk, without_path
from composer_fsdp2.migration.run import RunConfig


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
    """What a section asks for: a run, unless something stands in the way, and a finding for each key.

    Args:
        aspects: Which keys of the section decided which aspect, the most important first; none that asks for nothing.
        rows: Of the keys that findings name, for what depends on the target: what the row's ``capability`` becomes.
        details: What the dialect's own other methods need to know of the section.
    """

    run: RunConfig | None
    findings: tuple[Finding, ...]
    aspects: Mapping[str, Aspect] = field(default_factory=dict)
    rows: Mapping[str, Row] = field(default_factory=dict)
    details: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A key of a target, with its value, for one aspect of the run."""

    aspect: Aspect
    key: str
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """A run in a target's words, and findings for what the target cannot say or does otherwise.

    Args:
        beside: What stands beside the section, not in it.
    """

    settings: tuple[Setting, ...]
    findings: tuple[Finding, ...] = ()
    beside: tuple[Setting, ...] = ()


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The smallest file that has one key, and as which key the report names it.

    Args:
        reader: Who would read such a file; "" if there is one only.
    """

    section: Section
    key: str
    reader: str = ""


class Dialect:
    """One system's words.

    Attributes:
        name: That users choose it by.
        title: Of its table in the documents.
        rows: Its keys.
        lacks: What its FSDP2 has no word for.
        target: That ``--to`` chooses its FSDP2 by.
        suffix: Of its files.
        heads: The keys that a section of its own stands under, outermost first, each with what comes before in its
            mapping. Empty, if a section is a file of its own.
        elsewhere: What the system makes of a key without composer_fsdp2; "" if it is told nowhere.
        readers: Who may read a file, where there are several.
        interpolates: Whether its files are read by OmegaConf, for which ``${...}`` is no text.
        words: In small letters; with one of them begins a key of every file that has a section.
        keeps_implicit: Whether its FSDP2 does what FSDP1 did without being told, so that the report tells of that, too.
        keeps_files: Whether its files, which train with FSDP2 already, stay byte for byte where it is the target.
        silent: Files that turn sharding on, and leave the rest to what is implicit.
        has_own_models: Whether its models are none of transformers', so that the classes in its files are not either.
    """

    name: str
    title: str
    rows: Sequence[Row]
    lacks: Sequence[Lack] = ()
    target: str
    suffix: str = ".yaml"
    heads: tuple[tuple[str, Settings], ...] = ()
    elsewhere: Callable[[str], str] = staticmethod(lambda key: "")
    readers: Sequence[str] = ()
    interpolates: bool = False
    words: Sequence[str] = ("fsdp",)
    keeps_implicit: bool = False
    keeps_files: bool = False
    silent: Sequence[Section] = ()
    has_own_models: bool = False

    def find(self, path: Path, values: Mapping[str, Any], parent: Mapping[str, Any]) -> Path | None:
        """The path of the section, if the mapping ``values`` at ``path`` is one, or holds one."""
        raise NotImplementedError

    def read(self, section: Section) -> Reading:
        """What a section asks for; every key of ``section.given`` has a finding."""
        raise NotImplementedError

    def settings(self, run: RunConfig) -> Iterator[Setting]:
        """A run in this dialect's FSDP2 words."""
        raise NotImplementedError

    def is_own(self, finding: Finding) -> bool:
        """Whether a key has no counterpart in other systems, unless a target's ``lacks`` or settings tell of it."""
        return False

    def keeps(self, key: str) -> bool:
        """Whether a key of a section that stays in this dialect is written as before, whatever its value."""
        return False

    def row_of(self, key: str) -> Row | None:
        """The row of a key as a report names it."""
        return next((row for row in self.rows if key in (row.name, *row.aliases)), None)

    def row_for(self, capability: str) -> Row | None:
        """The key that asks for it."""
        return next((row for row in self.rows if row.capability == capability), None) if capability else None

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
        """A run in this dialect's FSDP2 words, and what they lack."""
        return Expression(settings=tuple(self.settings(run)), findings=tuple(self.differences(run)))

    def differences(self, run: RunConfig) -> Iterator[Finding]:
        """What this dialect's FSDP2 cannot say, or does otherwise."""
        yield from lacking(self.lacks, run)

    def rewrite(self, section: Section, reading: Reading) -> list[MappingEdit]:
        """A section of this very dialect in its FSDP2 words, with as few changes as possible; nothing by default, for
        systems that train with FSDP2 already."""
        return []

    def patch_steps(self, patch: Patch, section: Section, reading: Reading) -> Iterator[PatchStep]:
        """The keys of a file of this dialect that make the change."""
        yield Unavailable(reason=f"no file of {self.title.split(':')[0]} is changed here")

    def own_findings(self, reading: Reading) -> tuple[Finding, ...]:
        """What became of each key where a section stays in this dialect: by default all words hold as before."""
        told = (finding for finding in reading.findings if finding.origin is Origin.KEY)
        return tuple(self._as_before(finding, reading.rows.get(finding.key)) for finding in told)

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
        return {str(reader): value for reader, value in row.defaults.items()} or {"": row.default}

    def aliases(self, row: Row) -> tuple[str, ...]:
        """Other names of a key, such as those of earlier releases."""
        return row.aliases

    def read_by(self, row: Row) -> tuple[str, ...]:
        """Who reads it; empty if there is one reader only."""
        return tuple(map(str, row.read_by))

    def instead(self, row: Row) -> Mapping[str, str]:
        """What does the same for each reader that passes over the key."""
        return {str(reader): way for reader, way in row.instead.items()}

    def questions(self, row: Row, value: Any) -> Iterator[Question]:
        """The smallest files with this value of a key."""
        raise NotImplementedError

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


def deciding(aspects: Mapping[str, Aspect], findings: Iterable[Finding]) -> dict[str, Aspect]:
    """The keys, with their aspects, that a target's words can replace: not those that ask for nothing."""
    unneeded = {finding.key for finding in findings if finding.outcome is Outcome.UNNEEDED}
    return {key: aspect for key, aspect in aspects.items() if aspect is not Aspect.OTHER and key not in unneeded}


def told_once(
    told: Sequence[Finding], lacks: Sequence[Finding], reading: Reading, target: Dialect
) -> tuple[tuple[Finding, ...], list[Finding]]:
    """What a target makes of what a key asks for is told of that key, and no detail of it stands in the way as well.

    Returns:
        The findings of the section, and those of the target that no key stands for.
    """
    of_keys: list[Finding] = []
    settled = []
    for finding in told:
        row = reading.rows.get(finding.key)
        if row is None or not finding.asks or (finding.outcome.blocks and finding.outcome is not row.outcome):
            settled.append(finding)  # also where its value is what needs a decision, whatever the target has
            continue
        lack = next((each for each in lacks if each.key in _asked_by(row)), None)
        if lack is not None:
            of_keys.append(lack)
            finding = _by_target(finding, lack)
        elif finding.outcome.blocks and (same := target.row_for(row.capability)):
            reason = f"{same.meaning or same.name}, there as here"
            finding = replace(finding, outcome=Outcome.EXACT, target=same.name, reason=reason, hint="")
        settled.append(finding)
    by_name = {row.name: finding for finding in settled if (row := reading.rows.get(finding.key)) is not None}
    details = tuple(_as_detail(each, reading.rows.get(each.key), by_name, target) for each in settled)
    return details, [each for each in lacks if each not in of_keys]


def _asked_by(row: Row) -> tuple[str, ...]:
    """The questions that a key answers: one of units may name embeddings and the output beside the layers."""
    return (row.capability, "further units") if row.capability == "units" else (row.capability,)


def _by_target(finding: Finding, lack: Finding) -> Finding:
    hint = lack.hint or (finding.hint if lack.outcome.blocks else "")  # no way out is worse than its system's own
    return replace(finding, outcome=lack.outcome, target=lack.target, reason=lack.reason, hint=hint)


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
    settings: Iterable[Setting], keys: Iterable[str], aspects: Mapping[str, Aspect], prefix: str = ""
) -> tuple[dict[str, list[tuple[str, Any]]], list[tuple[str, Any]]]:
    """Each setting in the place of the first old key of its aspect, the others at the end; all old keys go.

    Args:
        keys: The old ones, of one mapping.
        aspects: A reading's.
        prefix: What a key has in ``aspects`` before its name in ``keys``.
    """
    replacements: dict[str, list[tuple[str, Any]]] = {key: [] for key in keys}
    places: dict[Aspect, str] = {}
    for key, aspect in aspects.items():
        name = key.removeprefix(prefix).split(".")[0]
        # Others have nothing to do with each other.
        if key.startswith(prefix) and name in replacements and aspect is not Aspect.OTHER:
            places.setdefault(aspect, name)
    additions: list[tuple[str, Any]] = []
    for setting in settings:
        place = places.get(setting.aspect)
        (additions if place is None else replacements[place]).append((setting.key, setting.value))
    return replacements, additions
