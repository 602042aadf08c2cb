"""The memory that optimizers allocate in a step, compared with real steps whose storages are counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from composer_fsdp2 import ShardingConfig, estimate_step, plan_sharding
from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.estimate._torch.live import LiveStorages
from composer_fsdp2.estimate.optimizers import optimizer_state
from composer_fsdp2.estimate.step import Phase

SIZES = (700, 1300, 400)  # elements of parameters
TORCH: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"weight_decay": 0.1}),
    ("AdamW", {"amsgrad": True}),
    ("AdamW", {"fused": True}),
    ("Adam", {}),
    ("Adam", {"weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    ("SGD", {"weight_decay": 0.1}),
]
COMPOSER: list[tuple[str, dict[str, Any]]] = [
    ("DecoupledAdamW", {"weight_decay": 1e-5}),
    ("DecoupledAdamW", {"amsgrad": True}),
    ("DecoupledSGDW", {"momentum": 0.9}),
    ("DecoupledSGDW", {"momentum": 0.9, "nesterov": True}),
]


def allocated(kind: Any, options: dict[str, Any]) -> int:
    """The peak of bytes that a third step allocates: momentum is a copy of the first gradient."""
    parameters = [nn.Parameter(torch.randn(size)) for size in SIZES]
    optimizer = kind(parameters, lr=0.1, **options)
    with LiveStorages() as storages:
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape)
            storages.mark()
            before = storages.now
            optimizer.step()
        return storages.peak - before


def expected(name: str, options: dict[str, Any], device_type: str) -> int:
    return optimizer_state(name, options).step_bytes([4 * size for size in SIZES], device_type)


NUMBERS = 64  # bytes of one-element tensors that a step creates, such as a correction


@pytest.mark.parametrize(("name", "options"), TORCH, ids=str)
def test_a_step_of_torch_allocates_what_is_counted(name: str, options: dict[str, Any]):
    """A run that fits until its first step would end there: torch's default on GPUs computes the square roots of all
    second moments at once."""
    kind = getattr(torch.optim, name)
    is_fused = options.get("fused", False)
    for device_type, foreach in (("cuda", not is_fused), ("cpu", False)):
        found = allocated(kind, options if is_fused else {**options, "foreach": foreach})
        wanted = expected(name, options, device_type)
        assert wanted <= found <= wanted + NUMBERS, (device_type, found, wanted)
    assert expected(name, {**options, "foreach": False}, "cuda") == expected(name, options, "cpu")


@pytest.mark.composer
@pytest.mark.parametrize(("name", "options"), COMPOSER, ids=str)
def test_a_step_of_composer_allocates_what_is_counted(name: str, options: dict[str, Any]):
    """It updates one parameter after the other, on a GPU as well."""
    optimizers = pytest.importorskip("composer.optim", reason="needs Composer")
    found, wanted = allocated(getattr(optimizers, name), options), expected(name, options, "cuda")
    assert wanted <= found <= wanted + NUMBERS, (found, wanted)


@pytest.mark.composer
def test_a_step_of_foundrys_lion_allocates_what_is_counted():
    """It updates one parameter after the other."""
    optimizers = pytest.importorskip("llmfoundry.optim", reason="needs LLM Foundry")
    found, wanted = allocated(optimizers.DecoupledLionW, {}), expected("decoupled_lionw", {}, "cuda")
    assert wanted <= found <= wanted + NUMBERS, (found, wanted)


def test_the_step_is_part_of_the_peak():
    """17B parameters in fp32 on 4 GPUs of 80 GB: four copies of a shard fit, the fifth of torch's AdamW does not."""
    blocks = [nn.Linear(2**14, 2**14, bias=False, device="meta") for _ in range(63)]
    model = nn.Module()
    model.body = nn.Sequential(*blocks)
    model.body.fsdp_wrap_fn = lambda module: isinstance(module, nn.Linear)
    config = ShardingConfig(mesh=MeshSpec.of_degrees(4, device_type="cuda"))
    plan = plan_sharding(model, config)
    shard = 63 * 2**28  # bytes in fp32
    for name, copies in (("adamw", 5), ("adamw_torch_fused", 4), ("decoupled_adamw", 4)):
        estimate = estimate_step(plan, world_size=4, optimizer=optimizer_state(name))
        at_step = estimate.timeline[-1]
        assert at_step.phase is Phase.OPTIMIZER
        assert copies * shard <= at_step.total_bytes < (copies + 0.1) * shard, name
        assert (estimate.peak_bytes > 80e9) is (copies == 5), (name, estimate.peak_bytes)
