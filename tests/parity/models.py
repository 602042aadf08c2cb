"""Small models as Composer's Trainer sees them: a parent whose direct children become FSDP1's roots.

Nothing is downloaded. Sizes are odd on purpose: shards are uneven on 2 and 4 ranks, and some are empty.
"""

from __future__ import annotations

import types

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 67
SEQUENCE = 7
FEATURES = 10


class Parent(nn.Module):
    """What stands for the ComposerModel: never sharded itself, its children are."""

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def batch(self, generator: torch.Generator) -> torch.Tensor:
        raise NotImplementedError

    @property
    def blocks(self) -> list[nn.Module]:
        raise NotImplementedError


class Block(nn.Module):
    def __init__(self, *, batch_norm: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES, bias=not batch_norm)
        # A bias before a batch norm has no gradient but rounding noise.
        self.wide = nn.Linear(FEATURES, 13, bias=not batch_norm)
        self.batch_norm = nn.BatchNorm1d(13) if batch_norm else nn.Identity()
        self.narrow = nn.Linear(13, FEATURES)
        self.gain = nn.Parameter(torch.ones(1))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.gelu(self.batch_norm(self.wide(self.norm(x))))
        return x + self.gain * self.dropout(self.narrow(hidden))


class Backbone(nn.Module):
    def __init__(self, *, tied: bool, batch_norm: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, FEATURES)
        self.blocks = nn.ModuleList(Block(batch_norm=batch_norm) for _ in range(2))
        self.outer = nn.Linear(FEATURES, FEATURES, bias=False)
        if tied:
            self.outer.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return self.outer(x)

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        return isinstance(module, Block)

    def activation_checkpointing_fn(self, module: nn.Module) -> bool:
        return isinstance(module, Block)


class MLP(Parent):
    """Two direct children, so two roots: FSDP1 clipped each by its own norm."""

    def __init__(self, *, tied: bool, batch_norm: bool) -> None:
        super().__init__()
        self.backbone = Backbone(tied=tied, batch_norm=batch_norm)
        self.head = nn.Linear(FEATURES, 3)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        x, target = batch[:, :FEATURES], batch[:, FEATURES:]
        return functional.mse_loss(self.head(self.backbone(x)), target)

    def batch(self, generator: torch.Generator) -> torch.Tensor:
        x = torch.randn(6, FEATURES, generator=generator, dtype=torch.float64)
        return torch.cat([x, x[:, :3].sin() + x[:, 3:4]], dim=1).to(next(self.parameters()).dtype)

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.backbone.blocks)


class LanguageModel(Parent):
    """A causal language model as the one child ``model``, as in Composer's HuggingFaceModel."""

    def __init__(self, model: nn.Module, block_type: type[nn.Module]) -> None:
        super().__init__()
        self.model = model
        self.block_type = block_type

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=batch, attention_mask=torch.ones_like(batch, dtype=torch.bool)).logits
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def batch(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(VOCABULARY, (2, SEQUENCE), generator=generator)

    @property
    def blocks(self) -> list[nn.Module]:
        return [module for module in self.modules() if isinstance(module, self.block_type)]


def build(name: str, *, tied: bool, dtype: torch.dtype = torch.float32, dropout: bool = True) -> Parent:
    """The model of this name with the values that seed 0 gives, on the CPU."""
    torch.manual_seed(0)
    if name == "mlp":
        # FSDP1 casts the input of a batch norm to fp32, also where everything else is float64, and fails.
        model: Parent = MLP(tied=tied, batch_norm=dtype != torch.float64)
    else:
        model = _language_model(name, tied)
    model = model.to(dtype)
    if not dropout:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    return model


def _language_model(name: str, tied: bool) -> LanguageModel:
    # Imported here: the pytest process, which only collects, has no need of them.
    if name == "mpt":
        from llmfoundry.models.mpt.modeling_mpt import MPTBlock, MPTConfig, MPTForCausalLM

        config = MPTConfig(
            d_model=16, n_heads=2, n_layers=2, expansion_ratio=2, max_seq_len=SEQUENCE, vocab_size=VOCABULARY,
            resid_pdrop=0.1, emb_pdrop=0.1, norm_type="layernorm", tie_word_embeddings=tied,
            attn_config={"attn_impl": "torch"},
        )  # fmt: skip
        return LanguageModel(MPTForCausalLM(config), MPTBlock)
    if name == "gpt2":
        from transformers.models.gpt2.modeling_gpt2 import GPT2Block, GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            n_embd=16, n_head=2, n_layer=2, n_positions=SEQUENCE, vocab_size=VOCABULARY, use_cache=False,
            tie_word_embeddings=tied,
        )  # fmt: skip
        return _with_hooks(GPT2LMHeadModel(config), GPT2Block)
    if name == "llama":
        from transformers.models.llama.modeling_llama import LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=16, intermediate_size=26, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE, use_cache=False, tie_word_embeddings=tied,
        )  # fmt: skip
        return _with_hooks(LlamaForCausalLM(config), LlamaDecoderLayer)
    raise ValueError(f"no model {name!r}")


def _with_hooks(model: nn.Module, block_type: type[nn.Module]) -> LanguageModel:
    """What LLM Foundry puts on a Hugging Face model (llmfoundry/models/hf/hf_fsdp.py, 0.22.0)."""

    def is_block(self: nn.Module, module: nn.Module) -> bool:
        return isinstance(module, block_type)

    model.fsdp_wrap_fn = types.MethodType(is_block, model)
    model.activation_checkpointing_fn = types.MethodType(is_block, model)
    return LanguageModel(model, block_type)
