"""Replace parts of a Foundry model that need a GPU, other packages or weights, to build the model for ``plan``.

Parameters do not change, so the plan is that of the run. Each reason describes the effect on activations.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composer_fsdp2.config.findings import Finding, Origin, Outcome

_MISSING = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Substitute:
    """A value of a key that cannot be built here, and the value that replaces it.

    Args:
        key: The key below ``model``, with dots.
        models: Names of the Foundry models that have this key.
        default: The default of the key in these models.
        when: Called with the value; returns whether it must be replaced.
        instead: The new value; None removes the key.
        target: A description of the new value for the report.
    """

    key: str
    models: tuple[str, ...]
    when: Callable[[Any], bool]
    instead: Any
    reason: str
    default: Any = _MISSING
    target: str = ""
    hint: str = ""
    outcome: Outcome = Outcome.APPROXIMATE


_MPT, _HF = ("mpt_causal_lm",), ("hf_causal_lm", "hf_t5")
# Keys of megablocks' ``ffn_config`` that Foundry's own MoE layer accepts.
_FOUNDRY_MOE_KEYS = (
    *("ffn_hidden_size", "ffn_act_fn", "mlp_type", "moe_num_experts", "moe_top_k", "moe_jitter_eps"),
    *("moe_normalize_expert_weights", "uniform_expert_assignment"),
)
_FLASH = "the kernel needs flash-attn and a GPU"

# fmt: off
SUBSTITUTES: tuple[Substitute, ...] = (
    Substitute(key="attn_config.attn_impl", models=_MPT, default="flash", when=lambda value: value == "flash",
        instead="torch", target="torch's scaled_dot_product_attention",
        reason=f"{_FLASH}; the substitute stores the same for backward (queries, keys, values, the output and one "
        "number for each row), and no matrix of sequence by sequence"),
    Substitute(key="attn_config.rope_impl", models=_MPT, when=lambda value: value == "dail", instead="hf",
        target="rope_impl: hf", reason=f"{_FLASH}; its in-place rotation stores less than is counted"),
    Substitute(key="loss_fn", models=_MPT, default="fused_crossentropy", instead="torch_crossentropy",
        when=lambda value: value != "torch_crossentropy", target="a cross-entropy of the same memory",
        reason=f"{_FLASH}; the substitute stores the logits and a number for each token, and creates one gradient in "
        "the logits' dtype"),
    Substitute(key="fc_type", models=_MPT, when=lambda value: value == "te", instead="torch", target="fc_type: torch",
        reason="it needs Transformer Engine and a GPU; the weights are the same, and fp8 copies are not counted"),
    Substitute(key="ffn_config.ffn_type", models=_MPT, when=lambda value: value == "mb_dmoe", instead="torch_dmoe",
        target="ffn_type: torch_dmoe",
        reason="it needs megablocks and a GPU; the experts' weights are the same, each token's copies are computed one "
        "expert after the other, and the loss that balances experts is not counted"),
    Substitute(key="ffn_config.moe_world_size", models=_MPT, instead=None, outcome=Outcome.NEEDS_DECISION,
        when=lambda value: value not in (1, None), target="all experts on every rank",
        reason="megablocks' own expert parallelism is not planned here",
        hint="plan with ffn_type: torch_dmoe and fsdp_config.expert_parallel_degree"),
    Substitute(key="use_flash_attention_2", models=_HF, when=bool, instead=None,
        target="torch's scaled_dot_product_attention", reason=f"{_FLASH}; the substitute stores the same"),
    Substitute(key="attn_implementation", models=_HF, instead=None,
        when=lambda value: value not in (None, "eager", "sdpa"), target="transformers' default",
        reason=f"{_FLASH}; torch's scaled_dot_product_attention, where the model has it, keeps the same"),
    Substitute(key="pretrained", models=_HF, default=True, when=bool, instead=False, target="pretrained: false",
        outcome=Outcome.EXACT, reason="no weights are read: shapes and dtypes are those of the configuration"),
    Substitute(key="pretrained_lora_id_or_path", models=_HF, when=bool, instead=None, outcome=Outcome.NEEDS_DECISION,
        target="no adapter", reason="adapters that were trained before are not read", hint="give peft_config"),
    Substitute(key="load_in_8bit", models=_HF, when=bool, instead=None, outcome=Outcome.NEEDS_DECISION,
        target="the configuration's dtype", reason="8-bit weights are made on a GPU only"),
    Substitute(key="init_device", models=(*_MPT, *_HF), when=lambda value: value in ("mixed", "cpu"), default="cpu",
        instead="meta", target="init_device: meta", outcome=Outcome.EXACT,
        reason="no parameter has values here; on the ranks they are created as the file specifies"),
)
# fmt: on


def substituted(model: Mapping[str, Any]) -> tuple[dict[str, Any], list[Finding]]:
    """Return the model section with substitutes, and a finding for each replaced value."""
    given: dict[str, Any] = {key: dict(value) if isinstance(value, Mapping) else value for key, value in model.items()}
    findings, is_of_megablocks = [], (given.get("ffn_config") or {}).get("ffn_type") == "mb_dmoe"
    for row in (each for each in SUBSTITUTES if given["name"] in each.models):
        section, _, name = row.key.rpartition(".")
        values = (given.get(section) or {}) if section else given
        value, is_given = values.get(name, row.default), name in values
        if value is _MISSING or not row.when(value):
            continue
        if section:
            given[section] = values
        values[name] = row.instead
        if row.instead is None:
            del values[name]
        if is_given or row.outcome is not Outcome.EXACT:  # an exact substitute of a default is not reported
            findings.append(_finding(row, value, is_given))
    if is_of_megablocks:
        known = ("ffn_type", *_FOUNDRY_MOE_KEYS)
        given["ffn_config"] = {key: value for key, value in given["ffn_config"].items() if key in known}
    return given, findings


def _finding(row: Substitute, value: Any, is_given: bool) -> Finding:
    found = Finding(
        key=f"model.{row.key}",
        value=value,
        outcome=row.outcome,
        target=row.target,
        reason=row.reason,
        hint=row.hint,
    )
    return found if is_given else replace(found, origin=Origin.IMPLICIT)


def apply_substitutes(model: nn.Module, findings: Iterable[Finding]) -> None:
    """Make a built model allocate as much memory as the kernels that ``substituted`` replaced."""
    replaced = {finding.key for finding in findings}
    if replaced & {"model.use_flash_attention_2", "model.attn_implementation"}:
        for config in {id(config): config for config in _configs(model)}.values():
            config._attn_implementation = "sdpa"  # Foundry sets "eager" without flash attention
    for module in model.modules():
        if "model.attn_config.attn_impl" in replaced and hasattr(module, "attn_fn") and hasattr(module, "kv_n_heads"):
            module.attn_fn = _attention_like_flash  # type: ignore[assignment]
    if "model.loss_fn" in replaced:
        model.loss_fn = _FusedCrossEntropy()


def _configs(model: nn.Module) -> Iterator[Any]:
    """The configurations of transformers models that support torch's fused attention."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(module, "_supports_sdpa", False) and hasattr(config, "_attn_implementation"):
            yield config


