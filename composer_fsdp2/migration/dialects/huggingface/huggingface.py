"""A Trainer's arguments (``fsdp``, ``fsdp_config``), accelerate's configuration files, and axolotl's."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.config.rows import idle, undecided
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
from composer_fsdp2.migration.dialects.huggingface.effective import OF_TRAINERS, effective_config, is_bare, reader_of
from composer_fsdp2.migration.dialects.huggingface.keys import (
    BY_PLACE,
    OF_AXOLOTL,
    ROWS,
    VERSION_HINT,
    VERSION_REASON,
    EffectiveConfig,
    GivenKey,
    Key,
    off,
    syncs,
    wrap_of,
)
from composer_fsdp2.migration.dialects.huggingface.limits import LIMITS, LIMITS_OF_AXOLOTL, NEEDS_DEGREES
from composer_fsdp2.migration.dialects.huggingface.values import (
    A1,
    A2,
    AD,
    AXOLOTL,
    BESIDE,
    DEGREES,
    DEGREES_PREFIX,
    FSDP2,
    MAPPINGS,
    NOBODY,
    OF_ACCELERATES_FILE,
    OLD_SIBLINGS,
    PREFIX,
    PREFIXES,
    SETTINGS,
    T1,
    T2,
    TRAINERS,
    X1,
    X2,
    Reader,
)
from composer_fsdp2.migration.dialects.huggingface.writing import (
    WRITTEN_BY_ACCELERATE,
    WRITTEN_BY_AXOLOTL,
    Written,
    rewritten,
    settings_in_place,
    settings_of,
    sizes_in_place,
    usual_place,
)
from composer_fsdp2.migration.lens import Limitation, Loss
from composer_fsdp2.migration.paths import Path, merged
from composer_fsdp2.migration.run import RunConfig, Wrap, WrapKind

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
# Keys that axolotl accepts but does not pass on, or only in some releases.
_NOT_PASSED_ON = ("sharding_strategy", "forward_prefetch", "sync_module_states")
_MODEL = {"base_model": "m", "micro_batch_size": 1}
_FILES_OF_AXOLOTL = {
    reader: {**_MODEL, "fsdp_version": version, "fsdp_config": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
    for version, reader in ((1, X1), (2, X2))
}


class HuggingFaceDialect(Dialect):
    """A Trainer's arguments and accelerate's files; written as accelerate's FSDP2 keys."""

    name, target = "huggingface", "accelerate"
    title = "Hugging Face: Trainer and accelerate"
    rows: Sequence[Key] = tuple(row for row in ROWS if not row.read_by or not {X1, X2}.issuperset(row.read_by))
    limits: Sequence[Limitation] = LIMITS
    key_prefixes: Sequence[str] = (
        "fsdp",
        "distributed_type",
        "deepspeed_config",
        "reshard_after_forward",
        *OF_TRAINERS,
    )
    smallest: Mapping[Reader, Mapping[str, Any]] = _FILES
    readers: Sequence[str] = tuple(_FILES)
    written: Sequence[Written] = WRITTEN_BY_ACCELERATE
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
        """Return the path of a mapping that has a Trainer's FSDP arguments or is an accelerate file, else None."""
        settings, fsdp = values.get("fsdp_config"), values.get("fsdp")
        if values.get("distributed_type") == "DEEPSPEED" and isinstance(values.get("deepspeed_config"), Mapping):
            return path
        if is_axolotl(values):
            return None
        has_settings = bool(settings) and isinstance(settings, str | Mapping)
        if "distributed_type" in values:
            is_section = values["distributed_type"] == "FSDP" or has_settings
        elif isinstance(fsdp, str | list | bool):
            is_section = bool(fsdp) or has_settings
        else:
            is_section = isinstance(settings, Mapping) and any(str(key).startswith(PREFIX) for key in settings)
        return path if is_section or (not path and is_bare(values)) else None

    def read(self, section: Section) -> Reading:
        reader = reader_of(section.given, is_axolotl=X1 in self.smallest)
        config = effective_config(section.given, reader, is_file=not section.path)
        run = None
        try:
            run = RunConfig.of_fields(_fields(config))
        except ConfigError as error:
            key = config.key_of("dp_shard_size", "dp_replicate_size") or config.key_of("sharding_strategy", "fsdp")
            config.problems.setdefault(key or "mesh", str(error))
        # A mapping may be a file name or unreadable.
        is_whole = all(isinstance(section.given.get(name) or {}, Mapping) for name in MAPPINGS)
        return Reading(
            run=run if is_whole and not config.problems and not config["xla"] else None,
            findings=tuple(findings_of(config)),
            rows={given.key: given.row for given in config.given if given.row is not None},
            # Includes keys that are not read: the setting in effect is written where the user looks for it.
            kept=frozenset(given.key for given in config.given if not given.is_read and not given.is_off),
            details=config,
        )

    def settings(self, run: RunConfig) -> Iterator[Setting]:
        return settings_of(self.written, run)

    def rewrite(self, section: Section, reading: Reading) -> list[MappingEdit]:
        """Replace FSDP1's keys by FSDP2's in place. No edits if FSDP2 does not support the strategy."""
        config: EffectiveConfig = reading.details
        keeps_all = config["sharding_strategy"] is ShardingStrategy.NO_SHARD
        if reading.run is None or keeps_all or config.reader in FSDP2:
            return []
        return rewritten(section, config, reading.run)

    def settings_in(self, reading: Reading, run: RunConfig) -> Iterator[Setting]:
        config: EffectiveConfig = reading.details
        found = self.settings(run) if config.reader in (A2, X2) else settings_in_place(config, run)
        for each in (*found, *sizes_in_place(config, run)):
            name = each.key.rpartition(".")[2].removeprefix(PREFIX).removeprefix(DEGREES_PREFIX)
            yield replace(each, key=config.key_of(name) or each.key)

    def own_findings(self, reading: Reading, lost: Sequence[Loss]) -> tuple[Finding, ...]:
        """Return the findings of the reading, and findings for settings that this system's FSDP2 lacks or treats
        differently."""
        config: EffectiveConfig = reading.details
        findings = tuple(
            replace(each, **_OF_THE_MODEL.get(each.key, {})) for each in reading.findings if each.key != _TRAINED
        )
        if reading.run is None or config.reader in FSDP2:
            return (*findings, *(each.finding for each in lost if each.is_fault))
        # A strategy that FSDP2 does not support is left unchanged.
        lost = lost or self.express(reading.run.without_training()).losses
        found = [replace(each, finding=self._adapted_finding(each, config)) for each in lost]
        findings, rest = with_losses(findings, found, reading, self)
        return (*findings, *rest, *_matching_findings(_OF_FSDP2, config))

    def _adapted_finding(self, loss: Loss, config: EffectiveConfig) -> Finding:
        """Return the finding of a lost field, adapted to the section.

        FSDP's section has no clipping norm, so DeepSpeed's needs a decision. A file that sets degrees is for a release
        that reads them, so they are exact.
        """
        first = next(iter(loss.fields), "")
        if first == "max_grad_norm" and config.key_of("gradient_clipping") is not None:
            return replace(loss.finding, outcome=Outcome.NEEDS_DECISION)
        if loss.is_kept and first in NEEDS_DEGREES and config.key_of("dp_shard_size") is not None:
            return replace(loss.finding, outcome=Outcome.EXACT, hint="")
        return loss.finding

    def replaced_block(self, section: Section) -> ReplacedBlock | None:
        """Return the keys of FSDP and of the precision; None if the file has no other keys, and is replaced as a
        whole."""
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

    def places(self, row: Any) -> tuple[str, ...]:
        above = "" if row.group == BESIDE else f"{row.group}."
        prefixes = dict.fromkeys((above, above + PREFIXES[row.group]))
        names = (prefix + name for name in (row.name, *row.aliases) for prefix in prefixes)
        return (*names, *(name for name in self.aliases(row) if name in OLD_SIBLINGS))

    def aliases(self, row: Any) -> tuple[str, ...]:
        return (*row.aliases, *(name for name in OLD_SIBLINGS if name == PREFIX + row.name))

    def defaults(self, row: Any) -> Mapping[str, Any]:
        return {reader.value: value for reader, value in row.defaults.items() if reader in self.readers}

    def read_by(self, row: Any) -> tuple[str, ...]:
        if (
            row.release and A2 in self.smallest
        ):  # `migrate` reads degrees in any file, to specify a hybrid strategy's mesh
            return (f"accelerate {row.release}",)
        return tuple(reader.value for reader in self.smallest if reader in row.read_by) or (NOBODY,)

    def instead(self, row: Any) -> Mapping[str, str]:
        # A Trainer of transformers 4.51.3 ignores prefixed names, also those of keys that it reads without prefix.
        return {
            reader.value: equivalent
            for reader, equivalent in row.instead.items()
            if reader in self.readers
            if reader is Reader.TRAINER_FSDP1 or reader not in row.read_by
        }

    def files(self, row: Any, value: Any) -> Mapping[str, Section]:
        if row.group == DEGREES and A2 in self.smallest:
            return {self.read_by(row)[0]: Section.at((), _FILES[A2 if A2 in row.read_by else AD])}
        is_read_by_none = self.read_by(row) == (NOBODY,)
        readers = (reader for reader in self.smallest if is_read_by_none or reader in row.read_by)
        return {reader: Section.at((), self.smallest[reader]) for reader in readers}

    def place(self, row: Any, section: Section) -> str:
        return usual_place(row, is_transformers="fsdp" in section.given)


