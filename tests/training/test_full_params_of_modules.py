"""Parameters that stay whole on every rank: scalars and single dtypes (averaged), ignored modules (left alone)."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.comparing import full
from support.models import Block, Chain, features, layer
from support.ranks import run_ranks
from support.training import FULL, adamw, assert_close, sgd, train_alike
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2 import PlanError, clip_grad_norm_, prepare_fully_shard


class Scaled(nn.Module):
    """A block with a scalar, as a learned temperature is one."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) / self.temperature

    def reset_parameters(self) -> None:
        nn.init.constant_(self.temperature, 1.5)
        nn.init.normal_(self.unused)


class OnlyScalars(nn.Module):
    """A unit that has nothing to shard."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


def scalars() -> nn.Module:
    torch.manual_seed(0)
    hooks = {"first": True, "gain": True}
    return Chain(net=Chain(hooks, first=Scaled(), gain=OnlyScalars(), last=Scaled()), head=Scaled())


def tied_scalars() -> nn.Module:
    model = scalars()
    model.net.last.temperature = model.net.first.temperature
    return model


MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "sharded": (2, {}),
    "kept": (2, {"sharding_strategy": "SHARD_GRAD_OP"}),
    "whole": (2, {"sharding_strategy": "NO_SHARD"}),
    "replicas": (4, {"data_parallel_replicate_degree": 2}),
    "one rank": (1, {}),
    "recomputed": (2, {"activation_checkpointing": True, "activation_checkpointing_reentrant": False}),
    "reentrant": (2, {"activation_checkpointing": True}),
}


def check_scalars(config: dict[str, Any]) -> int:
    model = train_alike(scalars, config, features, optimizer=adamw)
    train_alike(tied_scalars, config, features, optimizer=sgd)
    return sum(not isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.parametrize("name", MESHES)
def test_scalars_are_averaged(name: str):
    """A learned temperature trains as on one GPU; torch refuses it, and without an average each rank would have its
    own."""
    world_size, config = MESHES[name]
    assert set(run_ranks(check_scalars, world_size, config)) == {7}


def check_microbatches() -> None:
    """Three backwards before a step, the first two without communication in a second model."""
    torch.set_default_dtype(torch.float64)
    rank = dist.get_rank()
    reference, world_size = scalars(), dist.get_world_size()
    each, last = copy.deepcopy(reference), copy.deepcopy(reference)
    for model in (each, last):
        prepare_fully_shard(model, None, FULL, device="cpu")
    for step in range(3):
        for model in (each, last):
            if model is last:
                for child in (last.net, last.head):
                    child.set_requires_gradient_sync(step == 2)
            model(features(3 * rank + step)).square().mean().backward()
        for peer in range(world_size):
            (reference(features(3 * peer + step)).square().mean() / world_size).backward()
    for path, parameter in reference.named_parameters():
        for model in (each, last):
            ours = model.get_parameter(path).grad
            assert (ours is None) == (parameter.grad is None), path
            if ours is not None:
                assert_close(path, full(ours), parameter.grad, rtol=1e-12, atol=1e-14)


def test_scalars_with_microbatches():
    """Gradients add up over microbatches, whether ranks communicate after each or after the last."""
    run_ranks(check_microbatches, 2)


class Either(nn.Module):
    """Ranks whose batches read different scalars, as experts are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()
        self.low, self.high, self.never = (nn.Parameter(torch.tensor(float(i))) for i in range(1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * (self.low if dist.get_rank() == 0 else self.high)


def check_branches() -> list[float | None]:
    model = Chain(net=Either())
    prepare_fully_shard(model, None, FULL, device="cpu")
    model(torch.ones(2, 6)).sum().backward()
    return [None if p.grad is None else p.grad.item() for p in (model.net.low, model.net.high, model.net.never)]


def test_scalars_that_some_ranks_do_not_read():
    """A rank without a gradient counts as zero, and one that nobody has stays missing; no rank waits for another."""
    first, second = run_ranks(check_branches, 2)
    assert first == second
    assert first[0] and first[1] and first[2] is None


def check_scalars_from_meta() -> tuple[float, float]:
    with torch.device("meta"):
        model = Chain(net=Scaled())
        for module in (model.net.block.fc_in, model.net.block.fc_out):
            assert module.weight.is_meta
    torch.manual_seed(dist.get_rank())
    prepare_fully_shard(model, None, FULL, device="cpu")
    model(features(0)).sum().backward()
    return model.net.temperature.item(), model.net.unused.item()


def test_scalars_from_the_meta_device():
    """A scalar of a meta model gets its value, the same on every rank."""
    first, second = run_ranks(check_scalars_from_meta, 2)
    assert first == second and first[0] == 1.5


# --- dtypes


class Adapted(nn.Module):
    """A frozen layer in bf16 with an adapter in fp32, as LoRA has it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).to(torch.bfloat16).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(6, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 6, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.lora_B["default"](self.lora_A["default"](x.float()))
        return self.base(x.bfloat16()).float() + low


def adapted() -> nn.Module:
    torch.manual_seed(0)
    return Chain(net=Chain({"a": True}, a=Adapted(), b=Adapted()))


def check_adapters(config: dict[str, Any]) -> list[torch.dtype]:
    options: dict[str, Any] = {"dtype": torch.float32, "rtol": 1e-5, "atol": 1e-6, "optimizer": adamw}
    model = train_alike(adapted, config, features, **options)
    return sorted({parameter.dtype for parameter in model.parameters() if isinstance(parameter, DTensor)}, key=str)


@pytest.mark.parametrize("name", ["sharded", "kept", "replicas", "recomputed"])
def test_adapters_in_another_dtype(name: str):
    """LoRA in fp32 on a base in bf16 trains as it stands, where FSDP1 and torch refuse two dtypes in one unit."""
    world_size, config = MESHES[name]
    assert run_ranks(check_adapters, world_size, config) == [[torch.bfloat16, torch.float32]] * world_size


def check_adapters_computing_low() -> torch.dtype:
    """Computed in bf16 throughout: what comes into an adapter is cast to it."""
    model = adapted()
    seen = []
    model.net.b.lora_A["default"].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    low = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
    prepare_fully_shard(model, None, {"mixed_precision": low}, device="cpu")
    model(features(dist.get_rank())).sum().backward()
    assert model.net.b.lora_A["default"].weight.grad.dtype == torch.float32
    return seen[0]


def test_adapters_computing_in_low_precision():
    """A layer that upcasts its input for the adapter does not meet a weight in another dtype."""
    assert run_ranks(check_adapters_computing_low, 2) == [torch.bfloat16] * 2


# --- ignored modules


def partly_ignored() -> nn.Module:
    torch.manual_seed(0)
    return Chain(net=Chain({"inner": True}, kept=Block(), inner=layer(), rest=layer()))


def check_ignored(microbatches: int) -> tuple[float, bool]:
    torch.set_default_dtype(torch.float64)
    model = partly_ignored()
    reference = copy.deepcopy(model)
    kept = {name: (tensor, tensor.data_ptr()) for name, tensor in model.net.kept.state_dict(keep_vars=True).items()}
    optimizer = adamw(model)
    config = {"ignored_modules": [model.net.kept], "sync_module_states": True, "mixed_precision": {}}
    if dist.get_rank() == 1:
        model.net.kept.scale.data.fill_(0.75)  # its own, and not rank 0's
        reference.net.kept.scale.data.fill_(0.75)
    prepare_fully_shard(model, optimizer, config, device="cpu")
    for name, (tensor, address) in kept.items():
        now = model.net.kept.state_dict(keep_vars=True)[name]
        assert now is tensor and now.data_ptr() == address, f"{name} was touched"
    for microbatch in range(microbatches):
        model(features(10 * microbatch + dist.get_rank())).square().mean().backward()
    # What each rank would have had alone.
    for microbatch in range(microbatches):
        reference(features(10 * microbatch + dist.get_rank())).square().mean().backward()
    for name, parameter in reference.named_parameters():
        expected = parameter.grad.clone()
        if "kept" not in name:
            dist.all_reduce(expected)
            expected /= dist.get_world_size()
        assert_close(name, full(model.get_parameter(name).grad), expected, rtol=1e-12, atol=1e-14)
    squares = torch.zeros(2)  # of what is sharded, and of what is not
    for name, parameter in model.named_parameters():
        squares[int("kept" in name)] += full(parameter.grad).square().sum()
    dist.all_reduce(squares)
    expected_norm = math.sqrt(squares.sum().item() / dist.get_world_size())
    (norm,) = clip_grad_norm_(model, 0.01).values()
    assert math.isclose(norm.item(), expected_norm, rel_tol=1e-12)
    before = model.net.kept.fc_in.weight.detach().clone()
    optimizer.step()
    return norm.item(), bool((model.net.kept.fc_in.weight != before).all())


@pytest.mark.parametrize("microbatches", [1, 3])
def test_ignored_modules(microbatches: int):
    """They keep their tensors and their own gradients; clipping and the optimizer take them along, and all ranks scale
    alike."""
    (first, is_trained), second = run_ranks(check_ignored, 2, microbatches)
    assert (first, is_trained) == second and is_trained


def check_ignored_on_meta() -> str:
    model = partly_ignored()
    model.net.kept = Block(device="meta")
    try:
        prepare_fully_shard(model, None, {"ignored_modules": [model.net.kept]}, device="cpu")
    except PlanError as error:
        return str(error)
    return ""


def test_ignored_modules_without_values():
    """A module that nobody will fill is named before anything is sharded."""
    for message in run_ranks(check_ignored_on_meta, 2):
        assert "net.kept" in message and "is on the meta device, and no unit holds it" in message


# --- parameters without elements


class Hollow(nn.Module):
    """A layer whose adapter has rank zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()
        self.down = nn.Parameter(torch.randn(6, 0))
        self.up = nn.Parameter(torch.randn(0, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + x @ self.down @ self.up


def check_hollow() -> list[str]:
    model = train_alike(lambda: Chain(net=Hollow()), {}, features)
    return [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]


def test_parameters_without_elements():
    """An adapter of rank zero trains along; torch fails in the first backward."""
    assert run_ranks(check_hollow, 2) == [["net.down", "net.up"]] * 2
