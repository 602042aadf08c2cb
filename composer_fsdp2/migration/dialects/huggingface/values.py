"""Readers of files with Hugging Face's keys, and the parsing of values by each.

A value is parsed as its system did, which can be surprising: a Trainer passes most values on unchanged, accelerate's
launcher converts them to text.
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from composer_fsdp2.config.rows import Takes
from composer_fsdp2.config.sharding import DTYPES_BY_SHORT_NAME
from composer_fsdp2.config.text import nearest
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.fsdp1.parsing import ShardingStrategy


class Reader(enum.StrEnum):
    """System that reads the file, and its version of FSDP."""

    TRAINER_FSDP1 = "transformers 4.51.3"
    TRAINER_FSDP2 = "transformers 5"
    ACCELERATE_FSDP1 = "accelerate 1.8.1, FSDP1"
    ACCELERATE_FSDP2 = "accelerate 1.8.1, FSDP2"
    ACCELERATE_DEEPSPEED = "accelerate 1.8.1, DeepSpeed"
    AXOLOTL_FSDP1 = "axolotl, FSDP1"
    AXOLOTL_FSDP2 = "axolotl, FSDP2"

    @property
    def is_trainer(self) -> bool:
        """Whether it uses a Trainer's arguments; axolotl creates a Trainer, too."""
        return self not in (Reader.ACCELERATE_FSDP1, Reader.ACCELERATE_FSDP2, Reader.ACCELERATE_DEEPSPEED)

    @property
    def is_transformers(self) -> bool:
        """Whether it is transformers' Trainer without axolotl."""
        return self in (Reader.TRAINER_FSDP1, Reader.TRAINER_FSDP2)

    @property
    def is_axolotl(self) -> bool:
        return self in (Reader.AXOLOTL_FSDP1, Reader.AXOLOTL_FSDP2)

    @property
    def is_fsdp2(self) -> bool:
        return self in (Reader.TRAINER_FSDP2, Reader.ACCELERATE_FSDP2, Reader.AXOLOTL_FSDP2)


# Short names for the rows of the tables.
T1, T2, A1, A2, AD, X1, X2 = Reader
NOBODY = "nobody"

# The groups of the table: the mappings of a section that contain their keys; those of BESIDE are outside of them.
SETTINGS, DEGREES, DEEPSPEED = MAPPINGS = ("fsdp_config", "parallelism_config", "deepspeed_config")
BESIDE = "beside fsdp_config"
PREFIX, DEGREES_PREFIX = "fsdp_", "parallelism_config_"
# Trainer arguments older than fsdp_config: they are read with the prefix.
OLD_SIBLINGS = ("fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params")
# Keys of an accelerate configuration file; accelerate rejects a file with any other key.
OF_ACCELERATES_FILE = frozenset(
    """
    compute_environment distributed_type mixed_precision use_cpu debug num_processes machine_rank num_machines gpu_ids
    main_process_ip main_process_port rdzv_backend same_network main_training_function enable_cpu_affinity fp8_config
    deepspeed_config fsdp_config megatron_lm_config ipex_config mpirun_config downcast_bf16 tpu_name tpu_zone
    tpu_use_cluster tpu_use_sudo command_file commands tpu_vm tpu_env dynamo_config fp16 dynamo_backend
    parallelism_config
    """.split()  # noqa: SIM905
)


# ---------------------------------------------------------------------------------------------------------------------
# Values