class AxolotlDialect(HuggingFaceDialect):
    """Files of axolotl, each with one section. The FSDP2 keys have no prefix.

    Up to 0.11 axolotl exported the keys of an ``fsdp_config`` with the prefix ``fsdp_`` as accelerate's environment
    variables; from 0.12 on it strips the prefix, warns that it is deprecated, and exports the same. Prefixed keys are
    therefore effective in all releases, while a plain Trainer ignores them. axolotl exports fewer keys than accelerate
    reads: not the strategy, which the options of ``fsdp`` set, and no prefetching. It also passes the section to its
    Trainer, which exports the keys that it reads again. Up to 0.11, axolotl removed the prefix by ``lstrip("fsdp_")``,
    which strips letters: ``backward_prefetch`` was passed on, while ``forward_prefetch`` and ``sync_module_states``
    lost their first letter and had no effect. From 0.12 on a schema rejects prefetching, and ``sync_module_states`` is
    passed on. Under FSDP2 (``fsdp_version: 2``) axolotl replaces accelerate's checkpointing function by one that
    recomputes whole layers.

    Sources: axolotl 0.8 to 0.13 (``utils/trainer.py``: ``setup_fsdp_envs``, ``setup_parallelism_envs``;
    ``utils/schemas/fsdp.py`` and ``validation.py``; ``core/trainer_builder.py``, later ``core/builders/``;
    ``monkeypatch/accelerate/fsdp2.py``; ``docs/multi-gpu.qmd``), transformers 4.51.3 and accelerate 1.8.1 for the rest.
    """

    name = target = title = "axolotl"
    rows = tuple(row for row in ROWS if {*AXOLOTL}.intersection(row.read_by) or row.name in _NOT_PASSED_ON)
    limits = LIMITS_OF_AXOLOTL
    smallest = _FILES_OF_AXOLOTL
    readers = tuple(_FILES_OF_AXOLOTL)
    written = WRITTEN_BY_AXOLOTL
    companions: Mapping[str, Mapping[str, Any]] = {
        **HuggingFaceDialect.companions,
        "cpu_offload_pin_memory": {"offload_params": True},
    }
    silent = (
        Section.at((), {**_MODEL, "fsdp": ["full_shard"], "bf16": "auto"}),
        Section.at((), {**_MODEL, "fsdp_config": {"state_dict_type": None}}),
    )

    def find(self, path: Path, values: Mapping[str, Any], parent: Mapping[str, Any]) -> Path | None:
        """Return the path of the whole file; None if ``fsdp`` and ``fsdp_config`` are empty, because it is then not
        sharded."""
        return path if is_axolotl(values) and (values.get("fsdp") or values.get("fsdp_config")) else None

    def places(self, row: Any) -> tuple[str, ...]:
        beside = tuple(name for name, each in OF_AXOLOTL.items() if each is row)
        if row.group == BESIDE:
            return beside or (row.name,)
        inner = tuple(prefix + row.name for prefix in ("fsdp_config.", f"fsdp_config.{PREFIX}"))
        return beside + (inner if row.group == SETTINGS else ())

    def aliases(self, row: Any) -> tuple[str, ...]:
        return tuple(name for name, each in OF_AXOLOTL.items() if each is row and name != row.name)

    def place(self, row: Any, section: Section) -> str:
        return self.places(row)[0]


