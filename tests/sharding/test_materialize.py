"""Where values come from: drawn alike on every rank, sent by rank 0, or left as they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.comparing import full, own_name
from support.models import Block, Chain, Decoder, FakeMetric, Model, layer, tie, tokens
from support.ranks import run_ranks
from support.training import FULL
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2 import PlanError, ShardingConfig, apply_plan, plan_sharding, prepare_fully_shard

META = torch.device("meta")


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole parameters and all buffers, also those that a state dict leaves out."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {own_name(name): full(tensor).clone() for name, tensor in tensors}


def same_on_all_ranks(model: nn.Module) -> bool:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, values_of(model))
    return all(torch.equal(value, other[name]) for other in everyone for name, value in everyone[0].items())


# --- meta on every rank


def drawn_by_one_process(model: nn.Module, order: list[str], seed: int) -> dict[str, torch.Tensor]:
    """What FSDP1 made of a meta model (composer/distributed/dist_strategy.py, _param_init_fn): module by module, on
    full tensors, from rank 0's seed."""
    torch.manual_seed(seed)
    for path in order:
        module = model.get_submodule(path)
        module.to_empty(device="cpu", recurse=False)
        module.reset_parameters()
    return values_of(model)


# Units bottom-up, and breadth first within a unit, as FSDP1 initialised them.
BLOCK_ORDER = ["", ".fc_in", ".fc_out"]
DECODER_ORDER = [
    *(f"decoder.blocks.{i}{path}" for i in range(2) for path in BLOCK_ORDER),
    "decoder.embed",
    "decoder.norm",
    "decoder.head",
]


def check_meta(config: dict[str, Any]) -> None:
    expected = drawn_by_one_process(Model(device=META), DECODER_ORDER, seed=100)
    torch.manual_seed(100 + dist.get_rank())
    model = Model(device=META)
    state = torch.get_rng_state()
    prepare_fully_shard(model, None, config, device="cpu")
    assert torch.equal(torch.get_rng_state(), state), "the random state of the run was moved"
    assert same_on_all_ranks(model)
    values = values_of(model)
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(values[name], value), name
    model(tokens(0)).sum().backward()


@pytest.mark.parametrize(
    ("world_size", "config"),
    [
        (2, {}),
        (4, {"data_parallel_replicate_degree": 2}),
        (2, {"sync_module_states": True}),
        (2, {"cpu_offload": True}),
        (2, {"activation_checkpointing": True}),
    ],
)
def test_meta_models_are_drawn_as_one_process_would(world_size: int, config: dict[str, Any]):
    """A model that fits on no single device starts from the values that its seed means, on any number of ranks."""
    run_ranks(check_meta, world_size, config)


class Initialised(Decoder):
    """Its param_init_fn gives each parameter the number of modules that it has seen."""

    def param_init_fn(self, module: nn.Module) -> None:
        self.seen = [*getattr(self, "seen", []), type(module).__name__]
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            nn.init.constant_(tensor, len(self.seen))


def check_param_init_fn() -> list[str]:
    model = nn.Module()
    model.decoder = Initialised(device=META)
    prepare_fully_shard(model, None, {}, device="cpu")
    embedding = full(model.decoder.embed.weight)
    assert torch.equal(embedding, torch.full_like(embedding, 7.0)), embedding
    return model.decoder.seen


def test_param_init_fn_goes_before_reset_parameters():
    """Foundry's initialisation is called once for each module that owns something without values, on full tensors."""
    block = ["Block", "Linear", "Linear"]
    assert run_ranks(check_param_init_fn, 2) == [[*block, *block, "Embedding", "LayerNorm", "Linear"]] * 2


def check_tied_on_meta() -> None:
    model = Model(tied=True, device=META)
    model.decoder.embed.weight.requires_grad_(False)
    model.decoder.embed.weight.is_special = True
    model.half()
    prepare_fully_shard(model, None, FULL, device="cpu")
    weight = model.decoder.embed.weight
    assert weight is model.decoder.head.weight
    assert not weight.requires_grad and weight.dtype == torch.float16
    assert math.isfinite(full(weight).float().sum())


def test_ties_dtypes_and_flags_survive_meta():
    """A tied, frozen, half-precision weight on meta is tied, frozen and half afterwards."""
    run_ranks(check_tied_on_meta, 2)


