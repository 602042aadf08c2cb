"""Parameters that stay whole on every rank: ignored modules and parameters without elements; and adapters in bf16.

Scalars and adapters of another dtype train in tests/sharding/test_model_shapes.py."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from support.comparing import full
from support.models import Block, Chain, features, layer
from support.ranks import run_ranks
from support.training import adamw, assert_close, train_alike
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2 import PlanError, clip_grad_norm_, prepare_fully_shard

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