# ---------------------------------------------------------------------------------------------------------------------
# The run


def _fields(config: EffectiveConfig) -> dict[str, Any]:
    """Return the fields of the run, from keys inside and outside the section.

    Raises:
        ConfigError: the number of ranks per node is unknown.
    """
    around = config.around
    fields = {name: read(config[row.name], config) for row in ROWS for name, read in row.read.items()}
    if config.reader not in TRAINERS:
        fields |= {"num_ranks": config.count("num_processes"), "num_nodes": config.count("num_machines")}
    fields["adapter"] = _adapter(config)
    if config.reader in AXOLOTL:
        fields |= {"save_only_model": bool(around.get("save_only_model"))}
        fields |= {"compile": around.get("torch_compile") in (True, "auto")}
    return fields


def _adapter(config: EffectiveConfig) -> Any:
    """Return the adapter that is trained: axolotl's ``adapter``, or "lora" if ``use_peft`` of TRL's ModelConfig is
    set."""
    if config.reader in AXOLOTL:
        return config.around.get("adapter")
    return "lora" if config.around.get("use_peft") else None


# ---------------------------------------------------------------------------------------------------------------------
# Findings of keys


def findings_of(config: EffectiveConfig) -> Iterator[Finding]:
    for given in config.given:
        yield _unknown_key_finding(given, config) if given.row is None else _finding(given, given.row, config)
    given_keys = {given.key for given in config.given}
    for key, problem in config.problems.items():
        if key not in given_keys:
            yield implicit(key, Outcome.NEEDS_DECISION, problem)
    yield from _matching_findings(_IMPLICIT, config)


