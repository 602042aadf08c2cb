"""What Hugging Face makes of a section: where it lies, what is read in it, the run, and a finding for each key.

transformers 4.51.3 reads the keys of an ``fsdp_config`` without the prefix ``fsdp_`` only, accelerate 1.8.1 with or
without it, and neither says a word about a key that it does not read.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from composer_fsdp2.compat.dialects.base import Path, Run, Wrap, WrapKind
from composer_fsdp2.compat.dialects.huggingface_keys import (
    DEGREES_PREFIX,
    KEYS,
    OLD_SIBLINGS,
    PARSERS,
    PREFIX,
    ROWS,
    SWITCHES,
    SYNC,
    WITHOUT_EFFECT,
    Key,
    Kind,
    Place,
    Source,
    Words,
    is_word_for_false,
)
from composer_fsdp2.config import (
    Accumulation,
    ActivationCheckpointing,
    GradientSync,
    MeshSpec,
    Prefetch,
    ShardingConfig,
    ShardingStrategy,
)
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.findings import OFF, Finding, Outcome
from composer_fsdp2.fsdp1.keys import nearest_key

__all__ = [
    "DTYPES",
    "PRECISIONS",
    "SIZE_HINT",
    "SIZE_REASON",
    "STATE_DICTS",
    "VERSION_HINT",
    "VERSION_REASON",
    "Effect",
    "Said",
    "effect_of",
    "findings_of",
    "run_of",
    "sections_of",
    "wrap_of",
]


def sections_of(values: Any, path: Path) -> Iterator[Path]:
    if isinstance(values, list):
        for number, each in enumerate(values):
            yield from sections_of(each, (*path, number))
    if not isinstance(values, Mapping):
        return
    if is_section(values):
        yield path
        return
    for key, value in values.items():
        yield from sections_of(value, (*path, key))


def is_section(values: Mapping[str, Any]) -> bool:
    """Whether a mapping holds a Trainer's FSDP arguments, or is a configuration file of accelerate's."""
    settings = values.get("fsdp_config")
    has_settings = isinstance(settings, str) or (isinstance(settings, Mapping) and len(settings) > 0)
    if "distributed_type" in values:
        return values["distributed_type"] == "FSDP" or has_settings
    fsdp = values.get("fsdp")
    if isinstance(fsdp, str | list | bool):
        return bool(fsdp) or has_settings
    return isinstance(settings, Mapping) and any(str(key).startswith(PREFIX) for key in settings)


def _source(values: Mapping[str, Any]) -> Source:
    settings = values.get("fsdp_config")
    said = settings if isinstance(settings, Mapping) else {}
    is_fsdp2 = str(said.get("version", said.get("fsdp_version"))) == "2"
    if "distributed_type" in values:
        return Source.ACCELERATE_FSDP2 if is_fsdp2 else Source.ACCELERATE_FSDP1
    # transformers 4.51.3 reads no version at all; 5 reads it, with or without the prefix.
    return Source.TRAINER_FSDP2 if is_fsdp2 else Source.TRAINER_FSDP1


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A key of the section, with its path from there, and whether the system reads it at that place."""

    key: str
    value: Any
    row: Key | None
    is_read: bool = True

    @property
    def is_off(self) -> bool:
        """Whether it says that there is to be none of it."""
        return self.row is not None and self.row.kind in SWITCHES and is_word_for_false(self.value)


def _said(values: Mapping[str, Any], source: Source) -> tuple[Said, ...]:
    """The keys that are FSDP's own; what else a Trainer's arguments hold is none of it."""
    said: list[Said] = []
    for name, value in values.items():
        place = {"fsdp_config": Place.SETTINGS, "parallelism_config": Place.DEGREES}.get(name)
        row = ROWS.get((Place.BESIDE, name))
        if place is not None and isinstance(value, Mapping) and value:
            said += [_nested(f"{name}.{key}", str(key), each, place, source) for key, each in value.items()]
        elif place is not None:
            said.append(Said(key=name, value=value, row=None, is_read=not value or isinstance(value, str)))
        elif row is not None and source in row.read_by:
            said.append(Said(key=name, value=value, row=row))
        elif name in OLD_SIBLINGS and source.is_trainer:
            old = ROWS[Place.SETTINGS, name.removeprefix(PREFIX)]
            said.append(Said(key=name, value=value, row=old, is_read=source is Source.TRAINER_FSDP1))
        elif str(name).startswith("fsdp"):
            said.append(Said(key=name, value=value, row=None, is_read=False))
    return _last_of_each(said)


