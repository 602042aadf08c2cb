"""The replay of a step compared with a real ``fully_shard``: every collective, and the peak of the state to the
byte."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.examples import IS_THOROUGH
from support.experts import MoELanguage
from support.models import Model, ModelWithScalar
from support.ranks import run_ranks
from support.translations import config_of
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from composer_fsdp2 import apply_plan, begin_microbatch, estimate_step, plan_sharding
from composer_fsdp2.estimate._torch.counting import Collectives, StateBytes
from composer_fsdp2.estimate.events import MicrobatchTrace, StepEvent
from composer_fsdp2.estimate.hooks import record_hooks
from composer_fsdp2.estimate.step import Kind, StepEstimate
from composer_fsdp2.sharding.plan import ShardingPlan


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, an ``fsdp_config``, and the world size."""

    config: dict[str, Any] = field(default_factory=dict)
    ranks: int = 4
    microbatches: int = 1
    tied: bool = False
    frozen: tuple[str, ...] = ()
    scalar: bool = False
    width: int = 8
    precision: str = "fp32"

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = (
            ModelWithScalar() if self.scalar else Model(num_blocks=2, tied=self.tied, width=self.width, vocabulary=24)
        )
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in self.frozen))
        return model

    def plan(self, model: nn.Module) -> ShardingPlan:
        config = config_of(self.config, precision=self.precision, world_size=self.ranks)
        return plan_sharding(model, config, precision=self.precision).resolve(self.ranks)


def tokens() -> torch.Tensor:
    return torch.arange(6).view(2, 3)


def record(model: nn.Module, plan: ShardingPlan) -> MicrobatchTrace:
    events: list[StepEvent] = []
    with record_hooks(
        model, plan, lambda hook, unit, name: events.append(StepEvent(hook=hook, unit=unit, parameter=name))
    ):
        model(tokens()).square().sum().backward()
    for parameter in model.parameters():
        parameter.grad = None
    return MicrobatchTrace(events=tuple(events))


