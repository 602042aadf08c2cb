"""``install_fsdp``: scripts and libraries that use torch's class train on ours."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from fsdp.training import Run, build, make_optimizer, step, wrapped
from support.comparing import assert_same
from support.on_ranks import on_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_sharded_data_parallel, sharded_grad_scaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from composer_fsdp2 import fsdp, install_fsdp
from composer_fsdp2._torch.private_names import FSDP1Wrapper
from composer_fsdp2.cli.main import main

RUN = Run(wrap="classes", precision="fp32", optimizer="before")


_NOTED_LATE = """
import torch
from torch.optim import Optimizer
own = Optimizer.add_param_group
import composer_fsdp2.fsdp.wrapper, composer_fsdp2.fsdp.installing
assert Optimizer.add_param_group is own
from composer_fsdp2.fsdp import FullyShardedDataParallel
assert Optimizer.add_param_group is not own
"""


def test_optimizers_are_noted_only_where_a_script_imports_the_class():
    """Composer's seams import the module too, and must neither slow down nor change Composer runs."""
    subprocess.run([sys.executable, "-c", _NOTED_LATE], check=True)


def test_the_class_is_replaced_wherever_it_is_bound():
    """A library that imported the class early would make real FSDP1 instances, and its isinstance checks would fail."""
    early, late = types.ModuleType("a_library"), types.ModuleType("another_library")
    early.FSDP, early.Direct = FSDP1Wrapper, fsdp.FullyShardedDataParallel
    sys.modules["a_library"] = early
    try:
        with install_fsdp():
            assert early.FSDP is fsdp.FullyShardedDataParallel
            for module in (torch_fsdp, fully_sharded_data_parallel):
                assert module.FullyShardedDataParallel is fsdp.FullyShardedDataParallel
            assert sharded_grad_scaler.ShardedGradScaler is fsdp.ShardedGradScaler
            inner = install_fsdp()
            inner.uninstall()
            assert torch_fsdp.FullyShardedDataParallel is fsdp.FullyShardedDataParallel
            late.FSDP = torch_fsdp.FullyShardedDataParallel
            sys.modules["another_library"] = late
        assert early.FSDP is late.FSDP is torch_fsdp.FullyShardedDataParallel is FSDP1Wrapper
        assert early.Direct is fsdp.FullyShardedDataParallel is not FSDP1Wrapper
        assert sharded_grad_scaler.ShardedGradScaler is not fsdp.ShardedGradScaler
    finally:
        del sys.modules["a_library"]
        sys.modules.pop("another_library", None)


@on_ranks(2)
def test_a_script_that_imports_torchs_class_trains_on_ours():
    with install_fsdp():
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = wrapped(FullyShardedDataParallel, build(RUN), RUN)
        assert isinstance(model, torch_fsdp.FSDPModule)
        assert isinstance(model, FullyShardedDataParallel)
        step(model, make_optimizer(model), RUN, 0)


@on_ranks(2)
def test_torchs_state_dict_functions(folder):
    """``get_state_dict`` and ``set_state_dict`` check for FSDP1's class: full and sharded, saved and loaded."""
    models = []
    for _ in range(2):
        net = build(RUN)
        model = wrapped(fsdp.FullyShardedDataParallel, net, RUN)
        models.append((model, make_optimizer(model)))
    (trained, optimizer), (fresh, of_fresh) = models
    step(trained, optimizer, RUN, 0)
    expected = trained.state_dict()
    for options in (StateDictOptions(full_state_dict=True), StateDictOptions()):
        state, of_optimizer = get_state_dict(trained, optimizer, options=options)
        assert list(state) == list(expected)
        assert set(of_optimizer["state"]) == {
            name for name in expected if "scale" not in name and name != "head.weight"
        }
        set_state_dict(fresh, of_fresh, model_state_dict=state, optim_state_dict=of_optimizer, options=options)
        assert_same(dict(fresh.state_dict()), dict(expected))
        for parameter in fresh.parameters():
            parameter.data.zero_()
    state, of_optimizer = get_state_dict(trained, optimizer)
    dcp.save({"model": state, "optimizer": of_optimizer}, checkpoint_id=folder)
    read, read_optimizer = get_state_dict(fresh, of_fresh)
    dcp.load({"model": read, "optimizer": read_optimizer}, checkpoint_id=folder)
    set_state_dict(fresh, of_fresh, model_state_dict=read, optim_state_dict=read_optimizer)
    assert_same(dict(fresh.state_dict()), dict(expected))
    real = wrapped(FSDP1Wrapper, build(RUN), RUN)
    assert list(get_state_dict(real, make_optimizer(real))[0]) == list(expected)
    assert step(fresh, of_fresh, RUN, 1) == step(trained, optimizer, RUN, 1)


