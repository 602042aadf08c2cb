"""State dicts of FSDP1's class, its own and ours, each read by the other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp.training import Run, build, forward, make_optimizer, step, wrapped
from support.comparing import assert_same
from support.on_ranks import on_ranks
from support.ranks import run_ranks
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from composer_fsdp2.errors import CallError, UnsupportedError
from composer_fsdp2.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from composer_fsdp2.fsdp import FullyShardedDataParallel as FSDP

FULL, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT
)  # fmt: skip
RUN = Run(wrap="classes", precision="fp32", optimizer="before")
BY_HAND = Run(wrap="by hand", precision="fp32")
# FSDP1 on the CPU frees tensors that it copied to the CPU.
CONFIGS: dict[StateDictType, tuple[Any, Any]] = {
    FULL: (FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=False)),
    SHARDED: (ShardedStateDictConfig(), ShardedOptimStateDictConfig(offload_to_cpu=False)),
}


def start(cls: Any, run: Run = RUN, steps: int = 2) -> tuple[Any, torch.optim.Optimizer]:
    """A model that has trained for some steps, with its optimizer."""
    net = build(run)
    if not steps:
        for parameter in net.parameters():
            parameter.data.zero_()
    model = wrapped(cls, net, run)
    optimizer = make_optimizer(model)
    for number in range(steps):
        step(model, optimizer, run, number)
    return model, optimizer


def states(cls: Any, model: Any, optimizer: Any, kind: StateDictType) -> dict[str, Any]:
    with cls.state_dict_type(model, kind, *CONFIGS[kind]):
        # A copy: on the CPU, the step counters are the optimizer's own tensors.
        return copy.deepcopy({"model": model.state_dict(), "optimizer": cls.optim_state_dict(model, optimizer)})


def load(cls: Any, model: Any, optimizer: Any, kind: StateDictType, state: dict[str, Any]) -> None:
    with cls.state_dict_type(model, kind, *CONFIGS[kind]):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(cls.optim_state_dict_to_load(model, optimizer, state["optimizer"]))


@on_ranks(2)
def test_full_state_dicts_are_those_of_fsdp1_and_load_in_both():
    """Otherwise earlier checkpoints could not be loaded, or new ones not by the old code."""
    expected, found = ((cls, *start(cls)) for cls in (FSDP1, FSDP))
    theirs, ours = states(*expected, FULL), states(*found, FULL)
    assert list(ours["model"]) == list(theirs["model"])
    assert_close(ours, theirs)
    for cls, state, others in ((FSDP, theirs, expected), (FSDP1, ours, found)):
        model, optimizer = start(cls, BY_HAND, steps=1)
        load(cls, model, optimizer, FULL, state)
        assert_same(states(cls, model, optimizer, FULL)["model"], dict(state["model"]))
        resumed, went_on = step(model, optimizer, RUN, 2), step(*others[1:], RUN, 2)
        assert resumed == pytest.approx(went_on, rel=1e-6)
        assert_close(states(cls, model, optimizer, FULL), states(*others, FULL))


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Within rounding: a norm sums in another order."""
    for name, each in expected["model"].items():
        torch.testing.assert_close(found["model"][name], each, rtol=1e-5, atol=1e-6)
    one, other = found["optimizer"], expected["optimizer"]
    assert one["state"].keys() == other["state"].keys()
    for name, values in other["state"].items():
        for key, value in values.items():
            torch.testing.assert_close(one["state"][name][key], value, rtol=1e-4, atol=1e-6, check_device=False)
    assert [sorted(group["params"]) for group in one["param_groups"]] == [
        sorted(group["params"]) for group in other["param_groups"]
    ]


@on_ranks(2)
def test_rank0_only_and_offload_to_cpu():
    model, optimizer = start(FSDP)
    config = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
    with FSDP.state_dict_type(model, FULL, config, FullOptimStateDictConfig(rank0_only=True)):
        assert FSDP.get_state_dict_type(model).state_dict_config == config
        state, of_optimizer = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    is_first = dist.get_rank() == 0
    assert bool(state) == is_first and bool(of_optimizer) == is_first, (list(state), list(of_optimizer))
    assert FSDP.get_state_dict_type(model).state_dict_config == FullStateDictConfig()
    assert all(not isinstance(each, DTensor) for each in model.state_dict().values())


@on_ranks(2)
def test_sharded_and_local_types():
    model, _ = start(FSDP)
    FSDP.set_state_dict_type(model, SHARDED, ShardedStateDictConfig(offload_to_cpu=True))
    state = model.state_dict()
    assert {name for name, each in state.items() if not isinstance(each, DTensor)} == {
        "blocks.0.scale", "blocks.1.scale"
    }  # fmt: skip
    model.load_state_dict(state)
    with pytest.raises(UnsupportedError, match="SHARDED_STATE_DICT"):
        FSDP.set_state_dict_type(model, LOCAL)
    with pytest.raises(CallError, match="FullStateDictConfig"):
        FSDP.set_state_dict_type(model, FULL, ShardedStateDictConfig())


