"""Hugging Face: a Trainer's arguments (``fsdp``, ``fsdp_config``) and accelerate's configuration files.

What a file asks for is what its system did with it, which is not always what it says: transformers 4.51.3 reads the
keys of an ``fsdp_config`` without the prefix ``fsdp_`` only, accelerate 1.8.1 with or without it, and neither says a
word about a key that it does not read. A run in accelerate's words is in ``accelerate.py``.

Sources: transformers 4.51.3 (``training_args.py``, ``trainer.py``), accelerate 1.8.1 (``utils/dataclasses.py``,
``utils/launch.py``, ``utils/fsdp_utils.py``, ``commands/launch.py``); for FSDP2 in a Trainer's own arguments
transformers 5, for ``parallelism_config`` accelerate 1.10.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.config.rows import Row
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.fsdp1.parsing import ShardingStrategy
from composer_fsdp2.migration.capabilities import lacking
from composer_fsdp2.migration.dialect import (
    Dialect,
    Frame,
    MappingEdit,
    Path,
    Question,
    Reading,
    Section,
    Setting,
    deciding,
    merged,
    nested,
)
from composer_fsdp2.migration.dialects.fingerprints import is_axolotl
from composer_fsdp2.migration.dialects.huggingface.accelerate_words import (
    DEGREES_PREFIX,
    OF_FSDP1,
    OF_OTHERS,
    STATE_DICTS,
    degrees_of,
    differences_of,
    settings_of,
)
from composer_fsdp2.migration.dialects.huggingface.reading import (
    MAPPINGS,
    OF_TRAINERS,
    findings_of,
    held_by,
    is_bare,
    run_of,
)
from composer_fsdp2.migration.dialects.huggingface.table import (
    BESIDE,
    DEEPSPEED,
    DEGREES,
    OF_ACCELERATES_FILE,
    OLD_SIBLINGS,
    PREFIX,
    ROWS,
    SEQUENCE_DTYPE,
    SETTINGS,
    VERSION_HINT,
    VERSION_REASON,
    Held,
)
from composer_fsdp2.migration.dialects.huggingface.values import (
    A1,
    A2,
    AD,
    NOBODY,
    READS_DEGREES,
    READS_SEQUENCES,
    T1,
    T2,
    X1,
    X2,
    Reader,
    reads,
)
from composer_fsdp2.migration.run import RunConfig

_TRAINER_FSDP2 = Finding(
    key="version",
    value=2,
    outcome=Outcome.APPROXIMATE,
    target="version: 2",
    reason=VERSION_REASON,
    hint=VERSION_HINT,
    origin=Origin.LACKING,
)

# ---------------------------------------------------------------------------------------------------------------------
# In place

GONE = frozenset(
    (
        "sharding_strategy",
        "backward_prefetch",
        "forward_prefetch",
        "sync_module_states",
        "use_orig_params",
        "limit_all_gathers",
    )
)
Replacements = dict[str, list[tuple[str, Any]]]


def _rewrite_accelerate(section: Section, held: Held, run: RunConfig) -> list[MappingEdit]:
    settings = section.given.get("fsdp_config")
    new: list[tuple[str, Any]] = [
        ("fsdp_version", 2),
        ("fsdp_reshard_after_forward", held.settings["reshard_after_forward"]),
    ]
    key = held.key_of("state_dict_type")
    if key is None or held.value_of(key) is None:  # its default is another one under FSDP2
        new.append(("fsdp_state_dict_type", STATE_DICTS[run.state_dict_type]))
    edits = []
    beside: Replacements = {}
    if isinstance(settings, Mapping) and settings:
        edits.append(_settings_edit(section, held, new, places=("sharding_strategy", "version")))
    else:
        place = "fsdp_config" if "fsdp_config" in section.given else "distributed_type"
        kept = [] if place == "fsdp_config" else [(place, section.given[place])]
        beside[place] = [*kept, ("fsdp_config", dict(new))]
    degrees = degrees_of(run)
    if degrees and held.key_of("dp_shard_size") is None:
        beside.setdefault("distributed_type", [("distributed_type", section.given["distributed_type"])])
        beside["distributed_type"].append(("parallelism_config", degrees))
    return [MappingEdit(path=section.path, replacements=beside), *edits] if beside else edits


def _rewrite_bare(section: Section, held: Held) -> list[MappingEdit]:
    """The same in a file that has nothing but the settings."""
    new: list[tuple[str, Any]] = [
        ("version", 2),
        ("reshard_after_forward", held.settings["reshard_after_forward"]),
        ("state_dict_type", STATE_DICTS[held.settings["state_dict_type"]]),
    ]
    policy = held.settings["auto_wrap_policy"]
    new += [("auto_wrap_policy", policy)] if policy != "TRANSFORMER_BASED_WRAP" else []
    names = {name for name, _ in new}
    gone = [
        each.key
        for each in held.given
        if each.key in section.given
        and (each.row is None or each.row.group == SETTINGS)
        and (each.row is None or each.row.name in GONE or each.row.name in names or not each.is_read)
    ]
    return [MappingEdit(path=section.path, replacements={key: [] for key in gone}, additions=new)]


def _rewrite_trainer(section: Section, held: Held) -> list[MappingEdit]:
    if is_bare(section.given):
        return _rewrite_bare(section, held)
    settings = section.given.get("fsdp_config")
    new: list[tuple[str, Any]] = [
        ("version", 2),
        ("reshard_after_forward", held.settings["reshard_after_forward"]),
        ("state_dict_type", STATE_DICTS[held.settings["state_dict_type"]]),
    ]
    policy = held.settings["auto_wrap_policy"]
    if policy != "TRANSFORMER_BASED_WRAP":  # transformers 5 takes that one, whether fsdp says auto_wrap or not
        new.append(("auto_wrap_policy", policy))
    beside: Replacements = {}
    for name in OLD_SIBLINGS:
        if name in section.given:
            beside[name] = []
            key = name.removeprefix(PREFIX)
            if held.settings[key]:
                new.append((key, list(held.settings[key]) if key.startswith("t") else held.settings[key]))
    if held.settings["sharding_strategy"].is_hybrid:
        plain = "full_shard" if held.settings["reshard_after_forward"] else "shard_grad_op"
        words = [plain, *(["offload"] if held.settings["offload_params"] else [])]
        words += ["auto_wrap"] if policy != "NO_WRAP" else []
        given = section.given["fsdp"]
        beside["fsdp"] = [("fsdp", words if isinstance(given, list) else " ".join(words))]
    edits = []
    if isinstance(settings, Mapping) and settings:
        edits.append(_settings_edit(section, held, new, places=("version",)))
    elif "fsdp_config" in section.given:
        beside["fsdp_config"] = [("fsdp_config", dict(new))]
    else:
        beside["fsdp"] = [*beside.get("fsdp", [("fsdp", section.given["fsdp"])]), ("fsdp_config", dict(new))]
    return [MappingEdit(path=section.path, replacements=beside), *edits] if beside else edits


def _rewrite_deepspeed(section: Section, run: RunConfig) -> list[MappingEdit]:
    """DeepSpeed's section becomes FSDP's; num_processes and the like stay as they are."""
    new = {setting.key: setting.value for setting in settings_of(run)}
    replacements: Replacements = {
        "distributed_type": [("distributed_type", "FSDP")],
        "deepspeed_config": [("fsdp_config", new["fsdp_config"])],
    }
    return [MappingEdit(path=section.path, replacements=replacements)]


def _settings_edit(section: Section, held: Held, new: list[tuple[str, Any]], *, places: tuple[str, ...]) -> MappingEdit:
    """What FSDP2 has no use for goes, and so does what was not read: a system that reads FSDP2's keys would read it."""
    replacements: Replacements = {}
    names = {name.removeprefix(PREFIX) for name, _ in new}
    for given in held.given:
        where, _, key = given.key.partition(".")
        if where != "fsdp_config" or not key:
            continue
        if given.row is None and key not in section.given["fsdp_config"]:
            continue  # a number, which stays where it is
        if given.row is None or given.row.name in GONE or given.row.name in names or not given.is_read:
            replacements[key] = []
    place = next(
        (key for name in places for key in replacements if key.removeprefix(PREFIX) == name),
        None,
    )
    path = (*section.path, "fsdp_config")
    if place is None:
        return MappingEdit(path=path, replacements=replacements, additions=new)
    replacements[place] = new
    return MappingEdit(path=path, replacements=replacements)


