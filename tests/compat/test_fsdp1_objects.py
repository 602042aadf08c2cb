"""Scripts that use FSDP1's class and its objects, after install() shards with FSDP2 instead.

The oracle is FSDP1 itself, on the CPU. For features that it lacks there (offload_to_cpu of full state), the oracle is
one process.
"""

from __future__ import annotations

import copy
import functools
import io
import logging
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import comparing
from support.cases import for_each
from support.models import Block, Model, tokens
from support.on_ranks import on_ranks
from support.oracle import FSDP2
from support.ranks import run_ranks
from support.sharding import as_fsdp1, by_us
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor

from composer_fsdp2 import prepare_fully_shard

pytestmark = pytest.mark.composer

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
LOCAL = StateDictType.LOCAL_STATE_DICT


assert_same = functools.partial(comparing.assert_same, in_order=True)


def model_and_optimizer(shard: Callable[[Model, str], None] | None) -> tuple[Model, torch.optim.Optimizer]:
    """After a step; the block's first layer is trained with another rate, and the second layer's bias is frozen."""
    torch.manual_seed(0)
    model = Model()
    model.decoder.blocks[0].fc_out.bias.requires_grad_(False)
    if shard is not None:
        shard(model, "cpu")
    slow = [p for n, p in model.named_parameters() if "fc_in" in n]
    fast = [p for n, p in model.named_parameters() if "fc_in" not in n and p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": fast}, {"params": slow, "lr": 0.01}], lr=0.1)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 3) -> None:
    model(tokens(seed)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def full(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: full(value) for key, value in tree.items()}
    return tree.full_tensor() if isinstance(tree, DTensor) else tree


# --- state dict types


def state_dicts(model: Model, rank0_only: bool) -> dict[str, dict[str, Any]]:
    """State dicts of the full model, the root, a unit, and with a prefix, as a script calls them under FSDP1."""
    config = FullStateDictConfig(rank0_only=rank0_only)
    with FSDP.state_dict_type(model, FULL, config):
        assert FSDP.get_state_dict_type(model).state_dict_config == config
        found = {
            "model": model.state_dict(),
            "root": model.decoder.state_dict(),
            "unit": model.decoder.blocks[1].state_dict(),
            "prefix": model.decoder.state_dict(prefix="decoder."),
        }
    return {name: dict(state) for name, state in found.items()}


@pytest.mark.filterwarnings("ignore")
@on_ranks(2)
def test_state_dict_type():
    """`with FSDP.state_dict_type(model, FULL_STATE_DICT): torch.save(model.state_dict())`, FSDP1's way to save, raised
    an AttributeError, or would have saved shards."""
    theirs, _ = model_and_optimizer(as_fsdp1)
    ours, _ = model_and_optimizer(by_us)
    single, _ = model_and_optimizer(None)

    def check(rank0_only: bool, evaluated: bool) -> None:
        if evaluated:  # the root is unsharded
            with torch.no_grad():
                ours(tokens(0))
        expected = state_dicts(theirs, rank0_only)
        with FSDP2():
            actual = state_dicts(ours, rank0_only)
        assert_same(actual, expected)
        assert_same(expected["model"], dict(single.state_dict()) if dist.get_rank() == 0 or not rank0_only else {})
        assert all(isinstance(each, DTensor) for each in ours.decoder.head.state_dict().values())

    for_each(check, {"on all ranks": (False, False), "on rank 0, after an evaluation": (True, True)})

    with FSDP2():
        with FSDP.state_dict_type(ours, FULL, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
            state = ours.state_dict()
            before = copy.deepcopy(state)
        with torch.no_grad():
            for factor in (2, 0.5):  # exact in binary
                for parameter in ours.parameters():
                    parameter.mul_(factor)
                assert_same(dict(state), dict(before), "a state dict follows the parameters")
        # Shards.
        earlier = FSDP.set_state_dict_type(ours, SHARDED, ShardedStateDictConfig(offload_to_cpu=True))
        assert (earlier.state_dict_type, earlier.state_dict_config) == (FULL, FullStateDictConfig())
        state = ours.state_dict()
        assert isinstance(state["decoder.head.weight"], DTensor)
        assert_same(full(state), dict(single.state_dict()))
        ours.load_state_dict(state)
        FSDP.set_state_dict_type(ours, earlier.state_dict_type, earlier.state_dict_config)
        assert_same(dict(ours.state_dict()), dict(single.state_dict()))
        # torch's and Composer's functions are not affected
        of_torch = get_model_state_dict(ours)
        assert isinstance(of_torch["decoder.head.weight"], DTensor)
        with FSDP.state_dict_type(ours, SHARDED):
            assert isinstance(ours.state_dict()["decoder.head.weight"], DTensor)
        assert FSDP.get_state_dict_type(ours).state_dict_type is FULL
        # Errors.
        with pytest.raises(NotImplementedError, match="SHARDED_STATE_DICT with ShardedStateDictConfig"):
            FSDP.set_state_dict_type(ours, LOCAL)
        with pytest.raises(RuntimeError, match="takes a FullStateDictConfig, and got a ShardedStateDictConfig"):
            FSDP.set_state_dict_type(ours, FULL, ShardedStateDictConfig())
        with pytest.raises(KeyError, match="mine"), FSDP.state_dict_type(ours, SHARDED):
            raise KeyError("mine")
        FSDP.set_state_dict_type(ours.decoder.blocks[0], SHARDED)
        with pytest.raises(RuntimeError, match="different state dict types"):
            FSDP.get_state_dict_type(ours)


# --- loading


@on_ranks(2)
def test_load_full_state_dict():
    """`model.load_state_dict(torch.load("model.pt"))` after sharding raised, because the file's tensors are full."""
    source, _ = model_and_optimizer(None)
    state = source.state_dict()

    def build(shard: Any) -> Model:
        torch.manual_seed(1)
        model = Model()
        shard(model, "cpu")
        return model

    def check(context: str, whole: bool, assign: bool) -> None:
        model = build(by_us)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.no_grad():
            model(tokens(0))
        with FSDP2(), FSDP.state_dict_type(model, FULL) if context == "full" else nullcontext():
            given = copy.deepcopy(state)
            target, given = (model, given) if whole else (model.decoder, strip(given))
            assert not any(target.load_state_dict(given, assign=assign))
        assert_same(full(model.state_dict()), dict(state))
        for name in dict(target.named_parameters()):  # with `assign` torch uses the buffers themselves
            given[name].zero_()
        assert_same(full(model.state_dict()), dict(state), "the model follows the state dict")
        if not assign:
            step(model, optimizer)
            assert not torch.equal(full(model.state_dict())["decoder.head.weight"], state["decoder.head.weight"])

    cases = (("none", True, False), ("full", False, False), ("none", True, True))
    for_each(check, {f"{case}": case for case in cases})

    # Mismatches are reported as by torch itself.
    wrong = dict(state) | {"decoder.norm.weight": torch.zeros(7), "more": torch.zeros(1)}
    del wrong["decoder.head.weight"]
    texts = set()
    for model in (build(by_us), Model()):
        with pytest.raises(RuntimeError) as error:
            model.load_state_dict(wrong)
        texts.add(str(error.value))
    assert len(texts) == 1, texts
    found = build(by_us).load_state_dict({**state, "more": torch.zeros(1)}, strict=False)
    assert found.unexpected_keys == ["more"] and not found.missing_keys


def strip(state: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix("decoder."): value for name, value in state.items()}


# --- optimizer state


def full_states(model: Model, optimizer: Any, rank0_only: bool) -> dict[str, Any]:
    off = FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only)
    with FSDP.state_dict_type(model, FULL, FullStateDictConfig(), off):
        return FSDP.optim_state_dict(model, optimizer)


@pytest.mark.filterwarnings("ignore")
@on_ranks(2)
def test_optimizer_state():
    """`FSDP.optim_state_dict` and `optim_state_dict_to_load`, with which scripts save optimizers, raised an
    AttributeError, or matched state to the wrong parameters."""
    theirs, their_optimizer = model_and_optimizer(as_fsdp1)
    ours, our_optimizer = model_and_optimizer(by_us)

    def check_full(rank0_only: bool) -> None:
        expected = full_states(theirs, their_optimizer, rank0_only)
        with FSDP2():
            actual = full_states(ours, our_optimizer, rank0_only)
        assert set(actual) == set(expected)
        if actual:
            assert_same(actual["param_groups"], expected["param_groups"])
            assert_same({n: actual["state"][n] for n in expected["state"]}, expected["state"])
            assert len(actual["state"]) == len(expected["state"])

    for_each(check_full, {f"rank0_only={r}": (r,) for r in (False, True)})
    with FSDP2():
        osd = FSDP.optim_state_dict(ours, our_optimizer)  # full, on all ranks, in host memory
        assert_same(FSDP.optim_state_dict(ours, our_optimizer, our_optimizer.state_dict()), osd)
        whole = FSDP.full_optim_state_dict(ours, our_optimizer)
        assert_same(whole, osd if dist.get_rank() == 0 else {})
        sharded = FSDP.sharded_optim_state_dict(ours, our_optimizer)
        assert isinstance(sharded["state"]["decoder.head.weight"]["exp_avg"], DTensor)
        assert_same(full(sharded), osd)
        with FSDP.state_dict_type(ours, SHARDED, ShardedStateDictConfig(), ShardedOptimStateDictConfig()):
            assert_same(full(FSDP.optim_state_dict(ours, our_optimizer)), osd)
            only_shards = FSDP.optim_state_dict_to_load(ours, our_optimizer, sharded)
        first = FullOptimStateDictConfig(rank0_only=True)
        with FSDP.state_dict_type(ours, FULL, FullStateDictConfig(), first):
            sent = FSDP.optim_state_dict_to_load(
                model=ours, optim=our_optimizer, optim_state_dict=whole if dist.get_rank() == 0 else {}
            )
        loaded = {
            "of each rank": FSDP.optim_state_dict_to_load(ours, our_optimizer, osd),
            "sharded": only_shards,
            "of rank 0": sent,
            "shard_full": FSDP.shard_full_optim_state_dict(osd, ours, optim=our_optimizer),
            "scatter_full": FSDP.scatter_full_optim_state_dict(whole or None, ours, optim=our_optimizer),
            "flatten": FSDP.flatten_sharded_optim_state_dict(sharded, ours, our_optimizer),
        }
        model, optimizer = model_and_optimizer(by_us)
        reference, other = model_and_optimizer(None)
        step(reference, other, 7)
        for what, state in loaded.items():
            step(model, optimizer, 5)
            model.load_state_dict(ours.state_dict())
            optimizer.load_state_dict(state)
            assert_same(FSDP.optim_state_dict(model, optimizer), osd, what)
            step(model, optimizer, 7)
            assert_same(full(model.state_dict()), dict(reference.state_dict()), what)
        FSDP.optim_state_dict_to_load(model, optimizer, osd, load_directly=True)
        assert_same(FSDP.optim_state_dict(model, optimizer), osd)
        # without an optimizer: one over all parameters
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step(model, plain)
        of_plain = FSDP.optim_state_dict(model, plain)
        assert_same(
            FSDP.shard_full_optim_state_dict(of_plain, model)["param_groups"][0]["params"],
            list(range(len(list(model.parameters())))),
        )
        # to another key, with an unsharded model, as with FSDP1's own function
        single = Model()
        of_single = torch.optim.SGD(single.parameters(), lr=0.1, momentum=0.9)
        rekeyed = FSDP.rekey_optim_state_dict(of_plain, torch.distributed.fsdp.OptimStateKeyType.PARAM_ID, single)
        of_single.load_state_dict(rekeyed)
        momenta = {
            n: of_single.state[p]["momentum_buffer"] for n, p in single.named_parameters() if p in of_single.state
        }
        assert_same(momenta, {n: of_plain["state"][n]["momentum_buffer"] for n in momenta})

        # Errors.
        osd["param_groups"][0]["params"].append("decoder.gone")
        with pytest.raises(RuntimeError, match=r"does not have: decoder\.gone"):
            FSDP.optim_state_dict_to_load(ours, our_optimizer, osd)
        stranger = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        with pytest.raises(RuntimeError, match="2 parameters of the SGD are not the model's"):
            FSDP.optim_state_dict(ours, stranger)
        with pytest.raises(NotImplementedError, match="pass optim=optimizer"):
            FSDP.shard_full_optim_state_dict(osd, ours, [nn.Parameter(torch.ones(2))])
        with pytest.raises(NotImplementedError, match="is_named_optimizer"):
            FSDP.optim_state_dict_to_load(ours, our_optimizer, osd, is_named_optimizer=True)
        for parameter, values in our_optimizer.state.items():
            if isinstance(parameter, DTensor):
                values["exp_avg"] = torch.zeros_like(parameter.to_local())
        with pytest.raises(NotImplementedError, match=r"exp_avg of decoder.* is a plain tensor"):
            FSDP.optim_state_dict(ours, our_optimizer)


# --- methods and the class


def clipped(model: Model, max_norm: float, norm_type: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Two microbatches, the first without reduction of its gradients, then clipping, as in a script's loop."""
    model.zero_grad()
    clips = [each for each in model.modules() if isinstance(each, FSDP) and each.check_is_root()]
    assert clips == [model.decoder] == FSDP.fsdp_modules(model, root_only=True)
    assert FSDP.fsdp_modules(model) == [model.decoder, *model.decoder.blocks]
    with model.decoder.no_sync():
        model(tokens(2 + dist.get_rank())).square().mean().backward()
    model(tokens(4 + dist.get_rank())).square().mean().backward()
    norm = model.decoder.clip_grad_norm_(max_norm, norm_type)
    inner = model.decoder.blocks[0]
    with pytest.raises(RuntimeError, match="clip_grad_norm_"):
        inner.clip_grad_norm_(max_norm)
    with pytest.raises(RuntimeError, match="no_sync"), inner.no_sync():
        pass
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.step()
    with FSDP.state_dict_type(model, FULL):
        return float(norm), dict(model.state_dict())


@pytest.mark.filterwarnings("ignore")
@on_ranks(2)
def test_methods_of_a_script():
    """`unit.clip_grad_norm_` and `unit.no_sync` in a script's own loop raised an AttributeError, or clipped gradients
    by each rank's own norm."""

    def check(max_norm: float, norm_type: Any) -> None:
        results = []
        for shard, under in ((as_fsdp1, nullcontext), (by_us, FSDP2)):
            torch.manual_seed(0)
            model = Model()
            shard(model, "cpu")
            with under():
                results.append(clipped(model, max_norm, norm_type))
        (their_norm, expected), (our_norm, actual) = results
        assert our_norm == pytest.approx(their_norm, rel=1e-6)
        torch.testing.assert_close(actual, expected)

    for_each(check, {f"{m} {n}": (m, n) for m, n in ((0.01, 2.0), (0.01, "inf"))})
    model = Model()
    by_us(model, "cpu")
    with FSDP2(), pytest.raises(NotImplementedError, match="register_comm_hook: fully_shard reduces gradients itself"):
        model.decoder.register_comm_hook(None, lambda state, grad: None)


def unwrapped(module: Any) -> Any:
    while isinstance(module, FSDP):
        module = module.module
    return module


@pytest.mark.filterwarnings("ignore")
@on_ranks(2)
def test_isinstance():
    """`if isinstance(module, FSDP): module.clip_grad_norm_(1.0)` finds the sharded modules in scripts; the branch was
    silently skipped."""
    import accelerate.utils
    import torch.distributed.checkpoint.state_dict as of_torch
    from torch.distributed.fsdp import fully_sharded_data_parallel as defining

    real = defining.FullyShardedDataParallel
    assert FSDP is real
    model = Model()
    by_us(model, "cpu")
    root, block = model.decoder, model.decoder.blocks[0]
    script = types.ModuleType("a_script")
    script.FSDP = real  # imported before install
    sys.modules["a_script"] = script
    with FSDP2():
        script_fsdp, late = script.FSDP, torch.distributed.fsdp.FullyShardedDataParallel
        for cls in (FSDP, script_fsdp, late):
            assert isinstance(root, cls) and isinstance(block, (nn.Linear, cls)) and issubclass(type(root), cls)
            assert not isinstance(model, cls) and not isinstance(block.fc_in, cls) and not issubclass(Block, cls)
        assert FSDP.__name__ == "FullyShardedDataParallel" and FSDP.__module__ == real.__module__
        # torch and Composer see the original class
        assert of_torch.FSDP is real and not isinstance(root, of_torch.FSDP)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)
        assert bool(state) == (dist.get_rank() == 0)
        get_optimizer_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert accelerate.utils.extract_model_from_parallel(root) is root
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match="replace `while` by `if`"):
                unwrapped(root)
        # FSDP1's own objects are still instances of FSDP1
        theirs = FSDP(nn.Linear(3, 4), device_id=torch.device("cpu"), use_orig_params=True)
        assert type(theirs) is real and isinstance(theirs, FSDP) and isinstance(theirs, real)
        assert type(theirs.module) is nn.Linear and not isinstance(theirs.module, FSDP)
        for around in (theirs, nn.ModuleList([theirs])):
            with FSDP.summon_full_params(around):
                assert theirs.weight.shape == (4, 3)
        assert theirs.weight.shape != (4, 3)
        theirs(torch.ones(2, 3)).sum().backward()
        with FSDP.state_dict_type(theirs, FULL):
            assert theirs.state_dict()["weight"].shape == (4, 3)

        class Own(FSDP):
            """A script's subclass."""

        own = Own(nn.Linear(3, 4), device_id=torch.device("cpu"))
        assert type(own) is Own and isinstance(own, real) and not isinstance(root, Own) and not issubclass(real, Own)
    assert FSDP is real and script.FSDP is real and torch.distributed.fsdp.FullyShardedDataParallel is real
    del sys.modules["a_script"]
    assert not isinstance(root, FSDP) and isinstance(theirs, FSDP) and isinstance(own, FSDP)


# --- saving by hand


def check_plain_save(folder: str) -> list[str]:
    from composer_fsdp2.compat import fsdp2
    from composer_fsdp2.fsdp1.attributes import log_replacement

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    model, _ = model_and_optimizer(by_us)
    log = logging.getLogger("composer_fsdp2")
    log.addHandler(handler)
    log_replacement.cache_clear()  # an earlier test may have logged it
    with fsdp2():  # torch.save is a name in a module that the oracle's FSDP2 does not patch
        torch.save({"model": get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))}, io.BytesIO())
        torch.distributed.checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder)
        assert not lines
        for _ in range(2):
            torch.save(model.state_dict(), io.BytesIO())
            torch.save({"model": model.state_dict(), "optimizer": 1}, io.BytesIO())
    log.removeHandler(handler)
    return lines