@on_ranks(2)
def test_state_dict_of_an_inner_instance_and_of_a_module_around():
    """Scripts save one block, or a wrapper of their own around the model."""
    model, _ = start(FSDP, BY_HAND)
    whole = model.state_dict()
    block = model.blocks[0].state_dict()
    assert list(block) == [name.removeprefix("blocks.0.") for name in whole if name.startswith("blocks.0.")]
    assert_same(dict(block), {name: whole[f"blocks.0.{name}"] for name in block})
    around = torch.nn.ModuleDict({"model": model})
    assert list(around.state_dict()) == [f"model.{name}" for name in whole]
    zeros = {name: torch.zeros_like(each) for name, each in whole.items()}
    around.load_state_dict({f"model.{name}": each for name, each in zeros.items()})
    assert_same(dict(model.state_dict()), zeros)
    missing = model.load_state_dict(
        {"head.weight": whole["head.weight"], "nothing": whole["head.weight"]}, strict=False
    )
    assert "nothing" in missing.unexpected_keys[0] and len(missing.missing_keys) == len(whole) - 1


def save(folder: str, cls: Any) -> dict[str, Any]:
    """A sharded checkpoint, as scripts write it; returns the full state."""
    model, optimizer = start(cls)
    dcp.save(states(cls, model, optimizer, SHARDED), checkpoint_id=folder)
    return states(cls, model, optimizer, FULL)


def resume(folder: str, cls: Any) -> dict[str, Any]:
    """Like FSDP1 scripts: loads the state of an optimizer without state, separately."""
    model, optimizer = start(cls, BY_HAND, steps=0)
    with cls.state_dict_type(model, SHARDED, *CONFIGS[SHARDED]):
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        reader = dcp.FileSystemReader(folder)
        loaded = load_sharded_optimizer_state_dict(state["model"], "optimizer", reader)
        optimizer.load_state_dict(cls.optim_state_dict_to_load(model, optimizer, loaded["optimizer"]))
    return states(cls, model, optimizer, FULL)


def resume_with_state(folder: str) -> dict[str, Any]:
    model, optimizer = start(FSDP, BY_HAND, steps=0)
    forward(model, 0).backward()  # creates optimizer state before loading, as DCP requires
    optimizer.step()
    state = states(FSDP, model, optimizer, SHARDED)
    dcp.load(state, checkpoint_id=folder)
    load(FSDP, model, optimizer, SHARDED, state)
    return states(FSDP, model, optimizer, FULL)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sharded_checkpoints_load_in_both_at_other_world_sizes(tmp_path, num_ranks):
    """Each loads model and optimizer saved by the other on two ranks."""
    theirs = run_ranks(save, 2, str(tmp_path / "fsdp1"), FSDP1)[0]
    ours = run_ranks(save, 2, str(tmp_path / "ours"), FSDP)[0]
    assert_equal(run_ranks(resume_with_state, num_ranks, str(tmp_path / "fsdp1"))[0], theirs)
    assert_equal(run_ranks(resume, num_ranks, str(tmp_path / "fsdp1"), FSDP)[0], theirs)
    assert_equal(run_ranks(resume, num_ranks, str(tmp_path / "ours"), FSDP)[0], ours)
    assert_equal(run_ranks(resume, num_ranks, str(tmp_path / "ours"), FSDP1)[0], ours)


