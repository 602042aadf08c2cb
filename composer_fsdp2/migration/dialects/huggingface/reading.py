"""What Hugging Face made of a section: the keys that it read, what held in the run, and a finding for each key."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from composer_fsdp2.config.findings import Finding, Outcome
from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.config.rows import Row, idle
from composer_fsdp2.config.sharding import (
    Accumulation,
    ActivationCheckpointing,
    GradientSync,
    MixedPrecision,
    Prefetch,
    ShardingConfig,
)
from composer_fsdp2.config.text import nearest
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.fsdp1.parsing import ShardingStrategy
from composer_fsdp2.migration.dialect import implicit
from composer_fsdp2.migration.dialects.huggingface.accelerate_words import DEGREES_PREFIX, DTYPES, PRECISIONS
from composer_fsdp2.migration.dialects.huggingface.table import (
    BESIDE,
    BY_PLACE,
    DEEPSPEED,
    DEGREES,
    OF_ACCELERATES_FILE,
    OF_AXOLOTL,
    OLD_SIBLINGS,
    PREFIX,
    ROWS,
    SETTINGS,
    SYNC_ROW,
    WITHOUT_EFFECT,
    GivenKey,
    Held,
    off,
    wrap_of,
)
from composer_fsdp2.migration.dialects.huggingface.values import Reader, Words, reads
from composer_fsdp2.migration.run import RunConfig, Wrap, WrapKind

# ---------------------------------------------------------------------------------------------------------------------
# What a section gives


def _reader_of(values: Mapping[str, Any]) -> Reader:
    settings = values if is_bare(values) else values.get("fsdp_config")
    given = settings if isinstance(settings, Mapping) else {}
    if values.get("distributed_type") == "DEEPSPEED":
        return Reader.ACCELERATE_DEEPSPEED
    is_fsdp2 = str(given.get("version", given.get("fsdp_version"))) == "2"
    if "distributed_type" in values:
        return Reader.ACCELERATE_FSDP2 if is_fsdp2 else Reader.ACCELERATE_FSDP1
    # transformers 4.51.3 reads no version at all; 5 reads it, with or without the prefix.
    return Reader.TRAINER_FSDP2 if is_fsdp2 else Reader.TRAINER_FSDP1


def is_bare(values: Mapping[str, Any]) -> bool:
    """Whether these are the keys of an ``fsdp_config`` itself, as in the JSON file that a Trainer is given."""
    if "fsdp_config" in values or "distributed_type" in values:
        return False
    # Beside fsdp these two are arguments of a Trainer's own.
    others = (*_ANSWERS, *(OLD_SIBLINGS if "fsdp" in values else ()))
    names = [str(name) for name in values if name not in others]
    plain = [name.removeprefix(PREFIX) for name in names]
    num_known = sum((SETTINGS, name) in BY_PLACE for name in plain)
    is_theirs = any(name.startswith(PREFIX) for name in names) or bool({*OF_TRAINERS}.intersection(plain))
    is_theirs |= {"version", "reshard_after_forward"}.issubset(plain)
    return is_theirs and 2 * num_known >= len(plain)


MAPPINGS = ("fsdp_config", "parallelism_config", "deepspeed_config")
# What a Trainer is told elsewhere, and passes over in such a file, where it answers what the file leaves open.
_ANSWERS = ("fsdp", "bf16", "fp16", "gradient_checkpointing")
# Keys that no other system's section has, all on their own.
OF_TRAINERS = ("transformer_layer_cls_to_wrap", "min_num_params", "cpu_ram_efficient_loading", "xla")


def _given(values: Mapping[str, Any], reader: Reader, *, is_file: bool) -> tuple[GivenKey, ...]:
    """The keys that are FSDP's own; what else a Trainer's arguments hold is none of it."""
    groups = {"fsdp_config": SETTINGS, "parallelism_config": DEGREES, "deepspeed_config": DEEPSPEED}
    found: list[GivenKey] = []
    if is_bare(values):  # a file, of whose keys every release takes the prefix off
        names = [str(name) for name in values if name not in _ANSWERS]
        found = [
            _nested_key(name, name.removeprefix(PREFIX), values[name], SETTINGS, reader)
            for name in names
            if name in values
        ]
        values = {name: value for name, value in values.items() if name in _ANSWERS}
    for name, value in values.items():
        group = groups.get(name)
        row = BY_PLACE.get((BESIDE, name))
        if group is not None and isinstance(value, Mapping) and value:
            found += [_nested_key(f"{name}.{key}", str(key), each, group, reader) for key, each in value.items()]
        elif group is not None:
            found.append(GivenKey(key=name, value=value, row=None, is_read=not value or isinstance(value, str)))
        elif reader.is_axolotl and name in OF_AXOLOTL:
            found.append(GivenKey(key=name, value=value, row=OF_AXOLOTL[name], is_read=value is not None))
        elif row is not None and reads(reader, row):
            found.append(GivenKey(key=name, value=value, row=row))
        elif name in OLD_SIBLINGS and reader in (Reader.TRAINER_FSDP1, Reader.TRAINER_FSDP2):
            old = BY_PLACE[SETTINGS, name.removeprefix(PREFIX)]
            found.append(GivenKey(key=name, value=value, row=old, is_read=reader is Reader.TRAINER_FSDP1))
        elif str(name).startswith("fsdp"):
            found.append(GivenKey(key=name, value=value, row=None, is_read=False))
        elif not reader.is_trainer and is_file and name not in OF_ACCELERATES_FILE:
            found.append(GivenKey(key=str(name), value=value, row=None, is_read=False))
    return _last_of_each(found)


def _nested_key(key: str, name: str, value: Any, group: str, reader: Reader) -> GivenKey:
    prefix = {SETTINGS: PREFIX, DEGREES: DEGREES_PREFIX}.get(group, "")
    plain = name.removeprefix(prefix)
    row = BY_PLACE.get((group, plain))
    if row is None:
        return GivenKey(key=key, value=value, row=None, is_read=False)
    is_read = reads(reader, row)
    if reader is Reader.TRAINER_FSDP1 and plain != name:
        is_read = False  # stripped from the keys of a JSON file only
    if row.aliases:  # two systems' words for one thing: each reads its own
        is_read = is_read and (plain in row.aliases) == (reader in (Reader.TRAINER_FSDP1, Reader.TRAINER_FSDP2))
    return GivenKey(key=key, value=value, row=row, is_read=is_read)


def _last_of_each(given: list[GivenKey]) -> tuple[GivenKey, ...]:
    """Most readers take a key with and without its prefix as the same, and the last one holds."""
    last = {(each.row.name, each.key in OLD_SIBLINGS): each.key for each in given if each.row and each.is_read}
    return tuple(
        each
        if each.row is None or last.get((each.row.name, each.key in OLD_SIBLINGS), each.key) == each.key
        else replace(each, is_read=False)
        for each in given
    )


def held_by(values: Mapping[str, Any], reader: Reader | None = None, *, is_file: bool = False) -> Held:
    """What holds in the run that a section asks for.

    Args:
        reader: Whose words it has; None finds out.
        is_file: Whether the section is all of a file, of which accelerate knows every key.
    """
    reader = reader or _reader_of(values)
    given = _given(values, reader, is_file=is_file)
    settings = {row.name: row.defaults.get(reader) for row in ROWS}
    held = Held(reader=reader, given=given, around=values, settings=settings, problems={})
    for each in given:
        if each.row is not None and (each.is_read or reader in each.row.checked_by):
            _set(held, each)
    for step in (_switches, _zero, _fsdp_words, _wrapping, _precision_words, _strategies, _loading, _contradictions):
        step(held)
    return held


def _set(held: Held, given: GivenKey) -> None:
    assert given.row is not None
    try:
        value = given.row.takes.parse(given.value, held.reader)
    except ConfigError as error:
        held.problems[given.key] = str(error)
        return
    if not given.is_read:
        return
    if given.key not in OLD_SIBLINGS:
        held.settings[given.row.name] = value
    elif isinstance(value, tuple):
        held.settings[given.row.name] += value  # both lists count
    else:
        held.settings[given.row.name] = max(held.settings[given.row.name], value)


def _switches(held: Held) -> None:
    """Whether accelerate's file turns FSDP on; its fp16 of old, before which mixed_precision goes."""
    if held.around.get("distributed_type", "FSDP") not in ("FSDP", "DEEPSPEED"):
        held.problems["distributed_type"] = (
            "accelerate launch reads fsdp_config under distributed_type FSDP only; as trained: remove fsdp_config; "
            "as written: distributed_type: FSDP"
        )
    if not held.reader.is_trainer and held.settings["fp16"] and held.key_of("mixed_precision") is None:
        held.settings["mixed_precision"] = "fp16"