@on_ranks(2)
def test_sharded_grad_scaler():
    """A step whose gradients overflow on one rank is skipped on all."""
    model = wrapped(fsdp.FullyShardedDataParallel, build(RUN), RUN)
    optimizer = make_optimizer(model)
    scaler = fsdp.ShardedGradScaler(device="cpu", init_scale=4.0)
    before = model.state_dict()
    for overflows in (True, False):
        optimizer.zero_grad()
        loss = model(torch.arange(5), torch.zeros(5, 6)).sum()
        scaler.scale(loss).backward()
        if overflows and torch.distributed.get_rank():
            next(model.parameters()).grad.to_local()[0] = torch.inf
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(0.1)
        scaler.step(optimizer)
        scaler.update()
        same = all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
        assert same == overflows
    assert scaler.get_scale() == 2.0


SCRIPT = """
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, OptimStateKeyType, ShardingStrategy, StateDictType
from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel

net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
optimizer = torch.optim.Adam(net.parameters())
net[0] = FSDP(net[0], device_id=torch.device("cpu"), use_orig_params=True)
model = FullyShardedDataParallel(net, device_id=torch.device("cpu"), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
assert isinstance(model, FSDP) and isinstance(model[0], FullyShardedDataParallel)
with model.no_sync():
    model(torch.ones(2, 4)).sum().backward()
model(torch.ones(2, 4)).sum().backward()
model.clip_grad_norm_(0.1)
optimizer.step()
with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
    full = FSDP.optim_state_dict(model, optimizer)
assert full["state"]["0.weight"]["exp_avg"].shape == (4, 4), full
by_place = FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, model)
assert list(by_place["state"]) == [0, 1, 2, 3], by_place
assert list(get_model_state_dict(model)) == list(model.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
kinds = [kind.__module__ for kind in map(type, model.modules())]
assert kinds.count("composer_fsdp2.fsdp.wrapper") == 2, kinds
print("trained")
"""


@on_ranks(2)
def test_run_needs_no_edit_of_the_script(folder):
    """``composer-fsdp2 run train.py``, also with Composer's own seams; torch's class is restored afterwards."""
    script = Path(folder) / f"script{torch.distributed.get_rank()}.py"
    script.write_text(SCRIPT)
    printed = io.StringIO()
    argv = mock.patch.object(sys, "argv", ["composer-fsdp2", "run", str(script)])
    with argv, contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main()
    assert printed.getvalue() == "trained\n"
    assert torch_fsdp.FullyShardedDataParallel is FSDP1Wrapper
    assert fully_sharded_data_parallel.FullyShardedDataParallel is FSDP1Wrapper


@on_ranks(2)
def test_the_units_are_printed_where_the_user_wants_them():
    """``run --show-units`` of a script without Composer."""
    text = io.StringIO()
    with contextlib.redirect_stderr(text), install_fsdp(show_units=True):
        model = wrapped(torch_fsdp.FullyShardedDataParallel, build(RUN), RUN)
        step(model, make_optimizer(model), RUN, 0)
    lines = text.getvalue().splitlines()
    assert not lines if dist.get_rank() else ("  root" in lines and "  blocks.0" in lines), lines


def shown_units(model: Any) -> list[str]:
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        model(torch.zeros(1, 4))
    return text.getvalue().splitlines()[1:]


@on_ranks(2)
def test_units_are_those_of_models_wrapped_under_show_units():
    """A function that installs, wraps and returns a model printed nothing; installs undone in another order printed the
    units of all later models."""

    def make() -> Any:
        return torch_fsdp.FullyShardedDataParallel(checkpoint_wrapper(nn.Linear(4, 4)), device_id=torch.device("cpu"))

    first, second = install_fsdp(show_units=True), install_fsdp()
    wrapped_under_it = make()
    first.uninstall()
    wrapped_after_it = make()
    second.uninstall()
    with install_fsdp():
        later = make()
    shown = [shown_units(model) for model in (wrapped_under_it, wrapped_after_it, later)]
    assert shown == ([[], [], []] if dist.get_rank() else [["  root"], [], []])


@on_ranks(2)
def test_shown_units_have_the_names_of_the_unwrapped_model():
    text = io.StringIO()
    with contextlib.redirect_stderr(text), install_fsdp(show_units=True):
        net = nn.Sequential(checkpoint_wrapper(nn.Linear(4, 4)))
        model = torch_fsdp.FullyShardedDataParallel(net, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        model(torch.zeros(1, 4))
    lines = text.getvalue().splitlines()
    assert lines[-2:] == ["  root", "  0"] or dist.get_rank(), lines
