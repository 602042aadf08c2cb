"""Context parallelism, tiled MLPs and idle modules in transformers' and Foundry's models, compared with one process on
all batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import full
from support.examples import IS_THOROUGH
from support.known_models import IMAGE_TOKEN, TEXT, hugging_face, llava, mixture, mllama, mpt, qwen_vl
from support.on_ranks import on_ranks
from support.training import FULL, assert_close, assert_gradients, named_parameters
from torch import nn
from torch.nn import functional as F

from composer_fsdp2 import UnsupportedError, plan_sharding, prepare_fully_shard, translate

pytestmark = [pytest.mark.composer, pytest.mark.filterwarnings("ignore")]

GUARD = {"collective_guard": 60}
RECOMPUTED = {"activation_checkpointing": True}
Loss = Callable[[Any, int, int], torch.Tensor]  # from a model, a step and a rank


def built(build: Callable[..., Any], *arguments: Any) -> Any:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    return build(*arguments, device="cpu")


def compare(model: Any, section: dict[str, Any], loss: Loss, num_steps: int) -> Any:
    """Compares gradients with those of one process, and returns its model."""
    reference = copy.deepcopy(model)
    prepare_fully_shard(model, None, FULL | GUARD | section, device="cpu")
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_(named_parameters(model)[name].requires_grad)
    for step in range(num_steps):
        loss(model, step, dist.get_rank()).backward()
        for rank in range(dist.get_world_size()):
            of_rank = loss(reference, step, rank) / dist.get_world_size()
            if of_rank.requires_grad:  # not for text only, if that part is frozen
                of_rank.backward()
        assert_gradients(model, reference)
        for each in (model, reference):
            each.zero_grad()
        if step == 0:
            with torch.no_grad():
                loss(model, step, dist.get_rank())
    return reference


# --- idle_experts

NUM_EXPERTS = 6
EXPERTS = {
    "Qwen3Moe": "Qwen3MoeMLP",
    "Qwen2Moe": "Qwen2MoeMLP",  # also for its shared expert, after the others
    "Mixtral": "MixtralBlockSparseTop2MLP",
    "DeepseekV3": "DeepseekV3MLP",  # also for its shared experts
}


def passing_over(kind: type[nn.Module]) -> type[nn.Module]:
    """A block of experts whose loop skips experts without tokens, as in later transformers releases."""

    class PassingOver(kind):  # type: ignore[misc,valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            experts = [(lambda rows, expert=expert: expert(rows) if len(rows) else rows) for expert in self.experts]
            vars(self)["experts"] = experts  # found before the modules of that name
            try:
                return super().forward(*args, **kwargs)
            finally:
                del vars(self)["experts"]

    return PassingOver


def tokens_of(step: int, rank: int) -> torch.Tensor:
    return torch.randint(3, 60, (1, 3), generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of_tokens(model: Any, step: int, rank: int) -> torch.Tensor:
    tokens = tokens_of(step, rank)
    return model.model(tokens, labels=tokens).loss


def check_experts(architecture: str, skips: bool, section: dict[str, Any]) -> None:
    model, layer = built(mixture, architecture, NUM_EXPERTS), f"{architecture}DecoderLayer"
    blocks = [module for module in model.modules() if isinstance(getattr(module, "experts", None), nn.ModuleList)]
    kind = passing_over(type(blocks[0])) if skips else type(blocks[0])
    for block in blocks:
        block.__class__ = kind
        if architecture == "DeepseekV3":  # its router computes in float32, not in float64
            block.gate.register_forward_hook(lambda gate, args, output: (output[0], output[1].double()))
    model.model.activation_checkpointing_fn = lambda module: type(module).__name__ == layer
    idle: list[int] = []  # in the first block of each forward

    def look(gate: nn.Module, args: Any, scores: Any) -> None:
        chosen = scores[0] if isinstance(scores, tuple) else scores.topk(2, dim=-1).indices
        idle.append(NUM_EXPERTS - len(set(chosen.flatten().tolist())))

    blocks[0].gate.register_forward_hook(look)
    policy = {"transformer_layer_cls_to_wrap": [layer], "moe_experts": [EXPERTS[architecture]]}
    reference = compare(model, {"wrap_policy": policy, "idle_experts": "in_order"} | section, loss_of_tokens, 2)
    assert max(idle) > 0
    if section:  # no effect on generation
        return
    prompt = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    prompts = torch.cat([tokens_of(step, dist.get_rank()) for step in range(2)])
    ours, theirs = (
        each.eval().model.generate(prompts, attention_mask=torch.ones_like(prompts), **prompt)
        for each in (model, reference)
    )
    assert torch.equal(ours, theirs)


REPLICAS = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}


def by_class(*kinds: str) -> dict[str, Any]:
    return {"wrap_policy": {"transformer_layer_cls_to_wrap": list(kinds)}}


def tiled(kind: str) -> dict[str, Any]:
    return {"tiled_mlp": {"classes": [kind], "chunks": 2}}


@on_ranks(2)
def test_mixtures_of_experts_train_as_one_process_does():
    """In the models that people fine-tune, the loop skips idle experts in some transformers releases and runs them in
    others."""
    reentrant = RECOMPUTED | {"activation_checkpointing_reentrant": True}
    not_reentrant = RECOMPUTED | {"activation_checkpointing_reentrant": False}
    cases: dict[str, tuple[str, bool, dict[str, Any]]] = {
        "Qwen3Moe, all called": ("Qwen3Moe", False, {}),
        "Qwen3Moe, recomputed, reentrant": ("Qwen3Moe", True, reentrant),
        "Qwen2Moe, idle passed over": ("Qwen2Moe", True, {}),
        "Mixtral, recomputed": ("Mixtral", True, not_reentrant),
        "DeepseekV3, by class": ("DeepseekV3", False, by_class("DeepseekV3DecoderLayer", "DeepseekV3MLP")),
        "DeepseekV3, replicas, experts tiled": ("DeepseekV3", False, REPLICAS | tiled("DeepseekV3MLP")),
        "Qwen2Moe, shared offloaded, tiled": ("Qwen2Moe", True, {"cpu_offload": True} | tiled("Qwen2MoeMLP")),
    }
    for_each(check_experts, cases)


# --- idle_towers

QWEN_LAYER = "Qwen2_5_VLDecoderLayer"
AUTO = {"wrap_policy": {"transformer_layer_cls_to_wrap": "auto"}, "idle_towers": "auto"}
# Also the modules between tower and text, and the embeddings that run before a tower.
ALL_UNITS = {"wrap_policy": {"min_num_params": 200}, "idle_towers": "auto"}
OF_LLAVA = {"transformer_layer_cls_to_wrap": ["CLIPEncoderLayer", "LlamaDecoderLayer"], "wrap_embeddings": True}
LLAVA = {"wrap_policy": OF_LLAVA, "idle_towers": "auto"}
ONE_PROJECTOR = by_class("LlamaDecoderLayer") | {"idle_towers": "auto", "freeze": [
    "model.vision_tower", *(f"model.language_model.{name}" for name in ("model.embed_tokens", "model.norm", "lm_head"))
]}  # fmt: skip
IN_ROOT = {"wrap_policy": {"transformer_layer_cls_to_wrap": [QWEN_LAYER]}}


def with_image(kind: Any, tokens: torch.Tensor, draw: torch.Generator, size: int, at: int = 2) -> dict[str, Any]:
    """An image in each row from this position on, of this size if the model accepts any."""
    if kind in (llava, llava_with_adapters):
        tokens[:, at : at + 4] = IMAGE_TOKEN
        return {"pixel_values": torch.randn(len(tokens), 3, 28, 28, generator=draw)}
    if kind is mllama:
        one = torch.ones(len(tokens), 1, dtype=torch.long)
        seen = {"aspect_ratio_mask": one[..., None], "cross_attention_mask": torch.ones(*tokens.shape, 1, 1)}
        return {
            "pixel_values": torch.randn(len(tokens), 1, 1, 3, 28, 28, generator=draw),
            "aspect_ratio_ids": one,
        } | seen
    tokens[:, at], tokens[:, at + 1 : at + 1 + size] = IMAGE_TOKEN - 1, IMAGE_TOKEN
    patches = torch.randn(4 * size * len(tokens), 3 * 2 * 14 * 14, generator=draw)
    return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 2, 2 * size]] * len(tokens))}


# By step and rank: 0 is text only, otherwise the image's size. In "in turn", no rank has an image in the last step, and
# in the first the ranks have different sizes or none.
IMAGES: dict[str, Callable[[int, int], int]] = {
    "on the first": lambda step, rank: int(rank == 0),
    "in turn": lambda step, rank: [1 + rank if rank else 0, int(rank == 0), 0][step],
}


def llava_with_adapters(device: str = "meta") -> nn.Module:
    """With peft's adapters, which call the adapted model's forward without its hooks."""
    from peft import LoraConfig, get_peft_model

    model = llava(device)
    adapters = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "linear_1"], init_lora_weights=False)
    model.model = get_peft_model(model.model, adapters)
    return model


def check_towers(kind: Any, section: dict[str, Any], images: str) -> None:
    def loss(model: Any, step: int, rank: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(10 * step + rank)
        tokens = torch.randint(3, 60, (2, 9), generator=draw)
        size = IMAGES[images](step, rank)
        image = with_image(kind, tokens, draw, size) if size else {}
        return model.model(tokens, labels=tokens, attention_mask=torch.ones_like(tokens), **image).loss

    compare(built(kind), section, loss, 3 if images == "in turn" else 2)


@on_ranks(2)
def test_an_image_on_one_rank_and_text_on_the_other():
    """The run would abort, or hang, at the first batch of text."""
    recomputed = RECOMPUTED | {"activation_checkpointing_policy": "auto"}
    cases: dict[str, tuple[Any, ...]] = {
        "Qwen2.5-VL, tower in the root": (qwen_vl, IN_ROOT, "on the first"),
        "Qwen2.5-VL, recomputed": (qwen_vl, AUTO | recomputed, "in turn"),
        "Qwen2.5-VL, all units": (qwen_vl, ALL_UNITS, "in turn"),
        "LLaVA, text frozen": (llava, LLAVA | {"freeze": ["model.language_model"]}, "on the first"),
        # The only trained parameter in the root belongs to the projector.
        "LLaVA, adapters": (llava_with_adapters, LLAVA, "in turn"),
        "LLaVA, tower frozen and in the root": (llava, ONE_PROJECTOR, "in turn"),
        "Mllama, layers that attend to images": (mllama, AUTO, "in turn"),
    }
    if IS_THOROUGH:
        cases["LLaVA"] = (llava, LLAVA, "in turn")
        cases["LLaVA, tower frozen"] = (llava, LLAVA | {"freeze": ["model.vision_tower"]}, "on the first")
    for_each(check_towers, cases)


# --- context_parallel_degree


def rotated(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    """The tower's rotary embedding without rounding to float32, which would differ for gradients of two chunks."""
    cos, sin = cos.unsqueeze(-2).to(query.dtype), sin.unsqueeze(-2).to(query.dtype)
    turned = [torch.cat([-half[1], half[0]], -1) for half in (query.chunk(2, -1), key.chunk(2, -1))]
    return query * cos + turned[0] * sin, key * cos + turned[1] * sin