class Lazy:
    """A tensor that is read when a function is called on it, like Lightning's."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape = tensor, tensor.shape

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*[each.tensor if isinstance(each, Lazy) else each for each in args], **(kwargs or {}))


@on_ranks(2)
def test_objects_like_tensors_load():
    model, _ = start(FSDP)
    expected = model.state_dict()
    fresh, _ = start(FSDP, BY_HAND, steps=0)
    fresh.load_state_dict({name: Lazy(value) for name, value in expected.items()})
    assert_same(dict(fresh.state_dict()), dict(expected))


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert_same(dict(found["model"]), dict(expected["model"]))
    assert_same(found["optimizer"]["state"], expected["optimizer"]["state"])


@on_ranks(2)
def test_full_parameters_are_written_back():
    """``FSDP.summon_full_params`` with its options, and names without wrappers."""
    model, _ = start(FSDP, BY_HAND)
    with FSDP.summon_full_params(model):
        dict(model.named_parameters())["blocks.0.fc_in.weight"].data.fill_(7.0)
    assert (model.state_dict()["blocks.0.fc_in.weight"] == 7).all()
    with FSDP.summon_full_params(model, writeback=False, rank0_only=True):
        is_full = not isinstance(model.head.weight, DTensor)
        model.head.weight.data.zero_()
    assert is_full == (dist.get_rank() == 0)
    assert model.state_dict()["head.weight"].any() or dist.get_rank()


@on_ranks(2)
def test_older_methods_for_optimizer_state():
    """Full state of an unwrapped run, by position, loads into a wrapped one, and back."""
    net = build(RUN)
    plain = make_optimizer(net)
    forward(net, 0).backward()
    plain.step()
    expected = copy.deepcopy(plain.state_dict())
    by_name = FSDP.rekey_optim_state_dict(expected, OptimStateKeyType.PARAM_NAME, net, optim=plain)
    assert_same(by_name, FSDP1.rekey_optim_state_dict(expected, OptimStateKeyType.PARAM_NAME, net, optim=plain))
    for read in (
        lambda model, optimizer: FSDP.shard_full_optim_state_dict(by_name, model, optim=optimizer),
        lambda model, optimizer: FSDP.scatter_full_optim_state_dict(
            None if dist.get_rank() else by_name, model, optim=optimizer
        ),
    ):
        model, optimizer = start(FSDP, steps=1)
        optimizer.load_state_dict(read(model, optimizer))
        full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
        assert_same(full["state"], by_name["state"])
        assert_same(FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, net, optim=plain), expected)
    fresh, of_fresh = start(FSDP, BY_HAND, steps=1)
    shards = FSDP.sharded_optim_state_dict(model, optimizer)
    of_fresh.load_state_dict(FSDP.flatten_sharded_optim_state_dict(shards, fresh, of_fresh))
    assert_same(FSDP.full_optim_state_dict(fresh, of_fresh, rank0_only=False)["state"], by_name["state"])


@on_ranks(2)
def test_keys_that_do_not_fit_are_named_as_by_fsdp1():
    """Scripts that load with ``strict=False`` compare the returned keys with those of their checkpoint."""
    found = []
    for cls in (FSDP1, FSDP):
        model, _ = start(cls, BY_HAND, steps=0)
        with cls.state_dict_type(model, FULL):
            state = dict(list(model.state_dict().items())[1:], unknown=torch.ones(1))
            found.append(model.load_state_dict(state, strict=False))
            with pytest.raises(RuntimeError) as error:
                model.load_state_dict(state)
        assert "_fsdp_wrapped_module" not in str(error.value)
    assert found[0] == found[1]
    assert len(found[1].missing_keys) == 1 and found[1].unexpected_keys == ["unknown"]


@on_ranks(2)
def test_optimizers_that_list_parameters_in_other_orders_on_other_ranks():
    """FSDP1 gathered state by name; by position it would belong to other parameters."""
    expected = []
    for is_turned in (False, True):
        model, _ = start(FSDP, steps=0)
        parameters = list(model.parameters())
        optimizer = torch.optim.Adam(reversed(parameters) if is_turned and dist.get_rank() else parameters, lr=0.1)
        for _ in range(2):
            step(model, optimizer, RUN, 0)
        expected.append(FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"])
    assert_same(*expected)
    read = FSDP.scatter_full_optim_state_dict({"state": expected[0], "param_groups": []}, model, optim=optimizer)
    momentum = read["state"][0]["exp_avg"]
    assert momentum.shape == optimizer.param_groups[0]["params"][0].shape


def shards_of(state: Any) -> Any:
    return tree_map(lambda each: each.to_local() if isinstance(each, DTensor) else each, state)


@on_ranks(2)
def test_optimizer_state_without_groups_and_by_optim_input():
    """Scripts pass the groups themselves; older ones the argument that they passed to the optimizer."""
    model, optimizer = start(FSDP)
    given = optimizer.state_dict()
    groups = given.pop("param_groups")
    named = FSDP.optim_state_dict(model, optimizer, given)
    assert named.keys() == {"state"}
    back = FSDP.optim_state_dict_to_load(model, optimizer, named)
    assert back.keys() == {"state"}
    before = copy.deepcopy(shards_of(optimizer.state_dict()))
    optimizer.load_state_dict({**back, "param_groups": groups})
    assert_same(shards_of(optimizer.state_dict()), before)
    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    expected = FSDP.shard_full_optim_state_dict(full, model, optim=optimizer)
    for optim_input in (list(model.parameters()), optimizer.param_groups):
        read = FSDP.shard_full_optim_state_dict(full, model, optim_input=optim_input)
        assert_same(shards_of(read["state"]), shards_of(expected["state"]))
    with pytest.raises(UnsupportedError, match="before sharding"):
        FSDP.shard_full_optim_state_dict(full, model, optim_input=build(RUN).parameters())
    named_state = {"state": {"head.weight": {}}, "param_groups": []}
    with pytest.raises(UnsupportedError, match="by name"):
        FSDP.optim_state_dict(model, optimizer, named_state)