# ---------------------------------------------------------------------------------------------------------------------
# The dialect

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
        if held.reader is AD:
            return _rewrite_deepspeed(section, reading.run)
        if held.reader.is_trainer:
            return _rewrite_trainer(section, held)
        return _rewrite_accelerate(section, held, reading.run)

    def own_findings(self, reading: Reading) -> tuple[Finding, ...]:
        """The reading's, and what Hugging Face's FSDP2 has no word for or does otherwise than its FSDP1."""
        run, held = reading.run, reading.details
        is_later_trainers = held.reader is Reader.TRAINER_FSDP2
        if run is None or is_later_trainers:
            return reading.findings
        of_run = differences_of(run, has_degrees=held.key_of("dp_shard_size") is not None)
        return (*reading.findings, *of_run, *([_TRAINER_FSDP2] if held.reader.is_trainer else []))

    def frame(self, section: Section) -> Frame | None:
        """What is FSDP's own goes, and so does what decides the precision; of a file that is nothing else, all."""
        if is_bare(section.given):
            return None
        names = ("fsdp_config", "deepspeed_config", "fsdp", "distributed_type")
        main = next((name for name in names if section.given.get(name)), "fsdp_config")
        is_nested = isinstance(section.given.get("fsdp_config"), Mapping)
        return Frame(
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
        return {reader.value: value for reader, value in row.defaults.items()}

    def read_by(self, row: Row) -> tuple[str, ...]:
        if row.group == DEGREES:
            return (READS_DEGREES,)
        if row.name == SEQUENCE_DTYPE:
            return (READS_SEQUENCES,)
        return tuple(reader.value for reader in Reader if reads(reader, row)) or (NOBODY,)

    def instead(self, row: Row) -> Mapping[str, str]:
        # A Trainer of transformers 4.51.3 passes over names with the prefix, those of keys that it reads as well.
        return {
            reader.value: way
            for reader, way in row.instead.items()
            if reader is Reader.TRAINER_FSDP1 or not reads(reader, row)
        }

    def questions(self, row: Row, value: Any) -> Iterator[Question]:
        is_degree = row.group == DEGREES
        for reader, base in _FILES.items():
            asks = reader is Reader.ACCELERATE_FSDP2 if is_degree else reads(reader, row) or row.read_by == (NOBODY,)
            if not asks:
                continue
            name = row.aliases[0] if row.aliases and reader.is_trainer else row.name
            prefix = _PREFIXES[row.group][0 if reader.is_trainer else -1]
            values = base
            if row.name in _COMPANIONS:
                beside, its_value = _COMPANIONS[row.name]
                values = merged(values, nested(prefix + beside, its_value))
            values = merged(values, nested(prefix + name, value))
            who = READS_DEGREES if is_degree else reader.value
            yield Question(section=Section.at((), values), key=prefix + name, reader=who)
