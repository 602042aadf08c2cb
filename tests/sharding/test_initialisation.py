"""Sources of initial values: drawn as in one process, broadcast from rank 0, or unchanged; one full unit at a time."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from support.cases import all_of, for_each
from support.comparing import assert_same, full, own_name
from support.examples import IS_THOROUGH
from support.memory import HostMemory
from support.models import Block, Chain, FakeMetric, Model, Running, layer, tie
from support.on_ranks import on_ranks
from support.ranks import run_ranks
from support.training import FULL
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2 import PlanError, ShardingConfig, plan_sharding, prepare_fully_shard

SEED = 100
ODD = 5  # rows; divisible by neither 2 nor 4


# --- models on the meta device


def decoder() -> nn.Module:
    return Model(num_blocks=3)


def tied_decoder() -> nn.Module:
    return Model(num_blocks=2, tied=True)


class Drawn(nn.Module):
    """Draws parameters and buffers with every kind of generator call, in a different order from their registration."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(ODD, 7))
        self.low = nn.Parameter(torch.empty(3, 2, dtype=torch.float32), requires_grad=False)
        self.register_buffer("table", torch.empty(4))
        self.register_buffer("mask", torch.empty(6, dtype=torch.bool), persistent=False)
        self.inner = nn.Linear(7, ODD)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x @ self.weight)

    def reset_parameters(self) -> None:
        self.table.copy_(torch.randperm(4))
        nn.init.trunc_normal_(self.low, std=0.5)
        nn.init.orthogonal_(self.weight)
        self.mask.copy_(torch.rand(6) > 0.5)


def nested() -> nn.Module:
    """Nested units, a layer in two places of a unit, and parameters of units above them."""
    shared = nn.Linear(ODD, ODD)
    inner = Chain(drawn=Drawn(), deep=Chain(block=Block(ODD), shared=shared, other=Chain(again=shared)))
    answers = {"inner": True, "inner.deep": True, "inner.deep.block": True, "last": True}
    return Chain(net=Chain(answers, first=nn.Linear(ODD, ODD), inner=inner, last=Drawn(), end=Drawn()))


class Hooked(Chain):
    """Its param_init_fn takes precedence over reset_parameters, and draws a different amount for each kind of
    module."""

    def param_init_fn(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            spread = 0.02 / len(name) if type(module).__name__ == "Linear" else 1.0
            nn.init.normal_(parameter, std=spread)
        for buffer in module.buffers(recurse=False):
            buffer.copy_(torch.randn(buffer.shape))


def hooked() -> nn.Module:
    net = Hooked({"a": True, "b": True}, a=Block(ODD), b=Block(ODD), tied=layer(ODD), norm=nn.LayerNorm(ODD))
    return Chain(net=net, plain=Chain(block=Block(ODD), head=nn.Linear(ODD, ODD)))


class ByName(Chain):
    """Like LLM Foundry's initialisation of Hugging Face's models, by class name: a unit whose class is already renamed
    would get other values."""

    def param_init_fn(self, module: nn.Module) -> None:
        kinds = [type(each).__name__ for each in (module, *self.children())]
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter, std=kinds.count("Linear"))


def by_name() -> nn.Module:
    """Units that share a weight form a group."""
    parts = {"first": layer(ODD), "norm": nn.LayerNorm(ODD), "last": layer(ODD), "end": nn.LayerNorm(ODD)}
    net = ByName(dict.fromkeys(("first", "norm", "last"), True), **parts)
    tie(net.first, net.last)
    return Chain(net=net)


def partly_real() -> nn.Module:
    """A loaded part keeps its values and draws no random numbers."""
    with torch.device("cpu"):
        real = nn.Linear(ODD, ODD)
        nn.init.constant_(real.weight, 3.0)
        nn.init.constant_(real.bias, 4.0)
    return Chain(net=Chain({"later": True}, real=real, later=Block(ODD), head=nn.Linear(ODD, ODD)))


