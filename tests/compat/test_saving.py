"""An FSDP2 run saves the same files, links and contents as FSDP1 with the same configuration. And FSDP1 loads them."""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import assert_same
from support.examples import IS_THOROUGH
from support.on_ranks import on_ranks
from support.oracle import FSDP2, FSDP1_saving
from support.ranks import run_ranks
from support.saved import checkpoint_differences, form, named, read, tree
from support.trainers import build_model, fit, largest_difference, make_trainer
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from composer_fsdp2.errors import CheckpointError

pytestmark = pytest.mark.composer

# --- the same tree as FSDP1


class WithoutRandomStates(DefaultSavePlanner):
    """A user-defined planner."""

    def set_up_planner(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        super().set_up_planner({key: value for key, value in state_dict.items() if key != "rng"}, *args, **kwargs)


def drop_the_head(state_dict: dict[str, Any]) -> None:
    """A user's function, called on all ranks; only rank 0 has full tensors."""
    state_dict["state"]["model"].pop("model.lm_head.weight", None)
    for name, value in state_dict["state"]["model"].items():
        assert type(value) is torch.Tensor, f"{name}: {type(value)}"


SHARDED = {"state_dict_type": "sharded"}
HSDP = {"sharding_strategy": "HYBRID_SHARD", "data_parallel_replicate_degree": 2}
# For each case, the fsdp_config and the Trainer's arguments. Keeping no checkpoint is a case of the uploads below.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {"batches": 3, "save_interval": "2ba"}),
    "the last two, weights only, gzip, no link": (
        {},
        {
            "batches": 3,
            "save_weights_only": True,
            "save_num_checkpoints_to_keep": 2,
            "save_filename": "ba{batch}-rank{rank}.pt.gz",
            "save_latest_filename": None,
        },
    ),
    "the last sharded one, weights only": (SHARDED, {"save_weights_only": True, "save_num_checkpoints_to_keep": 1}),
    "names, and names left out": (
        {},
        {
            "save_filename": "at/{batch}-of-{rank}.pt",
            "save_latest_filename": "new/{rank}",
            "save_ignore_keys": ["state/model/model.lm_head.*", "rng"],
        },
    ),
    "sharded names, names left out, a planner": (
        {
            **SHARDED,
            "sharded_ckpt_prefix_dir": "s{batch}",
            "save_planner": WithoutRandomStates(dedup_save_to_lowest_rank=True),
        },
        {
            "save_filename": "{batch}-{rank}.pt",
            "save_latest_filename": "latest-sharded-rank{rank}",
            "save_ignore_keys": ["state/optimizers/*/state/*/exp_avg_sq"],
        },
    ),
    "tar.gz, two groups": ({}, {"save_filename": "ba{batch}-rank{rank}.tar.gz", "optimizer": "groups"}),
    "what a function leaves out": ({}, {"save_ignore_keys": drop_the_head}),
}


