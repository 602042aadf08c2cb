"""One GPU of two out of memory: no rank hangs in NCCL, and the batch repeated is the batch as it would have been.

The allocator is asked for what no device has, in a forward, in a backward, and between the buffers of a reduction and
its launch. ``test_trainer.py`` has the optimizer's first step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from support.cases import for_each
from support.gpus import Ranks, on_gpus
from support.memory import gradients_of_halved, run_out_of_memory
from support.models import Model, tokens
from support.training import FULL, assert_close
from torch import nn

from composer_fsdp2 import prepare_fully_shard
from composer_fsdp2._torch.collectives import InFlight, watch_collectives
from composer_fsdp2.sharding.sharded import units

BATCH, FITS = 8, 4


def in_forward(model: nn.Module, fail: Callable[[], None]) -> None:
    model.decoder.blocks[1].register_forward_hook(lambda *_: fail())


def in_backward(model: nn.Module, fail: Callable[[], None]) -> None:
    def watch(embed: nn.Module, args: object, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: fail())

    model.decoder.embed.register_forward_hook(watch)


def in_reduction(model: nn.Module, fail: Callable[[], None]) -> None:
    def before(where: InFlight | str) -> None:
        if isinstance(where, InFlight) and where.kind == "reduce-scatter":
            fail()

    watch_collectives(units(model), before, first=True)  # ahead of the vote, which would say that all is well


PLACES = {"forward": in_forward, "backward": in_backward, "reduction": in_reduction}


def check_places(device: str) -> None:
    torch.set_default_dtype(torch.float64)

    def gradients(size: int, place: str = "") -> dict[str, torch.Tensor]:
        """Of a batch in microbatches of ``size``, and of half as many where that was once too much at a place."""
        torch.manual_seed(0)
        model = Model(num_blocks=3)
        prepare_fully_shard(model, None, FULL, device=device)
        times = [1] * bool(place)

        def fail() -> None:
            if times:
                times.pop()
                run_out_of_memory(device)

        if place:
            PLACES[place](model, fail)
        batch = tokens(dist.get_rank(), batch_size=BATCH).to(device)
        found = gradients_of_halved(model, lambda part: model(part).square().mean(), batch, size)
        assert not times, "nothing failed"
        return found

    expected = gradients(FITS)

    def check(place: str, failing: tuple[int, ...]) -> None:
        for name, gradient in gradients(BATCH, place if dist.get_rank() in failing else "").items():
            assert_close(name, gradient, expected[name], rtol=1e-9, atol=1e-12)

    for_each(check, {place: (place, (1,)) for place in PLACES} | {"backward, both": ("backward", (0, 1))})


@on_gpus(2)
def test_one_gpu_runs_out_of_memory(ranks: Ranks):
    """Instead of a hang until NCCL's watchdog comes: all halve the microbatch, and learn what they would have."""
    ranks.run(check_places)