def _nested(key: str, name: str, value: Any, place: Place, source: Source) -> Said:
    prefix = PREFIX if place is Place.SETTINGS else DEGREES_PREFIX
    plain = name.removeprefix(prefix)
    row = ROWS.get((place, plain))
    if row is None:
        return Said(key=key, value=value, row=None, is_read=False)
    is_read = source in row.read_by
    if source is Source.TRAINER_FSDP1 and plain != name:
        is_read = False  # stripped from the keys of a JSON file only
    if row.aliases:  # two systems' words for one thing: each reads its own
        is_read = is_read and (plain in row.aliases) == source.is_trainer
    return Said(key=key, value=value, row=row, is_read=is_read)


def _last_of_each(said: list[Said]) -> tuple[Said, ...]:
    """With and without its prefix a key is the same to most readers, and the last one holds."""
    last = {(each.row.name, each.key in OLD_SIBLINGS): each.key for each in said if each.row and each.is_read}
    return tuple(
        each
        if each.row is None or last.get((each.row.name, each.key in OLD_SIBLINGS), each.key) == each.key
        else Said(key=each.key, value=each.value, row=each.row, is_read=False)
        for each in said
    )


# ---------------------------------------------------------------------------------------------------------------------
# What the system made of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What holds in the run, said or not, and by key what kept it from starting.

    Args:
        settings: By the names of the table.
        problems: By key: what is wrong with its value, and which would do.
    """

    source: Source
    said: tuple[Said, ...]
    around: Mapping[str, Any]
    settings: dict[str, Any]
    problems: dict[str, str]

    def keys_of(self, *names: str) -> list[str]:
        """The keys that are read for one of these names of the table."""
        return [each.key for each in self.said if each.row is not None and each.is_read and each.row.name in names]

    def key_of(self, *names: str) -> str | None:
        """The key that set one of these; None if the file leaves all of them unsaid."""
        keys = self.keys_of(*names)
        return keys[-1] if keys else None

    def value_of(self, key: str) -> Any:
        return next(each.value for each in self.said if each.key == key)

    def asks_for_size(self) -> bool:
        """Whether any number of parameters that is read is above 0."""
        numbers = map(self.value_of, self.keys_of("min_num_params"))
        return any(isinstance(number, int | float) and number > 0 for number in numbers)


def effect_of(values: Mapping[str, Any]) -> Effect:
    source = _source(values)
    said = _said(values, source)
    settings = {row.name: row.default.get(source) for row in KEYS}
    effect = Effect(source=source, said=said, around=values, settings=settings, problems={})
    for each in said:
        if each.row is not None and (each.is_read or source in each.row.checked_by):
            _set(effect, each)
    for step in (_switches, _fsdp_words, _wrapping, _precision_words, _strategies, _loading, _contradictions):
        step(effect)
    return effect


def _set(effect: Effect, said: Said) -> None:
    assert said.row is not None
    try:
        value = PARSERS[said.row.kind](said.value, effect.source)
    except ConfigError as error:
        effect.problems[said.key] = str(error)
        return
    if not said.is_read:
        return
    if said.key not in OLD_SIBLINGS:
        effect.settings[said.row.name] = value
    elif isinstance(value, tuple):
        effect.settings[said.row.name] += value  # both lists count
    else:
        effect.settings[said.row.name] = max(effect.settings[said.row.name], value)


def _switches(effect: Effect) -> None:
    """Whether accelerate's file turns FSDP on; its fp16 of old, before which mixed_precision goes."""
    if effect.around.get("distributed_type", "FSDP") != "FSDP":
        effect.problems["distributed_type"] = (
            "accelerate launch reads fsdp_config under distributed_type FSDP only; as trained: remove fsdp_config; "
            "as written: distributed_type: FSDP"
        )
    if not effect.source.is_trainer and effect.settings["fp16"] and effect.key_of("mixed_precision") is None:
        effect.settings["mixed_precision"] = "fp16"


