"""THE TABLE of Hugging Face: one row per key of a Trainer's FSDP arguments and of accelerate's files; and their values.

Reading, documentation and tests go by this table. Sources: transformers 4.51.3 (``training_args.py``,
``trainer.py``), accelerate 1.8.1 (``utils/dataclasses.py``, ``utils/launch.py``, ``utils/fsdp_utils.py``,
``commands/launch.py``); for FSDP2 in a Trainer's own arguments transformers 5, for ``parallelism_config``
accelerate 1.10.
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from composer_fsdp2.compat.dialects.base import Part
from composer_fsdp2.config import ShardingStrategy
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.findings import Outcome
from composer_fsdp2.fsdp1.keys import nearest_key

__all__ = [
    "DEGREES_PREFIX",
    "KEYS",
    "OLD_SIBLINGS",
    "PARSERS",
    "PREFIX",
    "ROWS",
    "SWITCHES",
    "SYNC",
    "WITHOUT_EFFECT",
    "Key",
    "Kind",
    "Place",
    "Source",
    "Words",
    "is_word_for_false",
]


class Source(enum.Enum):
    """Who reads the file, and for which FSDP."""

    TRAINER_FSDP1 = "transformers 4.51.3"
    TRAINER_FSDP2 = "transformers 5"
    ACCELERATE_FSDP1 = "accelerate 1.8.1, FSDP1"
    ACCELERATE_FSDP2 = "accelerate 1.8.1, FSDP2"

    @property
    def is_trainer(self) -> bool:
        return self in (Source.TRAINER_FSDP1, Source.TRAINER_FSDP2)

    @property
    def is_fsdp2(self) -> bool:
        return self in (Source.TRAINER_FSDP2, Source.ACCELERATE_FSDP2)


_T1, _T2, _A1, _A2 = Source
_BOTH_FSDP1 = frozenset((_T1, _A1))
_BOTH_FSDP2 = frozenset((_T2, _A2))
_ALL = frozenset(Source)


class Kind(enum.Enum):
    """What values a key takes."""

    VERSION = "1 or 2"
    WORDS = (
        "full_shard, shard_grad_op, no_shard, hybrid_shard or hybrid_shard_zero2, and offload and auto_wrap beside it"
    )
    STRATEGY = "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2, or their numbers from 1 to 5"
    RESHARD = "true or false (under FSDP1 a strategy)"
    BOOL = "true or false"
    FLAG = "true or false, not in quotes"
    TRUTH = "true or false; a Trainer takes any text for true"
    POLICY = "TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP"
    CLASSES = "names of classes"
    COUNT = "a whole number, written in full (1e8 is a string to YAML 1.1 and a float to others)"
    PREFETCH = "BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH"
    STATE_DICT = "FULL_STATE_DICT or SHARDED_STATE_DICT"
    PRECISION = "'no', fp16, bf16 or fp8"
    DEGREE = "a whole number above 0"
    ANY = "any value"


SWITCHES = (Kind.BOOL, Kind.FLAG, Kind.TRUTH)


class Place(enum.Enum):
    """Where in a section a key stands."""

    SETTINGS = "fsdp_config"
    BESIDE = "beside fsdp_config"
    DEGREES = "parallelism_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One row: what a key meant, and its usual fate. A value can have another fate; the finding says so.

    Args:
        name: Without the prefix ``fsdp_`` or ``parallelism_config_``.
        aliases: Other names of the same thing.
        default: What holds where a file says nothing, by who reads it.
        read_by: Who reads it in an ``fsdp_config``; for all others it is a word without effect.
        checked_by: Who breaks on a bad value, and does nothing with a good one.
        trainer: What does the same in a Trainer's arguments for transformers 4.51.3.
        launcher: What does the same in a file of accelerate's that does not read the key.
    """

    name: str
    kind: Kind
    meaning: str
    outcome: Outcome
    target: str
    reason: str
    default: Mapping[Source, Any] = field(default_factory=dict)
    read_by: frozenset[Source] = _ALL
    checked_by: frozenset[Source] = frozenset()
    place: Place = Place.SETTINGS
    part: Part = Part.EXTRA
    aliases: tuple[str, ...] = ()
    trainer: str = ""
    launcher: str = ""


def _everywhere(value: Any) -> dict[Source, Any]:
    return dict.fromkeys(Source, value)


_KEPT = "accelerate reads it for FSDP2 as for FSDP1"

