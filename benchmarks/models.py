"""A decoder like Llama, in plain torch, with the hooks of Composer's models."""

import argparse
from dataclasses import dataclass, fields, replace

import torch
from report import count
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model and of one rank's batch."""

    width: int
    layers: int
    heads: int
    vocabulary: int
    sequence: int
    batch: int

    @property
    def hidden(self) -> int:
        """Llama's 8/3 of the width, to the next multiple of 64."""
        return -(-self.width * 8 // 192) * 64

    def tokens(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.vocabulary, (self.batch, self.sequence), generator=generator)


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """An option for each size of a ``Shape``."""
    for field in fields(Shape):
        parser.add_argument(
            f"--{field.name}", type=count, help="of the model" if field.name != "batch" else "of a rank"
        )


def with_sizes(shape: Shape, given: argparse.Namespace) -> Shape:
    """The shape with the sizes set by the options of ``add_sizes``."""
    sizes = {field.name: getattr(given, field.name) for field in fields(Shape)}
    return replace(shape, **{name: size for name, size in sizes.items() if size is not None})


def shape_of(num_bytes: int) -> Shape:
    """A decoder of about 24 layers whose fp32 checkpoint with AdamW's state has about so many bytes."""
    num_parameters = num_bytes / 12
    width = max(16, int((num_parameters / 358) ** 0.5) // 16 * 16)
    shape = Shape(width=width, layers=1, heads=width // 16, vocabulary=32 * width, sequence=16, batch=1)
    outside, layer = 64 * width**2 + width, 4 * width**2 + 3 * width * shape.hidden + 2 * width
    return replace(shape, layers=max(1, round((num_parameters - outside) / layer)))


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_heads = shape.heads
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, shape.width, bias=False)
        self.value = nn.Linear(shape.width, shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(
            rotate(query, cosine, sine), rotate(key, cosine, sine), value, is_causal=True
        )
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """One unit: 12 modules, 9 parameters."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        out: torch.Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Decoder(nn.Module):
    cosine: torch.Tensor
    sine: torch.Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.register_buffer("cosine", torch.empty(shape.sequence, self.head_width // 2), persistent=False)
        self.register_buffer("sine", torch.empty(shape.sequence, self.head_width // 2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The tables of the rotary embedding; all other tensors belong to submodules."""
        device, positions = self.cosine.device, torch.arange(len(self.cosine), device=self.cosine.device)
        frequencies = 10000 ** -torch.arange(0, 1, 2 / self.head_width, device=device)
        angles = torch.outer(positions.float(), frequencies)
        self.cosine.copy_(angles.cos())
        self.sine.copy_(angles.sin())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cosine, self.sine)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        return isinstance(module, Block)


class Model(nn.Module):
    """The form that a Trainer takes: a model whose only child computes. Its output is the loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.decoder = Decoder(shape)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.decoder(tokens)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