def _fsdp_words(effect: Effect) -> None:
    settings, source = effect.settings, effect.source
    if not source.is_trainer:
        return
    if effect.around.get("fsdp") in (None, "", False, []):
        effect.problems["fsdp"] = (
            "FSDP is off, whatever fsdp_config says; as trained: remove that; as written: fsdp: full_shard auto_wrap"
        )
    words: Words = settings["fsdp"] or Words()
    settings["offload_params"] = settings["offload_params"] or words.offload
    if source is Source.TRAINER_FSDP1:
        settings["sharding_strategy"] = words.strategy or ShardingStrategy.FULL_SHARD
        by_size = settings["min_num_params"] > 0
        policy = "SIZE_BASED_WRAP" if by_size else "TRANSFORMER_BASED_WRAP"
        settings["auto_wrap_policy"] = policy if words.auto_wrap else "NO_WRAP"
        return
    if words.strategy is not None and effect.key_of("reshard_after_forward") is None:
        settings["reshard_after_forward"] = words.strategy.reshards_after_forward
    if words.strategy not in (None, ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        effect.problems["fsdp"] = "for FSDP2 it is full_shard or shard_grad_op; replicas are parallelism_config's"


def _wrapping(effect: Effect) -> None:
    """What decides nothing is as if unsaid, and is never looked at: there even a bad value did no harm."""
    settings, is_trainer = effect.settings, effect.source.is_trainer
    policy = settings["auto_wrap_policy"]
    numbers, classes = effect.keys_of("min_num_params"), effect.keys_of("transformer_layer_cls_to_wrap")
    if policy != "TRANSFORMER_BASED_WRAP":
        settings["transformer_layer_cls_to_wrap"] = ()
        for key in classes:
            effect.problems.pop(key, None)
    if policy == "SIZE_BASED_WRAP" and not numbers and not is_trainer:
        # Its default is a float (1e8), and "100000000.0" is no int.
        where = effect.key_of("auto_wrap_policy") or "fsdp_config"
        effect.problems[where] = "SIZE_BASED_WRAP needs min_num_params, for which accelerate's default does not parse"
    for key in numbers if policy != "SIZE_BASED_WRAP" else ():
        # A Trainer compares the number with 0 in any case, which a float lives through.
        if not is_trainer or (policy == "NO_WRAP" and isinstance(effect.value_of(key), float)):
            effect.problems.pop(key, None)
    if effect.source is Source.TRAINER_FSDP1 and classes and effect.asks_for_size():
        effect.problems.setdefault(numbers[-1], f"it and {classes[-1].split('.')[-1]} exclude each other; keep one")
    if policy != "SIZE_BASED_WRAP":
        settings["min_num_params"] = 0


def _precision_words(effect: Effect) -> None:
    settings = effect.settings
    if not effect.source.is_trainer:
        return
    if settings["bf16"] and settings["fp16"]:
        effect.problems["fp16"] = "bf16 and fp16 are both true; keep one"
    settings["mixed_precision"] = "fp16" if settings["fp16"] else "bf16" if settings["bf16"] else "no"


def _strategies(effect: Effect) -> None:
    strategy = effect.settings["sharding_strategy"]
    if strategy is not None:
        effect.settings["reshard_after_forward"] = strategy.reshards_after_forward


def _loading(effect: Effect) -> None:
    """Under FSDP2 the one key does both."""
    if effect.source.is_fsdp2:
        effect.settings["sync_module_states"] = effect.settings["cpu_ram_efficient_loading"]


def _contradictions(effect: Effect) -> None:
    settings, problems = effect.settings, effect.problems
    if _refuses_to_load(effect):
        keys = _sync_keys(effect)
        problems.setdefault(
            keys[-1] if keys else "fsdp_config",
            "all ranks but the first would train on random weights: cpu_ram_efficient_loading is "
            f"{_loading_said(effect)}; set this to true, or cpu_ram_efficient_loading to false",
        )
    elif settings["cpu_ram_efficient_loading"]:  # where it is not refused, the plugin puts it right
        settings["sync_module_states"] = True
    if settings["gradient_checkpointing"] and settings["activation_checkpointing"] and effect.source.is_trainer:
        for key in effect.keys_of("activation_checkpointing"):
            problems.setdefault(key, "it and gradient_checkpointing exclude each other; keep one")


def _refuses_to_load(effect: Effect) -> bool:
    """Whether the system stops at values that rank 0 alone loads and keeps.

    A Trainer compares words. accelerate's launcher takes any text for true, and does so for FSDP2 as well, of which
    only one of the two is read there.
    """
    if effect.source is Source.TRAINER_FSDP2:
        return False
    loading, synced = effect.key_of("cpu_ram_efficient_loading"), _sync_keys(effect)
    by_default = effect.settings["cpu_ram_efficient_loading"]
    loads = by_default if loading is None else effect.value_of(loading)
    syncs = effect.value_of(synced[-1]) if synced else True
    if effect.source.is_trainer:
        return str(loads).lower() == "true" and str(syncs).lower() == "false"
    return bool(loads) and not syncs


def _sync_keys(effect: Effect) -> list[str]:
    """Those that are looked at, read or not."""
    if effect.source is Source.ACCELERATE_FSDP2:
        return [each.key for each in effect.said if each.row is SYNC]
    return effect.keys_of("sync_module_states")


def _loading_said(effect: Effect) -> str:
    key = effect.key_of("cpu_ram_efficient_loading")
    if key is None:
        return "on by default"
    return "true" if effect.settings["cpu_ram_efficient_loading"] else "in quotes, which the launcher takes for true"


# ---------------------------------------------------------------------------------------------------------------------
# The run

DTYPES = {"no": None, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
PRECISIONS = {"no": "fp32", "fp16": "amp_fp16", "bf16": "amp_bf16", "fp8": "amp_fp8"}
STATE_DICTS = {"full": "FULL_STATE_DICT", "sharded": "SHARDED_STATE_DICT"}


def run_of(effect: Effect) -> Run:
    settings = effect.settings
    is_fsdp2 = effect.source.is_fsdp2
    dtype = DTYPES[settings["mixed_precision"]]
    config = ShardingConfig(
        mesh=_mesh(effect),
        reshard_after_forward=settings["reshard_after_forward"],
        mixed_precision=_policy(dtype, is_fsdp2=is_fsdp2),
        buffer_dtype=None if is_fsdp2 else dtype,
        cpu_offload=settings["offload_params"],
        activation_checkpointing=_checkpointing(effect),
        prefetch=Prefetch(
            forward=1 if settings["forward_prefetch"] else None,
            backward=0 if settings["backward_prefetch"] == "NO_PREFETCH" else None,
        ),
        accumulation=Accumulation(gradient_sync=GradientSync.LAST if _accumulates(effect) else GradientSync.EVERY),
        sync_module_states=settings["sync_module_states"],
        precision=PRECISIONS[settings["mixed_precision"]],
    )
    return Run(
        config=config, wrap=wrap_of(settings), state_dict_type=settings["state_dict_type"], extras=_extras(effect)
    )


def _policy(dtype: torch.dtype | None, *, is_fsdp2: bool) -> MixedPrecisionPolicy:
    """FSDP1 cast the root's inputs only; accelerate's FSDP2 casts those of each unit, and its outputs."""
    if dtype is None:
        return MixedPrecisionPolicy(cast_forward_inputs=False)  # there is nothing to cast to
    if is_fsdp2:
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype)
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, cast_forward_inputs=False)


