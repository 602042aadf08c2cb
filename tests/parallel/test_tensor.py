"""Tensor and sequence parallelism beside one process: every loss, norm and parameter of ten steps."""

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
from support.ranks import run_ranks
from support.training import FULL
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from composer_fsdp2 import (
    PlanError,
    begin_microbatch,
    clip_grad_norm_,
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
    num_steps: int = 10,
) -> None:
    model = build(tied=tied)
    prepare(model)
    reference = copy.deepcopy(model)
    theirs = make(reference)
    if by_script:
        split_by_script(model, plan())
    ours = make(model)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (ours, theirs)]
    for step in range(steps_before):
        for each, optimizer in ((model, ours), (reference, theirs)):
            loss_of(each, batch(100 + step, 2)).backward()
            optimizer.step()
            optimizer.zero_grad()
    prepare_fully_shard(
        model, ours, FULL | config, device="cpu", tensor_parallel=None if by_script else tensor_parallel(plan())
    )
    num_sequences = 2 * num_microbatches * dist.get_world_size() // TENSOR
    for step in range(num_steps):
        tokens = batch(step, num_sequences)
        expected = loss_of(reference, tokens)
        expected.backward()
        expected_norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        loss = torch.zeros(())
        for number, microbatch in enumerate(share(tokens).chunk(num_microbatches)):
            begin_microbatch(model, is_last=number == num_microbatches - 1)
            part = loss_of(model, microbatch) / num_microbatches
            part.backward()
            loss += part.detach()
        dist.all_reduce(loss)
        torch.testing.assert_close(loss / dist.get_world_size(), expected.detach(), rtol=0, atol=ATOL)
        norm = clip_grad_norm_(model, 0.5)["model"]
        torch.testing.assert_close(norm, expected_norm, rtol=0, atol=ATOL)
        for optimizer, scheduler in zip((ours, theirs), schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference)
    if tied:
        assert model.model.head.weight is model.model.embedding.weight


def assert_same_parameters(model: nn.Module, reference: nn.Module) -> None:
    expected = dict(reference.named_parameters())
    found = full_parameters(model)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name].detach(), rtol=0, atol=ATOL, msg=lambda text, n=name: n + text)


