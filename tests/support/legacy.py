"""The model, optimizer and next steps of the runs that wrote ``tests/fixtures/legacy-checkpoints``.

Rewritten from the names and shapes in the files and the numbers recorded by the runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

FOLDER = Path(__file__).parents[1] / "fixtures" / "legacy-checkpoints"
# kind -> elements of `scale`: with one element, one of two ranks has an empty shard.
FULL = {"c172/full": 1, "c220/full": 2}
SHARDED = {"c172/sharded": 1, "c220/sharded": 2, "c220/sharded-mesh": 1}
FLAT = {"c172/local-flat": 1}
KINDS = {**FULL, **SHARDED, **FLAT}
# FSDP1 on the CPU wrote exp_avg_sq over exp_avg: weights can be compared, the next steps cannot.
WITHOUT_OPTIMIZER = ("c220/full",)
WIDTH, VOCABULARY = 6, 11


class Residual(nn.Module):
    def __init__(self, scale_numel: int) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(scale_numel))
        self.register_buffer("buf", torch.arange(3.0))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.scale.mean() * self.down(functional.gelu(self.up(self.ln(hidden))))


class TiedLM(nn.Module):
    """The fixtures' model, by names and shapes; does not need Composer."""

    def __init__(self, scale_numel: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Residual(scale_numel) for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.wte(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.lm_head(hidden)

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        return isinstance(module, Residual)


def legacy_model(kind: str, seed: int = 0) -> Any:
    """The ComposerModel of a run of this kind, with other values."""
    from support.scripts.train_with_trainer import Model

    model = Model()
    torch.manual_seed(seed)
    model.model = TiedLM(KINDS[kind])
    return model


def legacy_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    from composer.optim import DecoupledAdamW

    return DecoupledAdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=1e-3)


def checkpoint_of(kind: str) -> Path:
    return FOLDER / kind / ("ep0-ba3-rank0.pt" if kind.endswith("full") else "ep0-ba3")


def recorded(kind: str) -> dict[str, Any]:
    """Recorded results of the writing run: logits, and the losses of two more steps."""
    return torch.load(FOLDER / f"{kind}.ref.pt", weights_only=True)


def next_steps(model: Any, optimizer: torch.optim.Optimizer | None) -> tuple[torch.Tensor, list[float]]:
    """The writing run's next steps: every rank on the same tokens."""
    batches = torch.randint(0, VOCABULARY, (3, 4, 5), generator=torch.Generator().manual_seed(7))
    model.train()
    with torch.no_grad():
        logits = model([batches[0]]).clone()
    losses = []
    for batch in batches[1:] if optimizer is not None else ():
        optimizer.zero_grad()
        loss = model.loss(model([batch]), [batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return logits, losses
