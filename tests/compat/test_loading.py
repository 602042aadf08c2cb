"""The Trainer's load_path and its options on FSDP2: the checkpoint is loaded completely, or an error names the
reason."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.callbacks import callback, stateful
from support.cases import for_each
from support.comparing import assert_same, full_parameters
from support.examples import IS_THOROUGH
from support.fsdp1_checkpoints import Layout, _save, _writing, next_losses
from support.legacy import (
    FLAT,
    FOLDER,
    KINDS,
    WITHOUT_OPTIMIZER,
    checkpoint_of,
    legacy_model,
    next_steps,
    recorded,
)
from support.loading import a_trainer, quiet, store_class
from support.on_ranks import on_ranks
from support.oracle import FSDP1, FSDP2
from support.ranks import run_ranks
from support.saved import read
from support.trainers import (
    as_machines_of_one_rank,
    build_model,
    checkpoint_error_of,
    fit,
    full_optimizer_state,
    largest_difference,
    make_trainer,
)
from support.training import HSDP_2X2
from torch import nn

pytestmark = pytest.mark.composer

OPTIMIZER = "DecoupledAdamW"
SHARDED = {"state_dict_type": "sharded"}
StateDict = dict[str, Any]


# --- a file's contents, as torch reads them


def saved(path: Path) -> StateDict:
    """A checkpoint as full unsharded tensors, with the optimizers at the key that Composer uses now."""
    contents = read(path)
    if "optimizers" in contents:
        contents["state"]["optimizers"] = contents.pop("optimizers")
    return contents


@functools.cache
def saved_by(kind: str) -> StateDict:
    contents = saved(checkpoint_of(kind))
    if kind in FLAT:  # flat parameters have no names; the full file of the same run has the model's names
        contents["state"]["model"] = saved_by("c172/full")["state"]["model"]
    return contents


def reload(trainer: Any, path: Path | str, **options: Any) -> Any:
    """Calls Composer's ``load_checkpoint``, as the Trainer does, for an existing trainer."""
    from composer.utils import checkpoint

    return checkpoint.load_checkpoint(str(path), trainer.state, trainer.logger, **options)


def assert_loaded(trainer: Any, expected: StateDict, what: str) -> None:
    """Weights, buffers and optimizer state equal the file's; anything missing from the file equals the model's own."""
    weights = {**trainer.own, **expected["state"].get("model", {})}
    found = {**full_parameters(trainer.state.model), **dict(trainer.state.model.named_buffers())}
    assert_same(found, {name: weights[name] for name in found}, what)
    if trainer.state.optimizers:
        optimizer = expected["state"].get("optimizers", {}).get(OPTIMIZER, {})
        assert_same(full_optimizer_state(trainer), optimizer.get("state", {}), f"{what}: optimizer")
        groups = zip(trainer.state.optimizers[0].param_groups, optimizer.get("param_groups", []), strict=False)
        for group, theirs in groups:
            keys = theirs.keys() - {"params", "betas"}
            assert_same({key: group[key] for key in keys}, {key: theirs[key] for key in keys}, what)
            assert list(group["betas"]) == list(theirs["betas"]), what


def snapshot(trainer: Any) -> tuple[Any, Any, int]:
    state = trainer.state
    return full_parameters(state.model), full_optimizer_state(trainer), int(state.timestamp.batch)


def on_rank_0(work: Callable[[], Any]) -> None:
    if dist.get_rank() == 0:
        work()
    dist.barrier()


def edited(path: Path, edit: Callable[[StateDict], Any], source: str = "c220/sharded") -> Path:
    """A monolithic file with the contents of a fixture, changed by ``edit``. Called on all ranks."""

    def write() -> None:
        contents = saved(checkpoint_of(source))
        edit(contents)
        torch.save(contents, path)

    on_rank_0(write)
    return path


# --- old files


# For each world size, the configurations of the loading runs; the writing runs had 2 ranks. Each kind of file is loaded
# into one configuration.
CONFIGS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{}, {**SHARDED, "activation_checkpointing": True}, {"sharding_strategy": "NO_SHARD"}],
    4: [HSDP_2X2, SHARDED],
}
# tests/checkpoint/test_load_properties.py tests how a file's shards map to other numbers of ranks.
KINDS_FOR = {1: [*KINDS][::2], 2: [*KINDS], 4: ["c220/sharded", "c172/local-flat"]}


