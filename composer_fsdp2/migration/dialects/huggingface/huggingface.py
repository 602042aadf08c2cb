"""A Trainer's arguments (``fsdp``, ``fsdp_config``), and accelerate's configuration files."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.config.rows import Row, idle
from composer_fsdp2.config.sharding import GradientSync
from composer_fsdp2.config.text import nearest
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.fsdp1.parsing import ShardingStrategy
from composer_fsdp2.migration.dialect import (
    Dialect,
    MappingEdit,
    Reading,
    ReplacedBlock,
    Section,
    Setting,
    implicit,
    with_losses,
)
from composer_fsdp2.migration.dialects.fingerprints import is_axolotl
from composer_fsdp2.migration.dialects.huggingface.effective import OF_TRAINERS, effective_config, is_bare
from composer_fsdp2.migration.dialects.huggingface.keys import (
    BY_PLACE,
    ROWS,
    SEQUENCE_DTYPE,
    SEQUENCES,
    SYNC_ROW,
    VERSION_HINT,
    VERSION_REASON,
    WITHOUT_EFFECT,
    EffectiveConfig,
    GivenKey,
    Key,
    off,
    reads,
    syncs,
    wrap_of,
)
from composer_fsdp2.migration.dialects.huggingface.limits import LIMITS, NEEDS_DEGREES
from composer_fsdp2.migration.dialects.huggingface.rewriting import (
    rewritten,
    settings_in_place,
    settings_of,
    sizes_in_place,
)
from composer_fsdp2.migration.dialects.huggingface.values import (
    A1,
    A2,
    AD,
    BESIDE,
    DEEPSPEED,
    DEGREES,
    DEGREES_PREFIX,
    MAPPINGS,
    NOBODY,
    OF_ACCELERATES_FILE,
    OLD_SIBLINGS,
    PREFIX,
    SETTINGS,
    T1,
    T2,
    X1,
    X2,
    Reader,
)
from composer_fsdp2.migration.lens import Limitation, Loss
from composer_fsdp2.migration.paths import Path, merged
from composer_fsdp2.migration.run import RunConfig, Wrap, WrapKind

# A file with version: 2 already has this finding at that key.
_TRAINER_FSDP2 = Finding(
    key="version",
    value=2,
    outcome=Outcome.APPROXIMATE,
    target="version: 2",
    reason=VERSION_REASON,
    hint=VERSION_HINT,
    origin=Origin.LACKING,
)
# `migrate` accepts degrees in any file, to specify the mesh of a hybrid strategy; this is the system that reads them.
_READS_DEGREES = "accelerate 1.10"
_READS_SEQUENCES = "accelerate 1.12"

_BY_LAYER = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
# On one node, a launcher's default, hybrid strategies have one replica only.
_SEVERAL_NODES = {"num_machines": 2, "num_processes": 16}
# By reader: a file that enables sharding by layer.
_FILES: dict[Reader, dict[str, Any]] = {
    T1: {"fsdp": "full_shard auto_wrap"},
    T2: {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2}},
    A1: {"distributed_type": "FSDP", "fsdp_config": _BY_LAYER, **_SEVERAL_NODES},
    A2: {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, **_BY_LAYER}},
    AD: {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}},
}
# By group: the prefixes of a key, a Trainer's first, accelerate's last.
_PREFIXES = {
    SETTINGS: ("fsdp_config.", f"fsdp_config.{PREFIX}"),
    BESIDE: ("",),
    DEGREES: ("parallelism_config.", f"parallelism_config.{DEGREES_PREFIX}"),
    DEEPSPEED: ("deepspeed_config.",),
}


class HuggingFaceDialect(Dialect):
    """A Trainer's arguments and accelerate's files; written as accelerate's FSDP2 keys."""

    name, target = "huggingface", "accelerate"
    title = "Hugging Face: Trainer and accelerate"
    rows: Sequence[Key] = tuple(row for row in ROWS if not row.read_by or not {X1, X2}.issuperset(row.read_by))
    limits: Sequence[Limitation] = LIMITS
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

    companions: Mapping[str, Mapping[str, Any]] = {
        "min_num_params": {"auto_wrap_policy": "SIZE_BASED_WRAP"},
        "auto_wrap_policy": {"min_num_params": 1},
    }

    def holder(self, path: Path) -> Path:
        return path[:-1] if path[-1:] and path[-1] in MAPPINGS else path

    def find(self, path: Path, values: Mapping[str, Any], parent: Mapping[str, Any]) -> Path | None:
        """Return the path of a mapping with a Trainer's FSDP arguments, or of an accelerate configuration file."""
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
        config = self.effective(section)
        run = None
        try:
            run = RunConfig.of_fields(_fields(config))
        except ConfigError as error:
            key = config.key_of("dp_shard_size", "dp_replicate_size") or config.key_of("sharding_strategy", "fsdp")
            config.problems.setdefault(key or "mesh", str(error))
        beside = [section.given.get(name) or {} for name in MAPPINGS]  # may be a file name or unreadable
        is_whole = all(isinstance(each, Mapping) for each in beside)
        is_readable = not config.problems and is_whole and not config["xla"]
        return Reading(
            run=run if is_readable else None,
            findings=tuple(findings_of(config)),
            rows={given.key: given.row for given in config.given if given.row is not None},
            # Includes keys that are not read: the setting in effect is written where the user looks for it.
            kept=frozenset(given.key for given in config.given if not given.is_read and not given.is_off),
            details=config,
        )

    def effective(self, section: Section) -> EffectiveConfig:
        """Return the configuration that the system computed from a section."""
        return effective_config(section.given, is_file=not section.path)

    def settings(self, run: RunConfig) -> Iterator[Setting]:
        yield from settings_of(run)

    def rewrite(self, section: Section, reading: Reading) -> list[MappingEdit]:
        """Replace FSDP1's keys by FSDP2's in place; no edits if FSDP2 does not support the strategy."""
        config: EffectiveConfig = reading.details
        keeps_all = config["sharding_strategy"] is ShardingStrategy.NO_SHARD
        if reading.run is None or keeps_all or config.reader.is_fsdp2:
            return []
        return rewritten(section, config, reading.run)

    def settings_in(self, reading: Reading, run: RunConfig) -> Iterator[Setting]:
        config: EffectiveConfig = reading.details
        found = self.settings(run) if config.reader in (A2, X2) else settings_in_place(config, run)
        for each in (*found, *sizes_in_place(config, run)):
            name = each.key.rpartition(".")[2].removeprefix(PREFIX).removeprefix(DEGREES_PREFIX)
            yield replace(each, key=config.key_of(name) or each.key)

    def own_findings(self, reading: Reading, lost: Sequence[Loss]) -> tuple[Finding, ...]:
        """Return the findings of the reading, and those for settings that Hugging Face's FSDP2 lacks or treats
        differently from its FSDP1."""
        config: EffectiveConfig = reading.details
        findings = tuple(map(as_own, reading.findings))
        if reading.run is None or config.reader.is_fsdp2:
            return (*findings, *(each.finding for each in lost if each.is_fault))
        # A strategy that FSDP2 does not support is left unchanged.
        lost = lost or self.express(reading.run.without_training()).losses
        found = [replace(each, finding=self._of_own(each, config)) for each in lost]
        findings, rest = with_losses(findings, found, reading, self)
        return (*findings, *rest, *([_TRAINER_FSDP2] if config.reader.is_trainer else []))

    def _of_own(self, loss: Loss, config: EffectiveConfig) -> Finding:
        """Return the finding of a loss, adapted to the section.

        The norm of a DeepSpeed section is lost in FSDP's; a file with degrees is for a release that reads them.
        """
        first = next(iter(loss.fields), "")
        if first == "max_grad_norm" and config.key_of("gradient_clipping") is not None:
            return replace(loss.finding, outcome=Outcome.NEEDS_DECISION)
        if loss.is_kept and first in NEEDS_DEGREES and config.key_of("dp_shard_size") is not None:
            return replace(loss.finding, outcome=Outcome.EXACT, hint="")
        return loss.finding

    def replaced_block(self, section: Section) -> ReplacedBlock | None:
        """Return the keys of FSDP and of the precision; None for a file that has no other keys, replaced as a whole."""
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
        assert isinstance(row, Key)
        return {reader.value: value for reader, value in row.defaults.items() if reader in self.readers}

    def read_by(self, row: Row) -> tuple[str, ...]:
        if row.name == SEQUENCE_DTYPE or row.name in SEQUENCES:
            return (_READS_SEQUENCES,)
        if row.group == DEGREES:
            return (_READS_DEGREES,)
        return tuple(each.value for each in Reader if each in self.readers and reads(each, row)) or (NOBODY,)

    def instead(self, row: Row) -> Mapping[str, str]:
        assert isinstance(row, Key)
        # A Trainer of transformers 4.51.3 ignores prefixed names, also those of keys that it reads without prefix.
        return {
            reader.value: way
            for reader, way in row.instead.items()
            if reader in self.readers
            if reader is Reader.TRAINER_FSDP1 or not reads(reader, row)
        }

    def files(self, row: Row, value: Any) -> Mapping[str, Section]:
        if row.group == DEGREES:
            return {self.read_by(row)[0]: Section.at((), _FILES[AD if row.name in SEQUENCES else A2])}
        is_read_by_none = isinstance(row, Key) and row.read_by == (NOBODY,)
        asked = (reader for reader in _FILES if is_read_by_none or reads(reader, row))
        return {reader: Section.at((), _FILES[reader]) for reader in asked}

    def place(self, row: Row, section: Section) -> str:
        is_trainers = "fsdp" in section.given
        name = row.aliases[0] if row.aliases and is_trainers else row.name
        return _PREFIXES[row.group][0 if is_trainers else -1] + name