def _finding(given: GivenKey, row: Key, config: EffectiveConfig) -> Finding:
    finding = row.usual(given.key, given.value)
    if given.key in config.problems:
        return undecided(finding, config.problems[given.key], finding.hint)
    if given.is_off and row.defaults and not any(row.defaults.values()):
        finding = off(finding)
    if not given.is_read:
        return _ignored_key_finding(finding, given, row, config)
    return finding if row.decide is None else row.decide(finding, config)


def _unknown_key_finding(given: GivenKey, config: EffectiveConfig) -> Finding:
    name = given.key.split(".")[-1]
    finding = Finding(key=given.key, value=given.value, outcome=Outcome.NEEDS_DECISION, reason="")
    if given.key in MAPPINGS and not given.value:
        return idle(finding, "it is empty")
    if given.key in MAPPINGS:
        is_file = given.key == "fsdp_config" and isinstance(given.value, str)
        return undecided(finding, *(_IN_A_FILE if is_file else _NO_MAPPING))
    if "." not in given.key and config.reader not in TRAINERS:
        near, reason = nearest(name, OF_ACCELERATES_FILE), "accelerate refuses a file with a key that it does not know"
        return replace(finding, reason=reason, hint=f"did you mean {near}?" if near else "remove it", known=False)
    near = nearest(name.removeprefix(PREFIX), {known for _, known in BY_PLACE})
    prefix = PREFIX if name.startswith(PREFIX) and near != "fsdp" else ""
    system = "axolotl" if config.reader in AXOLOTL else "Hugging Face"
    finding = replace(finding, reason=f"{system} knows no such key, and passed over it", known=False)
    hint = f"write it beside fsdp_config, not in it: {near}" if near == name else f"did you mean {prefix}{near}?"
    return replace(finding, hint=hint) if near else idle(finding, finding.reason)


