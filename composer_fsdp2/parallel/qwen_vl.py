"""Context parallelism for Qwen2.5-VL of transformers up to 4.51, whose attention does not use the attention interface.

The vision tower and the token embeddings compute full sequences, so image features are at the positions of their tokens
on every rank. See [Note: divided layers].
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from composer_fsdp2.parallel.adapters import AttentionFacts, ModelAdapter
from composer_fsdp2.parallel.divided_layers import DividedLayers
from composer_fsdp2.parallel.hugging_face import refuse_arguments, refuse_generation
from composer_fsdp2.training.context import IGNORED_LABEL, ContextGroup

_CLASS, _FILE = "Qwen2_5_VLForConditionalGeneration", "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl"


def _is_qwen_vl(module: Any) -> bool:
    names = {(cls.__module__, cls.__name__) for cls in type(module).__mro__}
    return (_FILE, _CLASS) in names and hasattr(getattr(module, "model", None), "_update_causal_mask")


def _attentions(model: Any) -> Mapping[str, AttentionFacts]:
    modules = {f"model.layers.{number}.self_attn": each.self_attn for number, each in enumerate(model.model.layers)}
    return {
        path: AttentionFacts(num_heads=module.num_heads, dropout=module.attention_dropout)
        for path, module in modules.items()
    }


def _problems(model: Any) -> Iterator[str]:
    config = model.config
    if (name := config._attn_implementation) not in ("eager", "sdpa"):
        yield f"its attention is {name!r}, which was not tested; give the model attn_implementation: sdpa"


def _start(whole: nn.Module, model: Any, attentions: Sequence[Any], group: ContextGroup) -> Callable[[], None]:
    paths = tuple(f"model.layers.{number}" for number in range(len(model.model.layers)))
    layers = DividedLayers(name=f"{_CLASS}.model.layers", layers=paths, group=group)
    for module in attentions:
        module.forward = functools.partial(_attend, module, layers)
    group.divides_losses = group.divides_losses and type(model).forward.__module__ == _FILE
    model.forward = _model_forward(model, group)
    model.generate = functools.partial(refuse_generation, "generate")
    return functools.partial(layers.connect, model)


def _model_forward(model: Any, group: ContextGroup) -> Callable[..., Any]:
    """Make the model's forward. With labels, it returns this rank's part of the loss and logits."""
    forward, signature = model.forward, inspect.signature(model.forward)

    @functools.wraps(forward)
    def forward_of_part(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments | {"use_cache": False}
        refuse_arguments(given, "past_key_values", "output_attentions", "output_hidden_states")
        if given.get("labels") is None or not group.divides_losses:
            return forward(**given)
        labels = group.shifted_labels(given.pop("labels"))
        with group.returning_parts():
            output = forward(**given | {"return_dict": True})
        logits = output["logits"].to(torch.promote_types(output["logits"].dtype, torch.float32))
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
        others = {name: value for name, value in output.items() if name not in ("loss", "logits")}
        return type(output)(loss=total / group.items(labels, logits.dtype), logits=logits, **others)

    return forward_of_part


def _attend(
    module: Any,
    layers: DividedLayers,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    past_key_value: None = None,
    position_embeddings: Any = None,
    **others: Any,
) -> tuple[torch.Tensor, None, None]:
    """The forward of an attention module. The mask is of the full sequences, the other tensors of this rank's part."""
    projections = (module.q_proj, module.k_proj, module.v_proj)
    query, key, value = (
        each(hidden_states).unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for each in projections
    )
    rotated = sys.modules[_FILE].apply_multimodal_rotary_pos_emb
    query, key = rotated(query, key, *position_embeddings, module.rope_scaling["mrope_section"])
    output = layers.exchanged(_attend_causal, attention_mask, query, key, value, dim=2)
    return module.o_proj(output.transpose(1, 2).flatten(2)), None, None


def _attend_causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)


QWEN_VL = ModelAdapter(
    name="Qwen2.5-VL of transformers up to 4.51",
    matches=_is_qwen_vl,
    attentions=_attentions,
    problems=_problems,
    start=_start,
)
