"""A Trainer's arguments (``fsdp``, ``fsdp_config``), and accelerate's configuration files."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.config.rows import Row
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.fsdp1.parsing import ShardingStrategy
from composer_fsdp2.migration.capabilities import lacking
from composer_fsdp2.migration.dialect import (
    Dialect,
    MappingEdit,
    Question,
    Reading,
    ReplacedBlock,
    Section,
    Setting,
    deciding,
    told_once,
)
from composer_fsdp2.migration.dialects.fingerprints import is_axolotl
from composer_fsdp2.migration.dialects.huggingface.accelerate_words import (
    OF_FSDP1,
    OF_OTHERS,
    differences_of,
    settings_of,
)
from composer_fsdp2.migration.dialects.huggingface.fates import VERSION_HINT, VERSION_REASON
from composer_fsdp2.migration.dialects.huggingface.given_keys import OF_TRAINERS, is_bare
from composer_fsdp2.migration.dialects.huggingface.held import Held
from composer_fsdp2.migration.dialects.huggingface.held_findings import as_own, findings_of, keeps_own_values
from composer_fsdp2.migration.dialects.huggingface.held_run import run_of
from composer_fsdp2.migration.dialects.huggingface.huggingface_patch import patch_steps
from composer_fsdp2.migration.dialects.huggingface.places import (
    BESIDE,
    DEEPSPEED,
    DEGREES,
    DEGREES_PREFIX,
    MAPPINGS,
    OF_ACCELERATES_FILE,
    OLD_SIBLINGS,
    PREFIX,
    SETTINGS,
)
from composer_fsdp2.migration.dialects.huggingface.readers import A1, A2, AD, NOBODY, T1, T2, X1, X2, Reader, reads
from composer_fsdp2.migration.dialects.huggingface.reading import held_by
from composer_fsdp2.migration.dialects.huggingface.rewriting import rewritten
from composer_fsdp2.migration.dialects.huggingface.table import ROWS, SEQUENCE_DTYPE, SEQUENCES
from composer_fsdp2.migration.patch import Patch, PatchStep
from composer_fsdp2.migration.paths import Path, merged, nested
from composer_fsdp2.migration.run import RunConfig

# A file that says it already has this finding at its own key.
_TRAINER_FSDP2 = Finding(
    key="version",
    value=2,
    outcome=Outcome.APPROXIMATE,
    target="version: 2",
    reason=VERSION_REASON,
    hint=VERSION_HINT,
    origin=Origin.LACKING,
)
# `migrate` takes degrees in any file, as the answer to what a hybrid's mesh was; of the systems this one reads them.
_READS_DEGREES = "accelerate 1.10"
_READS_SEQUENCES = "accelerate 1.12"

# By who reads it, a file that turns sharding on, layer by layer.
_FILES: dict[Reader, dict[str, Any]] = {
    T1: {"fsdp": "full_shard auto_wrap"},
    T2: {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2}},
    A1: {"distributed_type": "FSDP", "fsdp_config": {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}},
    A2: {
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    },
    AD: {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}},
}
# What must stand beside a key for the system to look at it.
_COMPANIONS: dict[str, tuple[str, Any]] = {
    "min_num_params": ("auto_wrap_policy", "SIZE_BASED_WRAP"),
    "auto_wrap_policy": ("min_num_params", 1),
}
# On one, which is a launcher's default, hybrids replicate to nobody.
_SEVERAL_NODES = {"num_machines": 2, "num_processes": 16}
# By group, what stands before a key: to a Trainer first, to accelerate last.
_PREFIXES = {
    SETTINGS: ("fsdp_config.", f"fsdp_config.{PREFIX}"),
    BESIDE: ("",),
    DEGREES: ("parallelism_config.", f"parallelism_config.{DEGREES_PREFIX}"),
    DEEPSPEED: ("deepspeed_config.",),
}


class HuggingFaceDialect(Dialect):
    """A Trainer's arguments and accelerate's files; the FSDP2 words that it writes are accelerate's."""

    name, target = "huggingface", "accelerate"
    title = "Hugging Face: Trainer and accelerate"
    rows = tuple(row for row in ROWS if not row.read_by or not {X1, X2}.issuperset(row.read_by))
    lacks = (*OF_FSDP1, *OF_OTHERS)
    words: Sequence[str] = ("fsdp", "distributed_type", "deepspeed_config", "reshard_after_forward", *OF_TRAINERS)
    readers: Sequence[str] = (T1, T2, A1, A2, AD)
    silent = tuple(
        Section.at((), merged(_FILES[reader], more))
        for reader, more in (
            (T1, {"bf16": True, "gradient_accumulation_steps": 2}),
            (T1, {"fsdp": "full_shard"}),
            (A1, {"mixed_precision": "bf16"}),
        )
    )

    def holder(self, path: Path) -> Path:
        return path[:-1] if path[-1:] and path[-1] in MAPPINGS else path

    def find(self, path: Path, values: Mapping[str, Any], parent: Mapping[str, Any]) -> Path | None:
        """A mapping with a Trainer's FSDP arguments, or a configuration file of accelerate's."""
        settings, fsdp = values.get("fsdp_config"), values.get("fsdp")
        if values.get("distributed_type") == "DEEPSPEED" and isinstance(values.get("deepspeed_config"), Mapping):
            return path
        if is_axolotl(values):
            return None
        has_settings = isinstance(settings, str) or (isinstance(settings, Mapping) and len(settings) > 0)
        if not path and is_bare(values):
            is_section = True
        elif "distributed_type" in values:
            is_section = values["distributed_type"] == "FSDP" or has_settings
        elif isinstance(fsdp, str | list | bool):
            is_section = bool(fsdp) or has_settings
        else:
            is_section = isinstance(settings, Mapping) and any(str(key).startswith(PREFIX) for key in settings)
        return path if is_section else None

    def read(self, section: Section) -> Reading:
        held = self.held(section)
        run = None
        try:
            run = run_of(held)
        except ConfigError as error:
            key = held.key_of("dp_shard_size", "dp_replicate_size") or held.key_of("sharding_strategy", "fsdp")
            held.problems.setdefault(key or "mesh", str(error))
        beside = [section.given.get(name) or {} for name in MAPPINGS]  # another file's name, or what cannot be read
        is_whole = all(isinstance(each, Mapping) for each in beside)
        is_readable = not held.problems and is_whole and not held.settings["xla"]
        findings = tuple(findings_of(held))
        # A key that is not read counts: what holds in its stead goes where the user looks for it.
        unread = {given.key for given in held.given if not given.is_read}
        aspects = {given.key: given.row.aspect for given in held.given if given.row is not None and not given.is_off}
        return Reading(
            run=run if is_readable else None,
            findings=findings,
            aspects=deciding(aspects, (finding for finding in findings if finding.key not in unread)),
            rows={given.key: given.row for given in held.given if given.row is not None},
            details=held,
        )

    def held(self, section: Section) -> Held:
        """What the system made of a section."""
        return held_by(section.given, is_file=not section.path)

    def settings(self, run: RunConfig) -> Iterator[Setting]:
        yield from settings_of(run)

    def differences(self, run: RunConfig) -> Iterator[Finding]:
        yield from differences_of(run)
        yield from lacking(OF_OTHERS, run)

    def rewrite(self, section: Section, reading: Reading) -> list[MappingEdit]:
        """FSDP2's words for FSDP1's, in place; nothing where FSDP2 has no form for the strategy."""
        held: Held = reading.details
        keeps_all = held.settings["sharding_strategy"] is ShardingStrategy.NO_SHARD
        if reading.run is None or keeps_all or held.reader.is_fsdp2:
            return []
        return rewritten(section, held, reading.run)

    def patch_steps(self, patch: Patch, section: Section, reading: Reading) -> Iterator[PatchStep]:
        yield from patch_steps(patch, section, reading.details)

    def own_findings(self, reading: Reading) -> tuple[Finding, ...]:
        """The reading's, and what Hugging Face's FSDP2 has no word for or does otherwise than its FSDP1."""
        run, held = reading.run, reading.details
        findings = tuple(map(as_own, reading.findings))
        if run is None or held.reader.is_fsdp2:
            return findings
        of_run = [*differences_of(run, has_degrees=held.key_of("dp_shard_size") is not None), *keeps_own_values(held)]
        if held.reader is AD:  # DeepSpeed's section said what no section of FSDP's does
            clips = held.key_of("gradient_clipping") is not None
            decide = {"gradient clipping": Outcome.NEEDS_DECISION} if clips else {}
            found = [replace(each, outcome=decide.get(each.key, each.outcome)) for each in lacking(OF_OTHERS, run)]
            findings, lacks = told_once(findings, found, reading, self)
            of_run += lacks
        return (*findings, *of_run, *([_TRAINER_FSDP2] if held.reader.is_trainer else []))

    def replaced_block(self, section: Section) -> ReplacedBlock | None:
        """What is FSDP's own goes, and so does what decides the precision; of a file that is nothing else, all."""
        if is_bare(section.given):
            return None
        names = ("fsdp_config", "deepspeed_config", "fsdp", "distributed_type")
        main = next((name for name in names if section.given.get(name)), "fsdp_config")
        is_nested = isinstance(section.given.get("fsdp_config"), Mapping)
        return ReplacedBlock(
            entry=(*section.path, main),
            inner=(*section.path, "fsdp_config") if is_nested and main == "fsdp_config" else None,
            prefix="fsdp_config.",
            beside=tuple(
                name
                for name in map(str, section.given)
                if "distributed_type" not in section.given or name in OF_ACCELERATES_FILE
            ),
        )

    def places(self, row: Row) -> tuple[str, ...]:
        names = (row.name, *row.aliases)
        return (*(prefix + name for name in names for prefix in _PREFIXES[row.group]), *self._old(row))

    def _old(self, row: Row) -> tuple[str, ...]:
        return tuple(name for name in OLD_SIBLINGS if name == PREFIX + row.name)

    def aliases(self, row: Row) -> tuple[str, ...]:
        return (*row.aliases, *self._old(row))

    def values(self, row: Row) -> tuple[Any, ...]:
        return row.takes.choices

    def defaults(self, row: Row) -> Mapping[str, Any]:
        return {reader.value: value for reader, value in row.defaults.items() if reader in self.readers}

    def read_by(self, row: Row) -> tuple[str, ...]:
        if row.name == SEQUENCE_DTYPE or row.name in SEQUENCES:
            return (_READS_SEQUENCES,)
        if row.group == DEGREES:
            return (_READS_DEGREES,)
        return tuple(each.value for each in Reader if each in self.readers and reads(each, row)) or (NOBODY,)

    def instead(self, row: Row) -> Mapping[str, str]:
        # A Trainer of transformers 4.51.3 passes over names with the prefix, those of keys that it reads as well.
        return {
            reader.value: way
            for reader, way in row.instead.items()
            if reader in self.readers
            if reader is Reader.TRAINER_FSDP1 or not reads(reader, row)
        }

    def questions(self, row: Row, value: Any) -> Iterator[Question]:
        is_degree = row.group == DEGREES
        for reader, base in _FILES.items():
            is_asked = reader is (AD if row.name in SEQUENCES else A2)
            asks = is_asked if is_degree else reads(reader, row) or row.read_by == (NOBODY,)
            if not asks:
                continue
            name = row.aliases[0] if row.aliases and reader.is_trainer else row.name
            prefix = _PREFIXES[row.group][0 if reader.is_trainer else -1]
            values = base
            if row.name in _COMPANIONS:
                beside, its_value = _COMPANIONS[row.name]
                values = merged(values, nested(prefix + beside, its_value))
            if row.name == "sharding_strategy" and not reader.is_trainer:
                values = merged(values, _SEVERAL_NODES)
            values = merged(values, nested(prefix + name, value))
            who = self.read_by(row)[0] if is_degree else reader.value
            yield Question(section=Section.at((), values), key=prefix + name, reader=who)