_IN_A_FILE = (
    "the settings are in another file, which is not read here",
    "write its keys here as a mapping, without the prefix fsdp_ (of the keys of a file it is taken off)",
)
_NO_MAPPING = ("this key takes a mapping", "write its keys below it, or remove it")
# Keys that change only speed and memory, not the numbers of the run; each with the setting that it configures.
_OF_SPEED = {
    "backward_prefetch": "backward_prefetch",
    "backward_prefetch_policy": "backward_prefetch",
    "forward_prefetch": "forward_prefetch",
}


def _ignored_key_finding(finding: Finding, given: GivenKey, row: Key, config: EffectiveConfig) -> Finding:
    """Return the finding for a key that the system ignores. It has no effect if its value equals the effective one."""
    reader, error = config.reader, config.errors.get(given.key)
    if given.value is None and reader in AXOLOTL:
        return idle(finding, "it is empty")
    setting = _OF_SPEED.get(row.name, row.name)
    is_inert = reader is T1 and given.key.split(".")[-1].startswith(PREFIX)
    is_doubled = reader in row.read_by and not is_inert and config.key_of(row.name) not in (None, given.key)
    reason = f"{config.key_of(row.name)} says it again" if is_doubled else f"{reader.value} does not read it here"
    if error is None and (row.outcome is Outcome.UNNEEDED or _is_in_effect(setting, config.parsed[given.key], config)):
        return idle(finding, f"{reason}, but its value was in effect anyway")
    equivalent = f"{DEGREES_PREFIX}{row.name}" if row.group == DEGREES else row.instead.get(reader, "")
    effective = config[setting]
    in_effect = "the key was ignored" if effective in (None, "", (), []) else f"{_value_text(effective)} was in effect"
    if row.name in _OF_SPEED:  # no decision is needed
        hint = f"it is read as {equivalent}" if equivalent and reader not in AXOLOTL else ""
        text = f"{reason}: {in_effect}; no number depends on it"
        return replace(finding, outcome=Outcome.APPROXIMATE, target="as it ran", reason=text, hint=hint)
    if error is not None:
        return undecided(finding, f"{reason}; {error}", "remove it")
    if is_doubled:
        return undecided(finding, f"{reason}, and held", "as trained: remove it; as written: remove the other")
    if reader is X1 and row.name == "sync_module_states":
        reason = "axolotl passes it on from 0.12 on; before"
    how = f" (as {equivalent})" if equivalent else ""
    return undecided(
        finding, f"{reason}: {in_effect}", f"as trained: remove it; as written: set it where it is read{how}"
    )


def _value_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(getattr(value, "value", value))


def _is_in_effect(setting: str, value: Any, config: EffectiveConfig) -> bool:
    by_key = ShardingStrategy.FULL_SHARD if config["reshard_after_forward"] else ShardingStrategy.SHARD_GRAD_OP
    strategy = config["sharding_strategy"] or by_key
    return bool(value == (strategy if isinstance(value, ShardingStrategy) else config[setting]))


# ---------------------------------------------------------------------------------------------------------------------
# Implicit settings


# Findings by readers and whether they apply.
_Rule = tuple[Collection[Reader], Callable[[EffectiveConfig], Any], Finding | Callable[[EffectiveConfig], Finding]]


def _matching_findings(rules: Iterable[_Rule], config: EffectiveConfig) -> Iterator[Finding]:
    for readers, applies, found in rules:
        if config.reader in readers and applies(config):
            yield found(config) if callable(found) else found


def _leaves_wrapping_open(config: EffectiveConfig) -> bool:
    """Return whether the file does not set the key that selects the wrapping policy.

    For a Trainer, the options of ``fsdp`` select it, which the file may set at another place.
    """
    return "fsdp" in config.around if config.reader is T1 else config.key_of("auto_wrap_policy") is None


def _bits(config: EffectiveConfig) -> int | None:
    return next((bits for bits in (4, 8) if config.around.get(f"load_in_{bits}bit") is True), None)