def part_of_batch(step: int, number: int, num_places: int, padding: str) -> dict[str, torch.Tensor]:
    """An image of a different size in each row of each batch except the last, across the middle of the rows."""
    draw = torch.Generator().manual_seed(10 * step + number)
    tokens = torch.randint(3, 60, (2, num_places), generator=draw)
    mask, labels = torch.ones_like(tokens), tokens.clone()
    images = with_image(qwen_vl, tokens, draw, 3 + number, at=4) if (step, number) != (1, 1) else {}
    if padding:
        mask[0, slice(-2 - number, None) if padding == "right" else slice(1 + number)] = 0
    labels[(mask == 0) | (tokens >= IMAGE_TOKEN - 1)] = -100
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels, **images}


def loss_of_whole(model: Any, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """In float64, because the model itself computes its loss in float32."""
    sums, count = [], 0
    for each in batches:
        given = {name: value for name, value in each.items() if name != "labels"}
        logits, labels = model.model(**given).logits[:, :-1], each["labels"][:, 1:]
        sums.append(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
        count += int((labels != -100).sum())
    return torch.stack(sums).sum() / count


@mock.patch("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.apply_rotary_pos_emb_vision", rotated)
def check_sequences(section: dict[str, Any], degree: int, num_places: int, padding: str) -> None:
    model = built(qwen_vl)
    for path, module in list(model.named_modules()):  # its own norms round to float32
        if type(module).__name__ == "Qwen2RMSNorm":
            model.set_submodule(path, nn.RMSNorm(len(module.weight), eps=module.variance_epsilon))
    reference = copy.deepcopy(model)
    reference.model.visual.requires_grad_("freeze" not in section)
    prepare_fully_shard(model, None, FULL | IN_ROOT | section | {"context_parallel_degree": degree}, device="cpu")
    for step in (0, 1) if padding == "left" else (0,):
        numbers = range(dist.get_world_size() // degree)
        batches = [part_of_batch(step, number, num_places, padding) for number in numbers]
        loss = model.model(**batches[dist.get_rank() // degree]).loss
        loss.backward()
        expected = loss_of_whole(reference, batches)
        expected.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        assert abs(total.item() / dist.get_world_size() - expected.item()) <= 1e-12
        assert_gradients(model, reference)
        for each in (model, reference):
            each.zero_grad()


@on_ranks(4)
def test_texts_and_images_over_ranks_train_as_in_one_process():
    """ROLL's context-parallel run of Qwen2.5-VL: an image spans two chunks. The tower, the positions in three
    dimensions, padding on either side and rows of uneven chunks give the same results as full rows."""
    recomputed = RECOMPUTED | {"activation_checkpointing_policy": [QWEN_LAYER]}
    frozen = recomputed | {"freeze": ["model.visual"], "tiled_mlp": {"classes": ["Qwen2MLP"], "chunks": 3}}
    cases: dict[str, tuple[dict[str, Any], int, int, str]] = {
        "recomputed, padded": (recomputed, 2, 17, "right"),
        # In the second step one pair of ranks has no image.
        "blocks of the tower are units, padded on the left": (AUTO, 2, 16, "left"),
        "four ranks a sequence": ({}, 4, 18, ""),
        "frozen tower, tiled": (frozen, 2, 16, "right"),
    }
    for_each(check_sequences, cases)


@on_ranks(1)
def test_what_was_not_tested_is_refused():
    """Attention that drops its mask would attend to padding."""
    cases = {"attn_implementation: sdpa": (qwen_vl, {"_attn_implementation": "flash_attention_2"})}
    config = translate(FULL | {"context_parallel_degree": 2}, precision="fp32", device="cpu").config
    assert config is not None
    for expected, (kind, changes) in cases.items():
        model = kind()
        for name, value in changes.items():
            setattr(model.model.config, name, value)
        with pytest.raises(UnsupportedError, match=expected):
            plan_sharding(model, config)


# --- tiled_mlp


def places(seed: int) -> torch.Tensor:
    return torch.randint(TEXT["vocab_size"], (2, 13), generator=torch.Generator().manual_seed(seed))


@pytest.mark.foundry
@on_ranks(2)
def test_models_of_others_train_in_pieces_as_before():
    """The gradients of any MLP in pieces equal those of one piece, whatever its name and layers."""

    def check(model: Any, layers: str, mlp: str, config: dict[str, Any]) -> None:
        reference = copy.deepcopy(model)
        policy = {"wrap_policy": {"transformer_layer_cls_to_wrap": [layers]}}
        tiled = {"tiled_mlp": {"classes": [mlp], "chunks": 4}}
        prepare_fully_shard(model, None, FULL | policy | tiled | config, device="cpu")
        model.model(input_ids=places(dist.get_rank())).logits.square().mean().backward()
        for peer in range(2):
            (reference.model(input_ids=places(peer)).logits.square().mean() / 2).backward()
        sharded = named_parameters(model)
        for name, parameter in reference.named_parameters():
            assert_close(name, full(sharded[name].grad), parameter.grad, rtol=1e-12, atol=1e-14)

    recomputed = {"activation_checkpointing": True, "activation_checkpointing_policy": "auto"}
    cases: dict[str, tuple[Any, str, str, dict[str, Any]]] = {
        "Llama, recomputed": (hugging_face("llama", hooks=False), "LlamaDecoderLayer", "LlamaMLP", recomputed),
        "GPT-2": (hugging_face("gpt2", hooks=False), "GPT2Block", "GPT2MLP", {}),
        "MPT": (mpt(ffn_config={"ffn_type": "mptmlp"}).double(), "MPTBlock", "MPTMLP", {}),
        "MPT, GLU": (mpt(ffn_config={"ffn_type": "mptglu"}).double(), "MPTBlock", "MPTGLU", {}),
    }
    for_each(check, cases)
