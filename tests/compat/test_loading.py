"""The Trainer's load_path and its options on FSDP2: what the checkpoint holds arrives, or an error says why not."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.cases import for_each
from support.comparing import assert_same, full_parameters
from support.fsdp1_checkpoints import Layout, _save, _writing, next_losses
from support.legacy import (
    FLAT,
    FOLDER,
    KINDS,
    WITHOUT_OPTIMIZER,
    checkpoint_of,
    legacy_model,
    legacy_optimizer,
    next_steps,
    recorded,
)
from support.oracle import FSDP1, FSDP2, FSDP1_saving, Under
from support.ranks import run_ranks
from support.trainers import (
    as_machines_of_one_rank,
    checkpoint_error_of,
    fit,
    full_optimizer_state,
    largest_difference,
    make_trainer,
)
from torch import nn

pytestmark = pytest.mark.composer

OPTIMIZER = "DecoupledAdamW"
SHARDED = {"state_dict_type": "sharded"}
StateDict = dict[str, Any]


# --- what a file holds, as torch reads it


def saved(path: Path) -> StateDict:
    """A checkpoint with plain full tensors, optimizers where Composer has them today."""
    if path.is_file():
        return torch.load(path, weights_only=False)
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    contents: StateDict = {}
    _load_state_dict(contents, FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    if "optimizers" in contents:
        contents["state"]["optimizers"] = contents.pop("optimizers")
    return contents


@functools.cache
def saved_by(kind: str) -> StateDict:
    contents = saved(checkpoint_of(kind))
    if kind in FLAT:  # flat parameters have no names; the same run's full file has the model's
        contents["state"]["model"] = saved_by("c172/full")["state"]["model"]
    return contents


@contextmanager
def a_trainer(kind: str, config: Any = None, model: nn.Module | None = None, **options: Any) -> Iterator[Any]:
    """A Trainer over the model of a fixture, with other values; the model's own are in ``trainer.own``."""
    model = legacy_model(kind, seed=3) if model is None else model
    own = {name: value.detach().clone() for name, value in model.state_dict().items()}
    options.setdefault("optimizer", legacy_optimizer(model))
    with FSDP2(), quiet():
        trainer = make_trainer({} if config is None else config, model=model, **options)
        trainer.own = own
        yield trainer
        trainer.close()


@torch.no_grad()
def renew(trainer: Any) -> None:
    """A trainer as it was before anything was loaded."""
    from composer.core import Timestamp
    from torch.distributed.tensor import DTensor, distribute_tensor

    for name, value in trainer.state.model.state_dict().items():
        own = trainer.own[name]
        if isinstance(value, DTensor):
            own = distribute_tensor(own, value.device_mesh, value.placements)
        value.copy_(own)
    trainer.state.optimizers[0].state.clear()
    trainer.state.timestamp = Timestamp()


@contextmanager
def quiet() -> Iterator[None]:
    """Without Composer's warnings, of which one is that the tests' callback is in no file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def reload(trainer: Any, path: Path | str, **options: Any) -> Any:
    """Composer's ``load_checkpoint``, as the Trainer calls it, into a trainer that is there."""
    from composer.utils import checkpoint

    return checkpoint.load_checkpoint(str(path), trainer.state, trainer.logger, **options)


def assert_loaded(trainer: Any, expected: StateDict, what: str) -> None:
    """Weights, buffers and optimizer state are the file's; what it does not have is the model's own."""
    weights = {**trainer.own, **expected["state"].get("model", {})}
    for name, value in full_parameters(trainer.state.model).items():
        assert_same(value, weights[name], f"{what}: {name}")
    for name, value in trainer.state.model.named_buffers():
        assert_same(value, weights[name], f"{what}: {name}")
    if trainer.state.optimizers:
        optimizer = expected["state"].get("optimizers", {}).get(OPTIMIZER, {})
        assert_same(full_optimizer_state(trainer), optimizer.get("state", {}), f"{what}: optimizer")
        for group, theirs in zip(
            trainer.state.optimizers[0].param_groups, optimizer.get("param_groups", []), strict=False
        ):
            for key in theirs.keys() - {"params"}:
                pair = (
                    list(value) if isinstance(value, tuple) else value for value in (group[key], theirs[key])
                )  # betas
                assert_same(*pair, f"{what}: {key}")


def snapshot(trainer: Any) -> tuple[Any, Any, int]:
    state = trainer.state
    return full_parameters(state.model), full_optimizer_state(trainer), int(state.timestamp.batch)


