"""Small float64 versions of transformers' own models, for its releases 4.51 and 5.

Does not need Composer. Omits models that the installed release lacks, and models whose attention bypasses the attention
interface there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 20
_SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
_DECODER = {**_SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64, "attention_dropout": 0.0}
_GEMMA = {**_DECODER, "head_dim": 4, "query_pre_attn_scalar": 4, "sliding_window": 5}
_ENCODER = {**_SIZES, "max_position_embeddings": 64}
_NO_DROPOUT = {
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "gpt2": dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}
_GPT2 = {"n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 64, **_NO_DROPOUT["gpt2"]}
_T5 = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
       "decoder_start_token_id": 0}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 4}
# The prefix of the classes, and sizes, for each name.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _DECODER),
    "qwen2": ("Qwen2", _DECODER),
    "qwen3": ("Qwen3", {**_DECODER, "head_dim": 4}),
    "qwen3-moe": ("Qwen3Moe", {**_DECODER, **_EXPERTS, "output_router_logits": True}),
    "gemma2": ("Gemma2", _GEMMA),
    "gemma3": ("Gemma3", {**_GEMMA, "sliding_window_pattern": 2}),
    "mistral": ("Mistral", {**_DECODER, "sliding_window": 5, "head_dim": 4}),
    "gpt2": ("GPT2", _GPT2),
    "gpt-neox": ("GPTNeoX", {**_SIZES, "max_position_embeddings": 64, "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "bert": ("Bert", {**_ENCODER, **_NO_DROPOUT["bert"]}),
    "modernbert": ("ModernBert", {**_ENCODER, "local_attention": 6, "global_attn_every_n_layers": 2}),
    "t5": ("T5", _T5),
}
IN_RELEASE_4 = ("llama", "qwen2", "qwen3", "qwen3-moe", "gemma2", "gemma3", "mistral", "gpt2", "gpt-neox")


def is_release_4() -> bool:
    import transformers

    return transformers.__version__.startswith("4.")


def pretrained(name: str, kind: str = "ForCausalLM", attention: str = "sdpa", **options: Any) -> Any:
    """A model initialised with torch's current seed."""
    import transformers

    first, sizes = CONFIGS[name]
    kind = "LMHeadModel" if (name, kind) == ("gpt2", "ForCausalLM") else kind
    config = "Gemma3TextConfig" if first == "Gemma3" else f"{first}Config"
    given = {"vocab_size": VOCABULARY, "pad_token_id": 0, "initializer_range": 0.5} | sizes | options
    made = getattr(transformers, config)(**given, attn_implementation=attention)
    made._experts_implementation = "eager"  # release 5's default does not support float64
    return getattr(transformers, f"{first}{kind}")(made)


class Holder(nn.Module):
    """Nested as in Composer; each layer is a unit."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model
        layers = {
            layer
            for module in model.modules()
            if isinstance(module, nn.ModuleList)
            for layer in module
            if any(hasattr(each, "is_causal") for each in layer.modules())
        }
        self.model.fsdp_wrap_fn = lambda module: module in layers
        self.model.activation_checkpointing_fn = self.model.fsdp_wrap_fn


def build(name: str, kind: str = "ForCausalLM", **options: Any) -> Holder:
    return Holder(pretrained(name, kind, **options))


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Within the block, transformers' casts to float32 cast to float64. A cast to float32 can turn a difference in the
    last bit of a float64 into one of 1e-7."""

    def doubled(original: Callable[..., Any]) -> Callable[..., Any]:
        def of_doubled(*args: Any, **kwargs: Any) -> Any:
            return original(*map(_doubled, args), **{key: _doubled(value) for key, value in kwargs.items()})

        return of_doubled

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        for owner, name in ((torch.Tensor, "to"), (F, "softmax")):
            patches.enter_context(mock.patch.object(owner, name, doubled(getattr(owner, name))))
        yield


def _doubled(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