def check_trees(folder: str, cases: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> None:
    warnings.simplefilter("ignore")  # of FSDP1 and of torch, about themselves
    for under, shards in ((FSDP1_saving, "FullyShardedDataParallel"), (FSDP2, "FSDPModule")):
        with under():
            for name, (config, options) in cases.items():
                options = {"batches": 1, "optimizer": "adamw", "save_interval": "1ba", **options}
                trained = fit(under, dict(config), save_folder=f"{folder}/{shards}/{name}", run_name="run", **options)
                assert trained.shards == {shards}, name
    dist.barrier()

    def check(name: str) -> None:
        if dist.get_rank() == 0:
            compare(name, f"{folder}/FSDPModule/{name}", f"{folder}/FullyShardedDataParallel/{name}")

    for_each(check, {name: (name,) for name in cases})


def compare(name: str, ours: str, theirs: str) -> None:
    files = tree(ours)
    assert files == tree(theirs), f"{name}: {files}, FSDP1 {tree(theirs)}"
    assert files, f"{name} saved nothing"
    for file in files:
        pair = Path(ours, file), Path(theirs, file)
        if file.endswith(".metadata"):
            our, their = (FileSystemReader(path.parent).read_metadata() for path in pair)
            assert our.planner_data == their.planner_data, f"{name}: {file}"
            entries = (
                {key: form_of(entry) for key, entry in each.state_dict_metadata.items()} for each in (our, their)
            )
            assert_same(*entries, f"{name}: {file}")
        elif pair[0].is_file() and " -> " not in file and not file.endswith(".distcp"):
            our, their = map(read, pair)
            unlike = form(our).items() ^ form(their).items()
            assert not unlike, f"{name}: {file}: {unlike}"
            for key, tensor in their["state"]["model"].items():
                torch.testing.assert_close(our["state"]["model"][key], tensor, msg=f"{name}: {file}: {key}")


def form_of(entry: Any) -> tuple[Any, ...]:
    return (tuple(entry.size), entry.properties.dtype) if hasattr(entry, "size") else (type(entry),)


@pytest.mark.parametrize(
    ("world_size", "cases"), [(2, CASES), (4, {"sharded": ({**HSDP, **SHARDED}, {})})], ids=["shards", "replicas"]
)
def test_the_tree_is_fsdp1s(tmp_path: Path, world_size: int, cases: dict[str, tuple[dict[str, Any], dict[str, Any]]]):
    """Scripts find each file, link and key at the same path as after FSDP1's run. With replicas, one replica writes its
    shards (a full file of such a run: below)."""
    run_ranks(check_trees, world_size, str(tmp_path), cases)


# --- uploads


def bucket(folder: str, seconds: float = 0) -> Any:
    """A logger that uploads to a folder slowly and records the names of the files."""
    from composer.loggers import LoggerDestination

    class Bucket(LoggerDestination):
        def __init__(self) -> None:
            self.names: list[str] = []

        def upload_file(self, state: Any, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
            time.sleep(seconds)
            self.names.append(remote_file_name)
            into = Path(folder, remote_file_name)
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file_path, into)

    return Bucket()


def check_uploads(folder: str, kind: str) -> None:
    warnings.simplefilter("ignore")
    uploaded: dict[str, list[str]] = {}
    for who, under in (("FSDP1", FSDP1_saving), ("FSDP2", FSDP2), ("async", FSDP2)):
        # With a limit of 0, Composer's rank 0 removes shards while rank 1 uploads its own, so FSDP1's run keeps them.
        keep = -1 if who == "FSDP1" and kind == "sharded" else 0
        remote = bucket(f"{folder}/{who}-bucket", seconds=0.2 if keep == 0 and dist.get_rank() == 1 else 0)
        options = {"save_interval": "1ba", "save_num_checkpoints_to_keep": keep, "run_name": "run", "loggers": [remote]}
        config = {"state_dict_type": kind, **({"async_save": True} if who == "async" else {})}
        fit(under, config, batches=2, save_folder=f"{folder}/{who}/saved", **options)
        uploaded[who] = [name.replace(f"/{who}/", "/") for name in remote.names]
        dist.barrier()
        assert bool(os.listdir(f"{folder}/{who}/saved")) == (keep != 0), f"{who}: kept, or not, all the same"
        dist.barrier()
        if dist.get_rank() == 0:
            [saved] = Path(f"{folder}/{who}-bucket").rglob("saved")
            assert (saved / "latest-rank0.pt.symlink").read_text().endswith(named(kind, 2))
            assert read(saved / named(kind, 2))["state"]["model"]
    assert uploaded["FSDP1"] == uploaded["FSDP2"] == uploaded["async"], uploaded
    assert uploaded["FSDP1"] or (kind == "full" and dist.get_rank() == 1), uploaded


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_uploads_are_fsdp1s(tmp_path: Path, kind: str):
    """The bucket has the same complete files as after FSDP1's run, uploaded in its order: the link last, after its
    file."""
    run_ranks(check_uploads, 2, str(tmp_path), kind)


# --- the same contents as Composer's own writer


CONFIGS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "FULL_SHARD": lambda model: {},
    "NO_SHARD": lambda model: {"sharding_strategy": "NO_SHARD"},
    "CPU offload, checkpointing": lambda model: {"cpu_offload": True, "activation_checkpointing": True},
    "an ignored module": lambda model: {"ignored_modules": [model.model.blocks[0]]},
    "SHARD_GRAD_OP, after an eval": lambda model: {"sharding_strategy": "SHARD_GRAD_OP"},
}
OF_FOUR_RANKS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "int": lambda model: {"reshard_after_forward": 2},
    "HSDP": lambda model: HSDP,
    "groups apart": lambda model: {"process_group": "mod2"},
}


def check_against_composers(folder: str, names: list[str]) -> None:
    from composer.utils import checkpoint

    warnings.simplefilter("ignore")

    def check(name: str) -> None:
        model = build_model()
        config = {**CONFIGS, **OF_FOUR_RANKS}[name](model)
        trainer = make_trainer(config, model=model, batches=1, optimizer="groups", eval_interval="1ba")
        trainer.fit()
        found = []
        for weights_only in (False, True):
            ours, theirs = (f"{folder}/{name}-{weights_only}-{who}.pt" for who in ("ours", "composers"))
            trainer.save_checkpoint(ours, weights_only=weights_only)
            gathering = checkpoint._save_checkpoint.__wrapped__
            assert gathering(trainer.state, theirs, weights_only=weights_only) or dist.get_rank()
            if dist.get_rank() == 0:
                found += checkpoint_differences(ours, theirs)
        trainer.close()
        assert not found, found

    with FSDP2():
        for_each(check, {name: (name,) for name in names})