def on_rank_0(work: Callable[[], Any]) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 0:
        work()
    dist.barrier()


def edited(path: Path, edit: Callable[[StateDict], Any], source: str = "c220/sharded") -> Path:
    """A monolithic file with what a fixture holds, and an edit. Called on all ranks."""

    def write() -> None:
        contents = saved(checkpoint_of(source))
        edit(contents)
        torch.save(contents, path)

    on_rank_0(write)
    return path


# --- old files


def check_old_files() -> None:
    def check(kind: str, state_dict_type: str) -> None:
        expected = saved_by(kind)
        path = FOLDER / kind / "latest-rank{rank}.pt" if state_dict_type == "full" else FOLDER / kind
        what = f"{path}"
        with a_trainer(kind, {"state_dict_type": state_dict_type}, load_path=str(path)) as trainer:
            assert_loaded(trainer, expected, what)
            timestamp, theirs = trainer.state.timestamp.state_dict(), expected["state"]["timestamp"]["Timestamp"]
            assert_same({key: timestamp[key] for key in theirs}, theirs, what)
            assert_same(trainer._rng_state, expected["rng"], f"{what}: rng")
            assert trainer.state.rank_zero_seed == expected["state"]["rank_zero_seed"]
            renew(trainer)
            reload(trainer, checkpoint_of(kind))
            assert_loaded(trainer, expected, f"{what}, by its own name")
            has_optimizer = kind not in WITHOUT_OPTIMIZER
            model, [optimizer] = trainer.state.model, trainer.state.optimizers
            logits, losses = next_steps(model, optimizer if has_optimizer else None)
            torch.testing.assert_close(logits, recorded(kind)["logits"], rtol=0, atol=2e-6)
            if has_optimizer:
                worst = max(abs(a - b) for a, b in zip(losses, recorded(kind)["losses"], strict=True))
                assert worst <= 1e-6, f"{what}: {losses}"

    # A run of each type; the type of the file is no matter.
    for_each(check, {f"{case}": case for case in itertools.product(KINDS, ("full", "sharded"))})


def test_old_files_through_load_path():
    """Composer 0.17's and 0.22's files arrive bit for bit whatever this run itself would save, and train on."""
    run_ranks(check_old_files, 2)


def check_weights_only() -> None:
    def check(kind: str, config: str) -> None:
        with a_trainer(
            kind, {"state_dict_type": config}, load_path=str(checkpoint_of(kind)), load_weights_only=True
        ) as trainer:
            assert_loaded(trainer, {"state": {"model": saved_by(kind)["state"]["model"]}}, kind)
            assert int(trainer.state.timestamp.batch) == 0
            assert trainer._rng_state is None
        # Nothing trains, so there is no optimizer (Composer makes one of its own).
        with a_trainer(kind, load_path=str(checkpoint_of(kind)), optimizer=None) as trainer:
            assert_loaded(trainer, {"state": {"model": saved_by(kind)["state"]["model"]}}, kind)
            assert int(trainer.state.timestamp.batch) == 3

    cases = (("c172/full", "sharded"), ("c220/sharded", "full"), ("c172/local-flat", "full"))
    for_each(check, {f"{case}": case for case in cases})


def test_weights_alone():
    """A fine-tuning run takes the weights and starts its own count; an evaluation needs no optimizer."""
    run_ranks(check_weights_only, 2)


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


IGNORED: list[list[str] | Callable[[StateDict], None]] = [
    ["state/model/*"],
    ["state/model/model.blocks.0.*", "rng"],
    ["state/optimizers"],
    ["state/optimizers/*/state/model.blocks.1.*", "state/schedulers", "state/timestamp"],
    without_first_block,
    with_blocks_swapped,
    with_own_tensors,
    with_own_rate,
]