# ---------------------------------------------------------------------------------------------------------------------
# Findings


def findings_of(config: EffectiveConfig) -> Iterator[Finding]:
    for given in config.given:
        yield _of_no_row(given, config) if given.row is None else _finding(given, given.row, config)
    given_keys = {given.key for given in config.given}
    for key, problem in config.problems.items():
        if key not in given_keys:
            yield implicit(key, Outcome.NEEDS_DECISION, problem)
    if is_bare(config.around) and config.key_of("bf16", "fp16") is None:
        yield _IMPLICIT_PRECISION
    if config.reader is Reader.ACCELERATE_DEEPSPEED:
        yield from _IMPLICIT_OF_DEEPSPEED
        if config.key_of("gradient_clipping") is None:
            yield _IMPLICIT_CLIPPING
    elif not config.reader.is_fsdp2:
        yield from _implicit_findings(config)
    yield from _quantized(config.around)


def _quantized(values: Mapping[str, Any]) -> Iterator[Finding]:
    bits = next((bits for bits in (4, 8) if values.get(f"load_in_{bits}bit") is True), None)
    if bits is not None:
        yield implicit(
            _QUANTIZED,
            Outcome.UNSUPPORTED,
            "bitsandbytes' weights lose their quantization in fully_shard, for which axolotl has a patch of its own "
            "and composer_fsdp2 none: the base model needs several times the memory, and computes other numbers",
            "load the base model in bfloat16, and remove load_in_4bit and load_in_8bit",
            value=f"{bits} bits",
        )


