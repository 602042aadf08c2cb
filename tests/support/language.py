"""A small language model for tensor parallelism, its layer plans, and its batches."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn import functional as F

VOCABULARY, WIDTH, HIDDEN, HEAD = 24, 16, 32, 4
NUM_TOKENS = 9  # of a sequence; the last one is a label only


class Attention(nn.Module):
    """Works with any number of heads, to allow a part of them on each rank."""

    head_dim = HEAD

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = [
            each(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (self.query, self.key, self.value)
        ]  # B, heads, T, HEAD
        mixed = F.scaled_dot_product_attention(*split, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, hidden), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(width), Attention(width)
        self.norm_2, self.mlp = nn.LayerNorm(width), MLP(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Decoder(nn.Module):
    def __init__(
        self, *, tied: bool, vocabulary: int = VOCABULARY, width: int = WIDTH, hidden: int = HIDDEN, num_layers: int = 2
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, hidden) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for each in self.layers:
            x = each(x)
        return self.head(self.norm(x))

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        return isinstance(module, Layer)

    activation_checkpointing_fn = fsdp_wrap_fn


class Language(nn.Module):
    """Nested as in Composer: the model is the child of the trained module."""

    def __init__(self, *, tied: bool = False, **sizes: int) -> None:
        super().__init__()
        self.model = Decoder(tied=tied, **sizes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens)


def layer_plan(*, ends: bool = True) -> dict[str, ParallelStyle]:
    """Attention and feed-forward of each layer, and the embedding and the head too if ``ends``."""
    colwise = ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up")
    plan: dict[str, ParallelStyle] = {f"model.layers.*.{name}": ColwiseParallel() for name in colwise}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in ("attention.out", "mlp.down")}
    if ends:
        plan["model.embedding"] = RowwiseParallel(input_layouts=Replicate())
        plan["model.head"] = ColwiseParallel(output_layouts=Replicate())
    return plan


def sequence_plan() -> dict[str, ParallelStyle]:
    """The same with sequence parallelism between the TP-sharded layers."""
    gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    return layer_plan() | {
        "model.embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        "model.norm": SequenceParallel(),
        "model.layers.*.norm_*": SequenceParallel(),
        "model.layers.*.attention": PrepareModuleInput(**gathered),
        "model.layers.*.mlp": PrepareModuleInput(**gathered),
        "model.layers.*.attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "model.layers.*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }


def batch(step: int, num_sequences: int) -> torch.Tensor:
    """The tokens of all ranks in one step."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, VOCABULARY, (num_sequences, NUM_TOKENS), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The mean over all tokens but the first."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
