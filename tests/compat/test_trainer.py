"""Trainer inside fsdp2(): each configuration of FSDP uses FSDP2, with FSDP1's losses, defaults and errors."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.callbacks import callback
from support.cases import for_each
from support.comparing import assert_same, own_name
from support.on_ranks import on_ranks
from support.oracle import FSDP1, FSDP2, UNSHARDED, Under
from support.references import reference
from support.trainers import (
    Trained,
    build_model,
    build_on_rank_0,
    build_optimizer,
    build_unlike_on_rank_1,
    fit,
    largest_difference,
    make_trainer,
    result,
)
from support.training import HSDP_2X2
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from composer_fsdp2 import ComposerFSDP2Error, ConfigError
from composer_fsdp2._torch.repairs import repair_cpu_collectives
from composer_fsdp2._torch.scaler import ShardedGradScaler
from composer_fsdp2.compat import prepare_fsdp_module

pytestmark = pytest.mark.composer

# A batch after an evaluation, which must not change the training state.
CLIPPED_WITH_EVALS: dict[str, Any] = {"batches": 3, "clip": ("norm", 0.1), "eval_interval": "2ba"}


# --- every form of configuration

Ask = Callable[[dict[str, Any]], Any]


def ways() -> dict[str, Ask]:
    """The forms in which a user may pass FSDP1's keys to the Trainer."""
    from composer.utils import FSDPConfig, ParallelismConfig

    return {
        "dict": dict,
        "FSDPConfig": lambda keys: FSDPConfig(**keys),
        "ParallelismConfig": lambda keys: ParallelismConfig(fsdp=FSDPConfig(**keys)),
        "FSDP_VERSION=2": dict,
    }


@contextlib.contextmanager
def environment_of(way: str) -> Iterator[None]:
    """Sets ``FSDP_VERSION=2`` for the form of this name; a Composer warning about an ignored key is an error."""
    version = {"FSDP_VERSION": "2"} if way == "FSDP_VERSION=2" else {}
    with mock.patch.dict("os.environ", version), warnings.catch_warnings():
        warnings.filterwarnings("error", ".*will be ignored.*")
        yield


def assert_alike(ours: Trained, theirs: Trained, what: str) -> None:
    assert ours.shards == {"FSDPModule"}, f"{what}: sharded by {ours.shards}"
    difference = largest_difference(ours.losses, theirs.losses)
    assert difference <= 1e-6, f"{what}: losses differ by {difference}\n{ours.losses}\n{theirs.losses}"
    torch.testing.assert_close(
        ours.parameters, theirs.parameters, rtol=1e-5, atol=1e-7, msg=lambda text: f"{what}: {text}"
    )