def _zero(held: Held) -> None:
    """DeepSpeed's stages in FSDP1's words: stage 1 keeps more than SHARD_GRAD_OP, and reduces as seldom as it may."""
    settings = held.settings
    if held.reader is not Reader.ACCELERATE_DEEPSPEED:
        return
    stage, devices = settings["zero_stage"], [settings["offload_optimizer_device"]]
    stages = (ShardingStrategy.NO_SHARD, *[ShardingStrategy.SHARD_GRAD_OP] * 2, ShardingStrategy.FULL_SHARD)
    settings["sharding_strategy"] = stages[stage]
    if stage == 3:
        devices.append(settings["offload_param_device"])
    settings["offload_params"] = "cpu" in devices
    if stage == 3 and settings["zero3_save_16bit_model"]:
        settings["state_dict_type"] = "full"
    if "nvme" in devices:
        which = "param" if settings["offload_param_device"] == "nvme" else "optimizer"
        key = held.key_of(f"offload_{which}_device") or "deepspeed_config"
        held.problems[key] = "nvme: FSDP2 keeps nothing on a disk; write cpu, which needs the host memory, or none"
    other_file = held.key_of("deepspeed_config_file")
    if other_file is not None and held.value_of(other_file):
        held.problems[other_file] = (
            "the settings are in another file, which is not read here; write its zero_optimization.stage here as "
            "zero_stage, what it offloads as offload_optimizer_device and offload_param_device, and remove this"
        )