def check_old_files(world_size: int) -> None:
    # Another world size or a newer torch sums in another order.
    tolerance = 1e-6 if world_size == 2 else 2e-6

    def check(kind: str, config: dict[str, Any]) -> None:
        expected = saved_by(kind)
        # The path of a link, a folder or the file.
        path = FOLDER / kind / "latest-rank{rank}.pt"
        if config:
            path = FOLDER / kind if "state_dict_type" in config else checkpoint_of(kind)
        what = f"{path}"
        with a_trainer(kind, dict(config), load_path=str(path)) as trainer:
            assert_loaded(trainer, expected, what)
            timestamp, theirs = trainer.state.timestamp.state_dict(), expected["state"]["timestamp"]["Timestamp"]
            assert_same({key: timestamp[key] for key in theirs}, theirs, what)
            if world_size == 2:
                assert_same(trainer._rng_state, expected["rng"], f"{what}: rng")
            assert trainer.state.rank_zero_seed == expected["state"]["rank_zero_seed"]
            has_optimizer = kind not in WITHOUT_OPTIMIZER
            model, [optimizer] = trainer.state.model, trainer.state.optimizers
            logits, losses = next_steps(model, optimizer if has_optimizer else None)
            torch.testing.assert_close(logits, recorded(kind)["logits"], rtol=0, atol=2e-6)
            if has_optimizer:
                worst = max(abs(a - b) for a, b in zip(losses, recorded(kind)["losses"], strict=True))
                assert worst <= tolerance, f"{what}: {losses}"

    configs = itertools.cycle(CONFIGS[world_size])
    kinds = KINDS if IS_THOROUGH else KINDS_FOR[world_size]
    for_each(check, {f"{kind}, {config}": (kind, config) for kind, config in zip(kinds, configs, strict=False)})


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_old_files_through_load_path(world_size: int):
    """Files of Composer 0.17 and 0.22 load bit for bit, whatever the loading run's state_dict_type, on as many or other
    ranks, and training continues as in the run that wrote them."""
    run_ranks(check_old_files, world_size, world_size)


@on_ranks(2)
def test_weights_alone(folder: str):
    """A fine-tuning run loads the weights and starts its own timestamp; an evaluation needs no optimizer."""

    def check(kind: str) -> None:
        expected = {"state": {"model": saved_by(kind)["state"]["model"]}}
        path = str(checkpoint_of(kind))
        with a_trainer(kind, load_path=path, load_weights_only=True) as trainer:
            assert_loaded(trainer, expected, kind)
            assert int(trainer.state.timestamp.batch) == 0
            assert trainer._rng_state is None
        # Without training the run needs no optimizer (Composer creates a default one).
        with a_trainer(kind, load_path=path, optimizer=None) as trainer:
            assert_loaded(trainer, expected, kind)
            assert int(trainer.state.timestamp.batch) == 3

    for_each(check, {kind: (kind,) for kind in ("c220/sharded", "c172/local-flat")})


# --- load_ignore_keys


def without_first_block(contents: StateDict) -> None:
    for name in [name for name in contents["state"]["model"] if ".blocks.0." in name]:
        del contents["state"]["model"][name]


def with_blocks_swapped(contents: StateDict) -> None:
    model = contents["state"]["model"]
    for name in [name for name in model if ".blocks.0." in name]:
        other = name.replace(".0.", ".1.")
        model[name], model[other] = model[other], model[name]


def with_own_tensors(contents: StateDict) -> None:
    contents["state"]["model"]["model.blocks.0.ln.weight"] = torch.full((6,), 0.5)
    state = contents["state"]["optimizers"][OPTIMIZER]["state"]
    state["model.blocks.1.up.weight"]["exp_avg"] = torch.arange(18.0 * 6).view(18, 6)


def with_own_rate(contents: StateDict) -> None:
    contents["state"]["optimizers"][OPTIMIZER]["param_groups"][0]["lr"] = 0.25
    del contents["state"]["timestamp"], contents["state"]["metadata"], contents["rng"]


# In any layout; the oldest sharded checkpoints have the optimizer beside the state.
IGNORED: dict[str, list[list[str] | Callable[[StateDict], None]]] = {
    "c172/full": [["state/model/*"], without_first_block, with_own_tensors],
    "c172/sharded": [
        ["state/optimizers"],
        ["state/optimizers/*/state/model.blocks.1.*", "state/schedulers", "state/timestamp"],
        with_own_rate,
    ],
    "c220/sharded": [["state/model/model.blocks.0.*", "rng"], with_blocks_swapped],
}


