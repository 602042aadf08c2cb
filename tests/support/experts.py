"""A small language model with layers that store all experts in one weight, like LLM Foundry's torch_dmoe."""

from __future__ import annotations

import torch
from support.language import VOCABULARY, WIDTH
from torch import nn
from torch.nn import functional as F

NUM_EXPERTS, EXPERT_WIDTH = 4, 6


class Weights(nn.Module):
    """All experts, concatenated in the first dimension."""

    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__()
        self.moe_num_experts, self.width = num_experts, width
        self.w1 = nn.Parameter(torch.empty(num_experts * width, WIDTH))
        self.w2 = nn.Parameter(torch.empty(num_experts * width, WIDTH))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.w1, self.w2):
            nn.init.normal_(weight, std=0.3)

    def forward(self, x: torch.Tensor, expert_idx: int) -> torch.Tensor:
        up, down = (each.view(self.moe_num_experts, self.width, WIDTH)[expert_idx] for each in (self.w1, self.w2))
        return F.gelu(x @ up.t()) @ down


class Experts(nn.Module):
    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__()
        self.mlp = Weights(num_experts, width)

    def forward(
        self, x: torch.Tensor, scores: torch.Tensor, expert_weights: torch.Tensor, top_experts: torch.Tensor
    ) -> torch.Tensor:
        rows = x.reshape(-1, WIDTH)
        out = torch.zeros_like(rows)
        for number in range(self.mlp.moe_num_experts):
            tokens, places = torch.where(top_experts == number)
            if len(tokens):
                computed = self.mlp(rows[tokens], number) * expert_weights[tokens, places, None]
                out = out.index_add(0, tokens, computed)
        return out.view(x.shape)


class MoE(nn.Module):
    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, num_experts, bias=False), Experts(num_experts, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(x.reshape(-1, WIDTH)).softmax(-1)
        expert_weights, top_experts = scores.topk(2, -1)
        return self.experts(x, scores, expert_weights, top_experts)


class Layer(nn.Module):
    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.moe = MoE(num_experts, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(x).cumsum(1) / 8
        return x + self.moe(self.norm(x))


class Decoder(nn.Module):
    def __init__(self, num_experts: int, width: int, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(num_experts, width) for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for each in self.layers:
            x = each(x)
        return self.head(x)

    def fsdp_wrap_fn(self, module: nn.Module) -> object:
        return getattr(module, "_fsdp_kwargs_dict", isinstance(module, Layer))

    def activation_checkpointing_fn(self, module: nn.Module) -> bool:
        return isinstance(module, Layer)


class MoELanguage(nn.Module):
    """Nested as in Composer: the model is the child of the trained module."""

    def __init__(self, num_experts: int = NUM_EXPERTS, width: int = EXPERT_WIDTH, num_layers: int = 2) -> None:
        super().__init__()
        self.model = Decoder(num_experts, width, num_layers)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens)
