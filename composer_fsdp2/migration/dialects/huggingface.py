"""Hugging Face: a Trainer's arguments (``fsdp``, ``fsdp_config``) and accelerate's configuration files.

What a file asks for is what its system did with it, which is not always what it says: transformers 4.51.3 reads the
keys of an ``fsdp_config`` without the prefix ``fsdp_`` only, accelerate 1.8.1 with or without it, and neither says a
word about a key that it does not read. A run in accelerate's words is in ``accelerate.py``.

Sources: transformers 4.51.3 (``training_args.py``, ``trainer.py``), accelerate 1.8.1 (``utils/dataclasses.py``,
``utils/launch.py``, ``utils/fsdp_utils.py``, ``commands/launch.py``); for FSDP2 in a Trainer's own arguments
transformers 5, for ``parallelism_config`` accelerate 1.10.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.config.rows import ANY, Aspect, Row, Takes, idle
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
from composer_fsdp2.migration.capabilities import lacking
from composer_fsdp2.migration.dialect import (
    Dialect,
    Frame,
    MappingEdit,
    Path,
    Question,
    Reading,
    Section,
    Setting,
    deciding,
    implicit,
    merged,
    nested,
)
from composer_fsdp2.migration.dialects.accelerate import (
    DEGREES_PREFIX,
    DTYPES,
    OF_FSDP1,
    OF_OTHERS,
    PRECISIONS,
    SIZE_HINT,
    SIZE_REASON,
    STATE_DICTS,
    degrees_of,
    differences_of,
    settings_of,
)
from composer_fsdp2.migration.run import RunConfig, Wrap, WrapKind


class Reader(enum.StrEnum):
    """Who reads the file, and for which FSDP."""

    TRAINER_FSDP1 = "transformers 4.51.3"
    TRAINER_FSDP2 = "transformers 5"
    ACCELERATE_FSDP1 = "accelerate 1.8.1, FSDP1"
    ACCELERATE_FSDP2 = "accelerate 1.8.1, FSDP2"

    @property
    def is_trainer(self) -> bool:
        return self in (Reader.TRAINER_FSDP1, Reader.TRAINER_FSDP2)

    @property
    def is_fsdp2(self) -> bool:
        return self in (Reader.TRAINER_FSDP2, Reader.ACCELERATE_FSDP2)


_T1, _T2, _A1, _A2 = Reader
_NOBODY = "nobody"
# `migrate` takes degrees in any file, as the answer to what a hybrid's mesh was; of the systems this one reads them.
_READS_DEGREES = "accelerate 1.10"


def _reads(reader: Reader, row: Row) -> bool:
    return not row.read_by or reader in row.read_by


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
    """A string is checked word by word; of a list everything that is not an option is passed over."""
    if isinstance(value, bool):
        return Words(strategy=ShardingStrategy.FULL_SHARD if value else None)
    if not isinstance(value, str | list):
        raise _bad(value, _WORDS_TEXT)
    words = value.split() if isinstance(value, str) else [str(word) for word in value]
    known = (*(name.lower() for name in _STRATEGIES), "offload", "auto_wrap")
    strategies = [word for word in words if (word if isinstance(value, str) else word.lower()) in known[:-2]]
    others = [word for word in words if word not in strategies and word not in known]
    if isinstance(value, str) and others:
        separated = " ".join(value.replace(",", " ").split())
        near = separated if "," in value else nearest(others[0], known)
        raise _bad(value, _WORDS_TEXT, near)
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
    """A Trainer hands it on as it is; accelerate's launcher as text, which is parsed."""
    return bool(value) if reader.is_trainer else _parse_bool(value, reader)


def _is_word_for_false(value: object) -> bool:
    """Whether whoever writes this means false, in quotes or not."""
    return _TRUTH_WORDS.get(str(value).lower()) is False


def _parse_policy(value: object, reader: Reader) -> str:
    if value is None and not reader.is_trainer:  # as if it were not there, to the launcher
        return "NO_WRAP"
    return _word_of(_POLICY_TEXT, *_POLICIES)(value, reader)


def _parse_flag(value: object, reader: Reader) -> bool:
    """Taken as it is: any string would be true, so that none is meant."""
    if value is None or isinstance(value, bool):
        return bool(value)
    raise _bad(value, _FLAG_TEXT)


def _parse_reshard(value: object, reader: Reader) -> bool | ShardingStrategy:
    """FSDP2 takes true or false; FSDP1 would have taken a strategy, had it read the key."""
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
    """Names, joined by commas without spaces: accelerate splits at the comma and looks for exactly what it gets."""
    if value is None:
        return ()
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise _bad(value, _CLASSES_TEXT)
    split = [name for text in names for name in text.split(",")]
    stripped = ",".join(name.strip() for name in split if name.strip())
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
    if value is None and not reader.is_trainer:  # as if it were not there, to the launcher
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