def _fsdp_words(held: Held) -> None:
    settings, reader = held.settings, held.reader
    if not reader.is_trainer:
        return
    if "fsdp" not in held.around and is_bare(held.around):
        if not reader.is_fsdp2:
            held.problems["fsdp"] = (
                "its words are in the command or the script that names this file (--fsdp); write them here, where a "
                "Trainer passes over them: fsdp: full_shard auto_wrap"
            )
    elif held.around.get("fsdp") in (None, "", False, []) and not (
        reader.is_axolotl and held.around.get("fsdp_config")
    ):
        held.problems["fsdp"] = (
            "FSDP is off, whatever fsdp_config says; as trained: remove that; as written: fsdp: full_shard auto_wrap"
        )
    words: Words = settings["fsdp"] or Words()
    settings["offload_params"] = settings["offload_params"] or words.offload
    if reader.is_axolotl:  # the policy is in the environment already, and the word sets it again
        settings["sharding_strategy"] = None if reader.is_fsdp2 else words.strategy or ShardingStrategy.FULL_SHARD
        if words.auto_wrap:
            by_size = settings["min_num_params"] > 0 and not reader.is_fsdp2
            settings["auto_wrap_policy"] = "SIZE_BASED_WRAP" if by_size else "TRANSFORMER_BASED_WRAP"
    if reader is Reader.TRAINER_FSDP1:
        settings["sharding_strategy"] = words.strategy or ShardingStrategy.FULL_SHARD
        by_size = settings["min_num_params"] > 0
        policy = "SIZE_BASED_WRAP" if by_size else "TRANSFORMER_BASED_WRAP"
        settings["auto_wrap_policy"] = policy if words.auto_wrap else "NO_WRAP"
        return
    if not reader.is_fsdp2:
        return
    if words.strategy is not None and held.key_of("reshard_after_forward") is None:
        settings["reshard_after_forward"] = words.strategy.reshards_after_forward
    if words.strategy not in (None, ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        held.problems["fsdp"] = "for FSDP2 it is full_shard or shard_grad_op; replicas are parallelism_config's"


def _wrapping(held: Held) -> None:
    """What decides nothing is as if it were not there, and is never looked at: there even a bad value did no harm."""
    policy = held.settings["auto_wrap_policy"]
    if policy != "TRANSFORMER_BASED_WRAP":
        held.settings["transformer_layer_cls_to_wrap"] = ()
        for key in held.keys_of("transformer_layer_cls_to_wrap"):
            held.problems.pop(key, None)
    if policy == "SIZE_BASED_WRAP":
        _wrapping_by_size(held)
    else:
        _no_wrapping_by_size(held, is_root=policy == "NO_WRAP")
    classes = held.keys_of("transformer_layer_cls_to_wrap")
    if held.reader is Reader.TRAINER_FSDP1 and classes and held.asks_for_size():
        key = held.keys_of("min_num_params")[-1]
        held.problems.setdefault(key, f"it and {classes[-1].split('.')[-1]} exclude each other; keep one")


def _wrapping_by_size(held: Held) -> None:
    """Its default is a float (1e8), and "100000000.0" is not an int."""
    if not held.keys_of("min_num_params") and not held.reader.is_trainer:
        key = held.key_of("auto_wrap_policy") or "fsdp_config"
        held.problems[key] = "SIZE_BASED_WRAP needs min_num_params, for which accelerate's default does not parse"


def _no_wrapping_by_size(held: Held, *, is_root: bool) -> None:
    """A Trainer compares the number with 0 in any case, which a float lives through."""
    held.settings["min_num_params"] = 0
    for key in held.keys_of("min_num_params"):
        if not held.reader.is_trainer or (is_root and isinstance(held.value_of(key), float)):
            held.problems.pop(key, None)


def _precision_words(held: Held) -> None:
    settings = held.settings
    if not held.reader.is_trainer:
        return
    if settings["bf16"] and settings["fp16"]:
        held.problems["fp16"] = "bf16 and fp16 are both true; keep one"
    low = "fp8" if settings["fp8"] else "fp16" if settings["fp16"] else "bf16" if settings["bf16"] is True else "no"
    settings["mixed_precision"] = low


def _strategies(held: Held) -> None:
    strategy = held.settings["sharding_strategy"]
    if strategy is not None:
        held.settings["reshard_after_forward"] = strategy.reshards_after_forward


def _loading(held: Held) -> None:
    """Under FSDP2 the one key does both."""
    if held.reader.is_fsdp2:
        held.settings["sync_module_states"] = held.settings["cpu_ram_efficient_loading"]


def _contradictions(held: Held) -> None:
    settings, problems = held.settings, held.problems
    if _refuses_to_load(held):
        keys = _sync_keys(held)
        problems.setdefault(
            keys[-1] if keys else "fsdp_config",
            "all ranks but the first would train on random weights: cpu_ram_efficient_loading is "
            f"{_loading_text(held)}; set this to true, or cpu_ram_efficient_loading to false",
        )
    elif settings["cpu_ram_efficient_loading"]:  # where it is not refused, the plugin puts it right
        settings["sync_module_states"] = True
    if settings["gradient_checkpointing"] and settings["activation_checkpointing"] and held.reader.is_trainer:
        for key in held.keys_of("activation_checkpointing"):
            problems.setdefault(key, "it and gradient_checkpointing exclude each other; keep one")


def _refuses_to_load(held: Held) -> bool:
    """Whether the system stops at values that rank 0 alone loads and keeps.

    A Trainer compares words. accelerate's launcher treats any text as true, and does so for FSDP2 as well, of which
    only one of the two is read there.
    """
    if held.reader in (Reader.TRAINER_FSDP2, Reader.ACCELERATE_DEEPSPEED) or held.reader.is_axolotl:
        return False
    loading, synced = held.key_of("cpu_ram_efficient_loading"), _sync_keys(held)
    by_default = held.settings["cpu_ram_efficient_loading"]
    loads = by_default if loading is None else held.value_of(loading)
    syncs = held.value_of(synced[-1]) if synced else True
    if held.reader.is_trainer:
        return str(loads).lower() == "true" and str(syncs).lower() == "false"
    return bool(loads) and not syncs


def _sync_keys(held: Held) -> list[str]:
    """The keys that are looked at, read or not."""
    if held.reader is Reader.ACCELERATE_FSDP2:
        return [each.key for each in held.given if each.row is SYNC_ROW]
    return held.keys_of("sync_module_states")


def _loading_text(held: Held) -> str:
    key = held.key_of("cpu_ram_efficient_loading")
    if key is None:
        return "on by default"
    return "true" if held.settings["cpu_ram_efficient_loading"] else "in quotes, which the launcher takes for true"


# ---------------------------------------------------------------------------------------------------------------------
# The run


def run_of(held: Held) -> RunConfig:
    settings, around, is_fsdp2 = held.settings, held.around, held.reader.is_fsdp2
    config = ShardingConfig(
        mesh=_mesh(held),
        wrap=wrap_of(settings),
        reshard_after_forward=settings["reshard_after_forward"],
        mixed_precision=_mixed_precision(DTYPES[settings["mixed_precision"]], is_fsdp2=is_fsdp2),
        cpu_offload=settings["offload_params"],
        activation_checkpointing=_checkpointing(held),
        prefetch=Prefetch(
            forward=1 if settings["forward_prefetch"] else None,
            backward=0 if settings["backward_prefetch"] == "NO_PREFETCH" else None,
        ),
        accumulation=Accumulation(gradient_sync=GradientSync.LAST if _accumulates(held) else GradientSync.EVERY),
        sync_module_states=settings["sync_module_states"],
    )
    is_launcher, is_axolotl = not held.reader.is_trainer, held.reader.is_axolotl
    return RunConfig(
        config=config,
        precision=PRECISIONS[settings["mixed_precision"]],
        state_dict_type=settings["state_dict_type"],
        num_ranks=around.get("num_processes") if is_launcher else None,
        num_nodes=around.get("num_machines") if is_launcher else None,
        max_grad_norm=settings["gradient_clipping"] if is_launcher else _max_grad_norm(around),
        tensor_parallel=settings["tp_size"],
        context_parallel=settings["cp_size"],
        expert_parallel=settings["ep_size"],
        save_only_model=is_axolotl and bool(around.get("save_only_model")),
        compile=is_axolotl and around.get("torch_compile") in (True, "auto"),
    )


def _max_grad_norm(around: Mapping[str, Any]) -> Any:
    """A Trainer clips to 1 by default, and nothing for a norm of 0."""
    norm = around.get("max_grad_norm", 1.0)
    return None if isinstance(norm, int | float) and norm <= 0 else norm


def _mixed_precision(dtype: str | None, *, is_fsdp2: bool) -> MixedPrecision:
    """FSDP1 cast the root's inputs only, and buffers; accelerate's FSDP2 casts inputs and outputs of each unit."""
    if dtype is None:
        return MixedPrecision()  # there is nothing to cast to
    if is_fsdp2:
        return MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype, cast_forward_inputs=True)
    return MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)


