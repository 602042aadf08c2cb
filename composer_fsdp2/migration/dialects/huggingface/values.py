"""The readers of files with Hugging Face's keys, and how each parses values.

A value is parsed as by its system: a Trainer uses most values as they are, accelerate's launcher converts them to
strings.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer_fsdp2.config.rows import Takes
from composer_fsdp2.config.text import nearest
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.fsdp1.parsing import ShardingStrategy
from composer_fsdp2.migration.training import number_of


class Reader(enum.StrEnum):
    """System that reads the file, and its version of FSDP."""

    TRAINER_FSDP1 = "transformers 4.51.3"
    TRAINER_FSDP2 = "transformers 5"
    ACCELERATE_FSDP1 = "accelerate 1.8.1, FSDP1"
    ACCELERATE_FSDP2 = "accelerate 1.8.1, FSDP2"
    ACCELERATE_DEEPSPEED = "accelerate 1.8.1, DeepSpeed"
    AXOLOTL_FSDP1 = "axolotl, FSDP1"
    AXOLOTL_FSDP2 = "axolotl, FSDP2"


# Short names for the rows of the tables.
T1, T2, A1, A2, AD, X1, X2 = Reader
NOBODY = "nobody"
# Groups of readers: transformers' Trainer, axolotl, which also creates a Trainer, and accelerate's launcher.
TRANSFORMERS, AXOLOTL, LAUNCHERS = (T1, T2), (X1, X2), (A1, A2, AD)
TRAINERS, FSDP2 = (*TRANSFORMERS, *AXOLOTL), (T2, A2, X2)

# The groups of the table: the mappings of a section that contain their keys; those of BESIDE are outside of them.
SETTINGS, DEGREES, DEEPSPEED = MAPPINGS = ("fsdp_config", "parallelism_config", "deepspeed_config")
BESIDE = "beside fsdp_config"
PREFIX, DEGREES_PREFIX = "fsdp_", "parallelism_config_"
# By group: the prefix of its keys in accelerate's files.
PREFIXES = {SETTINGS: PREFIX, DEGREES: DEGREES_PREFIX, DEEPSPEED: "", BESIDE: ""}
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
# Named values

# Mixed precision's dtype, and Composer's precision, by accelerate's name.
DTYPES = {"no": None, "fp16": "float16", "bf16": "bfloat16", "fp8": "bfloat16"}
PRECISIONS = {"no": "fp32", "fp16": "amp_fp16", "bf16": "amp_bf16", "fp8": "amp_fp8"}
NAMES_BY_PRECISION = {precision: word for word, precision in PRECISIONS.items()}
STATE_DICTS = {"full": "FULL_STATE_DICT", "sharded": "SHARDED_STATE_DICT"}
_STRATEGIES = {strategy.name: strategy for strategy in ShardingStrategy}
_TRUTH_VALUES = {
    **dict.fromkeys(("y", "yes", "t", "true", "on", "1"), True),
    **dict.fromkeys(("n", "no", "f", "false", "off", "0"), False),
}
_SWITCH = (True, False)
_NOTHING: Mapping[Any, Any] = {}


def everywhere(value: Any) -> dict[Reader, Any]:
    return dict.fromkeys(Reader, value)


def means_false(value: object) -> bool:
    """Whether the value means false, quoted or not."""
    return _TRUTH_VALUES.get(str(value).lower()) is False


def _value_error(value: object, takes: str, near: str | None = None) -> ConfigError:
    return ConfigError(f"{value!r} is none of its values: {takes}" + (f"; did you mean {near}?" if near else ""))


def _named_values(
    text: str,
    value_by_name: Mapping[str, Any],
    choices: tuple[Any, ...] | None = None,
    *,
    absent: Mapping[Reader, Any] = _NOTHING,
    launcher: Mapping[str, Any] = _NOTHING,
    refused: Mapping[str, str] = _NOTHING,
) -> Takes:
    """Return the ``Takes`` of a key with named values, in any letter case.

    Args:
        value_by_name: Name -> effective value.
        choices: The names to list; all by default.
        absent: Reader -> effective value, for readers that treat null as an absent key.
        launcher: Further names that accelerate's launcher accepts, in lower case.
        refused: Name in lower case -> the reason why it is rejected.
    """
    values = {name.lower(): value for name, value in value_by_name.items()}
    listed = tuple(value_by_name) if choices is None else choices

    def parse(value: object, reader: Reader) -> Any:
        name = str(value).lower()
        if value is None and reader in absent:
            return absent[reader]
        if name in launcher and reader not in TRAINERS:
            return launcher[name]
        if name in refused:
            raise ConfigError(refused[name].format(value=value))
        if name not in values:
            raise _value_error(value, text, nearest(name, (each for each in listed if isinstance(each, str))))
        return values[name]

    return Takes(text, parse, listed)


def _flag(text: str, axolotl: Mapping[str, Any] = _NOTHING) -> Takes:
    """Return the ``Takes`` of a flag that the system does not parse. Strings are rejected, because any string is true.

    Args:
        axolotl: String that axolotl accepts -> parsed value.
    """

    def parse(value: object, reader: Reader) -> Any:
        if reader in AXOLOTL and isinstance(value, str) and value in axolotl:
            return axolotl[value]
        if value is None or isinstance(value, bool):
            return bool(value)
        raise _value_error(value, FLAG.text)

    return Takes(text, parse, _SWITCH)


STRATEGY = _named_values(
    "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2, or their numbers from 1 to 5",
    {
        **_STRATEGIES,
        **{strategy.value: strategy for strategy in ShardingStrategy},
        **{str(number): strategy for number, strategy in enumerate(ShardingStrategy, 1)},
    },
    tuple(_STRATEGIES),
)
BOOL = _named_values("true or false", _TRUTH_VALUES, _SWITCH)
FLAG = _flag("true or false, not in quotes")
BF16 = _flag("true or false, not in quotes; for axolotl auto and full as well", {"auto": True, "full": "full"})
RECOMPUTING = _flag(
    "true or false, not in quotes; for axolotl offload and others as well",
    {"unsloth": True, "offload": "offload", "offload_disk": "offload_disk"},
)
OFFLOADING = _flag(
    "true or false; also legacy, disk or hidden_states", dict.fromkeys(("legacy", "disk", "hidden_states"), True)
)
# A Trainer passes a truth value on unchanged, accelerate's launcher as text, which is parsed.
TRUTH = Takes(
    "true or false; a Trainer treats any text as true",
    lambda value, reader: bool(value) if reader in TRAINERS else BOOL.parse(value, reader),
    _SWITCH,
)
SWITCHES = (BOOL, FLAG, TRUTH, BF16, RECOMPUTING, OFFLOADING)
# FSDP1, if it read the key, would accept a strategy.
RESHARD = Takes(
    "true or false (under FSDP1 a strategy)",
    lambda value, reader: (BOOL if reader in FSDP2 or BOOL.fits(value, reader) else STRATEGY).parse(value, reader),
    _SWITCH,
)
VERSION = _named_values("1 or 2", {"1": 1, "2": 2}, (1, 2))
STAGE = _named_values("0, 1, 2 or 3", {str(stage): stage for stage in range(4)}, (0, 1, 2, 3))
DEVICE = _named_values("none, cpu or nvme", {each: each for each in ("none", "cpu", "nvme")})
POLICY = _named_values(
    "TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP",
    {each: each for each in ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")},
    absent=dict.fromkeys((A1, A2, AD), "NO_WRAP"),
)
PREFETCH = _named_values(
    "BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH",
    {each: each for each in ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")},
    absent={reader: "NO_PREFETCH" for reader in Reader if reader is not T1},  # this Trainer calls .upper() on it
    launcher={"1": "BACKWARD_PRE", "2": "BACKWARD_POST", "none": "NO_PREFETCH"},
    refused={
        "none": "{value!r} is none of its values: BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH; did you mean NO_PREFETCH?"
    },
)
STATE_DICT = _named_values(
    "FULL_STATE_DICT or SHARDED_STATE_DICT",
    {**{word: name for name, word in STATE_DICTS.items()}, "1": "full", "3": "sharded"},
    (*STATE_DICTS.values(), "LOCAL_STATE_DICT"),  # which FSDP1 saved
    absent={A1: "full", A2: "sharded", AD: "full"},
    refused=dict.fromkeys(
        ("local_state_dict", "2"),
        "{value!r}: FSDP2 has no flat shards to save; choose SHARDED_STATE_DICT, which every number of ranks can load, "
        "or FULL_STATE_DICT",
    ),
)
PRECISION = _named_values(
    "'no', fp16, bf16 or fp8",
    {each: each for each in DTYPES},
    absent=everywhere("no"),
    # accelerate launch breaks on it
    refused={"false": "it is false, as an unquoted no is in YAML 1.1; write 'no', in quotes"},
)


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


def _number(text: str, parse: Callable[[str], Any], absent: Any = ...) -> Takes:
    """Return the ``Takes`` of a number.

    Args:
        parse: Parses a string; raises ValueError.
        absent: The parsed value of null and ``auto``, with which the system chooses the number; by default they are
            invalid.
    """

    def parse_or_fail(value: object, reader: Reader) -> Any:
        if absent is not ... and value in (None, "auto"):
            return absent
        try:
            return parse(str(value))
        except ValueError:
            raise _value_error(value, text) from None

    return Takes(text, parse_or_fail)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _parse_count(value: Any, reader: Reader) -> int:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if is_int or (reader not in TRAINERS and isinstance(value, str) and value.isdigit()):
        return int(value)
    number = number_of(value)
    raise _value_error(value, COUNT.text, None if number is None else str(int(number)))


COUNT = Takes("an integer, written in full (1e8 is a string to YAML 1.1 and a float to others)", _parse_count)
DEGREE = _number("an integer above 0", _positive)
PIECES = _number("an integer above 0", _positive, absent=4)  # ROLL's default; axolotl derives it from sequence length
STEPS = _number("an integer above 0, or auto", _positive, absent=1)  # auto leaves it to the script
# auto is a Trainer's max_grad_norm (default 1), or 1 with accelerate alone; 0 clips nothing.
NORM = _number("a number, or auto", lambda text: float(text) or None, absent=1.0)


# ---------------------------------------------------------------------------------------------------------------------
# Lists and mappings


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpOptions:
    """Options in ``fsdp``."""

    strategy: ShardingStrategy | None = None
    offload: bool = False
    auto_wrap: bool = False
    ignored: tuple[str, ...] = ()


def _parse_fsdp_options(value: object, reader: Reader) -> FsdpOptions:
    """Parse ``fsdp``. An unknown option in a string is an error, as in transformers; one in a list is ignored."""
    if value is None or isinstance(value, bool):
        return FsdpOptions(strategy=ShardingStrategy.FULL_SHARD if value else None)
    if not isinstance(value, str | list):
        raise _value_error(value, FSDP_OPTIONS.text)
    options = value.split() if isinstance(value, str) else [str(option) for option in value]
    known = (*(name.lower() for name in _STRATEGIES), "offload", "auto_wrap")
    strategies = [option for option in options if (option if isinstance(value, str) else option.lower()) in known[:-2]]
    others = [option for option in options if option not in strategies and option not in known]
    if isinstance(value, str) and others:
        separated = " ".join(value.replace(",", " ").split())
        raise _value_error(value, FSDP_OPTIONS.text, separated if "," in value else nearest(others[0], known))
    if len(set(strategies)) > 1:
        raise ConfigError(f"{value!r} names {len(set(strategies))} strategies; keep one of {', '.join(strategies)}")
    if options == ["offload"]:
        raise ConfigError("offload does not stand alone; write full_shard offload or shard_grad_op offload")
    return FsdpOptions(
        strategy=next((_STRATEGIES[option.upper()] for option in strategies), None),
        offload="offload" in options,
        auto_wrap="auto_wrap" in options,
        ignored=tuple(others),
    )


def _texts(value: Any, takes: str) -> Sequence[str]:
    """Return a list of strings unchanged, and a string as a list with one item."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(each, str) for each in texts):
        raise _value_error(value, takes)
    return texts


