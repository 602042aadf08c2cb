"""Identify the system of a file by keys that no other system has. Some systems are identified, but cannot be read.

Several systems name their section ``fsdp_config``. These functions only read a mapping's keys, so a dialect can skip
the section of another dialect without importing it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from composer_fsdp2.migration.interpolated import leaves

Values = Mapping[str, Any]

# Keys of axolotl's; each of its files has several, and no Trainer has any.
_OF_AXOLOTL = frozenset(
    """
    adapter chat_template dataset_prepared_path datasets evals_per_epoch flash_attention group_by_length load_in_4bit
    load_in_8bit lora_r micro_batch_size num_epochs pad_to_sequence_len plugins rl sample_packing saves_per_epoch
    sequence_len special_tokens train_on_inputs val_set_size
    """.split()  # noqa: SIM905
)
_OF_DEEPSPEED = ("train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer")
_OF_VERL = ("param_offload", "optimizer_offload", "fsdp_size", "model_dtype")


def is_hugging_face(values: Values) -> bool:
    """Return whether a mapping with ``fsdp_config`` is one of Hugging Face: a Trainer's arguments, or a file of
    accelerate or axolotl."""
    settings = values["fsdp_config"]
    names = {str(key) for key in settings}.difference(_OF_VERL) if isinstance(settings, Mapping) else set()
    has_prefixes = any(name.startswith("fsdp_") for name in names)
    return "fsdp" in values or "distributed_type" in values or has_prefixes or is_axolotl(values)


def is_axolotl(values: Values) -> bool:
    """Return whether a file is one of axolotl.

    Only axolotl has ``fsdp_version`` next to the section, and all its files have ``base_model``. A file that was
    migrated to Composer still has ``base_model``, but is not axolotl's.
    """
    settings = values.get("fsdp_config")
    is_migrated = isinstance(settings, Mapping) and "mixed_precision" in settings
    has_prefixes = isinstance(settings, Mapping) and any(str(key).startswith("fsdp_") for key in settings)
    has_words = len(_OF_AXOLOTL.intersection(map(str, values))) > 1 or "fsdp" in values or has_prefixes
    is_beside = "fsdp_version" in values and ("fsdp_config" in values or "fsdp" in values)
    return is_beside or ("base_model" in values and has_words and not is_migrated)


def is_deepspeeds(values: Values) -> bool:
    """Return whether a file is one of DeepSpeed: only DeepSpeed has ``zero_optimization`` at the top level."""
    return isinstance(values.get("zero_optimization"), Mapping)


def is_axolotls_deepspeed(values: Values) -> bool:
    """Return whether a file is axolotl's with DeepSpeed and without FSDP."""
    has_section = values.get("fsdp") or values.get("fsdp_config")
    return bool(is_axolotl(values) and values.get("deepspeed") and not has_section)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignSystem:
    """A system whose files are identified, but cannot be read.

    Args:
        has: Patterns, each of which matches a line (see ``_lines``) of every file of the system.
        unless: A pattern that no line of its files matches.
        advice: The next step for its users.
    """

    name: str
    has: tuple[str, ...]
    advice: str
    unless: str = "(?!)"
    is_axolotls: bool = False

    def applies(self, values: Values, lines: str) -> bool:
        """Return whether a file with these values is this system's."""
        found, *others = (re.search(each, lines, re.MULTILINE) for each in (self.unless, *self.has))
        return all(others) and not found and (not self.is_axolotls or is_axolotl(values))


def foreign_system(values: Any) -> ForeignSystem | None:
    """Return the system of a file that is identified but cannot be read, or None."""
    if not isinstance(values, Mapping):  # a list, or nothing
        return None
    lines = "\n".join(_lines(values))
    return next((each for each in FOREIGN_SYSTEMS if each.applies(values, lines)), None)


def _lines(values: Values) -> Iterator[str]:
    """Yield ``a.b=value`` for each value of a file. Indices of lists are omitted, and false values are ""."""
    for value, path in leaves(values, ()):
        yield f"{'.'.join(str(key) for key in path if not isinstance(key, int))}={value or ''}"


_SHARDED = r"(^|\.)(fsdp|deepspeed)\w*(\.|=.)"
_BY_HAND = "`composer-fsdp2 explain --all` has the keys of an fsdp_config to write by hand"
_MIGRATED = "and the file can be migrated"

