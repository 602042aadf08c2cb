"""FSDP1's flat parameters, written by torch's own FSDP1, split into the model's parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.checkpoints.samples import values_of
from support.comparing import assert_same, own_name
from support.models import tied_model
from support.ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import CustomPolicy

from composer_fsdp2 import (
    CheckpointError,
    convert_checkpoint,
    load_checkpoint,
    verify_checkpoint,
)
from composer_fsdp2.checkpoint.describe import as_text
from composer_fsdp2.checkpoint.flat import unflattened
from composer_fsdp2.checkpoint.inspect import inspect_checkpoint
from composer_fsdp2.checkpoint.inventory import CheckpointInventory


class Unit(nn.Module):
    """A wrapped module with parameters of several shapes, registered before and after a child."""

    def __init__(self, *, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.randn(3))
        self.layer = nn.Linear(2, 3)
        if inner is not None:
            self.inner = inner
        self.after = nn.Parameter(torch.randn(2, 1, 2))
        self.register_buffer("table", torch.arange(3.0))

    def forward(self) -> None: ...


class Root(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5))
        for name, child in children.items():
            self.add_module(name, child)
        self.last = nn.Parameter(torch.randn(2, 3))

    def forward(self) -> None: ...


def nested() -> nn.Module:
    return Root(a=Unit(inner=Unit(inner=Unit())), b=nn.Sequential(Unit(), nn.Linear(2, 2), Unit()))


def tied_in_a_unit() -> nn.Module:
    unit = Unit(inner=nn.Linear(2, 3))
    unit.inner.weight = unit.layer.weight
    return Root(a=unit, b=Unit())


def tied_outside() -> nn.Module:
    root = Root(a=nn.Linear(3, 4), b=Unit(), c=nn.Linear(3, 4, bias=False))
    root.c.weight = root.a.weight
    return root


def shared_with_the_root() -> nn.Module:
    """FSDP1 gave each of the two wrapped modules a copy, and the copies diverged."""
    root = Root(head=nn.Linear(2, 3), b=Unit())
    root.head.weight = root.b.layer.weight
    return root


MODELS: dict[str, Callable[[], nn.Module]] = {
    "one unit": lambda: Root(a=nn.Linear(3, 2)),
    "nested": nested,
    "tied in a unit": tied_in_a_unit,
    "tied outside of the units": tied_outside,
    "shared with the root": shared_with_the_root,
    "a decoder": tied_model,
}


# Names that FSDP1 omitted, and the names that it used instead.
ALIASES = {
    "tied in a unit": {"a.inner.weight": "a.layer.weight"},
    "tied outside of the units": {"c.weight": "a.weight"},
}


def is_unit(module: nn.Module) -> bool:
    return isinstance(module, Unit) or type(module).__name__ == "Block"


def wrapped(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    policy = CustomPolicy(is_unit)
    return FSDP(make(), auto_wrap_policy=policy, use_orig_params=False, device_id=torch.device("cpu"))


def flat_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every flat parameter, unsharded, under its name of ``state_dict_type: local``, and buffers. Called on all
    ranks."""
    state = {name: buffer for name, buffer in model.named_buffers() if buffer is not None}
    for path, module in model.named_modules():
        if isinstance(module, FSDP) and module._handle is not None:
            flat = module._handle.flat_param
            shards = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
            dist.all_gather(shards, flat.detach())
            whole = torch.cat(shards)[: sum(flat._numels)]
            state[f"{path}._flat_param" if path else "_flat_param"] = whole
    return state


def moments(names: list[str], count: float) -> dict[str, Any]:
    """Optimizer state keyed by the flat parameters' names."""
    group = {"lr": 0.1, "params": names}
    state = {name: {"step": torch.tensor(count), "note": "kept"} for name in names}
    return {"AdamW": {"state": state, "param_groups": [group]}}


def write(make_name: str, folder: str) -> None:
    """Writes a monolithic file of the flat parameters, and a file of the parameters as FSDP1 unflattens them."""
    model = wrapped(MODELS[make_name])
    state = flat_state(model)
    with FSDP.summon_full_params(model):
        whole = {own_name(name): parameter.detach().clone() for name, parameter in model.named_parameters()}
    flat_names = [name for name in state if name.endswith("_flat_param")]
    optimizers = moments(flat_names, 3.0)
    for name in flat_names:
        optimizers["AdamW"]["state"][name]["exp_avg"] = state[name] * 2
    handles = {path: module._handle for path, module in model.named_modules() if isinstance(module, FSDP)}
    names = [
        own_name(f"{path}.{name}" if path else name)
        for path, handle in handles.items()
        for name in (handle.flat_param._fqns if handle else ())
    ]
    if dist.get_rank() == 0:
        torch.save({"state": {"model": state, "optimizers": optimizers}}, f"{folder}/{make_name}.pt")
        torch.save({"parameters": whole, "names": names}, f"{folder}/{make_name}.whole.pt")


