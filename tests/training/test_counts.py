"""Communication added to a step by votes and the guard: none over the devices' process group."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from support.models import Model, tokens
from support.on_ranks import on_ranks
from support.training import FULL

from composer_fsdp2 import prepare_fully_shard
from composer_fsdp2.estimate._torch.counting import Collectives
from composer_fsdp2.training.control import ControlGroup
from composer_fsdp2.training.guard import start_guard
from composer_fsdp2.training.out_of_memory import OutOfMemoryVote


def counted_step(watch: str) -> tuple[dict[str, dict[str, int]], int, float]:
    """The collectives of a second step, the number of comparisons over all ranks, and its loss."""
    torch.manual_seed(0)
    model = Model()
    prepare_fully_shard(model, None, FULL, device="cpu")
    if watch == "votes":
        OutOfMemoryVote(model).start()
    elif watch == "guard":
        start_guard(model, 60.0)
    x = tokens(dist.get_rank())
    model(x).square().mean().backward()
    methods = [
        mock.patch.object(ControlGroup, name, autospec=True, side_effect=getattr(ControlGroup, name))
        for name in METHODS
    ]
    with methods[0] as largest, methods[1] as barrier, Collectives() as sent:
        loss = model(x).square().mean()
        loss.backward()
    return sent.counts, largest.call_count + barrier.call_count, loss.item()


METHODS = ("all_reduce_max", "barrier")


@on_ranks(2)
def test_votes_and_guard_send_nothing_over_the_devices(folder: str) -> None:
    """A vote over NCCL would synchronize with the GPU before each collective, and be ordered among its collectives."""
    expected, asked, loss = counted_step("")
    assert asked == 0 and expected["_allgather_base_"]["calls"] > 2
    for watch in ("votes", "guard"):
        counts, asked, its_loss = counted_step(watch)
        assert counts == expected and its_loss == loss, (watch, counts, expected)
        # Before each collective; votes and guards must not change their number.
        assert asked >= sum(each["calls"] for each in expected.values()), (watch, asked)