_QUANTIZED, _TRAINED = "quantized weights", "trained parameters"
# Findings of the model in a file that stays in its system, whose patches are still in effect.
_OF_THE_MODEL: dict[str, dict[str, Any]] = {
    _QUANTIZED: {
        "outcome": Outcome.APPROXIMATE,
        "target": "the model's code",
        "reason": "they are made where the model is made, outside of this section, and stay the system's own",
        "hint": "",
    }
}
_FSDP1 = (T1, A1, X1)
_POLICY = "auto_wrap_policy: TRANSFORMER_BASED_WRAP"
_WAYS_TO_WRAP = {T1: "auto_wrap in fsdp", A1: f"{PREFIX}{_POLICY}", X1: _POLICY}
# fmt: off
_IMPLICIT: Sequence[_Rule] = (
    (TRAINERS, lambda config: is_bare(config.around) and config.key_of("bf16", "fp16") is None,
        implicit("precision", Outcome.APPROXIMATE,
        "no dtype stands in such a file; without one the run is in float32",
        "if the command or the script sets bf16 or fp16, write it here, where a Trainer ignores it: bf16: true")),
    ((AD,), lambda config: True, implicit("units", Outcome.APPROXIMATE,
        "DeepSpeed gathers parameters as modules need them, and has no units; here each layer that the model names is "
        "one", "fsdp_config.wrap_policy can name others", target="the classes of the model's _no_split_modules")),
    ((AD,), lambda config: True, implicit("autocast", Outcome.APPROXIMATE,
        "DeepSpeed computes in the dtype of mixed_precision itself; autocast keeps some operations, such as norms, in "
        "float32", target="precision")),
    ((AD,), lambda config: True, implicit("sync_module_states", Outcome.EXACT,
        "DeepSpeed sends rank 0's values to all others", target="sync_module_states: true")),
    ((AD,), lambda config: True, implicit("optimizer", Outcome.APPROXIMATE,
        "composer_fsdp2 does not read the layout of DeepSpeed's checkpoints: resume from weights (zero_to_fp32.py "
        "writes them), with a new optimizer state", target="")),
    ((AD,), lambda config: config.key_of("gradient_clipping") is None, implicit("gradient clipping", Outcome.EXACT,
        "without a norm, or with auto, accelerate has DeepSpeed clip gradients to a norm of 1", value=1.0,
        target="gradient clipping")),
    (_FSDP1, lambda config: config["mixed_precision"] != "no", implicit("casting of inputs and buffers", Outcome.EXACT,
        "FSDP1 cast the root's inputs only, and buffers; FSDP2's default casts each unit's inputs, and no buffer",
        "cast_forward_inputs: false and buffer_dtype keep it so", target="cast_root_inputs, buffer_dtype")),
    (_FSDP1, lambda config: config.key_of("backward_prefetch") is None, implicit("backward_prefetch", Outcome.EXACT,
        "Hugging Face prefetched no unit in backward; FSDP2's default prefetches one",
        "leave the prefetch to FSDP2 for speed, at the price of one more unit in memory",
        target="prefetch in backward: none")),
    (_FSDP1, lambda config: config.key_of("state_dict_type") is None, implicit("state_dict_type", Outcome.EXACT,
        "checkpoints were full ones; accelerate's FSDP2 saves sharded ones by default",
        target="state_dict_type: full")),
    (_FSDP1, lambda config: config.key_of("sync_module_states") is None and config["sync_module_states"],
        implicit("sync_module_states", Outcome.EXACT, "rank 0 sent its values to all others",
        target="sync_module_states: true")),
    (_FSDP1, lambda config: _leaves_wrapping_open(config) and wrap_of(config).kind is WrapKind.ROOT,
        lambda config: implicit("wrapping", Outcome.EXACT,
        "no wrapping was set, so all parameters were gathered at once",
        f"{_WAYS_TO_WRAP[config.reader]} makes each layer a unit, and memory much smaller",
        target="the whole model is one unit")),
    (_FSDP1, lambda config: _leaves_wrapping_open(config) and wrap_of(config) == Wrap(kind=WrapKind.CLASSES),
        implicit("transformer_layer_cls_to_wrap", Outcome.EXACT,
        "the model's _no_split_modules are the units",
        target="the classes of the model's _no_split_modules")),
    (_FSDP1, lambda config: syncs(config["accelerator_config"], config) is GradientSync.LAST,
        implicit("gradient_sync", Outcome.EXACT,
        "a Trainer reduces gradients only in the last of several microbatches, and stores unsharded ones until then",
        "gradient_sync: every spares that memory, and communicates more", target="gradient_sync: last")),
    (tuple(Reader), _bits, lambda config: implicit(_QUANTIZED, Outcome.UNSUPPORTED,
        "bitsandbytes' weights lose their quantization in fully_shard, which axolotl patches and composer_fsdp2 does "
        "not: the base model needs several times the memory, and computes other numbers",
        "load the base model in bfloat16, and remove load_in_4bit and load_in_8bit", value=f"{_bits(config)} bits")),
    ((X1, X2), lambda config: any("spectrum" in str(each).lower() for each in config.around.get("plugins") or ()),
        implicit(_TRAINED, Outcome.NEEDS_DECISION,
        "axolotl's SpectrumPlugin chooses them at run time, by the signal-to-noise ratio of their values",
        "train_only, with the list that it printed or wrote")),
    (tuple(Reader), _adapter, lambda config: implicit("adapter", Outcome.EXACT,
        "adapters are made where the model is made; frozen and trained parameters of one dtype share a unit",
        "LLM Foundry's models take a peft_config", value=_adapter(config), target="the model's code")),
)
# fmt: on