def _parse_classes(value: object, reader: Reader) -> tuple[str, ...]:
    """Parse class names separated by commas without spaces: accelerate splits at commas, and does not strip spaces."""
    if value is None:
        return ()
    names = [name for text in _texts(value, CLASSES.text) for name in text.split(",")]
    stripped = ",".join(name.strip() for name in names if name.strip())
    if not isinstance(value, str) and reader in AXOLOTL:
        raise ConfigError(f"{value!r} is a list, and axolotl takes a text; write {stripped}")
    if not isinstance(value, str) and reader not in TRAINERS:
        raise ConfigError(
            f"{value!r} is a list, which accelerate converts to one string, including the brackets; write {stripped}"
        )
    if stripped != ",".join(names) or not stripped:
        raise _value_error(value, CLASSES.text, stripped or None)
    return tuple(names)


def _parse_syncs(value: object, reader: Reader) -> bool:
    """Whether a Trainer's ``accelerator_config`` makes it reduce gradients in each microbatch."""
    given = value.get("gradient_accumulation_kwargs") if isinstance(value, Mapping) else None
    return isinstance(given, Mapping) and bool(given.get("sync_each_batch"))


FSDP_OPTIONS = Takes(
    "full_shard, shard_grad_op, no_shard, hybrid_shard or hybrid_shard_zero2, and offload and auto_wrap beside it",
    _parse_fsdp_options,
    (*(name.lower() for name in _STRATEGIES), "auto_wrap", "offload"),
)
CLASSES = Takes("names of classes", _parse_classes)
NAMES = Takes("a list of patterns", lambda value, reader: tuple(_texts(value or [], "a list of patterns")))
SYNCS = Takes("a mapping", _parse_syncs)
