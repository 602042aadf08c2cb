"""Whose file this is, by words that no other system has; the systems that are known by name only.

Several systems call their section ``fsdp_config``. What is said here of a mapping looks at its keys alone, so that a
dialect can leave a section to another one without knowing it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Values = Mapping[str, Any]

# Words of axolotl's, of which each file has several; no Trainer has one.
_OF_AXOLOTL = frozenset(
    """
    adapter chat_template dataset_prepared_path datasets evals_per_epoch flash_attention group_by_length load_in_4bit
    load_in_8bit lora_r micro_batch_size num_epochs pad_to_sequence_len plugins rl sample_packing saves_per_epoch
    sequence_len special_tokens train_on_inputs val_set_size
    """.split()  # noqa: SIM905
)
_OF_LIGHTNING = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")
_OF_DEEPSPEED = ("train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer")
_OF_ROLL = frozenset(("deepspeed_train", "megatron_train"))
_OF_VERL = frozenset(("param_offload", "optimizer_offload", "fsdp_size", "model_dtype"))


def is_hugging_face(values: Values) -> bool:
    """Whether a mapping with an ``fsdp_config`` is a Trainer's arguments, accelerate's configuration, or axolotl's."""
    settings = values["fsdp_config"]
    names = {str(key) for key in settings} - _OF_VERL if isinstance(settings, Mapping) else set()
    has_prefixes = any(name.startswith("fsdp_") for name in names)
    return "fsdp" in values or "distributed_type" in values or has_prefixes or is_axolotl(values)


def is_axolotl(values: Values) -> bool:
    """``fsdp_version`` beside the section is axolotl's alone; every file of its has a ``base_model``.

    A file that was migrated keeps what is the model's, and has a section of Composer's.
    """
    settings = values.get("fsdp_config")
    is_migrated = isinstance(settings, Mapping) and "mixed_precision" in settings
    has_prefixes = isinstance(settings, Mapping) and any(str(key).startswith("fsdp_") for key in settings)
    has_words = len(_OF_AXOLOTL.intersection(map(str, values))) > 1 or "fsdp" in values or has_prefixes
    is_beside = "fsdp_version" in values and ("fsdp_config" in values or "fsdp" in values)
    return is_beside or ("base_model" in values and has_words and not is_migrated)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignSystem:
    """A system whose configurations are recognized, and not read.

    Args:
        applies: Whether a file with these values is one of its.
        advice: What its users can do.
    """

    name: str
    applies: Callable[[Values], bool]
    advice: str


def foreign_system(values: Any) -> ForeignSystem | None:
    """The system that a file is for, if it is none that is read here."""
    if not isinstance(values, Mapping):  # a list, or nothing
        return None
    return next((each for each in FOREIGN_SYSTEMS if each.applies(values)), None)


def _entries(values: Any) -> Iterator[tuple[str, Any]]:
    """Every key of a file with its value, however deep."""
    if isinstance(values, list):
        for each in values:
            yield from _entries(each)
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield str(key), value
            yield from _entries(value)


def _names(values: Values, key: str, prefix: str, suffixes: tuple[str, ...] = ("",)) -> bool:
    """Whether a key of this name, anywhere, names a class or function there."""
    return any(
        name == key and isinstance(value, str) and value.startswith(prefix) and value.endswith(suffixes)
        for name, value in _entries(values)
    )


def _is_verls(values: Values) -> bool:
    if "actor_rollout_ref" in values or _names(values, "_target_", "verl."):
        return True
    return any(
        name == "fsdp_config" and isinstance(value, Mapping) and bool(_OF_VERL.intersection(value))
        for name, value in _entries(values)
    )


def _is_lightnings(values: Values) -> bool:
    # The file of one verb, or of `python script.py fit`, which has a mapping for each verb.
    trainers = [each.get("trainer") for each in (values, *values.values()) if isinstance(each, Mapping)]
    strategies = [trainer.get("strategy") for trainer in trainers if isinstance(trainer, Mapping)]
    if any(isinstance(each, str) and each.startswith(("fsdp", "deepspeed", *_OF_LIGHTNING)) for each in strategies):
        return True
    if any(isinstance(each, Mapping) and each.get("class_path") in _OF_LIGHTNING for each in strategies):
        return True
    return any(
        _names(values, key, f"{package}lightning", _OF_LIGHTNING)
        for key in ("class_path", "_target_")
        for package in ("", "pytorch_")
    )


def _is_deepspeeds(values: Values) -> bool:
    """A stage, or the sizes of a batch in its own words, of which no other system's file has one at its top."""
    has_words = any(str(name) in _OF_DEEPSPEED for name in values)
    return isinstance(values.get("zero_optimization"), Mapping) or (has_words and not _has_section(values))


