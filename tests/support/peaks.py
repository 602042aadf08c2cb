"""A step on real ranks compared with its plan, for models of several families: ``differences(cases)`` on all ranks.

The plan sees the model on the meta device only; the counter sees every storage that operators make on a rank
(``StateBytes``), and every collective. Imports models only when called.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from composer_fsdp2 import begin_microbatch, prepare_fully_shard
from composer_fsdp2.estimate._torch.counting import Collectives, StateBytes
from composer_fsdp2.preflight.batch_keys import Batches
from composer_fsdp2.preflight.planned import StepOptions, plan_step
from composer_fsdp2.preflight.planned_model import Training, built, planned_run
from composer_fsdp2.preflight.preflight_run import OptimizerChoice, PreflightRun
from composer_fsdp2.preflight.run_file import Request
from composer_fsdp2.preflight.selective import recompute_by_operator

ROWS, TOKENS, VOCABULARY, WIDTH = 2, 96, 160, 64
POLICY = {"wrap_policy": {"transformer_layer_cls_to_wrap": "auto"}}
SGD = OptimizerChoice(name="SGD", options={"momentum": 0.9})


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model and its training.

    Args:
        model: Its name in ``MODELS``.
        config: An ``fsdp_config``.
        tensor: The tensor parallel degree.
        within: The tolerance of the planned peak; 0 is to the byte.
    """

    model: str
    config: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "amp_bf16"
    tensor: int = 1
    microbatches: int = 1
    within: float = 0.0

    def settings(self, model: nn.Module) -> dict[str, Any]:
        """The arguments of ``prepare_fully_shard`` and its plan."""
        names_blocks = any(hasattr(each, "fsdp_wrap_fn") for each in model.children())
        base = {"mixed_precision": "PURE", "activation_checkpointing_reentrant": False}
        return {
            "fsdp_config": {**base, **({} if names_blocks else POLICY), **self.config},
            "precision": self.precision,
            "device": "cpu",
            "tensor_parallel": {"tensor_parallel_degree": self.tensor, "layer_plan": "auto"}
            if self.tensor > 1
            else None,
        }


@dataclass(frozen=True, kw_only=True)
class Step:
    """The memory of a step on one rank without buffers, and its collectives.

    Args:
        state: The peak of parameters, gradients, the optimizer's state, and buffers of collectives.
        sent: By collective, bytes of the full buffer, and ranks.
    """

    peak: int
    state: int
    sent: Counter[tuple[str, int, int]]


def run_of(case: Case, world_size: int) -> PreflightRun:
    with torch.device("meta"):
        model = built(MODELS[case.model]())
    batches = Batches(microbatch=ROWS, num_microbatches=case.microbatches, sequence=TOKENS, optimizer=SGD, findings=())
    settings = case.settings(model)
    training = Training(
        **{name: settings[name] for name in ("fsdp_config", "precision", "tensor_parallel")},
        batches=batches,
        keeps_outputs=True,
    )
    return planned_run(model, training, Request(world_size=world_size, device=settings["device"]))


def planned(case: Case, world_size: int) -> Step:
    run = run_of(case, world_size)
    step = plan_step(run, case.model, StepOptions())
    assert step.trace is not None
    state = run.estimate(step.trace.without_activations())
    in_microbatches = [each for each in state.timeline if each.microbatch >= 0]  # the optimizer's step allocates none
    buffers, estimate = step.trace.buffer_bytes, step.estimate
    return Step(
        peak=estimate.peak_bytes - buffers,
        state=max(each.total_bytes for each in in_microbatches) - buffers,
        sent=Counter((call.op, call.num_bytes, call.ranks) for call in estimate.calls),
    )


def counted(case: Case) -> Step:
    """Counts the second of two steps, run like Composer's Trainer. Called on all ranks."""
    torch.manual_seed(0)
    model = built(MODELS[case.model]())
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-3, momentum=0.9, foreach=True)
    prepare_fully_shard(model, optimizer, **case.settings(model))
    run = run_of(case, dist.get_world_size())
    loss, state, held = run.loss, StateBytes(model, optimizer), None
    rows = run.computed_rows  # with gather, the rows of all ranks that share a batch
    for _ in range(3):
        gc.collect()  # garbage of the first step's imports and traces
        state.peak = state.peak_of_all = 0
        with mock.patch.object(torch, "topk", balanced), Collectives() as sent, state:
            for number in range(case.microbatches):
                begin_microbatch(model, is_last=number == case.microbatches - 1)
                with autocast(case.precision):
                    held = loss(model, rows, TOKENS)
                torch.autograd.backward(held[0])
            optimizer.step()
            optimizer.zero_grad()
    del held
    calls = Counter((each.op, each.num_bytes, each.ranks) for each in sent.calls)
    return Step(peak=state.peak_of_all, state=state.peak, sent=calls)