class _FusedCrossEntropy(nn.Module):
    """A loss that allocates as much memory as flash-attn's kernel with ``reduction="none"``: no logits are stored in
    fp32."""

    ignore_index = nn.CrossEntropyLoss().ignore_index  # Foundry's loss counts the other tokens

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        losses: Tensor = _CrossEntropy.apply(logits, targets)
        return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        losses, logarithms, _ = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(3))
        ctx.save_for_backward(logits, logarithms, targets)
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.empty_like(ctx.saved_tensors[0]), None


def _attention_like_flash(
    query: Tensor, key: Tensor, value: Tensor, n_heads: int, kv_n_heads: int, *args: Any, **kwargs: Any
) -> tuple[Tensor, None, None]:
    """Replaces MPT's attention function.

    Ignores masks and ALiBi, which flash attention applies without allocating memory.
    """
    queries, keys, values = (
        each.unflatten(-1, (number, -1)).transpose(1, 2)  # b, heads, s, d
        for each, number in ((query, n_heads), (key, kv_n_heads), (value, kv_n_heads))
    )
    if kv_n_heads != n_heads:
        keys, values = (each.repeat_interleave(n_heads // kv_n_heads, dim=1) for each in (keys, values))
    attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    return attended.transpose(1, 2).flatten(-2), None, None
