"""Composer and LLM Foundry: ``fsdp_config``, ``parallelism_config.fsdp``; FSDP1's keys in, FSDP2's out."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from composer_fsdp2.compat.dialects.base import (
    Expression,
    Frame,
    MappingEdit,
    Part,
    Path,
    Reading,
    Run,
    Section,
    Wrap,
    WrapKind,
)
from composer_fsdp2.compat.dialects.composer_effects import (
    around_of,
    clipping_of,
    effects_of,
    findings_beside,
    unsaid_findings,
)
from composer_fsdp2.compat.dialects.composer_words import express
from composer_fsdp2.config import BackwardPrefetch, MeshSpec, ShardingStrategy
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.findings import Finding, Outcome
from composer_fsdp2.fsdp1.keys import KEYS_BY_NAME, nearest_key
from composer_fsdp2.fsdp1.translate import translate
from composer_fsdp2.fsdp1.values import PRECISIONS, parse_backward_prefetch, parse_strategy

__all__ = ["ComposerDialect"]

# Composer's default for a GPU, on which nearly all of these files were trained.
DEFAULT_PRECISION = "amp_bf16"
# What Composer called them until 0.12 (composer/trainer/trainer.py, 0.13.5).
OLD_PRECISIONS = {"fp16": "amp_fp16", "amp": "amp_fp16", "bf16": "amp_bf16"}


class ComposerDialect:
    """See the module."""

    name = "composer"

    def sections(self, values: Mapping[str, Any]) -> list[Path]:
        return list(_sections(values, ()))

    def read(self, section: Section) -> Reading:
        unknown = [_unknown(section, name) for name in section.said if name not in KEYS_BY_NAME]
        known = {name: value for name, value in section.said.items() if name in KEYS_BY_NAME}
        precision, problem = _precision(section)
        beside = [*([problem] if problem else []), *findings_beside(section)]
        effects = effects_of(section)
        try:
            translation = translate(known, precision=precision, device="cpu")
            effective = translate(
                known | {name: value for name, (value, _) in effects.items()}, precision=precision, device="cpu"
            )
        except ConfigError as error:
            return Reading(run=None, findings=(*_contradictions(known, precision, error), *unknown, *beside))
        findings = [_with_effect(finding, effects) for finding in translation.findings]
        findings += [*unknown, *beside, *unsaid_findings(section)]
        if unknown or problem or effective.config is None:
            return Reading(run=None, findings=tuple(findings))
        run = Run(
            config=effective.config,
            wrap=Wrap(kind=WrapKind.HOOKS),
            state_dict_type=known.get("state_dict_type") or "full",
            extras=dict(_extras(section)),
        )
        return Reading(run=run, findings=tuple(findings), parts=_PARTS)

    def express(self, run: Run) -> Expression:
        """As an ``fsdp_config`` under the shim. Classes to wrap live in the model's code, so they are a decision."""
        return express(run)

    def rewrite(self, section: Section, reading: Reading) -> list[MappingEdit]:
        """FSDP2's words for FSDP1's, in place; what only composer_fsdp2 has a form for keeps its name."""
        replacements = {}
        for name, value in section.said.items():
            new = _REWRITES[name](section.said, value) if name in _REWRITES else [(name, value)]
            if new != [(name, value)]:
                replacements[name] = new
        return [MappingEdit(path=section.path, replacements=replacements)] if replacements else []

    def own_findings(self, reading: Reading) -> tuple[Finding, ...]:
        """The reading's: it is about this very target."""
        return reading.findings

    def frame(self, section: Section) -> Frame:
        """``parallelism_config`` goes as a whole, if sharding is all that it has."""
        holder = section.around
        for key in section.path[:-1]:
            holder = holder[key]  # type: ignore[index]
        is_alone = section.path[-2:-1] == ("parallelism_config",) and len(holder) == 1
        return Frame(entry=section.path[:-1] if is_alone else section.path, inner=section.path)


