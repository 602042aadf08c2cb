"""Models that several test files shard, small enough to compare with the unsharded model to the last digits.

Tests and ranks import it as ``support.models``; a rank can build only what a module on its path defines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCABULARY, WIDTH = 11, 6  # neither is a multiple of 4, so shards are uneven


class Block(nn.Module):
    """Two layers and a residual, with a persistent and a non-persistent buffer."""

    def __init__(self, width: int = WIDTH, device: Any = None) -> None:
        super().__init__()
        self.fc_in = nn.Linear(width, 2 * width, device=device)
        self.fc_out = nn.Linear(2 * width, width, device=device)
        self.register_buffer("scale", torch.full((1,), 0.5, device=device))
        self.register_buffer("offset", torch.full((width,), 0.25, device=device), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc_out(torch.tanh(self.fc_in(x) * self.scale)) + self.offset

    def reset_parameters(self) -> None:
        """For the buffers only; the layers have their own method."""
        nn.init.constant_(self.scale, 0.5)
        nn.init.constant_(self.offset, 0.25)


class Decoder(nn.Module):
    """Embedding, blocks, norm and head, with the hooks that Composer's models have."""

    def __init__(
        self,
        *,
        num_blocks: int = 2,
        tied: bool = False,
        vocabulary: int = VOCABULARY,
        width: int = WIDTH,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, device=device)
        self.blocks = nn.ModuleList(Block(width, device=device) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width, device=device)
        self.head = nn.Linear(width, vocabulary, bias=False, device=device)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        return isinstance(module, Block)

    activation_checkpointing_fn = fsdp_wrap_fn


class Model(nn.Module):
    """The form that a Trainer takes: a model whose direct child computes."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.decoder = Decoder(**options)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.decoder(tokens)


class ModelWithScalar(Model):
    """With a scalar, which cannot be sharded: it is replicated on every rank, and its gradient is averaged
    separately."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder.gain = nn.Parameter(torch.tensor(1.5))
        self.decoder.register_forward_hook(lambda decoder, args, output: output * decoder.gain)


def tied_model() -> Model:
    return Model(tied=True)


def tokens(seed: int, batch_size: int = 3, length: int = 4) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch_size, length), generator=torch.Generator().manual_seed(seed))


def features(seed: int, batch_size: int = 3, width: int = WIDTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch_size, width, generator=generator, dtype=torch.float64).to(torch.get_default_dtype())


class Wrapping(nn.Module):
    """A direct child with a wrap function that returns values from a table of paths."""

    def __init__(self, answers: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.answers = answers or {}

    def fsdp_wrap_fn(self, module: nn.Module) -> Any:
        path = next(path for path, found in self.named_modules() if found is module)
        return self.answers.get(path, False)


class Running(Wrapping):
    """Its forward is ``run(self, ...)``, using its children and parameters; ``answers`` selects the units."""

    def __init__(self, run: Callable[..., Any], answers: dict[str, Any] | None = None, **members: Any) -> None:
        super().__init__(answers)
        self.run = run
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.run(self, *inputs, **named)


class Chain(Wrapping):
    """Runs its children one after the other; ``answers`` selects the units."""

    def __init__(self, answers: dict[str, Any] | None = None, **children: nn.Module) -> None:
        super().__init__(answers)
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self.children():
            x = child(x)
        return x


def layer(width: int = WIDTH) -> nn.Linear:
    return nn.Linear(width, width, bias=False)


def tie(first: nn.Module, *others: nn.Module) -> None:
    for other in others:
        other.weight = first.weight


class FakeMetric(nn.Module):
    """Recognized by the engine as torchmetrics.Metric: a class of that name in that package."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layer()


FakeMetric.__name__, FakeMetric.__module__ = "Metric", "torchmetrics.metric"


class Thin(nn.Module):
    """A weight with a single row, so all ranks but one have an empty shard; and a scalar, which is replicated."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.linspace(0.5, 1.5, width)[None])
        self.gain = nn.Parameter(torch.tensor(0.9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.row * self.gain
