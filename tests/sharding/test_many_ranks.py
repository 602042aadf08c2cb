"""Messages of one of 1,024 ranks to all others while a model is sharded.

The process group is torch's fake one, whose collectives do not change their output: the other ranks do not exist. Their
messages are assumed to be equal to this rank's.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.models import Model
from torch.testing._internal.distributed.fake_pg import FakeStore

from composer_fsdp2 import prepare_fully_shard

pytestmark = pytest.mark.any_torch

NUM_RANKS = 1024


@pytest.fixture
def sent_bytes() -> Iterator[list[int]]:
    """The size of each gathered object, in order."""
    sizes: list[int] = []

    def gather(values: list[Any], value: Any, group: Any = None) -> None:
        sizes.append(len(pickle.dumps(value)))
        values[:] = [value] * len(values)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    with mock.patch.object(dist, "all_gather_object", gather):
        yield sizes
    dist.destroy_process_group()


CONFIGS: list[dict[str, Any]] = [
    {},
    {"sharding_strategy": "HYBRID_SHARD", "data_parallel_shard_degree": 8, "data_parallel_replicate_degree": 128},
    {"sync_module_states": True, "cpu_offload": True},
]


def shard(config: dict[str, Any]) -> None:
    model = Model(num_blocks=40)
    optimizer = torch.optim.AdamW(model.parameters())
    config = {**config, "mixed_precision": "FULL"}
    prepare_fully_shard(model, optimizer, config, precision="fp32", device="cpu")


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_nothing_large_is_gathered(sent_bytes: list[int], config: dict[str, Any]):
    """An object of 100 KB from each rank is 100 MB on each of them, and seconds of unpickling.

    Groups of ranks are in test_mesh.py.
    """
    shard(config)
    assert sent_bytes and max(sent_bytes) <= 1024, sent_bytes


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_set_up_rarely_waits_for_all_ranks(sent_bytes: list[int], config: dict[str, Any]):
    """Independent of the number of groups: collectives over all ranks, including torch's barriers if enabled."""
    barriers: list[int] = []

    def barrier(rank: int, store: Any, name: str, size: int, *unused: Any) -> None:
        barriers.append(size)

    reduce = mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce)
    with reduce as reduced, mock.patch.object(dist.distributed_c10d, "_store_based_barrier", barrier):
        shard(config)
    assert all(call.kwargs.get("group") is None and len(call.args) < 3 for call in reduced.call_args_list)
    assert barriers.count(NUM_RANKS) + len(sent_bytes) + reduced.call_count <= math.log2(NUM_RANKS) + 8
