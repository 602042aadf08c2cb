"""Qwen2.5-VL of transformers up to 4.51 on a part of its sequences: its attention goes through no interface there.

The tower and the token embeddings compute whole rows, so that images lie where their tokens are, whichever part these
fall into; the layers get this rank's part of what comes of them, with its places in three dimensions. Each rank's loss
is over its part, so that the tower's gradients are those of all parts together.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from composer_fsdp2.errors import UnsupportedError
from composer_fsdp2.parallel.attention import KEY, AttentionFacts, KnownModel
from composer_fsdp2.parallel.causal_lm import (
    problems_of_losses,
    problems_of_rotations,
    refuse_generation,
)
from composer_fsdp2.parallel.padding import Padding, attend_padded, mask_of_rows
from composer_fsdp2.training.context import IGNORED_LABEL, ContextGroup

_CLASS, _FILE = "Qwen2_5_VLForConditionalGeneration", "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl"


def _is_qwen_vl(module: Any) -> bool:
    names = {(cls.__module__, cls.__name__) for cls in type(module).__mro__}
    return (_FILE, _CLASS) in names and hasattr(getattr(module, "model", None), "_update_causal_mask")


def _attentions(model: Any) -> Mapping[str, AttentionFacts]:
    return {
        f"model.layers.{number}.self_attn": _facts(layer.self_attn) for number, layer in enumerate(model.model.layers)
    }


def _facts(module: Any) -> AttentionFacts:
    return AttentionFacts(num_heads=module.num_heads, dropout=module.attention_dropout)


def _problems(model: Any) -> Iterator[str]:
    config = model.config
    if (name := config._attn_implementation) not in ("eager", "sdpa"):
        yield f"its attention is {name!r}, which was not tested; give the model attn_implementation: sdpa"
    if config.use_sliding_window:
        yield "a sliding window was not tested; set use_sliding_window: false in the model's configuration"
    yield from problems_of_rotations(model)
    yield from problems_of_losses(model)


def _start(whole: nn.Module, model: Any, attentions: Sequence[Any], group: ContextGroup) -> None:
    text = model.model
    text._update_causal_mask = lambda mask, *others: mask
    text.forward = _layers_of_part(text, group)
    for module in attentions:
        module.forward = functools.partial(_attend, module, group)
    model.forward = _forward_of_part(model, group)
    model.generate = functools.partial(refuse_generation, "generate")


# ---------------------------------------------------------------------------------------------------------------------
# From whole rows to parts

# Of the batch that the model computes now: its layers see no labels.
_PADDING: ContextVar[Padding] = ContextVar("padding")


def _forward_of_part(model: Any, group: ContextGroup) -> Callable[..., Any]:
    """The model's forward for whole rows; its logits and its loss are those of this rank's part."""
    forward, signature = model.forward, inspect.signature(model.forward)

    @functools.wraps(forward)
    def of_part(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        _refuse_arguments(given)
        labels = given.pop("labels", None)
        _PADDING.set(Padding.of(given.get("attention_mask"), labels))
        output = forward(**given | {"use_cache": False, "return_dict": True})
        if labels is None:
            return output
        labels = group.shifted_labels(labels)
        logits = output["logits"].to(torch.promote_types(output["logits"].dtype, torch.float32))
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
        others = {name: value for name, value in output.items() if name not in ("loss", "logits")}
        return type(output)(loss=total / group.items(labels, logits.dtype), logits=logits, **others)

    return of_part


def _refuse_arguments(given: Mapping[str, Any]) -> None:
    """Raise for what would be wrong of a part: on all ranks, as they have the same batch."""
    if given.get("past_key_values") is not None or given.get("cache_position") is not None:
        refuse_generation("a forward with past_key_values")
    mask = given.get("attention_mask")
    problems = ["output_attentions is of whole rows"] if given.get("output_attentions") else []
    if isinstance(mask, torch.Tensor) and mask.dim() != 2:
        problems.append(f"attention_mask has {mask.dim()} dimensions, where (rows, places) is understood")
    if problems:
        raise UnsupportedError("\n".join(f"{KEY}: {text}; leave it out" for text in problems), keys=(KEY,))


def _layers_of_part(text: Any, group: ContextGroup) -> Callable[..., Any]:
    """The forward of the layers for what comes of whole rows, texts and images."""
    forward = text.forward

    @functools.wraps(forward)
    def of_part(*, inputs_embeds: torch.Tensor, position_ids: Any, attention_mask: Any = None, **others: Any) -> Any:
        rows = group.padded(inputs_embeds, 1, 0)
        return forward(
            inputs_embeds=group.part(rows),
            position_ids=group.part(group.padded(position_ids, position_ids.dim() - 1, 0), position_ids.dim() - 1),
            attention_mask=mask_of_rows(attention_mask, _PADDING.get(), "sdpa", rows.shape[1], rows.device),
            **others,
        )

    return of_part


# ---------------------------------------------------------------------------------------------------------------------
# Attention


def _attend(
    module: Any,
    group: ContextGroup,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    past_key_value: None = None,
    position_embeddings: Any = None,
    **others: Any,
) -> tuple[torch.Tensor, None, None]:
    """An attention module's forward; the mask is of whole rows, the rest of this rank's part."""
    projections = (module.q_proj, module.k_proj, module.v_proj)
    query, key, value = (
        each(hidden_states).unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for each in projections
    )
    rotated = sys.modules[_FILE].apply_multimodal_rotary_pos_emb
    query, key = rotated(query, key, *position_embeddings, module.rope_scaling["mrope_section"])
    query, key, value = group.to_heads((query, key, value), 1, 2)
    output = attend_padded(_attend_causal, attention_mask, query, key, value, dim=2)
    return module.o_proj(group.to_sequence(output, 1, 2).transpose(1, 2).flatten(2)), None, None


def _attend_causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)


QWEN_VL = KnownModel(
    name="Qwen2.5-VL of transformers up to 4.51",
    is_one=_is_qwen_vl,
    attentions=_attentions,
    problems=_problems,
    start=_start,
)
