"""Trainer inside fsdp2(): every way to ask for FSDP goes to FSDP2, with FSDP1's losses, defaults and errors."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import assert_same, full_parameters, own_name
from support.oracle import FSDP1, FSDP2, UNSHARDED, Under
from support.ranks import run_ranks
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
    shards,
)
from support.training import FULL
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard

from composer_fsdp2 import ComposerFSDP2Error, ConfigError, prepare_fully_shard

pytestmark = pytest.mark.composer

CLIPPED_WITH_EVALS: dict[str, Any] = {"batches": 4, "clip": ("norm", 0.1), "eval_interval": "2ba"}


# --- every way to ask

Ask = Callable[[dict[str, Any]], Any]


def ways() -> dict[str, Ask]:
    """From FSDP1's keys to what a user may pass to the Trainer."""
    from composer.utils import FSDPConfig, ParallelismConfig

    return {
        "dict": dict,
        "FSDPConfig": lambda keys: FSDPConfig(**keys),
        "ParallelismConfig": lambda keys: ParallelismConfig(fsdp=FSDPConfig(**keys)),
        "FSDP_VERSION=2": dict,
    }


@contextlib.contextmanager
def environment_of(way: str) -> Iterator[None]:
    """``FSDP_VERSION=2`` where the way says so, and no warning from Composer that it drops a key."""
    version = {"FSDP_VERSION": "2"} if way == "FSDP_VERSION=2" else {}
    with mock.patch.dict("os.environ", version), warnings.catch_warnings():
        warnings.filterwarnings("error", ".*will be ignored.*")
        yield


def assert_alike(ours: Trained, theirs: Trained, what: str, tolerance: float = 1e-6) -> None:
    assert ours.shards == {"FSDPModule"}, f"{what}: sharded by {ours.shards}"
    difference = largest_difference(ours.losses, theirs.losses)
    assert difference <= tolerance, f"{what}: losses differ by {difference}\n{ours.losses}\n{theirs.losses}"
    torch.testing.assert_close(
        ours.parameters, theirs.parameters, rtol=1e-5, atol=1e-6, msg=lambda text: f"{what}: {text}"
    )


