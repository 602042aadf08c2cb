"""Hugging Face models, sharded, train and generate as in one process, with adapters and activation checkpointing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import assert_same, full
from support.examples import IS_THOROUGH
from support.known_models import BLOCKS, TEXT, hugging_face
from support.on_ranks import on_ranks
from support.training import FULL, assert_close, named_parameters
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from composer_fsdp2 import (
    ActivationCheckpointing,
    PlanError,
    ShardingConfig,
    apply_activation_checkpointing,
    plan_sharding,
    prepare_fully_shard,
    summon_full_params,
)

pytestmark = pytest.mark.composer

NEW_TOKENS = 4
OPTIONS: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}


def prompts(seed: int, length: int = 5) -> torch.Tensor:
    return torch.randint(3, TEXT["vocab_size"], (2, length), generator=torch.Generator().manual_seed(seed))


def batch(seed: int) -> dict[str, torch.Tensor]:
    x = prompts(seed, length=7)
    return {"input_ids": x, "labels": x.clone(), "attention_mask": torch.ones_like(x)}


def loss(model: Any, seed: int) -> torch.Tensor:
    return model(batch(seed))["loss"]


# Composer's method, and the method of its child that it calls.
WAYS: dict[str, Callable[..., torch.Tensor]] = {
    "model.generate": lambda model, x, **options: model.generate(x, **options),
    "model.model.generate": lambda model, x, **options: model.model.generate(input_ids=x, **options),
}


def assert_same_tokens(when: str, model: Any, reference: Any, **options: Any) -> set[int]:
    """Compares the tokens of each way to generate with the unsharded model's, on different prompts for each rank; then
    an evaluation."""
    seen: set[int] = set()
    for each in (model, reference):
        each.eval()
    for seed, (way, generate) in enumerate(WAYS.items()):
        x = prompts(10 * seed + dist.get_rank(), length=4 + seed)
        actual, expected = (generate(each, x, **OPTIONS | options) for each in (model, reference))
        assert torch.equal(actual, expected), f"{when}, {way}: {actual}, unsharded {expected}"
        seen.update(actual.flatten().tolist())
    with torch.no_grad():
        ours, theirs = (each.eval_forward(batch(7)) for each in (model, reference))
    torch.testing.assert_close(ours, theirs, msg=lambda text: f"{when}, evaluation: {text}")
    for each in (model, reference):
        each.train()
    return seen


def count_forwards(model: nn.Module, class_name: str) -> Counter[str]:
    """Counts the forwards of each module of a class, by its path; recomputation adds one."""
    counts: Counter[str] = Counter()
    for path, module in model.named_modules():
        if type(module).__name__ == class_name:
            module.register_forward_pre_hook(lambda module, args, path=path: counts.update([path]))
    return counts


def check(kind: str, config: dict[str, Any], **options: Any) -> Any:
    """Compares a step of the sharded model with one process on all batches, and the tokens before and after the
    step."""
    model, reference = hugging_face(kind, **options), hugging_face(kind, **options)
    counts = count_forwards(model, BLOCKS[kind])
    ours, theirs = (
        torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1) for each in (model, reference)
    )
    prepare_fully_shard(model, ours, FULL | config, device="cpu")
    assert isinstance(model.model, FSDPModule)
    assert model.model.config.use_cache == reference.model.config.use_cache, "a checkpoint has it"
    before = assert_same_tokens("before training", model, reference)
    counts.clear()
    loss_now = loss(model, dist.get_rank())
    loss_now.backward()
    assert set(counts.values()) == {1 + ("activation_checkpointing" in config)}, counts
    for peer in range(dist.get_world_size()):
        expected = loss(reference, peer)
        (expected / dist.get_world_size()).backward()
        if peer == dist.get_rank():
            assert_close("loss", loss_now, expected.detach(), rtol=1e-6, atol=0)  # norms compute in fp32
    for optimizer in (ours, theirs):
        optimizer.step()
    sharded = named_parameters(model)
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            assert_close(name, full(sharded[name].grad), parameter.grad, rtol=1e-5, atol=1e-7)
        assert_close(name, full(sharded[name]), parameter.detach(), rtol=1e-6, atol=1e-8)
    for optimizer in (ours, theirs):
        optimizer.zero_grad()
    after = assert_same_tokens("after a step", model, reference)
    assert len(before | after) > NEW_TOKENS, f"hardly any tokens: {before}, {after}"
    if "activation_checkpointing" not in config:
        # As newer releases of Composer, and transformers' Trainer, do.
        with summon_full_params(model, writeback=False):
            assert_same_tokens("within a block", model, reference)
    return model


ZERO_2 = {"sharding_strategy": "SHARD_GRAD_OP"}
REENTRANT = {"activation_checkpointing": True}
NOT_REENTRANT = {"activation_checkpointing": True, "activation_checkpointing_reentrant": False}
CACHE = {"use_cache": True}  # transformers' default, in training too; otherwise the configuration disables it
AUTO = {"wrap_policy": {"transformer_layer_cls_to_wrap": "auto"}, "activation_checkpointing_policy": "auto"}
BY_NAME = AUTO | {"activation_checkpointing_policy": ["GPT2Block"]}
ADAPTERS = {"adapters": True}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tied": ("gpt2", ZERO_2, {"tie_word_embeddings": True}),
    "recomputed by name": ("gpt2", REENTRANT | BY_NAME, CACHE | {"hooks": False}),
    # With a penalty transformers recreates the generation_config from the model's own.
    "recomputed by a policy": ("llama", REENTRANT | AUTO, CACHE | {"hooks": False, "repetition_penalty": 1.1}),
    "encoder and decoder, recomputed": ("t5", NOT_REENTRANT | AUTO, CACHE | {"hooks": False}),
    "adapters, encoder and decoder": ("t5", {}, ADAPTERS | CACHE),
}
if IS_THOROUGH:
    CASES["untied, recomputed by hooks"] = ("llama", NOT_REENTRANT, {"tie_word_embeddings": False})
    CASES["adapters, untied"] = ("llama", ZERO_2, ADAPTERS | {"tie_word_embeddings": False})


@on_ranks(2)
def test_they_train_and_generate_as_in_one_process():
    """Generated text, its metrics and reinforcement learning would use other tokens: T5's generation bypasses the
    model's forward, and peft's calls the inner module of the sharded one. A cache that transformers fills in training
    receives everything twice from a recomputed layer: wrong gradients with a correct loss."""
    for_each(lambda kind, config, options: check(kind, config, **options), CASES)
    low = {"dtype": torch.bfloat16, **ADAPTERS}
    dtypes = {parameter.dtype for name, parameter in hugging_face("llama", **low).named_parameters() if "lora" in name}
    assert dtypes == {torch.float32}, "peft gives adapters another dtype than before"
    model = check("llama", {}, **low)
    whole = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    assert not whole, f"one unit cannot gather two dtypes; not sharded: {whole}"


# --- ranks that end at different lengths


@on_ranks(2)
def test_ranks_that_stop_early_go_on_gathering():
    """A rank whose texts are complete would leave the others waiting for its shards until the time-out."""

    def check(options: dict[str, Any]) -> None:
        """One rank's first prompts end after one new token, the other's continue; then both evaluate."""
        model, reference = (hugging_face("llama", **options) for _ in range(2))
        prepare_fully_shard(model, None, FULL, device="cpu")
        x = prompts(dist.get_rank())[:1]
        first = [int(reference.generate(x, **OPTIONS)[0, -NEW_TOKENS])]
        dist.broadcast_object_list(first, src=0)
        lengths = [each.generate(x, eos_token_id=first[0], **OPTIONS).shape[1] for each in (model, reference)]
        assert lengths[0] == lengths[1], lengths
        assert (lengths[0] == x.shape[1] + 1) == (dist.get_rank() == 0), f"both ranks generate as long: {lengths}"
        assert_same_tokens("afterwards", model, reference, eos_token_id=first[0])

    for_each(check, {"plain": ({},), "adapters": (ADAPTERS,)})


@on_ranks(2)
def test_a_compiled_model_fills_no_cache():
    """The hook that disables use_cache is traced with the model: recomputed layers must not use a cache."""

    def check(config: dict[str, Any], backend: str) -> None:
        torch.compiler.reset()
        counters.clear()
        model, reference = (hugging_face("llama", **CACHE) for _ in range(2))
        prepare_fully_shard(model, None, FULL | config, device="cpu")
        model.model.compile(backend=backend)
        loss(model, dist.get_rank()).backward()
        assert counters["frames"]["ok"], "nothing was compiled"
        for peer in range(dist.get_world_size()):
            (loss(reference, peer) / dist.get_world_size()).backward()
        sharded = named_parameters(model)
        for name, parameter in reference.named_parameters():
            assert_close(name, full(sharded[name].grad), parameter.grad, rtol=1e-5, atol=1e-7)

    from torch._dynamo.utils import counters  # slow to import

    backends = ("eager", "aot_eager") if IS_THOROUGH else ("aot_eager",)
    for_each(check, {f"{each}, {config}": (config, each) for each in backends for config in (REENTRANT, NOT_REENTRANT)})


# --- full parameters


@on_ranks(2)
def test_hugging_faces_unwrapping():
    """transformers' and accelerate's functions unwrap a model as long as it has a `module` attribute: saving a model
    would end in a RecursionError, or never."""
    # For the model, and for a unit in it.
    import accelerate.utils
    from peft.tuners.lora.corda import get_model_device
    from transformers import modeling_utils

    model = hugging_face("gpt2")
    prepare_fully_shard(model, None, FULL, device="cpu")
    for unit in (model.model, model.model.transformer.h[0]):
        children = dict(unit.named_modules())
        unwrapped = [modeling_utils.unwrap_model(unit, recursive=recursive) for recursive in (False, True)]
        with mock.patch.object(modeling_utils, "is_accelerate_available", return_value=False):
            unwrapped.append(modeling_utils.unwrap_model(unit))
        for options in ({}, {"recursive": True}, {"keep_fp32_wrapper": False}):
            unwrapped.append(accelerate.utils.extract_model_from_parallel(unit, **options))
        assert all(each is unit for each in unwrapped)
        assert get_model_device(unit) == "cpu"
        assert unit.module is unit  # for a script
        assert dict(unit.named_modules()) == children


@on_ranks(2)
def test_save_adapters(folder: str):
    """peft saves the full adapters, and reads no unit's `module`."""
    from peft.utils import get_peft_model_state_dict
    from safetensors.torch import load_file

    model = hugging_face("gpt2", adapters=True)
    expected = {name: value.clone() for name, value in get_peft_model_state_dict(model.model).items()}
    prepare_fully_shard(model, None, FULL, device="cpu")
    root = model.model
    with root.summon_full_params(root, writeback=False):
        assert_same(get_peft_model_state_dict(root), expected)
        if dist.get_rank() == 0:
            root.save_pretrained(folder)
    dist.barrier()
    assert_same(load_file(Path(folder, "adapter_model.safetensors")), expected)