def check_ignored() -> None:
    from composer.utils.checkpoint import glob_filter

    def check_one(trainer: Any, kind: str, ignore: Any) -> None:
        expected = saved(checkpoint_of(kind))
        (glob_filter(ignore) if isinstance(ignore, list) else ignore)(expected)
        renew(trainer)
        rng = reload(trainer, checkpoint_of(kind), ignore_keys=ignore)
        assert_loaded(trainer, expected, kind)
        has_timestamp = "timestamp" in expected["state"]
        assert int(trainer.state.timestamp.batch) == (3 if has_timestamp else 0)
        assert (rng is None) == ("rng" not in expected)

    def check(kind: str) -> None:
        names = [f"{ignore}" if isinstance(ignore, list) else ignore.__name__ for ignore in IGNORED]
        with a_trainer(kind) as trainer:
            for_each(check_one, {name: (trainer, kind, each) for name, each in zip(names, IGNORED, strict=True)})
        with a_trainer(kind, load_path=str(checkpoint_of(kind)), load_ignore_keys=IGNORED[1]) as trainer:
            expected = saved(checkpoint_of(kind))
            glob_filter(IGNORED[1])(expected)
            assert_loaded(trainer, expected, "the Trainer's own argument")

    for_each(check, {kind: (kind,) for kind in ("c172/full", "c172/sharded", "c220/sharded")})

    def halves(contents: StateDict) -> None:
        model = contents["state"]["model"]
        model["model.wte.weight"] = model["model.wte.weight"] / 2

    with a_trainer("c220/sharded") as trainer:
        before = snapshot(trainer)
        error = checkpoint_error_of(lambda: reload(trainer, checkpoint_of("c220/sharded"), ignore_keys=halves))
        assert "state.model.model.wte.weight" in error and "without their data" in error, error
        assert_same(snapshot(trainer), before, "after an error")


def test_ignored_keys():
    """Lists and functions do to any layout what they did to Composer's dict: leave out, rename, exchange, replace."""
    run_ranks(check_ignored, 2, timeout_s=240)


# --- what does not fit


def check_strict(folder: str) -> None:
    wte, head, weight = "model.wte.weight", "model.lm_head.weight", "model.blocks.0.up.weight"

    def spoil(contents: StateDict) -> None:
        model = contents["state"]["model"]
        del model["model.blocks.1.ln.bias"], model[wte], model[head]
        model["model.blocks.7.scale"] = torch.ones(2)
        model[weight] = model[weight].double()
        model["model.blocks.0.ln.weight"] = [1.0] * 6

    def misshape(contents: StateDict) -> None:
        contents["state"]["model"][weight] = torch.ones(7, 18)
        contents["state"]["optimizers"][OPTIMIZER]["state"][weight]["exp_avg"] = torch.ones(18)

    def relax(contents: StateDict) -> None:
        spoil(contents)
        contents["state"]["model"]["model.blocks.0.ln.weight"] = torch.full((6,), 0.25)

    spoilt = edited(Path(folder, "spoilt.pt"), spoil)
    misshapen = edited(Path(folder, "misshapen.pt"), misshape)
    relaxed = edited(Path(folder, "relaxed.pt"), relax)
    with a_trainer("c220/sharded") as trainer:
        before = snapshot(trainer)
        error = checkpoint_error_of(lambda: reload(trainer, spoilt))
        for text in (
            f"missing: {wte} = {head}",
            "missing: model.blocks.1.ln.bias",
            "surplus: model.blocks.7.scale",
            f"dtype: {weight}: found torch.float64, expected torch.float32",
            "type: model.blocks.0.ln.weight",
        ):
            assert text in error, f"{text} is not in {error}"
        for strict in (True, False):
            error = checkpoint_error_of(lambda: reload(trainer, misshapen, strict_model_weights=strict))  # noqa: B023
            assert f"shape: {weight}: found (7, 18), expected (18, 6)" in error, error
            assert f"exp_avg of {weight}: found (18,), expected (18, 6)" in error, error
        error = checkpoint_error_of(lambda: reload(trainer, relaxed))
        assert "load_strict_model_weights" in error, error
        assert_same(snapshot(trainer), before, "after errors")
        reload(trainer, relaxed, strict_model_weights=False)
        expected = saved(relaxed)
        model = expected["state"]["model"]
        model[weight] = model[weight].float()
        assert_loaded(trainer, expected, "not strict")
        assert_same(full_parameters(trainer.state.model)[wte], trainer.own[wte], "a missing weight")


def test_strict_model_weights(tmp_path: Path):
    """Everything that does not fit is told at once, on every rank, before anything changes; the rest loads if asked."""
    run_ranks(check_strict, 2, str(tmp_path))


