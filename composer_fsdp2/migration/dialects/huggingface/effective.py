"""Find the keys of a section, determine which of them are read, and compute the effective configuration."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from composer_fsdp2.config.rows import INT
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.fsdp1.parsing import ShardingStrategy
from composer_fsdp2.migration.dialects.huggingface.keys import (
    BY_PLACE,
    OF_AXOLOTL,
    ROWS,
    SYNC_ROW,
    EffectiveConfig,
    GivenKey,
    reads,
)
from composer_fsdp2.migration.dialects.huggingface.values import (
    BESIDE,
    DEGREES,
    DEGREES_PREFIX,
    MAPPINGS,
    OF_ACCELERATES_FILE,
    OLD_SIBLINGS,
    PREFIX,
    SETTINGS,
    Reader,
    Words,
)

# Trainer arguments that are set elsewhere. A Trainer ignores them in a file of fsdp_config keys, where the migration
# reads them to complete the file.
_ANSWERS = ("fsdp", "bf16", "fp16", "gradient_checkpointing")
# Keys that occur in no other system's section: one alone identifies it.
OF_TRAINERS = ("transformer_layer_cls_to_wrap", "min_num_params", "cpu_ram_efficient_loading", "xla")


def reader_of(values: Mapping[str, Any]) -> Reader:
    """Return the reader of a section that is not axolotl's."""
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
    """Whether these are the keys of an ``fsdp_config`` itself, as in the JSON file that a Trainer loads."""
    if "fsdp_config" in values or "distributed_type" in values:
        return False
    # Beside fsdp, OLD_SIBLINGS are arguments of a Trainer.
    others = (*_ANSWERS, *(OLD_SIBLINGS if "fsdp" in values else ()))
    names = [str(name) for name in values if name not in others]
    plain = [name.removeprefix(PREFIX) for name in names]
    num_known = sum((SETTINGS, name) in BY_PLACE for name in plain)
    is_theirs = any(name.startswith(PREFIX) for name in names) or bool({*OF_TRAINERS}.intersection(plain))
    is_theirs |= {"version", "reshard_after_forward"}.issubset(plain)
    return is_theirs and 2 * num_known >= len(plain)


def given_keys(values: Mapping[str, Any], reader: Reader, *, is_file: bool) -> tuple[GivenKey, ...]:
    """Return the keys that configure FSDP, without a Trainer's other arguments."""
    found: list[GivenKey] = []
    if is_bare(values):  # a file: every release strips the prefix from its keys
        names = [str(name) for name in values if name not in _ANSWERS]
        found = [
            _nested_key(name, name.removeprefix(PREFIX), values[name], SETTINGS, reader)
            for name in names
            if name in values
        ]
        values = {name: value for name, value in values.items() if name in _ANSWERS}
    for name, value in values.items():
        row = BY_PLACE.get((BESIDE, name))
        if name in MAPPINGS and isinstance(value, Mapping) and value:
            found += [_nested_key(f"{name}.{key}", str(key), each, name, reader) for key, each in value.items()]
        elif name in MAPPINGS:
            found.append(GivenKey(key=name, value=value, row=None, is_read=not value or isinstance(value, str)))
        elif reader.is_axolotl and name in OF_AXOLOTL:
            found.append(GivenKey(key=name, value=value, row=OF_AXOLOTL[name], is_read=value is not None))
        elif row is not None and reads(reader, row):
            found.append(GivenKey(key=name, value=value, row=row))
        elif name in OLD_SIBLINGS and reader.is_transformers:
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
    if group == DEGREES and plain == name and not reader.is_trainer:
        is_read = False  # the launcher makes an option of every name, but passes on only those that it knows
    if row.aliases:  # transformers and accelerate use different names: each reads only its name
        is_read = is_read and (plain in row.aliases) == reader.is_transformers
    return GivenKey(key=key, value=value, row=row, is_read=is_read)


def _last_of_each(given: list[GivenKey]) -> tuple[GivenKey, ...]:
    """Mark keys as not read that a later one overrides: most readers ignore whether a key has the prefix."""
    last = {(each.row.name, each.key in OLD_SIBLINGS): each.key for each in given if each.row and each.is_read}
    return tuple(
        each
        if each.row is None or last.get((each.row.name, each.key in OLD_SIBLINGS), each.key) == each.key
        else replace(each, is_read=False)
        for each in given
    )


# ---------------------------------------------------------------------------------------------------------------------
# The settings in effect


