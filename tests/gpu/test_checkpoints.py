"""A sharded state in one file and back, over NCCL, also with replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import assert_same, full, full_parameters
from support.gpus import Ranks, on_gpus
from support.models import Model, tokens
from support.training import FULL, HSDP_2X2, adamw
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from composer_fsdp2 import load_checkpoint, prepare_fully_shard, save_monolithic

OF_TWO: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "NO_SHARD": {"sharding_strategy": "NO_SHARD"},
    "offloaded": {"cpu_offload": True},
}
OF_FOUR = {"replicas": HSDP_2X2, "offloaded replicas": HSDP_2X2 | {"cpu_offload": True}, "FULL_SHARD": {}}


def trained(device: str, config: dict[str, Any], seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model after a step of AdamW, initialized with this seed and trained on a different batch on each rank."""
    torch.manual_seed(seed)
    model = Model(num_blocks=3)
    optimizer = adamw(model)
    prepare_fully_shard(model, optimizer, FULL | config, device=device)
    model(tokens(dist.get_rank()).to(device)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The layout of Composer's full checkpoints."""
    return {
        "state": {
            "model": model.state_dict(),
            "optimizers": {type(optimizer).__name__: get_optimizer_state_dict(model, optimizer)},
        }
    }


def on_cpu(value: Any) -> Any:
    """Nested dicts with every tensor unsharded and in host memory. Called on all ranks."""
    if isinstance(value, dict):
        return {key: on_cpu(part) for key, part in value.items()}
    return full(value).cpu() if isinstance(value, torch.Tensor) else value


def check_round_trips(device: str, folder: str, configs: dict[str, dict[str, Any]]) -> None:
    def check(saved_as: str, loaded_as: str) -> None:
        model, optimizer = trained(device, configs[saved_as], seed=1)
        path = Path(folder, f"{saved_as} {loaded_as}.pt")
        state = state_of(model, optimizer)
        save_monolithic(state, path)
        expected = on_cpu(state)
        if dist.get_rank() == 0:
            found = torch.load(path, map_location="cpu", weights_only=False)
            assert_same(found["state"]["model"], dict(expected["state"]["model"]), in_bits=True)
        other, others_optimizer = trained(device, configs[loaded_as], seed=2)
        load_checkpoint(path, other, others_optimizer)
        found, wanted = full_parameters(other), full_parameters(model)
        assert_same({name: value.cpu() for name, value in found.items()}, {n: v.cpu() for n, v in wanted.items()})
        moments = on_cpu(get_optimizer_state_dict(other, others_optimizer))["state"]
        assert_same(moments, expected["state"]["optimizers"]["AdamW"]["state"], in_bits=True)

    # Each is saved once and loaded once, into another configuration.
    pairs = zip(configs, [*configs][1:] + [*configs][:1], strict=True)
    for_each(check, {f"{saved_as} to {loaded_as}": (saved_as, loaded_as) for saved_as, loaded_as in pairs})


@on_gpus(2)
def test_one_file_and_back(ranks: Ranks, tmp_path: Path):
    """FSDP1's default format is restored bit for bit, for any sharding before and after."""
    ranks.run(check_round_trips, str(tmp_path), OF_TWO)


@on_gpus(4, rehearsal=0)  # the same body
def test_one_file_of_replicas_and_back(ranks: Ranks, tmp_path: Path):
    """Replicas do not write twice, and start from the values that were read for them."""
    ranks.run(check_round_trips, str(tmp_path), OF_FOUR)
