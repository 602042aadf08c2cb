"""Units on groups of ranks: gradients are averaged within a group, in each way to specify it."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import full
from support.models import Block, Chain, features, layer
from support.on_ranks import on_ranks
from support.ranks import run_ranks
from support.training import FULL, assert_close
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composer_fsdp2 import ConfigError, clip_grad_norm_, prepare_fully_shard
from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.sharding import meshes

ALL = ((0, 1, 2, 3),)
ROWS, COLUMNS, CROSSED = ((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2))
ALONE = ((0,), (1,), (2,), (3,))
UNEVEN = ((0,), (1, 2, 3))


def own(groups: Sequence[Sequence[int]]) -> list[int]:
    return list(next(group for group in groups if dist.get_rank() in group))


def live(groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    made = [dist.new_group(group) for group in groups]
    return next(group for group, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks)


def a_mesh(groups: Sequence[Sequence[int]]) -> DeviceMesh:
    return DeviceMesh.from_group(live(groups), "cpu")


def pair_of_meshes() -> DeviceMesh:
    groups = [live(COLUMNS), live(ROWS)]
    return DeviceMesh.from_group(groups, "cpu", mesh=torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=("a", "b"))


# A configuration, made on each rank, and the groups of ranks whose gradients are averaged.
FORMS: dict[str, tuple[Any, Sequence[Sequence[int]]]] = {
    "self": (lambda: {"process_group": "self"}, ALONE),
    "set": (lambda: {"process_group": "set2"}, ROWS),
    "mod": (lambda: {"process_group": "mod2"}, COLUMNS),
    "mod of one": (lambda: {"process_group": "mod1"}, ALL),
    "ranks": (lambda: {"process_group": own(CROSSED)}, CROSSED),
    "ranks in another order": (lambda: {"process_group": own(CROSSED)[::-1]}, CROSSED),
    "groups of two sizes": (lambda: {"process_group": own(UNEVEN)}, UNEVEN),
    "group": (lambda: {"process_group": live(CROSSED)}, CROSSED),
    "whole": (lambda: {"process_group": "set2", "sharding_strategy": "NO_SHARD"}, ROWS),
    "mesh": (lambda: {"device_mesh": a_mesh(CROSSED)}, CROSSED),
    "mesh of replicas": (lambda: {"device_mesh": pair_of_meshes()}, ALL),
    "pair": (lambda: {"process_group": ("set2", "mod2"), "sharding_strategy": "HYBRID_SHARD"}, ALL),
    "pair of ranks": (
        lambda: {"process_group": (own(CROSSED), own(((0, 1), (3, 2)))), "sharding_strategy": "_HYBRID_SHARD_ZERO2"},
        ALL,
    ),
    "pair of groups": (
        lambda: {"process_group": [live(ROWS), live(COLUMNS)], "sharding_strategy": "HYBRID_SHARD"},
        ALL,
    ),
}


def build() -> nn.Module:
    torch.manual_seed(0)
    return Chain(net=Chain({"block": True}, block=Block(), rest=layer()))


def check_gradients(name: str, where: str) -> tuple[int, float]:
    """Two backwards; returns the local number of elements of the block's first weight, and the norm from clipping."""
    form, groups = FORMS[name]
    torch.set_default_dtype(torch.float64)
    model = build()
    reference = copy.deepcopy(model)
    if where == "model":
        config = form()
    else:
        config = {}
        settings = form()
        if "device_mesh" in settings and where == "FSDP2":
            settings["mesh"] = settings.pop("device_mesh")
        model.net.fsdp_wrap_fn = lambda module: settings if isinstance(module, Block) else False
    prepare_fully_shard(model, None, FULL | config, device="cpu")
    parameters = dict(reference.named_parameters())
    gradients: list[tuple[torch.Tensor, ...]] = [()] * 4  # of each rank
    for step in range(2):
        model(features(10 * step + dist.get_rank())).square().mean().backward()
        for rank in range(4):
            loss = reference(features(10 * step + rank)).square().mean()
            found = torch.autograd.grad(loss, [*parameters.values()])
            gradients[rank] = tuple(map(sum, zip(gradients[rank], found, strict=True))) if step else found
    for path, of_ranks in zip(parameters, zip(*gradients, strict=True), strict=True):
        ranks = own(groups) if where == "model" or "block" in path else range(4)
        expected = sum(of_ranks[rank] for rank in ranks) / len(ranks)
        assert_close(path, full(model.get_parameter(path).grad), expected, rtol=1e-12, atol=1e-14)
    (norm,) = clip_grad_norm_(model, 1e9).values()
    return model.net.block.fc_in.weight.to_local().numel(), norm.item()


