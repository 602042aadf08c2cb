"""Find the keys of a section, determine which of them the system reads, and compute the effective configuration."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from composer_fsdp2.config.rows import INT
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.fsdp1.parsing import ShardingStrategy
from composer_fsdp2.migration.dialects.huggingface.keys import (
    BY_PLACE,
    OF_AXOLOTL,
    ROWS,
    EffectiveConfig,
    GivenKey,
)
from composer_fsdp2.migration.dialects.huggingface.values import (
    A1,
    A2,
    AD,
    AXOLOTL,
    BESIDE,
    DEGREES,
    FSDP2,
    LAUNCHERS,
    MAPPINGS,
    OF_ACCELERATES_FILE,
    OLD_SIBLINGS,
    PREFIX,
    PREFIXES,
    SETTINGS,
    T1,
    T2,
    TRAINERS,
    TRANSFORMERS,
    X1,
    X2,
    FsdpOptions,
    Reader,
)

# Trainer arguments that are set elsewhere. A Trainer ignores them in a file of fsdp_config keys, where the migration
# reads them to complete the file.
_TRAINER_SETTINGS = ("fsdp", "bf16", "fp16", "gradient_checkpointing")
# Keys that occur in no other system's section: one alone identifies it.
OF_TRAINERS = ("transformer_layer_cls_to_wrap", "min_num_params", "cpu_ram_efficient_loading", "xla")


def reader_of(values: Mapping[str, Any], *, is_axolotl: bool = False) -> Reader:
    """Return the reader of a section."""
    settings = values if is_bare(values) else values.get("fsdp_config")
    given = settings if isinstance(settings, Mapping) else {}
    versions = (values.get("fsdp_version"), given.get("version"), given.get("fsdp_version"))
    is_fsdp2 = str(next(filter(None, versions), 1)) == "2"
    if is_axolotl:
        return X2 if is_fsdp2 else X1
    if "distributed_type" in values:
        return AD if values["distributed_type"] == "DEEPSPEED" else A2 if is_fsdp2 else A1
    return T2 if is_fsdp2 else T1  # transformers 4.51.3 reads no version; 5 reads it, with or without the prefix


def is_bare(values: Mapping[str, Any]) -> bool:
    """Return whether a mapping is the content of an ``fsdp_config``, as in a JSON file that a Trainer loads."""
    if "fsdp_config" in values or "distributed_type" in values:
        return False
    # Beside fsdp, OLD_SIBLINGS are arguments of a Trainer.
    others = (*_TRAINER_SETTINGS, *(OLD_SIBLINGS if "fsdp" in values else ()))
    names = [str(name) for name in values if name not in others]
    plain = [name.removeprefix(PREFIX) for name in names]
    num_known = sum((SETTINGS, name) in BY_PLACE for name in plain)
    is_theirs = any(name.startswith(PREFIX) for name in names) or bool({*OF_TRAINERS}.intersection(plain))
    is_theirs |= {"version", "reshard_after_forward"}.issubset(plain)
    return is_theirs and 2 * num_known >= len(plain)


def given_keys(values: Mapping[str, Any], reader: Reader, *, is_file: bool) -> tuple[GivenKey, ...]:
    """Return the keys that configure FSDP, without a Trainer's other arguments."""
    found: list[GivenKey] = []
    is_settings_file = is_bare(values)
    for name, value in values.items():
        if is_settings_file and name not in _TRAINER_SETTINGS:
            # Every release strips the prefix from the keys of such a file.
            found.append(_nested_key(str(name), str(name).removeprefix(PREFIX), value, SETTINGS, reader))
        elif name in MAPPINGS and isinstance(value, Mapping) and value:
            found += [_nested_key(f"{name}.{key}", str(key), each, name, reader) for key, each in value.items()]
        elif (beside := _top_level_key(name, value, reader, is_file=is_file)) is not None:
            found.append(beside)
    # Most readers ignore whether a key has the prefix, and the last one takes precedence.
    last = {(each.row.name, each.key in OLD_SIBLINGS): each.key for each in found if each.row and each.is_read}
    return tuple(
        each
        if each.row is None or last.get((each.row.name, each.key in OLD_SIBLINGS), each.key) == each.key
        else replace(each, is_read=False)
        for each in found
    )


