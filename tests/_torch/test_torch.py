"""Each workaround for a torch bug: the bug exists in exactly the listed versions, and the workaround removes it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.on_ranks import on_ranks
from support.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from composer_fsdp2._torch.repairs import REPAIRS, Repair, repair_cpu_collectives
from composer_fsdp2._torch.unit import patch_unit

VERSION = torch.__version__.partition("+")[0]


def gradient_over_mean(shape: tuple[int, ...], dtype: torch.dtype) -> float | str:
    """torch alone, without our code: the factor by which a gradient is too large on a mesh of ``shape``, or the error.

    y = w * x with x = rank + 1: the mean of the gradients over ranks is the mean of x.
    """
    names = ("replicate", "shard")[-len(shape) :]
    model = nn.Linear(1, 4, bias=False).to(dtype)
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    try:
        model(torch.full((1, 1), dist.get_rank() + 1.0, dtype=dtype)).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    mean = (dist.get_world_size() + 1) / 2
    return model.weight.grad.full_tensor()[0].item() / mean


class Group:
    """The process group's methods that the divide factors use."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def factors(device_type: str) -> list[Any]:
    groups = [(Group(8), None), (Group(4), Group(2)), (Group(1), None), (Group(1), Group(3))]
    return [
        repr(_fsdp_collectives._get_gradient_divide_factors(*pair, dtype, device_type))
        for pair in groups
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    ]


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPES = ((2,), (1, 2), (2, 1))


def check_repairs() -> dict[str, Any]:
    """In fresh processes: whether each workaround is needed, and torch's behaviour with it."""
    seen: dict[str, Any] = {"needed": {repair.name: repair.is_needed() for repair in REPAIRS}}
    factors_before = {device_type: factors(device_type) for device_type in ("cuda", "mtia", "cpu")}
    repair_cpu_collectives()
    repair_cpu_collectives()
    seen["after"] = {(shape, str(dtype)): gradient_over_mean(shape, dtype) for shape in SHAPES for dtype in DTYPES}
    seen["factors"] = factors_before, {device_type: factors(device_type) for device_type in factors_before}
    seen["needed again"] = [repair.name for repair in REPAIRS if repair.is_needed()]
    return seen


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    first, second = run_ranks(check_repairs, 2, fresh=True)
    assert first == second
    return first


def is_listed(versions: tuple[str, ...]) -> bool:
    return any(version == VERSION or VERSION.startswith(f"{version}.") for version in versions)


@pytest.mark.parametrize("repair", REPAIRS, ids=lambda repair: repair.name)
def test_the_probe_agrees_with_the_list(repair: Repair, seen: dict[str, Any]):
    """A workaround applied without need, or missing where needed, silently changes gradients."""
    if is_listed(repair.seen_on):
        assert seen["needed"][repair.name]
    elif is_listed(repair.not_on):
        assert not seen["needed"][repair.name]
    else:
        pytest.skip(f"torch {VERSION} stands in neither list of the repair")


def test_gradients_are_means_afterwards(seen: dict[str, Any]):
    """With the workaround every dtype on every mesh has exactly the mean; applying it twice changes nothing more."""
    assert {case: value for case, value in seen["after"].items() if value != 1.0} == {}
    assert seen["needed again"] == []


@on_ranks(2)
def test_a_gather_that_nobody_waits_for(folder: str) -> None:
    """Frozen first layers (LoRA, for instance) train on the CPU: no accelerator stream is used, although backward
    prefetches a unit and never uses it."""
    repair_cpu_collectives()
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    losses = []
    for _ in range(2):
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == losses[1]


class Reader(nn.Module):
    """Uses one of its two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(2)) for _ in range(2))

    def forward(self, which: int) -> torch.Tensor:
        return self.weights[which].sum() * (which + 1)


@on_ranks(2)
def test_unread_parameters_were_left_out_of_the_sum(folder: str) -> None:
    """Each rank uses another weight, whose gradient is 1 or 2. In torch alone each rank ends with a gradient for its
    own weight only, the mean over both, (1 + 2) / 2. Once torch separates them, `UnitGroup.post_backward` can be
    removed."""
    repair_cpu_collectives()
    mesh, found = init_device_mesh("cpu", (2,)), []
    for fills in (False, True):
        model = Reader()
        fully_shard(model, mesh=mesh)
        if fills:
            patch_unit(model)
        model(dist.get_rank()).backward()
        found.append([None if weight.grad is None else weight.grad.to_local().item() for weight in model.weights])
    torch_alone = [1.5, None] if dist.get_rank() == 0 else [None, 1.5]
    assert found == [torch_alone, [0.5, 1.0]]


def test_other_devices_keep_their_division(seen: dict[str, Any]):
    """Sharding a model on the CPU does not change the gradients of the process's GPU training."""
    before, after = seen["factors"]
    assert after["cuda"] == before["cuda"] and after["mtia"] == before["mtia"]
    assert (after["cpu"] != before["cpu"]) == seen["needed"]["gloo averages"]


def test_no_repair_outlives_its_bug():
    """A workaround that no supported torch needs must be removed."""
    pyproject = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())
    (lowest,) = [
        match[1] for line in pyproject["project"]["dependencies"] if (match := re.match(r"torch>=([\d.]+)", line))
    ]
    for repair in REPAIRS:
        needed_on = [version for version in repair.seen_on if f"{version}.".startswith(f"{lowest}.")]
        assert needed_on, (
            f"{repair.name} was seen on {repair.seen_on}, the lowest torch we support is {lowest}: remove it"
        )
        assert not set(repair.seen_on) & set(repair.not_on)
        assert repair.why