_WORDS_TEXT = (
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
_SWITCH = (True, False)

_VERSION = Takes(_VERSION_TEXT, _parse_version, (1, 2))
_WORDS = Takes(_WORDS_TEXT, _parse_words, (*(name.lower() for name in _STRATEGIES), "auto_wrap"))
_STRATEGY = Takes(_STRATEGY_TEXT, _parse_strategy, _STRATEGIES)
_RESHARD = Takes("true or false (under FSDP1 a strategy)", _parse_reshard, _SWITCH)
_BOOL = Takes(_BOOL_TEXT, _parse_bool, _SWITCH)
_FLAG = Takes(_FLAG_TEXT, _parse_flag, _SWITCH)
_TRUTH = Takes("true or false; a Trainer treats any text as true", _parse_truth, _SWITCH)
_SWITCHES = (_BOOL, _FLAG, _TRUTH)
_POLICY = Takes(_POLICY_TEXT, _parse_policy, _POLICIES)
_CLASSES = Takes(_CLASSES_TEXT, _parse_classes)
_COUNT = Takes(_COUNT_TEXT, _parse_count)
_PREFETCH = Takes(_PREFETCH_TEXT, _parse_prefetch, _PREFETCHES)
# FSDP1 saved LOCAL_STATE_DICT, for which FSDP2 has no form, so that it stands in no list of what the key takes.
_STATE_DICT = Takes(_STATE_DICT_TEXT, _parse_state_dict, (*STATE_DICTS.values(), "LOCAL_STATE_DICT"))
_PRECISION = Takes(_PRECISION_TEXT, _parse_precision, tuple(DTYPES))
_DEGREE = Takes(_DEGREE_TEXT, _parse_degree)


# ---------------------------------------------------------------------------------------------------------------------
# Where the value decides


def _words_fate(finding: Finding, held: Held) -> Finding:
    words: Words = held.settings["fsdp"]
    if words.ignored:
        return replace(
            finding,
            outcome=Outcome.NEEDS_DECISION,
            reason=f"of a list, transformers passes over what is not an option: {', '.join(words.ignored)}",
            hint=f"keep of {_WORDS_TEXT} those that you mean",
        )
    if held.reader is Reader.TRAINER_FSDP1:
        return _strategy_fate(finding, held)
    if not (words.auto_wrap or finding.value is True or held.key_of("auto_wrap_policy")):
        return replace(
            finding,
            outcome=Outcome.APPROXIMATE,
            reason="without auto_wrap early releases of transformers 5 wrap nothing, later ones each layer",
            hint="set auto_wrap_policy in fsdp_config",
        )
    return finding


def _strategy_fate(finding: Finding, held: Held) -> Finding:
    strategy = held.settings["sharding_strategy"]
    if strategy is ShardingStrategy.NO_SHARD:
        return replace(
            finding,
            target="2-D mesh with one rank on its shard axis",
            reason="every rank keeps full parameters, gradients are averaged by one all-reduce",
            hint="accelerate's FSDP2 has no form for it: there DDP (distributed_type: MULTI_GPU) is the same run",
        )
    freed = "freed" if strategy.reshards_after_forward else "kept"
    mesh = "a 2-D mesh" if strategy.is_hybrid else "one mesh of all ranks"
    where = "; sharded within a node, replicated over nodes" if strategy.is_hybrid else ""
    return replace(
        finding,
        target=f"reshard_after_forward={strategy.reshards_after_forward} on {mesh}",
        reason=f"parameters are {freed} after forward{where}",
    )


_VERSION_REASON = "transformers 5 reads it; 4.51.3 does not, and trains with FSDP1"
_VERSION_HINT = "under 4.51.3 launch with a configuration file of accelerate's that says fsdp_version: 2"


def _version_fate(finding: Finding, held: Held) -> Finding:
    if held.reader is not Reader.TRAINER_FSDP2:
        return finding
    return replace(
        finding,
        outcome=Outcome.APPROXIMATE,
        reason=_VERSION_REASON,
        hint=_VERSION_HINT,
    )


def _precision_fate(finding: Finding, held: Held) -> Finding:
    if held.settings["mixed_precision"] == "no":
        return replace(finding, target="", reason="no mixed precision")
    if held.settings["mixed_precision"] == "fp8":
        return replace(
            finding,
            outcome=Outcome.APPROXIMATE,
            hint="check that the fp8 library in use takes FSDP2",
            reason="FSDP takes bfloat16; the matrix products in fp8 are another library's",
        )
    return finding


def _wrap_fate(finding: Finding, held: Held) -> Finding:
    """Classes or a number that the policy has no use for."""
    policy = held.settings["auto_wrap_policy"]
    is_size = finding.key.endswith("min_num_params")
    needed = "SIZE_BASED_WRAP" if is_size else "TRANSFORMER_BASED_WRAP"
    if policy == needed:
        return finding
    if is_size and finding.value == 0:
        return idle(finding, "0 has no effect")
    if held.key_of("auto_wrap_policy") is not None:
        return idle(finding, f"not read under {policy}")
    way = "auto_wrap in fsdp" if held.reader.is_trainer else f"fsdp_auto_wrap_policy: {needed}"
    return replace(
        finding,
        outcome=Outcome.NEEDS_DECISION,
        target="",
        reason="no wrapping was asked for: the whole model was one unit, all of it gathered at once",
        hint=f"as trained: remove it; as written: {way}",
    )


def _policy_fate(finding: Finding, held: Held) -> Finding:
    settings = held.settings
    if settings["auto_wrap_policy"] == "SIZE_BASED_WRAP" and held.reader.is_fsdp2:
        return replace(finding, outcome=Outcome.UNSUPPORTED, reason=SIZE_REASON, hint=SIZE_HINT)
    if settings["auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP" and not settings["transformer_layer_cls_to_wrap"]:
        return replace(finding, reason="the classes are those of the model's _no_split_modules")
    if _wrap_of(settings).kind is WrapKind.ROOT:
        return replace(finding, reason="the whole model is one unit, all of it gathered at once")
    return finding


def _backward_prefetch_fate(finding: Finding, held: Held) -> Finding:
    match held.settings["backward_prefetch"]:
        case "NO_PREFETCH":
            hint = "accelerate's FSDP2 always prefetches one: one more unit in memory"
            return replace(finding, reason="no unit is prefetched", hint=hint)
        case "BACKWARD_PRE":
            return replace(finding, target="", reason="FSDP2 does it by itself, in the order that forward ran in")
    return replace(
        finding,
        outcome=Outcome.APPROXIMATE,
        target="FSDP2's own prefetch",
        reason="FSDP2 gathers the next unit before a unit's gradients, not after",
        hint="one more unit is in memory at the peak; NO_PREFETCH spares it",
    )


def _text_fate(finding: Finding, held: Held) -> Finding:
    """A false in quotes, where any text is true."""
    if not (held.reader.is_trainer and isinstance(finding.value, str) and _is_word_for_false(finding.value)):
        return finding
    return replace(
        finding,
        outcome=Outcome.NEEDS_DECISION,
        target="",
        reason="transformers treats any text as true, so that this was on",
        hint="as trained: true; as written: false, without quotes",
    )


def _checkpointing_fate(finding: Finding, held: Held) -> Finding:
    if not held.settings["activation_checkpointing"]:
        return _off(finding)
    if (of_text := _text_fate(finding, held)) is not finding:
        return of_text
    if _wrap_of(held.settings).kind is not WrapKind.ROOT:
        return finding
    if held.reader.is_fsdp2:
        return replace(
            finding,
            outcome=Outcome.NEEDS_DECISION,
            target="",
            hint="set a policy, or recompute in the model",
            reason="accelerate recomputes the modules that its policy wraps, and breaks where there is no policy",
        )
    return replace(
        finding,
        outcome=Outcome.APPROXIMATE,
        reason="without a policy accelerate wrapped every module by itself",
        hint="set a policy, so that the layers are recomputed as wholes",
    )


def _gradient_checkpointing_fate(finding: Finding, held: Held) -> Finding:
    if held.reader is Reader.TRAINER_FSDP2 and held.settings["gradient_checkpointing"]:
        return replace(finding, outcome=Outcome.EXACT, reason="the model does it, under FSDP2 as before")
    return finding if held.settings["gradient_checkpointing"] else replace(_off(finding), outcome=Outcome.EXACT)


def _forward_prefetch_fate(finding: Finding, held: Held) -> Finding:
    return replace(finding, hint="accelerate's FSDP2 has none") if held.settings["forward_prefetch"] else finding


def _sync_fate(finding: Finding, held: Held) -> Finding:
    if held.settings["sync_module_states"]:
        corrected = "accelerate set it to true, since cpu_ram_efficient_loading is on"
        return replace(
            finding,
            reason=corrected if _is_word_for_false(finding.value) else finding.reason,
            hint="under accelerate's FSDP2 cpu_ram_efficient_loading: true does it, and nothing else",
        )
    return replace(finding, target="", reason="each rank begins with its own values, which must be the same")


def _loading_fate(finding: Finding, held: Held) -> Finding:
    if held.settings["cpu_ram_efficient_loading"]:
        hint = "where a target has no such word: LLM Foundry's init_device: mixed, with sync_module_states"
        return replace(finding, hint=hint)
    return replace(finding, target="", reason="off: each rank reads the weights itself")


def _degree_fate(finding: Finding, held: Held) -> Finding:
    return idle(finding, "1 has no effect") if finding.value == 1 else finding


def _off(finding: Finding) -> Finding:
    return replace(finding, target="", reason="off, as by default", asks=False)


# ---------------------------------------------------------------------------------------------------------------------
# The table

# Where in a section keys stand.
_SETTINGS, _BESIDE, _DEGREES = "fsdp_config", "beside fsdp_config", "parallelism_config"
_UNPREFIXED = "the same key without the prefix"
_KEPT = "accelerate reads it for FSDP2 as for FSDP1"


def _everywhere(value: Any) -> dict[Reader, Any]:
    return dict.fromkeys(Reader, value)


def _instead(trainer: str, launcher: str = "") -> dict[Reader, str]:
    """What does the same where a key is not read: in a Trainer's arguments for transformers 4.51.3, in a file of
    accelerate's."""
    ways = {_T1: trainer, _A1: launcher, _A2: launcher}
    return {reader: way for reader, way in ways.items() if way}


# fmt: off
_ROWS: tuple[Row, ...] = (
    Row(name="fsdp", takes=_WORDS, group=_BESIDE, aspect=Aspect.RESHARD, outcome=Outcome.EXACT,
        target="reshard_after_forward, the mesh, cpu_offload, the wrapped modules", read_by=(_T1, _T2),
        decide=_words_fate, meaning="turns FSDP on: the strategy, offload, auto_wrap",
        reason="each word has its form under FSDP2"),
    Row(name="distributed_type", takes=ANY, group=_BESIDE, outcome=Outcome.EXACT, read_by=(_A1, _A2),
        meaning="FSDP makes accelerate launch read fsdp_config",
        reason="turns FSDP on; in accelerate's files fsdp_version tells FSDP2 apart"),
    Row(name="mixed_precision", takes=_PRECISION, group=_BESIDE, aspect=Aspect.PRECISION, outcome=Outcome.EXACT,
        target="mixed_precision: param_dtype and reduce_dtype alike", defaults=_everywhere("no"), read_by=(_A1, _A2),
        decide=_precision_fate, meaning="autocast, and parameters, gradients and buffers of FSDP in this dtype",
        reason="gradients are reduced in the low dtype, too: accelerate gives all of the policy one dtype"),
    Row(name="bf16", takes=_FLAG, group=_BESIDE, aspect=Aspect.PRECISION, outcome=Outcome.EXACT,
        target="mixed_precision: param_dtype and reduce_dtype bfloat16", defaults=_everywhere(False),
        read_by=(_T1, _T2), meaning="autocast, and parameters, gradients and buffers of FSDP in bfloat16",
        reason="gradients are reduced in bfloat16, too: accelerate gives all of the policy one dtype"),
    Row(name="fp16", takes=_FLAG, group=_BESIDE, aspect=Aspect.PRECISION, outcome=Outcome.EXACT,
        target="mixed_precision: param_dtype and reduce_dtype float16", defaults=_everywhere(False),
        meaning="autocast with loss scaling, and parameters, gradients and buffers of FSDP in float16",
        reason="gradients are reduced in float16, too: accelerate gives all of the policy one dtype"),
    Row(name="gradient_checkpointing", takes=_FLAG, group=_BESIDE, aspect=Aspect.CHECKPOINTING,
        outcome=Outcome.APPROXIMATE, target="activation_checkpointing", defaults=_everywhere(False), read_by=(_T1, _T2),
        decide=_gradient_checkpointing_fate,
        meaning="the model recomputes its layers in backward, from outside of their units",
        reason="the same layers are recomputed, but inside their units, which saves a second all-gather"),
    Row(name="gradient_checkpointing_kwargs", takes=ANY, group=_BESIDE, aspect=Aspect.CHECKPOINTING,
        outcome=Outcome.EXACT, target="activation_checkpointing: reentrant or not", read_by=(_T1, _T2),
        meaning="which of torch's implementations recomputes (use_reentrant, true by default)",
        reason="both implementations run inside a fully_shard unit"),
    Row(name="version", takes=_VERSION, outcome=Outcome.EXACT, defaults={_T1: 1, _A1: 1, _T2: 2, _A2: 2},
        read_by=(_A1, _A2, _T2), decide=_version_fate, meaning="which FSDP: 1, or 2",
        reason="which FSDP the file is for; in accelerate's words fsdp_version: 2"),
    Row(name="sharding_strategy", takes=_STRATEGY, aspect=Aspect.RESHARD, outcome=Outcome.EXACT,
        target="reshard_after_forward and the mesh",
        defaults={_T1: ShardingStrategy.FULL_SHARD, _A1: ShardingStrategy.FULL_SHARD}, read_by=(_A1,),
        instead=_instead(trainer="the first word of fsdp", launcher="fsdp_reshard_after_forward, and "
        "parallelism_config for replicas"), decide=_strategy_fate,
        meaning="what is sharded, and when parameters are freed"),
    Row(name="reshard_after_forward", takes=_RESHARD, aspect=Aspect.RESHARD, outcome=Outcome.EXACT,
        target="reshard_after_forward", defaults=_everywhere(True), read_by=(_T2, _A2),
        instead=_instead(trainer="full_shard or shard_grad_op in fsdp", launcher="fsdp_sharding_strategy"),
        meaning="whether parameters are freed after forward; FSDP1 did not read it beside a strategy, which there "
        "always is", reason="FSDP2's own word"),
    Row(name="offload_params", aliases=("cpu_offload",), takes=_BOOL, aspect=Aspect.OFFLOAD, outcome=Outcome.EXACT,
        target="CPUOffloadPolicy", defaults=_everywhere(False), read_by=(_A1, _A2, _T2),
        instead=_instead(trainer="the word offload in fsdp"),
        meaning="parameters, gradients and the optimizer rest in host memory", reason="the same under FSDP2"),
    Row(name="auto_wrap_policy", takes=_POLICY, aspect=Aspect.WRAP, outcome=Outcome.EXACT,
        target="the modules that fully_shard is called on",
        defaults={_T1: "NO_WRAP", _A1: "NO_WRAP", _A2: "NO_WRAP", _T2: "TRANSFORMER_BASED_WRAP"},
        read_by=(_A1, _A2, _T2), instead=_instead(trainer="the word auto_wrap in fsdp"), decide=_policy_fate,
        meaning="which modules become units of their own", reason="the same modules, each a unit"),
    Row(name="transformer_layer_cls_to_wrap", takes=_CLASSES, aspect=Aspect.WRAP, outcome=Outcome.EXACT,
        target="fully_shard on each module of these classes", defaults=_everywhere(()),
        instead=_instead(trainer=_UNPREFIXED), decide=_wrap_fate,
        meaning="classes of the modules that become units; by default those of the model's _no_split_modules",
        reason="the same modules, each a unit"),
    Row(name="min_num_params", takes=_COUNT, aspect=Aspect.WRAP, outcome=Outcome.EXACT,
        target="fully_shard on modules chosen by FSDP1's rule", defaults=_everywhere(0),
        instead=_instead(trainer=_UNPREFIXED), decide=_wrap_fate,
        meaning="under SIZE_BASED_WRAP, modules with at least so many parameters that no unit below them holds",
        reason="the same modules, each a unit"),
    Row(name="backward_prefetch", takes=_PREFETCH, aspect=Aspect.BACKWARD_PREFETCH, outcome=Outcome.EXACT,
        target="prefetch in backward",
        defaults={_T1: "NO_PREFETCH", _A1: "NO_PREFETCH", _T2: "BACKWARD_PRE", _A2: "BACKWARD_PRE"}, read_by=(_T1, _A1),
        checked_by=(_A2,),
        instead=_instead(trainer=_UNPREFIXED, launcher="set_modules_to_backward_prefetch in the script"),
        decide=_backward_prefetch_fate, meaning="when backward gathers the next unit; not at all by default"),
    Row(name="forward_prefetch", takes=_BOOL, aspect=Aspect.FORWARD_PREFETCH, outcome=Outcome.EXACT,
        target="set_modules_to_forward_prefetch, one unit ahead", defaults=_everywhere(False), read_by=(_T1, _A1),
        instead=_instead(trainer=_UNPREFIXED, launcher="set_modules_to_forward_prefetch in the script"),
        decide=_forward_prefetch_fate,
        meaning="forward prefetches the next unit, in the order of the first step",
        reason="each unit prefetches the next one, as FSDP1 did"),
    Row(name="state_dict_type", takes=_STATE_DICT, aspect=Aspect.STATE_DICT, outcome=Outcome.EXACT,
        target="state_dict_type", defaults={_T1: "full", _A1: "full", _T2: "full", _A2: "sharded"},
        read_by=(_A1, _A2, _T2), instead=_instead(trainer="FSDP_STATE_DICT_TYPE in the environment"),
        meaning="what checkpoints hold", reason=_KEPT),
    Row(name="sync_module_states", takes=_BOOL, aspect=Aspect.SYNC, outcome=Outcome.EXACT,
        target="sync_module_states; in accelerate's FSDP2 cpu_ram_efficient_loading does it",
        defaults={_T1: True, _A1: True, _T2: False, _A2: False}, read_by=(_T1, _A1),
        instead=_instead(trainer=_UNPREFIXED, launcher="fsdp_cpu_ram_efficient_loading"), decide=_sync_fate,
        meaning="rank 0 sends its parameters and buffers to all others",
        reason="rank 0's values go out before training"),
    Row(name="cpu_ram_efficient_loading", takes=_BOOL, aspect=Aspect.SYNC, outcome=Outcome.EXACT,
        target="cpu_ram_efficient_loading", defaults={_T1: False, _A1: True, _T2: False, _A2: True},
        instead=_instead(trainer=_UNPREFIXED), decide=_loading_fate,
        meaning="only rank 0 reads a pretrained model's weights; the others get them from it", reason=_KEPT),
    Row(name="use_orig_params", takes=_BOOL, outcome=Outcome.UNNEEDED, defaults=_everywhere(True), read_by=(_T1, _A1),
        instead=_instead(trainer=_UNPREFIXED),
        meaning="parameters keep their own tensors instead of one flat one a unit",
        reason="FSDP2 has no flat parameter: each keeps its own tensor, whatever this says"),
    Row(name="limit_all_gathers", takes=_TRUTH, outcome=Outcome.UNNEEDED, defaults=_everywhere(True), read_by=(_T1,),
        instead=_instead(trainer=_UNPREFIXED),
        meaning="keeps the CPU from queueing more all-gathers than memory can hold",
        reason="FSDP2 bounds the memory of gathered parameters by itself, without blocking the CPU"),
    Row(name="activation_checkpointing", takes=_TRUTH, aspect=Aspect.CHECKPOINTING, outcome=Outcome.EXACT,
        target="checkpoint_wrapper on the wrapped modules", defaults=_everywhere(False),
        instead=_instead(trainer=_UNPREFIXED), decide=_checkpointing_fate,
        meaning="wrapped modules are recomputed in backward, by torch's non-reentrant implementation",
        reason="the same modules, inside their units"),
    Row(name="ignored_modules", takes=ANY, outcome=Outcome.NEEDS_DECISION, target="ignored_params", read_by=(_NOBODY,),
        instead=_instead(trainer="FullyShardedDataParallelPlugin(ignored_modules=...) in the script"),
        meaning="modules that stay out of FSDP: read from the plugin that a script builds, never from a file",
        reason="no configuration file sets it: accelerate takes modules themselves, from the script"),
    Row(name="mixed_precision_policy", takes=ANY, outcome=Outcome.NEEDS_DECISION, target="MixedPrecisionPolicy",
        read_by=(_NOBODY,),
        instead=_instead(trainer="FullyShardedDataParallelPlugin(mixed_precision_policy=...) in the script"),
        meaning="the dtypes one by one: read from the plugin that a script builds, never from a file",
        reason="no configuration file sets it"),
    *(
        Row(
            name=name,
            takes=takes,
            meaning="for TPUs: torch_xla's own FSDP",
            outcome=Outcome.UNSUPPORTED,
            reason="torch_xla's FSDP is another system; FSDP2 has no form for it",
            defaults=_everywhere(None if takes is ANY else False),
            read_by=(_T1, _T2),
            instead=_instead(trainer=_UNPREFIXED),
            decide=_text_fate if takes is _TRUTH else None,
        )
        for name, takes in (
            ("xla", _TRUTH),
            ("xla_fsdp_v2", _TRUTH),
            ("xla_fsdp_grad_ckpt", _TRUTH),
            ("xla_fsdp_settings", ANY),
        )
    ),
    Row(name="dp_replicate_size", takes=_DEGREE, group=_DEGREES, aspect=Aspect.MESH, outcome=Outcome.EXACT,
        target="data_parallel_replicate_degree", defaults=_everywhere(1),
        meaning="so many replicas, each sharded over dp_shard_size ranks (FSDP2 only, accelerate 1.10)",
        reason="replicas average their gradients"),
    Row(name="dp_shard_size", takes=_DEGREE, group=_DEGREES, aspect=Aspect.MESH, outcome=Outcome.EXACT,
        target="data_parallel_shard_degree", defaults=_everywhere(1),
        meaning="over how many ranks parameters are sharded (FSDP2 only, accelerate 1.10)",
        reason="the ranks of one replica"),
    *(Row(name=name, takes=_DEGREE, group=_DEGREES, aspect=Aspect.MESH, meaning=f"{what} over so many ranks "
        "(accelerate 1.10)", outcome=Outcome.UNSUPPORTED, reason=f"{what} is not part of sharding by FSDP",
        defaults=_everywhere(1), decide=_degree_fate) for name,
        what in (("tp_size", "tensor parallelism"), ("cp_size", "context parallelism"))),
)
# fmt: on
ROWS = tuple(replace(row, group=row.group or _SETTINGS) for row in _ROWS)
_SYNC_ROW = next(row for row in ROWS if row.name == "sync_module_states")
_BY_PLACE = {(row.group, name): row for row in ROWS for name in (row.name, *row.aliases)}
_PREFIX = "fsdp_"
# Arguments of a Trainer from the time before fsdp_config: their names have the prefix, and are read.
_OLD_SIBLINGS = ("fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params")
# For FSDP2 these say nothing, whatever their value.
_WITHOUT_EFFECT = ("use_orig_params", "limit_all_gathers")


# ---------------------------------------------------------------------------------------------------------------------
# What a section gives


def _reader_of(values: Mapping[str, Any]) -> Reader:
    settings = values.get("fsdp_config")
    given = settings if isinstance(settings, Mapping) else {}
    is_fsdp2 = str(given.get("version", given.get("fsdp_version"))) == "2"
    if "distributed_type" in values:
        return Reader.ACCELERATE_FSDP2 if is_fsdp2 else Reader.ACCELERATE_FSDP1
    # transformers 4.51.3 reads no version at all; 5 reads it, with or without the prefix.
    return Reader.TRAINER_FSDP2 if is_fsdp2 else Reader.TRAINER_FSDP1


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenKey:
    """A key of the section, with its path from there, and whether the system reads it at that place."""

    key: str
    value: Any
    row: Row | None
    is_read: bool = True

    @property
    def is_off(self) -> bool:
        """Whether it says that there is to be none of it."""
        return self.row is not None and self.row.takes in _SWITCHES and _is_word_for_false(self.value)


def _given(values: Mapping[str, Any], reader: Reader) -> tuple[GivenKey, ...]:
    """The keys that are FSDP's own; what else a Trainer's arguments hold is none of it."""
    found: list[GivenKey] = []
    for name, value in values.items():
        group = {"fsdp_config": _SETTINGS, "parallelism_config": _DEGREES}.get(name)
        row = _BY_PLACE.get((_BESIDE, name))
        if group is not None and isinstance(value, Mapping) and value:
            found += [_nested_key(f"{name}.{key}", str(key), each, group, reader) for key, each in value.items()]
        elif group is not None:
            found.append(GivenKey(key=name, value=value, row=None, is_read=not value or isinstance(value, str)))
        elif row is not None and _reads(reader, row):
            found.append(GivenKey(key=name, value=value, row=row))
        elif name in _OLD_SIBLINGS and reader.is_trainer:
            old = _BY_PLACE[_SETTINGS, name.removeprefix(_PREFIX)]
            found.append(GivenKey(key=name, value=value, row=old, is_read=reader is Reader.TRAINER_FSDP1))
        elif str(name).startswith("fsdp"):
            found.append(GivenKey(key=name, value=value, row=None, is_read=False))
    return _last_of_each(found)


def _nested_key(key: str, name: str, value: Any, group: str, reader: Reader) -> GivenKey:
    prefix = _PREFIX if group == _SETTINGS else DEGREES_PREFIX
    plain = name.removeprefix(prefix)
    row = _BY_PLACE.get((group, plain))
    if row is None:
        return GivenKey(key=key, value=value, row=None, is_read=False)
    is_read = _reads(reader, row)
    if reader is Reader.TRAINER_FSDP1 and plain != name:
        is_read = False  # stripped from the keys of a JSON file only
    if row.aliases:  # two systems' words for one thing: each reads its own
        is_read = is_read and (plain in row.aliases) == reader.is_trainer
    return GivenKey(key=key, value=value, row=row, is_read=is_read)


def _last_of_each(given: list[GivenKey]) -> tuple[GivenKey, ...]:
    """Most readers take a key with and without its prefix as the same, and the last one holds."""
    last = {(each.row.name, each.key in _OLD_SIBLINGS): each.key for each in given if each.row and each.is_read}
    return tuple(
        each
        if each.row is None or last.get((each.row.name, each.key in _OLD_SIBLINGS), each.key) == each.key
        else replace(each, is_read=False)
        for each in given
    )


# ---------------------------------------------------------------------------------------------------------------------
# What the system made of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What holds in the run, given or not, and by key what kept it from starting.

    Args:
        settings: By the names of the table.
        problems: By key: what is wrong with its value, and which would do.
    """

    reader: Reader
    given: tuple[GivenKey, ...]
    around: Mapping[str, Any]
    settings: dict[str, Any]
    problems: dict[str, str]

    def keys_of(self, *names: str) -> list[str]:
        """The keys that are read for one of these names of the table."""
        return [each.key for each in self.given if each.row is not None and each.is_read and each.row.name in names]

    def key_of(self, *names: str) -> str | None:
        """The key that set one of these; None if the file gives none of them."""
        keys = self.keys_of(*names)
        return keys[-1] if keys else None

    def value_of(self, key: str) -> Any:
        return next(each.value for each in self.given if each.key == key)

    def asks_for_size(self) -> bool:
        """Whether any number of parameters that is read is above 0."""
        numbers = map(self.value_of, self.keys_of("min_num_params"))
        return any(isinstance(number, int | float) and number > 0 for number in numbers)


def _held_by(values: Mapping[str, Any]) -> Held:
    reader = _reader_of(values)
    given = _given(values, reader)
    settings = {row.name: row.defaults.get(reader) for row in ROWS}
    held = Held(reader=reader, given=given, around=values, settings=settings, problems={})
    for each in given:
        if each.row is not None and (each.is_read or reader in each.row.checked_by):
            _set(held, each)
    for step in (_switches, _fsdp_words, _wrapping, _precision_words, _strategies, _loading, _contradictions):
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
    if given.key not in _OLD_SIBLINGS:
        held.settings[given.row.name] = value
    elif isinstance(value, tuple):
        held.settings[given.row.name] += value  # both lists count
    else:
        held.settings[given.row.name] = max(held.settings[given.row.name], value)


def _switches(held: Held) -> None:
    """Whether accelerate's file turns FSDP on; its fp16 of old, before which mixed_precision goes."""
    if held.around.get("distributed_type", "FSDP") != "FSDP":
        held.problems["distributed_type"] = (
            "accelerate launch reads fsdp_config under distributed_type FSDP only; as trained: remove fsdp_config; "
            "as written: distributed_type: FSDP"
        )
    if not held.reader.is_trainer and held.settings["fp16"] and held.key_of("mixed_precision") is None:
        held.settings["mixed_precision"] = "fp16"


def _fsdp_words(held: Held) -> None:
    settings, reader = held.settings, held.reader
    if not reader.is_trainer:
        return
    if held.around.get("fsdp") in (None, "", False, []):
        held.problems["fsdp"] = (
            "FSDP is off, whatever fsdp_config says; as trained: remove that; as written: fsdp: full_shard auto_wrap"
        )
    words: Words = settings["fsdp"] or Words()
    settings["offload_params"] = settings["offload_params"] or words.offload
    if reader is Reader.TRAINER_FSDP1:
        settings["sharding_strategy"] = words.strategy or ShardingStrategy.FULL_SHARD
        by_size = settings["min_num_params"] > 0
        policy = "SIZE_BASED_WRAP" if by_size else "TRANSFORMER_BASED_WRAP"
        settings["auto_wrap_policy"] = policy if words.auto_wrap else "NO_WRAP"
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
    settings["mixed_precision"] = "fp16" if settings["fp16"] else "bf16" if settings["bf16"] else "no"


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
    if held.reader is Reader.TRAINER_FSDP2:
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
        return [each.key for each in held.given if each.row is _SYNC_ROW]
    return held.keys_of("sync_module_states")


def _loading_text(held: Held) -> str:
    key = held.key_of("cpu_ram_efficient_loading")
    if key is None:
        return "on by default"
    return "true" if held.settings["cpu_ram_efficient_loading"] else "in quotes, which the launcher takes for true"


# ---------------------------------------------------------------------------------------------------------------------
# The run


def _run_of(held: Held) -> RunConfig:
    settings, around, is_fsdp2 = held.settings, held.around, held.reader.is_fsdp2
    config = ShardingConfig(
        mesh=_mesh(held),
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
    is_launcher = not held.reader.is_trainer
    return RunConfig(
        config=config,
        wrap=_wrap_of(settings),
        precision=PRECISIONS[settings["mixed_precision"]],
        state_dict_type=settings["state_dict_type"],
        num_ranks=around.get("num_processes") if is_launcher else None,
        num_nodes=around.get("num_machines") if is_launcher else None,
        max_grad_norm=None if is_launcher else _max_grad_norm(around),
        tensor_parallel=settings["tp_size"],
        context_parallel=settings["cp_size"],
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
    settings = held.settings
    if settings["activation_checkpointing"]:
        return ActivationCheckpointing(checkpoint=True, reentrant=False)
    if not settings["gradient_checkpointing"]:
        return ActivationCheckpointing()
    given = settings["gradient_checkpointing_kwargs"]
    reentrant = given.get("use_reentrant", True) if isinstance(given, Mapping) else True
    return ActivationCheckpointing(checkpoint=True, reentrant=bool(reentrant))


def _accumulates(held: Held) -> bool:
    """A Trainer puts gradients off to the last microbatch (no_sync); with accelerate alone the script decides."""
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
        if shard == 1:
            raise ConfigError("dp_shard_size is 1, which is no sharding; give the number of ranks of one replica")
        return MeshSpec.of_degrees(shard, replicate if replicate > 1 else None)
    if strategy is None or not strategy.is_hybrid:
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


def _wrap_of(settings: Mapping[str, Any]) -> Wrap:
    policy = settings["auto_wrap_policy"]
    if policy == "TRANSFORMER_BASED_WRAP":
        return Wrap(kind=WrapKind.CLASSES, classes=tuple(dict.fromkeys(settings["transformer_layer_cls_to_wrap"])))
    if policy == "SIZE_BASED_WRAP" and settings["min_num_params"] > 0:
        return Wrap(kind=WrapKind.SIZE, min_num_params=settings["min_num_params"])
    return Wrap(kind=WrapKind.ROOT)  # a size of 0 is passed over as well


# ---------------------------------------------------------------------------------------------------------------------
# Findings


def _findings_of(held: Held) -> Iterator[Finding]:
    for given in held.given:
        yield _of_no_row(given) if given.row is None else _finding(given, given.row, held)
    given_keys = {given.key for given in held.given}
    for key, problem in held.problems.items():
        if key not in given_keys:
            yield implicit(key, Outcome.NEEDS_DECISION, problem)
    if not held.reader.is_fsdp2:
        yield from _implicit_findings(held)


def _finding(given: GivenKey, row: Row, held: Held) -> Finding:
    usual = row.usual(given.key, given.value)
    if given.key in held.problems:
        return replace(usual, outcome=Outcome.NEEDS_DECISION, reason=held.problems[given.key], target="")
    if given.is_off and row.defaults and not any(row.defaults.values()):
        usual = _off(usual)
        if row.outcome is Outcome.UNSUPPORTED:
            usual = replace(usual, outcome=Outcome.UNNEEDED)
    if not given.is_read:
        return _unread(usual, given, row, held)
    return usual if row.decide is None else row.decide(usual, held)


def _of_no_row(given: GivenKey) -> Finding:
    name = given.key.split(".")[-1]
    finding = Finding(key=given.key, value=given.value, outcome=Outcome.NEEDS_DECISION, reason="")
    if name == "fsdp_config" and isinstance(given.value, str):
        return replace(
            finding,
            reason="the settings are in another file, which is not read here",
            hint="write its keys here as a mapping, without the prefix fsdp_ (of the keys of a file it is taken off)",
        )
    if name in ("fsdp_config", "parallelism_config") and not given.value:
        return idle(finding, "it is empty")
    near = nearest(name.removeprefix(_PREFIX), {known for _, known in _BY_PLACE})
    prefix = _PREFIX if name.startswith(_PREFIX) and near != "fsdp" else ""
    return replace(
        finding,
        outcome=Outcome.UNSUPPORTED,
        reason="Hugging Face knows no such key, and passed over it",
        hint=f"did you mean {prefix}{near}?" if near else "remove it",
        known=False,
    )


def _unread(usual: Finding, given: GivenKey, row: Row, held: Held) -> Finding:
    """A key that the system passed over: nothing is lost if it says what held anyway."""
    reader, is_doubled = held.reader, _is_doubled(given, row, held)
    reason = f"{held.key_of(row.name)} says it again" if is_doubled else f"{reader.value} does not read it here"
    open_ = replace(usual, outcome=Outcome.NEEDS_DECISION, target="", hint="remove it")
    try:
        value = row.takes.parse(given.value, reader)
    except ConfigError as error:
        return replace(open_, reason=f"{reason}; {error}")
    if row.name in _WITHOUT_EFFECT or _is_in_effect(row, value, held):
        return idle(usual, f"{reason}, and what it says held all the same")
    if is_doubled:
        return replace(open_, reason=f"{reason}, and held", hint="as trained: remove it; as written: remove the other")
    way = row.instead.get(reader, "")
    how = f" (as {way})" if way else ""
    return replace(
        open_,
        reason=f"{reason}: the run went by {_word(held.settings[row.name])}",
        hint=f"as trained: remove it; as written: say it where it is read{how}",
    )


def _is_doubled(given: GivenKey, row: Row, held: Held) -> bool:
    """Whether the key is read here, under another of its names."""
    is_inert = held.reader is Reader.TRAINER_FSDP1 and given.key.split(".")[-1].startswith(_PREFIX)
    return _reads(held.reader, row) and not is_inert and held.key_of(row.name) not in (None, given.key)


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
    if not decided_by_words and held.key_of("auto_wrap_policy") is not None:
        return
    wrap = _wrap_of(held.settings)
    if wrap.kind is WrapKind.ROOT:
        way = "auto_wrap in fsdp" if decided_by_words else "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
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
_TRAINER_FSDP2 = Finding(
    key="version",
    value=2,
    outcome=Outcome.APPROXIMATE,
    target="version: 2",
    reason=_VERSION_REASON,
    hint=_VERSION_HINT,
    origin=Origin.LACKING,
)

# ---------------------------------------------------------------------------------------------------------------------
# In place

_GONE = frozenset(
    (
        "sharding_strategy",
        "backward_prefetch",
        "forward_prefetch",
        "sync_module_states",
        "use_orig_params",
        "limit_all_gathers",
    )
)
Replacements = dict[str, list[tuple[str, Any]]]


def _rewrite_accelerate(section: Section, held: Held, run: RunConfig) -> list[MappingEdit]:
    settings = section.given.get("fsdp_config")
    new: list[tuple[str, Any]] = [
        ("fsdp_version", 2),
        ("fsdp_reshard_after_forward", held.settings["reshard_after_forward"]),
    ]
    key = held.key_of("state_dict_type")
    if key is None or held.value_of(key) is None:  # its default is another one under FSDP2
        new.append(("fsdp_state_dict_type", STATE_DICTS[run.state_dict_type]))
    edits = []
    beside: Replacements = {}
    if isinstance(settings, Mapping) and settings:
        edits.append(_settings_edit(section, held, new, places=("sharding_strategy", "version")))
    else:
        place = "fsdp_config" if "fsdp_config" in section.given else "distributed_type"
        kept = [] if place == "fsdp_config" else [(place, section.given[place])]
        beside[place] = [*kept, ("fsdp_config", dict(new))]
    degrees = degrees_of(run)
    if degrees and held.key_of("dp_shard_size") is None:
        beside.setdefault("distributed_type", [("distributed_type", section.given["distributed_type"])])
        beside["distributed_type"].append(("parallelism_config", degrees))
    return [MappingEdit(path=section.path, replacements=beside), *edits] if beside else edits


def _rewrite_trainer(section: Section, held: Held) -> list[MappingEdit]:
    settings = section.given.get("fsdp_config")
    new: list[tuple[str, Any]] = [
        ("version", 2),
        ("reshard_after_forward", held.settings["reshard_after_forward"]),
        ("state_dict_type", STATE_DICTS[held.settings["state_dict_type"]]),
    ]
    policy = held.settings["auto_wrap_policy"]
    if policy != "TRANSFORMER_BASED_WRAP":  # transformers 5 takes that one, whether fsdp says auto_wrap or not
        new.append(("auto_wrap_policy", policy))
    beside: Replacements = {}
    for name in _OLD_SIBLINGS:
        if name in section.given:
            beside[name] = []
            key = name.removeprefix(_PREFIX)
            if held.settings[key]:
                new.append((key, list(held.settings[key]) if key.startswith("t") else held.settings[key]))
    if held.settings["sharding_strategy"].is_hybrid:
        plain = "full_shard" if held.settings["reshard_after_forward"] else "shard_grad_op"
        words = [plain, *(["offload"] if held.settings["offload_params"] else [])]
        words += ["auto_wrap"] if policy != "NO_WRAP" else []
        given = section.given["fsdp"]
        beside["fsdp"] = [("fsdp", words if isinstance(given, list) else " ".join(words))]
    edits = []
    if isinstance(settings, Mapping) and settings:
        edits.append(_settings_edit(section, held, new, places=("version",)))
    elif "fsdp_config" in section.given:
        beside["fsdp_config"] = [("fsdp_config", dict(new))]
    else:
        beside["fsdp"] = [*beside.get("fsdp", [("fsdp", section.given["fsdp"])]), ("fsdp_config", dict(new))]
    return [MappingEdit(path=section.path, replacements=beside), *edits] if beside else edits


def _settings_edit(section: Section, held: Held, new: list[tuple[str, Any]], *, places: tuple[str, ...]) -> MappingEdit:
    """What FSDP2 has no use for goes, and so does what was not read: a system that reads FSDP2's keys would read it."""
    replacements: Replacements = {}
    names = {name.removeprefix(_PREFIX) for name, _ in new}
    for given in held.given:
        where, _, key = given.key.partition(".")
        if where != "fsdp_config" or not key or given.row is None:
            continue
        if given.row.name in _GONE or given.row.name in names or not given.is_read:
            replacements[key] = []
    place = next(
        (key for name in places for key in replacements if key.removeprefix(_PREFIX) == name),
        None,
    )
    path = (*section.path, "fsdp_config")
    if place is None:
        return MappingEdit(path=path, replacements=replacements, additions=new)
    replacements[place] = new
    return MappingEdit(path=path, replacements=replacements)


# ---------------------------------------------------------------------------------------------------------------------
# The dialect

# By who reads it, a file that turns sharding on, layer by layer.
_FILES: dict[Reader, dict[str, Any]] = {
    _T1: {"fsdp": "full_shard auto_wrap"},
    _T2: {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2}},
    _A1: {"distributed_type": "FSDP", "fsdp_config": {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}},
    _A2: {
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    },
}
# What must stand beside a key for the system to look at it.
_COMPANIONS: dict[str, tuple[str, Any]] = {
    "min_num_params": ("auto_wrap_policy", "SIZE_BASED_WRAP"),
    "auto_wrap_policy": ("min_num_params", 1),
}
# By group, what stands before a key: to a Trainer first, to accelerate last.
_PREFIXES = {
    _SETTINGS: ("fsdp_config.", f"fsdp_config.{_PREFIX}"),
    _BESIDE: ("",),
    _DEGREES: ("parallelism_config.", f"parallelism_config.{DEGREES_PREFIX}"),
}


class HuggingFaceDialect(Dialect):
    """A Trainer's arguments and accelerate's files; the FSDP2 words that it writes are accelerate's."""

    name, target = "huggingface", "accelerate"
    title = "Hugging Face: Trainer and accelerate"
    rows = ROWS
    lacks = (*OF_FSDP1, *OF_OTHERS)
    readers = tuple(Reader)
    silent = tuple(
        Section.at((), merged(_FILES[reader], more))
        for reader, more in (
            (_T1, {"bf16": True, "gradient_accumulation_steps": 2}),
            (_T1, {"fsdp": "full_shard"}),
            (_A1, {"mixed_precision": "bf16"}),
        )
    )

    def find(self, path: Path, values: Mapping[str, Any], parent: Mapping[str, Any]) -> Path | None:
        """A mapping with a Trainer's FSDP arguments, or a configuration file of accelerate's."""
        settings, fsdp = values.get("fsdp_config"), values.get("fsdp")
        has_settings = isinstance(settings, str) or (isinstance(settings, Mapping) and len(settings) > 0)
        if "distributed_type" in values:
            is_section = values["distributed_type"] == "FSDP" or has_settings
        elif isinstance(fsdp, str | list | bool):
            is_section = bool(fsdp) or has_settings
        else:
            is_section = isinstance(settings, Mapping) and any(str(key).startswith(_PREFIX) for key in settings)
        return path if is_section else None

    def read(self, section: Section) -> Reading:
        held = _held_by(section.given)
        run = None
        try:
            run = _run_of(held)
        except ConfigError as error:
            key = held.key_of("dp_shard_size", "dp_replicate_size") or held.key_of("sharding_strategy", "fsdp")
            held.problems.setdefault(key or "mesh", str(error))
        reads_other_file = isinstance(section.given.get("fsdp_config"), str)
        is_readable = not held.problems and not reads_other_file and not held.settings["xla"]
        findings = tuple(_findings_of(held))
        # A key that is not read counts: what holds in its stead goes where the user looks for it.
        unread = {given.key for given in held.given if not given.is_read}
        aspects = {given.key: given.row.aspect for given in held.given if given.row is not None and not given.is_off}
        return Reading(
            run=run if is_readable else None,
            findings=findings,
            aspects=deciding(aspects, (finding for finding in findings if finding.key not in unread)),
            details=held,
        )

    def settings(self, run: RunConfig) -> Iterator[Setting]:
        yield from settings_of(run)

    def differences(self, run: RunConfig) -> Iterator[Finding]:
        yield from differences_of(run)
        yield from lacking(OF_OTHERS, run)

    def rewrite(self, section: Section, reading: Reading) -> list[MappingEdit]:
        """FSDP2's words for FSDP1's, in place; nothing where FSDP2 has no form for the strategy."""
        held: Held = reading.details
        keeps_all = held.settings["sharding_strategy"] is ShardingStrategy.NO_SHARD
        if reading.run is None or keeps_all or held.reader.is_fsdp2:
            return []
        if held.reader.is_trainer:
            return _rewrite_trainer(section, held)
        return _rewrite_accelerate(section, held, reading.run)

    def own_findings(self, reading: Reading) -> tuple[Finding, ...]:
        """The reading's, and what Hugging Face's FSDP2 has no word for or does otherwise than its FSDP1."""
        run, held = reading.run, reading.details
        is_later_trainers = held.reader is Reader.TRAINER_FSDP2
        if run is None or is_later_trainers:
            return reading.findings
        of_run = differences_of(run, has_degrees=held.key_of("dp_shard_size") is not None)
        return (*reading.findings, *of_run, *([_TRAINER_FSDP2] if held.reader.is_trainer else []))

    def frame(self, section: Section) -> Frame:
        """What is FSDP's own goes, and so does what decides the precision."""
        names = ("fsdp_config", "fsdp", "distributed_type")
        main = next((name for name in names if section.given.get(name)), "fsdp_config")
        is_nested = isinstance(section.given.get("fsdp_config"), Mapping)
        return Frame(
            entry=(*section.path, main),
            inner=(*section.path, "fsdp_config") if is_nested and main == "fsdp_config" else None,
            prefix="fsdp_config.",
            beside=tuple(map(str, section.given)),
        )

    def places(self, row: Row) -> tuple[str, ...]:
        names = (row.name, *row.aliases)
        return (*(prefix + name for name in names for prefix in _PREFIXES[row.group]), *self._old(row))

    def _old(self, row: Row) -> tuple[str, ...]:
        return tuple(name for name in _OLD_SIBLINGS if name == _PREFIX + row.name)

    def aliases(self, row: Row) -> tuple[str, ...]:
        return (*row.aliases, *self._old(row))

    def values(self, row: Row) -> tuple[Any, ...]:
        return row.takes.choices

    def defaults(self, row: Row) -> Mapping[str, Any]:
        return {reader.value: value for reader, value in row.defaults.items()}

    def read_by(self, row: Row) -> tuple[str, ...]:
        if row.group == _DEGREES:
            return (_READS_DEGREES,)
        return tuple(reader.value for reader in Reader if _reads(reader, row)) or (_NOBODY,)

    def instead(self, row: Row) -> Mapping[str, str]:
        # A Trainer of transformers 4.51.3 passes over names with the prefix, those of keys that it reads as well.
        return {
            reader.value: way
            for reader, way in row.instead.items()
            if reader is Reader.TRAINER_FSDP1 or not _reads(reader, row)
        }

    def questions(self, row: Row, value: Any) -> Iterator[Question]:
        is_degree = row.group == _DEGREES
        for reader, base in _FILES.items():
            asks = reader is Reader.ACCELERATE_FSDP2 if is_degree else _reads(reader, row) or row.read_by == (_NOBODY,)
            if not asks:
                continue
            name = row.aliases[0] if row.aliases and reader.is_trainer else row.name
            prefix = _PREFIXES[row.group][0 if reader.is_trainer else -1]
            values = base
            if row.name in _COMPANIONS:
                beside, its_value = _COMPANIONS[row.name]
                values = merged(values, nested(prefix + beside, its_value))
            values = merged(values, nested(prefix + name, value))
            who = _READS_DEGREES if is_degree else reader.value
            yield Question(section=Section.at((), values), key=prefix + name, reader=who)
