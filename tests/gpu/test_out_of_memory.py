"""One of two GPUs runs out of memory: no rank hangs in NCCL, and the repeated batch has the same gradients.

The test requests more memory than any device has, in a forward, in a backward, and between the buffers of a reduction
and its launch. ``test_trainer.py`` has the optimizer's first step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import full
from support.gpus import Ranks, on_gpus
from support.memory import run_out_of_memory
from support.models import Model, tokens
from support.training import FULL, assert_close
from torch import nn

from composer_fsdp2 import begin_microbatch, prepare_fully_shard
from composer_fsdp2._torch.collectives import PendingCollective
from composer_fsdp2._torch.unit import watch_collectives
from composer_fsdp2.sharding.sharded import units
from composer_fsdp2.training.out_of_memory import OutOfMemoryVote, batch_snapshot

BATCH, FITS = 8, 4
FAILING_RANK = 1


def in_forward(model: nn.Module, fail: Callable[[], None]) -> None:
    model.decoder.blocks[1].register_forward_hook(lambda *_: fail())


def in_backward(model: nn.Module, fail: Callable[[], None]) -> None:
    def watch(embed: nn.Module, args: object, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: fail())

    model.decoder.embed.register_forward_hook(watch)


def in_reduction(model: nn.Module, fail: Callable[[], None]) -> None:
    def before(where: PendingCollective | str) -> None:
        if isinstance(where, PendingCollective) and where.kind == "reduce-scatter":
            fail()

    watch_collectives(units(model), before, first=True)  # before the vote, which would report success


PLACES = {"forward": in_forward, "backward": in_backward, "reduction": in_reduction}


def check_places(device: str) -> None:
    torch.set_default_dtype(torch.float64)
    expected = gradients_after(device, FITS, lambda model, fail: None)

    def check(place: str, ranks: tuple[int, ...]) -> None:
        def fail_here(model: nn.Module, fail: Callable[[], None]) -> None:
            if dist.get_rank() in ranks:
                PLACES[place](model, fail)

        for name, gradient in gradients_after(device, BATCH, fail_here).items():
            assert_close(name, gradient, expected[name], rtol=1e-9, atol=1e-12)

    one, both = (FAILING_RANK,), (0, FAILING_RANK)
    for_each(check, {place: (place, one) for place in PLACES} | {"backward, both": ("backward", both)})


def gradients_after(
    device: str, size: int, hungry: Callable[[nn.Module, Callable[[], None]], None]
) -> dict[str, torch.Tensor]:
    """The gradients of a batch in microbatches of ``size``, or of half that size if it was too large, as is
    expected."""
    torch.manual_seed(0)
    model, sizes = Model(num_blocks=3), [size]
    prepare_fully_shard(model, None, FULL, device=device)
    votes, failures = OutOfMemoryVote(model), []
    votes.start()

    def fail() -> None:
        if sizes[-1] > FITS:
            failures.append(sizes[-1])
            run_out_of_memory(device)

    hungry(model, fail)
    batch = tokens(dist.get_rank(), batch_size=BATCH).to(device)
    restore = batch_snapshot(model)
    while not votes.succeeded(functools.partial(run_batch, model, batch.split(sizes[-1]))):
        model.zero_grad()
        restore()
        sizes.append(sizes[-1] // 2)
    votes.stop()
    assert sizes[-1] == FITS, f"ended with {sizes}, after {failures}"
    return {name: full(parameter.grad) for name, parameter in model.named_parameters()}


def run_batch(model: nn.Module, microbatches: tuple[torch.Tensor, ...]) -> None:
    for number, microbatch in enumerate(microbatches):
        begin_microbatch(model, is_last=number == len(microbatches) - 1)
        (model(microbatch).square().mean() / len(microbatches)).backward()


@on_gpus(2, slow_rehearsal=True)
def test_one_gpu_runs_out_of_memory(ranks: Ranks):
    """Instead of hanging until NCCL's watchdog, all ranks halve the microbatch and train the same."""
    ranks.run(check_places)