def as_own(finding: Finding) -> Finding:
    """Convert a finding of the model for a file that stays in its system, whose patches are still in effect."""
    if finding.key != _QUANTIZED:
        return finding
    reason = "they are made where the model is made, outside of this section, and stay the system's own"
    return replace(finding, outcome=Outcome.APPROXIMATE, target="the model's code", reason=reason, hint="")


_QUANTIZED = "quantized weights"


def _finding(given: GivenKey, row: Key, config: EffectiveConfig) -> Finding:
    usual = row.usual(given.key, given.value)
    if given.key in config.problems:
        return replace(usual, outcome=Outcome.NEEDS_DECISION, reason=config.problems[given.key], target="")
    if given.is_off and row.defaults and not any(row.defaults.values()):
        usual = off(usual)
        if row.outcome is Outcome.UNSUPPORTED:
            usual = replace(usual, outcome=Outcome.UNNEEDED)
    if not given.is_read:
        return _unread(usual, given, row, config)
    return usual if row.decide is None else row.decide(usual, config)


def _of_no_row(given: GivenKey, config: EffectiveConfig) -> Finding:
    name = given.key.split(".")[-1]
    finding = Finding(key=given.key, value=given.value, outcome=Outcome.NEEDS_DECISION, reason="")
    if name == "fsdp_config" and isinstance(given.value, str):
        return replace(
            finding,
            reason="the settings are in another file, which is not read here",
            hint="write its keys here as a mapping, without the prefix fsdp_ (of the keys of a file it is taken off)",
        )
    if given.key in MAPPINGS and not given.value:
        return idle(finding, "it is empty")
    if given.key in MAPPINGS:
        return replace(finding, reason="this key takes a mapping", hint="write its keys below it, or remove it")
    system = "axolotl" if config.reader.is_axolotl else "Hugging Face"
    if "." not in given.key and not config.reader.is_trainer:
        near, reason = nearest(name, OF_ACCELERATES_FILE), "accelerate refuses a file with a key that it does not know"
        hint = f"did you mean {near}?" if near else "remove it"
        return replace(finding, reason=reason, hint=hint, known=False)
    near = nearest(name.removeprefix(PREFIX), {known for _, known in BY_PLACE})
    prefix = PREFIX if name.startswith(PREFIX) and near != "fsdp" else ""
    finding = replace(finding, reason=f"{system} knows no such key, and passed over it", known=False)
    hint = f"write it beside fsdp_config, not in it: {near}" if near == name else f"did you mean {prefix}{near}?"
    return replace(finding, hint=hint) if near else idle(finding, finding.reason)


