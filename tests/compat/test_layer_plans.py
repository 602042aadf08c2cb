"""``layer_plan: auto`` of transformers' and Foundry's own models, compared with one process on the full batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from support.cases import for_each
from support.known_models import build
from support.legality import VOCABULARY, Carried, Distances, check_carried
from support.on_ranks import on_ranks
from support.training import FULL
from support.translations import config_of
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional as F

from composer_fsdp2 import PlanError, plan_sharding

pytestmark = [pytest.mark.composer, pytest.mark.filterwarnings("ignore")]
Build = Callable[[], Any]

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
    "vocab_size": VOCABULARY,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
GROUPED, HEAD = {"num_key_value_heads": 2}, {"head_dim": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def causal(kind: str, **config: Any) -> nn.Module:
    words = f"{kind}Config {kind.removesuffix('Text')}ForCausalLM"
    return with_units(build(words, device="cpu", **SIZES | config))


def mpt(**config: Any) -> nn.Module:
    from llmfoundry.models.mpt.modeling_mpt import MPTConfig, MPTForCausalLM

    attention = {"attn_impl": "torch", **config.pop("attn_config", {})}
    sizes = {"d_model": 16, "n_heads": 4, "n_layers": 1, "vocab_size": VOCABULARY, "max_seq_len": 16}
    model = nn.Module()
    model.model = MPTForCausalLM(MPTConfig(**sizes, attn_config=attention, **config))
    return with_units(model)


def with_units(model: nn.Module) -> nn.Module:
    model.model.fsdp_wrap_fn = lambda module: type(module).__name__.endswith(("Layer", "Block"))
    return model


# Each has a plan with a specific requirement; the others resemble one of these.
MODELS: dict[str, Build] = {
    "Llama, grouped and tied": partial(causal, "Llama", tie_word_embeddings=True, **GROUPED),
    "Qwen3": partial(causal, "Qwen3", **HEAD),
    "Gemma3": partial(causal, "Gemma3Text", attn_implementation="eager", **HEAD),
    "Phi3": partial(causal, "Phi3"),
    "GPTNeoX": partial(causal, "GPTNeoX"),
    "Starcoder2": partial(causal, "Starcoder2"),
    "Mixtral": partial(causal, "Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "MPT, alibi, GLU, grouped": partial(
        mpt,
        attn_config={"alibi": True, "attn_type": "grouped_query_attention", "kv_n_heads": 2},
        ffn_config={"ffn_type": "mptglu"},
    ),
}
LIKE_THESE: dict[str, Build] = {
    "Qwen2": partial(causal, "Qwen2"),
    "Mistral": partial(causal, "Mistral", **GROUPED),
    "Gemma": partial(causal, "Gemma", **HEAD),
    "Gemma2": partial(causal, "Gemma2", attn_implementation="eager", **HEAD),
    "Phi": partial(causal, "Phi", qk_layernorm=True),
    "Olmo": partial(causal, "Olmo"),
    "Olmo2": partial(causal, "Olmo2"),
    "Glm": partial(causal, "Glm", **HEAD),
    "Granite": partial(causal, "Granite"),
    "Qwen2Moe": partial(causal, "Qwen2Moe", shared_expert_intermediate_size=8, **EXPERTS),
    "Qwen3Moe": partial(causal, "Qwen3Moe", **EXPERTS, **HEAD),
    "MPT": mpt,
    "MPT, not fused, norms": partial(mpt, attn_config={"fused_qkv": False, "qk_ln": True}),
}


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = model.model(input_ids=tokens).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@mock.patch.object(torch.Tensor, "float", torch.Tensor.double)  # norms and angles that transformers rounds to float32
def check_model(make: Build, degree: int) -> Distances:
    return check_carried(Carried(build=make, plan=lambda: "auto", degree=degree, num_shared=degree, loss=loss_of))


def check_models(models: dict[str, Build], degrees: tuple[int, ...]) -> None:
    cases = {f"{name}, {degree}": (make, degree) for name, make in models.items() for degree in degrees}
    for_each(check_model, cases)


@on_ranks(4)
def test_known_models_are_split_by_their_own_plans(folder: str) -> None:
    """Losses, clipped norms and weights equal those of one process, for each part that transformers' plans omit: norms
    of queries and keys, tied and scaled embeddings, fused projections, two key heads on four ranks."""
    check_models(MODELS, (4,))
    check_models({name: MODELS[name] for name in ("Qwen3", "GPTNeoX")}, (2,))


@pytest.mark.slow
@on_ranks(4)
def test_all_known_models_on_two_and_four_ranks(folder: str) -> None:
    """The models of the first test with the other world size, and the models that resemble them."""
    check_models(LIKE_THESE, (2, 4))
    check_models(MODELS, (2,))


# --- the plan


def split_of(make: Build, plan: Any = "auto", degree: int = 2) -> dict[str, str]:
    with torch.device("meta"):
        model = make()
    config = config_of(FULL, world_size=2 * degree, tensor_parallel_degree=degree)
    return {each.path: each.style for each in plan_sharding(model, config, tensor_parallel=plan).split}


def unsplit(make: Build) -> list[str]:
    """The linear layers and embeddings of the first layer, and outside of layers, that are in no plan."""
    planned = split_of(make)
    with torch.device("meta"):
        modules = make().named_modules()
    kinds = (nn.Linear, nn.Embedding)
    return [path for path, each in modules if isinstance(each, kinds) and path not in planned and ".1." not in path]


def test_every_layer_is_split_but_those_that_cannot_be():
    """A plan that omitted layers would train correctly, and save no memory."""
    left = {name: found for name, make in (MODELS | LIKE_THESE).items() if (found := unsplit(make))}
    scaled = ["model.model.embed_tokens", "model.lm_head"]  # of Gemma's own class, and tied
    of_mpt = ["model.transformer.wte"]  # also its head
    layer = "model.model.layers.0.mlp"
    assert left == {
        "Gemma3": scaled,
        "MPT, alibi, GLU, grouped": of_mpt,
        "MPT": [*of_mpt, "model.transformer.wpe"],
        "MPT, not fused, norms": [*of_mpt, "model.transformer.wpe"],
        "Qwen2Moe": [f"{layer}.gate", f"{layer}.shared_expert_gate"],
        "Qwen3Moe": [f"{layer}.gate"],
    }, left


def test_the_plan_sums_what_each_rank_has_of_the_gradient_of_a_norm():
    """Qwen3's and Gemma3's norms of queries and keys, which transformers 4.51 omits."""
    for name in ("Qwen3", "Gemma3"):
        planned = split_of(MODELS[name])
        for norm in ("q_norm", "k_norm"):
            assert "SequenceParallel" in planned[f"model.model.layers.0.self_attn.{norm}"]


def of_layers(*paths: str, style: Callable[[], ParallelStyle]) -> dict[str, ParallelStyle]:
    return {f"model.model.layers.*.{path}": style() for path in paths}


REFUSED: dict[str, tuple[Build, Any, tuple[str, ...]]] = {
    "a layer of two projections": (
        MODELS["Phi3"],
        of_layers("mlp.gate_up_proj", style=ColwiseParallel) | of_layers("mlp.down_proj", style=RowwiseParallel),
        ("model.model.layers.0.mlp.gate_up_proj", "several projections", "ColwiseParallel(output_layouts=Replicate())"),
    ),
    "GPT-2's layers, which are no nn.Linear": (
        partial(build, "GPT2Config GPT2LMHeadModel", n_embd=16, n_head=4, n_layer=1),
        "auto",
        ("no plan is known for GPT2LMHeadModel, GPT2Model", "Give a layer_plan"),
    ),
    "a model of nobody's": (lambda: nn.Sequential(nn.Linear(4, 4)), "auto", ("no plan is known for Sequential",)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_plan_is_told(case: str) -> None:
    """A model without a plan would train, slower than without the key, on batches that ranks share."""
    make, plan, says = REFUSED[case]
    with pytest.raises(PlanError) as caught:
        split_of(make, plan)
    assert all(text in str(caught.value) for text in says), caught.value