def check_damage(folder: str) -> None:
    from composer_fsdp2.errors import CheckpointError

    def at_bytes_of(content: bytes, tensor: torch.Tensor) -> int:
        return content.index(tensor.contiguous().numpy().tobytes())

    directory = Path(folder, "run")
    full, shard = Path(folder, "full.pt"), directory / "__1_0.distcp"

    def write(change: Callable[[Path], bytes]) -> None:
        directory.mkdir(exist_ok=True)
        for file in checkpoint_of("c220/sharded").iterdir():
            (directory / file.name).write_bytes(file.read_bytes())
        full.write_bytes(checkpoint_of("c220/full").read_bytes())
        for file in (full, shard):
            file.write_bytes(change(file))

    def truncated(file: Path) -> bytes:
        return file.read_bytes()[:-3000]

    def flipped(file: Path) -> bytes:
        content = bytearray(file.read_bytes())
        weight = saved_by("c220/full")["state"]["model"]["model.blocks.1.up.weight"]
        at = at_bytes_of(bytes(content), weight[-2:] if file == shard else weight)
        content[at + 5] ^= 1
        return bytes(content)

    with a_trainer("c220/sharded", load_path=str(checkpoint_of("c220/sharded"))) as trainer:
        before = snapshot(trainer)
        for change in (truncated, flipped):
            on_rank_0(functools.partial(write, change))
            for path, named in ((full, full), (directory, shard)):
                error = checkpoint_error_of(lambda: reload(trainer, path))  # noqa: B023
                assert str(path) in error and named.name in error, f"{change.__name__}: {error}"
                assert_same(snapshot(trainer), before, f"{path}, {change.__name__}")
                with pytest.raises(CheckpointError, match=named.name), a_trainer("c220/sharded", load_path=str(path)):
                    pass


def test_damaged_files(tmp_path: Path):
    """A file that a full disk or a bad cable damaged ends the start of the run, instead of training on garbage."""
    run_ranks(check_damage, 2, str(tmp_path))


def check_machines_disagree(folder: str) -> None:
    import torch.distributed as dist

    rank = dist.get_rank()
    copies = Path(folder, str(rank))
    copies.mkdir()
    contents = saved(checkpoint_of("c220/full"))
    if rank == 1:
        contents["state"]["timestamp"]["Timestamp"]["batch"] = 4
    torch.save(contents, copies / "steps.pt")
    (copies / "kind").write_bytes(checkpoint_of(("c220/full", "c172/full")[rank]).read_bytes())
    if rank == 0:
        (copies / "gone.pt").write_bytes(checkpoint_of("c220/full").read_bytes())
    with a_trainer("c220/full") as trainer, as_machines_of_one_rank():
        before = snapshot(trainer)
        for name, printed in {"steps.pt": "different steps", "kind": "", "gone.pt": "gone.pt"}.items():
            error = checkpoint_error_of(lambda: reload(trainer, copies / name))  # noqa: B023
            assert printed in error, error
            assert_same(snapshot(trainer), before, name)


def test_machines_with_different_files(tmp_path: Path):
    """After a crash one machine's disk may hold an older checkpoint, or none: a run of two halves never starts."""
    run_ranks(check_machines_disagree, 2, str(tmp_path))


def check_own_folders(folder: str) -> None:
    import torch.distributed as dist

    own = Path(folder, str(dist.get_rank()))
    own.mkdir()
    if dist.get_rank() == 0:
        (own / "run.pt").write_bytes(checkpoint_of("c220/full").read_bytes())
        (own / "latest.pt").symlink_to("run.pt")
    else:  # what another test left behind
        (own / "latest.pt").write_bytes(b"older")
    expected = saved_by("c220/full")
    with a_trainer("c220/full") as trainer:
        for name in ("run.pt", "latest.pt"):
            renew(trainer)
            reload(trainer, own / name)
            assert_loaded(trainer, expected, name)
        error = checkpoint_error_of(lambda: reload(trainer, own / "gone.pt"))
        assert f"{own / 'gone.pt'}: no such file" in error, error  # each rank says what it was given


def test_a_folder_for_each_rank(tmp_path: Path):
    """A script whose ranks each make a folder of their own (tempfile.mkdtemp()) resumes from rank 0's, as under
    Composer: the ranks of a machine read what its first one names."""
    run_ranks(check_own_folders, 2, str(tmp_path))