KEYS: tuple[Key, ...] = (
    Key(
        name="fsdp",
        kind=Kind.WORDS,
        place=Place.BESIDE,
        part=Part.RESHARD,
        meaning="turns FSDP on: the strategy, offload, auto_wrap",
        outcome=Outcome.EXACT,
        target="reshard_after_forward, the mesh, cpu_offload, the wrapped modules",
        reason="each word has its form under FSDP2",
        read_by=frozenset((_T1, _T2)),
    ),
    Key(
        name="distributed_type",
        kind=Kind.ANY,
        place=Place.BESIDE,
        meaning="FSDP makes accelerate launch read fsdp_config",
        outcome=Outcome.EXACT,
        target="",
        reason="turns FSDP on; in accelerate's files fsdp_version tells FSDP2 apart",
        read_by=frozenset((_A1, _A2)),
    ),
    Key(
        name="mixed_precision",
        kind=Kind.PRECISION,
        place=Place.BESIDE,
        part=Part.PRECISION,
        meaning="autocast, and parameters, gradients and buffers of FSDP in this dtype",
        outcome=Outcome.EXACT,
        target="mixed_precision: param_dtype and reduce_dtype alike",
        reason="gradients are reduced in the low dtype, too: accelerate gives all of the policy one dtype",
        default=_everywhere("no"),
        read_by=frozenset((_A1, _A2)),
    ),
    Key(
        name="bf16",
        kind=Kind.FLAG,
        place=Place.BESIDE,
        part=Part.PRECISION,
        meaning="autocast, and parameters, gradients and buffers of FSDP in bfloat16",
        outcome=Outcome.EXACT,
        target="mixed_precision: param_dtype and reduce_dtype bfloat16",
        reason="gradients are reduced in bfloat16, too: accelerate gives all of the policy one dtype",
        default=_everywhere(False),
        read_by=frozenset((_T1, _T2)),
    ),
    Key(
        name="fp16",
        kind=Kind.FLAG,
        place=Place.BESIDE,
        part=Part.PRECISION,
        meaning="autocast with loss scaling, and parameters, gradients and buffers of FSDP in float16",
        outcome=Outcome.EXACT,
        target="mixed_precision: param_dtype and reduce_dtype float16",
        reason="gradients are reduced in float16, too: accelerate gives all of the policy one dtype",
        default=_everywhere(False),
    ),
    Key(
        name="gradient_checkpointing",
        kind=Kind.FLAG,
        place=Place.BESIDE,
        part=Part.CHECKPOINTING,
        meaning="the model recomputes its layers in backward, from outside of their units",
        outcome=Outcome.APPROXIMATE,
        target="activation_checkpointing",
        reason="the same layers are recomputed, but inside their units, which saves a second all-gather",
        default=_everywhere(False),
        read_by=frozenset((_T1, _T2)),
    ),
    Key(
        name="gradient_checkpointing_kwargs",
        kind=Kind.ANY,
        place=Place.BESIDE,
        part=Part.CHECKPOINTING,
        meaning="which of torch's implementations recomputes (use_reentrant, true by default)",
        outcome=Outcome.EXACT,
        target="activation_checkpointing: reentrant or not",
        reason="both implementations run inside a fully_shard unit",
        read_by=frozenset((_T1, _T2)),
    ),
    Key(
        name="version",
        kind=Kind.VERSION,
        meaning="which FSDP: 1, or 2",
        outcome=Outcome.EXACT,
        target="",
        reason="which FSDP the file is for; in accelerate's words fsdp_version: 2",
        default={_T1: 1, _A1: 1, _T2: 2, _A2: 2},
        read_by=frozenset((_A1, _A2, _T2)),
    ),
    Key(
        name="sharding_strategy",
        kind=Kind.STRATEGY,
        part=Part.RESHARD,
        meaning="what is sharded, and when parameters are freed",
        outcome=Outcome.EXACT,
        target="reshard_after_forward and the mesh",
        reason="",
        default={_T1: ShardingStrategy.FULL_SHARD, _A1: ShardingStrategy.FULL_SHARD},
        read_by=frozenset((_A1,)),
        trainer="the first word of fsdp",
        launcher="fsdp_reshard_after_forward, and parallelism_config for replicas",
    ),
    Key(
        name="reshard_after_forward",
        kind=Kind.RESHARD,
        part=Part.RESHARD,
        meaning="whether parameters are freed after forward; FSDP1 did not read it beside a strategy, which there "
        "always is",
        outcome=Outcome.EXACT,
        target="reshard_after_forward",
        reason="FSDP2's own word",
        default=_everywhere(True),
        read_by=_BOTH_FSDP2,
        trainer="full_shard or shard_grad_op in fsdp",
        launcher="fsdp_sharding_strategy",
    ),
    Key(
        name="offload_params",
        aliases=("cpu_offload",),
        kind=Kind.BOOL,
        part=Part.OFFLOAD,
        meaning="parameters, gradients and the optimizer rest in host memory",
        outcome=Outcome.EXACT,
        target="CPUOffloadPolicy",
        reason="the same under FSDP2",
        default=_everywhere(False),
        read_by=frozenset((_A1, _A2, _T2)),
        trainer="the word offload in fsdp",
    ),
    Key(
        name="auto_wrap_policy",
        kind=Kind.POLICY,
        part=Part.WRAP,
        meaning="which modules become units of their own",
        outcome=Outcome.EXACT,
        target="the modules that fully_shard is called on",
        reason="the same modules, each a unit",
        default={_T1: "NO_WRAP", _A1: "NO_WRAP", _A2: "NO_WRAP", _T2: "TRANSFORMER_BASED_WRAP"},
        read_by=frozenset((_A1, _A2, _T2)),
        trainer="the word auto_wrap in fsdp",
    ),
    Key(
        name="transformer_layer_cls_to_wrap",
        kind=Kind.CLASSES,
        part=Part.WRAP,
        meaning="classes of the modules that become units; by default those of the model's _no_split_modules",
        outcome=Outcome.EXACT,
        target="fully_shard on each module of these classes",
        reason="the same modules, each a unit",
        default=_everywhere(()),
        trainer="the same key without the prefix",
    ),
    Key(
        name="min_num_params",
        kind=Kind.COUNT,
        part=Part.WRAP,
        meaning="under SIZE_BASED_WRAP, modules with at least so many parameters that no unit below them holds",
        outcome=Outcome.EXACT,
        target="fully_shard on modules chosen by FSDP1's rule",
        reason="the same modules, each a unit",
        default=_everywhere(0),
        trainer="the same key without the prefix",
    ),
    Key(
        name="backward_prefetch",
        kind=Kind.PREFETCH,
        part=Part.BACKWARD_PREFETCH,
        meaning="when backward gathers the next unit; not at all by default",
        outcome=Outcome.EXACT,
        target="prefetch in backward",
        reason="",
        default={_T1: "NO_PREFETCH", _A1: "NO_PREFETCH", _T2: "BACKWARD_PRE", _A2: "BACKWARD_PRE"},
        read_by=_BOTH_FSDP1,
        checked_by=frozenset((_A2,)),
        trainer="the same key without the prefix",
        launcher="set_modules_to_backward_prefetch in the script",
    ),
    Key(
        name="forward_prefetch",
        kind=Kind.BOOL,
        part=Part.FORWARD_PREFETCH,
        meaning="forward gathers the next unit ahead of its use, in the order of the first step",
        outcome=Outcome.EXACT,
        target="set_modules_to_forward_prefetch, one unit ahead",
        reason="the units are asked for one ahead, as FSDP1 did",
        default=_everywhere(False),
        read_by=_BOTH_FSDP1,
        trainer="the same key without the prefix",
        launcher="set_modules_to_forward_prefetch in the script",
    ),
    Key(
        name="state_dict_type",
        kind=Kind.STATE_DICT,
        part=Part.STATE_DICT,
        meaning="what checkpoints hold",
        outcome=Outcome.EXACT,
        target="state_dict_type",
        reason=_KEPT,
        default={_T1: "full", _A1: "full", _T2: "full", _A2: "sharded"},
        read_by=frozenset((_A1, _A2, _T2)),
        trainer="FSDP_STATE_DICT_TYPE in the environment",
    ),
    Key(
        name="sync_module_states",
        kind=Kind.BOOL,
        part=Part.SYNC,
        meaning="rank 0 sends its parameters and buffers to all others",
        outcome=Outcome.EXACT,
        target="sync_module_states; in accelerate's FSDP2 cpu_ram_efficient_loading does it",
        reason="rank 0's values go out before training",
        default={_T1: True, _A1: True, _T2: False, _A2: False},
        read_by=_BOTH_FSDP1,
        trainer="the same key without the prefix",
        launcher="fsdp_cpu_ram_efficient_loading",
    ),
    Key(
        name="cpu_ram_efficient_loading",
        kind=Kind.BOOL,
        part=Part.SYNC,
        meaning="only rank 0 reads a pretrained model's weights; the others get them from it",
        outcome=Outcome.EXACT,
        target="cpu_ram_efficient_loading",
        reason=_KEPT,
        default={_T1: False, _A1: True, _T2: False, _A2: True},
        trainer="the same key without the prefix",
    ),
    Key(
        name="use_orig_params",
        kind=Kind.BOOL,
        meaning="parameters keep their own tensors instead of one flat one a unit",
        outcome=Outcome.UNNEEDED,
        target="",
        reason="FSDP2 has no flat parameter: each keeps its own tensor, whatever this says",
        default=_everywhere(True),
        read_by=_BOTH_FSDP1,
        trainer="the same key without the prefix",
    ),
    Key(
        name="limit_all_gathers",
        kind=Kind.TRUTH,
        meaning="keeps the CPU from queueing more all-gathers than memory can hold",
        outcome=Outcome.UNNEEDED,
        target="",
        reason="FSDP2 bounds the memory of gathered parameters by itself, without blocking the CPU",
        default=_everywhere(True),
        read_by=frozenset((_T1,)),
        trainer="the same key without the prefix",
    ),
    Key(
        name="activation_checkpointing",
        kind=Kind.TRUTH,
        part=Part.CHECKPOINTING,
        meaning="wrapped modules are recomputed in backward, by torch's non-reentrant implementation",
        outcome=Outcome.EXACT,
        target="checkpoint_wrapper on the wrapped modules",
        reason="the same modules, inside their units",
        default=_everywhere(False),
        trainer="the same key without the prefix",
    ),
    Key(
        name="ignored_modules",
        kind=Kind.ANY,
        meaning="modules that stay out of FSDP: read from the plugin that a script builds, never from a file",
        outcome=Outcome.NEEDS_DECISION,
        target="ignored_params",
        reason="no configuration file sets it: accelerate takes modules themselves, from the script",
        read_by=frozenset(),
        trainer="FullyShardedDataParallelPlugin(ignored_modules=...) in the script",
    ),
    Key(
        name="mixed_precision_policy",
        kind=Kind.ANY,
        meaning="the dtypes one by one: read from the plugin that a script builds, never from a file",
        outcome=Outcome.NEEDS_DECISION,
        target="MixedPrecisionPolicy",
        reason="no configuration file sets it",
        read_by=frozenset(),
        trainer="FullyShardedDataParallelPlugin(mixed_precision_policy=...) in the script",
    ),
    *(
        Key(
            name=name,
            kind=kind,
            meaning="for TPUs: torch_xla's own FSDP",
            outcome=Outcome.UNSUPPORTED,
            target="",
            reason="torch_xla's FSDP is another system; FSDP2 has no form for it",
            default=_everywhere(None if kind is Kind.ANY else False),
            read_by=frozenset((_T1, _T2)),
            trainer="the same key without the prefix",
        )
        for name, kind in (
            ("xla", Kind.TRUTH),
            ("xla_fsdp_v2", Kind.TRUTH),
            ("xla_fsdp_grad_ckpt", Kind.TRUTH),
            ("xla_fsdp_settings", Kind.ANY),
        )
    ),
    Key(
        name="dp_replicate_size",
        kind=Kind.DEGREE,
        place=Place.DEGREES,
        part=Part.MESH,
        meaning="so many replicas, each sharded over dp_shard_size ranks (FSDP2 only, accelerate 1.10)",
        outcome=Outcome.EXACT,
        target="data_parallel_replicate_degree",
        reason="replicas average their gradients",
        default=_everywhere(1),
    ),
    Key(
        name="dp_shard_size",
        kind=Kind.DEGREE,
        place=Place.DEGREES,
        part=Part.MESH,
        meaning="over how many ranks parameters are sharded (FSDP2 only, accelerate 1.10)",
        outcome=Outcome.EXACT,
        target="data_parallel_shard_degree",
        reason="the ranks of one replica",
        default=_everywhere(1),
    ),
    *(
        Key(
            name=name,
            kind=Kind.DEGREE,
            place=Place.DEGREES,
            part=Part.MESH,
            meaning=f"{what} over so many ranks (accelerate 1.10)",
            outcome=Outcome.UNSUPPORTED,
            target="",
            reason=f"{what} is not part of sharding by FSDP",
            default=_everywhere(1),
        )
        for name, what in (("tp_size", "tensor parallelism"), ("cp_size", "context parallelism"))
    ),
)
SYNC = next(row for row in KEYS if row.name == "sync_module_states")
ROWS = {(row.place, name): row for row in KEYS for name in (row.name, *row.aliases)}
PREFIX = "fsdp_"
DEGREES_PREFIX = "parallelism_config_"
# Arguments of a Trainer from the time before fsdp_config: their names have the prefix, and are read.
OLD_SIBLINGS = ("fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params")
# For FSDP2 these say nothing, whatever their value.
WITHOUT_EFFECT = ("use_orig_params", "limit_all_gathers")


