"""Dtypes inside a sharded model equal FSDP1's (torch, MixedPrecision), observed by hooks rather than settings."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.comparing import full
from support.models import Block, Chain, Model, Running, Wrapping, features, tokens
from support.on_ranks import on_ranks
from support.ranks import run_ranks
from support.training import assert_close
from torch import nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from composer_fsdp2 import prepare_fully_shard

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


class Net(Wrapping):
    """Layers, a chosen block with a mask, a batch norm, and buffers of several kinds."""

    def __init__(self) -> None:
        super().__init__({"masked": True})
        self.first = nn.Linear(6, 6)
        # A chosen block with a float mask as second input.
        self.masked = Running(lambda self, x, mask: x + self.proj(x) * mask.to(x.dtype), proj=nn.Linear(6, 6))
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("scale", torch.full((1,), 1 / 3))
        self.register_buffer("hidden", torch.full((1,), 1 / 3), persistent=False)
        self.register_buffer("count", torch.tensor([1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[0], 1)
        x = self.first(x)
        x = self.norm(self.masked(x * self.scale.to(x.dtype), mask))
        return x + self.hidden.to(x.dtype)


def watch(model: nn.Module) -> dict[str, list[Any]]:
    """Per module: dtypes of the inputs, parameters and output in its forward, recorded when it runs."""
    seen: dict[str, list[Any]] = {}

    def hook(path: str, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        parameters = sorted({str(parameter.dtype) for parameter in module.parameters(recurse=False)})
        seen[path] = [[arg.dtype for arg in args], parameters, output.dtype]

    for path, module in model.named_modules():
        # Prepended: they record a unit's output before fully_shard's own hooks cast it.
        module.register_forward_hook(lambda m, a, o, path=path: hook(path, m, a, o), prepend=True)
    return seen


def check_dtypes(config: dict[str, Any], precision: str) -> dict[str, Any]:
    model = Chain(net=Net())
    prepare_fully_shard(model, None, config, precision=precision, device="cpu")
    seen: dict[str, Any] = watch(model)
    output = model(features(dist.get_rank(), batch_size=8))
    output.float().square().mean().backward()
    net = model.net
    return {
        **seen,
        "output": output.dtype,
        "gradients": {parameter.grad.dtype for parameter in model.parameters()},
        "parameters": {parameter.dtype for parameter in model.parameters()},
        "buffers": [net.scale.dtype, net.hidden.dtype, net.count.dtype, net.norm.running_mean.dtype],
        "state_dict": {key: value.dtype for key, value in model.state_dict().items() if "norm" not in key},
    }


def check_low(seen: dict[str, Any], low: torch.dtype) -> None:
    """A block's mask is not cast (only roots cast inputs); gradients, parameters and checkpoints are fp32."""
    assert seen["net.first"] == [[low], [str(low)], low], seen
    assert seen["net.masked"][0] == [low, F32], "the mask was cast"
    assert seen["net.masked.proj"] == [[low], [str(low)], low], seen
    assert seen["net.norm"][:2] == [[F32], ["torch.float32"]], seen
    assert seen["output"] == low, seen
    assert seen["gradients"] == seen["parameters"] == {F32}, seen
    assert seen["buffers"] == [low, low, torch.int64, F32], seen
    assert set(seen["state_dict"].values()) == {F32, torch.int64}, seen
    assert "net.scale" in seen["state_dict"] and "net.hidden" not in seen["state_dict"], seen


