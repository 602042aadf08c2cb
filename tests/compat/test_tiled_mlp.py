"""MLPs in pieces of the sequence: transformers' and Foundry's models, under Composer's Trainer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import full
from support.mpt import TINY, train_mpt
from support.oracle import FSDP1, FSDP2
from support.ranks import run_ranks
from support.trainers import largest_difference
from support.training import FULL, assert_close, named_parameters
from torch import nn

pytestmark = [pytest.mark.composer, pytest.mark.foundry]

VOCABULARY = 67


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 26, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **sizes))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    none: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_head=2, n_layer=2, vocab_size=VOCABULARY, **none))


def mpt(ffn_type: str) -> nn.Module:
    from llmfoundry.models.mpt import MPTConfig, MPTForCausalLM

    config = MPTConfig(
        d_model=16, n_heads=2, n_layers=2, vocab_size=VOCABULARY, max_seq_len=32, ffn_config={"ffn_type": ffn_type},
        attn_config={"attn_impl": "torch"}, init_device="cpu",
    )  # fmt: skip
    return MPTForCausalLM(config)


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(seed))


def check_gradients() -> None:
    from composer_fsdp2 import prepare_fully_shard

    def check(build: Any, arguments: tuple[str, ...], layers: str, mlp: str, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = nn.ModuleDict({"model": build(*arguments).double()})
        reference = copy.deepcopy(model)
        policy = {"wrap_policy": {"transformer_layer_cls_to_wrap": [layers]}}
        tiled = {"tiled_mlp": {"classes": [mlp], "chunks": 4}}
        prepare_fully_shard(model, None, FULL | policy | tiled | config, device="cpu")
        model["model"](input_ids=tokens(dist.get_rank())).logits.square().mean().backward()
        for peer in range(2):
            (reference["model"](input_ids=tokens(peer)).logits.square().mean() / 2).backward()
        sharded = named_parameters(model)
        for name, parameter in reference.named_parameters():
            assert_close(name, full(sharded[name].grad), parameter.grad, rtol=1e-12, atol=1e-14)

    recomputed = {"activation_checkpointing": True, "activation_checkpointing_policy": "auto"}
    for_each(
        check,
        {
            "Llama": (llama, (), "LlamaDecoderLayer", "LlamaMLP", {}),
            "Llama, recomputed": (llama, (), "LlamaDecoderLayer", "LlamaMLP", recomputed),
            "GPT-2": (gpt2, (), "GPT2Block", "GPT2MLP", {}),
            "MPT": (mpt, ("mptmlp",), "MPTBlock", "MPTMLP", {}),
            "MPT, GLU": (mpt, ("mptglu",), "MPTBlock", "MPTGLU", {}),
        },
    )


def test_models_of_others_train_as_before():
    """Whatever an MLP is called and made of, its gradients are those of one piece."""
    run_ranks(check_gradients, 2)


def check_trainer() -> None:
    """MPT by Foundry from the meta device, with clipping, under Composer's Trainer."""
    section = {"sharding_strategy": "FULL_SHARD", "mixed_precision": "FULL", "state_dict_type": "sharded"}
    tiled = section | {"tiled_mlp": {"classes": ["MPTMLP"], "chunks": 5}}

    def train(under: Any, config: dict[str, Any]) -> list[float]:
        return train_mpt("cpu", under, TINY, config=dict(config), attention="torch", batches=3).losses

    theirs = train(FSDP1, section)
    for_each(
        lambda config: _assert_near(train(FSDP2, config), theirs),
        {"tiled": (tiled,), "tiled and recomputed": (tiled | {"activation_checkpointing": True},)},
    )


def _assert_near(losses: list[float], expected: list[float]) -> None:
    assert largest_difference(losses, expected) <= 1e-6, f"{losses}, FSDP1 {expected}"


def test_a_trainers_run_has_fsdp1s_losses():
    """One key in a configuration, and long sequences fit; the curve is the same."""
    run_ranks(check_trainer, 2)