@on_ranks(2)
def test_ignored_keys(folder: str):
    """Lists and functions act on any layout as on Composer's dict: they remove, rename, exchange and replace
    entries."""
    from composer.utils.checkpoint import glob_filter

    def check(kind: str, ignore: Any) -> None:
        expected = saved(checkpoint_of(kind))
        (glob_filter(ignore) if isinstance(ignore, list) else ignore)(expected)
        with a_trainer(kind, load_path=str(checkpoint_of(kind)), load_ignore_keys=ignore) as trainer:
            assert_loaded(trainer, expected, kind)
            assert int(trainer.state.timestamp.batch) == (3 if "timestamp" in expected["state"] else 0)
            assert (trainer._rng_state is None) == ("rng" not in expected)

    for_each(
        check,
        {
            f"{kind}, {getattr(ignore, '__name__', ignore)}": (kind, ignore)
            for kind, cases in IGNORED.items()
            for ignore in cases
        },
    )

    def halves(contents: StateDict) -> None:
        model = contents["state"]["model"]
        model["model.wte.weight"] = model["model.wte.weight"] / 2

    with a_trainer("c220/sharded") as trainer:
        before = snapshot(trainer)
        error = checkpoint_error_of(lambda: reload(trainer, checkpoint_of("c220/sharded"), ignore_keys=halves))
        assert "state.model.model.wte.weight" in error and "without their data" in error, error
        assert_same(snapshot(trainer), before, "after an error")


# --- mismatches


@on_ranks(2)
def test_strict_model_weights(folder: str):
    """Every rank refuses a file without one of the weights before anything changes; with strict_model_weights=False the
    rest loads. tests/checkpoint/test_load.py has the other mismatches and their messages."""
    wte, head = "model.wte.weight", "model.lm_head.weight"

    def spoil(contents: StateDict) -> None:
        del contents["state"]["model"][wte], contents["state"]["model"][head]

    spoilt = edited(Path(folder, "spoilt.pt"), spoil)
    with a_trainer("c220/sharded") as trainer:
        before = snapshot(trainer)
        error = checkpoint_error_of(lambda: reload(trainer, spoilt))
        assert f"missing: {wte} = {head}" in error and "load_strict_model_weights" in error, error
        assert_same(snapshot(trainer), before, "after an error")
        reload(trainer, spoilt, strict_model_weights=False)
        assert_loaded(trainer, saved(spoilt), "not strict")
        assert_same(full_parameters(trainer.state.model)[wte], trainer.own[wte], "a missing weight")


@on_ranks(2)
def test_machines_with_different_files(folder: str):
    """After a crash one machine's disk may have an older checkpoint, or none; the ranks never resume from different
    steps."""
    rank = dist.get_rank()
    own = Path(folder, str(rank))
    own.mkdir()
    contents = saved(checkpoint_of("c220/full"))
    contents["state"]["timestamp"]["Timestamp"]["batch"] += rank
    torch.save(contents, own / "steps.pt")
    if rank == 0:
        torch.save(contents, own / "gone.pt")
    with a_trainer("c220/full") as trainer, as_machines_of_one_rank():
        before = snapshot(trainer)
        for name, printed in {"steps.pt": "different steps", "gone.pt": "gone.pt"}.items():
            error = checkpoint_error_of(lambda: reload(trainer, own / name))  # noqa: B023
            assert printed in error, error
            assert_same(snapshot(trainer), before, name)


@on_ranks(2)
def test_a_save_folder_for_each_rank(folder: str):
    """In Composer's test_fsdp_full_state_dict_load each rank names rank{rank}.pt in its own temporary folder, and only
    rank 0 wrote one. FSDP1 loads it; ours found no file on rank 1."""
    saves = Path(folder, str(dist.get_rank()))
    options: dict[str, Any] = {"optimizer": "adamw", "batches": 3, "run_name": "own-folders"}
    saving = {"save_folder": str(saves), "save_interval": "2ba", "save_filename": "ba{batch}-rank{rank}.pt"}
    with quiet():
        whole = fit(FSDP2, {}, **saving, **options)
        assert (saves / "ba2-rank0.pt").is_file() == (dist.get_rank() == 0), "a case without a difference"
        for monolith in (False, True):
            config = {"load_monolith_rank0_only": monolith, "sync_module_states": monolith}
            resumed = fit(FSDP2, config, load_path=str(saves / "ba2-rank{rank}.pt"), **options)
            assert resumed.losses == whole.losses[2:], f"monolith: {monolith}"
            assert_same(resumed.parameters, whole.parameters)