_topk = torch.topk


def balanced(values: torch.Tensor, k: int, dim: int = -1, **options: Any) -> Any:
    """Each expert is chosen equally often, as a plan assumes."""
    found, chosen = _topk(values, k, dim=dim, **options)
    return found, (torch.arange(chosen.numel()) % values.shape[-1]).view(chosen.shape)


def autocast(precision: str) -> Any:
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)


def differences(cases: Mapping[str, Case]) -> dict[str, str]:
    """For each case with a wrong plan on rank 0, the counted values. Called on all ranks."""
    wrong: dict[str, str] = {}
    for name, case in cases.items():
        found = counted(case)
        # A process that runs ranks can also plan, on one rank only.
        expected = planned(case, dist.get_world_size()) if dist.get_rank() == 0 else found
        off = abs(expected.peak / found.peak - 1)
        # Under TP, CP and EP the counter classifies communication buffers as state.
        is_shared = case.tensor > 1 or {"context_parallel_degree", "expert_parallel_degree"} & case.config.keys()
        is_right = off <= case.within and expected.sent == found.sent
        if not (is_right and (is_shared or expected.state == found.state)):
            wrong[name] = (
                f"peak {expected.peak}, counted {found.peak} ({off:+.2%}); state {expected.state}, {found.state}; sent "
                f"{dict(found.sent - expected.sent)}, not {dict(expected.sent - found.sent)}"
            )
    return wrong


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=TOKENS, use_cache=False,
    ))  # fmt: skip


def llama_by_operator() -> nn.Module:
    """Checkpointed like TorchTitan's ``selective_ac_option = "op"``."""
    model = llama()
    recompute_by_operator(model.model.layers)
    return model


def llama_wrapped() -> nn.Module:
    """A script wrapped its blocks itself."""
    model = llama()
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = checkpoint_wrapper(layer)
    return model


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(
        vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=WIDTH, n_layer=4, n_head=4, use_cache=False,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
    ))  # fmt: skip


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=16, d_ff=2 * WIDTH, num_layers=3, num_heads=4,
        decoder_start_token_id=0, use_cache=False,
    ))  # fmt: skip


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=TOKENS, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=WIDTH, use_cache=False,
    ))  # fmt: skip


def mpt(**options: Any) -> nn.Module:
    from llmfoundry.models import ComposerMPTCausalLM

    import composer_fsdp2.compat.context_parallel  # noqa: F401  registers its context parallelism

    return ComposerMPTCausalLM(
        d_model=WIDTH, n_heads=4, n_layers=4, expansion_ratio=4, max_seq_len=TOKENS, vocab_size=VOCABULARY,
        attn_config={"attn_impl": "torch"}, loss_fn="torch_crossentropy", **options,
    )  # fmt: skip


def mpt_experts() -> nn.Module:
    experts = {
        "ffn_type": "torch_dmoe", "ffn_hidden_size": 2 * WIDTH, "mlp_type": "mlp", "moe_num_experts": 4,
        "moe_top_k": 2, "moe_normalize_expert_weights": 1, "moe_jitter_eps": None, "uniform_expert_assignment": False,
        "ffn_act_fn": {"name": "gelu"},
    }  # fmt: skip
    return mpt(ffn_config=experts)


def lora_units() -> nn.Module:
    """With each adapter as a unit, as in LLM Foundry."""
    model = lora()
    for name, module in model.named_modules():
        if "lora" in name and "default" in name and next(module.parameters(), None) is not None:
            module._fsdp_wrap = True
    model.fsdp_wrap_fn = model.activation_checkpointing_fn = lambda module: type(module).__name__ == "LlamaDecoderLayer"
    return model


def lora() -> nn.Module:
    """With adapters in the units of their blocks."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM", lora_dropout=0.0
    )
    return get_peft_model(llama(), adapters)


_BUILDERS = (llama, llama_by_operator, llama_wrapped, gpt2, t5, qwen3_moe, mpt, mpt_experts, lora, lora_units)
MODELS: dict[str, Callable[..., nn.Module]] = {each.__name__: each for each in _BUILDERS}