def test_plain_save(tmp_path: Path):
    """`torch.save(model.state_dict(), path)` on rank 0 saved the full model under FSDP1; now it saves rank 0's
    shards."""
    for lines in run_ranks(check_plain_save, 2, str(tmp_path)):
        [line] = lines
        assert "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True" in line


@pytest.mark.filterwarnings("ignore")
@on_ranks(2)
def test_save_pretrained(folder: str):
    """Each idiom of scripts saves a folder for from_pretrained; a call without a state dict failed, or saved rank 0's
    shards."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    torch.manual_seed(0)
    config = GPT2Config(n_embd=16, n_head=2, n_layer=2, n_positions=32, vocab_size=67, use_cache=False)
    inner = GPT2LMHeadModel(config)
    inner.fsdp_wrap_fn = lambda module: isinstance(module, GPT2Block)
    expected = {name: value.detach().clone() for name, value in inner.state_dict().items()}
    model = nn.ModuleList([inner])
    prepare_fully_shard(model, None, {"mixed_precision": "FULL"}, device="cpu")

    def check(name: str, context: Callable[[], AbstractContextManager[None]], is_given: bool | None) -> None:
        path = f"{folder}/{name}"
        with FSDP2():
            with context():
                state = inner.state_dict() if is_given else None
                if is_given is None:
                    inner.save_pretrained(f"{path}{dist.get_rank() or ''}")
                elif dist.get_rank() == 0:
                    inner.save_pretrained(path, state_dict=state)
            dist.barrier()
        loaded = GPT2LMHeadModel.from_pretrained(path)
        assert loaded.lm_head.weight is loaded.transformer.wte.weight
        assert_same(dict(loaded.state_dict()), expected)

    whole = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
    for_each(
        check,
        {
            "full": ("full", lambda: FSDP.state_dict_type(model, FULL, whole), True),
            "full, bare": ("bare_full", lambda: FSDP.state_dict_type(model, FULL), None),
            "summoned": ("summoned", lambda: FSDP.summon_full_params(model, writeback=False), False),
        },
    )
    with FSDP2():
        for options in ({}, {"safe_serialization": False}, {"state_dict": inner.state_dict()}):
            with pytest.raises(RuntimeError, match=r"save_pretrained of a GPT2LMHeadModel.*summon_full_params"):
                inner.save_pretrained(f"{folder}/bare", **options)
