"""Keys of a section that LLM Foundry sets itself, regardless of the file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from composer_fsdp2.config.findings import Finding, Origin
from composer_fsdp2.migration.dialect import Section
from composer_fsdp2.migration.dialects.composer.surroundings import Given, around_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _FoundryRule:
    """A key that LLM Foundry sets itself, if ``applies`` to the model's section and this one.

    Source: ``process_init_device`` in llmfoundry/utils/config_utils.py, ``validate_config`` in
    llmfoundry/command_utils/train.py.
    """

    key: str
    applies: Callable[[Given, Given], bool]
    value: Callable[[Given], Any]
    reason: str


_SMALL = ("bf16", "fp16", "float16", "bfloat16", "amp_fp16", "amp_bf16")
REENTRANT = "activation_checkpointing_reentrant"


def _lacks_sync(model: Given, given: Given) -> bool:
    return model.get("init_device") == "mixed" and not given.get("sync_module_states")


def _lacks_monolith(model: Given, given: Given) -> bool:
    return model.get("init_device") == "mixed" and "load_monolith_rank0_only" not in given


def _uses_te(model: Given, given: Given) -> bool:
    feed_forward = model.get("ffn_config")
    kind = feed_forward.get("ffn_type", "") if isinstance(feed_forward, Mapping) else ""
    is_te = model.get("fc_type", "torch") == "te" or "te" in str(kind)
    return is_te and given.get("activation_checkpointing") is True and given.get(REENTRANT) is True


def _has_small_weights(model: Given, given: Given) -> bool:
    return bool(given) and model.get("master_weights_dtype") in _SMALL


def _master_weights(given: Given) -> dict[str, Any]:
    asked = given.get("mixed_precision")
    dtypes = asked if isinstance(asked, Mapping) else {}
    return {"param_dtype": None} | {name: dtypes.get(name) for name in ("reduce_dtype", "buffer_dtype")}


_MIXED_INIT = "LLM Foundry sets it to true, since the model is created on rank 0 only (init_device: mixed)"
# fmt: off
_FOUNDRY: tuple[_FoundryRule, ...] = (
    _FoundryRule(key="sync_module_states", applies=_lacks_sync, value=lambda given: True, reason=_MIXED_INIT),
    _FoundryRule(key="load_monolith_rank0_only", applies=_lacks_monolith, value=lambda given: True, reason=_MIXED_INIT),
    _FoundryRule(key=REENTRANT, applies=_uses_te, value=lambda given: False,
        reason="LLM Foundry sets it to false for Transformer Engine's layers"),
    _FoundryRule(key="mixed_precision", applies=_has_small_weights, value=_master_weights,
        reason="LLM Foundry takes the dtypes of master_weights_dtype, and of this key at most reduce_dtype and "
        "buffer_dtype"),
)
# fmt: on


def foundrys(around: Given) -> Given | None:
    """Return the model's section of an LLM Foundry file; None for other files."""
    model = around.get("model")
    return model if isinstance(model, Mapping) and "name" in model else None


def set_by_foundry_in(section: Section) -> dict[str, tuple[Any, str]]:
    """Return the values that LLM Foundry sets and the reasons, by key; empty for files of other systems."""
    model, given = foundrys(around_of(section)), section.given
    rules = [] if model is None else [rule for rule in _FOUNDRY if rule.applies(model, given)]
    return {rule.key: (rule.value(given), rule.reason) for rule in rules}


def with_foundrys(finding: Finding, by_foundry: Mapping[str, tuple[Any, str]]) -> Finding:
    if finding.key not in by_foundry or finding.origin is not Origin.KEY:
        return finding
    value, reason = by_foundry[finding.key]
    return replace(finding, target=f"{finding.key}: {str(value).lower()}", reason=reason)
