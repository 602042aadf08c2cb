"""A step on real ranks beside its plan, of models of several families: ``beside_plan(case)``.

What is planned knows the model on the meta device alone; what is counted is every storage that operators make on a
rank (``StateBytes``), and every collective. Imports models only when called.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from composer_fsdp2 import begin_microbatch, prepare_fully_shard
from composer_fsdp2.estimate._torch.counting import Collectives, StateBytes
from composer_fsdp2.preflight.planned import Questions, plan_step
from composer_fsdp2.preflight.planned_model import built, loss_of, of_model
from composer_fsdp2.preflight.preflight_run import OptimizerChoice

ROWS, TOKENS, VOCABULARY, WIDTH = 2, 96, 160, 64
POLICY = {"wrap_policy": {"transformer_layer_cls_to_wrap": "auto"}}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model and how it is trained.

    Args:
        model: By its name in ``MODELS``.
        config: An ``fsdp_config``.
        tensor: Over how many ranks layers are split.
    """

    model: str
    config: dict[str, Any] = field(default_factory=dict)
    precision: str = "amp_bf16"
    tensor: int = 1
    microbatches: int = 1
    world: int = 2
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step takes and sends on rank 0.

    Args:
        peak: Of all storages.
        state: Of parameters, gradients, and buffers of collectives.
        sent: How often each collective, by its full buffer's bytes and its ranks.
    """

    peak: int
    sent: Counter[tuple[str, int, int]]


def planned(case: Case) -> tuple[Step, Any]:
    with torch.device("meta"):
        model = MODELS[case.model](**case.options)
    model = built(model)
    run = of_model(
        model,
        config_of(case, model),
        world_size=case.world,
        precision=case.precision,
        tensor_parallel={"tensor_parallel_degree": case.tensor, "layer_plan": "auto"} if case.tensor > 1 else None,
        loss=loss_of(model, keeps_outputs=True),
        microbatch=ROWS,
        num_microbatches=case.microbatches,
        sequence=TOKENS,
        optimizer=OptimizerChoice(name="SGD", options={"momentum": 0.9}),
        device="cpu",
    )
    step = plan_step(run, case.model, Questions()).estimate
    sent = Counter((call.op, call.num_bytes, call.ranks) for call in step.calls)
    return Step(peak=step.peak_bytes, sent=sent), step, run


_OPS = {
    "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter", "allreduce_": "all_reduce",
    "broadcast_": "broadcast", "alltoall_base_": "all_to_all", "all_gather_into_tensor": "all_gather",
    "all_reduce": "all_reduce", "reduce_scatter_tensor": "reduce_scatter", "all_to_all_single": "all_to_all",
}  # fmt: skip


def counted(case: Case) -> tuple[int, dict[str, int], Counter[tuple[str, int, int]]]:
    """The second of two steps. Called on all ranks."""
    torch.manual_seed(0)
    model = built(MODELS[case.model](**case.options))
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-3, momentum=0.9, foreach=True)
    tensor = {"tensor_parallel_degree": case.tensor, "layer_plan": "auto"} if case.tensor > 1 else None
    prepare_fully_shard(
        model, optimizer, config_of(case, model), precision=case.precision, device="cpu", tensor_parallel=tensor
    )
    loss = loss_of(model, keeps_outputs=True)
    # Ranks that divide sequences gather the rows that each of them reads.
    rows = ROWS * case.config.get("context_parallel_degree", 1)
    state, held = StateBytes(model, optimizer), None
    for _ in range(2):
        state.peak = state.peak_of_all = 0
        with Collectives() as sent, state:
            for number in range(case.microbatches):
                begin_microbatch(model, is_last=number == case.microbatches - 1)
                with autocast(case.precision), mock.patch.object(torch, "topk", balanced):
                    held = loss(model, rows, TOKENS)
                torch.autograd.backward(held[0])
            optimizer.step()
            optimizer.zero_grad()
    del held
    calls = Counter((_OPS[each.operator], each.num_bytes, each.ranks) for each in sent.calls)
    buffers = sum(each.nbytes for each in model.buffers())
    return state.peak_of_all, {"buffers": buffers, "state": state.peak, **state.at_peak}, calls


_topk = torch.topk


def balanced(values: torch.Tensor, k: int, dim: int = -1, **options: Any) -> Any:
    """Each expert is chosen as often as the others."""
    found, chosen = _topk(values, k, dim=dim, **options)
    return found, (torch.arange(chosen.numel()) % values.shape[-1]).view(chosen.shape)


def autocast(precision: str) -> Any:
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)


def config_of(case: Case, model: nn.Module) -> dict[str, Any]:
    has_hooks = any(hasattr(each, "fsdp_wrap_fn") for each in model.children())
    return {**({} if has_hooks else POLICY), "mixed_precision": "PURE", "activation_checkpointing_reentrant": False, **case.config}


def llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=TOKENS, use_cache=False, **options,
    ))  # fmt: skip


def gpt2(**options: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(
        vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=WIDTH, n_layer=4, n_head=4, use_cache=False,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, **options,
    ))  # fmt: skip


def t5(**options: Any) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=16, d_ff=2 * WIDTH, num_layers=3, num_heads=4,
        decoder_start_token_id=0, use_cache=False, **options,
    ))  # fmt: skip


def qwen3_moe(**options: Any) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=TOKENS, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=WIDTH, use_cache=False, **options,
    ))  # fmt: skip


def mpt(**options: Any) -> nn.Module:
    from llmfoundry.models import ComposerMPTCausalLM

    return ComposerMPTCausalLM(
        d_model=WIDTH, n_heads=4, n_layers=4, expansion_ratio=4, max_seq_len=TOKENS, vocab_size=VOCABULARY,
        attn_config={"attn_impl": "torch"}, loss_fn="torch_crossentropy", **options,
    )  # fmt: skip


def mpt_experts(**options: Any) -> nn.Module:
    experts = {
        "ffn_type": "torch_dmoe", "ffn_hidden_size": 2 * WIDTH, "mlp_type": "mlp", "moe_num_experts": 4,
        "moe_top_k": 2, "moe_normalize_expert_weights": 1, "moe_jitter_eps": None, "uniform_expert_assignment": False,
        "ffn_act_fn": {"name": "gelu"},
    }  # fmt: skip
    return mpt(ffn_config=experts, **options)


def lora_units(**options: Any) -> nn.Module:
    """With each adapter as a unit, as LLM Foundry has it."""
    model = lora(**options)
    for name, module in model.named_modules():
        if "lora" in name and "default" in name and next(module.parameters(), None) is not None:
            module._fsdp_wrap = True
    model.fsdp_wrap_fn = model.activation_checkpointing_fn = lambda module: type(module).__name__ == "LlamaDecoderLayer"
    return model


def lora(**options: Any) -> nn.Module:
    """As LLM Foundry builds it: adapters are units of their own, for their base is frozen."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM", lora_dropout=0.0)
    return get_peft_model(llama(**options), adapters)


MODELS: dict[str, Callable[..., nn.Module]] = {
    each.__name__: each for each in (llama, gpt2, t5, qwen3_moe, mpt, mpt_experts, lora, lora_units)
}


def beside_plan(cases: dict[str, Case]) -> dict[str, tuple[Any, ...]]:
    """For each case what was counted. Called on all ranks."""
    return {name: counted(case) for name, case in cases.items()}