class Turned(nn.Module):
    """Weights whose layout, dtype or shape a unit cannot shard directly."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.empty(7, ODD).t())
        self.low = nn.Parameter(torch.empty(ODD, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.empty(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.turned @ self.turned.t() + self.low) * self.scale

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter)


def turned() -> nn.Module:
    return Chain(net=Chain({"b": True}, a=Turned(), b=Turned(), norm=nn.LayerNorm(ODD)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    build.__name__: build for build in (decoder, tied_decoder, nested, hooked, by_name, partly_real, turned)
}


def build(model: str) -> nn.Module:
    with torch.device("meta"):
        return MODELS[model]()


# --- one process


def drawn_by_one_process(model_of: str) -> dict[str, torch.Tensor]:
    """The reference: FSDP1's lookup (composer/distributed/dist_strategy.py, _param_init_fn) on an unsharded model, in
    the order of the plan, breadth first within a unit."""
    model = build(model_of)
    plan = plan_sharding(model, ShardingConfig())
    children = dict(model.named_children())
    order = [path for unit in plan.units for path in breadth_first(model, plan, unit.modules)]
    torch.manual_seed(SEED)
    for path in order:
        module = model.get_submodule(path)
        if not any(tensor.is_meta for tensor in tensors_of(module)):
            continue
        make_empty(model, module)
        child = children.get(path.split(".")[0])
        if callable(getattr(child, "param_init_fn", None)):
            child.param_init_fn(module)
        else:
            module.reset_parameters()
    return values_of(model)


def breadth_first(model: nn.Module, plan: Any, paths: tuple[str, ...]) -> list[str]:
    heads = {model.get_submodule(path) for unit in plan.units for path in unit.modules}
    waiting, found = deque(paths), []
    seen = {model.get_submodule(path) for path in paths}
    while waiting:
        path = waiting.popleft()
        found.append(path)
        for name, child in model.get_submodule(path).named_children():
            if child not in seen and child not in heads:
                seen.add(child)
                waiting.append(f"{path}.{name}" if path else name)
    return found


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def make_empty(model: nn.Module, module: nn.Module) -> None:
    """Allocates memory for tensors without values, under all their names."""
    for tensor in tensors_of(module):
        if not tensor.is_meta:
            continue
        real: torch.Tensor = torch.empty_like(tensor, device="cpu")
        if isinstance(tensor, nn.Parameter):
            real = nn.Parameter(real, tensor.requires_grad)
        for owner in model.modules():
            for attribute, other in [*owner._parameters.items(), *owner._buffers.items()]:
                if other is tensor:
                    setattr(owner, attribute, real)


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Full parameters and all buffers, non-persistent ones included."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {own_name(name): full(tensor).clone() for name, tensor in tensors}


# --- any number of ranks


def check_values(model: str, config: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    """Each rank has its own seed."""
    built = build(model)
    trained = [parameter.requires_grad for parameter in built.parameters()]
    torch.manual_seed(SEED + dist.get_rank())
    before = torch.get_rng_state()
    prepare_fully_shard(built, None, FULL | config, device="cpu")
    assert torch.equal(torch.get_rng_state(), before), "the random state of the run was moved"
    drawn = values_of(built)
    assert not any(value.is_meta or value.isnan().any() for value in drawn.values())
    assert_same(drawn, expected)
    assert [parameter.requires_grad for parameter in built.parameters()] == trained


# By the number of ranks: the models, each with one of the configurations in turn.
CONFIGS: dict[int, tuple[tuple[str, ...], list[dict[str, Any]]]] = {
    1: (("nested", "hooked", "turned"), [{}]),
    2: (tuple(MODELS), [{}, {"sync_module_states": True, "sharding_strategy": "SHARD_GRAD_OP"}]),
    4: (("tied_decoder", "nested", "hooked"), [{"data_parallel_replicate_degree": 2}]),
}


@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=pytest.mark.any_torch) for n in (1, 4))])
def test_one_seed_means_one_model(world_size: int):
    """Runs on any number of GPUs start with the same bits, those that one process draws with FSDP1's lookup. This
    includes ties, shared modules, nested units, groups of units and hooks that read class names."""
    names, configs = CONFIGS[world_size]
    expected = {name: drawn_by_one_process(name) for name in names}
    chosen = [
        (name, each)
        for i, name in enumerate(names)
        for each in (configs if IS_THOROUGH else [configs[i % len(configs)]])
    ]
    if world_size == 2:
        chosen += [("hooked", {"activation_checkpointing": True}), ("tied_decoder", {"cpu_offload": True})]
    cases = {f"{name}, {config}": (name, config, expected[name]) for name, config in chosen}
    run_ranks(for_each, world_size, check_values, cases)


# --- memory


WIDTH = 64


def layers(turned: bool) -> nn.Module:
    """Six equal units of four layers and a smaller one above; ``turned`` weights are transposed in memory."""
    blocks = {f"block{i}": Chain(**{name: layer(WIDTH) for name in "abcd"}) for i in range(6)}
    model = nn.Sequential(Chain(dict.fromkeys(blocks, True), **blocks, end=layer(WIDTH)))
    for block in blocks.values():
        block._activation_checkpointing = True
    for each in model.modules() if turned else ():
        if isinstance(each, nn.Linear):
            each.weight = nn.Parameter(each.weight.detach().t().contiguous().t())
    return model


def peak(device: str, turned: bool, with_optimizer: bool, config: dict[str, Any]) -> tuple[int, int, int]:
    """The peak while sharding, this rank's shards, and the largest unit, in bytes."""
    with torch.device(device):
        model = layers(turned)
    optimizer = torch.optim.AdamW(model.parameters()) if with_optimizer else None
    unit_bytes = 4 * max(unit.numel for unit in plan_sharding(model, ShardingConfig()).units)
    with HostMemory() as live:
        prepare_fully_shard(model, optimizer, FULL | config, device="cpu")
    shards = [parameter.to_local().untyped_storage() for parameter in model.parameters()]
    return live.peak_bytes, sum(storage.nbytes() for storage in shards), unit_bytes