# ---------------------------------------------------------------------------------------------------------------------
# Values


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What ``fsdp`` says."""

    strategy: ShardingStrategy | None = None
    offload: bool = False
    auto_wrap: bool = False
    ignored: tuple[str, ...] = ()


_STRATEGIES = (*(strategy.value for strategy in tuple(ShardingStrategy)[:4]), "HYBRID_SHARD_ZERO2")
_TRUTH = {
    **dict.fromkeys(("y", "yes", "t", "true", "on", "1"), True),
    **dict.fromkeys(("n", "no", "f", "false", "off", "0"), False),
}


def _parse_strategy(value: object, source: Source) -> ShardingStrategy:
    text = str(value).upper()
    members = tuple(ShardingStrategy)
    if text.isdigit() and not isinstance(value, bool) and 1 <= int(text) <= len(members):
        return members[int(text) - 1]
    if text in _STRATEGIES:
        return members[_STRATEGIES.index(text)]
    if text == ShardingStrategy.HYBRID_SHARD_ZERO2.value:
        return ShardingStrategy.HYBRID_SHARD_ZERO2
    raise _bad(value, Kind.STRATEGY, nearest_key(text.lower(), tuple(name.lower() for name in _STRATEGIES)))


def _parse_words(value: object, source: Source) -> Words:
    """A string is checked word by word; of a list everything that is no option is passed over."""
    if isinstance(value, bool):
        return Words(strategy=ShardingStrategy.FULL_SHARD if value else None)
    if not isinstance(value, str | list):
        raise _bad(value, Kind.WORDS)
    words = value.split() if isinstance(value, str) else [str(word) for word in value]
    known = (*(name.lower() for name in _STRATEGIES), "offload", "auto_wrap")
    strategies = [word for word in words if (word if isinstance(value, str) else word.lower()) in known[:-2]]
    others = [word for word in words if word not in strategies and word not in known]
    if isinstance(value, str) and others:
        separated = " ".join(value.replace(",", " ").split())
        near = separated if "," in value else nearest_key(others[0], known)
        raise _bad(value, Kind.WORDS, near)
    if len(set(strategies)) > 1:
        raise ConfigError(f"{value!r} names {len(set(strategies))} strategies; keep one of {', '.join(strategies)}")
    if words == ["offload"]:
        raise ConfigError("offload does not stand alone; write full_shard offload or shard_grad_op offload")
    return Words(
        strategy=_parse_strategy(strategies[0], source) if strategies else None,
        offload="offload" in words,
        auto_wrap="auto_wrap" in words,
        ignored=tuple(others),
    )


def _parse_bool(value: object, source: Source) -> bool:
    text = str(value).lower()
    if text not in _TRUTH:
        raise _bad(value, Kind.BOOL)
    return _TRUTH[text]


def _parse_truth(value: object, source: Source) -> bool:
    """A Trainer hands it on as it is; accelerate's launcher as text, which is parsed."""
    return bool(value) if source.is_trainer else _parse_bool(value, source)