def _sections(values: Any, path: Path) -> Iterator[Path]:
    if isinstance(values, list):
        for number, each in enumerate(values):
            yield from _sections(each, (*path, number))
    if not isinstance(values, Mapping):
        return
    for key, value in values.items():
        is_section = (key == "fsdp_config" and not _is_hugging_face(values)) or (
            path[-1:] == ("parallelism_config",) and key in ("fsdp", "fsdp2")
        )
        if is_section and isinstance(value, Mapping):
            yield (*path, key)
        else:
            yield from _sections(value, (*path, key))


def _is_hugging_face(values: Mapping[str, Any]) -> bool:
    """Whether a mapping with an ``fsdp_config`` is a Trainer's arguments, or accelerate's configuration."""
    settings = values["fsdp_config"]
    has_prefixes = isinstance(settings, Mapping) and any(str(key).startswith("fsdp_") for key in settings)
    return "fsdp" in values or "distributed_type" in values or has_prefixes


def _precision(section: Section) -> tuple[str, Finding | None]:
    """Said beside the section or above it; a finding if that is no precision."""
    said = around_of(section).get("precision", DEFAULT_PRECISION)
    said = said.lower() if isinstance(said, str) else said
    if said in PRECISIONS:
        return said, None
    finding = Finding(
        key="precision",
        value=said,
        outcome=Outcome.NEEDS_DECISION,
        target="",
        reason="mixed_precision goes by it, and it is no precision of Composer's",
        hint=f"say {OLD_PRECISIONS[said]}" if said in OLD_PRECISIONS else f"say one of {', '.join(PRECISIONS)}",
    )
    return DEFAULT_PRECISION, finding


def _extras(section: Section) -> Iterator[tuple[str, Any]]:
    if section.said.get("async_save"):
        yield "async_save", True
    clipping = clipping_of(section)
    if clipping.get("clipping_type") == "norm" and "clipping_threshold" in clipping:
        yield "max_grad_norm", clipping["clipping_threshold"]


def _unknown(section: Section, name: str) -> Finding:
    near = nearest_key(str(name))
    return Finding(
        key=str(name),
        value=section.said[name],
        outcome=Outcome.NEEDS_DECISION if near else Outcome.UNSUPPORTED,
        target="",
        reason="no version of Composer knew this key; FSDPConfig took it and did nothing with it",
        hint=f"did you mean {near}?" if near else "remove it",
    )


def _with_effect(finding: Finding, effects: Mapping[str, tuple[Any, str]]) -> Finding:
    if finding.key not in effects:
        return finding
    value, reason = effects[finding.key]
    return dataclasses.replace(finding, target=f"{finding.key}: {str(value).lower()}", reason=reason)


def _contradictions(known: Mapping[str, Any], precision: str, error: ConfigError) -> list[Finding]:
    """A finding for each key: its own where it can be read alone, else what is wrong with it, or with all together."""
    findings: list[Finding] = []
    is_told = False
    for name, value in known.items():
        try:
            findings += translate({name: value, "strict": False}, precision=precision, device="cpu").findings[:1]
        except ConfigError as own:
            is_told = True
            findings.append(_wrong(name, value, str(own)))
    if not is_told:  # each key is right, and they contradict each other
        told = [finding.key for finding in findings if finding.key in str(error)] or [each.key for each in findings]
        findings = [
            _wrong(finding.key, finding.value, str(error)) if finding.key == told[0] else finding
            for finding in findings
        ]
    return findings


def _wrong(name: str, value: Any, reason: str) -> Finding:
    return Finding(key=name, value=value, outcome=Outcome.NEEDS_DECISION, target="", reason=reason)