def _top_level_key(name: str, value: Any, reader: Reader, *, is_file: bool) -> GivenKey | None:
    """Return a key outside of the section's mappings, with its row; None if it does not configure FSDP."""
    common_row = BY_PLACE.get((BESIDE, name))
    row = OF_AXOLOTL.get(name, common_row) if reader in AXOLOTL else common_row
    if row is not None and reader in row.read_by:  # null is as good as absent to axolotl
        return GivenKey(key=name, value=value, row=row, is_read=value is not None or reader not in AXOLOTL)
    if name in OLD_SIBLINGS and reader in TRANSFORMERS:
        old = BY_PLACE[SETTINGS, name.removeprefix(PREFIX)]
        return GivenKey(key=name, value=value, row=old, is_read=reader is T1)
    is_refused = is_file and reader not in TRAINERS and name not in OF_ACCELERATES_FILE
    is_unknown = is_refused or name in MAPPINGS or str(name).startswith("fsdp")
    return GivenKey(key=str(name), value=value, row=None) if is_unknown else None


def _nested_key(key: str, name: str, value: Any, group: str, reader: Reader) -> GivenKey:
    plain = name.removeprefix(PREFIXES[group])
    row = BY_PLACE.get((group, plain))
    is_misnamed = (
        # Stripped from the keys of a JSON file only.
        (reader is T1 and plain != name)
        # The launcher makes an option of every name, but passes on only those that it knows.
        or (group == DEGREES and plain == name and reader in LAUNCHERS)
        # transformers and accelerate use different names: each reads only its name.
        or (row is not None and row.aliases and (plain in row.aliases) != (reader in TRANSFORMERS))
    )
    is_read = row is not None and reader in row.read_by and not is_misnamed
    return GivenKey(key=key, value=value, row=row, is_read=is_read)


# ---------------------------------------------------------------------------------------------------------------------
# The settings in effect


def effective_config(values: Mapping[str, Any], reader: Reader, *, is_file: bool = False) -> EffectiveConfig:
    """Return the configuration that a system uses for a section: explicit values, and defaults.

    Args:
        is_file: Whether the section is a whole file. accelerate rejects unknown keys in a file.
    """
    settings: dict[str, Any] = {row.name: row.defaults.get(reader) for row in ROWS}
    settings["fsdp"] = FsdpOptions()
    given = given_keys(values, reader, is_file=is_file)
    config = EffectiveConfig(reader=reader, given=given, around=values, settings=settings)
    for each in given:
        if each.row is None:
            continue
        try:
            value = config.parsed[each.key] = each.row.takes.parse(each.value, reader)
        except ConfigError as error:
            config.errors[each.key] = str(error)
            if each.is_read or reader in each.row.checked_by:
                config.problems[each.key] = str(error)
            continue
        if each.is_read and each.key in OLD_SIBLINGS:  # both lists apply, and the larger number
            before = settings[each.row.name]
            value = before + value if isinstance(value, tuple) else max(before, value)
        if each.is_read:
            settings[each.row.name] = value
    for name, readers, value_of in _DERIVED:
        if reader in readers:
            settings[name] = value_of(config)
    for key in _unused(config):
        config.problems.pop(key, None)
    for applies, *texts in _PROBLEMS:
        if applies(config):
            key, reason = (text if isinstance(text, str) else text(config) for text in texts)
            config.problems.setdefault(key, reason)
    return config


def _unused(config: EffectiveConfig) -> Sequence[str]:
    """Return the wrapping keys whose values the system does not validate, because the policy does not use them.

    A Trainer always compares ``min_num_params`` with 0, so only a float is not validated.
    """
    policy = config["auto_wrap_policy"]
    classes = config.keys_of("transformer_layer_cls_to_wrap") if policy != "TRANSFORMER_BASED_WRAP" else []
    sizes = config.keys_of("min_num_params") if policy != "SIZE_BASED_WRAP" else []
    if config.reader in TRAINERS:
        sizes = [key for key in sizes if policy == "NO_WRAP" and isinstance(config.value_of(key), float)]
    return (*classes, *sizes)


def _wrap_policy(config: EffectiveConfig) -> str:
    """Return the wrapping policy. ``auto_wrap`` in ``fsdp`` overrides the policy that axolotl exports."""
    if not config["fsdp"].auto_wrap:
        return str(config["auto_wrap_policy"])
    return "SIZE_BASED_WRAP" if config["min_num_params"] > 0 and config.reader not in FSDP2 else _BY_LAYER


