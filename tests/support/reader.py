"""A small causal model, registered for context parallelism: its attention, its loss and its batches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from support.language import MLP
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional as F

from composer_fsdp2 import AttentionFacts, ModelAdapter, register_model_adapter
from composer_fsdp2.training.context import ContextGroup

VOCABULARY, WIDTH, HEAD = 20, 16, 4


class Attention(nn.Module):
    """Causal, with fewer heads of keys and values than of queries; any number of them, as under a layer plan."""

    head_dim = HEAD

    def __init__(self, width: int, num_kv_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = width // HEAD, dropout
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.key, self.value = (nn.Linear(width, num_kv_heads * HEAD) for _ in range(2))
        self.attend = attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (each(x).unflatten(-1, (-1, HEAD)) for each in (self.query, self.key, self.value))
        return self.out(self.attend(query, key, value).flatten(2))


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """On tensors (batch, positions, heads, features)."""
    key, value = (each.repeat_interleave(query.shape[2] // each.shape[2], 2) for each in (key, value))
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


class Layer(nn.Module):
    def __init__(self, width: int, **attention: Any) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(width), Attention(width, **attention), MLP(width, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Reader(nn.Module):
    def __init__(self, *, width: int = WIDTH, num_kv_heads: int = 2, dropout: float = 0.0, num_layers: int = 2) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(32, width)
        self.layers = nn.ModuleList(Layer(width, num_kv_heads=num_kv_heads, dropout=dropout) for _ in range(num_layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(tokens, torch.arange(tokens.shape[1]), F.pad(labels[:, 1:], (0, 1), value=-100))

    def loss(
        self, tokens: torch.Tensor, places: torch.Tensor, targets: torch.Tensor, items: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.embedding(tokens) + self.places(places)
        for layer in self.layers:
            x = layer(x)
        losses = F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), reduction="sum")
        return losses / ((targets != -100).sum() if items is None else items)

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        return isinstance(module, Layer)

    activation_checkpointing_fn = fsdp_wrap_fn


def facts_of(model: nn.Module) -> dict[str, AttentionFacts]:
    return {
        path: AttentionFacts(num_heads=module.num_heads, dropout=module.dropout)
        for path, module in model.named_modules()
        if isinstance(module, Attention)
    }


def start(whole: nn.Module, model: nn.Module, attentions: Sequence[nn.Module], group: ContextGroup) -> None:
    assert isinstance(model, Reader)
    model.forward = functools.partial(forward_of_part, model, group)
    for each in attentions:
        assert isinstance(each, Attention)
        each.attend = functools.partial(attend_exchanged, group)


def forward_of_part(model: Reader, group: ContextGroup, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    padded = group.padded(tokens, 1, 0)
    targets = group.shifted_labels(labels)
    places = group.part(torch.arange(padded.shape[1]), 0)
    return model.loss(group.part(padded), places, targets, group.items(targets, torch.float64))


def attend_exchanged(group: ContextGroup, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return group.to_sequence(attend(*group.to_heads((query, key, value), 2, 1)), 2, 1)


register_model_adapter(
    ModelAdapter(
        name="the test's Reader",
        matches=lambda module: isinstance(module, Reader),
        attentions=facts_of,
        problems=lambda model: iter(()),
        notes=lambda model: iter(("its notes",)),
        start=start,
    )
)


class Holder(nn.Module):
    """Nested as in Composer: the model is the child of the trained module."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.model = Reader(**options)


def build(**options: Any) -> Holder:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    return Holder(**options)


def batch(num_rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with different numbers of labels."""
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(VOCABULARY, (num_rows, length), generator=generator)
    ends = torch.arange(num_rows)[:, None] * 2 + 3
    return tokens, torch.where(torch.arange(length) < ends, tokens, -100)


def layer_plan() -> dict[str, ParallelStyle]:
    colwise = ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up")
    plan: dict[str, ParallelStyle] = {f"model.layers.*.{name}": ColwiseParallel() for name in colwise}
    return plan | {f"model.layers.*.{name}": RowwiseParallel() for name in ("attention.out", "mlp.down")}


def mean_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """For a model that computes its own loss from labels; under CP that is the loss of its part of all positions."""
    return model.model(tokens, tokens)
