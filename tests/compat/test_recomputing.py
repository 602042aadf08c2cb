"""Hugging Face models whose layers a policy recomputes: the numbers of one process, and a cache where it is wanted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import full
from support.ranks import run_ranks
from support.training import FULL, assert_close, named_parameters
from torch import nn

pytestmark = pytest.mark.composer

VOCABULARY, NUM_LAYERS = 67, 2


def build(architecture: str) -> Any:
    """A ComposerModel around a small model from its configuration, without hooks; with transformers' use_cache."""
    from composer.models import HuggingFaceModel

    torch.manual_seed(0)
    inner = {"llama": llama, "t5": t5, "gpt2": gpt2}[architecture]().to(torch.float64)
    assert inner.config.use_cache, "transformers has another default than before"
    return HuggingFaceModel(inner, tokenizer=None, use_logits=True)


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=26,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            max_position_embeddings=32,
            initializer_range=0.5,
            repetition_penalty=1.1,  # with which transformers makes the generation_config anew from this
        )
    )


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            d_model=16,
            d_kv=4,
            d_ff=24,
            num_layers=NUM_LAYERS,
            num_heads=4,
            vocab_size=VOCABULARY,
            dropout_rate=0.0,
            initializer_factor=3.0,
            decoder_start_token_id=0,
        )
    )


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    none: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_head=2, n_layer=NUM_LAYERS, vocab_size=VOCABULARY, **none))


LAYERS = {"llama": ("LlamaDecoderLayer", NUM_LAYERS), "t5": ("T5Block", 2 * NUM_LAYERS), "gpt2": ("GPT2Block", 2)}
AUTO = {"transformer_layer_cls_to_wrap": "auto"}
ON = {"activation_checkpointing": True}


def prompts(seed: int, length: int = 7) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed))


def loss(model: Any, seed: int) -> torch.Tensor:
    x = prompts(seed)
    return model({"input_ids": x, "labels": x.clone(), "attention_mask": torch.ones_like(x)})["loss"]


def count_forwards(model: nn.Module, class_name: str) -> Counter[str]:
    """How often each module of a class runs from here on, by its path; a recomputation is one more."""
    counts: Counter[str] = Counter()
    for path, module in model.named_modules():
        if type(module).__name__ == class_name:
            module.register_forward_pre_hook(lambda module, args, path=path: counts.update([path]))
    return counts


def check_alike(architecture: str, config: dict[str, Any]) -> None:
    """Two steps of the sharded model beside one process on all batches, then generation with a cache."""
    from composer_fsdp2 import prepare_fully_shard

    model, reference = build(architecture), build(architecture)
    class_name, num_layers = LAYERS[architecture]
    counts = count_forwards(model, class_name)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference))
    prepare_fully_shard(model, ours, FULL | {"wrap_policy": AUTO} | config, device="cpu")
    is_recomputed = "activation_checkpointing_policy" in config
    assert model.model.config.use_cache, "another model may have been made from it, and a checkpoint has it"
    for step in range(2):
        counts.clear()
        ours_now = loss(model, 2 * step + dist.get_rank())
        ours_now.backward()
        assert len(counts) == num_layers and set(counts.values()) == {1 + is_recomputed}, counts
        for peer in range(2):
            expected = loss(reference, 2 * step + peer)
            (expected / 2).backward()
            if peer == dist.get_rank():
                assert_close("loss", ours_now, expected.detach(), rtol=1e-6, atol=0)  # norms compute in fp32
        sharded = named_parameters(model)
        for name, parameter in reference.named_parameters():
            assert_close(name, full(sharded[name].grad), parameter.grad, rtol=1e-5, atol=1e-7)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_generates(model, reference, class_name)


def assert_generates(model: Any, reference: Any, class_name: str) -> None:
    """The same tokens, with a cache, although nobody asks for one."""
    options = {"do_sample": False, "max_new_tokens": 5, "pad_token_id": 0}
    for each in (model, reference):
        each.eval()
    x = prompts(dist.get_rank(), length=4)
    lengths: list[int] = []
    *_, last = (module for module in model.modules() if type(module).__name__.endswith(class_name))
    last.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    assert torch.equal(model.generate(x, **options), reference.generate(x, **options))
    assert lengths[-1] == 1, f"generates without a cache: {lengths}"


