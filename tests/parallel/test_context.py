"""Context parallelism: the groups, the exchange, and a model's gradients compared with one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.legality import Carried, check_carried
from support.on_ranks import on_ranks
from support.ranks import run_ranks
from support.reader import HEAD, Holder, batch, build, layer_plan
from support.training import FULL
from torch.nn import functional as F

from composer_fsdp2 import (
    ConfigError,
    ShardingConfig,
    plan_sharding,
    prepare_fully_shard,
)
from composer_fsdp2.estimate._torch.counting import Collectives
from composer_fsdp2.sharding.meshes import group_along
from composer_fsdp2.training.run import find_context


def loss_of(model: Any, tokens: torch.Tensor, length: int = 9) -> torch.Tensor:
    """The loss of rows with different numbers of labels."""
    tokens = tokens[:, :length]
    return model.model(tokens, torch.where(tokens % 3 > 0, tokens, -100))


def divided(degree: int, *, num_kv_heads: int = 2, **options: Any) -> Carried:
    config = {"context_parallel_degree": degree} | options.pop("config", {})
    build = partial(Holder, num_kv_heads=num_kv_heads, num_layers=options.pop("num_layers", 1))
    return Carried(config=config, build=build, **{"loss": loss_of, "num_shared": degree} | options)


RECOMPUTED = {"activation_checkpointing": True}
TRAINED: dict[str, Carried] = {
    "a length that they cannot divide, one head of keys and values": divided(4, num_kv_heads=1),
    "as many heads as of queries, recomputed": divided(2, num_kv_heads=4, num_layers=2, config=RECOMPUTED),
    "one that they can, recomputed, not reentrant": divided(
        4, config=RECOMPUTED | {"activation_checkpointing_reentrant": False}, loss=partial(loss_of, length=8)
    ),
    "NO_SHARD": divided(2, config={"sharding_strategy": "NO_SHARD"}),
    "layers split, recomputed, replicas": divided(
        2, config=RECOMPUTED | {"data_parallel_replicate_degree": 2}, plan=layer_plan, num_shared=4
    ),
}


@on_ranks(4)
def test_training_is_that_of_one_process(folder: str) -> None:
    """A part weighted by its own number of labels, or with wrong positions, trains another model."""
    for_each(check_carried, {name: (row,) for name, row in TRAINED.items()})


# --- groups and exchange


@on_ranks(4)
def test_ranks_of_a_group_share_a_batch_and_the_same_layers(folder: str) -> None:
    """CP ranks must have the same TP shard of the layers; otherwise they would sum unrelated numbers."""
    for degree, tensor_degree, expected in ((2, 1, ["01", "23"]), (2, 2, ["02", "13"]), (4, 1, ["0123"])):
        group = group_along((-1, degree, tensor_degree), 1, "context")
        assert dist.get_process_group_ranks(group) in [[int(rank) for rank in ranks] for ranks in expected]
        assert group_along((-1, degree, tensor_degree), 1, "context") is group, "made once"
        assert group is not dist.group.WORLD, "it would wait for prefetched parameters"


@pytest.mark.any_torch
@on_ranks(4)
def test_microbatches_weigh_as_the_trainer_says(folder: str) -> None:
    """Otherwise a block with more rows, or tokens, would have a different weight than in one process."""
    model = build()
    prepare_fully_shard(model, None, FULL | {"context_parallel_degree": 2}, device="cpu")
    group, block = find_context(model), dist.get_rank() // 2
    assert group is not None and group.size == 2 and group.index == dist.get_rank() % 2
    assert find_context(Holder()) is None
    labels = torch.full((2, 4), -100)
    labels[:, : 1 + block] = 1  # 2 and 4 labels in a part, 12 in all
    assert group.items(labels, torch.float64) == 12 / 4
    group.weight = 1.0 + block  # a Trainer multiplies by 1 on two ranks, by 2 on two
    assert group.items(labels, torch.float64) == 12 * group.weight / 6
    group.weight = 0.0 if block == 0 else 3.0  # a block without labels is multiplied by 0
    assert group.items(labels, torch.float64) == (12 * 3 / 6 if block else 1)
    assert group.items(torch.full((2, 4), -100)) == 1


@on_ranks(4)
def test_heads_are_exchanged_for_places_and_back(folder: str) -> None:
    """Values, gradients and labels arrive at the positions that attention and the loss use."""
    model = build()
    prepare_fully_shard(model, None, FULL | {"context_parallel_degree": 4}, device="cpu")
    group = find_context(model)
    whole = torch.arange(2 * 8 * 4 * 3, dtype=torch.float64).view(2, 8, 4, 3)  # batch, positions, heads, features
    part = group.part(whole).clone().requires_grad_()
    few = part[:, :, :2].float()  # fewer heads than ranks, in another dtype
    heads, of_few = group.to_heads((part, few), 2, 1)
    assert torch.equal(heads, group.part(whole, 2))
    assert torch.equal(of_few, whole[:, :, group.index // 2, None].float())
    assert torch.equal(group.to_sequence(heads, 2, 1), part)
    (heads * (1 + group.index)).sum().backward()
    assert torch.equal(part.grad[0, 0, :, 0], torch.arange(1.0, 5.0, dtype=torch.float64))
    labels = torch.arange(7).expand(2, 7)
    shifted = torch.tensor([1, 2, 3, 4, 5, 6, -100, -100])
    assert torch.equal(group.shifted_labels(labels)[1], group.part(shifted, 0))
    assert torch.equal(
        group.shifted_labels(labels, is_shifted=True)[0], group.part(F.pad(labels[0], (0, 1), value=-100), 0)
    )


def freeze_first(model: Holder) -> None:
    """The first layer's keys and values need no gradients."""
    for frozen in (model.model.embedding, model.model.places, model.model.layers[0]):
        frozen.requires_grad_(False)
    model.model.layers[0].attention.query.requires_grad_(True)