def check_one_unit_above_the_shards(
    device: str, turned: bool, with_optimizer: bool, config: dict[str, Any], slack_bytes: int
) -> None:
    peak_bytes, shard_bytes, unit_bytes = peak(device, turned, with_optimizer, config)
    values = f"peak {peak_bytes}, shards {shard_bytes}, unit {unit_bytes}"
    assert peak_bytes <= shard_bytes + unit_bytes + slack_bytes, values
    assert peak_bytes >= shard_bytes + unit_bytes // 3, f"nothing was measured: {values}"


def check_peaks(device: str, turned: bool) -> None:
    # Random states sent between ranks, 5 KiB each; gloo frees its last send a little later.
    slack_bytes = 16384
    cases = {
        "default": (device, turned, False, {}, slack_bytes),
        "sent": (device, turned, True, {"sync_module_states": True}, slack_bytes + 4 * WIDTH * WIDTH),
        "recomputed": (device, turned, True, {"activation_checkpointing": True}, slack_bytes),
    }
    for_each(check_one_unit_above_the_shards, cases)


def test_a_meta_model_is_whole_one_unit_at_a_time():
    """A model that fits on no single GPU can be initialised on many: at its peak a rank has its shards and one full
    unit, with and without an optimizer."""
    run_ranks(check_peaks, 4, "meta", False)


@pytest.mark.any_torch
def test_a_model_with_values_moves_unit_by_unit():
    """Copies made for the device, or because of the layout (visible on CPU), are freed with their unit. Otherwise each
    GPU would hold a model read on the host in full, beside its shards."""
    run_ranks(check_peaks, 4, "cpu", True)


# --- other random generators