def _checkpointing(effect: Effect) -> ActivationCheckpointing:
    settings = effect.settings
    if settings["activation_checkpointing"]:
        return ActivationCheckpointing(checkpoint=True, reentrant=False)
    if not settings["gradient_checkpointing"]:
        return ActivationCheckpointing()
    said = settings["gradient_checkpointing_kwargs"]
    reentrant = said.get("use_reentrant", True) if isinstance(said, Mapping) else True
    return ActivationCheckpointing(checkpoint=True, reentrant=bool(reentrant))


def _accumulates(effect: Effect) -> bool:
    """A Trainer puts gradients off to the last microbatch (no_sync); with accelerate alone the script decides."""
    steps = effect.around.get("gradient_accumulation_steps")
    return effect.source.is_trainer and isinstance(steps, int) and steps > 1


def _mesh(effect: Effect) -> MeshSpec:
    """All ranks, unless degrees are given or FSDP1 made groups of its own: its hybrids sharded within a node.

    Raises:
        ConfigError: nobody says how many ranks a node has.
    """
    settings, strategy = effect.settings, effect.settings["sharding_strategy"]
    if strategy is ShardingStrategy.NO_SHARD:
        return MeshSpec().without_shards()
    replicate, shard = settings["dp_replicate_size"], settings["dp_shard_size"]
    if effect.key_of("dp_replicate_size", "dp_shard_size") is not None:
        if shard == 1:
            raise ConfigError("dp_shard_size is 1, which is no sharding; give the number of ranks of one replica")
        return MeshSpec(shard=shard, replicate=replicate if replicate > 1 else None)
    if strategy is None or not strategy.is_hybrid:
        return MeshSpec()
    processes, machines = effect.around.get("num_processes"), effect.around.get("num_machines", 1)
    if effect.source.is_trainer or not isinstance(processes, int) or not isinstance(machines, int):
        raise ConfigError(
            "FSDP1 sharded within each node, and replicated over nodes, by the number of GPUs that it found; say it, "
            "as parallelism_config: {dp_shard_size: GPUs of a node, dp_replicate_size: number of nodes}"
        )
    if machines < 1 or processes % machines:
        raise ConfigError(f"num_processes {processes} is not a multiple of num_machines {machines}")
    return MeshSpec(shard=processes // machines, replicate=-1)


def wrap_of(settings: Mapping[str, Any]) -> Wrap:
    policy = settings["auto_wrap_policy"]
    if policy == "TRANSFORMER_BASED_WRAP":
        return Wrap(kind=WrapKind.CLASSES, classes=tuple(dict.fromkeys(settings["transformer_layer_cls_to_wrap"])))
    if policy == "SIZE_BASED_WRAP" and settings["min_num_params"] > 0:
        return Wrap(kind=WrapKind.SIZE, min_num_params=settings["min_num_params"])
    return Wrap(kind=WrapKind.ROOT)  # a size of 0 is passed over as well


def _extras(effect: Effect) -> dict[str, Any]:
    around = effect.around
    names = ("max_grad_norm", "gradient_accumulation_steps")
    names = names if effect.source.is_trainer else ("num_processes", "num_machines")
    extras = {name: around[name] for name in names if name in around}
    if effect.source.is_trainer:
        extras |= {"trainer": True, "fsdp2": effect.source.is_fsdp2}
        norm = extras.setdefault("max_grad_norm", 1.0)
        if norm is None or (isinstance(norm, int | float) and norm <= 0):  # of which a Trainer clips nothing
            del extras["max_grad_norm"]
    if effect.key_of("dp_shard_size") is not None:  # the file says the mesh, for releases that can read it
        extras["parallelism_config"] = True
    degrees = {"tensor_parallel": "tp_size", "context_parallel": "cp_size"}
    return extras | {name: effect.settings[key] for name, key in degrees.items() if effect.settings[key] > 1}


# ---------------------------------------------------------------------------------------------------------------------
# Findings


def findings_of(effect: Effect) -> Iterator[Finding]:
    for said in effect.said:
        if said.row is None:
            yield _of_no_row(said, effect)
        elif said.key in effect.problems:
            yield _finding(said, said.row, outcome=Outcome.NEEDS_DECISION, reason=effect.problems[said.key], target="")
        elif not said.is_read:
            yield _unread(said, said.row, effect)
        else:
            changes = _FATES.get(said.row.name, lambda said, effect: {})(said, effect)
            yield _finding(said, said.row, **changes)
    said_keys = {said.key for said in effect.said}
    for key, problem in effect.problems.items():
        if key not in said_keys:
            yield _unsaid(key, "", Outcome.NEEDS_DECISION, problem)
    if not effect.source.is_fsdp2:
        yield from _unsaid_findings(effect)


def _finding(said: Said, row: Key, **changes: Any) -> Finding:
    is_off = said.is_off and row.default and not any(row.default.values())
    fields: dict[str, Any] = {
        "key": said.key,
        "value": said.value,
        "outcome": Outcome.UNNEEDED if is_off and row.outcome is Outcome.UNSUPPORTED else row.outcome,
        "target": "" if is_off else row.target,
        "reason": OFF if is_off else row.reason,
    }
    return Finding(**(fields | changes))


def _of_no_row(said: Said, effect: Effect) -> Finding:
    name = said.key.split(".")[-1]
    fields: dict[str, Any] = {"key": said.key, "value": said.value, "target": ""}
    if name == "fsdp_config" and isinstance(said.value, str):
        return Finding(
            outcome=Outcome.NEEDS_DECISION,
            reason="the settings are in another file, which is not read here",
            hint="write its keys here as a mapping, without the prefix fsdp_ (of the keys of a file it is taken off)",
            **fields,
        )
    if name in ("fsdp_config", "parallelism_config") and not said.value:
        return Finding(outcome=Outcome.UNNEEDED, reason="it is empty", **fields)
    known = {known: place for place, known in ROWS}
    near = nearest_key(name.removeprefix(PREFIX), tuple(known))
    prefix = PREFIX if name.startswith(PREFIX) else ""
    return Finding(
        outcome=Outcome.UNSUPPORTED,
        reason="Hugging Face knows no such key, and passed over it",
        hint=f"did you mean {near if near == 'fsdp' else prefix + near}?" if near else "remove it",
        **fields,
    )


def _unread(said: Said, row: Key, effect: Effect) -> Finding:
    """A key that the system passed over: nothing is lost if it says what held anyway."""
    source = effect.source
    is_doubled = _is_doubled(said, row, effect)
    reason = f"{effect.key_of(row.name)} says it again" if is_doubled else f"{source.value} does not read it here"
    try:
        value = PARSERS[row.kind](said.value, source)
    except ConfigError as error:
        return _finding(
            said, row, outcome=Outcome.NEEDS_DECISION, target="", reason=f"{reason}; {error}", hint="remove it"
        )
    if row.name in WITHOUT_EFFECT or _is_in_effect(row, value, effect):
        return _finding(
            said, row, outcome=Outcome.UNNEEDED, target="", reason=f"{reason}, and what it says held all the same"
        )
    held = effect.settings[row.name]
    if is_doubled:
        hint = "as trained: remove it; as written: remove the other"
        return _finding(said, row, outcome=Outcome.NEEDS_DECISION, target="", reason=f"{reason}, and held", hint=hint)
    way = row.trainer if source is Source.TRAINER_FSDP1 else "" if source.is_trainer else row.launcher
    how = f" (as {way})" if way else ""
    return _finding(
        said,
        row,
        outcome=Outcome.NEEDS_DECISION,
        target="",
        reason=f"{reason}: the run went by {_word(held)}",
        hint=f"as trained: remove it; as written: say it where it is read{how}",
    )


def _is_doubled(said: Said, row: Key, effect: Effect) -> bool:
    """Whether the key is read here, under another of its names."""
    is_inert = effect.source is Source.TRAINER_FSDP1 and said.key.split(".")[-1].startswith(PREFIX)
    return effect.source in row.read_by and not is_inert and effect.key_of(row.name) not in (None, said.key)


def _word(held: object) -> object:
    if held in ((), None):
        return "nothing"
    if isinstance(held, bool):
        return str(held).lower()
    return held.value if isinstance(held, ShardingStrategy) else held


def _is_in_effect(row: Key, value: Any, effect: Effect) -> bool:
    settings = effect.settings
    if not isinstance(value, ShardingStrategy):
        return bool(value == settings[row.name])
    if settings["sharding_strategy"] is not None:
        return value is settings["sharding_strategy"]
    is_plain = value in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)
    return is_plain and value.reshards_after_forward == settings["reshard_after_forward"]