def check_own_save_folders(folder: str) -> None:
    import torch.distributed as dist

    own = Path(folder, str(dist.get_rank()))
    written: dict[str, Any] = {}

    def check(under: Under, monolith: bool) -> None:
        saves = own / f"{under.__name__}-{monolith}"
        options: dict[str, Any] = {"optimizer": "adamw", "batches": 2, "run_name": "own-folders"}
        # FSDP1 sends rank 0's values from a GPU only; over gloo it can from anywhere.
        check_device = "torch.distributed.fsdp._init_utils._check_module_states_for_sync_module_states"
        with quiet(), under(), mock.patch(check_device):
            first = make_trainer({}, save_folder=str(saves), save_filename="rank{rank}.pt", **options)
            first.fit()
            written[saves.name] = int(first.state.timestamp.batch), full_parameters(first.state.model)
            first.close()
            assert (saves / "rank0.pt").is_file() == (dist.get_rank() == 0), "a case without a difference"
            config = {"load_monolith_rank0_only": monolith, "sync_module_states": monolith}
            second = make_trainer(config, load_path=str(saves / "rank{rank}.pt"), **options)
            loaded = int(second.state.timestamp.batch), full_parameters(second.state.model)
            second.close()
        assert loaded[0] == written[saves.name][0] == 2
        assert_same(loaded[1], written[saves.name][1])

    for_each(
        check,
        {
            f"{under.__name__} {monolith}": (under, monolith)
            for under in (FSDP1_saving, FSDP2)
            for monolith in (False, True)
        },
    )


def test_a_save_folder_for_each_rank(tmp_path: Path):
    """Composer's own test_fsdp_full_state_dict_load: each rank names rank{rank}.pt in a temporary folder of its own,
    and only rank 0 wrote one. FSDP1 loads it; ours found nothing on rank 1."""
    run_ranks(check_own_save_folders, 2, str(tmp_path))


# --- beside model and optimizer


def stateful(name: str) -> Any:
    from composer import Callback

    class Counting(Callback):
        def __init__(self) -> None:
            self.count = 0

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]

    Counting.__qualname__ = name
    return Counting()


def check_rest(folder: str) -> None:
    from composer.optim import LinearWithWarmupScheduler
    from torch.optim.lr_scheduler import ExponentialLR

    def edit(contents: StateDict) -> None:
        contents["state"]["callbacks"] |= {"InBoth": {"count": 5}, "InTheFile": {"count": 6}}
        contents["state"]["algorithms"] = [("BlurPool", {"repr": "BlurPool()"})]
        contents["state"]["schedulers"] = {"LambdaLR": {"last_epoch": 3, "_step_count": 4, "lr_lambdas": [None]}}

    path = str(edited(Path(folder, "rest.pt"), edit))
    both, new = stateful("InBoth"), stateful("InTheRun")
    with a_trainer("c220/sharded", callbacks=[both, new], load_path=path) as trainer:
        assert (both.count, new.count) == (5, 0)
        assert [type(algorithm).__name__ for algorithm in trainer.state.algorithms] == ["BlurPool"]
    schedulers = LinearWithWarmupScheduler("2ba")
    with a_trainer(
        "c220/sharded", load_path=path, load_exclude_algorithms=["BlurPool"], schedulers=schedulers
    ) as trainer:
        assert list(trainer.state.algorithms) == []
        [scheduler] = trainer.state.schedulers
        assert scheduler.last_epoch == 3
        assert_loaded(trainer, saved(Path(path)), "with a scheduler")

    def check(make: Callable[[nn.Module], torch.optim.Optimizer], printed: str) -> None:
        model = legacy_model("c220/sharded", seed=3)
        optimizer = make(model)
        schedulers = ExponentialLR(optimizer, 0.5)
        with FSDP2(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = make_trainer({}, model=model, optimizer=optimizer, schedulers=schedulers, load_path=path)
        assert any(printed in str(warning.message) for warning in caught), [str(w.message) for w in caught]
        expected = saved(Path(path))
        if isinstance(optimizer, torch.optim.SGD):
            del expected["state"]["optimizers"]
        trainer.own = {}
        assert_loaded(trainer, expected, printed)
        trainer.close()

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.5)

    cases = {"ExponentialLR": legacy_optimizer, "SGD": sgd}
    for_each(check, {name: (make, f"{name} is not in the state_dict") for name, make in cases.items()})


def test_callbacks_algorithms_and_schedulers(tmp_path: Path):
    """A callback, scheduler or optimizer that was added or left out since is no obstacle, as it is to stock DCP."""
    run_ranks(check_rest, 2, str(tmp_path))