# --- plans


@on_ranks(1)
def test_what_is_turned_off_is_told_and_only_then_done():
    """The plan lists the models whose cache it disables. Planning alone keeps the cache, as does a plan without
    activation checkpointing."""
    model = hugging_face("llama", hooks=False, **CACHE)
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
    # With a user's use_cache, positional and by keyword.
    assert model.model(prompts(0), None, None, None, None, None, True).past_key_values is None
    assert model.model(prompts(0), use_cache=True).past_key_values is None


@on_ranks(1)
def test_a_model_with_adapters_keeps_peft_s_names():
    """A layer of a model with adapters is addressed by peft's name; the error for transformers' name suggests it."""
    model = hugging_face("llama", hooks=False, **ADAPTERS, **CACHE)
    checkpointing = ActivationCheckpointing(checkpoint=True, classes=())
    path = "base_model.model.model.layers.0"
    plan = plan_sharding(model, ShardingConfig(freeze=(path,), activation_checkpointing=checkpointing))
    assert plan.checkpointed == tuple(f"model.base_model.model.model.layers.{number}" for number in range(2))
    assert plan.frozen and all(name.startswith(f"model.{path}.") for name in plan.frozen)
    assert plan.caching
    with pytest.raises(PlanError, match=rf"did you mean model\.{path}\?"):
        plan_sharding(model, ShardingConfig(freeze=("model.layers.0",)))
    with pytest.raises(PlanError, match="freeze leaves nothing to train"):
        plan_sharding(model, ShardingConfig(freeze=("base_model.model.model",)))
