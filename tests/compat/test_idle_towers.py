"""idle_towers with transformers' own models of text and images: an image on one rank, text on the others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.known_models import IMAGE_TOKEN, llava, qwen_vl
from support.ranks import run_ranks
from support.training import FULL, assert_gradients, named_parameters

from composer_fsdp2 import UnsupportedError, prepare_fully_shard

pytestmark = pytest.mark.composer

GUARD = {"collective_guard": 60}
AUTO = {"wrap_policy": {"transformer_layer_cls_to_wrap": "auto"}, "idle_towers": "auto"}
# Also what lies between tower and text, and the embeddings that are called before a tower is.
ALL_UNITS = {"wrap_policy": {"min_num_params": 200}, "idle_towers": "auto"}
LLAVA = {
    "wrap_policy": {
        "transformer_layer_cls_to_wrap": ["CLIPEncoderLayer", "LlamaDecoderLayer"],
        "wrap_embeddings": True,
    },
    "idle_towers": "auto",
}
IN_ROOT = {"wrap_policy": {"transformer_layer_cls_to_wrap": ["Qwen2_5_VLDecoderLayer"]}}


def qwen_batch(tokens: torch.Tensor, draw: torch.Generator, size: int) -> dict[str, torch.Tensor]:
    num_images = len(tokens)
    tokens[:, 2], tokens[:, 3 : 3 + size] = IMAGE_TOKEN - 1, IMAGE_TOKEN
    patches = torch.randn(4 * size * num_images, 3 * 2 * 14 * 14, generator=draw)
    return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 2, 2 * size]] * num_images)}


def llava_batch(tokens: torch.Tensor, draw: torch.Generator, size: int) -> dict[str, torch.Tensor]:
    tokens[:, 2:6] = IMAGE_TOKEN
    return {"pixel_values": torch.randn(len(tokens), 3, 28, 28, generator=draw)}


BATCHES = {qwen_vl: qwen_batch, llava: llava_batch}
Images = Callable[[int, int], int]  # by step and rank: 0 is text alone, else the image's size


def loss(model: Any, kind: Any, step: int, rank: int, images: Images) -> torch.Tensor:
    draw = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(3, 60, (2, 9), generator=draw)
    size = images(step, rank)
    image = BATCHES[kind](tokens, draw, size) if size else {}
    result: torch.Tensor = model.model(tokens, labels=tokens, attention_mask=torch.ones_like(tokens), **image).loss
    return result


def on_the_first(step: int, rank: int) -> int:
    return int(rank == 0)


def on_one_in_turn(step: int, rank: int) -> int:
    """Nobody has one in the last step, and in the first each rank has another size or none."""
    return [1 + rank if rank else 0, int(rank == 0), 0][step]


def check(kind: Any, section: dict[str, Any], images: Images) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = kind("cpu")
    reference = copy.deepcopy(model)
    prepare_fully_shard(model, None, FULL | GUARD | section, device="cpu")
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_(named_parameters(model)[name].requires_grad)
    world_size = dist.get_world_size()
    for step in range(3):
        loss(model, kind, step, dist.get_rank(), images).backward()
        for rank in range(world_size):
            of_rank = loss(reference, kind, step, rank, images) / world_size
            if of_rank.requires_grad:  # not of text alone, where that is frozen
                of_rank.backward()
        assert_gradients(model, reference)
        for each in (model, reference):
            each.zero_grad()
        with torch.no_grad():
            loss(model, kind, step, dist.get_rank(), images)


def check_all(cases: dict[str, tuple[Any, ...]]) -> None:
    for_each(check, cases)


@pytest.mark.filterwarnings("ignore")
def test_an_image_on_one_rank_and_text_on_the_other():
    """The run would abort, or wait without end, at the first batch of text."""
    recomputed = {"activation_checkpointing": True, "activation_checkpointing_policy": "auto"}
    cases: dict[str, tuple[Any, ...]] = {
        "Qwen2.5-VL, tower in the root": (qwen_vl, IN_ROOT, on_the_first),
        "Qwen2.5-VL, recomputed": (qwen_vl, AUTO | recomputed, on_one_in_turn),
        "Qwen2.5-VL, all units": (qwen_vl, ALL_UNITS, on_one_in_turn),
        "LLaVA, in turn": (llava, LLAVA, on_one_in_turn),
        "LLaVA, text frozen": (llava, LLAVA | {"freeze": ["model.language_model"]}, on_the_first),
        "LLaVA, tower frozen": (llava, LLAVA | {"freeze": ["model.vision_tower"]}, on_the_first),
    }
    run_ranks(check_all, 2, cases)


def check_sequences_of_images() -> None:
    model = llava("cpu")
    before = dict(model.named_parameters())
    with pytest.raises(UnsupportedError, match=r"context_parallel_degree 2: model: .*; "):
        prepare_fully_shard(model, None, FULL | LLAVA | {"context_parallel_degree": 2}, device="cpu")
    assert all(each is before[name] for name, each in model.named_parameters())


def test_sequences_with_images_are_not_divided():
    """Image features belong to places of whole rows; each rank would put them into the first of its part."""
    run_ranks(check_sequences_of_images, 2)