def check_scaler(folder: str) -> None:
    from torch.amp.grad_scaler import GradScaler

    from composer_fsdp2._torch.scaler import ShardedGradScaler

    state = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 9, "_growth_tracker": 4}
    files = {
        name: edited(Path(folder, f"{name}.pt"), functools.partial(set_scaler, value={name: state}))
        for name in ("ShardedGradScaler", "GradScaler", "ClosureGradScaler")
    }
    with a_trainer("c220/sharded") as trainer:
        for path in files.values():
            for scaler in (ShardedGradScaler(device="cpu", init_scale=8.0), GradScaler("cpu", init_scale=8.0)):
                trainer.state.scaler = scaler
                reload(trainer, path)
                assert scaler.state_dict() == state, f"{path} into {type(scaler).__qualname__}"
        for name, value in {"none": {}, "off": {"GradScaler": {}}}.items():
            path = edited(Path(folder, f"{name}.pt"), functools.partial(set_scaler, value=value))
            trainer.state.scaler = ShardedGradScaler(device="cpu", init_scale=8.0)
            with pytest.warns(UserWarning, match="ShardedGradScaler is not in the state_dict"):
                reload(trainer, path)
            assert trainer.state.scaler.state_dict()["scale"] == 8.0
        trainer.state.scaler = None
        reload(trainer, files["GradScaler"])


def set_scaler(contents: StateDict, value: Any) -> None:
    contents["state"]["scaler"] = value


def test_gradient_scalers(tmp_path: Path):
    """FSDP1 saved the scaler under one class name and FSDP2 looks for another: its scale goes on all the same."""
    run_ranks(check_scaler, 2, str(tmp_path))


# --- how the model was built


def check_monolith(is_whole: bool) -> None:
    import torch.distributed as dist
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

    numbers = [case for case in itertools.product(range(3), repeat=3) if is_whole or sum(case) % 3 == 0]
    cases = [(kinds[first], configs[second], builds[third]) for first, second, third in numbers]
    for_each(check, {f"{kind}, {config()}, {build.__name__}": (kind, config, build) for kind, config, build in cases})


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["pairs", "all"])
def test_load_monolith_rank0_only(is_whole: bool):
    """Wherever the ranks built the model, each has the file's weights; stock left random ones on ranks above 0. Every
    two of a layout, a configuration and a build; in `make test-all` every three."""
    run_ranks(check_monolith, 2, is_whole)


def check_state_itself() -> None:
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

    configs = {
        "full": {},
        "sharded": SHARDED,
        "full, FSDP2Config": FSDP2Config(state_dict_type="full"),
        "sharded, FSDP2Config": FSDP2Config(),
    }
    for_each(check, {name: (config,) for name, config in configs.items()})


def test_loading_into_state_itself():
    """A callback that keeps a state dict and takes it back, past the Trainer, does so on FSDP2 too."""
    run_ranks(check_state_itself, 2)


def check_ties(folder: str) -> None:
    wte, head = "model.wte.weight", "model.lm_head.weight"

    def without(contents: StateDict, name: str) -> None:
        del contents["state"]["model"][name]

    def untie(contents: StateDict) -> None:
        contents["state"]["model"][head] = contents["state"]["model"][wte] + 1

    with a_trainer("c220/sharded") as trainer:
        for name in (wte, head):
            path = edited(Path(folder, f"{name}.pt"), functools.partial(without, name=name))
            reload(trainer, path)
            assert_loaded(trainer, saved_by("c220/sharded"), f"without {name}")
        before = snapshot(trainer)
        path = edited(Path(folder, "untied.pt"), untie)
        error = checkpoint_error_of(lambda: reload(trainer, path))
        assert f"tied: {wte} = {head}" in error, error
        assert_same(snapshot(trainer), before, "after an error")


def test_tied_weights(tmp_path: Path):
    """A tied weight that was stored under one of its names is there; two values for one parameter are refused."""
    run_ranks(check_ties, 2, str(tmp_path))


# --- other ways in


def recording_planner() -> Any:
    from torch.distributed.checkpoint import DefaultLoadPlanner

    class Recording(DefaultLoadPlanner):
        num_plans = 0

        def create_local_plan(self) -> Any:
            self.num_plans += 1
            return super().create_local_plan()

    return Recording()


def check_planner(folder: str) -> None:
    with a_trainer("c220/sharded", SHARDED, load_path=str(checkpoint_of("c220/sharded"))) as trainer:
        trainer.save_checkpoint(f"{folder}/run/ep0-ba3.pt")
        expected = snapshot(trainer)
    planner = recording_planner()
    [path] = Path(folder, "run").iterdir()
    with a_trainer("c220/sharded", {**SHARDED, "load_planner": planner}, load_path=str(path)) as trainer:
        assert_same(snapshot(trainer), expected, "by the user's planner")
    assert planner.num_plans > 0, "the user's planner was left out without a word"


def test_load_planner(tmp_path: Path):
    """A planner of one's own, that renames or leaves out entries, is asked."""
    run_ranks(check_planner, 2, str(tmp_path))