def effective_config(
    values: Mapping[str, Any], reader: Reader | None = None, *, is_file: bool = False
) -> EffectiveConfig:
    """Return the effective configuration of a section.

    Args:
        reader: The system that reads it; detected if None.
        is_file: Whether the section is a whole file, in which accelerate accepts only keys that it knows.
    """
    reader = reader or reader_of(values)
    given = given_keys(values, reader, is_file=is_file)
    settings = {row.name: row.defaults.get(reader) for row in ROWS}
    config = EffectiveConfig(reader=reader, given=given, around=values, settings=settings, problems={})
    for each in given:
        if each.row is not None and (each.is_read or reader in each.row.checked_by):
            _set(config, each)
    for step in (_switches, _zero, _fsdp_words, _wrapping, _precision_words, _strategies, _loading, _contradictions):
        step(config)
    return config


def _set(config: EffectiveConfig, given: GivenKey) -> None:
    assert given.row is not None
    try:
        value = given.row.takes.parse(given.value, config.reader)
    except ConfigError as error:
        config.problems[given.key] = str(error)
        return
    if not given.is_read:
        return
    if given.key not in OLD_SIBLINGS:
        config.settings[given.row.name] = value
    elif isinstance(value, tuple):
        config.settings[given.row.name] += value  # both lists apply
    else:
        config.settings[given.row.name] = max(config.settings[given.row.name], value)


def _switches(config: EffectiveConfig) -> None:
    """Check that an accelerate file enables FSDP, and apply its old ``fp16``, which ``mixed_precision`` overrides."""
    if config.around.get("distributed_type", "FSDP") not in ("FSDP", "DEEPSPEED"):
        config.problems["distributed_type"] = (
            "accelerate launch reads fsdp_config under distributed_type FSDP only; as trained: remove fsdp_config; "
            "as written: distributed_type: FSDP"
        )
    if not config.reader.is_trainer and config.settings["fp16"] and config.key_of("mixed_precision") is None:
        config.settings["mixed_precision"] = "fp16"


def _zero(config: EffectiveConfig) -> None:
    """Convert DeepSpeed's stages to FSDP1's settings.

    Stage 1 keeps more than SHARD_GRAD_OP, and reduces as seldom as possible.
    """
    settings = config.settings
    if config.reader is not Reader.ACCELERATE_DEEPSPEED:
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
        key = config.key_of(f"offload_{which}_device") or "deepspeed_config"
        config.problems[key] = "nvme: FSDP2 keeps nothing on a disk; write cpu, which needs the host memory, or none"
    other_file = config.key_of("deepspeed_config_file")
    if other_file is not None and config.value_of(other_file):
        config.problems[other_file] = "the file is neither in the working directory nor beside this one"