def _checkpointing(held: Held) -> ActivationCheckpointing:
    settings, is_axolotl = held.settings, held.reader.is_axolotl
    offloads = settings["activation_offloading"] or settings["gradient_checkpointing"] in ("offload", "offload_disk")
    if settings["activation_checkpointing"] or offloads:
        classes = wrap_of(settings).classes if settings["activation_checkpointing"] else ()
        return ActivationCheckpointing(checkpoint=True, classes=classes, reentrant=False, cpu_offload=bool(offloads))
    if not settings["gradient_checkpointing"]:
        return ActivationCheckpointing()
    given = settings["gradient_checkpointing_kwargs"]
    reentrant = given.get("use_reentrant", not is_axolotl) if isinstance(given, Mapping) else not is_axolotl
    return ActivationCheckpointing(checkpoint=True, classes=(), reentrant=bool(reentrant))


def _accumulates(held: Held) -> bool:
    """A Trainer puts gradients off to the last microbatch (no_sync); with accelerate alone the script decides, and
    under ZeRO the stage: with gradients in shards each microbatch is reduced."""
    if held.reader is Reader.ACCELERATE_DEEPSPEED:
        return bool(held.settings["gradient_accumulation_steps"] > 1 and held.settings["zero_stage"] < 2)
    steps = held.around.get("gradient_accumulation_steps")
    return held.reader.is_trainer and isinstance(steps, int) and steps > 1