# Prefixes of keys, as ``Dialect.key_prefixes``: most files of these systems have such a key.
FOREIGN_KEY_PREFIXES = (
    *("actor_rollout_ref", "_component_", "zero_optimization", "deepspeed", "strategy_name", "distributed_type"),
    *_OF_DEEPSPEED,
)
FOREIGN_SYSTEMS = (
    ForeignSystem(
        name="veRL",
        has=(rf"^actor_rollout_ref\b|(^|\.)_target_=verl\.|(^|\.)fsdp_config\.({'|'.join(_OF_VERL)})=",),
        advice=f"it trains with FSDP2 itself, by strategy: fsdp2; for Composer, {_BY_HAND}",
    ),
    ForeignSystem(
        name="torchtune",
        has=(r"(^|\.)_component_=torchtune\.",),
        advice=f"its recipes train with FSDP2 already; for Composer, {_BY_HAND}",
    ),
    # A file for one subcommand, or for `python script.py fit` with a mapping for each subcommand.
    ForeignSystem(
        name="Lightning",
        has=(
            r"^(\w+\.)?trainer\.strategy=(fsdp|deepspeed|(FSDP|ModelParallel|DeepSpeed)Strategy)"
            r"|^(\w+\.)?trainer\.strategy\.class_path=(FSDP|ModelParallel|DeepSpeed)Strategy$"
            r"|(^|\.)(class_path|_target_)=(pytorch_)?lightning\b.*(FSDP|ModelParallel|DeepSpeed)Strategy$",
        ),
        advice="its FSDPStrategy stays on FSDP1, and its FSDP2 is ModelParallelStrategy, with fully_shard in the "
        f"script; for Composer, {_BY_HAND}",
    ),
    ForeignSystem(
        name="DeepSpeed",
        has=(r"^zero_optimization\.",),
        advice="a file of accelerate's or axolotl's that names it is migrated with its settings, and composer-fsdp2 "
        "migrate FILE migrates it by itself",
    ),
    ForeignSystem(
        name="DeepSpeed without ZeRO",
        has=(rf"^({'|'.join(_OF_DEEPSPEED)})=",),
        unless=r"(^|\.)fsdp",
        advice="each GPU keeps the whole model (DDP); with zero_optimization: {stage: 3} it is sharded, " + _MIGRATED,
    ),
    ForeignSystem(
        name="axolotl with DeepSpeed",
        is_axolotls=True,
        has=(r"^deepspeed(\.|=.)",),
        unless=r"^fsdp(_config)?(\.|=.)",
        advice="the file that its deepspeed names is neither in the working directory nor beside this one: migrate it "
        "where it is launched; with fsdp_version: 2 and an fsdp_config in its place axolotl trains with FSDP2, "
        + _MIGRATED,
    ),
    ForeignSystem(
        name="ROLL with DeepSpeed or Megatron",
        has=(r"(^|\.)strategy_name=(deepspeed|megatron)_train$",),
        unless=r"(^|\.)strategy_name=fsdp2_train$",
        advice="with strategy_name: fsdp2_train and a strategy_config such as {fsdp_size: -1} a worker trains with "
        "FSDP2, " + _MIGRATED,
    ),
    ForeignSystem(
        name="accelerate without FSDP",
        has=(r"^distributed_type=(?!FSDP$|DEEPSPEED$).",),
        unless=r"(^|\.)fsdp\w*(\.|=.)",
        advice=f"with distributed_type: FSDP and an fsdp_config it is sharded, {_MIGRATED}; where each GPU is to keep "
        "the whole model, Composer needs no fsdp_config at all",
    ),
    ForeignSystem(
        name="axolotl without FSDP",
        is_axolotls=True,
        has=(r"^base_model=",),
        unless=_SHARDED,
        advice=f"with fsdp_version: 2 and an fsdp_config axolotl trains with FSDP2, {_MIGRATED}",
    ),
    ForeignSystem(
        name="LLM Foundry without fsdp_config",
        has=(r"^model[.=]", r"^max_duration=", r"^global_train_batch_size="),
        unless=_SHARDED,
        advice="each GPU keeps the whole model (DDP), and nothing of it is FSDP1's; with an fsdp_config it is sharded, "
        + _MIGRATED,
    ),
    ForeignSystem(
        name="a Trainer of transformers with DeepSpeed",
        has=(r"^output_dir=", r"^per_device_train_batch_size=", r"^deepspeed(\.|=.)"),
        unless=r"(^|\.)fsdp\w*(\.|=.)",
        advice="composer-fsdp2 migrate of the file that its deepspeed names writes the settings of that; with fsdp: "
        f"full_shard auto_wrap in its place it trains with FSDP, {_MIGRATED}",
    ),
    ForeignSystem(
        name="a Trainer of transformers without fsdp",
        has=(r"^output_dir=", r"^per_device_train_batch_size="),
        unless=_SHARDED,
        advice="with fsdp: full_shard auto_wrap, or under accelerate's distributed_type: FSDP, it is sharded; --fsdp "
        f"of the command line is not in the file: write it there, {_MIGRATED}",
    ),
)