def _has_section(values: Values) -> bool:
    return any(str(name).startswith("fsdp") for name, _ in _entries(values))


def _is_axolotls_by_deepspeed(values: Values) -> bool:
    return (
        is_axolotl(values) and bool(values.get("deepspeed")) and not (values.get("fsdp") or values.get("fsdp_config"))
    )


def _is_rolls_without_fsdp(values: Values) -> bool:
    named = {value for name, value in _entries(values) if name == "strategy_name" and isinstance(value, str)}
    return bool(named & _OF_ROLL) and "fsdp2_train" not in named


def _is_accelerates_without_fsdp(values: Values) -> bool:
    """DDP, one process, or Megatron's: its launcher's questions are answered, and none is FSDP's."""
    kind = values.get("distributed_type")
    is_sharded = any(name.startswith("fsdp") and value for name, value in _entries(values))
    return isinstance(kind, str) and kind not in ("FSDP", "DEEPSPEED") and not is_sharded


def _is_without_section(*names: str) -> Callable[[Values], bool]:
    """Tells whether a file has these keys at its top, and no key of FSDP's or DeepSpeed's anywhere."""
    return lambda values: (
        all(name in values for name in names)
        and not any(str(name).startswith(("fsdp", "deepspeed")) and value for name, value in _entries(values))
    )


_BY_HAND = "`composer-fsdp2 explain --all` has the keys of an fsdp_config to write by hand"

# As a dialect's ``words``: with one of them begins a key of most of their files.
FOREIGN_WORDS = (
    *("actor_rollout_ref", "_component_", "zero_optimization", "deepspeed", "strategy_name", "distributed_type"),
    *_OF_DEEPSPEED,
)
FOREIGN_SYSTEMS = (
    ForeignSystem(
        name="veRL",
        applies=_is_verls,
        advice=f"it trains with FSDP2 itself, by strategy: fsdp2; for Composer, {_BY_HAND}",
    ),
    ForeignSystem(
        name="torchtune",
        applies=lambda values: _names(values, "_component_", "torchtune."),
        advice=f"its recipes train with FSDP2 already; for Composer, {_BY_HAND}",
    ),
    ForeignSystem(
        name="Lightning",
        applies=_is_lightnings,
        advice="its FSDPStrategy stays on FSDP1, and its FSDP2 is ModelParallelStrategy, with fully_shard in the "
        f"script; for Composer, {_BY_HAND}",
    ),
    ForeignSystem(
        name="DeepSpeed",
        applies=_is_deepspeeds,
        advice="migrate a file of accelerate's instead, with distributed_type: DEEPSPEED and its stage and devices as "
        "deepspeed_config: {zero_stage: ..., offload_optimizer_device: ..., offload_param_device: ...}",
    ),
    ForeignSystem(
        name="axolotl with DeepSpeed",
        applies=_is_axolotls_by_deepspeed,
        advice="the settings are in the file that its deepspeed names; with fsdp_version: 2 and an fsdp_config in its "
        "place axolotl trains with FSDP2, and the file can be migrated",
    ),
    ForeignSystem(
        name="ROLL with DeepSpeed or Megatron",
        applies=_is_rolls_without_fsdp,
        advice="with strategy_name: fsdp2_train and a strategy_config such as {fsdp_size: -1} a worker trains with "
        "FSDP2, and the file can be migrated",
    ),
    ForeignSystem(
        name="accelerate without FSDP",
        applies=_is_accelerates_without_fsdp,
        advice="with distributed_type: FSDP and an fsdp_config it is sharded, and the file can be migrated; where each "
        "GPU is to keep the whole model, Composer needs no fsdp_config at all",
    ),
    ForeignSystem(
        name="axolotl without FSDP",
        applies=lambda values: is_axolotl(values) and _is_without_section("base_model")(values),
        advice="with fsdp_version: 2 and an fsdp_config axolotl trains with FSDP2, and the file can be migrated",
    ),
    ForeignSystem(
        name="LLM Foundry without fsdp_config",
        applies=_is_without_section("model", "max_duration", "global_train_batch_size"),
        advice="each GPU keeps the whole model (DDP), and nothing of it is FSDP1's; with an fsdp_config it is sharded, "
        "and the file can be migrated",
    ),
    ForeignSystem(
        name="a Trainer of transformers without fsdp",
        applies=_is_without_section("output_dir", "per_device_train_batch_size"),
        advice="with fsdp: full_shard auto_wrap, or under accelerate's distributed_type: FSDP, it is sharded; --fsdp "
        "of the command line is not in the file: write it there, and the file can be migrated",
    ),
)
