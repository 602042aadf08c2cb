"""Sequences of texts and images over ranks: Qwen2.5-VL, beside one process with both batches."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.known_models import IMAGE_TOKEN, qwen_vl
from support.ranks import run_ranks
from support.training import FULL, assert_gradients
from torch import nn
from torch.nn import functional as F

from composer_fsdp2 import UnsupportedError, plan_sharding, prepare_fully_shard, translate

pytestmark = pytest.mark.composer

SECTION = {"wrap_policy": {"transformer_layer_cls_to_wrap": ["Qwen2_5_VLDecoderLayer"]}}
RECOMPUTED = {"activation_checkpointing": True, "activation_checkpointing_policy": ["Qwen2_5_VLDecoderLayer"]}
# In the last step one pair of ranks has no image.
TOWER_UNITS = {"wrap_policy": {"transformer_layer_cls_to_wrap": "auto"}, "idle_towers": "auto"}
FROZEN = RECOMPUTED | {"freeze": ["model.visual"], "tiled_mlp": {"classes": ["Qwen2MLP"], "chunks": 3}}


def batch(step: int, number: int, num_places: int, padding: str) -> dict[str, torch.Tensor]:
    """An image of another size in each row of each batch but the last one's, over the middle of the rows."""
    draw = torch.Generator().manual_seed(10 * step + number)
    tokens = torch.randint(3, 60, (2, num_places), generator=draw)
    mask, labels = torch.ones_like(tokens), tokens.clone()
    images: dict[str, torch.Tensor] = {}
    size = 3 + number
    if (step, number) != (1, 1):
        tokens[:, 4], tokens[:, 5 : 5 + size] = IMAGE_TOKEN - 1, IMAGE_TOKEN
        patches = torch.randn(4 * size * 2, 3 * 2 * 14 * 14, generator=draw)
        images = {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 2, 2 * size]] * 2)}
    if padding == "right":
        mask[0, -2 - number :] = 0
    elif padding == "left":
        mask[0, : 1 + number] = 0
    labels[(mask == 0) | (tokens >= IMAGE_TOKEN - 1)] = -100
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels, **images}


def loss_of_whole(model: Any, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """In float64: the model itself computes its loss in float32."""
    sums, count = [], 0
    for each in batches:
        given = {name: value for name, value in each.items() if name != "labels"}
        logits, labels = model.model(**given).logits[:, :-1], each["labels"][:, 1:]
        sums.append(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
        count += int((labels != -100).sum())
    return torch.stack(sums).sum() / count


def rotated(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    """The tower's rotation without its rounding to float32, which is another one for gradients of two parts."""
    cos, sin = cos.unsqueeze(-2).to(query.dtype), sin.unsqueeze(-2).to(query.dtype)
    turned = [torch.cat([-half[1], half[0]], -1) for half in (query.chunk(2, -1), key.chunk(2, -1))]
    return query * cos + turned[0] * sin, key * cos + turned[1] * sin


def with_exact_norms(model: nn.Module) -> nn.Module:
    """Torch's norms of the same weights: the model's own round to float32."""
    for path, module in list(model.named_modules()):
        if type(module).__name__ == "Qwen2RMSNorm":
            model.set_submodule(path, nn.RMSNorm(len(module.weight), eps=module.variance_epsilon))
    return model


def check(section: dict[str, Any], degree: int, num_places: int, padding: str) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = with_exact_norms(qwen_vl("cpu"))
    reference = copy.deepcopy(model)
    if "freeze" in section:
        reference.model.visual.requires_grad_(False)
    keys = FULL | SECTION | section | {"context_parallel_degree": degree}
    prepare_fully_shard(model, None, keys, device="cpu")
    num_batches = dist.get_world_size() // degree
    for step in range(2):
        batches = [batch(step, number, num_places, padding) for number in range(num_batches)]
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


def check_all(cases: dict[str, tuple[Any, ...]]) -> None:
    with mock.patch("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.apply_rotary_pos_emb_vision", rotated):
        for_each(check, cases)


def test_what_was_not_tested_is_refused():
    """A window that is cut at the border of a part would train on other sequences than the model has."""
    config = translate(FULL | SECTION | {"context_parallel_degree": 2}, precision="fp32", device="cpu").config
    assert config is not None
    for name, value, expected in (
        ("use_sliding_window", True, "use_sliding_window: false"),
        ("_attn_implementation", "flash_attention_2", "attn_implementation: sdpa"),
    ):
        model: Any = qwen_vl()
        setattr(model.model.config, name, value)
        with pytest.raises(UnsupportedError, match=expected):
            plan_sharding(model, config)


@pytest.mark.filterwarnings("ignore")
def test_texts_and_images_over_ranks_train_as_in_one_process():
    """ROLL's context-parallel run of Qwen2.5-VL: an image lies over the border of two parts; its tower, the places in
    three dimensions, padding on either side and rows that ranks cannot divide evenly are as in whole rows."""
    cases: dict[str, tuple[dict[str, Any], int, int, str]] = {
        "recomputed, padded": (RECOMPUTED, 2, 17, "right"),
        "blocks of the tower are units, padded on the left": (TOWER_UNITS, 2, 16, "left"),
        "four ranks a sequence": ({}, 4, 18, ""),
        "frozen tower, tiled": (FROZEN, 2, 16, "right"),
    }
    run_ranks(check_all, 4, cases)