def check_exchanged(num_kv_heads: int, degree: int, num_sent: int, freezes: bool) -> None:
    """``num_sent``: the number of heads in which keys and values are sent."""
    model = build(num_kv_heads=num_kv_heads)
    if freezes:
        freeze_first(model)
    prepare_fully_shard(model, None, FULL | {"context_parallel_degree": degree}, device="cpu")
    tokens, labels = batch(2, 16)
    with Collectives() as sent:
        model.model(tokens, labels).backward()
    of_head = 2 * (16 // degree) * HEAD * 8  # bytes of a rank's positions
    there, back = 4 + 2 * num_sent, 4
    of_gradients = there + back - (2 * num_sent if freezes else 0)  # in the first layer
    expected = {"calls": 8, "bytes": (3 * (there + back) + of_gradients) * of_head}
    assert sent.counts["alltoall_base_"] == expected, (sent.counts, expected)


def test_queries_keys_and_values_travel_together():
    """Each exchange waits for the slowest rank: two in a layer's forward and two in its backward, instead of four each,
    without additional bytes."""
    cases = {
        "as many heads of keys and values": (4, 2, 4, False),
        "fewer": (2, 2, 2, False),
        "one of two ranks": (1, 2, 2, False),
        "one of four ranks": (1, 4, 4, False),
        "without gradients of some": (2, 2, 2, True),
    }
    run_ranks(for_each, 4, check_exchanged, cases)


# --- in the plan


def test_a_plan_names_what_exchanges():
    """Ranks with different plans would wait for each other in the first forward."""
    plan = plan_sharding(Holder(), ShardingConfig(context_parallel_degree=2))
    assert plan.exchanging == ("model.layers.0.attention", "model.layers.1.attention")
    assert plan.digest != plan_sharding(Holder(), ShardingConfig()).digest
    assert "2 ranks share a batch, each computes a part of every sequence" in plan.explain()
    assert "model: its notes" in plan.notes


def test_a_plan_for_any_world_size_is_held_against_one():
    """With an unsuitable world size, some ranks would be in no group."""
    plan = plan_sharding(Holder(), ShardingConfig(context_parallel_degree=4))
    with pytest.raises(ConfigError, match="context_parallel_degree 4"):
        plan.resolve(6)
