"""What held in the run that a section in Hugging Face's words asks for."""

from collections.abc import Mapping
from typing import Any

from composer_fsdp2.config.rows import INT
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.fsdp1.parsing import ShardingStrategy
from composer_fsdp2.migration.dialects.huggingface.given_keys import given_keys, is_bare, reader_of
from composer_fsdp2.migration.dialects.huggingface.held import GivenKey, Held
from composer_fsdp2.migration.dialects.huggingface.places import OLD_SIBLINGS
from composer_fsdp2.migration.dialects.huggingface.readers import Reader
from composer_fsdp2.migration.dialects.huggingface.table import ROWS, SYNC_ROW
from composer_fsdp2.migration.dialects.huggingface.values import Words


def held_by(values: Mapping[str, Any], reader: Reader | None = None, *, is_file: bool = False) -> Held:
    """What holds in the run that a section asks for.

    Args:
        reader: Whose words it has; None finds out.
        is_file: Whether the section is all of a file, of which accelerate knows every key.
    """
    reader = reader or reader_of(values)
    given = given_keys(values, reader, is_file=is_file)
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
        held.problems[other_file] = "the settings are in another file, which is not read here"


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
    norm = held.around.get("max_grad_norm")
    if held.reader.is_trainer and not (norm is None or INT.fits(norm) or isinstance(norm, float)):
        problems.setdefault("max_grad_norm", f"a Trainer clips to a number, not to {norm!r}")
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
            problems.setdefault(
                key,
                "a Trainer stops at it beside gradient_checkpointing, which would recompute the layers twice; remove "
                "gradient_checkpointing: activation_checkpointing recomputes them inside their units",
            )


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