Changes = dict[str, Any]


def _words_fate(said: Said, effect: Effect) -> Changes:
    words: Words = effect.settings["fsdp"]
    if words.ignored:
        return {
            "outcome": Outcome.NEEDS_DECISION,
            "reason": f"of a list, transformers passes over what is no option: {', '.join(words.ignored)}",
            "hint": f"keep of {Kind.WORDS.value} those that you mean",
        }
    if effect.source is Source.TRAINER_FSDP1:
        return _strategy_fate(said, effect)
    if not (words.auto_wrap or said.value is True or effect.key_of("auto_wrap_policy")):
        return {
            "outcome": Outcome.APPROXIMATE,
            "reason": "without auto_wrap early releases of transformers 5 wrap nothing, later ones each layer",
            "hint": "say auto_wrap_policy in fsdp_config",
        }
    return {}


def _strategy_fate(said: Said, effect: Effect) -> Changes:
    strategy = effect.settings["sharding_strategy"]
    if strategy is ShardingStrategy.NO_SHARD:
        return {
            "target": "2-D mesh with one rank on its shard axis",
            "reason": "every rank keeps whole parameters, gradients are averaged by one all-reduce",
            "hint": "accelerate's FSDP2 has no form for it: there DDP (distributed_type: MULTI_GPU) is the same run",
        }
    freed = "freed" if strategy.reshards_after_forward else "kept"
    mesh = "a 2-D mesh" if strategy.is_hybrid else "one mesh of all ranks"
    where = "; sharded within a node, replicated over nodes" if strategy.is_hybrid else ""
    return {
        "target": f"reshard_after_forward={strategy.reshards_after_forward} on {mesh}",
        "reason": f"parameters are {freed} after forward{where}",
    }