# --- state besides model and optimizer


@on_ranks(2)
def test_callbacks_algorithms_and_schedulers(folder: str):
    """A callback, scheduler or optimizer that was added or removed since the save does not stop a load, as it does in
    stock DCP."""
    from composer.optim import LinearWithWarmupScheduler

    def edit(contents: StateDict) -> None:
        contents["state"]["callbacks"] |= {"InBoth": {"count": 5}, "InTheFile": {"count": 6}}
        contents["state"]["algorithms"] = [("BlurPool", {"repr": "BlurPool()"})]
        contents["state"]["schedulers"] = {"LambdaLR": {"last_epoch": 3, "_step_count": 4, "lr_lambdas": [None]}}

    path = str(edited(Path(folder, "rest.pt"), edit))
    both, new = (stateful(name, {"count": 0}) for name in ("InBoth", "InTheRun"))
    with a_trainer("c220/sharded", callbacks=[both, new], load_path=path) as trainer:
        assert (both.state["count"], new.state["count"]) == (5, 0)
        assert [type(algorithm).__name__ for algorithm in trainer.state.algorithms] == ["BlurPool"]
    options = {"load_exclude_algorithms": ["BlurPool"], "schedulers": LinearWithWarmupScheduler("2ba")}
    with a_trainer("c220/sharded", load_path=path, **options) as trainer:
        assert list(trainer.state.algorithms) == []
        assert [scheduler.last_epoch for scheduler in trainer.state.schedulers] == [3]
        assert_loaded(trainer, saved(Path(path)), "with a scheduler")
    # A scheduler and an optimizer that are not in the file.
    model = legacy_model("c220/sharded", seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedulers = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with FSDP2(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer = make_trainer({}, model=model, optimizer=optimizer, schedulers=schedulers, load_path=path)
    told = " ".join(str(each.message) for each in warned)
    assert "SGD is not in the state_dict" in told and "ExponentialLR is not in the state_dict" in told, told
    expected = saved(Path(path))
    del expected["state"]["optimizers"]
    trainer.own = {}
    assert_loaded(trainer, expected, "another optimizer")
    trainer.close()


@on_ranks(2)
def test_gradient_scalers(folder: str):
    """FSDP1 saved the scaler under another class name than FSDP2's; its scale is loaded all the same."""
    from torch.amp.grad_scaler import GradScaler

    from composer_fsdp2._torch.scaler import ShardedGradScaler

    state = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 9, "_growth_tracker": 4}

    def file_with(scaler: StateDict) -> Path:
        return edited(Path(folder, "scaler.pt"), lambda contents: contents["state"].update(scaler=scaler))

    with a_trainer("c220/sharded") as trainer:
        for name, kind in (
            ("ShardedGradScaler", GradScaler),
            ("GradScaler", ShardedGradScaler),
            ("ClosureGradScaler", ShardedGradScaler),
        ):
            trainer.state.scaler = kind("cpu", init_scale=8.0)
            reload(trainer, file_with({name: state}))
            assert trainer.state.scaler.state_dict() == state, f"{name} into {kind.__qualname__}"
        for scaler in ({}, {"GradScaler": {}}):
            path = file_with(scaler)
            trainer.state.scaler = ShardedGradScaler("cpu", init_scale=8.0)
            with pytest.warns(UserWarning, match="ShardedGradScaler is not in the state_dict"):
                reload(trainer, path)
            assert trainer.state.scaler.state_dict()["scale"] == 8.0
        path = file_with({"GradScaler": state})
        trainer.state.scaler = None
        reload(trainer, path)


# --- a model built on rank 0


@on_ranks(2)
def test_load_monolith_rank0_only(folder: str):
    """Each rank has the file's weights, whichever ranks built the model; Composer left random weights on ranks above
    0."""
    from composer.utils import FSDP2Config

    def on_rank_0_alone(kind: str) -> nn.Module:
        with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
            return legacy_model(kind, seed=3)

    def different(kind: str) -> nn.Module:
        return legacy_model(kind, seed=dist.get_rank())

    keys = {"load_monolith_rank0_only": True, "state_dict_type": "full"}
    configs: list[Callable[[], Any]] = [
        lambda: {**keys, "sync_module_states": True},
        lambda: {**keys, "sync_module_states": True, "cpu_offload": True},
        lambda: FSDP2Config(**keys),
    ]
    builds = (legacy_model, on_rank_0_alone, different)
    kinds = ("c172/full", "c220/sharded", "c172/local-flat")

    def check(kind: str, config: Callable[[], Any], build: Callable[[str], Any]) -> None:
        with a_trainer(kind, config(), model=build(kind), load_path=str(checkpoint_of(kind))) as trainer:
            assert_loaded(trainer, saved_by(kind), kind)

    # Each combination of the three lists' values, or three of them; `make test-all` runs all.
    chosen = itertools.product(range(3), repeat=3) if IS_THOROUGH else [(0, 1, 0), (1, 0, 2), (2, 2, 1)]
    cases = [(kinds[first], configs[second], builds[third]) for first, second, third in chosen]
    for_each(check, {f"{kind}, {config()}, {build.__name__}": (kind, config, build) for kind, config, build in cases})


@on_ranks(2)
def test_loading_into_state_itself(folder: str):
    """A callback that saves a state dict and loads it again without the Trainer works on FSDP2 too."""
    from composer.utils import FSDP2Config

    def check(config: Any) -> None:
        with a_trainer("c172/full", config, load_path=str(checkpoint_of("c172/full"))) as trainer:
            state, expected = trainer.state, saved_by("c172/full")
            is_full = state.fsdp_state_dict_type == "full"
            contents = saved(checkpoint_of("c172/full"))["state"] if is_full else copy.deepcopy(state.state_dict())
            next_steps(state.model, state.optimizers[0])
            with torch.no_grad():
                state.model([torch.zeros(1, 3, dtype=torch.long)])
            state.load_state_dict(contents, trainer.logger)
            assert_loaded(trainer, expected, f"{config}")

    configs = {"full": {}, "sharded, FSDP2Config": FSDP2Config()}
    for_each(check, {name: (config,) for name, config in configs.items()})


# --- the user's own validation


REFUSED = "COMPOSER_FSDP2_TEST_REFUSED"  # the end of the name of a file that the function refuses
SEEN = "COMPOSER_FSDP2_TEST_SEEN"  # the folder where the function records the files


def notes_and_refuses(path: Path, specs: Any = None) -> bool:
    """The user's function, named ``module.function`` in an environment variable that Composer reads."""
    Path(os.environ[SEEN], Path(path).name).touch()
    return not Path(path).name.endswith(os.environ[REFUSED])


@on_ranks(2, env={"CHECKPOINT_VALIDATION_FUNCTION": f"{notes_and_refuses.__module__}.{notes_and_refuses.__name__}"})
def test_the_users_own_validation(folder: str):
    """A cluster's own validation of checkpoints, for example of a signature, runs before any file is read. It runs on
    each file, local or downloaded, including the files of a sharded checkpoint, which also contain pickles."""
    from composer_fsdp2.checkpoint.pickles import trust

    def check(kind: str, is_remote: bool) -> None:
        source = checkpoint_of(kind)
        files = sorted(source.iterdir()) if source.is_dir() else [source]
        path = source.name if is_remote else source
        options = {"object_store": store_class()(source.parent)} if is_remote else {}
        with a_trainer(kind) as trainer:
            before = snapshot(trainer)
            for refused in dict.fromkeys((files[0].name, files[-1].name, "no")):
                seen = Path(folder, f"{kind} {is_remote} {refused}".replace("/", "-"))
                on_rank_0(seen.mkdir)
                with mock.patch.dict(os.environ, {SEEN: str(seen), REFUSED: refused}):
                    if refused == "no":
                        reload(trainer, path, **options)
                        dist.barrier()
                        assert {file.name for file in seen.iterdir()} == {file.name for file in files}
                        continue
                    reads_nothing = mock.patch.object(trust, "_load", side_effect=AssertionError("a pickle was read"))
                    # A remote folder's metadata is read first, because it names the other files.
                    is_after = is_remote and source.is_dir() and refused != ".metadata"
                    with contextlib.nullcontext() if is_after else reads_nothing:
                        error = checkpoint_error_of(lambda: reload(trainer, path, **options))
                    assert "CHECKPOINT_VALIDATION_FUNCTION" in error and refused in error, error
                    assert_same(snapshot(trainer), before, f"{kind}, {refused}")

    cases = (("c220/sharded", False), ("c220/sharded", True), ("c172/full", True))
    for_each(check, {f"{kind}, remote {is_remote}": (kind, is_remote) for kind, is_remote in cases})


# --- a block that never runs


@on_ranks(2)
def test_a_parameter_that_never_had_a_gradient(folder: str):
    """FSDP1 writes no optimizer state for a block that no batch uses, and such a file was refused. It loads, and the
    block's state is created at its first gradient."""
    from support.scripts.train_with_trainer import Block

    def trainer_with(**options: Any) -> Any:
        model = build_model(tied=False)
        model.model.idle = Block(8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return make_trainer({"state_dict_type": "sharded"}, model=model, optimizer=optimizer, batches=1, **options)

    paths = {Layout.FULL: Path(folder, "full", "ep0-ba1-rank0.pt"), Layout.SHARDED: Path(folder, "sharded", "ep0-ba1")}
    with _writing():
        trainer = trainer_with()
        trainer.fit()
        for layout, path in paths.items():
            _save(trainer, layout, path)
        losses = next_losses(trainer.state.model, trainer.state.optimizers[0])
        trainer.close()
    expected = saved(paths[Layout.FULL])["state"]["optimizers"]["AdamW"]["state"]
    assert expected and not [name for name in expected if ".idle." in name]

    def check(path: Path) -> None:
        with FSDP2():
            trainer = trainer_with(load_path=str(path))
            assert_same(full_optimizer_state(trainer), expected, str(path))
            ours = next_losses(trainer.state.model, trainer.state.optimizers[0])
            trainer.close()
        assert largest_difference(ours, losses) <= 1e-6, f"{ours}, FSDP1 {losses}"

    for_each(check, {layout.value: (path,) for layout, path in paths.items()})


# --- files of other runs, and resuming


@on_ranks(2)
def test_ddps_files(folder: str):
    """A DDP run, with its optimizer's two groups, continues sharded when the model no longer fits."""
    options: dict[str, Any] = {"optimizer": "groups", "batches": 5}
    whole = fit(FSDP2, None, save_folder=folder, save_interval="3ba", **options)
    ours = fit(FSDP2, {}, load_path=str(Path(folder, "ep0-ba3-rank0.pt")), **options)
    assert ours.shards == {"FSDPModule"}
    assert largest_difference(ours.losses, whole.losses[3:]) <= 1e-6, f"{ours.losses}, DDP {whole.losses}"


@on_ranks(2)
def test_moving_over_and_autoresume(folder: str):
    """The first start loads FSDP1's checkpoint, later starts the run's own newest; the learning rate schedule
    continues."""
    from composer.optim import CosineAnnealingScheduler

    training: dict[str, Any] = {"optimizer": "adamw", "batches": 6, "schedulers": CosineAnnealingScheduler()}
    # Activation checkpointing adds a wrapper's prefix to FSDP1's names.
    keys = {"sharding_strategy": "SHARD_GRAD_OP", "activation_checkpointing": True}
    old = f"{folder}/old"
    theirs = fit(FSDP1, {**keys, "state_dict_type": "sharded"}, save_folder=old, save_interval="2ba", **training)
    assert theirs.shards == {"FullyShardedDataParallel"}

    options: dict[str, Any] = {
        "load_path": f"{old}/ep0-ba2",
        "autoresume": True,
        "run_name": "moved",
        "save_folder": f"{folder}/new",
        "save_interval": "2ba",
        "save_overwrite": True,
    }
    # The scheduler counts to the end of the run, so the first part stops early instead of running for a shorter
    # duration.
    stop = callback(batch_checkpoint=lambda state: state.timestamp.batch == 4 and state.stop_training())
    first = fit(FSDP2, dict(keys), **training, **options, callbacks=[stop])
    second = fit(FSDP2, dict(keys), **training, **options)
    losses = first.losses + second.losses
    assert (len(first.losses), len(second.losses)) == (2, 2), "autoresume did not find the newest"
    assert largest_difference(losses, theirs.losses[2:]) <= 1e-6, f"{losses}, FSDP1 {theirs.losses}"
