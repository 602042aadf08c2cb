"""What Composer and LLM Foundry made of an ``fsdp_config``, beyond its keys: what stands elsewhere in the file and
changed it, and what FSDP1 did without being told. Composer 0.32.1, LLM Foundry 0.22.0.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from composer_fsdp2.compat.dialects.base import Section
from composer_fsdp2.findings import ASKS_FOR_NOTHING, Finding, Outcome

__all__ = [
    "BESIDE",
    "PLAIN_COMPOSER",
    "Beside",
    "around_of",
    "clipping_of",
    "effects_of",
    "findings_beside",
    "unsaid_findings",
]

Said = Mapping[str, Any]


def around_of(section: Section) -> Mapping[str, Any]:
    """The mapping that the section lies in, with what it inherits from those around it; a Trainer's other arguments."""
    values: Any = section.around
    found = dict(values)
    for key in section.path[:-1]:
        values = values[key]
        if isinstance(values, Mapping):
            found |= values
    return found


# ---------------------------------------------------------------------------------------------------------------------
# LLM Foundry


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A key that LLM Foundry sets whatever the section says, if ``applies``.

    Source: ``process_init_device`` in llmfoundry/utils/config_utils.py, ``validate_config`` in
    llmfoundry/command_utils/train.py.
    """

    key: str
    applies: Callable[[Mapping[str, Any], Said], bool]
    value: Callable[[Said], Any]
    reason: str


_SMALL = ("bf16", "fp16", "float16", "bfloat16", "amp_fp16", "amp_bf16")


def _uses_te(model: Mapping[str, Any], said: Said) -> bool:
    feed_forward = model.get("ffn_config")
    kind = feed_forward.get("ffn_type", "") if isinstance(feed_forward, Mapping) else ""
    is_te = model.get("fc_type", "torch") == "te" or "te" in str(kind)
    return is_te and said.get("activation_checkpointing") is True and said.get(_REENTRANT) is True


_REENTRANT = "activation_checkpointing_reentrant"
EFFECTS: tuple[Effect, ...] = (
    Effect(
        key="sync_module_states",
        applies=lambda model, said: model.get("init_device") == "mixed" and not said.get("sync_module_states"),
        value=lambda said: True,
        reason="LLM Foundry sets it to true, since the model is created on rank 0 only (init_device: mixed)",
    ),
    Effect(
        key="load_monolith_rank0_only",
        applies=lambda model, said: model.get("init_device") == "mixed" and "load_monolith_rank0_only" not in said,
        value=lambda said: True,
        reason="LLM Foundry sets it to true, since the model is created on rank 0 only (init_device: mixed)",
    ),
    Effect(
        key=_REENTRANT,
        applies=_uses_te,
        value=lambda said: False,
        reason="LLM Foundry sets it to false for Transformer Engine's layers",
    ),
    Effect(
        key="mixed_precision",
        applies=lambda model, said: bool(said) and model.get("master_weights_dtype") in _SMALL,
        value=lambda said: (
            {"param_dtype": None}
            | {
                name: said["mixed_precision"].get(name) if isinstance(said.get("mixed_precision"), Mapping) else None
                for name in ("reduce_dtype", "buffer_dtype")
            }
        ),
        reason="LLM Foundry takes the dtypes of master_weights_dtype, and of this key at most reduce_dtype and "
        "buffer_dtype",
    ),
)


def _is_llm_foundrys(section: Section) -> bool:
    model = around_of(section).get("model")
    return isinstance(model, Mapping) and "name" in model


def effects_of(section: Section) -> dict[str, tuple[Any, str]]:
    """What LLM Foundry sets, by key, each with why; nothing in a file that is none of its."""
    if not _is_llm_foundrys(section):
        return {}
    model = around_of(section)["model"]
    return {
        effect.key: (effect.value(section.said), effect.reason)
        for effect in EFFECTS
        if effect.applies(model, section.said)
    }


# ---------------------------------------------------------------------------------------------------------------------
# Keys beside the section


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """An argument of Composer's Trainer, or a key of LLM Foundry's, that stands beside the section.

    Which releases took it was read in the Trainer's signature of mosaicml 0.11 to 0.32.1.

    Args:
        neutral: Values that ask for nothing, beside null.
    """

    key: str
    outcome: Outcome
    reason: str
    hint: str = ""
    neutral: tuple[Any, ...] = ()


_TENSOR_PARALLEL = Beside(
    key="tp_config",
    outcome=Outcome.UNSUPPORTED,
    reason="composer_fsdp2 has no tensor parallelism",
    hint="without it the run needs more memory a rank; Composer 0.32.1's FSDP2 fails with it if there is an optimizer",
)
BESIDE: tuple[Beside, ...] = (
    _TENSOR_PARALLEL,
    Beside(
        key="deepspeed_config",
        outcome=Outcome.UNSUPPORTED,
        reason="DeepSpeed instead of FSDP; Composer's Trainer has had no such argument since 0.28",
        hint="remove it; its ZeRO stage 3 is sharding_strategy FULL_SHARD, stage 2 SHARD_GRAD_OP",
    ),
    Beside(
        key="fsdp_auto_wrap",
        outcome=Outcome.NEEDS_DECISION,
        reason="the script wrapped the model itself (Composer's Trainer took it from 0.14 to 0.25)",
        hint="remove it, and the Trainer shards the model; or let the script call prepare_fully_shard before",
        neutral=(True,),
    ),
    Beside(
        key="grad_accum",
        outcome=Outcome.NEEDS_DECISION,
        reason="Composer's Trainer has had no such argument since 0.14",
        hint="device_train_microbatch_size: the batch of one rank divided by it",
    ),
)


def findings_beside(section: Section) -> Iterator[Finding]:
    """For what stands beside the section and decides about parallelism, too."""
    around = around_of(section)
    for row in BESIDE:
        value = around.get(row.key)
        if value is not None and value != {}:
            yield _beside(row, row.key, value)
    is_alone = section.path[-2:-1] == ("parallelism_config",)
    if is_alone and (value := around.get("tp")):
        yield _beside(_TENSOR_PARALLEL, "tp", value)


def _beside(row: Beside, key: str, value: Any) -> Finding:
    shown = dict(value) if isinstance(value, Mapping) else value
    if value in row.neutral:
        return Finding(key=key, value=shown, outcome=Outcome.UNNEEDED, target="", reason=ASKS_FOR_NOTHING)
    return Finding(key=key, value=shown, outcome=row.outcome, target="", reason=row.reason, hint=row.hint)


# ---------------------------------------------------------------------------------------------------------------------
# What no key says


def unsaid_findings(section: Section) -> Iterator[Finding]:
    """What FSDP1 did without being told, and FSDP2 does otherwise by itself, with what keeps it or compensates."""
    said = section.said
    if section.path[-1:] == ("fsdp_config",) and not _is_llm_foundrys(section):
        yield _unsaid(
            "parallelism_config",
            "fsdp_config",
            "parallelism_config={'fsdp': ...}",
            Outcome.UNNEEDED,
            "Composer's Trainer has taken no argument fsdp_config since 0.26; a script hands the section over in "
            "parallelism_config, LLM Foundry does so by itself",
        )
    for name, (value, reason) in effects_of(section).items():
        if name not in said:
            yield _unsaid(name, value, f"{name}: {str(value).lower()}", Outcome.EXACT, reason)
    if "backward_prefetch" not in said and "reshard_after_forward" not in said:
        yield _unsaid(
            "backward_prefetch",
            "BACKWARD_POST",
            "FSDP2's own prefetch",
            Outcome.APPROXIMATE,
            "FSDP2 gathers the next unit before a unit's gradients, FSDP1 by default after: the same numbers, one more "
            "unit in memory at the peak",
            "backward_prefetch: NONE spares it, at the price of speed",
        )
    if said.get("mixed_precision", "DEFAULT") != "FULL":
        yield _unsaid(
            "casting of inputs and buffers",
            "",
            "inputs cast at roots only, buffers cast",
            Outcome.EXACT,
            "as FSDP1 did; FSDP2 by itself casts each unit's inputs, and no buffer, which plain Composer leaves so",
        )
    if "state_dict_type" not in said:
        yield _unsaid(
            "state_dict_type",
            "full",
            "state_dict_type: full",
            Outcome.EXACT,
            "checkpoints are whole ones, as FSDP1's were by default; plain Composer's FSDP2 saves sharded ones",
            "say state_dict_type: full to have it there, too",
        )
    yield _unsaid(
        "wrapping",
        "",
        "the model's fsdp_wrap_fn, _fsdp_wrap and activation_checkpointing_fn",
        Outcome.EXACT,
        "the same modules become units, each around its own checkpointing as under FSDP1; plain Composer puts the "
        "checkpointing outside",
    )
    if clipping_of(section).get("clipping_type") == "value":
        yield _unsaid(
            "clipping by value",
            "clipping_type: value",
            "scaled by the largest absolute value",
            Outcome.EXACT,
            "as under FSDP1; plain Composer's FSDP2 clips each element instead",
            "clipping_type: norm is the same everywhere",
        )


def clipping_of(section: Section) -> Mapping[str, Any]:
    """The arguments of Composer's gradient clipping, as LLM Foundry takes them; empty if there is none."""
    algorithms = around_of(section).get("algorithms")
    clipping = algorithms.get("gradient_clipping") if isinstance(algorithms, Mapping) else None
    return clipping if isinstance(clipping, Mapping) else {}