def check_curve(way: str, parallelism: Any, keys: dict[str, Any]) -> Any:
    """Compares the losses with FSDP1's for the same keys; returns the mesh and placements of the embedding."""
    kept: set[bool] = set()
    where: list[Any] = []

    def look(state: Any) -> None:
        """Whether blocks have full parameters at the end of the model's forward."""
        kept.update(not isinstance(each, DTensor) for each in state.model.model.blocks.parameters())

    def place(state: Any) -> None:
        weight = state.model.model.wte.weight
        where[:] = weight.device_mesh.mesh.tolist(), weight.placements

    watching = [callback(after_forward=look, fit_start=place)]
    with environment_of(way):
        ours = fit(FSDP2, parallelism, callbacks=watching, **CLIPPED_WITH_EVALS)
    # Trained once for all forms of the same keys.
    theirs = reference(fit, FSDP1, keys, **CLIPPED_WITH_EVALS)
    assert theirs.shards == {"FullyShardedDataParallel"}
    assert_alike(ours, theirs, way)
    if "NO_SHARD" not in keys.values():
        assert kept == {keys.get("sharding_strategy") in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")}
    return where


FULL_SHARD, ZERO_2, NO_SHARD = ({"sharding_strategy": each} for each in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"))
# One for each form.
RECOMPUTING: tuple[dict[str, Any], ...] = (
    {"activation_checkpointing": True},
    {"activation_checkpointing": True, "activation_checkpointing_reentrant": False},
    {"activation_cpu_offload": True},
    {},
)


@on_ranks(2)
def test_every_way_to_ask_trains_on_fsdp2_with_fsdp1s_losses(folder: str):
    """A dict, an FSDPConfig, a ParallelismConfig and FSDP_VERSION=2 train with FSDP1's losses, with each strategy,
    process group and setting of activation checkpointing. Composer's own FSDP2 cannot shard this model, because its
    embedding is tied; its config object can stay."""
    from composer.utils import FSDP2Config, ParallelismConfig

    of_fsdp2 = [FSDP2Config(reshard_after_forward=not keeps, activation_checkpointing=True) for keeps in (False, True)]
    own_group = FULL_SHARD | {"process_group": "self"}
    cases: dict[str, tuple[Any, ...]] = {
        "FSDP2Config": ("FSDP2Config", of_fsdp2[False], FULL_SHARD),
        "FSDP2Config, in a ParallelismConfig": ("FSDP2Config", ParallelismConfig(fsdp2=of_fsdp2[True]), ZERO_2),
        "replicas of a group": ("dict", NO_SHARD | {"process_group": [0, 1]}, NO_SHARD),
        "a group of its own": ("dict", own_group, own_group),
    }
    for (way, ask), keys, recomputing in zip(ways().items(), (FULL_SHARD, ZERO_2) * 2, RECOMPUTING, strict=True):
        cases[way] = (way, ask(keys | recomputing | {"data_parallel_shard_degree": 2}), keys)
    for_each(check_curve, cases)


@on_ranks(2)
def test_fsdp2_config_shards_below_a_child_that_is_not_wrapped(folder: str):
    """In FSDP2Config, `_fsdp_wrap = False` on the direct child means that each of its blocks is sharded separately. If
    the child were not sharded at all, as under FSDP1, its parameters would diverge between ranks, or nothing would be
    sharded."""
    from composer.utils import FSDP2Config, ParallelismConfig

    repair_cpu_collectives()  # Composer's own FSDP2 would train on the sum of gradients over gloo

    def train(under: Under, says_it_itself: bool) -> tuple[set[str], Any]:
        model = build_model(tied=False)
        model.model._fsdp_wrap = False
        if says_it_itself:
            model.model.lm_head._fsdp_wrap = True
        config = ParallelismConfig(fsdp2=FSDP2Config(activation_checkpointing=True))
        trained = fit(under, config, model=model, batches=2)
        units = {own_name(f"{path}.") for path, module in model.named_modules() if isinstance(module, FSDPModule)}
        return units, trained

    for says_it_itself in (False, True):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The _fsdp_wrap attribute", DeprecationWarning)
            theirs, expected = train(UNSHARDED, says_it_itself)
        ours, found = train(FSDP2, says_it_itself)
        assert ours == theirs and len(ours) > 1, f"ours shards {ours}, Composer's FSDP2 {theirs}"
        assert ("model.lm_head." in ours) == says_it_itself
        # Parameters outside of units are not synchronized, as in Composer, so the ranks' losses are of different
        # models.
        assert_alike(found, expected, "a direct child that is not a unit")


@on_ranks(2)
def test_one_configuration_serves_several_trainers(folder: str):
    """A sweep that passes the same object to each Trainer gets the same run each time."""
    from composer.utils import FSDP2Config, FSDPConfig, ParallelismConfig

    def check(config: Any) -> Trained:
        first, second = (fit(FSDP2, config, batches=2) for _ in range(2))
        assert first.shards == second.shards == {"FSDPModule"}
        assert first.losses == second.losses
        assert type(config.fsdp2) in (FSDP2Config, type(None)), "the user's own object was given another class"
        return first

    check(ParallelismConfig(fsdp2=FSDP2Config()))
    config = ParallelismConfig(fsdp=FSDPConfig())
    theirs = fit(FSDP1, config, batches=2)
    assert_alike(check(config), theirs, "a configuration that FSDP1 had before")
    assert fit(FSDP1, config, batches=1).shards == {"FullyShardedDataParallel"}


@on_ranks(2)
def test_ignored_modules_and_schedules(folder: str):
    """Ignored modules behave as under FSDP1, whose gradient scaler handled ignored and sharded gradients together. A
    schedule with references to the optimizer's old groups, or a lost weight decay, would change the losses."""
    from composer.optim import CosineAnnealingWithWarmupScheduler

    def run(under: Under) -> Trained:
        model, schedule = build_model(), CosineAnnealingWithWarmupScheduler("2ba", "1dur")
        ignored = {"ignored_modules": [model.model.blocks[0]]}
        return fit(under, ignored, model=model, optimizer="groups", schedulers=schedule, eval_interval="2ba")

    assert_alike(run(FSDP2), run(FSDP1), "ignored modules")
    with FSDP2():
        trainer = make_trainer({})
        assert type(trainer.state.scaler) is ShardedGradScaler
        trainer.close()


@on_ranks(2)
def test_values_of_rank_0_alone(folder: str):
    """With the full model on rank 0 only, FSDP2Config works although it has no sync_module_states."""
    from composer.utils import FSDP2Config

    expected = fit(FSDP2, {}, batches=1)
    told = FSDP2Config()
    told.sync_module_states = True  # the constructor does not take it

    def check(way: str, parallelism: Any, build: Any) -> None:
        with environment_of(way), FSDP2():
            trainer = make_trainer(parallelism, model=build(), batches=1)
            # As under Composer's own FSDP2, for a script that reads it.
            assert bool(trainer.state.fsdp_config.sync_module_states) == (build is not build_model)
            trainer.fit()
            ours = result(trainer)
            trainer.close()
        assert_same((ours.losses, ours.parameters), (expected.losses, expected.parameters), way)

    cases = {
        "FSDP1's keys": ({"sync_module_states": True}, build_on_rank_0),
        "FSDP2Config": (FSDP2Config(), build_on_rank_0),
        "FSDP_VERSION=2": ({}, build_on_rank_0),
        "every rank's own": (FSDP2Config(), build_model),
        "FSDP2Config, told to": (told, build_unlike_on_rank_1),
    }
    for_each(check, {way: (way, *arguments) for way, arguments in cases.items()})


# --- replicas


@on_ranks(4)
def test_replica_degrees_become_a_2d_mesh(folder: str):
    """HYBRID_SHARD keeps its replicas; Composer's own FSDP2 dropped them and ignored the user's mesh."""
    from composer.utils import FSDP2Config

    zero_2 = HSDP_2X2 | {"sharding_strategy": "_HYBRID_SHARD_ZERO2"}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def check(way: str, parallelism: Any) -> None:
        assert check_curve(way, parallelism, zero_2) == [[[0, 1], [2, 3]], (Replicate(), Shard(0))]

    of_fsdp2 = FSDP2Config(device_mesh=mesh, reshard_after_forward=False)
    given = {"dict": zero_2, "FSDP2Config": of_fsdp2}
    for_each(check, {way: (way, parallelism) for way, parallelism in given.items()})


@on_ranks(4)
def test_meshes_of_ranks_in_another_order(folder: str):
    """A mesh of some of the ranks is refused, because Composer's State creates one of all ranks; its ranks trained as
    if it did not exist."""
    from composer.utils import FSDP2Config

    def shape(parallelism: Any) -> tuple[int, ...]:
        with FSDP2():
            trainer = make_trainer(parallelism)
            shape = tuple(trainer.state.model.model.wte.weight.device_mesh.shape)
            trainer.close()
        return shape

    turned = DeviceMesh("cpu", [[0, 2], [1, 3]])
    assert shape(FSDP2Config(device_mesh=DeviceMesh("cpu", [1, 0, 3, 2]))) == (4,)
    assert shape(FSDP2Config(device_mesh=turned)) == (2, 2)
    mine = [0, 1] if dist.get_rank() < 2 else [2, 3]
    with pytest.raises(ConfigError, match="makes 2 ranks"):
        shape(FSDP2Config(device_mesh=DeviceMesh("cpu", mine)))
    with environment_of("FSDP_VERSION=2"):
        assert shape({"device_mesh": turned}) == (2, 2)


@on_ranks(4)
def test_a_run_has_the_process_groups_of_state_and_no_others(folder: str):
    """The first sharded save of HYBRID_SHARD created communicators of a second mesh when the GPU had no memory left."""
    warnings.simplefilter("ignore")

    def run(name: str, config: dict[str, Any], expected: list[list[int]]) -> None:
        options = {"save_folder": f"{folder}/{name}", "save_interval": "1ba", "batches": 1}
        new_group = mock.Mock(wraps=dist.new_group)
        with FSDP2(), contextlib.ExitStack() as stack:
            for module in (dist, dist.distributed_c10d, dist.device_mesh):
                stack.enter_context(mock.patch.object(module, "new_group", new_group))
            trainer = make_trainer(config | {"state_dict_type": "sharded"}, **options)
            trainer.fit()
            mesh = trainer.state.model.model.wte.weight.device_mesh
            assert mesh.get_all_groups() == trainer.state.device_mesh.get_all_groups()
            trainer.close()
        made = [[*call.args, call.kwargs.get("ranks")][0] for call in new_group.call_args_list]
        assert made == expected, f"{made}, expected {expected}"

    of_state = [[0, 2], [1, 3], [0, 1], [2, 3]]
    for_each(run, {"hybrid": ("hybrid", HSDP_2X2, of_state), "one axis": ("one axis", {}, [])})


# --- defaults


@on_ranks(2)
def test_own_planners_and_async_save(folder: str):
    """A planner that renames or filters keys is used, while Composer's FSDP2 drops it; a key of ours is used too."""

    def check(way: str) -> None:
        save, load = DefaultSavePlanner(), DefaultLoadPlanner()
        for planner in (save, load):
            planner.create_local_plan = mock.Mock(wraps=planner.create_local_plan)
        keys = {"state_dict_type": "sharded", "save_planner": save, "load_planner": load, "async_save": True}
        path = f"{folder}/{way}"
        with environment_of(way), FSDP2():
            fit(FSDP2, ways()[way](keys), batches=1, save_folder=path, save_interval="1ba")
            assert (save.create_local_plan.call_count, load.create_local_plan.call_count) == (1, 0)
            trainer = make_trainer(ways()[way](keys), load_path=f"{path}/ep0-ba1")
            assert trainer.state.fsdp_config.async_save is True
            trainer.close()
            assert (save.create_local_plan.call_count, load.create_local_plan.call_count) == (1, 1)

    for_each(check, {way: (way,) for way in ("ParallelismConfig", "FSDP_VERSION=2")})


@on_ranks(2)
def test_state_dict_type_defaults(folder: str):
    """FSDP1's configurations still save one full file; FSDP2Config's own default applies only to FSDP2Config."""
    from composer.utils import FSDP2Config

    def check(way: str, parallelism: Any, expected: str) -> None:
        with environment_of(way), FSDP2():
            trainer = make_trainer(parallelism)
            config = trainer.state.fsdp_config
            trainer.close()
        assert (config.state_dict_type, config.sharded_ckpt_prefix_dir) == (expected, "ep{epoch}-ba{batch}")

    asked = {way: ask({}) for way, ask in ways().items()} | {"FSDP2Config": FSDP2Config()}
    types = ("full", "full", "full", "sharded", "sharded")
    for_each(check, {way: (way, given, kind) for (way, given), kind in zip(asked.items(), types, strict=True)})


# --- bad input


def footprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """The state that an error must not change: objects by identity, tensors by value."""
    return [
        [(name, id(module), type(module).__name__) for name, module in model.named_modules()],
        [(name, id(parameter)) for name, parameter in model.named_parameters()],
        [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups],
        copy.deepcopy(model.state_dict()),
    ]


# For each case, the keys, and the text that the error must contain.
BAD_KEYS: dict[str, tuple[dict[str, Any], str]] = {
    "two misspelt keys": ({"mixd_precision": "PURE", "stat_dict_type": "full"}, "state_dict_type"),
    "degrees that make 4 ranks": (
        {"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 2},
        "world size is 2",
    ),
    "a degree that does not divide": ({"data_parallel_replicate_degree": 3}, "data_parallel_replicate_degree 3"),
    "an unknown strategy": ({"sharding_strategy": "FULL_SHART"}, "FULL_SHARD"),
    "an unknown dtype": ({"mixed_precision": {"param_dtype": "bf61"}}, "bf16"),
    "a misspelt class": (
        {"wrap_policy": {"transformer_layer_cls_to_wrap": ["Blok"]}},
        "is a Blok; did you mean Block?",
    ),
    "a word for a flag": ({"async_save": "yes"}, "true or false"),
    "two words for one thing": ({"sharding_strategy": "SHARD_GRAD_OP", "reshard_after_forward": True}, "keep one"),
}


def check_refused(build: Callable[[], Any], parallelism: Any, named: str) -> None:
    from composer.core import Precision
    from composer.devices import DeviceCPU
    from composer.utils import FSDPConfig

    model = build()
    optimizer = build_optimizer("sgd", build_model() if "same model" in named else model)
    before = footprint(model, optimizer)
    for way in ("dict", "FSDP_VERSION=2"):
        with environment_of(way), FSDP2(), pytest.raises(ComposerFSDP2Error, match=re.escape(named)):
            make_trainer(parallelism, model=model, optimizer=optimizer)
        assert_same(footprint(model, optimizer), before, way)
    if parallelism and isinstance(parallelism, dict):
        with pytest.raises(ComposerFSDP2Error, match=re.escape(named)):
            prepare_fsdp_module(model, [optimizer], FSDPConfig(**parallelism), Precision.FP32, DeviceCPU())
        assert_same(footprint(model, optimizer), before)


@on_ranks(2)
def test_bad_input_is_refused_on_every_rank_before_anything_is_changed(folder: str):
    """A misspelt key silently trained as FULL_SHARD; now every rank raises, names the key and suggests the correct one.
    Otherwise one rank alone would wait forever, and a partially sharded model can be neither used nor saved."""
    from composer.utils import FSDPConfig, ParallelismConfig, TPConfig

    def wrapped() -> Any:
        model = build_model()
        model.model.blocks[1] = FullyShardedDataParallel(model.model.blocks[1], device_id=torch.device("cpu"))
        return model

    def failing_on_rank_1() -> Any:
        model = build_model()
        if dist.get_rank() == 1:
            model.model.fsdp_wrap_fn = lambda module: "yes"
        return model

    tp = ParallelismConfig(fsdp=FSDPConfig(), tp=TPConfig(tensor_parallel_degree=2))
    cases: dict[str, tuple[Callable[[], Any], Any, str]] = {
        **{name: (build_model, keys, named) for name, (keys, named) in BAD_KEYS.items()},
        "tensor parallelism": (build_model, tp, "parallelism_config.tp"),
        "FSDP1 inside": (wrapped, {}, "model.blocks.1' is sharded already, by FSDP1"),
        "another model's optimizer": (build_model, {}, "same model must be passed"),
        "a wrap function that fails on one rank": (failing_on_rank_1, {}, ("rank 1", "'yes'")[dist.get_rank()]),
    }
    for_each(check_refused, cases)


# --- full parameters in scripts


def train_with_surgery(under: Under, parallelism: dict[str, Any]) -> tuple[Any, list[Any]]:
    """A run whose callback, written for FSDP1, reads and changes full weights and gradients."""
    seen: list[Any] = []

    def after_backward(state: Any) -> None:
        root = state.model.model
        assert root.module is not None
        with FullyShardedDataParallel.summon_full_params(state.model, with_grads=True):
            gradients = [p.grad for p in root.parameters() if p.grad is not None]
            seen.append(("gradients", float(nn.utils.get_total_norm(gradients))))
            for gradient in gradients:
                gradient.clamp_(-0.05, 0.05)

    def batch_end(state: Any) -> None:
        root = state.model.model
        with torch.no_grad(), root.summon_full_params(root, recurse=False):
            root.module.lm_head.weight.mul_(0.9)
        note("batch", state)

    def note(when: str, state: Any) -> None:
        root = state.model.model
        with root.summon_full_params(state.model, writeback=False, offload_to_cpu=False):
            assert root._fsdp_wrapped_module.lm_head.weight.shape == (13, 8)
            for name, parameter in state.model.named_parameters():
                seen.append((when, own_name(name), tuple(parameter.shape), float(parameter.detach().square().sum())))
                if when == "batch":  # not after an evaluation: FSDP1 runs the next forward on values that it discards
                    parameter.detach().zero_()

    surgery = callback(after_backward=after_backward, batch_end=batch_end, eval_end=functools.partial(note, "eval"))
    return fit(under, parallelism, callbacks=[surgery], batches=3, eval_interval="2ba"), seen


@on_ranks(2)
def test_a_callback_written_for_fsdp1(folder: str):
    """A callback that clips full gradients, changes weights and reads them after an evaluation trains the same on FSDP2
    without changes."""
    keys = {"sharding_strategy": "SHARD_GRAD_OP"}
    (theirs, their_notes), (ours, our_notes) = (train_with_surgery(under, keys) for under in (FSDP1, FSDP2))
    assert theirs.shards == {"FullyShardedDataParallel"}
    assert_alike(ours, theirs, "surgery")
    assert [note[:-1] for note in our_notes] == [note[:-1] for note in their_notes]
    assert [note[-1] for note in our_notes] == pytest.approx([note[-1] for note in their_notes], rel=1e-5)
    assert {note[0] for note in our_notes} == {"gradients", "batch", "eval"}


# --- unsharded runs


@on_ranks(2)
def test_runs_without_fsdp_are_left_alone(folder: str):
    """install() at the top of a shared script must not change DDP runs, including clipping and SWA."""
    from composer.algorithms import SWA

    warnings.simplefilter("ignore")
    left = []
    for under in (contextlib.nullcontext, FSDP2):
        with under():
            trainer = make_trainer(None, batches=6, clip=("norm", 0.1), algorithms=[SWA("0.2dur", "0.5dur", "1ba")])
            trainer.fit()
            assert isinstance(trainer.state.model, DistributedDataParallel)
            assert any(getattr(each, "swa_completed", False) for each in trainer.state.algorithms)
            left.append(result(trainer))
            trainer.close()
    assert left[0].shards == set() and len(left[0].losses) == 6
    assert_same(left[1], left[0], in_bits=True)
