"""The Llama by transformers of the benchmarks of divided layers and sequences; imported where transformers is."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["VOCABULARY", "Holder", "LlamaSizes", "build", "is_layer"]

VOCABULARY = 512


@dataclass(frozen=True, slots=True)
class LlamaSizes:
    """Of the model, and of a row."""

    sequence: int
    width: int
    layers: int
    heads: int


class Holder(nn.Module):
    """As Composer has it: the model is the child of what is trained."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model


def build(sizes: LlamaSizes) -> Holder:
    """With the same values each time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=sizes.width, intermediate_size=3 * sizes.width,
        num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads, num_key_value_heads=sizes.heads,
        max_position_embeddings=sizes.sequence, attn_implementation="sdpa",
    )  # fmt: skip
    return Holder(LlamaForCausalLM(config))


def is_layer(module: nn.Module) -> bool:
    return type(module).__name__.endswith("DecoderLayer")