CASES = {
    "nothing is recomputed": {},
    "auto, reentrant": ON | {"activation_checkpointing_policy": "auto"},
    "not reentrant": ON | {"activation_checkpointing_policy": "auto", "activation_checkpointing_reentrant": False},
}


def check_all() -> None:
    cases: dict[str, tuple[Any, ...]] = {
        f"{architecture}, {name}": (architecture, config)
        for architecture in ("llama", "t5")
        for name, config in CASES.items()
    }
    by_name = ON | {"activation_checkpointing_policy": ["GPT2Block"]}
    for_each(check_alike, cases | {"gpt2 by name": ("gpt2", by_name)})


def test_recomputed_layers_of_hugging_face_models_train_right():
    """transformers fills a cache in training unless it is told not to; a layer that runs again adds to it twice: torch
    raises, or, where it reenters, trains on wrong gradients under a loss that is right."""
    run_ranks(check_all, 2)


def test_the_cache_is_why():
    """The day transformers guards its cache by itself this fails, and use_cache need not be touched any more."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

    model, reference = build("llama"), build("llama")
    layers = model.model.model.layers
    for number, layer in enumerate(layers):
        layers[number] = checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    loss(reference, 0).backward()
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        loss(model, 0).backward()


def test_what_is_turned_off_is_told_and_only_then_done():
    """The plan names the models; who only looks at it keeps the cache, and where nothing is recomputed so does all."""
    from composer_fsdp2 import ActivationCheckpointing, ShardingConfig, apply_activation_checkpointing, plan_sharding

    model = build("llama")
    config = ShardingConfig(activation_checkpointing=ActivationCheckpointing(checkpoint=True, classes=()))
    plan = plan_sharding(model, config)
    assert plan.caching == ("model", "model.model")
    assert any("use_cache is off in training for model and 1 more: a layer" in note for note in plan.notes)
    assert not model.model._forward_pre_hooks
    offloaded = ActivationCheckpointing(cpu_offload=True, classes=())
    assert plan_sharding(model, ShardingConfig(activation_checkpointing=offloaded)).caching == ()
    apply_activation_checkpointing(model, check_fn=lambda module: type(module).__name__ == "LlamaDecoderLayer")
    loss(model, 0).backward()
    with torch.no_grad():
        assert model.model(prompts(0)).past_key_values is not None
    # Given by somebody, by position and by name.
    assert model.model(prompts(0), None, None, None, None, None, True).past_key_values is None
    assert model.model(prompts(0), use_cache=True).past_key_values is None


def test_a_model_with_adapters_keeps_peft_s_names():
    """A layer of an adapted model is known as peft calls it; transformers' name for it is answered with that."""
    pytest.importorskip("peft")
    from composer.models import HuggingFaceModel
    from peft import LoraConfig

    from composer_fsdp2 import ActivationCheckpointing, PlanError, ShardingConfig, plan_sharding

    lora = LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj"])
    model = HuggingFaceModel(llama(), tokenizer=None, use_logits=True, peft_config=lora)
    checkpointing = ActivationCheckpointing(checkpoint=True, classes=())
    path = "base_model.model.model.layers.0"
    plan = plan_sharding(model, ShardingConfig(freeze=(path,), activation_checkpointing=checkpointing))
    assert plan.checkpointed == tuple(f"model.base_model.model.model.layers.{number}" for number in range(NUM_LAYERS))
    assert plan.frozen and all(name.startswith(f"model.{path}.") for name in plan.frozen)
    assert plan.caching
    with pytest.raises(PlanError, match=rf"did you mean model\.{path}\?"):
        plan_sharding(model, ShardingConfig(freeze=("model.layers.0",)))
    with pytest.raises(PlanError, match="freeze leaves nothing to train"):
        plan_sharding(model, ShardingConfig(freeze=("base_model.model.model",)))