VERSION_REASON = "transformers 5 reads it; 4.51.3 does not, and trains with FSDP1"
VERSION_HINT = "under 4.51.3 launch with a configuration file of accelerate's that says fsdp_version: 2"


def _version_fate(said: Said, effect: Effect) -> Changes:
    if effect.source is not Source.TRAINER_FSDP2:
        return {}
    return {
        "outcome": Outcome.APPROXIMATE,
        "reason": VERSION_REASON,
        "hint": VERSION_HINT,
    }


def _precision_fate(said: Said, effect: Effect) -> Changes:
    if effect.settings["mixed_precision"] == "no":
        return {"target": "", "reason": "no mixed precision"}
    if effect.settings["mixed_precision"] == "fp8":
        return {
            "outcome": Outcome.APPROXIMATE,
            "hint": "check that the fp8 library in use takes FSDP2",
            "reason": "FSDP goes by bfloat16; the matrix products in fp8 are another library's",
        }
    return {}


def _wrap_fate(said: Said, effect: Effect) -> Changes:
    """Classes or a number that the policy has no use for."""
    policy = effect.settings["auto_wrap_policy"]
    needed = "TRANSFORMER_BASED_WRAP" if said.row and said.row.kind is Kind.CLASSES else "SIZE_BASED_WRAP"
    if policy == needed:
        return {}
    if said.row and said.row.kind is Kind.COUNT and said.value == 0:
        return {"outcome": Outcome.UNNEEDED, "target": "", "reason": "0 asks for nothing"}
    if effect.key_of("auto_wrap_policy") is not None:
        return {"outcome": Outcome.UNNEEDED, "target": "", "reason": f"not read under {policy}"}
    way = "auto_wrap in fsdp" if effect.source.is_trainer else f"fsdp_auto_wrap_policy: {needed}"
    return {
        "outcome": Outcome.NEEDS_DECISION,
        "target": "",
        "reason": "no wrapping was asked for: the whole model was one unit, all of it gathered at once",
        "hint": f"as trained: remove it; as written: {way}",
    }


