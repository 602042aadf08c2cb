"""Small models as Composer's Trainer sees them: a parent whose direct children become FSDP1's roots.

Nothing is downloaded. Sizes are odd on purpose: shards are uneven on 2 and on 4 ranks, and some are empty.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from torch.nn import functional

VOCABULARY = 67
SEQUENCE = 7
FEATURES = 10
WIDTH = 16

# A key's bias shifts all scores of a query alike, and softmax cancels it: its gradient is rounding noise, which Adam
# scales up to full steps. The key is the second of three parts. By model, the end of a name and the part of the tensor.
NOISE = {
    "gpt2": {"attn.c_attn.bias": slice(WIDTH, 2 * WIDTH)},
    "mpt": {"attn.Wqkv.bias": slice(WIDTH, 2 * WIDTH)},
}


class Parent(nn.Module):
    """Stands in for the ComposerModel, whose children are sharded. Its output is the loss; it has ``blocks``, and makes
    a ``batch`` with a generator."""

    dtype = torch.float32

    @property
    def ignored(self) -> list[nn.Module]:
        """For `ignored_modules`: a whole block, and a part of the next."""
        first, second = self.blocks[:2]
        return [first, next(second.children())]


class Block(nn.Module):
    def __init__(self, *, batch_norm: bool) -> None:
        super().__init__()
        # A bias before a batch norm has only rounding noise as its gradient.
        self.norm = nn.LayerNorm(FEATURES, bias=not batch_norm)
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

    activation_checkpointing_fn = fsdp_wrap_fn


class MLP(Parent):
    """Two direct children with parameters, so two roots: FSDP1 clipped each by its own norm."""

    def __init__(self, *, tied: bool, batch_norm: bool) -> None:
        super().__init__()
        self.backbone = Backbone(tied=tied, batch_norm=batch_norm)
        self.head = nn.Linear(FEATURES, 3)
        self.criterion = nn.MSELoss()

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.backbone(x)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x, target = batch[:, :FEATURES], batch[:, FEATURES:]
        return self.criterion(self.head(self.features(x)), target)

    def batch(self, generator: torch.Generator) -> torch.Tensor:
        x = torch.randn(6, FEATURES, generator=generator, dtype=torch.float64)
        return torch.cat([x, x[:, :3].sin() + x[:, 3:4]], dim=1).to(self.dtype)

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.backbone.blocks)


class Skipped(MLP):
    """FSDP1 excluded the head: replicated on every rank, without averaged gradients."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.head._fsdp_wrap = False


