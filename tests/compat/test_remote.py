"""Checkpoints in object stores, through the real Trainer: each machine downloads the data of its ranks once, and no
more."""

from __future__ import annotations

import functools
import gzip
import http.server
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import assert_same, full_parameters
from support.legacy import FOLDER, checkpoint_of
from support.loading import a_trainer, store_class
from support.on_ranks import on_ranks
from support.oracle import FSDP2
from support.ranks import impatient
from support.trainers import as_machines_of_one_rank, checkpoint_error_of, fit, objects_of_ranks

pytestmark = pytest.mark.composer

KIND = "c220/sharded"
SHARDED = {"state_dict_type": "sharded"}


def load(trainer: Any, path: str, store: Any = None) -> dict[str, torch.Tensor]:
    """Loads with Composer's ``load_checkpoint``, replaced by ours, and returns the trainer's full parameters."""
    from composer.utils import checkpoint

    for parameter in trainer.state.model.parameters():
        torch.nn.init.constant_(parameter.to_local(), 7.0)
    checkpoint.load_checkpoint(path, trainer.state, trainer.logger, store, progress_bar=False)
    assert int(trainer.state.timestamp.batch) == 3
    return full_parameters(trainer.state.model)


def everything_downloaded(store: Any) -> list[str]:
    return sorted(name for rank in objects_of_ranks(store.downloaded) for name in rank)


def write(folder: str | Path, files: Mapping[str, str | bytes]) -> None:
    """Rank 0 writes; the others wait."""
    if dist.get_rank() == 0:
        for name, content in files.items():
            file = Path(folder, name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.encode() if isinstance(content, str) else content)
    dist.barrier()


# --- files and folders


@on_ranks(2)
def test_files_and_folders_load_from_a_store(folder: str):
    """Old checkpoints in a bucket load; no object is fetched twice, and no temporary file is left."""
    temporary = Path(folder, "tmp")
    packed = "c220/full.pt.gz"
    write(folder, {packed: gzip.compress(checkpoint_of("c220/full").read_bytes()), "tmp/other": ""})
    with mock.patch("tempfile.tempdir", str(temporary)), a_trainer("c220/full") as trainer:

        def check(kind: str) -> None:
            local, store = checkpoint_of(kind), store_class()(FOLDER)
            expected = load(trainer, str(local))
            name = local.relative_to(FOLDER).as_posix()
            assert_same(load(trainer, name, store), expected)
            files = [f"{name}/{file.name}" for file in local.iterdir()] if local.is_dir() else [name]
            assert everything_downloaded(store) == sorted(files)
            if not local.is_dir():
                assert_same(load(trainer, packed, store_class()(folder)), expected, packed)

        for_each(check, {kind: (kind,) for kind in ("c220/full", KIND)})
    left = [entry.name for entry in temporary.iterdir() if "check" in entry.name or "fsdp2" in entry.name]
    assert left == [], "a download stays on every machine's disk"


@on_ranks(2)
def test_other_folders_come_whole(folder: str):
    """A safetensors folder is fetched completely, because it has no list of contents as the other layouts have; the
    error for a wrong folder names it."""
    from composer.utils import checkpoint
    from safetensors.torch import save

    weights = torch.load(checkpoint_of("c220/full"), weights_only=False)["state"]["model"]
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    halves = dict(zip(names, ([*weights][:7], [*weights][7:]), strict=True))
    index = json.dumps({"metadata": {}, "weight_map": {key: name for name in halves for key in halves[name]}})
    files = {f"hf/{name}": save({key: weights[key].contiguous() for key in keys}) for name, keys in halves.items()}
    files["hf/model.safetensors.index.json"] = index.encode()
    write(folder, {**files, "run/notes.txt": "none here"})
    with a_trainer("c220/full") as trainer:
        store = store_class()(folder)
        checkpoint.load_checkpoint("hf", trainer.state, trainer.logger, store, load_weights_only=True)
        found = full_parameters(trainer.state.model)
        assert_same(found, {name: weights[name] for name in found}, "hf")
        assert everything_downloaded(store) == sorted(files)
        error = checkpoint_error_of(lambda: load(trainer, "run", store))
        assert "notes.txt" in error and "not a checkpoint" in error, error