def _reshards(config: EffectiveConfig) -> bool:
    """Return whether parameters are resharded after forward, from FSDP2's key or from the strategy."""
    strategy = config["sharding_strategy"]
    if config.reader in (T2, X2) and config.key_of("reshard_after_forward") is None:
        strategy = config["fsdp"].strategy
    return config["reshard_after_forward"] if strategy is None else strategy.reshards_after_forward


def _devices(config: EffectiveConfig) -> Sequence[str]:
    """Return the devices to which DeepSpeed offloads. Parameters are offloaded only under stage 3."""
    names = ("param", "optimizer") if config["zero_stage"] == 3 else ("optimizer",)
    return [config[f"offload_{name}_device"] for name in names]


_BY_LAYER = "TRANSFORMER_BASED_WRAP"
_FULL, _GRAD_OP, _NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
# FSDP1's strategy by DeepSpeed's stage. Stage 1 keeps more than SHARD_GRAD_OP, and reduces as seldom as possible.
_STRATEGIES = (_NO_SHARD, _GRAD_OP, _GRAD_OP, _FULL)

# Settings that follow from others, in the order of computation, each with its readers.
# fmt: off
_DERIVED: tuple[tuple[str, Sequence[Reader], Callable[[EffectiveConfig], Any]], ...] = (
    ("mixed_precision", LAUNCHERS, lambda config:
        "fp16" if config["fp16"] and config.key_of("mixed_precision") is None else config["mixed_precision"]),
    ("mixed_precision", TRAINERS, lambda config:
        "fp8" if config["fp8"] else "fp16" if config["fp16"] else "bf16" if config["bf16"] is True else "no"),
    ("sharding_strategy", (AD,), lambda config: _STRATEGIES[config["zero_stage"]]),
    ("offload_params", (AD,), lambda config: "cpu" in _devices(config)),
    ("state_dict_type", (AD,), lambda config: "full" if config["zero_stage"] == 3 and config["zero3_save_16bit_model"]
        else config["state_dict_type"]),
    ("sharding_strategy", (T1, X1), lambda config: config["fsdp"].strategy or _FULL),
    ("offload_params", TRAINERS, lambda config: config["offload_params"] or config["fsdp"].offload),
    ("auto_wrap_policy", (T1, X1, X2), _wrap_policy),
    ("reshard_after_forward", tuple(Reader), _reshards),
    ("transformer_layer_cls_to_wrap", tuple(Reader), lambda config:
        config["transformer_layer_cls_to_wrap"] if config["auto_wrap_policy"] == _BY_LAYER else ()),
    ("min_num_params", tuple(Reader), lambda config:
        config["min_num_params"] if config["auto_wrap_policy"] == "SIZE_BASED_WRAP" else 0),
    # Under FSDP2 the key does both.
    ("sync_module_states", FSDP2, lambda config: config["cpu_ram_efficient_loading"]),
    ("sync_module_states", (T1, A1, AD, X1), lambda config:
        config["sync_module_states"] or config["cpu_ram_efficient_loading"]),
)
# fmt: on


# ---------------------------------------------------------------------------------------------------------------------
# Problems


def _sets_size(config: EffectiveConfig) -> bool:
    """Whether any number of parameters that is read is above 0."""
    numbers = map(config.value_of, config.keys_of("min_num_params"))
    return any(isinstance(number, int | float) and number > 0 for number in numbers)


def _fails_to_load(config: EffectiveConfig) -> bool:
    """Return whether the system raises because only rank 0 loads the weights, and does not broadcast them.

    A Trainer compares strings. accelerate's launcher treats any string as true, also for FSDP2, which reads only one of
    the two keys.
    """
    values = {each.row.name: each.value for each in _compared_keys(config) if each.row}
    loads = values.get("cpu_ram_efficient_loading", config["cpu_ram_efficient_loading"])
    syncs = values.get("sync_module_states", True)
    if config.reader is T1:
        return str(loads).lower() == "true" and str(syncs).lower() == "false"
    return config.reader in (A1, A2) and bool(loads) and not syncs


def _compared_keys(config: EffectiveConfig) -> Sequence[GivenKey]:
    """Return the keys whose values the system compares. accelerate also compares keys that FSDP2 does not use."""
    return [each for each in config.given if each.is_read or config.reader is A2]