def check_write(folder: str) -> None:
    for name in MODELS:
        write(name, folder)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flat")
    run_ranks(check_write, 2, str(folder))
    return folder


def opened(written: Path, name: str) -> CheckpointInventory:
    return inspect_checkpoint(written / f"{name}.pt").replaced(flat=True)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_come_out_as_fsdp1_put_them_in(name: str, written: Path):
    """A flat file has neither names nor shapes; one parameter at a wrong offset would shift all others."""
    model = MODELS[name]()
    inventory = unflattened(opened(written, name), model)
    assert not inventory.flat
    fsdp1 = torch.load(written / f"{name}.whole.pt", weights_only=True)
    values = values_of(inventory)
    found = {str(path[2]): value for path, value in values.items() if path[:2] == ("state", "model")}
    parameters = set(fsdp1["names"])
    buffers = {key for key, _ in model.named_buffers()}
    # FSDP1 names a shared parameter once for each wrapped module; its full state dicts have it under every name.
    every_name = {key for key, _ in model.named_parameters(remove_duplicate=False)}
    assert {key for key in found if own_name(key) not in buffers} == every_name
    assert fsdp1["parameters"].keys() & parameters
    for key in fsdp1["parameters"].keys() & parameters:
        assert torch.equal(found[key], fsdp1["parameters"][key]), key
    for key, other in ALIASES.get(name, {}).items():
        assert torch.equal(found[key], found[other]) and key not in parameters, key
    for key in parameters:
        own = {name: values["state", "optimizers", "AdamW", "state", key, name] for name in ("exp_avg", "step", "note")}
        assert_same(own, {"exp_avg": 2 * found[key], "step": torch.tensor(3.0), "note": "kept"}, key)
    [group] = inventory.groups("AdamW")
    assert sorted(group["params"]) == sorted(parameters) and group["lr"] == 0.1


def other_size() -> nn.Module:
    model = nested()
    model.b[0].after = nn.Parameter(torch.zeros(5))
    return model


def without_a_unit() -> nn.Module:
    return Root(a=Unit(inner=Unit(inner=Unit())), b=nn.Sequential(Unit(), nn.Linear(2, 2)))


OTHERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "other size": (other_size, r"b\.0.*_flat_param holds 16 elements, this model's parameters there 17"),
    "without a unit": (without_a_unit, r"'b\.2', which this model does not have"),
}


@pytest.mark.parametrize("name", [*OTHERS, "longer moments"])
def test_another_model_is_refused(name: str, written: Path, tmp_path: Path):
    """A flat parameter split at wrong offsets still contains numbers, and would train; so would moments of another
    model."""
    make, says = OTHERS.get(name, (nested, "elements"))
    root = torch.load(written / "nested.pt", weights_only=True)
    if name == "longer moments":
        first = next(iter(root["state"]["optimizers"]["AdamW"]["state"].values()))
        first["exp_avg"] = torch.zeros(first["exp_avg"].numel() + 1)
    torch.save(root, tmp_path / "nested.pt")
    with pytest.raises(CheckpointError, match=says) as raised:
        unflattened(opened(tmp_path, "nested"), make())
    assert str(tmp_path) in str(raised.value)


class CalledFlat(nn.Module):
    """A parameter whose name resembles FSDP1's flat parameters, beside another."""

    def __init__(self) -> None:
        super().__init__()
        self.my_flat_param = nn.Parameter(torch.randn(3))
        self.weight = nn.Parameter(torch.randn(2))


@pytest.mark.parametrize("layout", ["monolithic", "dcp"])
def test_a_parameter_that_is_called_flat(layout: str, tmp_path: Path):
    """A model with ``flat_param`` in its names loads, converts and compares like any other."""
    model, names = CalledFlat(), ["my_flat_param", "weight"]
    torch.save({"state": {"model": model.state_dict(), "optimizers": moments(names, 3.0)}}, tmp_path / "source.pt")
    convert_checkpoint(tmp_path / "source.pt", tmp_path / "new", to=layout)
    inventory = inspect_checkpoint(tmp_path / "new")
    assert not inventory.flat and [each.keyed_by for each in inventory.optimizers] == ["name"]
    assert "flat parameters" not in as_text(inventory)
    loaded = CalledFlat()
    load_checkpoint(tmp_path / "new", loaded, weights_only=True)
    assert_same(loaded.state_dict(), model.state_dict(), in_bits=True)
    assert verify_checkpoint(tmp_path / "new", tmp_path / "source.pt").ok


def test_a_monolithic_file_has_names(tmp_path: Path):
    """Only files of ranks contain flat parameters; in another file, a module with such a name is an ordinary module."""
    torch.save({"state": {"model": {"unit._flat_param": torch.ones(3)}}}, tmp_path / "source.pt")
    inventory = inspect_checkpoint(tmp_path / "source.pt")
    assert not inventory.flat and unflattened(inventory, nested()) is inventory
    convert_checkpoint(tmp_path / "source.pt", tmp_path / "new.pt", to="monolithic")