def _mesh(held: Held) -> MeshSpec:
    """All ranks, unless degrees are given or FSDP1 made groups of its own: its hybrids sharded within a node.

    Raises:
        ConfigError: nobody says how many ranks a node has.
    """
    settings, strategy = held.settings, held.settings["sharding_strategy"]
    if strategy is ShardingStrategy.NO_SHARD:
        return MeshSpec().without_shards()
    replicate, shard = settings["dp_replicate_size"], settings["dp_shard_size"]
    if held.key_of("dp_replicate_size", "dp_shard_size") is not None:
        shard *= settings["cp_size"]  # parameters are sharded over the ranks of a sequence, too
        if shard == 1:
            raise ConfigError("dp_shard_size is 1, which is no sharding; give the number of ranks of one replica")
        return MeshSpec.of_degrees(shard, replicate if replicate > 1 else None)
    if strategy is None or not strategy.is_hybrid:
        return MeshSpec()
    if held.is_on_one_node:
        return MeshSpec()
    processes, machines = held.around.get("num_processes"), held.around.get("num_machines", 1)
    if held.reader.is_trainer or not isinstance(processes, int) or not isinstance(machines, int):
        raise ConfigError(
            "FSDP1 sharded within each node, and replicated over nodes, by the number of GPUs that it found; say it, "
            "as parallelism_config: {dp_shard_size: GPUs of a node, dp_replicate_size: number of nodes}"
        )
    if machines < 1 or processes % machines:
        raise ConfigError(f"num_processes {processes} is not a multiple of num_machines {machines}")
    return MeshSpec.of_degrees(processes // machines, -1)


# ---------------------------------------------------------------------------------------------------------------------
# Findings


def findings_of(held: Held) -> Iterator[Finding]:
    for given in held.given:
        yield _of_no_row(given, held) if given.row is None else _finding(given, given.row, held)
    given_keys = {given.key for given in held.given}
    for key, problem in held.problems.items():
        if key not in given_keys:
            yield implicit(key, Outcome.NEEDS_DECISION, problem)
    if is_bare(held.around) and held.key_of("bf16", "fp16") is None:
        yield _IMPLICIT_PRECISION
    if held.reader is Reader.ACCELERATE_DEEPSPEED:
        yield from _IMPLICIT_OF_DEEPSPEED
    elif not held.reader.is_fsdp2:
        yield from _implicit_findings(held)


def _finding(given: GivenKey, row: Row, held: Held) -> Finding:
    usual = row.usual(given.key, given.value)
    if given.key in held.problems:
        return replace(usual, outcome=Outcome.NEEDS_DECISION, reason=held.problems[given.key], target="")
    if given.is_off and row.defaults and not any(row.defaults.values()):
        usual = off(usual)
        if row.outcome is Outcome.UNSUPPORTED:
            usual = replace(usual, outcome=Outcome.UNNEEDED)
    if not given.is_read:
        return _unread(usual, given, row, held)
    return usual if row.decide is None else row.decide(usual, held)


def _of_no_row(given: GivenKey, held: Held) -> Finding:
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
    system = "axolotl" if held.reader.is_axolotl else "Hugging Face"
    if "." not in given.key and not held.reader.is_trainer:
        near, reason = nearest(name, OF_ACCELERATES_FILE), "accelerate refuses a file with a key that it does not know"
        hint = f"did you mean {near}?" if near else "remove it"
        return replace(finding, reason=reason, hint=hint, known=False)
    near = nearest(name.removeprefix(PREFIX), {known for _, known in BY_PLACE})
    prefix = PREFIX if name.startswith(PREFIX) and near != "fsdp" else ""
    finding = replace(finding, reason=f"{system} knows no such key, and passed over it", known=False)
    return replace(finding, hint=f"did you mean {prefix}{near}?") if near else idle(finding, finding.reason)


def _unread(usual: Finding, given: GivenKey, row: Row, held: Held) -> Finding:
    """A key that the system passed over: nothing is lost if it says what held anyway."""
    reader, is_doubled = held.reader, _is_doubled(given, row, held)
    reason = f"{held.key_of(row.name)} says it again" if is_doubled else f"{reader.value} does not read it here"
    open_ = replace(usual, outcome=Outcome.NEEDS_DECISION, target="", hint="remove it")
    if given.value is None and reader.is_axolotl:
        return idle(usual, "it is empty")
    try:
        value = row.takes.parse(given.value, reader)
    except ConfigError as error:
        return replace(open_, reason=f"{reason}; {error}")
    if row.name in WITHOUT_EFFECT or _is_in_effect(row, value, held):
        return idle(usual, f"{reason}, and what it says held all the same")
    if is_doubled:
        return replace(open_, reason=f"{reason}, and held", hint="as trained: remove it; as written: remove the other")
    if reader.is_axolotl and row.name in _OF_SPEED:
        reason = (
            f"axolotl does not pass it on: the run went by {_word(held.settings[row.name])}; no number depends on it"
        )
        return replace(usual, outcome=Outcome.APPROXIMATE, target="as it ran", reason=reason, hint="")
    way = row.instead.get(reader, "")
    how = f" (as {way})" if way else ""
    if reader is Reader.AXOLOTL_FSDP1 and row is SYNC_ROW:
        reason = "axolotl passes it on from 0.12 on; before"
    return replace(
        open_,
        reason=f"{reason}: the run went by {_word(held.settings[row.name])}",
        hint=f"as trained: remove it; as written: say it where it is read{how}",
    )


# What changes speed and memory only, so that the run is the same one without.
_OF_SPEED = ("backward_prefetch", "forward_prefetch")


def _is_doubled(given: GivenKey, row: Row, held: Held) -> bool:
    """Whether the key is read here, under another of its names."""
    is_inert = held.reader is Reader.TRAINER_FSDP1 and given.key.split(".")[-1].startswith(PREFIX)
    return reads(held.reader, row) and not is_inert and held.key_of(row.name) not in (None, given.key)


def _word(held: object) -> object:
    if held in ((), None):
        return "nothing"
    if isinstance(held, bool):
        return str(held).lower()
    return held.value if isinstance(held, ShardingStrategy) else held


def _is_in_effect(row: Row, value: Any, held: Held) -> bool:
    settings = held.settings
    if not isinstance(value, ShardingStrategy):
        return bool(value == settings[row.name])
    if settings["sharding_strategy"] is not None:
        return value is settings["sharding_strategy"]
    is_plain = value in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)
    return is_plain and value.reshards_after_forward == settings["reshard_after_forward"]


