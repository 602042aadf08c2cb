"""A sharded model trains like the unsharded one: outputs, gradients and parameters to the last digits of float64."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cases import all_of, for_each
from support.comparing import full
from support.examples import IS_THOROUGH
from support.models import WIDTH, Block, Chain, Model, Running, features, layer, tokens
from support.on_ranks import on_ranks
from support.ranks import run_ranks
from support.training import FULL, HSDP_2X2, assert_close, named_parameters, train_alike
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, OffloadWrapper
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from composer_fsdp2 import (
    ActivationCheckpointing,
    ConfigError,
    MeshSpec,
    PlanError,
    ShardingConfig,
    ShardingPlan,
    apply_plan,
    plan_sharding,
    prepare_fully_shard,
    reshard,
)
from composer_fsdp2._torch.groups import groups_of, state_of

# --- every setting

AC = {"activation_checkpointing": True}
ZERO_2, NO_SHARD = {"sharding_strategy": "SHARD_GRAD_OP"}, {"sharding_strategy": "NO_SHARD"}
OFFLOADED, NOT_REENTRANT = {"activation_cpu_offload": True}, AC | {"activation_checkpointing_reentrant": False}
HYBRID = {"sharding_strategy": "HYBRID_SHARD"}
# By the number of ranks; test_apply_properties.py draws more combinations.
SETTINGS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one rank": {}},
    2: {
        "default": {},
        "SHARD_GRAD_OP": ZERO_2 | {"forward_prefetch": True},
        "NO_SHARD": NO_SHARD,
        "2 replicas of one rank": HYBRID | {"data_parallel_replicate_degree": 2},
        "reshard to 1": {"reshard_after_forward": 1},
        "reshard to all": {"reshard_after_forward": 2, "backward_prefetch_limit": 2},
        "cpu_offload, reentrant": AC | {"cpu_offload": True},
        "backward_prefetch NONE": {"backward_prefetch": "NONE", "sync_module_states": True},
        "all prefetch, not reentrant": NOT_REENTRANT
        | {"forward_prefetch": True, "forward_prefetch_limit": 3, "backward_prefetch_limit": 3},
        "activations offloaded": OFFLOADED,
        "not reentrant, offloaded": NOT_REENTRANT | OFFLOADED,
    },
    4: {
        "reshard to 2": {"reshard_after_forward": 2},
        "HYBRID_SHARD 2 x 2": HSDP_2X2,
        "_HYBRID_SHARD_ZERO2 2 x 2": HSDP_2X2 | {"sharding_strategy": "_HYBRID_SHARD_ZERO2"},
    },
}


def check_setting(config: dict[str, Any], tied: bool) -> None:
    torch.manual_seed(0)
    train_alike(lambda: Model(num_blocks=3, tied=tied), config, tokens)


def check_settings(world_size: int) -> None:
    """Tied and untied alternately."""
    settings = enumerate(SETTINGS[world_size].items())
    both = (False, True) if IS_THOROUGH else (False,)
    for_each(check_setting, {f"{k}, {i}": (v, (n + i) % 2 == 1) for n, (k, v) in settings for i in both})


@pytest.mark.parametrize("world_size", SETTINGS)
def test_trains_as_unsharded(world_size: int):
    """No setting changes the trained parameters."""
    run_ranks(check_settings, world_size, world_size)


# --- effects of the settings


def prefetched(config: dict[str, Any]) -> dict[str, dict[str, list[str]]]:
    """The units that torch prefetches from each unit."""
    model, seen = Model(), {"forward": {}, "backward": {}}

    def path_of(module: nn.Module) -> str:
        return next(path for path, found in model.named_modules() if found is module)

    def noting(told: dict[str, list[str]]) -> Any:
        return lambda self, modules: told.update({path_of(self): list(map(path_of, modules))})

    noted = {f"set_modules_to_{direction}_prefetch": noting(told) for direction, told in seen.items()}
    with mock.patch.multiple(FSDPModule, **noted):
        prepare_fully_shard(model, None, config, device="cpu")
    return seen


def test_prefetch_reaches_torch():
    """The limits set explicit prefetching on the right units; without them FSDP2 uses its implicit order."""
    assert run_ranks(prefetched, 1, {}) == [{"forward": {}, "backward": {}}]
    config = {"forward_prefetch": True, "forward_prefetch_limit": 2, "backward_prefetch": "NONE"}
    blocks = ["decoder.blocks.0", "decoder.blocks.1"]
    expected = {"decoder": blocks, blocks[0]: blocks[1:]}, {path: [path] for path in [*blocks, "decoder"]}
    assert run_ranks(prefetched, 1, config) == [dict(zip(("forward", "backward"), expected, strict=True))]


def check_only_blocks() -> None:
    """torch never reshards a root: if each block were one, FULL_SHARD would keep the whole model unsharded after
    forward."""
    model = train_alike(lambda: Chain(net=Chain({"a": True, "b": True}, a=Block(), b=Block())), {}, features)
    model(features(0))
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def check_reshard() -> None:
    """After an evaluation a root stays unsharded, but checkpoints and optimizers see its shards. reshard frees the
    memory, and training continues."""
    model = Model()
    prepare_fully_shard(model, None, ZERO_2, device="cpu")
    with torch.no_grad():
        model(tokens(0))
    [group] = groups_of(state_of(model.decoder))
    assert group.is_unsharded and all(isinstance(parameter, DTensor) for parameter in model.parameters())
    reshard(model)
    assert not group.is_unsharded and all(isinstance(parameter, DTensor) for parameter in model.parameters())
    model(tokens(0)).sum().backward()


@on_ranks(2)
def test_what_is_freed_when(folder: str) -> None:
    """With roots without parameters, and after an evaluation."""
    all_of(check_only_blocks, check_reshard)


# --- unchanged behaviour


def check_nesting(config: dict[str, Any], expected: list[str]) -> None:
    model = Model()
    prepare_fully_shard(model, None, config, device="cpu")
    module, seen = model.decoder.blocks[0], []
    while not seen or not isinstance(module, Block):
        module = module._checkpoint_wrapped_module if seen else module
        kinds = [kind for kind in (CheckpointWrapper, OffloadWrapper, Block) if isinstance(module, kind)]
        seen.append(("FSDP " if isinstance(module, FSDPModule) else "") + kinds[0].__name__)
    assert seen == expected


@on_ranks(1)
def test_the_unit_surrounds_the_checkpointing(folder: str) -> None:
    """FSDP(AC(block)), FSDP1's nesting: the other way round recomputes in the wrong dtype (pytorch#159359)."""
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({}, ["FSDP Block"]),
        (AC, ["FSDP CheckpointWrapper", "Block"]),
        (OFFLOADED, ["FSDP OffloadWrapper", "Block"]),
        (AC | OFFLOADED, ["FSDP OffloadWrapper", "CheckpointWrapper", "Block"]),
    ]
    for_each(check_nesting, {f"{config}": (config, nesting) for config, nesting in cases})