@on_ranks(2)
def test_one_file_per_rank(folder: str):
    """Composer 0.13 wrote a file for each rank; from one of these files, all of them are fetched."""
    from composer_fsdp2 import prepare_fully_shard
    from composer_fsdp2.checkpoint.load.into_model import load_inventory
    from composer_fsdp2.checkpoint.open import opened_checkpoint
    from composer_fsdp2.compat.remote import local_checkpoint

    folder = FOLDER.parent / "per-rank-checkpoints"
    values = torch.load(folder / "whole.pt")

    def check(name: str) -> None:
        store, model = store_class()(folder), torch.nn.Module()
        model.model = torch.nn.Linear(3, 5)
        model.model.bias = torch.nn.Parameter(torch.zeros(4))
        model.model.register_buffer("buffer", torch.zeros(3, dtype=torch.long))
        prepare_fully_shard(model, None, {}, precision="fp32")
        with (
            local_checkpoint(name, store, False) as located,
            opened_checkpoint(located) as inventory,
        ):
            load_inventory(inventory, model, None, strict=name.startswith("sharded"))
        loaded = full_parameters(model)
        assert_same(loaded, {f"model.{key}": values[key] for key in ("weight", "bias")}, name)
        kind = name.partition("-")[0]
        assert everything_downloaded(store) == [f"{kind}-rank0.pt", f"{kind}-rank1.pt"]

    for_each(check, {name: (name,) for name in ("sharded-rank{rank}.pt", "local-rank0.pt")})


# --- the downloads of each machine


@on_ranks(2)
def test_each_machine_downloads_what_its_ranks_read(folder: str):
    """A node of a large run downloads only its part of a sharded checkpoint, and its ranks share the work."""
    import torch.distributed.checkpoint as dcp
    from composer.utils import reproducibility
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    from torch.distributed.checkpoint.default_planner import create_default_local_load_plan

    with a_trainer("c220/full", dict(SHARDED)) as trainer:
        saved = load(trainer, str(checkpoint_of("c220/full")))
        whole = {"state": trainer.state.state_dict(), "rng": reproducibility.get_rng_state()}
        writer = dcp.FileSystemWriter(f"{folder}/run", single_file_per_rank=False)
        dcp.save(whole, storage_writer=writer)
        # The files that torch itself would open for this rank's shards, under both names of the tied weight.
        metadata = dcp.FileSystemReader(f"{folder}/run").read_metadata()
        plan = create_default_local_load_plan(flatten_state_dict(whole)[0], metadata, strict=False)
        skipped = ("state.integrations", "state.metadata")
        needed = {
            metadata.storage_data[item.storage_index].relative_path
            for item in plan.items
            if not item.storage_index.fqn.startswith(skipped)
        }
        store = store_class()(folder)
        with as_machines_of_one_rank():
            assert_same(load(trainer, "run", store), saved, "from machines of one rank")
        assert sorted(store.downloaded) == sorted(f"run/{name}" for name in {*needed, ".metadata"})
        assert len(needed) < 0.8 * len(list(Path(folder, "run").iterdir())), "a case without a difference"
        both = set().union(*objects_of_ranks(needed))
        store = store_class()(folder)
        assert_same(load(trainer, "run", store), saved, "from one machine of two ranks")
        assert everything_downloaded(store) == sorted(f"run/{name}" for name in {*both, ".metadata"})
        shares = [len(rank) for rank in objects_of_ranks(store.downloaded)]
        assert min(shares) > 0.1 * sum(shares), f"one rank downloads for all: {shares}"


# --- names


@on_ranks(2)
def test_names_and_links(folder: str):
    """Composer's link objects in a bucket are followed to the checkpoint; the error for a wrong name lists all
    attempts."""
    links = {
        "run/latest-rank0.pt.symlink": "c220/sharded/ep0-ba3",
        "run/again.symlink": "run/latest-rank0.pt.symlink",
        "run/full-rank0.pt.symlink": "c220/full/ep0-ba3-rank0.pt\n",
        "run/uri.symlink": "folder://bucket/c220/full/ep0-ba3-rank0.pt",
        "run/circle.symlink": "run/circle",
        "run/empty.symlink": "",
        "run/nowhere.symlink": "run/ep9-ba9",
    }
    leading = (
        "run/latest-rank0.pt.symlink",
        "run/latest-rank{rank}.pt",
        "run/again",
        "run/full-rank{rank}.pt",
        "run/uri.symlink",
        "c220/sharded/ep0-ba3/",
    )
    wrong = {
        "run/ep8-ba8": ("run/ep8-ba8/.metadata", "run/ep8-ba8.symlink"),
        "run/lost.pt": ("run/lost.pt", "run/lost.pt/.metadata", "run/lost.pt.symlink"),
        "run/nowhere": ("run/nowhere.symlink", "run/ep9-ba9.symlink"),
        "run/circle": ("links", "run/circle"),
        "run/empty": ("run/empty.symlink", "an empty link"),
    }
    write(folder, links)
    if dist.get_rank() == 0:
        Path(folder, "c220").symlink_to(FOLDER / "c220")
    dist.barrier()
    store = store_class()(folder)
    with a_trainer("c220/full") as trainer:
        expected = load(trainer, str(checkpoint_of("c220/full")))
        for_each(lambda path: assert_same(load(trainer, path, store), expected), {path: (path,) for path in leading})
        before = full_parameters(trainer.state.model)

        def check_wrong(path: str, *message: str) -> None:
            error = checkpoint_error_of(lambda: load_only(trainer, path, store))
            assert all(text in error for text in message), error

        for_each(check_wrong, {path: (path, *message) for path, message in wrong.items()})
        assert_same(full_parameters(trainer.state.model), before, "after failures")