def check_curve(way: str, parallelism: Any, keys: dict[str, Any], options: dict[str, Any] | None = None) -> Any:
    """Beside FSDP1 with its keys; returns where the embedding lies."""
    from composer import Callback

    kept: set[bool] = set()
    where: list[Any] = []

    class Look(Callback):
        """Whether blocks hold their full parameters when the model's forward has ended."""

        def after_forward(self, state: Any, logger: Any) -> None:
            kept.update(not isinstance(each, DTensor) for each in state.model.model.blocks.parameters())

        def fit_start(self, state: Any, logger: Any) -> None:
            weight = state.model.model.wte.weight
            where.extend([weight.device_mesh.mesh.tolist(), weight.placements])

    options = CLIPPED_WITH_EVALS | (options or {})
    with environment_of(way):
        ours = fit(FSDP2, parallelism, callbacks=[Look()], **options)
    # Once for all that asks for the same.
    theirs = reference(fit, FSDP1, keys, **options)
    assert theirs.shards == {"FullyShardedDataParallel"}
    assert_alike(ours, theirs, way)
    if "NO_SHARD" not in keys.values():
        assert kept == {keys.get("sharding_strategy") in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")}
    return where


STRATEGIES = [{"sharding_strategy": each} for each in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")]
RECOMPUTING: tuple[dict[str, Any], ...] = (
    {"activation_checkpointing": True},
    {"activation_checkpointing": True, "activation_checkpointing_reentrant": False},
    {"activation_cpu_offload": True},
)


def check_curves() -> None:
    from composer.utils import FSDP2Config, ParallelismConfig

    full, zero_2, replicas = STRATEGIES
    of_fsdp2 = [FSDP2Config(reshard_after_forward=not keeps, activation_checkpointing=True) for keeps in (False, True)]
    cases: dict[str, tuple[Any, ...]] = {
        "FSDP2Config": ("FSDP2Config", of_fsdp2[False], full),
        "FSDP2Config, in a ParallelismConfig": ("FSDP2Config", ParallelismConfig(fsdp2=of_fsdp2[True]), zero_2),
        "replicas": ("dict", replicas, replicas),
        "replicas of a group": ("dict", replicas | {"process_group": [0, 1]}, replicas),
        "a group of its own": ("dict", full | {"process_group": "self"}, full | {"process_group": "self"}),
        "two groups of the optimizer": ("dict", {}, {}, {"optimizer": "groups"}),
    }
    for (way, ask), keys in zip(ways().items(), (full, zero_2) * 2, strict=True):
        cases[way] = (way, ask(keys | {"data_parallel_shard_degree": 2}), keys)
    for keys, recomputing in zip(STRATEGIES, RECOMPUTING, strict=True):
        cases[f"{recomputing}"] = ("dict", keys | recomputing, keys)
    for_each(check_curve, cases)


def test_every_way_to_ask_trains_on_fsdp2_with_fsdp1s_losses():
    """A dict, an FSDPConfig, a ParallelismConfig, FSDP_VERSION=2: the curve is FSDP1's, whatever the strategy, the
    group and the treatment of activations. Composer's own FSDP2 cannot shard this model, because its embedding is tied;
    its config object can stay."""
    run_ranks(check_curves, 2)


def check_unwrapped_child() -> None:
    from composer.utils import FSDP2Config, ParallelismConfig

    from composer_fsdp2._torch.repairs import repair_cpu_collectives

    repair_cpu_collectives()  # Composer's own FSDP2 would train on the sum of gradients over gloo

    def train(under: Under, says_it_itself: bool) -> tuple[set[str], Any]:
        model = build_model(tied=False)
        model.model._fsdp_wrap = False
        if says_it_itself:
            model.model.lm_head._fsdp_wrap = True
        config = ParallelismConfig(fsdp2=FSDP2Config(activation_checkpointing=True))
        trained = fit(under, config, model=model, tied=False)
        units = {own_name(f"{path}.") for path, module in model.named_modules() if isinstance(module, FSDPModule)}
        return units, trained

    for says_it_itself in (False, True):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The _fsdp_wrap attribute", DeprecationWarning)
            theirs, expected = train(UNSHARDED, says_it_itself)
        ours, found = train(FSDP2, says_it_itself)
        assert ours == theirs and len(ours) > 1, f"ours shards {ours}, Composer's FSDP2 {theirs}"
        assert ("model.lm_head." in ours) == says_it_itself
        # What lies outside is each rank's own, as there, so the ranks' losses are those of different models.
        assert_alike(found, expected, "a direct child that is not a unit")


def test_fsdp2_config_shards_below_a_child_that_is_not_wrapped():
    """`_fsdp_wrap = False` on the direct child means to FSDP2 that its blocks are sharded, each by itself; left out
    whole, as under FSDP1, their ranks would drift apart (or there would be nothing to shard)."""
    run_ranks(check_unwrapped_child, 2)


def check_reuse() -> None:
    from composer.utils import FSDP2Config, FSDPConfig, ParallelismConfig

    def check(config: Any) -> None:
        first, second = (fit(FSDP2, config, batches=2) for _ in range(2))
        assert first.shards == second.shards == {"FSDPModule"}
        assert first.losses == second.losses
        if isinstance(config, ParallelismConfig):
            assert type(config.fsdp2) in (FSDP2Config, type(None)), "the user's own object was given another class"

    configs = (FSDPConfig(), ParallelismConfig(fsdp=FSDPConfig()), ParallelismConfig(fsdp2=FSDP2Config()))
    for_each(check, {f"{config}": (config,) for config in configs})
    theirs = fit(FSDP1, config := FSDPConfig(), batches=2)
    assert_alike(fit(FSDP2, config, batches=2), theirs, "a configuration that FSDP1 had before")
    assert fit(FSDP1, config, batches=1).shards == {"FullyShardedDataParallel"}


def test_one_configuration_serves_several_trainers():
    """A sweep that passes the same object to each Trainer gets the same run each time."""
    run_ranks(check_reuse, 2)


def check_ignored_modules_and_schedules() -> str:
    from composer.optim import CosineAnnealingWithWarmupScheduler

    def run(under: Under) -> Trained:
        model, schedule = build_model(), CosineAnnealingWithWarmupScheduler("2ba", "1dur")
        ignored = {"ignored_modules": [model.model.blocks[0]]}
        return fit(under, ignored, model=model, optimizer="groups", schedulers=schedule, eval_interval="2ba")

    assert_alike(run(FSDP2), run(FSDP1), "ignored modules")
    with FSDP2():
        trainer = make_trainer({})
        scaler = trainer.state.scaler
        trainer.close()
    return type(scaler).__name__


def test_ignored_modules_and_schedules():
    """They mean what they meant under FSDP1, whose gradient scaler took whole and sharded gradients together; a
    schedule that holds the old groups of an optimizer, or a decay that is lost with them, would bend the curve."""
    assert run_ranks(check_ignored_modules_and_schedules, 2) == ["ShardedGradScaler"] * 2


def check_initialisation() -> None:
    from composer.utils import FSDP2Config

    expected = fit(FSDP2, {}, batches=2)
    told = FSDP2Config()
    told.sync_module_states = True  # the constructor does not take it

    def check(way: str, parallelism: Any, build: Any) -> None:
        with environment_of(way), FSDP2():
            trainer = make_trainer(parallelism, model=build(), batches=2)
            # As under Composer's own FSDP2, where a script asks what happened.
            assert bool(trainer.state.fsdp_config.sync_module_states) == (build is not build_model)
            trainer.fit()
            losses = result(trainer).losses
            trainer.close()
        assert losses == expected.losses, f"{losses}, {expected.losses}"

    cases = {
        "FSDP1's keys": ({"sync_module_states": True}, build_on_rank_0),
        "FSDP2Config": (FSDP2Config(), build_on_rank_0),
        "FSDP_VERSION=2": ({}, build_on_rank_0),
        "every rank's own": (FSDP2Config(), build_model),
        "FSDP2Config, told to": (told, build_unlike_on_rank_1),
    }
    for_each(check, {way: (way, *arguments) for way, arguments in cases.items()})


def test_values_of_rank_0_alone():
    """Only rank 0 has the memory for the whole model; FSDP2Config cannot say sync_module_states and need not."""
    run_ranks(check_initialisation, 2)


# --- replicas


def check_replicas() -> None:
    from composer.utils import FSDP2Config
    from torch.distributed.device_mesh import init_device_mesh

    degrees = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}
    zero2 = {"sharding_strategy": "_HYBRID_SHARD_ZERO2", **degrees}
    zero3 = {"sharding_strategy": "HYBRID_SHARD", **degrees}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def check(way: str, parallelism: Any, keys: dict[str, Any]) -> None:
        assert check_curve(way, parallelism, keys) == [[[0, 1], [2, 3]], (Replicate(), Shard(0))]

    cases = {
        "dict": ("dict", zero3, zero3),
        "FSDP_VERSION=2": ("FSDP_VERSION=2", zero2, zero2),
        "FSDP2Config": ("FSDP2Config", FSDP2Config(device_mesh=mesh), zero3),
    }
    for_each(check, cases)


def test_replica_degrees_become_a_2d_mesh():
    """HYBRID_SHARD keeps its replicas; Composer's own FSDP2 dropped them, and overrode a mesh that it was given."""
    run_ranks(check_replicas, 4)


def check_meshes_of_ranks_in_another_order() -> None:
    from composer.utils import FSDP2Config
    from torch.distributed.device_mesh import DeviceMesh

    def shape(ranks: list[Any]) -> tuple[int, ...]:
        with FSDP2():
            trainer = make_trainer(FSDP2Config(device_mesh=DeviceMesh("cpu", ranks)))
            shape = tuple(trainer.state.model.model.wte.weight.device_mesh.shape)
            trainer.close()
        return shape

    assert shape([1, 0, 3, 2]) == (4,)
    assert shape([[0, 2], [1, 3]]) == (2, 2)
    mine = [0, 1] if dist.get_rank() < 2 else [2, 3]
    with pytest.raises(ConfigError, match="makes 2 ranks"):
        shape(mine)
    with environment_of("FSDP_VERSION=2"), FSDP2():
        trainer = make_trainer({"device_mesh": DeviceMesh("cpu", [[0, 2], [1, 3]])})
        assert trainer.state.model.model.wte.weight.device_mesh.ndim == 2
        trainer.close()


def test_meshes_of_ranks_in_another_order():
    """A mesh of some of the ranks is refused, because Composer's State makes one of all; its ranks trained as if there
    were none."""
    run_ranks(check_meshes_of_ranks_in_another_order, 4)


def check_groups_of_a_run(folder: str) -> None:
    warnings.simplefilter("ignore")

    def run(name: str, config: dict[str, Any], expected: list[list[int]]) -> None:
        options = {"save_folder": f"{folder}/{name}", "save_interval": "2ba", "batches": 2}
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

    degrees = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}
    of_state = [[0, 2], [1, 3], [0, 1], [2, 3]]
    for_each(run, {"hybrid": ("hybrid", degrees, of_state), "one axis": ("one axis", {}, [])})