def _unread(usual: Finding, given: GivenKey, row: Key, config: EffectiveConfig) -> Finding:
    """Return the finding for a key that the system ignored; nothing is lost if its value was in effect anyway."""
    reader, is_doubled = config.reader, _is_doubled(given, row, config)
    reason = f"{config.key_of(row.name)} says it again" if is_doubled else f"{reader.value} does not read it here"
    setting = _OF_SPEED.get(row.name, row.name)
    open_ = replace(usual, outcome=Outcome.NEEDS_DECISION, target="", hint="remove it")
    if given.value is None and reader.is_axolotl:
        return idle(usual, "it is empty")
    problem, value = "", None
    try:
        value = row.takes.parse(given.value, reader)
    except ConfigError as error:
        problem = f"; {error}"
    if not problem and (row.name in WITHOUT_EFFECT or _is_in_effect(setting, value, config)):
        return idle(usual, f"{reason}, and what it says held all the same")
    way = f"{DEGREES_PREFIX}{row.name}" if row.group == DEGREES else row.instead.get(reader, "")
    if row.name in _OF_SPEED:
        return _unread_prefetch(usual, reason, config[setting], "" if reader.is_axolotl else way)
    if problem:
        return replace(open_, reason=reason + problem)
    if is_doubled:
        return replace(open_, reason=f"{reason}, and held", hint="as trained: remove it; as written: remove the other")
    how = f" (as {way})" if way else ""
    if reader is Reader.AXOLOTL_FSDP1 and row is SYNC_ROW:
        reason = "axolotl passes it on from 0.12 on; before"
    return replace(
        open_,
        reason=f"{reason}: the run went by {_word(config[row.name])}",
        hint=f"as trained: remove it; as written: say it where it is read{how}",
    )


def _unread_prefetch(usual: Finding, reason: str, value: object, way: str) -> Finding:
    """Return the finding for an ignored prefetch key: it affects speed but no numbers, so no decision is needed."""
    reason = f"{reason}: the run went by {_word(value)}; no number depends on it"
    hint = f"it is read as {way}" if way else ""
    return replace(usual, outcome=Outcome.APPROXIMATE, target="as it ran", reason=reason, hint=hint)


# Keys that change only speed and memory, not the numbers of the run; each with the setting that it configures.
_OF_SPEED = {
    "backward_prefetch": "backward_prefetch",
    "backward_prefetch_policy": "backward_prefetch",
    "forward_prefetch": "forward_prefetch",
}


def _is_doubled(given: GivenKey, row: Key, config: EffectiveConfig) -> bool:
    """Whether the file has the key under another of its names, which is read."""
    is_inert = config.reader is Reader.TRAINER_FSDP1 and given.key.split(".")[-1].startswith(PREFIX)
    return reads(config.reader, row) and not is_inert and config.key_of(row.name) not in (None, given.key)


def _word(config: object) -> object:
    if config in ((), None):
        return "nothing"
    if isinstance(config, bool):
        return str(config).lower()
    return config.value if isinstance(config, ShardingStrategy) else config


def _is_in_effect(setting: str, value: Any, config: EffectiveConfig) -> bool:
    if not isinstance(value, ShardingStrategy):
        return bool(value == config[setting])
    if config["sharding_strategy"] is not None:
        return value is config["sharding_strategy"]
    is_plain = value in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)
    return is_plain and value.reshards_after_forward == config["reshard_after_forward"]