def is_word_for_false(value: object) -> bool:
    """Whether whoever writes this means false, in quotes or not."""
    return _TRUTH.get(str(value).lower()) is False


def _parse_policy(value: object, source: Source) -> str:
    if value is None and not source.is_trainer:  # as if unsaid, to the launcher
        return "NO_WRAP"
    return _word_of(Kind.POLICY, "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")(value, source)


def _parse_flag(value: object, source: Source) -> bool:
    """Taken as it is: any string would be true, so that none is meant."""
    if value is None or isinstance(value, bool):
        return bool(value)
    raise _bad(value, Kind.FLAG)


def _parse_reshard(value: object, source: Source) -> bool | ShardingStrategy:
    """FSDP2 takes true or false; FSDP1 would have taken a strategy, had it read the key."""
    if source.is_fsdp2 or str(value).lower() in _TRUTH:
        return _parse_bool(value, source)
    return _parse_strategy(value, source)


def _parse_count(value: object, source: Source) -> int:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if is_int or (not source.is_trainer and isinstance(value, str) and value.isdigit()):
        return int(value)  # type: ignore[call-overload]
    try:
        near = str(int(float(value)))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        near = None
    raise _bad(value, Kind.COUNT, near)


def _parse_classes(value: object, source: Source) -> tuple[str, ...]:
    """Names, joined by commas without spaces: accelerate splits at the comma and looks for exactly what it gets."""
    if value is None:
        return ()
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise _bad(value, Kind.CLASSES)
    split = [name for text in names for name in text.split(",")]
    stripped = ",".join(name.strip() for name in split if name.strip())
    if isinstance(value, list | tuple) and not source.is_trainer:
        raise ConfigError(
            f"{value!r} is a list, of which accelerate makes one string, brackets and all; write {stripped}"
        )
    if stripped != ",".join(split) or not stripped:
        raise _bad(value, Kind.CLASSES, stripped or None)
    return tuple(split)