def check_all_trainings() -> None:
    recomputed = {"activation_checkpointing": True}
    replicas = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}
    cases: dict[str, dict[str, Any]] = {
        "layers": {"config": {}, "plan": lambda: layer_plan(ends=False), "num_steps": 3},
        "layers, embedding and head": {"config": {}},
        "with sequence parallelism": {"config": {}, "plan": sequence_plan},
        "recomputed, several groups": {"config": recomputed, "make": grouped},
        "sequence, recomputed, not reentrant": {
            "config": recomputed | {"activation_checkpointing_reentrant": False},
            "plan": sequence_plan,
            "num_steps": 3,
        },
        "replicas, tied": {"config": replicas, "tied": True},
        "tied, neither planned": {"config": {}, "tied": True, "plan": lambda: layer_plan(ends=False), "num_steps": 3},
        "kept gathered": {"config": {"sharding_strategy": "SHARD_GRAD_OP"}, "num_steps": 3},
        "frozen, microbatches": {"config": {}, "prepare": freeze_some, "num_microbatches": 2},
        "microbatches, reduced in the last": {
            "config": {"gradient_sync": "last"},
            "num_microbatches": 2,
            "num_steps": 3,
        },
        "offloaded": {"config": {"cpu_offload": True}, "num_steps": 3},
        "state from before": {"config": {}, "steps_before": 2, "num_steps": 3},
        "state from before, tied": {"config": {}, "steps_before": 2, "tied": True, "num_steps": 3},
        "split by the script": {"config": {}, "by_script": True, "num_steps": 3},
        "split by the script, sequence": {"config": {}, "by_script": True, "plan": sequence_plan, "num_steps": 3},
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
    """The values that sharding without split layers gives, from the same random state."""
    rank = dist.get_rank()
    config: dict[str, Any] = {"sync_module_states": start != "meta"}
    expected = drawn("meta" if start == "meta" else "cpu")
    torch.manual_seed(5)
    prepare_fully_shard(expected, None, FULL | config, device="cpu")
    if start == "mixed":
        model = drawn("cpu" if rank == 0 else "meta")
    else:  # "unlike": what rank 0 has goes out, of a split model what the first rank of each group of copies has
        model = drawn(start if start == "meta" else "cpu", seed=3 + (rank // TENSOR if start == "unlike" else 0))
    if by_script:
        split_by_script(model, drawn_plan())
    torch.manual_seed(5)
    prepare_fully_shard(
        model, None, FULL | config, device="cpu", tensor_parallel=None if by_script else tensor_parallel(drawn_plan())
    )
    wanted = full_parameters(expected)
    for name, value in full_parameters(model).items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=0, msg=lambda text, n=name: f"{n}: {text}")


def check_initialisations() -> None:
    names = [(start, by_script) for start in ("meta", "mixed", "unlike") for by_script in (False, True)]
    cases = {f"{start}{', split by the script' * by_script}": (start, by_script) for start, by_script in names}
    del cases["mixed, split by the script"]  # rank 0 has a part alone: refused, below
    for_each(lambda start, by_script: check_initialisation(start, by_script=by_script), cases)
    model = drawn("cpu" if dist.get_rank() == 0 else "meta")
    split_by_script(model, drawn_plan(), src_data_rank=None)  # by itself torch would send, and wait for ever
    with pytest.raises(PlanError, match="rank 0, the only one with values"):
        prepare_fully_shard(model, None, FULL | {"sync_module_states": True}, device="cpu")


def test_split_weights_start_with_the_values_of_an_unsplit_model():
    """From the meta device each of the ranks that split a weight would draw the same numbers for its own part."""
    run_ranks(check_initialisations, 4)


def sends_of_preparing(start: str, *, splits: bool) -> dict[str, int]:
    """The bytes of each collective that sends values."""
    model = drawn("meta" if start == "meta" or (start == "mixed" and dist.get_rank()) else "cpu")
    config = FULL | {"sync_module_states": start != "meta"}
    split = tensor_parallel(drawn_plan()) if splits else None
    with Collectives() as sent:
        prepare_fully_shard(model, None, config, device="cpu", tensor_parallel=split)
    return {name: each["bytes"] for name, each in sent.counts.items() if name in ("broadcast_", "scatter_")}


def check_sends() -> None:
    def compare(start: str) -> None:
        unsplit, split = (sends_of_preparing(start, splits=splits) for splits in (False, True))
        assert split == unsplit, (split, unsplit)

    for_each(compare, {start: (start,) for start in ("meta", "mixed", "alike")})


def test_what_every_rank_has_is_not_sent():
    """At the start of a large run rank 0 of each group would send every split weight, one after the other, to ranks
    that drew or received it a moment before."""
    run_ranks(check_sends, 4)


def check_own_values() -> None:
    """Without sync_module_states: each rank was seeded with a number of its own."""
    model = drawn("cpu", seed=dist.get_rank())
    config = FULL | {"sync_module_states": False}
    prepare_fully_shard(model, None, config, device="cpu", tensor_parallel=tensor_parallel(drawn_plan()))
    bias = model.model.layers[1].bias.to_local()  # RowwiseParallel: not split
    biases = [torch.empty_like(bias) for _ in range(dist.get_world_size())]
    dist.all_gather(biases, bias)
    assert torch.equal(biases[0], biases[1]) and torch.equal(biases[2], biases[3]), biases


def test_ranks_that_split_a_layer_start_with_one_ranks_values():
    """Parts of different weights would be added up: no rank's model, and none that one process could train."""
    run_ranks(check_own_values, 4)


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


def test_gradients_are_clipped_as_in_one_process():
    """By any norm: parameters that are split and those that are not have different numbers of copies."""
    run_ranks(check_gradients, 4)


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


def test_full_parameters_are_seen_and_written():
    """Within summon_full_params a split weight is whole, and what is written into it stays."""
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


def check_masks_of_two_dtypes() -> list[str]:
    errors = []
    mesh = init_device_mesh("cpu", (TENSOR,))
    for dtype in (torch.float32, torch.float64):
        model = nn.Sequential(nn.Embedding(8, 4, dtype=dtype))
        parallelize_module(model, mesh, {"0": RowwiseParallel(input_layouts=Replicate())})
        try:
            model(torch.arange(6).view(2, 3))
        except AssertionError as error:
            errors.append(f"{dtype}: {type(error).__name__}")
    return errors


@pytest.mark.any_torch  # of 2.7: 2.13 has mended it
def test_torch_mixes_up_the_masks_of_split_embeddings():
    """torch 2.7, without us: of two split embeddings that differ in dtype alone, the second one's lookup raises, as its
    cache of redistributions takes their placements for one. So tests of split models compute in float64."""
    assert run_ranks(check_masks_of_two_dtypes, TENSOR, fresh=True) == [["torch.float64: AssertionError"]] * TENSOR


def test_a_dropout_drops_the_same_on_the_ranks_that_split_a_layer():
    """Else what each of them holds whole gets a gradient of its own, and the copies drift apart in silence."""
    run_ranks(check_draws, TENSOR)