# Defaults of FSDP1 that differ from FSDP2's; for wrapping see _implicit_wrapping.
# fmt: off
_IMPLICIT: tuple[tuple[Callable[[EffectiveConfig], bool], Finding], ...] = (
    (lambda config: config["mixed_precision"] != "no", implicit("casting of inputs and buffers", Outcome.EXACT,
        "FSDP1 cast the root's inputs only, and buffers; FSDP2 by itself casts each unit's inputs, and no buffer",
        "cast_forward_inputs: false and buffer_dtype keep it so", target="cast_root_inputs, buffer_dtype")),
    (lambda config: config.key_of("backward_prefetch") is None, implicit("backward_prefetch", Outcome.EXACT,
        "Hugging Face prefetched no unit in backward; FSDP2 by itself prefetches one",
        "leave the prefetch to FSDP2 for speed, at the price of one more unit in memory",
        target="prefetch in backward: none")),
    (lambda config: config.key_of("state_dict_type") is None, implicit("state_dict_type", Outcome.EXACT,
        "checkpoints were full ones; accelerate's FSDP2 saves sharded ones by default",
        target="state_dict_type: full")),
    (lambda config: config.key_of("sync_module_states") is None and config["sync_module_states"],
        implicit("sync_module_states", Outcome.EXACT, "rank 0 sent its values to all others",
        target="sync_module_states: true")),
)
_IMPLICIT_PRECISION = implicit("precision", Outcome.APPROXIMATE,
    "no dtype stands in such a file; without one the run is in float32",
    "where the command or the script says bf16 or fp16, write it here, where a Trainer passes over it: bf16: true")
_IMPLICIT_OF_DEEPSPEED = (
    implicit("units", Outcome.APPROXIMATE,
        "DeepSpeed gathers parameters as modules need them, and has no units; here each layer that the model names is "
        "one", "fsdp_config.wrap_policy can name others", target="the classes of the model's _no_split_modules"),
    implicit("autocast", Outcome.APPROXIMATE,
        "DeepSpeed computes in the dtype of mixed_precision itself; autocast keeps some operations, such as norms, in "
        "float32", target="precision"),
    implicit("sync_module_states", Outcome.EXACT, "DeepSpeed sends rank 0's values to all others",
        target="sync_module_states: true"),
    implicit("optimizer", Outcome.APPROXIMATE,
        "DeepSpeed's checkpoints are in a layout of its own, which composer_fsdp2 does not read: resume from weights "
        "(zero_to_fp32.py writes them), and with a new optimizer's state", target=""),
)
_IMPLICIT_CLIPPING = implicit("gradient clipping", Outcome.EXACT,
    "without a norm, or with auto, accelerate has DeepSpeed clip gradients to a norm of 1", value=1.0,
    target="gradient clipping")
_IMPLICIT_SYNC = implicit("gradient_sync", Outcome.EXACT,
    "of several microbatches a Trainer reduces gradients in the last one only, and holds unsharded ones until then",
    "gradient_sync: every spares that memory, and communicates more", target="gradient_sync: last")
# fmt: on


def _implicit_findings(config: EffectiveConfig) -> Iterator[Finding]:
    yield from (finding for applies, finding in _IMPLICIT if applies(config))
    yield from _implicit_wrapping(config)
    if syncs(config["accelerator_config"], config) is GradientSync.LAST:
        yield _IMPLICIT_SYNC


def _implicit_wrapping(config: EffectiveConfig) -> Iterator[Finding]:
    decided_by_words = config.reader is Reader.TRAINER_FSDP1
    is_axolotl = config.reader.is_axolotl
    if not decided_by_words and config.key_of("auto_wrap_policy") is not None:
        return
    if decided_by_words and "fsdp" not in config.around:
        return  # the options of fsdp are in another place
    wrap = wrap_of(config)
    if wrap.kind is WrapKind.ROOT:
        prefix = "" if is_axolotl else PREFIX
        way = "auto_wrap in fsdp" if decided_by_words else f"{prefix}auto_wrap_policy: TRANSFORMER_BASED_WRAP"
        yield implicit(
            "wrapping",
            Outcome.EXACT,
            "no wrapping was asked for, so that all parameters were gathered at once",
            f"{way} makes each layer a unit, and memory much smaller",
            target="the whole model is one unit",
        )
    elif wrap == Wrap(kind=WrapKind.CLASSES):
        yield implicit(
            "transformer_layer_cls_to_wrap",
            Outcome.EXACT,
            "the model itself names the classes that become units",
            target="the classes of the model's _no_split_modules",
        )


def _fields(config: EffectiveConfig) -> dict[str, Any]:
    """Return the fields of the run, from the keys of the section and from those beside it.

    Raises:
        ConfigError: the number of ranks per node is unknown.
    """
    around, is_axolotl = config.around, config.reader.is_axolotl
    of_keys = {name: read(config[row.name], config) for row in ROWS for name, read in row.read.items()}
    if not config.reader.is_trainer:
        of_keys |= {"num_ranks": config.count("num_processes"), "num_nodes": config.count("num_machines")}
    if is_axolotl:
        of_keys |= {"save_only_model": bool(around.get("save_only_model")), "adapter": around.get("adapter")}
        of_keys |= {"compile": around.get("torch_compile") in (True, "auto")}
    return of_keys
