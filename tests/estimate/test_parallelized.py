"""The trace of a model as one of its tensor-parallel ranks computes it."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from support.models import Model
from support.translations import config_of
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from composer_fsdp2 import plan_sharding
from composer_fsdp2.estimate import parallelized
from composer_fsdp2.estimate.events import MicrobatchTrace
from composer_fsdp2.estimate.trace import trace_microbatch
from composer_fsdp2.sharding.plan import ShardingPlan

STYLES = {"decoder.blocks.*.fc_in": ColwiseParallel(), "decoder.blocks.*.fc_out": RowwiseParallel()}


def loss(model: torch.nn.Module, rows: int, tokens: int) -> torch.Tensor:
    return model(torch.zeros(rows, tokens, dtype=torch.int64)).square().sum()


def traced(degree: int) -> tuple[MicrobatchTrace, ShardingPlan]:
    model = Model(num_blocks=2, width=16, vocabulary=40)
    config = config_of({}, precision="fp32", world_size=8, tensor_parallel_degree=degree)
    plan = plan_sharding(model, config, tensor_parallel=STYLES if degree > 1 else None)
    return trace_microbatch(model, plan, loss, rows=2, tokens=12), plan


def test_a_rank_computes_its_part_of_divided_layers():
    """A step with TP-sharded layers was planned with the duration of full ones, and without their communication."""
    (full, _), (part, _) = traced(1), traced(2)
    of_layers = 2 * 3 * 2 * 2 * 12 * 16 * 32 * 2  # two blocks; forward and backward; two layers of 16 x 32
    assert sum(each.flops for each in full.events) - sum(each.flops for each in part.events) == of_layers // 2
    sent = [call for each in part.events for call in each.sent]
    assert {op for op, *_ in sent} == {"all_reduce"} and {ranks for *_, ranks in sent} == {(0, 1)}
    assert not any(each.sent for each in full.events) and part.notes == ()
    assert not dist.is_initialized()


def test_what_cannot_be_divided_is_counted_in_full_and_says_so():
    """A model that torch cannot parallelize without data has a plan, which is never too low."""
    full, _ = traced(1)
    with mock.patch.object(parallelized, "parallelize", side_effect=RuntimeError("no such style")):
        part, _ = traced(2)
    assert part.events == full.events
    assert [note for note in part.notes if "as if each rank computed all of them" in note]