def check_partly_meta() -> None:
    """One part has values already; only the other is drawn."""
    model = Chain(real=Block(), later=Block(device=META))
    nn.init.constant_(model.real.fc_in.weight, 3.0)
    prepare_fully_shard(model, None, {}, device="cpu")
    assert bool((full(model.real.fc_in.weight) == 3).all())
    assert bool((full(model.later.offset) == 0.25).all())
    assert same_on_all_ranks(model.later)


def test_values_that_exist_are_not_drawn_again():
    """A pretrained part of a model on meta keeps what it was loaded with."""
    run_ranks(check_partly_meta, 2)


class Bare(nn.Module):
    """Has a parameter and no way to fill it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 2, device=META))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def uninitialisable() -> nn.Module:
    return Chain(fine=layer(), net=Chain(inner=Bare()))


def left_out_on_meta() -> nn.Module:
    model = Chain(fine=layer(), left=Chain(inner=nn.Linear(2, 2, device=META)))
    model.left._fsdp_wrap = False
    return model


def own_on_meta() -> nn.Module:
    model = Model()
    model.own = nn.Parameter(torch.empty(2, device=META))
    return model


def check_refused(build: Callable[[], nn.Module], config: dict[str, Any]) -> str:
    model = build()
    before = [(type(module), len(module._forward_pre_hooks)) for module in model.modules()]
    parameters = list(model.parameters())
    try:
        prepare_fully_shard(model, None, config, device="cpu")
    except PlanError as error:
        assert [(type(module), len(module._forward_pre_hooks)) for module in model.modules()] == before
        assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("build", "parts"),
    [
        (uninitialisable, ["'net.inner' (Bare)", "reset_parameters()", "param_init_fn(module)"]),
        (left_out_on_meta, ["left.inner.weight is on the meta device", "no unit holds it"]),
        (own_on_meta, ["own is on the meta device"]),
    ],
)
def test_what_would_never_get_a_value(build: Callable[[], nn.Module], parts: list[str]):
    """A module that nobody can initialise is named on every rank, before anything is touched."""
    for message in run_ranks(check_refused, 2, build, {}):
        assert [part for part in parts if part not in message] == []


# --- meta on some ranks


def mixed(on_meta: list[int]) -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return Model(tied=True, device=META if dist.get_rank() in on_meta else None)


def mixed_1() -> nn.Module:
    return mixed([1])


def mixed_0() -> nn.Module:
    return mixed([0])


def unlike_buffers() -> nn.Module:
    """A cache whose length is what this rank has seen so far."""
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_buffer("cache", torch.zeros(dist.get_rank() + 1), persistent=False)
    return model


def check_mixed() -> None:
    model = mixed_1()
    expected: list[Any] = [values_of(model) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(expected)
    prepare_fully_shard(model, None, {"sync_module_states": True}, device="cpu")
    for name, value in values_of(model).items():
        assert torch.equal(value, expected[0][name]), name
    assert model.decoder.embed.weight is model.decoder.head.weight


def test_rank_0_loads_and_the_others_wait_on_meta():
    """A checkpoint read by rank 0 alone reaches every rank, non-persistent buffers included."""
    run_ranks(check_mixed, 2)


@pytest.mark.parametrize(
    ("build", "config", "message"),
    [
        (mixed_1, {}, r"Detected mixed initialization.*ranks \[1\].*sync_module_states"),
        (mixed_0, {}, r"Detected mixed initialization.*ranks \[0\]"),
        (mixed_0, {"sync_module_states": True}, "rank 0's model is on the meta device"),
        (unlike_buffers, {"sync_module_states": True}, r"buffer 0.cache is \(1,\)[^\n]*\n.*buffer 0.cache is \(2,\)"),
    ],
)
def test_mixed_initialisation_that_cannot_be(build: Callable[[], nn.Module], config: dict[str, Any], message: str):
    """FSDP1's error in FSDP1's words; a rank without values never trains on what memory held, and none waits for a
    broadcast that does not fit."""
    for text in run_ranks(check_refused, 2, build, config):
        assert text
        with pytest.raises(PlanError, match=message):
            raise PlanError(text)


# --- rank 0's values


class Kinds(nn.Module):
    """Tensors of many dtypes and shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5))
        self.column = nn.Parameter(torch.randn(5, 3).t())
        self.none = nn.Parameter(torch.randn(0, 4))
        for name, dtype in {"half": torch.float16, "low": torch.bfloat16, "fine": torch.float64}.items():
            self.register_buffer(f"{name}_", torch.randn(3).to(dtype))
        self.register_buffer("count", torch.randint(1000, ()))
        self.register_buffer("mask", torch.rand(7) > 0.5, persistent=False)
        self.register_buffer("complex", torch.randn(2, dtype=torch.complex64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def check_sync(sync: bool) -> tuple[bool, dict[str, torch.dtype]]:
    torch.manual_seed(dist.get_rank())
    model = Chain(net=Chain({"kinds": True}, kinds=Kinds(), rest=layer(), tied=layer()))
    tie(model.net.rest, model.net.tied)
    dtypes = {name: tensor.dtype for name, tensor in values_of(model).items()}
    first: list[Any] = [values_of(model) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(first)
    prepare_fully_shard(model, None, FULL | {"sync_module_states": sync}, device="cpu")
    now = values_of(model) if sync else None
    if now is not None:
        assert {name: tensor.dtype for name, tensor in now.items()} == dtypes
        for name, value in now.items():
            assert torch.equal(value, first[0][name]), name
    return torch.equal(model.net.kinds.count, first[0]["net.kinds.count"]), dtypes


def test_sync_module_states():
    """Ranks that loaded or drew different values start from rank 0's, of every dtype; without it nothing is sent."""
    assert [equal for equal, _ in run_ranks(check_sync, 2, True)] == [True, True]
    assert [equal for equal, _ in run_ranks(check_sync, 2, False)] == [True, False]


def check_left_out() -> None:
    torch.manual_seed(dist.get_rank())
    model = Chain(
        net=Chain(tied=layer(), more=layer()), left=Chain(inner=nn.BatchNorm1d(6), tied=layer()), metric=FakeMetric()
    )
    model.left._fsdp_wrap = False
    nn.init.normal_(model.left.inner.weight)
    model.left.inner.running_mean.normal_()
    model.own = nn.Parameter(torch.randn(2))
    kept = {
        name: (tensor, tensor.detach().clone())
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if name.startswith(("left.inner", "metric", "own"))
    }
    assert len(kept) == 7
    prepare_fully_shard(model, None, {"sync_module_states": True}, device="cpu")
    now = dict([*model.named_parameters(), *model.named_buffers()])
    for name, (tensor, value) in kept.items():
        assert now[name] is tensor and torch.equal(tensor, value), f"{name} was touched"
    assert isinstance(model.net.more.weight, DTensor)


def test_what_is_left_out_is_not_sent():
    """Excluded children, metrics and the model's own parameters keep each rank's values, as under FSDP1."""
    run_ranks(check_left_out, 2)


def check_left_out_under_a_model_unit() -> None:
    torch.manual_seed(dist.get_rank())
    model = Chain(kept=Chain(tied=layer(), more=layer()), left=Chain(tied=layer(), alone=layer()))
    model.left._fsdp_wrap = False
    tie(model.kept.tied, model.left.tied)
    alone = model.left.alone.weight
    value = alone.detach().clone()
    prepare_fully_shard(model, None, {"sync_module_states": True}, device="cpu")
    assert model.left.alone.weight is alone and torch.equal(alone, value)
    assert model.left.tied.weight is model.kept.tied.weight and isinstance(model.left.tied.weight, DTensor)
    assert same_on_all_ranks(model.kept)


def test_what_is_left_out_stays_out_when_the_model_is_the_unit():
    """A tie with an excluded child draws in the shared weight and nothing else of that child."""
    run_ranks(check_left_out_under_a_model_unit, 2)


def check_plan_is_enough() -> None:
    torch.manual_seed(dist.get_rank())
    model = Model()
    apply_plan(model, plan_sharding(model, ShardingConfig(sync_module_states=True)))
    assert same_on_all_ranks(model)


def test_apply_plan_sends_as_well():
    """The plan says that values are sent; prepare_fully_shard is not needed for it."""
    run_ranks(check_plan_is_enough, 2)