def test_a_run_has_the_process_groups_of_state_and_no_others(tmp_path: Path):
    """The first sharded save of HYBRID_SHARD opened communicators of a second mesh, when the GPU had no memory left."""
    run_ranks(check_groups_of_a_run, 4, str(tmp_path))


# --- defaults


def check_planners(folder: str) -> None:
    from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

    def check(way: str) -> None:
        save, load = DefaultSavePlanner(), DefaultLoadPlanner()
        for planner in (save, load):
            planner.create_local_plan = mock.Mock(wraps=planner.create_local_plan)
        keys = {"state_dict_type": "sharded", "save_planner": save, "load_planner": load}
        path = f"{folder}/{way}"
        with environment_of(way), FSDP2():
            fit(FSDP2, ways()[way](keys), batches=1, save_folder=path, save_interval="1ba")
            assert (save.create_local_plan.call_count, load.create_local_plan.call_count) == (1, 0)
            make_trainer(ways()[way](keys), load_path=f"{path}/ep0-ba1").close()
            assert (save.create_local_plan.call_count, load.create_local_plan.call_count) == (1, 1)

    for_each(check, {way: (way,) for way in ("ParallelismConfig", "FSDP_VERSION=2")})


def test_own_planners_save_and_load(tmp_path: Path):
    """A planner that renames or filters keys is used, not dropped as Composer's FSDP2 drops it."""
    run_ranks(check_planners, 2, str(tmp_path))