def _sync_key(config: EffectiveConfig) -> str:
    keys = (each.key for each in reversed(_compared_keys(config)) if each.row and each.row.name == "sync_module_states")
    return next(keys, "fsdp_config")


def _loading_text(config: EffectiveConfig) -> str:
    if config.key_of("cpu_ram_efficient_loading") is None:
        return "on by default"
    return "true" if config["cpu_ram_efficient_loading"] else "in quotes, which the launcher takes for true"


def _is_off(config: EffectiveConfig) -> bool:
    return not config.around.get("fsdp") and not (config.reader in AXOLOTL and config.around.get("fsdp_config"))


# Each with whether it applies, its key, and why the run does not start.
# fmt: off
_Text = str | Callable[[EffectiveConfig], str]
_PROBLEMS: tuple[tuple[Callable[[EffectiveConfig], Any], _Text, _Text], ...] = (
    (lambda config: config.around.get("distributed_type", "FSDP") not in ("FSDP", "DEEPSPEED"), "distributed_type",
        "accelerate launch reads fsdp_config under distributed_type FSDP only; as trained: remove fsdp_config; "
        "as written: distributed_type: FSDP"),
    (lambda config: config.reader is AD and "nvme" in _devices(config),
        lambda config: config.key_of("offload_param_device" if config["offload_param_device"] == "nvme"
            else "offload_optimizer_device") or "deepspeed_config",
        "nvme: FSDP2 keeps nothing on a disk; write cpu, which needs the host memory, or none"),
    (lambda config: config["deepspeed_config_file"],
        lambda config: config.key_of("deepspeed_config_file") or "",
        "the file is neither in the working directory nor beside this one"),
    (lambda config: config.reader is T1 and "fsdp" not in config.around and is_bare(config.around), "fsdp",
        "fsdp's options are in the command or the script that names this file (--fsdp); write them here, where a "
        "Trainer passes over them: fsdp: full_shard auto_wrap"),
    (lambda config: config.reader in TRAINERS and _is_off(config)
        and ("fsdp" in config.around or not is_bare(config.around)), "fsdp",
        "FSDP is off, whatever fsdp_config says; as trained: remove that; as written: fsdp: full_shard auto_wrap"),
    (lambda config: config.reader in (T2, X2) and config["fsdp"].strategy not in (None, _FULL, _GRAD_OP), "fsdp",
        "for FSDP2 it is full_shard or shard_grad_op; replicas are parallelism_config's"),
    # accelerate's default is a float (1e8), and "100000000.0" is not an int.
    (lambda config: config["auto_wrap_policy"] == "SIZE_BASED_WRAP" and config.reader not in TRAINERS
        and not config.key_of("min_num_params"), lambda config: config.key_of("auto_wrap_policy") or "fsdp_config",
        "SIZE_BASED_WRAP needs min_num_params, for which accelerate's default does not parse"),
    (lambda config: config.reader is T1 and config.key_of("transformer_layer_cls_to_wrap") and _sets_size(config),
        lambda config: config.key_of("min_num_params") or "",
        lambda config: f"it and {str(config.key_of('transformer_layer_cls_to_wrap')).split('.')[-1]} exclude each "
        "other; keep one"),
    (lambda config: config.reader in TRAINERS and config["bf16"] and config["fp16"], "fp16",
        "bf16 and fp16 are both true; keep one"),
    (lambda config: config.reader in TRAINERS and config.around.get("max_grad_norm") is not None
        and not (INT.fits(config.around["max_grad_norm"]) or isinstance(config.around["max_grad_norm"], float)),
        "max_grad_norm", lambda config: f"a Trainer clips to a number, not to {config.around['max_grad_norm']!r}"),
    (_fails_to_load, _sync_key,
        lambda config: "all ranks but the first would train on random weights: cpu_ram_efficient_loading is "
        f"{_loading_text(config)}; set this to true, or cpu_ram_efficient_loading to false"),
    (lambda config: config.reader in TRAINERS and config["gradient_checkpointing"]
        and config.key_of("activation_checkpointing") and config["activation_checkpointing"],
        lambda config: config.key_of("activation_checkpointing") or "",
        "a Trainer stops at it beside gradient_checkpointing, which would recompute the layers twice; remove "
        "gradient_checkpointing: activation_checkpointing recomputes them inside their units"),
)
# fmt: on