# What FSDP1 did without being told, and FSDP2 does otherwise by itself; how the model was wrapped lies between the two.
# fmt: off
_IMPLICIT: tuple[tuple[Callable[[Held], bool], Finding], ...] = (
    (lambda held: held.settings["mixed_precision"] != "no", implicit("casting of inputs and buffers", Outcome.EXACT,
        "FSDP1 cast the root's inputs only, and buffers; FSDP2 by itself casts each unit's inputs, and no buffer",
        "cast_forward_inputs: false and buffer_dtype keep it so", target="cast_root_inputs, buffer_dtype")),
    (lambda held: held.key_of("backward_prefetch") is None, implicit("backward_prefetch", Outcome.EXACT,
        "Hugging Face prefetched no unit in backward; FSDP2 by itself prefetches one",
        "leave the prefetch to FSDP2 for speed, at the price of one more unit in memory",
        target="prefetch in backward: none")),
    (lambda held: held.key_of("state_dict_type") is None, implicit("state_dict_type", Outcome.EXACT,
        "checkpoints were full ones; accelerate's FSDP2 saves sharded ones by default",
        target="state_dict_type: full")),
    (lambda held: held.key_of("sync_module_states") is None and held.settings["sync_module_states"],
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
_IMPLICIT_SYNC = implicit("gradient_sync", Outcome.EXACT,
    "of several microbatches a Trainer reduces gradients in the last one only, and holds unsharded ones until then",
    "gradient_sync: every spares that memory, and communicates more", target="gradient_sync: last")
# fmt: on


def _implicit_findings(held: Held) -> Iterator[Finding]:
    yield from (finding for applies, finding in _IMPLICIT if applies(held))
    yield from _implicit_wrapping(held)
    if _accumulates(held):
        yield _IMPLICIT_SYNC


def _implicit_wrapping(held: Held) -> Iterator[Finding]:
    decided_by_words = held.reader is Reader.TRAINER_FSDP1
    is_axolotl = held.reader.is_axolotl
    if not decided_by_words and held.key_of("auto_wrap_policy") is not None:
        return
    if decided_by_words and "fsdp" not in held.around:
        return  # the words are elsewhere
    wrap = wrap_of(held.settings)
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


# A file that says it already has this finding at its own key.