def _word_of(kind: Kind, *choices: str) -> Callable[[object, Source], str]:
    def parse(value: object, source: Source) -> str:
        text = str(value).upper()
        if text not in choices:
            raise _bad(value, kind, nearest_key(text, choices))
        return text

    return parse


def _parse_prefetch(value: object, source: Source) -> str:
    if value is None:
        if source is Source.TRAINER_FSDP1:  # the Trainer calls .upper() on it
            raise _bad(value, Kind.PREFETCH, "NO_PREFETCH")
        return "NO_PREFETCH"
    numbers = {"1": "BACKWARD_PRE", "2": "BACKWARD_POST", "NONE": "NO_PREFETCH"}
    text = str(value).upper()
    if text in numbers and not source.is_trainer:
        return numbers[text]
    return _word_of(Kind.PREFETCH, "BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")(value, source)


def _parse_state_dict(value: object, source: Source) -> str:
    text = {"1": "FULL_STATE_DICT", "2": "LOCAL_STATE_DICT", "3": "SHARDED_STATE_DICT"}.get(str(value), str(value))
    if text.upper() == "LOCAL_STATE_DICT":
        raise ConfigError(
            f"{value!r}: FSDP2 has no flat shards to save; choose SHARDED_STATE_DICT, which every number of ranks can "
            "load, or FULL_STATE_DICT"
        )
    names = {"FULL_STATE_DICT": "full", "SHARDED_STATE_DICT": "sharded"}
    if value is None and not source.is_trainer:  # as if unsaid, to the launcher
        return "sharded" if source.is_fsdp2 else "full"
    return names[_word_of(Kind.STATE_DICT, *names)(text, source)]


