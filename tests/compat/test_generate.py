"""A sharded Hugging Face model generates the tokens of the unsharded one: before and after training, with adapters."""

from __future__ import annotations

import json
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import full
from support.ranks import run_ranks
from support.training import FULL, assert_close, named_parameters
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

pytestmark = pytest.mark.composer

VOCABULARY = 67
NEW_TOKENS = 6
# With a cache, which a model that recomputes its blocks cannot have in training.
OPTIONS: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "use_cache": True}


def build(architecture: str, *, tied: bool = True, adapters: bool = False, dtype: torch.dtype = torch.float64) -> Any:
    """A ComposerModel around a small model that is drawn from seed 0: widely, so that tokens are not all the same."""
    from composer.models import HuggingFaceModel

    torch.manual_seed(0)
    inner, block_type = ARCHITECTURES[architecture](tied)
    inner.to(dtype)
    config = None
    if adapters:
        from peft import LoraConfig

        config = LoraConfig(
            r=3,
            task_type="SEQ_2_SEQ_LM" if architecture == "t5" else "CAUSAL_LM",
            target_modules={"gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"], "t5": ["q", "v"]}[architecture],
            fan_in_fan_out=architecture == "gpt2",
            init_lora_weights=False,  # the second matrix would be zero, and the adapter no different from none
        )
    model = HuggingFaceModel(inner, tokenizer=None, use_logits=True, peft_config=config)

    def is_block(self: nn.Module, module: nn.Module) -> bool:
        return isinstance(module, block_type)

    # What LLM Foundry puts on a Hugging Face model.
    model.model.fsdp_wrap_fn = types.MethodType(is_block, model.model)
    model.model.activation_checkpointing_fn = types.MethodType(is_block, model.model)
    return model


def gpt2(tied: bool) -> tuple[nn.Module, type[nn.Module]]:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block, GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=16,
        n_head=2,
        n_layer=2,
        n_positions=32,
        vocab_size=VOCABULARY,
        initializer_range=0.5,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    return GPT2LMHeadModel(config), GPT2Block


def llama(tied: bool) -> tuple[nn.Module, type[nn.Module]]:
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=26,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        initializer_range=0.5,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    return LlamaForCausalLM(config), LlamaDecoderLayer


def t5(tied: bool) -> tuple[nn.Module, type[nn.Module]]:
    """Its generation runs the encoder by itself; one weight is the embedding of both halves, and the head."""
    from transformers.models.t5.modeling_t5 import T5Block, T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=2,
        num_heads=4,
        vocab_size=VOCABULARY,
        dropout_rate=0.0,
        initializer_factor=3.0,
        decoder_start_token_id=0,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config), T5Block


ARCHITECTURES: dict[str, Callable[[bool], tuple[nn.Module, type[nn.Module]]]] = {"gpt2": gpt2, "llama": llama, "t5": t5}


def prompts(seed: int, length: int = 5) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed))


def batch(seed: int) -> dict[str, torch.Tensor]:
    x = prompts(seed, length=7)
    return {"input_ids": x, "labels": x.clone(), "attention_mask": torch.ones_like(x)}


def loss(model: Any, seed: int) -> torch.Tensor:
    return model(batch(seed))["loss"]


# Composer's method, and what it calls on its child.
WAYS: dict[str, Callable[..., torch.Tensor]] = {
    "model.generate": lambda model, x, **options: model.generate(x, **options),
    "model.model.generate": lambda model, x, **options: model.model.generate(input_ids=x, **options),
}


def assert_same_tokens(when: str, model: Any, reference: Any, **options: Any) -> set[int]:
    """Both ways, two batches each, other ones on each rank, between evaluations; returns the tokens."""
    options = OPTIONS | {"max_new_tokens": NEW_TOKENS} | options
    seen: set[int] = set()
    for each in (model, reference):
        each.eval()
    for way, generate in WAYS.items():
        for seed in range(2):
            x = prompts(10 * seed + dist.get_rank(), length=4 + seed)
            actual, expected = generate(model, x, **options), generate(reference, x, **options)
            assert torch.equal(actual, expected), f"{when}, {way}: {actual}, unsharded {expected}"
            seen.update(actual.flatten().tolist())
            with torch.no_grad():
                ours, theirs = (each.eval_forward(batch(seed)) for each in (model, reference))
            torch.testing.assert_close(ours, theirs, msg=lambda text: f"{when}, evaluation: {text}")
    for each in (model, reference):
        each.train()
    return seen


def check_generate(case: dict[str, Any], config: dict[str, Any]) -> Any:
    from composer_fsdp2 import prepare_fully_shard

    model, reference = build(**case), build(**case)
    reference.model.load_state_dict(model.model.state_dict())
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ours = torch.optim.SGD(adapters, lr=0.1)
    theirs = torch.optim.SGD([parameter for parameter in reference.parameters() if parameter.requires_grad], lr=0.1)
    prepare_fully_shard(model, ours, FULL | config, device="cpu")
    assert isinstance(model.model, FSDPModule)
    before = assert_same_tokens("before training", model, reference)
    loss(model, dist.get_rank()).backward()
    for peer in range(dist.get_world_size()):
        (loss(reference, peer) / dist.get_world_size()).backward()
    for optimizer in (ours, theirs):
        optimizer.step()
        optimizer.zero_grad()
    after = assert_same_tokens("after a step", model, reference)
    for name, parameter in reference.named_parameters():
        actual = full(named_parameters(model)[name])
        assert_close(name, actual, parameter.detach(), rtol=1e-6, atol=1e-8)  # norms compute in fp32
    assert len(before | after) > NEW_TOKENS, f"hardly any tokens: {before}, {after}"
    return model