@on_ranks(2)
def test_dtypes_inside(folder: str) -> None:
    """As under FSDP1, with presets, dicts and torch's objects: layers compute in the low dtype, batch norms in fp32."""
    for mixed_precision in ("DEFAULT", "PURE"):
        for precision, low in (("amp_bf16", BF16), ("amp_fp16", F16), ("amp_fp8", BF16)):
            check_low(check_dtypes({"mixed_precision": mixed_precision}, precision), low)
    for precision in ("amp_bf16", "fp32"):  # FULL trains in the model's own dtype, whatever the precision
        seen = check_dtypes({"mixed_precision": "FULL"}, precision)
        assert seen["net.first"] == [[F32], ["torch.float32"], F32], seen
        assert seen["net.norm"][0] == [F32] and seen["buffers"] == [F32, F32, torch.int64, F32], seen
    # param_dtype alone does not cast buffers, nor buffer_dtype alone parameters.
    seen = check_dtypes({"mixed_precision": {"param_dtype": "bf16"}}, "fp32")
    assert seen["net.masked.proj"][1] == ["torch.bfloat16"] and seen["buffers"][:2] == [F32, F32], seen
    seen = check_dtypes({"mixed_precision": {"buffer_dtype": "bf16"}}, "fp32")
    assert seen["net.first"][1] == ["torch.float32"] and seen["buffers"][:2] == [BF16, BF16], seen
    # FSDP1's object without a root cast does not cast inputs; FSDP2's policy casts at each unit.
    plain = MixedPrecision(param_dtype=BF16, cast_root_forward_inputs=False)
    assert check_inputs({"mixed_precision": plain}) == {"net": [F32], "net.masked": [BF16, F32]}
    policy = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=F32)
    assert check_inputs({"mp_policy": policy}) == {"net": [BF16], "net.masked": [BF16, BF16]}
    # Inputs are bf16 even if the first child has no parameters, as FSDP1's root cast them.
    assert check_root_without_parameters() == BF16
    for affine in (True, False):
        check_batch_norm(affine)


class Caster(Net):
    """Casts its input itself, so it runs whether the root casts or not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.masked(x.to(BF16), torch.ones(x.shape[0], 1))


def check_inputs(config: dict[str, Any]) -> dict[str, Any]:
    model = Chain(net=Caster())
    prepare_fully_shard(model, None, config, precision="fp32", device="cpu")
    seen = watch(model)
    model(features(0))
    return {path: seen[path][0] for path in ("net", "net.masked")}


def check_gradients(mixed_precision: str) -> None:
    """By hand: each rank's gradients in bf16, then their mean in the reduction's dtype."""
    model = Model()
    reference = copy.deepcopy(model)
    prepare_fully_shard(model, None, {"mixed_precision": mixed_precision}, precision="amp_bf16", device="cpu")
    model(tokens(dist.get_rank())).float().square().mean().backward()

    gradients: dict[str, list[torch.Tensor]] = {}
    for rank in range(dist.get_world_size()):
        low = copy.deepcopy(reference).to(BF16)
        low(tokens(rank)).float().square().mean().backward()
        for name, parameter in low.named_parameters():
            gradients.setdefault(name, []).append(parameter.grad)
    for name, parameter in model.named_parameters():
        ours, each = full(parameter.grad), gradients[name]
        if mixed_precision == "DEFAULT":  # bf16 gradients, averaged in fp32
            expected = torch.stack([grad.float() for grad in each]).mean(0)
            assert_close(name, ours, expected, rtol=1e-6, atol=1e-8)
        else:
            expected = (sum(each[1:], each[0]) / len(each)).float()
            assert_close(name, ours, expected, rtol=1e-2, atol=1e-4)
            assert torch.equal(ours.bfloat16().float(), ours), f"{name} was not reduced in bf16"


@pytest.mark.parametrize("mixed_precision", ["DEFAULT", "PURE"])
def test_gradients_are_reduced_in_the_right_dtype(mixed_precision: str):
    """DEFAULT averages in fp32, PURE in bf16, which determines the noise of a bf16 run."""
    run_ranks(check_gradients, 2, mixed_precision)


def check_batch_norm(affine: bool) -> None:
    """By hand: a linear layer in bf16 whose output is normalised in fp32 and returned in bf16. Statistics equal FSDP1's
    digit for digit (torch, _override_module_mixed_precision)."""
    torch.manual_seed(0)
    model = Chain(net=nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, affine=affine)))
    linear, norm = copy.deepcopy(model.net[0]).to(BF16), copy.deepcopy(model.net[1])
    prepare_fully_shard(model, None, {}, precision="amp_bf16", device="cpu")
    x = features(dist.get_rank(), batch_size=16)
    torch.testing.assert_close(model(x), norm(linear(x.to(BF16)).float()).to(BF16), rtol=0, atol=0)
    torch.testing.assert_close(model.net[1].running_mean, norm.running_mean, rtol=0, atol=0)
    torch.testing.assert_close(model.net[1].running_var, norm.running_var, rtol=0, atol=0)
    assert model.net[1].running_var.dtype == F32


def check_root_without_parameters() -> torch.dtype:
    model = nn.Module()
    model.scale, model.block = nn.Tanh(), Block()
    prepare_fully_shard(model, None, {}, precision="amp_bf16", device="cpu")
    return model.scale(features(0)).dtype