class Unused(MLP):
    """A unit that no forward runs, and an unused parameter of a used unit."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.backbone.spare = Block(batch_norm=False)
        self.backbone.blocks[1].spare = nn.Linear(FEATURES, 3)


class Branch(MLP):
    """Parameters used by some batches only, different ones on each rank, like the experts of a mixture."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.backbone.shift = nn.Parameter(torch.zeros(FEATURES))
        self.backbone.scale = nn.Parameter(torch.ones(FEATURES))
        self.backbone.register_forward_hook(self.branch)

    @staticmethod
    def branch(backbone: nn.Module, args: tuple[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        if args[0].sum() > 0:
            return x + backbone.shift
        return x * backbone.scale


class Answering(MLP):
    """A wrap function that returns ``answers`` for some modules, and True for blocks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        answers = self.answers(*self.blocks)
        self.backbone.fsdp_wrap_fn = lambda module: answers.get(module, isinstance(module, Block))


class Nested(Answering):
    """Nested units; one of them does not reshard after forward, by its own settings."""

    def answers(self, first: nn.Module, second: nn.Module) -> dict[nn.Module, Any]:
        kept = {"sharding_strategy": "SHARD_GRAD_OP", "backward_prefetch": "BACKWARD_PRE"}
        return {module: True for module in self.backbone.modules() if isinstance(module, nn.Linear)} | {second: kept}


class OwnBuffers(Answering):
    """The settings of one block's unit cast its buffers only."""

    def answers(self, first: nn.Module, second: nn.Module) -> dict[nn.Module, Any]:
        for block in (first, second):
            block.register_buffer("table", torch.linspace(0.9, 1.1, FEATURES))
            block.register_forward_hook(lambda block, args, x: x * block.table)
        return {second: {"mixed_precision": MixedPrecision(buffer_dtype=torch.bfloat16)}}


class OwnGroups(Answering):
    """One block replicated on each rank, one sharded over all ranks. FSDP1 accepts this with a process_group for the
    rest."""

    def answers(self, first: nn.Module, second: nn.Module) -> dict[nn.Module, Any]:
        return {first: {"process_group": "self"}, second: {"sharding_strategy": "NO_SHARD"}}


class OwnMesh(Answering):
    """One block with replicas of shards, on its own mesh."""

    def answers(self, first: nn.Module, second: nn.Module) -> dict[nn.Module, Any]:
        return {second: {"process_group": ("set2", "mod2"), "sharding_strategy": "HYBRID_SHARD"}}


class Twice(MLP):
    """Two forwards before one backward, as for a chosen and a rejected sequence."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return super().forward(batch) + 0.5 * super().forward(batch.flip(0) * 0.9)


class Convolution(MLP):
    """Weights in the memory format of Composer's ChannelsLast."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.stem = nn.Conv2d(1, 3, 3, padding=1)
        self.stem.to(memory_format=torch.channels_last)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return super().features(self.stem(x.view(-1, 1, 2, 5)).mean(dim=1).flatten(1))


class Shared(MLP):
    """One block that is registered and run twice: FSDP1 wrapped it at its first place only, and forward failed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.backbone.blocks[1] = self.backbone.blocks[0]


class TiedUnits(MLP):
    """Two units with a shared weight: FSDP1's forward failed on the second one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.backbone.blocks[1].wide.weight = self.backbone.blocks[0].wide.weight


class TiedChildren(MLP):
    """Two direct children with a shared weight: FSDP1's forward failed on the second one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.tail = nn.Linear(FEATURES, FEATURES)
        self.tail.weight = self.backbone.inner.weight

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(super().features(x))


class Container(MLP):
    """A direct child without a forward, whose members the parent calls: FSDP1 trained it, but could not gather it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.layers = nn.ModuleList([self.backbone.inner, *self.backbone.blocks, self.backbone.outer])
        del self.backbone
        for layer in self.layers:
            layer._fsdp_wrap = True

    def features(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    @property
    def blocks(self) -> list[nn.Module]:
        return [layer for layer in self.layers if isinstance(layer, Block)]


MLPS: dict[str, type[MLP]] = {
    cls.__name__.lower(): cls
    for cls in (
        MLP, Skipped, Unused, Branch, Nested, OwnBuffers, OwnGroups, OwnMesh, Twice, Convolution, Shared, TiedUnits,
        TiedChildren, Container
    )
}  # fmt: skip


class LanguageModel(Parent):
    """A causal language model as the only child ``model``, as in Composer's HuggingFaceModel."""

    def __init__(self, model: nn.Module, block_type: type[nn.Module]) -> None:
        super().__init__()
        self.model = model
        self.block_type = block_type

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=batch, attention_mask=torch.ones_like(batch, dtype=torch.bool)).logits
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def batch(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(VOCABULARY, (2, SEQUENCE), generator=generator)

    @property
    def blocks(self) -> list[nn.Module]:
        return [module for module in self.modules() if isinstance(module, self.block_type)]


def build(name: str, *, tied: bool, dtype: torch.dtype = torch.float32, dropout: bool = True) -> Parent:
    """The model of this name, initialised with seed 0 on the CPU."""
    torch.manual_seed(0)
    if name in MLPS:
        # FSDP1 casts the input of a batch norm to fp32, even if the rest is float64 or bf16, and fails.
        model: Parent = MLPS[name](tied=tied, batch_norm=dtype == torch.float32)
    else:
        model = _language_model(name, tied)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim <= 1:  # Zeros and ones would hide changes to them.
                parameter.add_(0.1 * torch.randn_like(parameter))
    model = model.to(dtype)
    model.dtype = dtype
    if not dropout:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    return model


def _language_model(name: str, tied: bool) -> LanguageModel:
    # Imported here: the pytest process only collects and does not need them.
    if name in ("mpt", "mpt-kwargs"):
        from llmfoundry.models.mpt.modeling_mpt import MPTBlock, MPTConfig, MPTForCausalLM

        config = MPTConfig(
            d_model=WIDTH, n_heads=2, n_layers=2, expansion_ratio=2, max_seq_len=SEQUENCE, vocab_size=VOCABULARY,
            resid_pdrop=0.1, emb_pdrop=0.1, norm_type="layernorm", tie_word_embeddings=tied,
            attn_config={"attn_impl": "torch"},
        )  # fmt: skip
        model = MPTForCausalLM(config)
        if name == "mpt-kwargs":  # The settings of LLM Foundry's own wrap function; FSDP1 changes the dict.
            low = MixedPrecision(reduce_dtype=torch.bfloat16)
            for block in model.transformer.blocks:
                block.ffn._fsdp_kwargs_dict = {"sharding_strategy": "SHARD_GRAD_OP", "mixed_precision": low}
        return LanguageModel(model, MPTBlock)
    if name in ("gpt2", "gpt2-embeddings"):
        from transformers.models.gpt2.modeling_gpt2 import GPT2Block, GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            n_embd=WIDTH, n_head=2, n_layer=2, n_positions=SEQUENCE, vocab_size=VOCABULARY, use_cache=False,
            tie_word_embeddings=tied,
        )  # fmt: skip
        model = GPT2LMHeadModel(config)
        if name == "gpt2-embeddings":  # Tied and wrapped separately, which LLM Foundry forbids because of FSDP1.
            model.transformer.wte._fsdp_wrap = model.lm_head._fsdp_wrap = True
        return _with_hooks(model, GPT2Block)
    if name == "llama":
        from transformers.models.llama.modeling_llama import LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=WIDTH, intermediate_size=26, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE, use_cache=False,
            tie_word_embeddings=tied,
        )  # fmt: skip
        return _with_hooks(LlamaForCausalLM(config), LlamaDecoderLayer)
    raise ValueError(f"no model {name!r}")


def _with_hooks(model: nn.Module, block_type: type[nn.Module]) -> LanguageModel:
    """LLM Foundry's settings for a Hugging Face model (llmfoundry/models/hf/hf_fsdp.py, 0.22.0)."""
    model.fsdp_wrap_fn = model.activation_checkpointing_fn = lambda module: isinstance(module, block_type)
    return LanguageModel(model, block_type)