def check_defaults() -> dict[str, str]:
    from composer.utils import FSDP2Config

    asked = {way: ask({}) for way, ask in ways().items()} | {"FSDP2Config": FSDP2Config()}

    def check(way: str, parallelism: Any) -> str:
        with environment_of(way), FSDP2():
            trainer = make_trainer(parallelism)
            config = trainer.state.fsdp_config
            assert config.sharded_ckpt_prefix_dir == "ep{epoch}-ba{batch}", way
            trainer.close()
        return config.state_dict_type

    return for_each(check, {way: (way, parallelism) for way, parallelism in asked.items()})


def test_state_dict_type_defaults():
    """FSDP1's configurations go on writing one full file; only who asked for FSDP2 gets FSDP2Config's own default."""
    types = run_ranks(check_defaults, 2)[0]
    assert types == {
        "dict": "full",
        "FSDPConfig": "full",
        "ParallelismConfig": "full",
        "FSDP_VERSION=2": "sharded",
        "FSDP2Config": "sharded",
    }


# --- bad input


def footprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """What an error must leave as it was: objects by identity, tensors by value."""
    return [
        [(name, id(module), type(module).__name__) for name, module in model.named_modules()],
        [(name, id(parameter)) for name, parameter in model.named_parameters()],
        [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups],
        copy.deepcopy(model.state_dict()),
    ]