def measure(model: nn.Module, case: Case) -> tuple[Counter[tuple[str, int, int]], Any]:
    """Measures the second of two steps, because the optimizer has no state in the first."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=True)
    state = StateBytes(model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        state.peak = 0
        with Collectives() as sent, state:
            for microbatch in range(case.microbatches):
                begin_microbatch(model, is_last=microbatch == case.microbatches - 1)
                model(tokens()).square().sum().backward()
            optimizer.step()
    return Counter((_OPS[call.operator], call.num_bytes, call.ranks) for call in sent.calls), state


_OPS = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "broadcast_": "broadcast",
    "alltoall_base_": "all_to_all",
}


def predicted(estimate: StepEstimate) -> Counter[tuple[str, int, int]]:
    return Counter((call.op, call.num_bytes, call.ranks) for call in estimate.calls)


def compare(case: Case, rank: int = 0) -> str:
    """The differences between the replay and the real step; "" if none. Called on all ranks."""
    model = case.model()
    model(tokens())
    plan = case.plan(model)
    trace = record(model, plan)
    estimate = estimate_step(plan, trace, world_size=case.ranks, num_microbatches=case.microbatches, rank=rank)
    apply_plan(model, plan)
    sent, state = measure(model, case)
    problems = []
    if (expected := predicted(estimate)) != sent:
        problems.append(f"sent {sorted((sent - expected).items())}, not {sorted((expected - sent).items())}")
    if estimate.peak_bytes != state.peak:
        by_kind = dict(zip(Kind, estimate.peak.bytes_by_kind, strict=True))
        problems.append(f"{estimate.peak.label}: {by_kind}, but measured were {state.peak}: {state.at_peak}")
    return "; ".join(problems)


@contextmanager
def world_of(ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


HSDP = {"sharding_strategy": "HYBRID_SHARD", "data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}
STRATEGIES: dict[str, dict[str, Any]] = {
    "full": {},
    "grad op": {"sharding_strategy": "SHARD_GRAD_OP"},
    "int": {"reshard_after_forward": 2},
    "hsdp": HSDP,
    "none": {"sharding_strategy": "NO_SHARD"},
}
DTYPES = {"fp32": "FULL", "bf16": "PURE", "mixed": "DEFAULT"}
SYNCS: dict[str, tuple[dict[str, Any], int]] = {
    "one": ({}, 1),
    "every": ({}, 2),
    "last": ({"gradient_sync": "last"}, 3),
    "keep": ({"reshard_after_backward": False}, 2),
    "last and keep": ({"gradient_sync": "last", "reshard_after_backward": False}, 2),
    "defer": ({"gradient_sync": "defer_replica"}, 3),
}
EACH = {
    "tied": Case(tied=True),
    "frozen": Case(frozen=("embed", "blocks.0", "fc_in")),
    "scalar, hsdp": Case(scalar=True, config=HSDP),
    "uneven, 7": Case(width=10, ranks=7),
    "one rank": Case(ranks=1),
    "prefetch": Case(config={"forward_prefetch": True, "forward_prefetch_limit": 2, "backward_prefetch_limit": 2}),
    "no prefetch": Case(config={"backward_prefetch": "NONE"}),
    "offload, bf16": Case(config={"cpu_offload": True, "mixed_precision": "PURE"}, precision="amp_bf16"),
    "recomputed": Case(config={"activation_checkpointing": True}),
    "recomputed, reentrant": Case(
        config={"activation_checkpointing": True, "activation_checkpointing_reentrant": True}
    ),
}
PAIRS = {}
for (i, strategy), (j, dtype), (k, when) in itertools.product(*map(enumerate, (STRATEGIES, DTYPES, SYNCS))):
    # Every pair of strategy, dtype and accumulation once; a thorough run has all triples.
    if (when == "defer" and strategy not in ("hsdp", "none")) or not (IS_THOROUGH or (i + k) % 3 == j):
        continue
    config, number = SYNCS[when]
    # A separate test case for each strategy and each accumulation.
    (EACH if strategy == "hsdp" or when == "one" else PAIRS)[f"{strategy}, {dtype}, {when}"] = Case(
        config=STRATEGIES[strategy] | {"mixed_precision": DTYPES[dtype]} | config,
        microbatches=number,
        precision="fp32" if dtype == "fp32" else "amp_bf16",
    )


@pytest.mark.parametrize("cases", [EACH, pytest.param(PAIRS, marks=pytest.mark.slow)], ids=["each", "pairs"])
@pytest.mark.filterwarnings("ignore:Please specify CheckpointImpl.NO_REENTRANT:FutureWarning")  # torch 2.7
def test_every_configuration_is_replayed_to_the_byte(cases: dict[str, Case]):
    """A memory prediction that is off by one unit would claim that a run fits which does not."""
    wrong = {}
    for name, case in cases.items():
        with world_of(case.ranks):
            if problem := compare(case):
                wrong[name] = problem
    assert not wrong, f"{len(wrong)} of {len(cases)}\n" + "\n".join(
        f"{name}: {problem}" for name, problem in wrong.items()
    )


ADAPTERS = {
    "adapters above frozen blocks": Case(frozen=("embed", "blocks.0", "ln", "fc_in", "head")),
    "mixed precision": Case(
        frozen=("embed", "ln", "fc_in", "head"), config={"mixed_precision": "PURE"}, precision="amp_bf16"
    ),
}


def test_frozen_parameters_have_no_gradients_and_no_state_in_a_plan_alone():
    """Also without a trace: for adapters on a frozen base the plan must not count the base's gradients and Adam
    state."""
    for name, case in ADAPTERS.items():
        with world_of(case.ranks):
            model = case.model()
            plan = case.plan(model)
            assert {spec.name for unit in plan.units for spec in unit.parameters if spec.is_trained} == {
                name for name, parameter in model.named_parameters() if parameter.requires_grad
            }
            # Ranks with different trainable parameters would wait for different reductions, so their plans must differ.
            assert plan.digest != case.plan(replace(case, frozen=()).model()).digest
            estimate = estimate_step(plan, world_size=case.ranks)
            apply_plan(model, plan)
            sent, _ = measure(model, case)
            shards = [each.to_local().untyped_storage().nbytes() for each in model.parameters() if each.requires_grad]
        assert 0 < sum(shards) < sum(each.to_local().untyped_storage().nbytes() for each in model.parameters()), name
        steps = 4 * len(shards)
        assert estimate.optimizer_bytes == 2 * sum(shards) + steps, name
        assert estimate.gradients_bytes == sum(shards), name
        assert predicted(estimate) == sent, name


GLOO = {
    "four ranks, replicas": Case(
        config=HSDP | {"gradient_sync": "defer_replica"}, microbatches=3, precision="amp_bf16"
    ),
    "four ranks, int, bf16": Case(
        config={"reshard_after_forward": 2, "gradient_sync": "last", "mixed_precision": "PURE"},
        microbatches=3,
        precision="amp_bf16",
    ),
    "two ranks, uneven, tied": Case(ranks=2, width=7, tied=True),
    "two ranks, scalar": Case(ranks=2, scalar=True, microbatches=2),
}


def on_ranks(names: tuple[str, ...]) -> None:
    problems = {name: compare(GLOO[name], rank=dist.get_rank()) for name in names}
    assert not any(problems.values()), problems


@pytest.mark.any_torch
@pytest.mark.parametrize("ranks", [2, 4])
def test_real_ranks_take_and_send_what_was_predicted(ranks: int):
    """The fake group above sends nothing; gloo's ranks communicate the same, on each of them."""
    run_ranks(on_ranks, ranks, tuple(name for name, case in GLOO.items() if case.ranks == ranks))


# --- expert parallelism


def sent_beside_prediction(config: dict[str, Any]) -> list[Counter[tuple[str, int, int]]]:
    """The collectives that were not predicted, and the predicted ones that were not sent. Called on all ranks."""
    case = Case(config={"expert_parallel_degree": 2} | config)
    model = MoELanguage()
    plan = case.plan(model)
    estimate = estimate_step(plan, record(model, plan), world_size=4, num_microbatches=1, rank=dist.get_rank())
    apply_plan(model, plan)
    sent, _ = measure(model, case)
    return [sent - predicted(estimate), predicted(estimate) - sent]


@pytest.mark.any_torch
def test_shards_of_experts_travel_as_predicted():
    """A plan that counted a layer's EP-sharded experts as fully gathered would refuse a run that fits."""
    for config in ({}, {"data_parallel_replicate_degree": 2}):
        for unexpected, missing in run_ranks(sent_beside_prediction, 4, config):
            assert not missing, missing
            assert {op for op, *_ in unexpected} == {"all_to_all"}  # of tokens, in two layers
            assert unexpected.total() == 5 * 2, unexpected