Found = dict[str, tuple[int, float]]
WHOLE = 6 * 12
NUMEL_OF_FSDP1 = {"self": WHOLE, "set": WHOLE // 2, "mod of one": WHOLE // 4, "whole": WHOLE}  # on each rank


def check_all_gradients(where: str) -> Found:
    chosen = {
        "model": FORMS,
        "FSDP1": (*NUMEL_OF_FSDP1, "groups of two sizes", "mesh of replicas", "pair"),
        "FSDP2": ["mesh"],
    }
    return for_each(check_gradients, {name: (name, where) for name in chosen[where]})


def check_torchs_group() -> None:
    """On torch 2.7 it differs from a default group on gloo if there are GPUs: the new group uses NCCL."""
    torchs = dist.new_group()
    assert torchs is not None

    def init_device_mesh(device_type: str, shape: tuple[int, ...], **options: Any) -> DeviceMesh:
        return DeviceMesh.from_group(torchs, device_type)

    nothing_made_yet = mock.patch.dict(meshes._groups, clear=True)
    with nothing_made_yet, mock.patch.object(meshes, "init_device_mesh", init_device_mesh):
        (mesh,) = meshes.unit_meshes([MeshSpec.of_degrees(-1, None, device_type="cpu").resolve(2)])
    assert mesh.fsdp.get_group() is torchs


def test_all_ranks_communicate_over_torchs_group():
    """Takes the group that torch's meshes use for all ranks; another group stands in for it here."""
    run_ranks(check_torchs_group, 2)


def test_process_group_of_the_model():
    """Each of Composer's forms of process_group averages over exactly its ranks."""
    found: list[Found] = run_ranks(check_all_gradients, 4, "model")
    for name, (_, groups) in FORMS.items():
        for group in groups:
            assert len({found[rank][name][1] for rank in group}) == 1, f"{name}: a group clips alike"


@pytest.mark.parametrize("where", [pytest.param("FSDP1", marks=pytest.mark.any_torch), "FSDP2"])
def test_process_group_of_one_module(where: str):
    """One module uses its own ranks, the others use all; all ranks compute one norm. FSDP2's key for a mesh is
    ``mesh``.

    A group of two has half of a parameter on each rank, also beside modules on all four ranks.
    """
    found: list[Found] = run_ranks(check_all_gradients, 4, where)
    for name in found[0]:
        norms = [of_rank[name][1] for of_rank in found]
        assert max(norms) - min(norms) < 1e-12 * max(norms), name
    for name, expected in NUMEL_OF_FSDP1.items() if where == "FSDP1" else ():
        assert [of_rank[name][0] for of_rank in found] == [expected] * 4, name


def check_sync() -> list[float]:
    """Each rank starts with its own number in every parameter and buffer."""
    model = build()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(dist.get_rank())
    config = {"sync_module_states": True, "process_group": own(CROSSED)}
    prepare_fully_shard(model, None, config, device="cpu")
    return [full(model.net.rest.weight).unique().item(), model.net.block.scale.item()]


def test_sync_module_states_within_a_group():
    """Every group starts with the values of its first rank, as under FSDP1."""
    assert run_ranks(check_sync, 4) == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]


def check_refused(form: dict[str, Any], message: str) -> None:
    model = build()
    before = [(name, id(parameter)) for name, parameter in model.named_parameters()]
    with pytest.raises(ConfigError, match=re.escape(message)):
        prepare_fully_shard(model, None, form, device="cpu")
    assert before == [(name, id(parameter)) for name, parameter in model.named_parameters()]


@on_ranks(4)
def test_groups_that_do_not_fit(folder: str) -> None:
    """Contradicting groups raise on every rank, instead of ranks waiting for each other."""
    rank = dist.get_rank()
    hybrid = {"sharding_strategy": "HYBRID_SHARD"}
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"process_group": [0, 1]}, "process_group of rank 2 is [0, 1], without the rank itself"),
        (
            {"process_group": [0, 1, 2, 3] if rank < 2 else [2, 3]},
            "process_group of rank 0 is [0, 1, 2, 3], but rank 2 says [2, 3]; all ranks of a group must name the same",
        ),
        ({"process_group": ("set2", "set2"), **hybrid}, "ranks 0 and 1 are replicas, but hold different shards"),
        (
            {"process_group": (own(ROWS), own(CROSSED)), **hybrid},
            "ranks 0 and 3 are replicas, but hold different shards",
        ),
        ({"process_group": [0, 7]}, "process_group names rank 7, but the world size is 4"),
    )
    for_each(check_refused, {message: (form, message) for form, message in cases})
