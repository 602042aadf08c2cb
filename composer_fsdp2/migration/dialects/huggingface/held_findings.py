"""What became of each key, and what the system did that no key asks for."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.config.rows import Row, idle
from composer_fsdp2.config.text import nearest
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.fsdp1.parsing import ShardingStrategy
from composer_fsdp2.migration.dialect import implicit
from composer_fsdp2.migration.dialects.huggingface.fates import off
from composer_fsdp2.migration.dialects.huggingface.given_keys import is_bare
from composer_fsdp2.migration.dialects.huggingface.held import GivenKey, Held, wrap_of
from composer_fsdp2.migration.dialects.huggingface.held_run import accumulates
from composer_fsdp2.migration.dialects.huggingface.places import MAPPINGS, OF_ACCELERATES_FILE, PREFIX
from composer_fsdp2.migration.dialects.huggingface.readers import Reader, reads
from composer_fsdp2.migration.dialects.huggingface.table import BY_PLACE, SYNC_ROW, WITHOUT_EFFECT
from composer_fsdp2.migration.run import Wrap, WrapKind


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
        if held.key_of("gradient_clipping") is None:
            yield _IMPLICIT_CLIPPING
    elif not held.reader.is_fsdp2:
        yield from _implicit_findings(held)
    yield from _quantized(held.around)


def _quantized(values: Mapping[str, Any]) -> Iterator[Finding]:
    bits = next((bits for bits in (4, 8) if values.get(f"load_in_{bits}bit") is True), None)
    if bits is not None:
        yield implicit(
            _QUANTIZED,
            Outcome.UNSUPPORTED,
            "bitsandbytes' weights lose their quantization in fully_shard, for which axolotl has a patch of its own "
            "and composer_fsdp2 none: the base model needs several times the memory, and computes other numbers",
            "load the base model in bfloat16, and remove load_in_4bit and load_in_8bit",
            value=f"{bits} bits",
        )


def as_own(finding: Finding) -> Finding:
    """A finding of the model where the file stays its system's, whose own patches are in effect as before."""
    if finding.key != _QUANTIZED:
        return finding
    reason = "they are made where the model is made, outside of this section, and stay the system's own"
    return replace(finding, outcome=Outcome.APPROXIMATE, target="the model's code", reason=reason, hint="")


def keeps_own_values(held: Held) -> Iterator[Finding]:
    """A finding where FSDP1 sent rank 0's values out, and the system's own FSDP2 does not."""
    loads = held.reader is Reader.ACCELERATE_DEEPSPEED or held.settings["cpu_ram_efficient_loading"]
    if held.settings["sync_module_states"] and not loads:
        yield Finding(
            key="sync_module_states",
            value=True,
            outcome=Outcome.APPROXIMATE,
            target="cpu_ram_efficient_loading",
            reason="FSDP1 sent rank 0's values to all ranks; FSDP2 does so with cpu_ram_efficient_loading only: each "
            "rank trains on its part of the values that it has loaded or drawn itself",
            hint="have all ranks load one file, or draw from one seed; or cpu_ram_efficient_loading: true",
            origin=Origin.LACKING,
        )


_QUANTIZED = "quantized weights"


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
    hint = f"write it beside fsdp_config, not in it: {near}" if near == name else f"did you mean {prefix}{near}?"
    return replace(finding, hint=hint) if near else idle(finding, finding.reason)


def _unread(usual: Finding, given: GivenKey, row: Row, held: Held) -> Finding:
    """A key that the system passed over: nothing is lost if it says what held anyway."""
    reader, is_doubled = held.reader, _is_doubled(given, row, held)
    reason = f"{held.key_of(row.name)} says it again" if is_doubled else f"{reader.value} does not read it here"
    setting = _OF_SPEED.get(row.name, row.name)
    open_ = replace(usual, outcome=Outcome.NEEDS_DECISION, target="", hint="remove it")
    if given.value is None and reader.is_axolotl:
        return idle(usual, "it is empty")
    problem, value = "", None
    try:
        value = row.takes.parse(given.value, reader)
    except ConfigError as error:
        problem = f"; {error}"
    if not problem and (row.name in WITHOUT_EFFECT or _is_in_effect(setting, value, held)):
        return idle(usual, f"{reason}, and what it says held all the same")
    way = row.instead.get(reader, "")
    if row.name in _OF_SPEED:
        return _unread_prefetch(usual, reason, held.settings[setting], "" if reader.is_axolotl else way)
    if problem:
        return replace(open_, reason=reason + problem)
    if is_doubled:
        return replace(open_, reason=f"{reason}, and held", hint="as trained: remove it; as written: remove the other")
    how = f" (as {way})" if way else ""
    if reader is Reader.AXOLOTL_FSDP1 and row is SYNC_ROW:
        reason = "axolotl passes it on from 0.12 on; before"
    return replace(
        open_,
        reason=f"{reason}: the run went by {_word(held.settings[row.name])}",
        hint=f"as trained: remove it; as written: say it where it is read{how}",
    )


def _unread_prefetch(usual: Finding, reason: str, value: object, way: str) -> Finding:
    """A prefetch that was not read: the same numbers, at another speed, so that nothing is left to decide."""
    reason = f"{reason}: the run went by {_word(value)}; no number depends on it"
    hint = f"it is read as {way}" if way else ""
    return replace(usual, outcome=Outcome.APPROXIMATE, target="as it ran", reason=reason, hint=hint)


# Keys that change speed and memory only, so that the run is the same without them; each with the setting that it is.
_OF_SPEED = {
    "backward_prefetch": "backward_prefetch",
    "backward_prefetch_policy": "backward_prefetch",
    "forward_prefetch": "forward_prefetch",
}


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


def _is_in_effect(setting: str, value: Any, held: Held) -> bool:
    settings = held.settings
    if not isinstance(value, ShardingStrategy):
        return bool(value == settings[setting])
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
_IMPLICIT_CLIPPING = implicit("gradient clipping", Outcome.EXACT,
    "without a norm, or with auto, accelerate has DeepSpeed clip gradients to a norm of 1", value=1.0,
    target="gradient clipping")
_IMPLICIT_SYNC = implicit("gradient_sync", Outcome.EXACT,
    "of several microbatches a Trainer reduces gradients in the last one only, and holds unsharded ones until then",
    "gradient_sync: every spares that memory, and communicates more", target="gradient_sync: last")
# fmt: on


def _implicit_findings(held: Held) -> Iterator[Finding]:
    yield from (finding for applies, finding in _IMPLICIT if applies(held))
    yield from _implicit_wrapping(held)
    if accumulates(held):
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