# --- unusual parameters


class Awkward(nn.Module):
    """Transposed and strided weights, a weight with a single row, one with one element, and an adapter of rank zero."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(6, 4).t())  # 4 x 6, with its transpose's strides
        self.strided = nn.Parameter(torch.randn(4, 12)[:, ::2])
        self.row = nn.Parameter(torch.randn(1, 6))
        self.gain = nn.Parameter(torch.randn(1))
        self.down, self.up = nn.Parameter(torch.randn(6, 0)), nn.Parameter(torch.randn(0, 6))
        self.conv = nn.Conv2d(1, 3, 2).to(memory_format=torch.channels_last)
        assert not self.turned.is_contiguous() and not self.strided.is_contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.turned.t() @ self.strided + self.row * self.gain + x @ self.down @ self.up
        return y.sum(-1) + self.conv(y[:, None, None].expand(-1, 1, 2, -1)).mean((1, 2, 3))


def check_awkward() -> None:
    configs = ({"sync_module_states": True}, ZERO_2) if dist.get_world_size() == 2 else ({},)
    cases = {f"{config}": (lambda: Chain(net=Awkward()), config, features) for config in configs}
    for_each(train_alike, cases)


@pytest.mark.parametrize("world_size", [2, 4])
def test_awkward_layouts_and_sizes(world_size: int):
    """Transposed weights, channels_last convolutions, parameters with fewer rows than ranks and empty parameters need
    no change of the model. fully_shard alone refuses the first two, and fails in backward for the last."""
    run_ranks(check_awkward, world_size)


def experts() -> nn.Module:
    """Ranks 0 and 1 use different parameters of one unit; ``idle`` is an unused parameter, ``spare`` an unused unit."""
    both, idle = nn.ModuleList([layer(), layer()]), nn.Parameter(torch.ones(3))
    run = lambda net, x: net.experts[dist.get_rank()](x)  # noqa: E731
    return nn.Sequential(Running(run, {"spare": True}, experts=both, idle=idle, spare=Block()))


def check_experts(config: dict[str, Any]) -> None:
    torch.set_default_dtype(torch.float64)
    model, inputs = experts(), [features(0), features(1)]
    prepare_fully_shard(model, None, FULL | config, device="cpu")
    for _ in range(2):  # two microbatches
        model(inputs[dist.get_rank()]).sum().backward()
    grads = {name: None if p.grad is None else full(p.grad) for name, p in named_parameters(model).items()}
    for rank, x in enumerate(inputs):
        # d sum(x W^T) / dW has the sum of x over the batch in each row; the other rank's gradient is zero in the mean.
        expected = x.sum(0).expand(WIDTH, WIDTH) * 2 / 2
        assert_close(f"expert {rank}", grads[f"0.experts.{rank}.weight"], expected, rtol=1e-12, atol=1e-14)
    assert torch.equal(grads["0.idle"], torch.zeros(3)), grads["0.idle"]
    assert all(grad is None for name, grad in grads.items() if name.startswith("0.spare."))


@on_ranks(2)
def test_ranks_that_read_different_parameters(folder: str) -> None:
    """The gradient of one expert would silently be added to another's. FSDP1 gave unused parameters a zero gradient,
    and those of an unused unit none."""
    for_each(check_experts, {f"{config}": (config,) for config in ({}, ZERO_2, NO_SHARD)})


# --- errors before any change


def without_parts() -> Iterator[tuple[nn.Module, ShardingPlan]]:
    """Models without a module that has no sharded parameters: checkpointed, caching, ignored and excluded ones."""
    model = Chain(net=Chain(act=nn.ReLU(), config=nn.Module(), a=layer(), b=layer()), left=layer())
    model.net.act._activation_checkpointing, model.left._fsdp_wrap = True, False
    config = ShardingConfig(
        activation_checkpointing=ActivationCheckpointing(checkpoint=True), ignored_modules=("net.b",), freeze=("net.a",)
    )
    for path in ("net.act", "net.b", "left"):
        changed = copy.deepcopy(model)
        plan = plan_sharding(changed, config)
        parent, _, name = path.rpartition(".")
        delattr(changed.get_submodule(parent), name)
        yield changed, plan
    yield model, replace(plan_sharding(model, config), caching=("net.trunk",))


def check_another_models_plan() -> None:
    """The error names the first difference, and the model is unchanged."""
    small, planned = Model(num_blocks=1), Model(num_blocks=2)
    plan = plan_sharding(planned, ShardingConfig())
    others = [small, Model(num_blocks=3), Model(num_blocks=2, tied=True), Model(num_blocks=2).half()]
    pairs = [*((model, plan) for model in others), *without_parts()]
    parts = ["no module 'decoder.blocks.1'", "decoder.blocks.2", "decoder.embed.weight", "float16"]
    parts += ["no module 'net.act'", "no module 'net.b'", "no parameter left.weight", "no module 'net.trunk'"]
    for (model, plan), part in zip(pairs, parts, strict=True):
        types = [type(module) for module in model.modules()]
        parameters = list(model.parameters())
        with pytest.raises(PlanError, match="made for another model") as error:
            apply_plan(model, plan)
        assert part in str(error.value), error.value
        assert all(parameter.requires_grad for parameter in parameters)
        assert [type(module) for module in model.modules()] == types
        assert all(now is before for now, before in zip(model.parameters(), parameters, strict=True))


def check_applied_twice() -> None:
    """A sharded model is refused, also with the plan of its unsharded twin."""
    model, other = Model(), Model()
    apply_plan(model, plan_sharding(model, ShardingConfig()))
    with pytest.raises(PlanError, match="sharded already, by FSDP2"):
        apply_plan(model, plan_sharding(other, ShardingConfig()))


def check_wrong_world() -> None:
    model = Model()
    plan = plan_sharding(model, ShardingConfig(mesh=MeshSpec.of_degrees(shard=3)))
    with pytest.raises(ConfigError, match="makes 3 ranks, but the world size is 2"):
        apply_plan(model, plan)
    assert not any(isinstance(module, FSDPModule) for module in model.modules())


@on_ranks(2)
def test_plan_of_another_model(folder: str) -> None:
    """A plan made before the model, or the number of ranks, changed is refused."""
    all_of(check_another_models_plan, check_applied_twice, check_wrong_world)


def test_apply_needs_a_process_group():
    """A script started without ranks gets an error that shows how to start them."""
    model = Model()
    with pytest.raises(ConfigError, match=r"apply_plan needs a process group.*composer -n N.*torchrun"):
        apply_plan(model, plan_sharding(model, ShardingConfig()))