REFUSED = "COMPOSER_FSDP2_TEST_REFUSED"  # what the function refuses: the end of a file's name
SEEN = "COMPOSER_FSDP2_TEST_SEEN"  # a folder where it notes the files


def notes_and_refuses(path: Path, specs: Any = None) -> bool:
    """The user's function, which Composer finds by a variable, ``module.function``."""
    Path(os.environ[SEEN], Path(path).name).touch()
    return not Path(path).name.endswith(os.environ[REFUSED])


def folder_store(folder: Path) -> Any:
    """An object store whose bucket is a folder."""
    from composer.utils import ObjectStore

    class FolderStore(ObjectStore):
        def download_object(
            self, object_name: str, filename: str, overwrite: bool = False, callback: Any = None
        ) -> None:
            shutil.copyfile(folder / object_name, filename)

        def get_object_size(self, object_name: str) -> int:
            return (folder / object_name).stat().st_size

    return FolderStore()


def check_validation(folder: str) -> None:
    import torch.distributed as dist

    from composer_fsdp2.checkpoint.pickles import trust

    sources = {kind: checkpoint_of(kind) for kind in ("c172/full", "c220/sharded")}
    for name, source in sources.items():
        files = sorted(source.iterdir()) if source.is_dir() else [source]
        with a_trainer(name) as trainer:
            for store, refused in itertools.product(
                (None, folder_store(source.parent)), [*(file.name for file in files), "no"]
            ):
                before = snapshot(trainer)
                seen = Path(folder, f"{name} {store is None} {refused}".replace("/", "-"))
                on_rank_0(seen.mkdir)
                path = source.name if store is not None else source
                options = {} if store is None else {"object_store": store}
                with mock.patch.dict(os.environ, {SEEN: str(seen), REFUSED: refused}):
                    if refused == "no":
                        reload(trainer, path, **options)
                        dist.barrier()
                        noted = {file.name for file in seen.iterdir()}
                        what = {file.name for file in files} if source.is_dir() or store is None else {source.name}
                        assert noted == what, f"{name} {store}: {noted}"
                        continue
                    reads_nothing = mock.patch.object(trust, "_load", side_effect=AssertionError("a pickle was read"))
                    # A remote folder's metadata is read before the files that it names.
                    is_after = store is not None and source.is_dir() and refused != ".metadata"
                    with contextlib.nullcontext() if is_after else reads_nothing:
                        error = checkpoint_error_of(lambda: reload(trainer, path, **options))  # noqa: B023
                    assert "CHECKPOINT_VALIDATION_FUNCTION" in error and refused in error, error
                    assert_same(snapshot(trainer), before, f"{name}, {refused}")


def test_the_users_own_validation(tmp_path: Path):
    """A cluster's own check of its files, maybe of a signature, is asked before anything of them is read, on each
    file, local or downloaded: also the parts of a sharded checkpoint, which hold pickles too."""
    function = f"{notes_and_refuses.__module__}.{notes_and_refuses.__name__}"
    run_ranks(check_validation, 2, str(tmp_path), env={"CHECKPOINT_VALIDATION_FUNCTION": function})


# --- a part of the model that never runs


def with_an_idle_block() -> Any:
    """The script's model with a block that no batch enters, an FSDP unit of its own."""
    from support.scripts.train_with_trainer import Block
    from support.trainers import build_model

    model = build_model(tied=False)
    model.model.idle = Block(8)
    return model


def check_idle_block(folder: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    def trainer_with(**options: Any) -> Any:
        model = with_an_idle_block()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return make_trainer({"state_dict_type": "sharded"}, model=model, optimizer=optimizer, batches=1, **options)

    def is_idle(state: dict[str, Any]) -> bool:
        return bool(state) and not [name for name in state if ".idle." in name]

    paths = {layout: path_of_idle(layout, folder) for layout in (Layout.FULL, Layout.SHARDED)}
    with _writing():
        trainer = trainer_with()
        trainer.fit()
        for layout, path in paths.items():
            _save(trainer, layout, path)
        losses = next_losses(trainer.state.model, trainer.state.optimizers[0])
        trainer.close()
    saved_state = saved(paths[Layout.FULL])["state"]["optimizers"]["AdamW"]
    expected = saved_state["state"]
    assert is_idle(expected)
    assert any(".idle." in name for name in saved_state["param_groups"][0]["params"])
    with FSDP1():
        trainer = trainer_with()
        model, [optimizer] = trainer.state.model, trainer.state.optimizers
        state = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, saved_state)
        optimizer.load_state_dict(state)  # FSDP1 itself takes the file's state
        trainer.close()

    def check(path: Path) -> None:
        with FSDP2():
            trainer = trainer_with(load_path=str(path))
            assert is_idle(full_optimizer_state(trainer))
            assert_same(full_optimizer_state(trainer), expected, str(path))
            ours = next_losses(trainer.state.model, trainer.state.optimizers[0])
            trainer.close()
        assert largest_difference(ours, losses) <= 1e-6, f"{ours}, FSDP1 {losses}"

    for_each(check, {layout.value: (path,) for layout, path in paths.items()})


