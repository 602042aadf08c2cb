"""Tensor and sequence parallelism beside one process: every loss, norm and parameter of three steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.clips import CLIPS, Clip, assert_same_gradients, check_summoned
from support.comparing import full_parameters
from support.language import MLP, Language, batch, layer_plan, loss_of, sequence_plan
from support.legality import compare_training
from support.ranks import run_ranks
from support.training import FULL
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from composer_fsdp2 import (
    PlanError,
    prepare_fully_shard,
)
from composer_fsdp2._torch.counting import Collectives
from composer_fsdp2.training.clipping import norm_of_gradients

TENSOR = 2
ATOL = 1e-12

Optimizer = torch.optim.Optimizer


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def grouped(model: nn.Module) -> Optimizer:
    """What Composer refuses beside tensor parallelism: groups, in another order than the model's."""
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    rest = [p for name, p in model.named_parameters() if "norm" not in name]
    groups = [{"params": rest[::-1], "weight_decay": 0.1}, {"params": norms, "lr": 0.05}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def freeze_some(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in ("layers.0.mlp", "embedding")))


def split_by_script(model: nn.Module, plan: Mapping[str, ParallelStyle], **options: Any) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // TENSOR, TENSOR), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], dict(plan), **options)


def tensor_parallel(plan: Mapping[str, ParallelStyle]) -> dict[str, Any]:
    return {"tensor_parallel_degree": TENSOR, "layer_plan": plan}


def build(*, tied: bool = False) -> Language:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    return Language(tied=tied)


def share(tokens: torch.Tensor) -> torch.Tensor:
    """What this rank's group along the tensor axis trains on, of all ranks' batch."""
    groups = dist.get_world_size() // TENSOR
    return tokens.chunk(groups)[dist.get_rank() // TENSOR]


def check_training(
    config: dict[str, Any],
    *,
    plan: Callable[[], dict[str, ParallelStyle]] = layer_plan,
    tied: bool = False,
    make: Callable[[nn.Module], Optimizer] = sgd,
    prepare: Callable[[nn.Module], None] = lambda model: None,
    by_script: bool = False,
    steps_before: int = 0,
    num_microbatches: int = 1,
) -> None:
    model = build(tied=tied)
    prepare(model)
    reference = copy.deepcopy(model)
    theirs = make(reference)
    if by_script:
        split_by_script(model, plan())
    ours = make(model)
    for step in range(steps_before):
        for each, optimizer in ((model, ours), (reference, theirs)):
            loss_of(each, batch(100 + step, 2)).backward()
            optimizer.step()
            optimizer.zero_grad()
    prepare_fully_shard(
        model, ours, FULL | config, device="cpu", tensor_parallel=None if by_script else tensor_parallel(plan())
    )
    compare_training(model, reference, ours, theirs, num_steps=3, num_microbatches=num_microbatches, num_shared=TENSOR)
    if tied:
        assert model.model.head.weight is model.model.embedding.weight


def check_all_trainings() -> None:
    """Each setting once, and in twos where neither changes what the other does (order/ has one setting a row)."""
    recomputed = {"activation_checkpointing": True}
    kept = {"sharding_strategy": "SHARD_GRAD_OP", "activation_checkpointing_reentrant": False}
    replicas = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}
    cases: dict[str, dict[str, Any]] = {
        "recomputed, several groups": {"config": recomputed, "make": grouped},
        "sequence, recomputed, not reentrant, kept gathered": {"config": recomputed | kept, "plan": sequence_plan},
        "replicas, tied": {"config": replicas, "tied": True},
        "tied, neither planned, offloaded": {
            "config": {"cpu_offload": True},
            "tied": True,
            "plan": lambda: layer_plan(ends=False),
        },
        "frozen, microbatches": {"config": {}, "prepare": freeze_some, "num_microbatches": 2},
        "sequence, microbatches, reduced in the last": {
            "config": {"gradient_sync": "last"},
            "plan": sequence_plan,
            "num_microbatches": 2,
        },
        "state from before, tied": {"config": {}, "steps_before": 2, "tied": True},
        "split by the script": {"config": {}, "by_script": True},
        "split by the script, sequence": {"config": {}, "by_script": True, "plan": sequence_plan},
    }
    for_each(lambda options: check_training(**options), {name: (options,) for name, options in cases.items()})


def test_training_is_that_of_one_process():
    """Whoever splits layers trains the model of one process: nothing is clipped by another norm, untied or unfrozen."""
    run_ranks(check_all_trainings, 4)


@pytest.mark.slow
def test_training_with_replicas_shards_and_split_layers_on_eight_ranks():
    """Three axes of more than one rank each."""
    run_ranks(check_eight, 8)


def check_eight() -> None:
    config = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}
    for_each(
        lambda options: check_training(config, **options),
        {"layers": ({},), "sequence": ({"plan": sequence_plan},), "tied": ({"tied": True},)},
    )


# --- values from the start