class DrawnElsewhere(nn.Module):
    """Initialised with the generators of Python and NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight

    def reset_parameters(self) -> None:
        rows = [[random.random(), numpy.random.standard_normal()] for _ in range(len(self.weight))]
        with torch.no_grad():
            self.weight.copy_(torch.tensor(rows))


@on_ranks(2)
def test_generators_of_python_and_numpy(folder: str) -> None:
    """Ranks with different seeds would each fill their rows from another model."""
    random.seed(dist.get_rank())
    numpy.random.seed(dist.get_rank())
    states = (random.getstate(), numpy.random.get_state()[1].tolist())
    with torch.device("meta"):
        model = Chain(net=DrawnElsewhere())
    prepare_fully_shard(model, None, {}, device="cpu")
    assert states == (random.getstate(), numpy.random.get_state()[1].tolist()), "the run's own draws are others"
    python, of_numpy = random.Random(0), numpy.random.RandomState(0)
    expected = torch.tensor([[python.random(), of_numpy.standard_normal()] for _ in range(8)])
    assert torch.equal(full(model.net.weight), expected)


# --- parameters without values


def uninitialisable() -> nn.Module:
    """A module with a parameter and no method to initialise it."""
    bare = Running(lambda self, x: x, weight=nn.Parameter(torch.empty(2, 2, device="meta")))
    return Chain(fine=layer(), net=Chain(inner=bare))


def left_out_on_meta() -> nn.Module:
    model = Chain(fine=layer(), left=Chain(inner=nn.Linear(2, 2, device="meta")))
    model.left._fsdp_wrap = False
    return model


def mixed(*on_meta: int) -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return Model(tied=True, device="meta" if dist.get_rank() in on_meta else None)


def unlike_buffers() -> nn.Module:
    """A cache whose length depends on what this rank processed before."""
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_buffer("cache", torch.zeros(dist.get_rank() + 1), persistent=False)
    return model


SENT = {"sync_module_states": True}
REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "uninitialisable": (
        uninitialisable,
        {},
        r"'net\.inner' \(Running\)(?s:.*)reset_parameters\(\)(?s:.*)param_init_fn\(module\)",
    ),
    "left out": (left_out_on_meta, {}, r"left\.inner\.weight is on the meta device.*no unit holds it"),
    "rank 1 on meta": (
        functools.partial(mixed, 1),
        {},
        r"Detected mixed initialization.*ranks \[1\].*sync_module_states",
    ),
    "rank 0 on meta": (functools.partial(mixed, 0), {}, r"Detected mixed initialization.*ranks \[0\]"),
    "rank 0 to send": (functools.partial(mixed, 0), SENT, "rank 0's model is on the meta device"),
    "buffers to send": (unlike_buffers, SENT, r"buffer 0.cache is \(1,\)[^\n]*\n.*buffer 0.cache is \(2,\)"),
}


def check_refused(build: Callable[[], nn.Module], config: dict[str, Any], message: str) -> None:
    model = build()
    before = [(type(module), len(module._forward_pre_hooks)) for module in model.modules()]
    parameters = list(model.parameters())
    with pytest.raises(PlanError, match=message):
        prepare_fully_shard(model, None, config, device="cpu")
    assert [(type(module), len(module._forward_pre_hooks)) for module in model.modules()] == before
    assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))


@on_ranks(2)
def test_what_would_never_get_a_value(folder: str) -> None:
    """A module without initialisation is named on every rank before anything changes. Where only some ranks have
    values, the error is FSDP1's. No rank trains on uninitialised memory or waits for a broadcast of another shape."""
    for_each(check_refused, REFUSED)


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


def check_sync(sync: bool) -> None:
    torch.manual_seed(dist.get_rank())
    model = Chain(net=Chain({"kinds": True}, kinds=Kinds(), rest=layer(), tied=layer()))
    tie(model.net.rest, model.net.tied)
    own = values_of(model)
    first: list[Any] = [own]
    dist.broadcast_object_list(first)
    prepare_fully_shard(model, None, FULL | {"sync_module_states": sync}, device="cpu")
    if sync:
        assert_same(values_of(model), first[0])
    else:
        assert torch.equal(model.net.kinds.count, own["net.kinds.count"])


def check_mixed() -> None:
    """A checkpoint loaded on rank 0 only reaches every rank, non-persistent buffers included."""
    model = mixed(1)
    expected: list[Any] = [values_of(model) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(expected)
    prepare_fully_shard(model, None, SENT, device="cpu")
    assert_same(values_of(model), expected[0])
    assert model.decoder.embed.weight is model.decoder.head.weight


def check_left_out() -> None:
    """Excluded children, metrics and the model's own parameters keep their values on each rank, as under FSDP1."""
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
    prepare_fully_shard(model, None, SENT, device="cpu")
    now = dict([*model.named_parameters(), *model.named_buffers()])
    for name, (tensor, value) in kept.items():
        assert now[name] is tensor and torch.equal(tensor, value), f"{name} was touched"
    assert isinstance(model.net.more.weight, DTensor)


@on_ranks(2)
def test_sync_module_states(folder: str) -> None:
    """Ranks with different values start from rank 0's, for every dtype; without the option nothing is sent."""
    for_each(check_sync, {"sent": (True,), "each its own": (False,)})
    all_of(check_mixed, check_left_out)