def _unsaid(name: str, value: Any, target: str, outcome: Outcome, reason: str, hint: str = "") -> Finding:
    return Finding(key=f"(unsaid) {name}", value=value, outcome=outcome, target=target, reason=reason, hint=hint)


# ---------------------------------------------------------------------------------------------------------------------
# Composer without the shim

_IGNORED = "plain Composer 0.32.1 ignores it under FSDP2, with a warning"
PLAIN_COMPOSER: Mapping[str, str] = {
    # What FSDP2Config has (composer/utils/parallelism.py); every other key is dropped.
    "activation_checkpointing": "plain Composer 0.32.1 reads it as well, and wraps the other way round",
    "activation_cpu_offload": "plain Composer 0.32.1 reads it as well",
    "load_monolith_rank0_only": "plain Composer 0.32.1 reads it as well",
    "mixed_precision": "plain Composer 0.32.1 reads it as well, without the buffers, and casts the inputs of all units",
    "reshard_after_forward": "plain Composer 0.32.1 reads it as well",
    "state_dict_type": "plain Composer 0.32.1 reads it as well; its own default is sharded",
    "verbose": "plain Composer 0.32.1 reads it as well",
    # The Trainer's own, beside the section.
    "precision": "plain Composer 0.32.1 reads it as well",
    # What is lost there is more than a word.
    "activation_checkpointing_reentrant": f"{_IGNORED}: it never reenters",
    "data_parallel_replicate_degree": f"{_IGNORED}: it shards over all ranks, without replicas",
    "data_parallel_shard_degree": f"{_IGNORED}: it shards over all ranks",
    "process_group": f"{_IGNORED}: it shards over all ranks",
    "cpu_offload": f"{_IGNORED}: parameters stay on the GPU",
    "sync_module_states": f"{_IGNORED}: ranks that were initialized differently train different models",
    "sharding_strategy": f"{_IGNORED}: it shards fully",
    "ignored_modules": f"{_IGNORED}: all modules are sharded",
    "keep_low_precision_grads": f"{_IGNORED}: gradients have their parameters' dtype",
    "": _IGNORED,
}