class Drawn(nn.Module):
    """A layer with one initializer for all that it holds, which draws its own numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = DrawnDecoder()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


class DrawnDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear)

    def param_init_fn(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)
            nn.init.uniform_(module.bias)


DRAWN_PLAN = {"model.layers.0": ColwiseParallel, "model.layers.1": RowwiseParallel}


def drawn_plan() -> dict[str, ParallelStyle]:
    return {path: style() for path, style in DRAWN_PLAN.items()}


def drawn(device: str, seed: int = 3) -> Drawn:
    torch.manual_seed(seed)
    with torch.device(device):
        return Drawn()


def check_initialisation(start: str, *, by_script: bool) -> None:
    """The values that sharding without split layers gives, from the same random state, and no more to send for them."""
    rank = dist.get_rank()
    config: dict[str, Any] = {"sync_module_states": start != "meta"}
    device = "cpu" if start != "meta" and (start != "mixed" or rank == 0) else "meta"
    expected = drawn("meta" if start == "meta" else "cpu")
    # "unlike": what rank 0 has goes out, of a split model what the first rank of each group of copies has.
    model = drawn(device, seed=3 + (rank // TENSOR if start == "unlike" else 0))
    if by_script:
        split_by_script(model, drawn_plan())
    splits = [None, None if by_script else tensor_parallel(drawn_plan())]
    sent = []
    for each, split in zip((expected, model), splits, strict=True):
        torch.manual_seed(5)
        with Collectives() as counted:
            prepare_fully_shard(each, None, FULL | config, device="cpu", tensor_parallel=split)
        names = ("broadcast_", "scatter_")
        sent.append({name: found["bytes"] for name, found in counted.counts.items() if name in names})
    wanted = full_parameters(expected)
    for name, value in full_parameters(model).items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=0, msg=lambda text, n=name: f"{n}: {text}")
    # At the start of a large run rank 0 of each group would send every split weight, one after the other, to ranks
    # that drew or received it a moment before.
    if not by_script and start != "unlike":
        assert sent[0] == sent[1], sent


def check_initialisations() -> None:
    names = [(start, by_script) for start in ("meta", "mixed", "unlike", "alike") for by_script in (False, True)]
    cases = {f"{start}{', split by the script' * by_script}": (start, by_script) for start, by_script in names}
    del cases["mixed, split by the script"]  # rank 0 has a part alone: refused, below
    for_each(lambda start, by_script: check_initialisation(start, by_script=by_script), cases)
    model = drawn("cpu" if dist.get_rank() == 0 else "meta")
    split_by_script(model, drawn_plan(), src_data_rank=None)  # by itself torch would send, and wait for ever
    with pytest.raises(PlanError, match="rank 0, the only one with values"):
        prepare_fully_shard(model, None, FULL | {"sync_module_states": True}, device="cpu")
    check_own_values()


def test_split_weights_start_with_the_values_of_an_unsplit_model():
    """From the meta device each of the ranks that split a weight would draw the same numbers for its own part; and
    parts of different weights would be added up: no rank's model, and none that one process could train."""
    run_ranks(check_initialisations, 4)


def check_own_values() -> None:
    """Without sync_module_states: each rank was seeded with a number of its own."""
    model = drawn("cpu", seed=dist.get_rank())
    config = FULL | {"sync_module_states": False}
    prepare_fully_shard(model, None, config, device="cpu", tensor_parallel=tensor_parallel(drawn_plan()))
    bias = model.model.layers[1].bias.to_local()  # RowwiseParallel: not split
    biases = [torch.empty_like(bias) for _ in range(dist.get_world_size())]
    dist.all_gather(biases, bias)
    assert torch.equal(biases[0], biases[1]) and torch.equal(biases[2], biases[3]), biases


# --- gradients and full parameters


def check_gradients() -> None:
    def clipped(clip: Clip, reference_clip: Clip) -> None:
        model = build()
        reference = copy.deepcopy(model)
        prepare_fully_shard(model, None, FULL, device="cpu", tensor_parallel=tensor_parallel(sequence_plan()))
        tokens = batch(0, 4)
        loss_of(model, share(tokens)).backward()
        loss_of(reference, tokens).backward()
        norm = torch.stack([parameter.grad.norm() for parameter in reference.parameters()]).norm()
        torch.testing.assert_close(norm_of_gradients(model.parameters()), norm, rtol=0, atol=ATOL)
        clip(model)
        reference_clip(reference)
        assert_same_gradients(model, reference, atol=ATOL)

    for_each(clipped, CLIPS)


def check_full_parameters() -> None:
    model = build(tied=True)
    reference = copy.deepcopy(model)
    prepare_fully_shard(model, None, FULL, device="cpu", tensor_parallel=tensor_parallel(layer_plan()))
    check_summoned(model, reference)
    assert model.model.head.weight is model.model.embedding.weight
    loss_of(model, share(batch(0, 4))).backward()
    with torch.no_grad():  # an eval between, and another step
        loss_of(model, share(batch(1, 4)))
    loss_of(model, share(batch(2, 4))).backward()


def test_gradients_are_clipped_and_full_parameters_seen_as_in_one_process():
    """By any norm: parameters that are split and those that are not have different numbers of copies. Within
    summon_full_params a split weight is whole, and what is written into it stays."""
    run_ranks(check_gradients, 4)
    run_ranks(check_full_parameters, 4)


# --- random numbers


class Dropping(MLP):
    """Drops what every rank holds whole, after what is split."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.3, self.training)


def check_draws() -> None:
    model = build()
    for each in model.model.layers:
        each.mlp.__class__ = Dropping
    reference = copy.deepcopy(model)
    torch.manual_seed(dist.get_rank())  # as Composer seeds ranks
    prepare_fully_shard(model, None, FULL, device="cpu", tensor_parallel=tensor_parallel(layer_plan()))
    state, tokens = torch.get_rng_state(), batch(0, 2)
    loss = loss_of(model, tokens)
    loss.backward()
    torch.set_rng_state(state)
    expected = loss_of(reference, tokens)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=0, atol=ATOL)
    assert_same_gradients(model, reference, atol=ATOL)


def test_a_dropout_drops_the_same_on_the_ranks_that_split_a_layer():
    """Else what each of them holds whole gets a gradient of its own, and the copies drift apart in silence."""
    run_ranks(check_draws, TENSOR)