@pytest.mark.parametrize(("world_size", "names"), [(2, [*CONFIGS]), (4, [*OF_FOUR_RANKS])], ids=["2", "4"])
def test_contents_are_composers(tmp_path: Path, world_size: int, names: list[str]):
    """Streaming saves memory without a difference: bit for bit the state that Composer gathers and writes, also with
    replicas and with process groups that train independently."""
    run_ranks(check_against_composers, world_size, str(tmp_path), names)


# --- back to FSDP1


@on_ranks(2)
def test_fsdp1_goes_on_from_ours(folder: str):
    """Moving to FSDP2 can be undone: FSDP1 itself resumes from full and sharded checkpoints of FSDP2, with the same
    losses."""
    warnings.simplefilter("ignore")
    cases: dict[str, dict[str, Any]] = {
        "full, flat": {"use_orig_params": False},
        "sharded": {**SHARDED, "activation_checkpointing": True},
    }
    if IS_THOROUGH:
        cases["sharded, flat"] = {**SHARDED, "use_orig_params": False}
    saving = {"batches": 4, "optimizer": "adamw", "save_interval": "2ba"}
    losses = {name: fit(FSDP2, dict(c), save_folder=f"{folder}/{name}", **saving).losses for name, c in cases.items()}

    def check(name: str, config: dict[str, Any]) -> None:
        file = named("sharded" if "sharded" in name else "full", 2)
        theirs = fit(FSDP1_saving, dict(config), batches=4, optimizer="adamw", load_path=f"{folder}/{name}/{file}")
        assert theirs.shards == {"FullyShardedDataParallel"}
        difference = largest_difference(theirs.losses, losses[name][2:])
        assert difference <= 1e-6, f"{name}: FSDP1 {theirs.losses}, ours {losses[name]}"

    for_each(check, {name: (name, config) for name, config in cases.items()})


# --- errors


@on_ranks(2)
def test_a_folder_that_cannot_be_written(folder: str):
    """Every rank raises with the reason, and no partial file is left."""
    warnings.simplefilter("ignore")
    Path(folder, "taken").touch()
    with FSDP2():
        trainer = make_trainer({}, batches=1, optimizer="adamw")
        trainer.fit()
        for filename in (f"{folder}/taken/x.pt", f"{folder}/taken/x.tar.gz"):
            with pytest.raises(CheckpointError, match="taken/"):
                trainer.save_checkpoint(filename)
        broken = mock.patch("composer_fsdp2.compat.saving.shutil.copyfileobj", side_effect=OSError(28, "disk full"))
        with broken, pytest.raises(CheckpointError, match="disk full"):
            trainer.save_checkpoint(f"{folder}/x.pt.gz")
        trainer.close()
    dist.barrier()
    assert os.listdir(folder) == ["taken"], os.listdir(folder)


@on_ranks(2)
def test_the_link_is_never_away(folder: str):
    """Composer removed the link before creating the new one; a run killed in between left no link to resume from."""
    warnings.simplefilter("ignore")
    link, seen = Path(folder, "latest-rank0.pt"), []
    replace = os.replace

    def watching(source: Any, target: Any) -> None:
        if Path(target) == link:
            seen.append(link.exists())
        replace(source, target)
        if Path(target) == link:
            assert link.exists()

    removed = []

    def remove(path: Any, *args: Any) -> None:
        removed.append(Path(path).name)
        os.unlink(path)

    with mock.patch("os.replace", watching), mock.patch("os.remove", remove):
        fit(FSDP2, {}, batches=3, save_folder=folder, save_interval="1ba", save_num_checkpoints_to_keep=1)
    if dist.get_rank() == 0:
        assert seen == [False, True, True], "the link was away while it was replaced"
        assert removed == ["ep0-ba1-rank0.pt", "ep0-ba2-rank0.pt"], removed


# --- a compressor


@on_ranks(2)
def test_a_compressor_takes_longer_than_collectives_may(folder: str):
    """No rank waits for the compressor in a collective, because NCCL's watchdog would end the job."""
    from composer_fsdp2.compat import saving

    group = dist.new_group(timeout=timedelta(seconds=1))
    state = {"state": {"w": DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Shard(0)])}}
    pack = saving._pack

    def slow(*paths: Path) -> None:
        time.sleep(1.7)
        pack(*paths)

    with mock.patch.object(saving, "_pack", slow):
        saving.write_full(state, f"{folder}/model.tar", group)
    full = mock.patch.object(saving, "_pack", side_effect=OSError(28, "No space left on device"))
    with full, pytest.raises(CheckpointError, match=r"cannot be packed: OSError.*No space left.*file is unchanged"):
        saving.write_full(state, f"{folder}/model.tar", group)
    assert os.listdir(folder) == ["model.tar"]