def load_only(trainer: Any, path: str, store: Any = None) -> None:
    from composer.utils import checkpoint

    checkpoint.load_checkpoint(path, trainer.state, trainer.logger, store, progress_bar=False)


# --- failures


@on_ranks(2)
def test_failed_downloads(folder: str):
    """A download that fails is repeated. If it keeps failing, every rank raises with the object's name, and nothing
    changes."""
    name = checkpoint_of(KIND).relative_to(FOLDER).as_posix()
    with a_trainer("c220/full") as trainer:
        expected = load(trainer, str(checkpoint_of("c220/full")))

        def check(file: str) -> None:
            store = store_class()(FOLDER)
            store.failures[f"{name}/{file}"] = 2
            assert_same(load(trainer, name, store), expected, "at the third attempt")
            store.failures[f"{name}/{file}"] = 5
            error = checkpoint_error_of(lambda: load_only(trainer, name, store))
            assert f"{name}/{file}" in error and "the line went dead" in error, error

        for_each(check, {file: (file,) for file in (".metadata", "__1_0.distcp")})
        # A missing or truncated file.
        whole = {f"cut/{file.name}": file.read_bytes() for file in checkpoint_of(KIND).iterdir()}
        half, store = whole.pop("cut/__1_0.distcp"), store_class()(folder)
        write(folder, whole)
        error = checkpoint_error_of(lambda: load_only(trainer, "cut", store))
        assert "cut/__1_0.distcp" in error, error
        write(folder, {"cut/__1_0.distcp": half[:9000]})
        error = checkpoint_error_of(lambda: load_only(trainer, "cut", store))
        assert "__1_0.distcp" in error and "9000" in error, error
        # A store that only one machine cannot reach.
        with as_machines_of_one_rank():
            store = store_class()(FOLDER)
            store.failures[f"{name}/.metadata"] = 5 * dist.get_rank()
            error = checkpoint_error_of(lambda: load_only(trainer, name, store))
            assert f"{name}/.metadata" in error and "the line went dead" in error, error
        assert_same(full_parameters(trainer.state.model), expected, "after failures")


@on_ranks(2)
def test_a_machine_with_a_slow_line(folder: str):
    """Machines that had finished their downloads waited for the slowest one in a collective, whose time-out ended the
    job."""
    name = "c220/sharded/ep0-ba3"
    slow = f"{name}/.metadata" if dist.get_rank() == 0 else f"{name}/__1_0.distcp"
    with a_trainer("c220/full") as trainer:
        expected = load(trainer, str(checkpoint_of("c220/full")))
        store = store_class()(FOLDER)
        download = store.download_object

        def slowly(object_name: str, *args: Any, **options: Any) -> None:
            threading.Event().wait(1.3 * (object_name == slow))  # the tests skip the sleep between attempts
            download(object_name, *args, **options)

        with impatient(1.0), as_machines_of_one_rank(), mock.patch.object(store, "download_object", slowly):
            assert_same(load(trainer, name, store), expected)
        assert slow in store.downloaded


# --- other ways to name a store


def a_logger() -> Any:
    """A logger with the files of ``FOLDER``, as RemoteUploaderDownloader has them."""
    from composer.loggers import LoggerDestination
    from composer.utils import get_file

    class FolderLogger(LoggerDestination):
        def download_file(
            self, remote_file_name: str, destination: str, overwrite: bool = False, progress_bar: bool = True
        ) -> None:
            get_file(remote_file_name, destination, store_class()(FOLDER), overwrite, progress_bar=False)

    return FolderLogger()


@contextmanager
def the_scheme(root: str | Path) -> Iterator[None]:
    """Registers ``folder://bucket/...`` as a URI with Composer."""
    from composer.utils import file_helpers

    factories = {"folder": lambda bucket, path: store_class()(root)}
    with mock.patch.dict(file_helpers.BACKEND_TO_OBJECT_STORE_FACTORY, factories):
        yield