DTYPES = {"no": None, **{name: DTYPES_BY_SHORT_NAME[name] for name in ("fp16", "bf16")}, "fp8": "bfloat16"}
# Composer's precision by accelerate's name.
PRECISIONS = {"no": "fp32", "fp16": "amp_fp16", "bf16": "amp_bf16", "fp8": "amp_fp8"}
WORDS_BY_PRECISION = {precision: word for word, precision in PRECISIONS.items()}
STATE_DICTS = {"full": "FULL_STATE_DICT", "sharded": "SHARDED_STATE_DICT"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """Options in ``fsdp``."""

    strategy: ShardingStrategy | None = None
    offload: bool = False
    auto_wrap: bool = False
    ignored: tuple[str, ...] = ()


_STRATEGIES = (*(strategy.value for strategy in tuple(ShardingStrategy)[:4]), "HYBRID_SHARD_ZERO2")
_TRUTH_WORDS = {
    **dict.fromkeys(("y", "yes", "t", "true", "on", "1"), True),
    **dict.fromkeys(("n", "no", "f", "false", "off", "0"), False),
}


def _parse_strategy(value: object, reader: Reader) -> ShardingStrategy:
    text = str(value).upper()
    members = tuple(ShardingStrategy)
    if text.isdigit() and not isinstance(value, bool) and 1 <= int(text) <= len(members):
        return members[int(text) - 1]
    if text in _STRATEGIES:
        return members[_STRATEGIES.index(text)]
    if text == ShardingStrategy.HYBRID_SHARD_ZERO2.value:
        return ShardingStrategy.HYBRID_SHARD_ZERO2
    raise _bad(value, _STRATEGY_TEXT, nearest(text.lower(), _STRATEGIES))


def _parse_words(value: object, reader: Reader) -> Words:
    """Parse ``fsdp``: every option in a string is checked; unknown entries of a list are ignored."""
    if isinstance(value, bool):
        return Words(strategy=ShardingStrategy.FULL_SHARD if value else None)
    if not isinstance(value, str | list):
        raise _bad(value, WORDS_TEXT)
    words = value.split() if isinstance(value, str) else [str(word) for word in value]
    known = (*(name.lower() for name in _STRATEGIES), "offload", "auto_wrap")
    strategies = [word for word in words if (word if isinstance(value, str) else word.lower()) in known[:-2]]
    others = [word for word in words if word not in strategies and word not in known]
    if isinstance(value, str) and others:
        separated = " ".join(value.replace(",", " ").split())
        near = separated if "," in value else nearest(others[0], known)
        raise _bad(value, WORDS_TEXT, near)
    if len(set(strategies)) > 1:
        raise ConfigError(f"{value!r} names {len(set(strategies))} strategies; keep one of {', '.join(strategies)}")
    if words == ["offload"]:
        raise ConfigError("offload does not stand alone; write full_shard offload or shard_grad_op offload")
    return Words(
        strategy=_parse_strategy(strategies[0], reader) if strategies else None,
        offload="offload" in words,
        auto_wrap="auto_wrap" in words,
        ignored=tuple(others),
    )


def _parse_bool(value: object, reader: Reader) -> bool:
    text = str(value).lower()
    if text not in _TRUTH_WORDS:
        raise _bad(value, _BOOL_TEXT)
    return _TRUTH_WORDS[text]


def _parse_truth(value: object, reader: Reader) -> bool:
    """Parse a truth value: a Trainer passes it on unchanged, accelerate's launcher as text, which is parsed."""
    return bool(value) if reader.is_trainer else _parse_bool(value, reader)


def is_word_for_false(value: object) -> bool:
    """Whether the value is meant as false, in quotes or not."""
    return _TRUTH_WORDS.get(str(value).lower()) is False


def _parse_policy(value: object, reader: Reader) -> str:
    if value is None and not reader.is_trainer:  # the launcher treats it as absent
        return "NO_WRAP"
    return _word_of(_POLICY_TEXT, *_POLICIES)(value, reader)


def _parse_flag(value: object, reader: Reader) -> bool:
    """Parse a flag that is used as is: any string would be true, so strings are rejected."""
    if value is None or isinstance(value, bool):
        return bool(value)
    raise _bad(value, _FLAG_TEXT)


def _parse_bf16(value: object, reader: Reader) -> bool | str:
    """Parse ``bf16``: axolotl's ``auto`` is true if the GPU supports the dtype, ``full`` is no mixed precision."""
    if reader.is_axolotl and value in ("auto", "full"):
        return True if value == "auto" else "full"
    return _parse_flag(value, reader)


def _parse_recomputing(value: object, reader: Reader) -> bool | str:
    if reader.is_axolotl and isinstance(value, str) and value in _RECOMPUTING:
        return True if value == "unsloth" else value
    return _parse_flag(value, reader)


def _parse_offloading(value: object, reader: Reader) -> bool:
    return (
        bool(value)
        if isinstance(value, str) and value in ("legacy", "disk", "hidden_states")
        else _parse_flag(value, reader)
    )


def _parse_stage(value: object, reader: Reader) -> int:
    if isinstance(value, bool) or str(value) not in ("0", "1", "2", "3"):
        raise _bad(value, _STAGE_TEXT)
    return int(str(value))


def _parse_device(value: object, reader: Reader) -> str:
    text = "none" if value is None else str(value).lower()
    if text not in _DEVICES:
        raise _bad(value, _DEVICE_TEXT, nearest(text, _DEVICES))
    return text


def _parse_norm(value: object, reader: Reader) -> float | None:
    """Parse a norm: ``auto`` is a Trainer's max_grad_norm (default 1), or 1 with accelerate alone; 0 clips nothing."""
    try:
        return 1.0 if value in (None, "auto") else float(value) or None  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise _bad(value, _NORM_TEXT) from None


def _parse_steps(value: object, reader: Reader) -> int:
    """Parse a number of steps; for ``auto``, which leaves it to the script, return 1."""
    if value in (None, "auto"):
        return 1
    if isinstance(value, bool) or not str(value).isdigit() or int(str(value)) < 1:
        raise _bad(value, _STEPS_TEXT)
    return int(str(value))


def _parse_syncs(value: object, reader: Reader) -> bool:
    """Whether a Trainer's ``accelerator_config`` makes it reduce gradients in each microbatch."""
    given = value.get("gradient_accumulation_kwargs") if isinstance(value, Mapping) else None
    return isinstance(given, Mapping) and bool(given.get("sync_each_batch"))


def _parse_names(value: object, reader: Reader) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _bad(value, "a list of patterns")
    return tuple(names)


def _parse_pieces(value: object, reader: Reader) -> int:
    """Parse a number of pieces; without one return ROLL's default, while axolotl derives it from sequence length."""
    return 4 if value is None else _parse_degree(value, reader)


def _parse_reshard(value: object, reader: Reader) -> bool | ShardingStrategy:
    """Parse ``reshard_after_forward``: a boolean for FSDP2; FSDP1, if it read the key, would accept a strategy."""
    if reader.is_fsdp2 or str(value).lower() in _TRUTH_WORDS:
        return _parse_bool(value, reader)
    return _parse_strategy(value, reader)


def _parse_count(value: object, reader: Reader) -> int:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if is_int or (not reader.is_trainer and isinstance(value, str) and value.isdigit()):
        return int(value)  # type: ignore[call-overload]
    try:
        near = str(int(float(value)))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        near = None
    raise _bad(value, _COUNT_TEXT, near)


def _parse_classes(value: object, reader: Reader) -> tuple[str, ...]:
    """Parse class names, separated by commas without spaces: accelerate splits at commas and does not strip names."""
    if value is None:
        return ()
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise _bad(value, _CLASSES_TEXT)
    split = [name for text in names for name in text.split(",")]
    stripped = ",".join(name.strip() for name in split if name.strip())
    if isinstance(value, list | tuple) and reader.is_axolotl:
        raise ConfigError(f"{value!r} is a list, and axolotl takes a text; write {stripped}")
    if isinstance(value, list | tuple) and not reader.is_trainer:
        raise ConfigError(
            f"{value!r} is a list, of which accelerate makes one string, brackets and all; write {stripped}"
        )
    if stripped != ",".join(split) or not stripped:
        raise _bad(value, _CLASSES_TEXT, stripped or None)
    return tuple(split)


def _word_of(takes: str, *choices: str) -> Callable[[object, Reader], str]:
    def parse(value: object, reader: Reader) -> str:
        text = str(value).upper()
        if text not in choices:
            raise _bad(value, takes, nearest(text, choices))
        return text

    return parse


def _parse_prefetch(value: object, reader: Reader) -> str:
    if value is None:
        if reader is Reader.TRAINER_FSDP1:  # the Trainer calls .upper() on it
            raise _bad(value, _PREFETCH_TEXT, "NO_PREFETCH")
        return "NO_PREFETCH"
    numbers = {"1": "BACKWARD_PRE", "2": "BACKWARD_POST", "NONE": "NO_PREFETCH"}
    text = str(value).upper()
    if text in numbers and not reader.is_trainer:
        return numbers[text]
    return _word_of(_PREFETCH_TEXT, *_PREFETCHES)(value, reader)


def _parse_state_dict(value: object, reader: Reader) -> str:
    text = {"1": "FULL_STATE_DICT", "2": "LOCAL_STATE_DICT", "3": "SHARDED_STATE_DICT"}.get(str(value), str(value))
    if text.upper() == "LOCAL_STATE_DICT":
        raise ConfigError(
            f"{value!r}: FSDP2 has no flat shards to save; choose SHARDED_STATE_DICT, which every number of ranks can "
            "load, or FULL_STATE_DICT"
        )
    names = {"FULL_STATE_DICT": "full", "SHARDED_STATE_DICT": "sharded"}
    if value is None and not reader.is_trainer:  # the launcher treats it as absent
        return "sharded" if reader.is_fsdp2 else "full"
    return names[_word_of(_STATE_DICT_TEXT, *names)(text, reader)]


def _parse_degree(value: object, reader: Reader) -> int:
    if isinstance(value, bool) or not str(value).isdigit() or int(str(value)) < 1:
        raise _bad(value, _DEGREE_TEXT)
    return int(str(value))


def _parse_version(value: object, reader: Reader) -> int:
    if str(value) not in ("1", "2"):
        raise _bad(value, _VERSION_TEXT)
    return int(str(value))


def _parse_precision(value: object, reader: Reader) -> str:
    if value is None:
        return "no"
    if value is False:  # an unquoted no is false in YAML 1.1, on which accelerate launch breaks
        raise ConfigError("it is false, as an unquoted no is in YAML 1.1; write 'no', in quotes")
    text, words = str(value).lower(), ("no", "fp16", "bf16", "fp8")
    if text not in words:
        raise _bad(value, _PRECISION_TEXT, nearest(text, words))
    return text


def _bad(value: object, takes: str, near: str | None = None) -> ConfigError:
    return ConfigError(f"{value!r} is none of its values: {takes}" + (f"; did you mean {near}?" if near else ""))


WORDS_TEXT = (
    "full_shard, shard_grad_op, no_shard, hybrid_shard or hybrid_shard_zero2, and offload and auto_wrap beside it"
)
_STRATEGY_TEXT = "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2, or their numbers from 1 to 5"
_FLAG_TEXT = "true or false, not in quotes"
_BOOL_TEXT = "true or false"
_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_POLICY_TEXT = "TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP"
_CLASSES_TEXT = "names of classes"
_COUNT_TEXT = "an integer, written in full (1e8 is a string to YAML 1.1 and a float to others)"
_PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
_PREFETCH_TEXT = "BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH"
_STATE_DICT_TEXT = "FULL_STATE_DICT or SHARDED_STATE_DICT"
_PRECISION_TEXT = "'no', fp16, bf16 or fp8"
_DEGREE_TEXT = "an integer above 0"
_VERSION_TEXT = "1 or 2"
_RECOMPUTING = ("unsloth", "offload", "offload_disk")
_STAGE_TEXT = "0, 1, 2 or 3"
_DEVICES = ("none", "cpu", "nvme")
_DEVICE_TEXT = "none, cpu or nvme"
_NORM_TEXT = "a number, or auto"
_STEPS_TEXT = "an integer above 0, or auto"
_SWITCH = (True, False)

VERSION = Takes(_VERSION_TEXT, _parse_version, (1, 2))
WORDS = Takes(WORDS_TEXT, _parse_words, (*(name.lower() for name in _STRATEGIES), "auto_wrap", "offload"))
STRATEGY = Takes(_STRATEGY_TEXT, _parse_strategy, _STRATEGIES)
RESHARD = Takes("true or false (under FSDP1 a strategy)", _parse_reshard, _SWITCH)
BOOL = Takes(_BOOL_TEXT, _parse_bool, _SWITCH)
FLAG = Takes(_FLAG_TEXT, _parse_flag, _SWITCH)
TRUTH = Takes("true or false; a Trainer treats any text as true", _parse_truth, _SWITCH)
POLICY = Takes(_POLICY_TEXT, _parse_policy, _POLICIES)
CLASSES = Takes(_CLASSES_TEXT, _parse_classes)
COUNT = Takes(_COUNT_TEXT, _parse_count)
PREFETCH = Takes(_PREFETCH_TEXT, _parse_prefetch, _PREFETCHES)
# FSDP1 saved LOCAL_STATE_DICT, which FSDP2 does not support, so _STATE_DICT_TEXT does not list it.
STATE_DICT = Takes(_STATE_DICT_TEXT, _parse_state_dict, (*STATE_DICTS.values(), "LOCAL_STATE_DICT"))
PRECISION = Takes(_PRECISION_TEXT, _parse_precision, tuple(DTYPES))
DEGREE = Takes(_DEGREE_TEXT, _parse_degree)
BF16 = Takes("true or false, not in quotes; for axolotl auto and full as well", _parse_bf16, _SWITCH)
RECOMPUTING = Takes("true or false, not in quotes; for axolotl offload and others as well", _parse_recomputing, _SWITCH)
OFFLOADING = Takes("true or false; also legacy, disk or hidden_states", _parse_offloading, _SWITCH)
SWITCHES = (BOOL, FLAG, TRUTH, BF16, RECOMPUTING, OFFLOADING)
STAGE = Takes(_STAGE_TEXT, _parse_stage, (0, 1, 2, 3))
DEVICE = Takes(_DEVICE_TEXT, _parse_device, _DEVICES)
SYNCS = Takes("a mapping", _parse_syncs)
NAMES = Takes("a list of patterns", _parse_names)
PIECES = Takes(_DEGREE_TEXT, _parse_pieces)
NORM = Takes(_NORM_TEXT, _parse_norm)
STEPS = Takes(_STEPS_TEXT, _parse_steps)
