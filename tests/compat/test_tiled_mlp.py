"""MLPs in pieces of the sequence: transformers' and Foundry's models, under Composer's Trainer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import full
from support.known_models import TEXT, hugging_face
from support.mpt import TINY, train_mpt
from support.oracle import FSDP1, FSDP2
from support.ranks import run_ranks
from support.trainers import largest_difference
from support.training import FULL, assert_close, named_parameters
from torch import nn

pytestmark = [pytest.mark.composer, pytest.mark.foundry]


def mpt(ffn_type: str) -> nn.Module:
    from llmfoundry.models.mpt import MPTConfig, MPTForCausalLM

    torch.manual_seed(0)
    config = MPTConfig(
        d_model=16, n_heads=2, n_layers=2, vocab_size=TEXT["vocab_size"], max_seq_len=32,
        ffn_config={"ffn_type": ffn_type}, attn_config={"attn_impl": "torch"}, init_device="cpu",
    )  # fmt: skip
    return nn.ModuleDict({"model": MPTForCausalLM(config).double()})


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(TEXT["vocab_size"], (2, 13), generator=torch.Generator().manual_seed(seed))


def check_gradients() -> None:
    from composer_fsdp2 import prepare_fully_shard

    def check(model: Any, layers: str, mlp: str, config: dict[str, Any]) -> None:
        reference = copy.deepcopy(model)
        policy = {"wrap_policy": {"transformer_layer_cls_to_wrap": [layers]}}
        tiled = {"tiled_mlp": {"classes": [mlp], "chunks": 4}}
        prepare_fully_shard(model, None, FULL | policy | tiled | config, device="cpu")
        model.model(input_ids=tokens(dist.get_rank())).logits.square().mean().backward()
        for peer in range(2):
            (reference.model(input_ids=tokens(peer)).logits.square().mean() / 2).backward()
        sharded = named_parameters(model)
        for name, parameter in reference.named_parameters():
            assert_close(name, full(sharded[name].grad), parameter.grad, rtol=1e-12, atol=1e-14)

    recomputed = {"activation_checkpointing": True, "activation_checkpointing_policy": "auto"}
    cases: dict[str, tuple[Any, str, str, dict[str, Any]]] = {
        "Llama, recomputed": (hugging_face("llama", hooks=False), "LlamaDecoderLayer", "LlamaMLP", recomputed),
        "GPT-2": (hugging_face("gpt2", hooks=False), "GPT2Block", "GPT2MLP", {}),
        "MPT": (mpt("mptmlp"), "MPTBlock", "MPTMLP", {}),
        "MPT, GLU": (mpt("mptglu"), "MPTBlock", "MPTGLU", {}),
    }
    for_each(check, cases)


def test_models_of_others_train_as_before():
    """Whatever an MLP is called and made of, its gradients are those of one piece."""
    run_ranks(check_gradients, 2)


def check_trainer() -> None:
    """MPT by Foundry from the meta device, with clipping, under Composer's Trainer."""
    section = {"sharding_strategy": "FULL_SHARD", "mixed_precision": "FULL", "state_dict_type": "sharded"}
    tiled = section | {"tiled_mlp": {"classes": ["MPTMLP"], "chunks": 5}, "activation_checkpointing": True}
    theirs, ours = (
        train_mpt("cpu", under, TINY, config=config, attention="torch", batches=2).losses
        for under, config in ((FSDP1, section), (FSDP2, tiled))
    )
    assert largest_difference(ours, theirs) <= 1e-6, f"{ours}, FSDP1 {theirs}"


def test_a_trainers_run_has_fsdp1s_losses():
    """One key in a configuration, and long sequences fit; the curve is the same."""
    run_ranks(check_trainer, 2)