# ---------------------------------------------------------------------------------------------------------------------
# FSDP2 of the same system


def _neighbor_finding(key: str, outcome: Outcome, reason: str, hint: str) -> Callable[[EffectiveConfig], Finding]:
    """Return a function for the finding of a key beside the section."""
    return lambda config: Finding(key=key, value=config.around[key], outcome=outcome, reason=reason, hint=hint)


def _makes_kernels(config: EffectiveConfig) -> bool:
    given = config.around
    is_plain = given.get("adapter") in ("lora", "qlora") and not given.get("rl") and not given.get("lora_dropout")
    return is_plain and not any(f"lora_{part}_kernel" in given for part in ("mlp", "qkv", "o"))


# fmt: off
_OF_FSDP2: Sequence[_Rule] = (
    # A file with version: 2 already has this finding at that key.
    ((T1,), lambda config: True, Finding(key="version", value=2, outcome=Outcome.APPROXIMATE, target="version: 2",
        reason=VERSION_REASON, hint=VERSION_HINT, origin=Origin.LACKING)),
    # axolotl 0.12.2: check_fsdp2_* of utils/schemas/validation.py, check_auto_enable_lora_kernels of its config.py.
    ((X1,), lambda config: config.around.get("optimizer") in ("adamw_8bit", "adamw_bnb_8bit"),
        _neighbor_finding("optimizer", Outcome.NEEDS_DECISION, "axolotl refuses this optimizer with FSDP2",
        "adamw_torch_8bit, which is torchao's; other 8-bit optimizers pass")),
    *(((X1,), lambda config, bits=bits: _bits(config) == bits and config["cpu_ram_efficient_loading"],
        _neighbor_finding(f"load_in_{bits}bit", Outcome.NEEDS_DECISION,
        "axolotl refuses it with FSDP2 beside cpu_ram_efficient_loading",
        "fsdp_config.cpu_ram_efficient_loading: false, with which each rank reads the weights")) for bits in (4, 8)),
    ((X1,), lambda config: _bits(config) and config.around.get("rl") in ("dpo", "kto", "orpo", "ipo"),
        _neighbor_finding("rl", Outcome.NEEDS_DECISION,
        "axolotl refuses it with FSDP2 beside load_in_4bit or load_in_8bit",
        "train without quantization, or keep fsdp_version: 1")),
    ((X1,), _makes_kernels, _neighbor_finding("adapter", Outcome.APPROXIMATE,
        "with FSDP2 axolotl turns on its LoRA kernels, which it does not with FSDP1: the same numbers up to rounding",
        "lora_mlp_kernel, lora_qkv_kernel and lora_o_kernel: false keep them off")),
)
# fmt: on