_PARTS = {
    "sharding_strategy": Part.RESHARD,
    "reshard_after_forward": Part.RESHARD,
    "data_parallel_shard_degree": Part.MESH,
    "data_parallel_replicate_degree": Part.MESH,
    "process_group": Part.MESH,
    "mixed_precision": Part.PRECISION,
    "mp_policy": Part.PRECISION,
    "cpu_offload": Part.OFFLOAD,
    "offload_policy": Part.OFFLOAD,
    "activation_checkpointing": Part.CHECKPOINTING,
    "backward_prefetch": Part.BACKWARD_PREFETCH,
    "forward_prefetch": Part.FORWARD_PREFETCH,
    "gradient_sync": Part.GRADIENT_SYNC,
    "async_save": Part.ASYNC_SAVE,
    "sync_module_states": Part.SYNC,
    "state_dict_type": Part.STATE_DICT,
}


# ---------------------------------------------------------------------------------------------------------------------
# In place

Said = Mapping[str, Any]
Entries = list[tuple[str, Any]]


def _drop(said: Said, value: Any) -> Entries:
    return []


def _kept_unless(name: str, neutral: object) -> Callable[[Said, Any], Entries]:
    def kept(said: Said, value: Any) -> Entries:
        return [] if value == neutral else [(name, value)]

    return kept


def _strategy(said: Said, value: Any) -> Entries:
    strategy = parse_strategy(value)
    reshard: Entries = (
        [] if "reshard_after_forward" in said else [("reshard_after_forward", strategy.reshards_after_forward)]
    )
    if strategy is ShardingStrategy.NO_SHARD:
        if said.get("process_group") is not None:
            return [("sharding_strategy", value)]
        mesh = MeshSpec(
            shard=said.get("data_parallel_shard_degree", -1), replicate=said.get("data_parallel_replicate_degree")
        ).without_shards()
        return [
            ("data_parallel_shard_degree", mesh.shard),
            ("data_parallel_replicate_degree", mesh.replicate),
            *reshard,
        ]
    return reshard


def _degree(name: str, neutral: object) -> Callable[[Said, Any], Entries]:
    def kept(said: Said, value: Any) -> Entries:
        if parse_strategy(said.get("sharding_strategy", "FULL_SHARD")) is ShardingStrategy.NO_SHARD:
            return [(name, value)] if said.get("process_group") is not None else []
        return [] if value == neutral else [(name, value)]

    return kept


def _sync(said: Said, value: Any) -> Entries:
    # Without the key load_monolith_rank0_only asks for it.
    return [("sync_module_states", value)] if value or said.get("load_monolith_rank0_only") else []


def _backward_prefetch(said: Said, value: Any) -> Entries:
    return [("backward_prefetch", value)] if parse_backward_prefetch(value) is BackwardPrefetch.NONE else []


# By key, what comes in its place; every other key keeps its name and value.
_REWRITES: dict[str, Callable[[Said, Any], Entries]] = {
    "sharding_strategy": _strategy,
    "data_parallel_shard_degree": _degree("data_parallel_shard_degree", -1),
    "data_parallel_replicate_degree": _degree("data_parallel_replicate_degree", None),
    "backward_prefetch": _backward_prefetch,
    "backward_prefetch_limit": _kept_unless("backward_prefetch_limit", 1),
    "forward_prefetch": _kept_unless("forward_prefetch", False),
    "forward_prefetch_limit": _kept_unless("forward_prefetch_limit", 1),
    "cpu_offload": _kept_unless("cpu_offload", False),
    "sync_module_states": _sync,
    "keep_low_precision_grads": _kept_unless("keep_low_precision_grads", False),
    "ignored_modules": _kept_unless("ignored_modules", None),
    "process_group": _kept_unless("process_group", None),
    "te_checkpoint_wrapper": _kept_unless("te_checkpoint_wrapper", False),
    "te_shard_fp8_weight": _kept_unless("te_shard_fp8_weight", False),
    "auto_wrap": _kept_unless("auto_wrap", True),
    "min_params": _drop,
    "flatten_parameters": _drop,
    "load_fsdp_monolith_rank0_only": _drop,
    "limit_all_gathers": _drop,
    "use_orig_params": _drop,
}