def check_all(cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for_each(check_generate, {f"{case}, {config}": (case, config) for case, config in cases})


ZERO_2 = {"sharding_strategy": "SHARD_GRAD_OP"}
AC = {"activation_checkpointing": True, "activation_checkpointing_reentrant": False}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_generates_as_the_unsharded_model(architecture: str):
    """Samples that are looked at during a run, metrics of generated text and reinforcement learning would see other
    tokens, or an error of mixed tensors; T5's generation enters past the model's forward."""
    cases = [
        ({"architecture": architecture, "tied": True}, {}),
        ({"architecture": architecture, "tied": True}, ZERO_2),
        ({"architecture": architecture, "tied": False}, AC),
    ]
    run_ranks(check_all, 2, cases)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_generates_with_adapters(architecture: str):
    """peft's generate calls the model inside of the one that was sharded (huggingface/trl#4550); base weights are
    frozen, adapters train beside them in one unit."""
    pytest.importorskip("peft")
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"architecture": architecture, "adapters": True}, {}),
        ({"architecture": architecture, "adapters": True, "tied": False}, ZERO_2),
    ]
    run_ranks(check_all, 2, cases)


def check_low_precision_base(config: dict[str, Any]) -> None:
    from composer_fsdp2 import reshard

    case = {"architecture": "llama", "adapters": True, "dtype": torch.bfloat16}
    dtypes = {parameter.dtype for name, parameter in build(**case).named_parameters() if "lora" in name}
    assert dtypes == {torch.float32}, "peft gives adapters another dtype than before"
    model = check_generate(case, config)
    reshard(model)
    whole = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    assert not whole, f"not sharded: {whole}"


def test_generates_with_adapters_in_another_dtype_than_their_base():
    """peft keeps adapters in fp32 beside a bf16 base; one unit cannot gather both."""
    pytest.importorskip("peft")
    run_ranks(check_low_precision_base, 2, {})
    run_ranks(check_low_precision_base, 2, ZERO_2)


# --- ranks that end at different lengths


def check_lengths(architecture: str, adapters: bool) -> tuple[int, int]:
    """One rank's first prompts end after one new token, the other's go on; then both evaluate."""
    from composer_fsdp2 import prepare_fully_shard

    model, reference = (build(architecture, adapters=adapters) for _ in range(2))
    reference.model.load_state_dict(model.model.state_dict())
    prepare_fully_shard(model, None, FULL, device="cpu")
    x = prompts(dist.get_rank())[:1]
    options = OPTIONS | {"max_new_tokens": 12}
    first = [int(reference.generate(x, **options)[0, -12])]
    dist.broadcast_object_list(first, src=0)
    tokens = model.generate(x, eos_token_id=first[0], **options)
    assert_same_tokens("afterwards", model, reference, eos_token_id=first[0])
    return tokens.shape[1], reference.generate(x, eos_token_id=first[0], **options).shape[1]


@pytest.mark.parametrize("adapters", [False, True], ids=["", "adapters"])
def test_ranks_that_stop_early_go_on_gathering(adapters: bool):
    """A rank whose answers are complete would leave the others waiting for its shards, until the time-out."""
    lengths = run_ranks(check_lengths, 2, "llama", adapters)
    assert lengths[0][1] < lengths[1][1], f"both ranks generate as long: {lengths}"
    assert all(sharded == expected for sharded, expected in lengths), lengths


# --- names in what is saved


def find_classes(model: nn.Module) -> Iterator[str]:
    for module in model.modules():
        yield type(module).__name__


def check_saved(folder: str) -> dict[str, Any]:
    from composer_fsdp2 import prepare_fully_shard

    model = build("llama")
    expected = set(find_classes(model))
    metadata = model.get_metadata()["model"]["config"]
    prepare_fully_shard(model, None, FULL, device="cpu")
    assert set(find_classes(model)) == expected
    assert model.get_metadata()["model"]["config"] == metadata
    values = {name: full(value) for name, value in model.model.state_dict().items()}
    assert isinstance(model.model.lm_head.weight, DTensor)
    if dist.get_rank() == 0:
        model.model.save_pretrained(folder, state_dict=values)
    dist.barrier()
    return metadata


def test_what_is_saved_names_the_models_own_class(tmp_path: Path):
    """`save_pretrained` on the running model, and Composer's metadata: a checkpoint of an FSDPLlamaForCausalLM loads
    nowhere."""
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        metadata = run_ranks(check_saved, 2, folder)[0]
        assert json.loads(Path(folder, "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert metadata["class"] == "transformers.models.llama.modeling_llama.LlamaForCausalLM"