def _fsdp_words(config: EffectiveConfig) -> None:
    settings, reader = config.settings, config.reader
    if not reader.is_trainer:
        return
    if "fsdp" not in config.around and is_bare(config.around):
        if not reader.is_fsdp2:
            config.problems["fsdp"] = (
                "fsdp's options are in the command or the script that names this file (--fsdp); write them here, where "
                "a Trainer passes over them: fsdp: full_shard auto_wrap"
            )
    elif config.around.get("fsdp") in (None, "", False, []) and not (
        reader.is_axolotl and config.around.get("fsdp_config")
    ):
        config.problems["fsdp"] = (
            "FSDP is off, whatever fsdp_config says; as trained: remove that; as written: fsdp: full_shard auto_wrap"
        )
    words: Words = settings["fsdp"] or Words()
    settings["offload_params"] = settings["offload_params"] or words.offload
    if reader.is_axolotl:  # auto_wrap overrides the policy that is already in the environment
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
    if words.strategy is not None and config.key_of("reshard_after_forward") is None:
        settings["reshard_after_forward"] = words.strategy.reshards_after_forward
    if words.strategy not in (None, ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        config.problems["fsdp"] = "for FSDP2 it is full_shard or shard_grad_op; replicas are parallelism_config's"


def _wrapping(config: EffectiveConfig) -> None:
    """Drop wrapping keys that the policy does not use, with their problems: the system never checks their values."""
    policy = config.settings["auto_wrap_policy"]
    if policy != "TRANSFORMER_BASED_WRAP":
        config.settings["transformer_layer_cls_to_wrap"] = ()
        for key in config.keys_of("transformer_layer_cls_to_wrap"):
            config.problems.pop(key, None)
    if policy == "SIZE_BASED_WRAP":
        _wrapping_by_size(config)
    else:
        _no_wrapping_by_size(config, is_root=policy == "NO_WRAP")
    classes = config.keys_of("transformer_layer_cls_to_wrap")
    if config.reader is Reader.TRAINER_FSDP1 and classes and _asks_for_size(config):
        key = config.keys_of("min_num_params")[-1]
        config.problems.setdefault(key, f"it and {classes[-1].split('.')[-1]} exclude each other; keep one")


def _asks_for_size(config: EffectiveConfig) -> bool:
    """Whether any number of parameters that is read is above 0."""
    numbers = map(config.value_of, config.keys_of("min_num_params"))
    return any(isinstance(number, int | float) and number > 0 for number in numbers)


def _wrapping_by_size(config: EffectiveConfig) -> None:
    """Report a missing ``min_num_params``: accelerate's default is a float (1e8), and "100000000.0" is not an int."""
    if not config.keys_of("min_num_params") and not config.reader.is_trainer:
        key = config.key_of("auto_wrap_policy") or "fsdp_config"
        config.problems[key] = "SIZE_BASED_WRAP needs min_num_params, for which accelerate's default does not parse"


def _no_wrapping_by_size(config: EffectiveConfig, *, is_root: bool) -> None:
    """Reset ``min_num_params``, and drop problems with its value if the system does not use it.

    A Trainer compares the number with 0 in any case, which works for a float.
    """
    config.settings["min_num_params"] = 0
    for key in config.keys_of("min_num_params"):
        if not config.reader.is_trainer or (is_root and isinstance(config.value_of(key), float)):
            config.problems.pop(key, None)


def _precision_words(config: EffectiveConfig) -> None:
    settings = config.settings
    if not config.reader.is_trainer:
        return
    if settings["bf16"] and settings["fp16"]:
        config.problems["fp16"] = "bf16 and fp16 are both true; keep one"
    low = "fp8" if settings["fp8"] else "fp16" if settings["fp16"] else "bf16" if settings["bf16"] is True else "no"
    settings["mixed_precision"] = low


def _strategies(config: EffectiveConfig) -> None:
    strategy = config.settings["sharding_strategy"]
    if strategy is not None:
        config.settings["reshard_after_forward"] = strategy.reshards_after_forward


def _loading(config: EffectiveConfig) -> None:
    """Set ``sync_module_states`` from ``cpu_ram_efficient_loading``, which does both under FSDP2."""
    if config.reader.is_fsdp2:
        config.settings["sync_module_states"] = config.settings["cpu_ram_efficient_loading"]


def _contradictions(config: EffectiveConfig) -> None:
    settings, problems = config.settings, config.problems
    norm = config.around.get("max_grad_norm")
    if config.reader.is_trainer and not (norm is None or INT.fits(norm) or isinstance(norm, float)):
        problems.setdefault("max_grad_norm", f"a Trainer clips to a number, not to {norm!r}")
    if _refuses_to_load(config):
        keys = _sync_keys(config)
        problems.setdefault(
            keys[-1] if keys else "fsdp_config",
            "all ranks but the first would train on random weights: cpu_ram_efficient_loading is "
            f"{_loading_text(config)}; set this to true, or cpu_ram_efficient_loading to false",
        )
    elif settings["cpu_ram_efficient_loading"]:  # if not rejected, the plugin corrects it
        settings["sync_module_states"] = True
    if settings["gradient_checkpointing"] and settings["activation_checkpointing"] and config.reader.is_trainer:
        for key in config.keys_of("activation_checkpointing"):
            problems.setdefault(
                key,
                "a Trainer stops at it beside gradient_checkpointing, which would recompute the layers twice; remove "
                "gradient_checkpointing: activation_checkpointing recomputes them inside their units",
            )


def _refuses_to_load(config: EffectiveConfig) -> bool:
    """Whether the system raises because rank 0 alone loads the values and does not send them to other ranks.

    A Trainer compares text. accelerate's launcher treats any text as true, also for FSDP2, which reads only one of
    the two keys.
    """
    if config.reader in (Reader.TRAINER_FSDP2, Reader.ACCELERATE_DEEPSPEED) or config.reader.is_axolotl:
        return False
    loading, synced = config.key_of("cpu_ram_efficient_loading"), _sync_keys(config)
    by_default = config.settings["cpu_ram_efficient_loading"]
    loads = by_default if loading is None else config.value_of(loading)
    syncs = config.value_of(synced[-1]) if synced else True
    if config.reader.is_trainer:
        return str(loads).lower() == "true" and str(syncs).lower() == "false"
    return bool(loads) and not syncs


def _sync_keys(config: EffectiveConfig) -> list[str]:
    """Return the ``sync_module_states`` keys that the system checks, whether it reads them or not."""
    if config.reader is Reader.ACCELERATE_FSDP2:
        return [each.key for each in config.given if each.row is SYNC_ROW]
    return config.keys_of("sync_module_states")


def _loading_text(config: EffectiveConfig) -> str:
    key = config.key_of("cpu_ram_efficient_loading")
    if key is None:
        return "on by default"
    return "true" if config.settings["cpu_ram_efficient_loading"] else "in quotes, which the launcher takes for true"