def _policy_fate(said: Said, effect: Effect) -> Changes:
    settings = effect.settings
    if settings["auto_wrap_policy"] == "SIZE_BASED_WRAP" and effect.source.is_fsdp2:
        return {"outcome": Outcome.UNSUPPORTED, "reason": SIZE_REASON, "hint": SIZE_HINT}
    if settings["auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP" and not settings["transformer_layer_cls_to_wrap"]:
        return {"reason": "the classes are those of the model's _no_split_modules"}
    if wrap_of(settings).kind is WrapKind.ROOT:
        return {"reason": "the whole model is one unit, all of it gathered at once"}
    return {}


def _backward_prefetch_fate(said: Said, effect: Effect) -> Changes:
    fates: dict[str, Changes] = {
        "NO_PREFETCH": {
            "reason": "no unit is gathered ahead",
            "hint": "accelerate's FSDP2 always gathers one: one more unit in memory",
        },
        "BACKWARD_PRE": {"target": "", "reason": "FSDP2 does it by itself, in the order that forward ran in"},
        "BACKWARD_POST": {
            "outcome": Outcome.APPROXIMATE,
            "target": "FSDP2's own prefetch",
            "reason": "FSDP2 gathers the next unit before a unit's gradients, not after",
            "hint": "one more unit is in memory at the peak; NO_PREFETCH spares it",
        },
    }
    return fates[effect.settings["backward_prefetch"]]


def _text_fate(said: Said, effect: Effect) -> Changes:
    """A false in quotes, where any text is true."""
    if not (effect.source.is_trainer and isinstance(said.value, str) and is_word_for_false(said.value)):
        return {}
    return {
        "outcome": Outcome.NEEDS_DECISION,
        "target": "",
        "reason": "transformers takes any text for true, so that this was on",
        "hint": "as trained: true; as written: false, without quotes",
    }


def _checkpointing_fate(said: Said, effect: Effect) -> Changes:
    if not effect.settings["activation_checkpointing"]:
        return {"target": "", "reason": OFF}
    if changes := _text_fate(said, effect):
        return changes
    if wrap_of(effect.settings).kind is not WrapKind.ROOT:
        return {}
    if effect.source.is_fsdp2:
        return {
            "outcome": Outcome.NEEDS_DECISION,
            "target": "",
            "hint": "set a policy, or recompute in the model",
            "reason": "accelerate recomputes the modules that its policy wraps, and breaks where there is no policy",
        }
    return {
        "outcome": Outcome.APPROXIMATE,
        "reason": "without a policy accelerate wrapped every module by itself",
        "hint": "set a policy, so that the layers are recomputed as wholes",
    }


def _gradient_checkpointing_fate(said: Said, effect: Effect) -> Changes:
    if effect.source is Source.TRAINER_FSDP2 and effect.settings["gradient_checkpointing"]:
        return {"outcome": Outcome.EXACT, "reason": "the model does it, under FSDP2 as before"}
    off: Changes = {"outcome": Outcome.EXACT, "target": "", "reason": OFF}
    return {} if effect.settings["gradient_checkpointing"] else off


def _forward_prefetch_fate(said: Said, effect: Effect) -> Changes:
    return {"hint": "accelerate's FSDP2 has none"} if effect.settings["forward_prefetch"] else {}


def _sync_fate(said: Said, effect: Effect) -> Changes:
    if effect.settings["sync_module_states"]:
        corrected = {"reason": "accelerate set it to true, since cpu_ram_efficient_loading is on"}
        return {
            **(corrected if is_word_for_false(said.value) else {}),
            "hint": "under accelerate's FSDP2 cpu_ram_efficient_loading: true does it, and nothing else",
        }
    return {"target": "", "reason": "each rank begins with its own values, which must be the same"}


def _loading_fate(said: Said, effect: Effect) -> Changes:
    if effect.settings["cpu_ram_efficient_loading"]:
        return {"hint": "where a target has no such word: LLM Foundry's init_device: mixed, with sync_module_states"}
    return {"target": "", "reason": "off: each rank reads the weights itself"}


_FATES: dict[str, Callable[[Said, Effect], Changes]] = {
    "fsdp": _words_fate,
    "version": _version_fate,
    "mixed_precision": _precision_fate,
    "sharding_strategy": _strategy_fate,
    "auto_wrap_policy": _policy_fate,
    "transformer_layer_cls_to_wrap": _wrap_fate,
    "min_num_params": _wrap_fate,
    "backward_prefetch": _backward_prefetch_fate,
    "forward_prefetch": _forward_prefetch_fate,
    "activation_checkpointing": _checkpointing_fate,
    "gradient_checkpointing": _gradient_checkpointing_fate,
    "sync_module_states": _sync_fate,
    "cpu_ram_efficient_loading": _loading_fate,
    **dict.fromkeys(("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"), _text_fate),
}
for _name in ("tp_size", "cp_size"):
    _FATES[_name] = lambda said, effect: (
        {"outcome": Outcome.UNNEEDED, "reason": "1 asks for nothing"} if said.value == 1 else {}
    )


def _unsaid(name: str, target: str, outcome: Outcome, reason: str, hint: str = "") -> Finding:
    return Finding(key=f"(unsaid) {name}", value="", outcome=outcome, target=target, reason=reason, hint=hint)


def _unsaid_findings(effect: Effect) -> Iterator[Finding]:
    """What FSDP1 did without being told, and FSDP2 does otherwise by itself."""
    settings = effect.settings
    if settings["mixed_precision"] != "no":
        yield _unsaid(
            "casting of inputs and buffers",
            "cast_root_inputs, buffer_dtype",
            Outcome.EXACT,
            "FSDP1 cast the root's inputs only, and buffers; FSDP2 by itself casts each unit's inputs, and no buffer",
            "cast_forward_inputs: false and buffer_dtype keep it so",
        )
    if effect.key_of("backward_prefetch") is None:
        yield _unsaid(
            "backward_prefetch",
            "prefetch in backward: none",
            Outcome.EXACT,
            "Hugging Face gathered no unit ahead in backward; FSDP2 by itself gathers one",
            "leave the prefetch to FSDP2 for speed, at the price of one more unit in memory",
        )
    if effect.key_of("state_dict_type") is None:
        yield _unsaid(
            "state_dict_type",
            "state_dict_type: full",
            Outcome.EXACT,
            "checkpoints were full ones; accelerate's FSDP2 saves sharded ones by default",
        )
    if effect.key_of("sync_module_states") is None and settings["sync_module_states"]:
        yield _unsaid(
            "sync_module_states", "sync_module_states: true", Outcome.EXACT, "rank 0 sent its values to all others"
        )
    yield from _unsaid_wrapping(effect)
    if _accumulates(effect):
        yield _unsaid(
            "gradient_sync",
            "gradient_sync: last",
            Outcome.EXACT,
            "of several microbatches a Trainer reduces gradients in the last one only, and holds whole ones until then",
            "gradient_sync: every spares that memory, and communicates more",
        )


def _unsaid_wrapping(effect: Effect) -> Iterator[Finding]:
    decided_by_words = effect.source is Source.TRAINER_FSDP1
    if not decided_by_words and effect.key_of("auto_wrap_policy") is not None:
        return
    if wrap_of(effect.settings).kind is WrapKind.ROOT:
        way = "auto_wrap in fsdp" if decided_by_words else "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
        yield _unsaid(
            "wrapping",
            "the whole model is one unit",
            Outcome.EXACT,
            "no wrapping was asked for, so that all parameters were gathered at once",
            f"{way} makes each layer a unit, and memory much smaller",
        )
    elif wrap_of(effect.settings) == Wrap(kind=WrapKind.CLASSES):
        yield _unsaid(
            "transformer_layer_cls_to_wrap",
            "the classes of the model's _no_split_modules",
            Outcome.EXACT,
            "the model itself names the classes that become units",
        )


SIZE_REASON = (
    "accelerate's SIZE_BASED_WRAP under FSDP2 chooses module lists as well, on which fully_shard breaks, and counts "
    "parameters that inner units hold"
)
SIZE_HINT = "TRANSFORMER_BASED_WRAP, with the classes of the layers"