def path_of_idle(layout: Layout, folder: str) -> Path:
    return Path(folder, layout.name, "ep0-ba1-rank0.pt" if layout is Layout.FULL else "ep0-ba1")


def test_a_parameter_that_never_had_a_gradient(tmp_path: Path):
    """FSDP1 writes no optimizer state for a block that no batch enters, and such a file was refused; it loads, and the
    block begins with new state when it gets its first gradient."""
    run_ranks(check_idle_block, 2, str(tmp_path))


# --- other runs' files, and going on


def check_ddp(folder: str) -> None:
    options: dict[str, Any] = {"optimizer": "groups", "batches": 6}
    with FSDP2():
        trainer = make_trainer(None, save_folder=folder, save_interval="3ba", **{**options, "batches": 3})
        trainer.fit()
        numbered = trainer.state.optimizers[0].state_dict()
        trainer.close()
        # Until 0.18 Composer saved what the optimizer itself says, with numbers for parameters.
        path = Path(folder, "numbered.pt")

        def write() -> None:
            contents = saved(Path(folder, "ep0-ba3-rank0.pt"))
            contents["state"]["optimizers"] = {OPTIMIZER: numbered}
            torch.save(contents, path)

        on_rank_0(write)
    continued = fit(FSDP2, None, load_path=str(Path(folder, "ep0-ba3-rank0.pt")), **options)

    def check(file: Path) -> None:
        ours = fit(FSDP2, {}, load_path=str(file), **options)
        assert ours.shards == {"FSDPModule"}
        assert largest_difference(ours.losses, continued.losses) <= 1e-6, f"{ours.losses}, DDP {continued.losses}"

    for_each(check, {file.name: (file,) for file in (path, Path(folder, "ep0-ba3-rank0.pt"))})


def test_ddps_files(tmp_path: Path):
    """A run that has outgrown DDP goes on sharded, also where its optimizer numbered the parameters, in two groups."""
    run_ranks(check_ddp, 2, str(tmp_path))


def check_moving_over(folder: str) -> None:
    from composer.optim import CosineAnnealingScheduler

    training: dict[str, Any] = {"optimizer": "adamw", "batches": 7}
    schedulers = CosineAnnealingScheduler()
    old = f"{folder}/old"
    theirs = fit(
        FSDP1, {"state_dict_type": "sharded"}, save_folder=old, save_interval="2ba", schedulers=schedulers, **training
    )

    def check(state_dict_type: str) -> None:
        options: dict[str, Any] = {
            "load_path": f"{old}/ep0-ba2",
            "autoresume": True,
            "run_name": "moved",
            "save_folder": f"{folder}/{state_dict_type}",
            "save_interval": "2ba",
            "save_overwrite": True,
            "schedulers": schedulers,
        }
        config = {"state_dict_type": state_dict_type}
        # The scheduler counts to the end of the run, so the first part is one that stops early.
        first = fit(FSDP2, dict(config), **training, **options, callbacks=[stop_at(4)])
        second = fit(FSDP2, dict(config), **training, **options)
        losses = first.losses + second.losses
        assert (len(first.losses), len(second.losses)) == (2, 3), "autoresume did not find the newest"
        assert largest_difference(losses, theirs.losses[2:]) <= 1e-6, f"{losses}, FSDP1 {theirs.losses}"

    for_each(check, {kind: (kind,) for kind in ("full", "sharded")})


def stop_at(batch: int) -> Any:
    from composer import Callback

    class Stop(Callback):
        def batch_checkpoint(self, state: Any, logger: Any) -> None:
            if state.timestamp.batch == batch:
                state.stop_training()

    return Stop()


def test_moving_over_and_autoresume(tmp_path: Path):
    """The first start takes FSDP1's checkpoint, a later one the run's own newest; the learning rate keeps its curve."""
    run_ranks(check_moving_over, 2, str(tmp_path))