# What is wrong: the keys, and what the error must name.
BAD_KEYS: dict[str, tuple[dict[str, Any], str]] = {
    "two misspelt keys": ({"mixd_precision": "PURE", "stat_dict_type": "full"}, "state_dict_type"),
    "degrees that make 4 ranks": (
        {"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 2},
        "world size is 2",
    ),
    "a degree that does not divide": ({"data_parallel_replicate_degree": 3}, "data_parallel_replicate_degree 3"),
    "an unknown strategy": ({"sharding_strategy": "FULL_SHART"}, "FULL_SHARD"),
    "an unknown dtype": ({"mixed_precision": {"param_dtype": "bf61"}}, "bf16"),
    "two words for one thing": ({"sharding_strategy": "SHARD_GRAD_OP", "reshard_after_forward": True}, "keep one"),
}


def error_of(act: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """The message of the ComposerFSDP2Error that the call raises."""
    with pytest.raises(ComposerFSDP2Error) as raised:
        act(*arguments, **options)
    return str(raised.value)


def check_refused(build: Callable[[], Any], parallelism: Any, named: str) -> None:
    from composer.core import Precision
    from composer.devices import DeviceCPU
    from composer.utils import FSDPConfig

    from composer_fsdp2.compat import prepare_fsdp_module

    model = build()
    optimizer = build_optimizer("sgd", build_model() if "same model" in named else model)
    before = footprint(model, optimizer)
    for way in ("dict", "FSDP_VERSION=2"):
        with environment_of(way), FSDP2():
            message = error_of(make_trainer, parallelism, model=model, optimizer=optimizer)
        assert named in message, message
        assert_same(footprint(model, optimizer), before, way)
    if parallelism and isinstance(parallelism, dict):
        arguments = model, [optimizer], FSDPConfig(**parallelism), Precision.FP32, DeviceCPU()
        assert named in error_of(prepare_fsdp_module, *arguments)
        assert_same(footprint(model, optimizer), before)


def check_bad_input() -> None:
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


def test_bad_input_is_refused_on_every_rank_before_anything_is_changed():
    """A typo trained as FULL_SHARD without a word; now every rank says which key, and what was meant. A rank that goes
    on alone waits for ever; a model that is half sharded can be neither used nor saved."""
    run_ranks(check_bad_input, 2)


# --- full parameters, as scripts reach them


def train_with_surgery(under: Under, parallelism: dict[str, Any]) -> tuple[Any, list[Any]]:
    """A run whose callback reads and changes full weights and gradients, as it was written for FSDP1."""
    from composer import Callback, State

    seen: list[Any] = []

    class Surgery(Callback):
        def after_backward(self, state: State, logger: Any) -> None:
            root = state.model.model
            assert root.module is not None
            with FullyShardedDataParallel.summon_full_params(state.model, with_grads=True):
                norms = [p.grad.norm() for p in root.parameters() if p.grad is not None]
                seen.append(("gradients", float(torch.stack(norms).norm())))
                for parameter in root.parameters():
                    if parameter.grad is not None:
                        parameter.grad.clamp_(-0.05, 0.05)

        def batch_end(self, state: State, logger: Any) -> None:
            root = state.model.model
            with torch.no_grad(), root.summon_full_params(root, recurse=False):
                root.module.lm_head.weight.mul_(0.9)
            self.note("batch", state)

        def eval_end(self, state: State, logger: Any) -> None:
            self.note("eval", state)

        def note(self, when: str, state: State) -> None:
            root = state.model.model
            with root.summon_full_params(state.model, writeback=False, offload_to_cpu=False):
                assert root._fsdp_wrapped_module.lm_head.weight.shape == (13, 8)
                for name, parameter in state.model.named_parameters():
                    seen.append(
                        (when, own_name(name), tuple(parameter.shape), float(parameter.detach().square().sum()))
                    )
                    if when == "batch":  # not after an eval, where FSDP1 runs the next forward on what it discards
                        parameter.detach().zero_()

    trained = fit(under, parallelism, callbacks=[Surgery()], eval_interval="2ba")
    return trained, seen


def check_surgery() -> Any:
    keys = {"sharding_strategy": "SHARD_GRAD_OP"}
    return train_with_surgery(FSDP1, keys), train_with_surgery(FSDP2, keys)


def test_a_callback_written_for_fsdp1():
    """Clipping of full gradients, surgery on weights and reading them after an eval: the same run on FSDP2, without a
    line changed."""
    for (theirs, their_notes), (ours, our_notes) in run_ranks(check_surgery, 2):
        assert theirs.shards == {"FullyShardedDataParallel"} and ours.shards == {"FSDPModule"}
        assert largest_difference(ours.losses, theirs.losses) <= 1e-6
        assert [note[:-1] for note in our_notes] == [note[:-1] for note in their_notes]
        assert [note[-1] for note in our_notes] == pytest.approx([note[-1] for note in their_notes], rel=1e-5)
        assert {note[0] for note in our_notes} == {"gradients", "batch", "eval"}
        torch.testing.assert_close(ours.parameters, theirs.parameters, rtol=1e-5, atol=1e-7)


def check_static_form() -> None:
    original = vars(FullyShardedDataParallel)["summon_full_params"]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    whole = [parameter.detach().clone() for parameter in model.parameters()]
    prepare_fully_shard(model, None, FULL, device="cpu")
    with FSDP2():
        with FullyShardedDataParallel.summon_full_params(model, recurse=True, writeback=False):
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), whole, strict=True))
        with FullyShardedDataParallel.summon_full_params(nn.Linear(3, 4)):
            pass
        # A model of FSDP1's, say a reward model that a script wraps itself, is FSDP1's.
        other = nn.Linear(3, 4)
        weight = other.weight.detach().clone()
        wrapped = FullyShardedDataParallel(other, device_id=torch.device("cpu"), use_orig_params=True)
        assert wrapped.module.weight.shape != weight.shape
        for around in (wrapped, nn.ModuleList([wrapped])):
            with FullyShardedDataParallel.summon_full_params(around):
                assert torch.equal(wrapped.module.weight, weight)
        with wrapped.summon_full_params(wrapped):
            assert torch.equal(wrapped.module.weight, weight)
    assert vars(FullyShardedDataParallel)["summon_full_params"] is original
    with FullyShardedDataParallel.summon_full_params(model):
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_static_form():
    """`FullyShardedDataParallel.summon_full_params(model)` shows shards without the shim; with it a model that FSDP1
    wraps is still FSDP1's."""
    run_ranks(check_static_form, 2)


# --- runs that are not sharded


def check_unsharded() -> None:
    from torch.nn.parallel import DistributedDataParallel

    left = []
    for under in (contextlib.nullcontext, FSDP2):
        with under():
            trainer = make_trainer(None, batches=3, clip=("norm", 0.1))
            trainer.fit()
            assert isinstance(trainer.state.model, DistributedDataParallel)
            assert shards(trainer.state.model) == set()
            left.append((result(trainer).losses, full_parameters(trainer.state.model)))
            trainer.close()
    assert_same(left[1], left[0], in_bits=True)


def test_runs_without_fsdp_are_left_alone():
    """install() at the top of a shared script must not change what its DDP users get, clipping included."""
    run_ranks(check_unsharded, 2)
