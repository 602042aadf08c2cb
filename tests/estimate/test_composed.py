"""State and activations together, at a large model's widths, compared with a real ``fully_shard`` on tensors without
data."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from estimate.test_replay import world_of
from support.translations import config_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from composer_fsdp2 import estimate_step, optimizer_state, plan_sharding
from composer_fsdp2.estimate._torch.fake import fake_tensors
from composer_fsdp2.estimate._torch.live import tensors_of
from composer_fsdp2.estimate.trace import trace_microbatch
from composer_fsdp2.sharding.activations import wrap_activations
from composer_fsdp2.sharding.dtypes import torch_dtype
from composer_fsdp2.sharding.modules import at_path
from composer_fsdp2.sharding.plan import ShardingPlan

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

RANKS, ROWS, TOKENS = 64, 1, 4096


class AllStorages(TorchDispatchMode):
    """The peak of the sum of all storages; storages that FSDP2 has freed count as empty."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_of((*args, *(kwargs or {}).values(), result)):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._seen:
                self._seen[key] = ref(storage, lambda _, key=key: self._seen.pop(key, None))
        alive = (reference() for reference in self._seen.values())
        self.peak = max(self.peak, sum(storage.nbytes() for storage in alive if storage is not None))
        return result


def model(layers: int) -> nn.Module:
    from models import Model, Shape

    with torch.device("meta"):
        return Model(Shape(width=4096, layers=layers, heads=32, vocabulary=128256, sequence=TOKENS, batch=ROWS))


def loss(model: nn.Module, rows: int, tokens: int) -> torch.Tensor:
    return model(torch.zeros(rows, tokens, dtype=torch.int64))


def plan_of(model: nn.Module, recomputed: bool) -> ShardingPlan:
    config = {
        "mixed_precision": "PURE",
        "activation_checkpointing": recomputed,
        "activation_checkpointing_reentrant": False,
    }
    decoder: Any = next(model.children())
    decoder.activation_checkpointing_fn = decoder.fsdp_wrap_fn
    translated = config_of(config, precision="amp_bf16", world_size=RANKS)
    return plan_sharding(model, translated, precision="amp_bf16").resolve(RANKS)


def measured(model: nn.Module, plan: ShardingPlan) -> int:
    """The peak of the second step, when the optimizer's state exists."""
    import torch.distributed._tools.fake_collectives

    with world_of(RANKS):
        mesh = init_device_mesh("cpu", (RANKS,))
        with fake_tensors():
            model.to_empty(device="cpu")
            for buffer in model.buffers():  # as our own engine casts them
                buffer.data = buffer.to(torch_dtype(plan.config.mixed_precision.buffer_dtype))
            wrap_activations(model, list(plan.checkpointed), plan.config.activation_checkpointing)
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, cast_forward_inputs=False)
            for unit in plan.units:
                fully_shard(
                    at_path(model, unit.name),
                    mesh=mesh,
                    reshard_after_forward=unit.reshard_after_forward,
                    mp_policy=policy,
                )
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)  # AdamW reads its step count
            with AllStorages() as storages:  # over both steps: the optimizer's state is counted when it is created
                for _ in range(2):
                    storages.peak = 0
                    optimizer.zero_grad()
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        value = loss(model, ROWS, TOKENS)
                    value.backward()
                    del value
                    optimizer.step()
            return storages.peak


@pytest.mark.parametrize(("layers", "recomputed"), [pytest.param(2, False, marks=pytest.mark.any_torch), (3, True)])
def test_the_whole_is_that_of_real_fully_shard(layers: int, recomputed: bool):
    """State and activations do not peak at the same time; their sum would wrongly show that nothing fits."""
    held = model(layers)
    plan = plan_of(held, recomputed)
    trace = trace_microbatch(held, plan, loss, rows=ROWS, tokens=TOKENS, precision="amp_bf16")
    momentum = optimizer_state("SGD", {"momentum": 0.9})
    estimate = estimate_step(plan, trace, world_size=RANKS, optimizer=momentum)
    assert estimate.peak_bytes == measured(held, plan)