def _parse_degree(value: object, source: Source) -> int:
    if isinstance(value, bool) or not str(value).isdigit() or int(str(value)) < 1:
        raise _bad(value, Kind.DEGREE)
    return int(str(value))


def _parse_version(value: object, source: Source) -> int:
    if str(value) not in ("1", "2"):
        raise _bad(value, Kind.VERSION)
    return int(str(value))


def _parse_precision(value: object, source: Source) -> str:
    if value is None:
        return "no"
    if value is False:  # an unquoted no is false in YAML 1.1, on which accelerate launch breaks
        raise ConfigError("it is false, as an unquoted no is in YAML 1.1; write 'no', in quotes")
    return _word_of(Kind.PRECISION, "NO", "FP16", "BF16", "FP8")(value, source).lower()


def _parse_any(value: object, source: Source) -> object:
    return value


PARSERS: dict[Kind, Callable[[object, Source], Any]] = {
    Kind.VERSION: _parse_version,
    Kind.WORDS: _parse_words,
    Kind.STRATEGY: _parse_strategy,
    Kind.RESHARD: _parse_reshard,
    Kind.BOOL: _parse_bool,
    Kind.FLAG: _parse_flag,
    Kind.TRUTH: _parse_truth,
    Kind.POLICY: _parse_policy,
    Kind.CLASSES: _parse_classes,
    Kind.COUNT: _parse_count,
    Kind.PREFETCH: _parse_prefetch,
    Kind.STATE_DICT: _parse_state_dict,
    Kind.PRECISION: _parse_precision,
    Kind.DEGREE: _parse_degree,
    Kind.ANY: _parse_any,
}


def _bad(value: object, kind: Kind, near: str | None = None) -> ConfigError:
    return ConfigError(f"{value!r} is none of its values: {kind.value}" + (f"; did you mean {near}?" if near else ""))