@contextmanager
def served(root: Path) -> Iterator[str]:
    """The address of a web server with the files of a folder."""
    address: list[Any] = [None]
    server = None
    if dist.get_rank() == 0:
        handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(root))
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        address = [f"http://127.0.0.1:{server.server_port}"]
    dist.broadcast_object_list(address)
    try:
        yield address[0]
    finally:
        dist.barrier()
        if server is not None:
            server.shutdown()
            server.server_close()


@on_ranks(2)
def test_names_that_lead_out_of_a_bucket(folder: str):
    """Anyone with write access to a bucket could write any file of its reader with a name like `run//abs/path`.
    tests/checkpoint/test_inside.py has other such names."""
    evil = Path(folder, "evil")
    write(folder, {"bucket/run/model.safetensors": ""})
    store = store_class()(f"{folder}/bucket")
    first = ["run/", "run/model.safetensors"]  # a name with a trailing slash is a folder object, not a file

    with a_trainer("c220/full") as trainer:
        with mock.patch.object(store, "list_objects", return_value=[*first, f"run/{evil}"]):
            error = checkpoint_error_of(lambda: load_only(trainer, "run", store))
        assert "lies outside of the folder" in error and "listing of run" in error, error
        assert not evil.exists()
        with mock.patch.object(store, "list_objects", return_value=first):
            assert "model.safetensors" in checkpoint_error_of(lambda: load_only(trainer, "run", store))


@on_ranks(2)
def test_other_ways_to_name_a_store(folder: str):
    """load_object_store, a logger, a URI in load_path and a URL load the same checkpoint."""
    name = checkpoint_of(KIND).relative_to(FOLDER).as_posix()
    with a_trainer("c220/full") as trainer:
        expected = load(trainer, str(checkpoint_of("c220/full")))
        with served(FOLDER) as address:
            assert_same(load(trainer, f"{address}/c220/full/ep0-ba3-rank0.pt"), expected, "URL")
            assert_same(load(trainer, f"{address}/{name}"), expected, "URL of a folder")
            error = checkpoint_error_of(lambda: load_only(trainer, f"{address}/c220/none.pt"))
            assert f"{address}/c220/none.pt" in error, error
    # The Trainer's own arguments.
    path = f"folder://bucket/{name}"
    with the_scheme(FOLDER), a_trainer("c220/full", load_path=path) as trainer:
        assert_same(full_parameters(trainer.state.model), expected)
    with a_trainer("c220/full", load_path=name, load_object_store=a_logger()) as trainer:
        assert int(trainer.state.timestamp.batch) == 3
        assert_same(full_parameters(trainer.state.model), expected)


# --- autoresume


def uploader_of(root: str) -> Any:
    """Composer's RemoteUploader without its processes, which only support Composer's stores."""
    from composer.utils.remote_uploader import RemoteFilesExistingCheckStatus

    store = store_class()(root)

    def upload(remote_file_name: str, file_path: Path, overwrite: bool) -> Any:
        store.upload_object(remote_file_name, file_path)
        return done(0)

    # Composer checks on rank 0 while other ranks still upload; the saver checks again at the end.
    exists = done(RemoteFilesExistingCheckStatus.EXIST)
    check = mock.Mock(return_value=exists)
    return mock.Mock(remote_backend=store, upload_file_async=upload, check_remote_files_exist_async=check)


def done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


@on_ranks(2)
def test_autoresume_from_a_bucket(folder: str):
    """A run that a scheduler moves to another machine resumes from the newest checkpoint in its bucket, bit for bit."""
    os.chdir(folder)  # Composer copies a remote save_folder to the working folder
    training: dict[str, Any] = {"optimizer": "adamw", "batches": 4}
    bucket, config = f"{folder}/bucket", dict(SHARDED)
    continuous = fit(FSDP2, {}, **training)
    options: dict[str, Any] = {
        "autoresume": True,
        "run_name": "again",
        "save_folder": "folder://bucket/{run_name}/checkpoints",
        "save_interval": "2ba",
        "load_progress_bar": False,
        **training,
    }
    uploader = mock.patch("composer.callbacks.checkpoint_saver.RemoteUploader", return_value=uploader_of(bucket))
    with the_scheme(bucket), uploader:
        first = fit(FSDP2, dict(config), **{**options, "batches": 2})
        dist.barrier()
        if dist.get_rank() == 0:
            for path in Path(folder).iterdir():  # a new machine has only the bucket
                if path.name != "bucket":
                    shutil.rmtree(path)
            assert Path(bucket, "again/checkpoints/latest-rank0.pt.symlink").is_file()
        dist.barrier()
        second = fit(FSDP2, dict(config), **options)
    assert first.losses + second.losses == continuous.losses, f"{second.losses}"
