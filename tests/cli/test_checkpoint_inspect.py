"""``composer-fsdp2 checkpoint inspect`` as a user types it, and Composer's own files in every form."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints.samples import LEGACY, leaves, values_of
from support.commands import Ended, run_forked
from support.comparing import assert_same, full_parameters
from support.oracle import FSDP1
from support.ranks import run_ranks
from support.trainers import make_trainer

from composer_fsdp2 import inspect_checkpoint
from composer_fsdp2.checkpoint.layouts.packed import unpacked

pytestmark = pytest.mark.composer

INSPECT = ["checkpoint", "inspect"]


# --- the command


MODELS = """from torch import nn


def linear():
    return nn.Linear(3, 2)


def wide():
    return nn.Linear(4, 2)
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    folder = tmp_path_factory.mktemp("inspect")
    shutil.copytree(LEGACY / "c172" / "full", folder / "ein Läuf, [bold]" / "checkpoints")
    shutil.copytree(LEGACY / "c220" / "sharded" / "ep0-ba3", folder / "damaged")
    (folder / "damaged" / "__1_0.distcp").unlink()
    (folder / "run.yaml").write_text("a: b\n")
    torch.save({"state": {"model": {"w": torch.ones(2)}, "callbacks": Path("x")}}, folder / "objects.pt")
    torch.save({"state": {"model": torch.nn.Linear(3, 2).state_dict()}}, folder / "weights.pt")
    (folder / "models.py").write_text(MODELS)
    commands = {
        "run folder": [*INSPECT, "ein Läuf, [bold]"],
        "all tensors": [*INSPECT, "--tensors", "ein Läuf, [bold]/checkpoints/latest-rank0.pt"],
        "json": [*INSPECT, "--json", LEGACY / "c220" / "sharded-mesh"],
        "damaged": [*INSPECT, "damaged"],
        "no checkpoint": [*INSPECT, "run.yaml"],
        "not trusted": [*INSPECT, "objects.pt"],
        "trusted": [*INSPECT, "--trust", "objects.pt"],
        "fits": [*INSPECT, "weights.pt", "--model", "models.py:linear"],
        "does not fit": [*INSPECT, "weights.pt", "--model", "models:wide"],
        "no such function": [*INSPECT, "weights.pt", "--model", "models.py:other"],
        "no such module": [*INSPECT, "weights.pt", "--model", "nowhere:other"],
        "no function": [*INSPECT, "weights.pt", "--model", "models.py"],
    }
    return run_forked(commands, folder)


def test_report_says_what_a_run_folder_holds(ended: dict[str, Ended]):
    """The first look at an old checkpoint: contents, writer, date and size; brackets and umlauts in names are printed
    unchanged."""
    report = ended["run folder"]
    assert report.code == 0, report.err
    for text in (
        "ein Läuf, [bold]/checkpoints/ep0-ba3-rank0.pt",
        "monolithic",
        "Composer 0.17.2, torch 2.1.2",
        "2 ranks",
        "batch 3",
        "optimizer DecoupledAdamW",
        "lr 0.01",
        "(--tensors lists all)",
    ):
        assert text in report.out, text
    assert len(ended["all tensors"].out.splitlines()) > 65 > len(report.out.splitlines())


def test_exit_code_says_whose_turn_it_is(ended: dict[str, Ended]):
    """A script distinguishes a damaged checkpoint (1) from a wrong path (2); the error is one line."""
    data = json.loads(ended["json"].out)
    assert (data["layout"], data["timestamp"]["batch"]) == ("DCP directory", 3)
    assert data["optimizers"][0]["class"] == "DecoupledAdamW"
    for name, (code, text) in {
        "damaged": (1, "__1_0.distcp: missing"),
        "not trusted": (1, "pathlib.PosixPath"),
        "no checkpoint": (2, "begins with"),
        "no such function": (2, "--model models.py:other"),  # not a fault of the file
        "no such module": (2, "--model nowhere:other"),
        "no function": (2, "function"),
    }.items():
        done = ended[name]
        assert done.code == code and done.out == "" and "Traceback" not in done.err, (name, done)
        assert done.err.startswith("composer-fsdp2: ") and text in done.err, (name, done)
        assert name == "damaged" or done.err.count("\n") == 1, (name, done)
    assert ended["trusted"].code == 0 and "pathlib.PosixPath is imported" in ended["trusted"].err


def test_model_says_whether_it_loads(ended: dict[str, Ended]):
    """The user sees mismatches before waiting for GPUs."""
    assert (ended["fits"].code, ended["does not fit"].code) == (0, 1)
    assert "it fits" in ended["fits"].out
    assert all(text in ended["does not fit"].out for text in ("it does not fit", "(2, 3)", "(2, 4)"))


# --- files of the real Composer


ENDINGS = {".pt": None, ".pt.gz": "gzip", ".pt.zst": "zstd", ".tar": None, ".tar.gz": None}  # and Composer's tool


def check_files(folder: str, endings: list[str]) -> None:
    """One run on one device writes a file of each suffix, and the folder of composer.checkpoint."""
    from composer.callbacks import CheckpointSaver
    from composer.checkpoint.save import save_checkpoint_to_disk

    savers = [
        CheckpointSaver(
            folder=f"{folder}/{ending}", filename="ep{epoch}-ba{batch}-rank{rank}" + ending, save_interval="2ba"
        )
        for ending in endings
    ]
    trainer = make_trainer(None, optimizer="adamw", batches=2, callbacks=savers)
    trainer.fit()
    save_checkpoint_to_disk(f"{folder}/package", trainer.state)
    trainer.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    can_be_written = [ending for ending, tool in ENDINGS.items() if tool is None or shutil.which(tool)]
    run_ranks(check_files, 1, str(folder), can_be_written)
    return folder


@pytest.fixture(scope="module")
def plain(saved: Path) -> Path:
    return saved / ".pt" / "ep0-ba2-rank0.pt"


def parts(value: Any) -> dict[Any, Any]:
    """A checkpoint's contents by path; torch's version is a subclass of str, and is read as str."""
    return {path: str(part) if isinstance(part, str) else part for path, part in leaves(value)}


def test_file_of_this_composer_holds_what_torch_load_gives(plain: Path):
    """One device: optimizer state is keyed by name since Composer 0.19, as FSDP's, although it was not sharded."""
    inventory = inspect_checkpoint(plain.parent)
    assert inventory.path.name == plain.name and inventory.writer.world_size == 1
    assert inventory.optimizers[0].keyed_by == "name" and inventory.writer.sharding == "not sharded"
    assert_same(values_of(inventory), parts(torch.load(plain, weights_only=False)), in_bits=True)


@pytest.mark.parametrize("ending", [ending for ending in ENDINGS if ending != ".pt"])
def test_compressed_file_of_composer_is_described_and_unpacked(tmp_path: Path, saved: Path, plain: Path, ending: str):
    """Files that Composer compressed, by their suffix, are unpacked bit for bit."""
    if not (saved / ending).exists():
        pytest.skip(f"Composer needs {ENDINGS[ending]} to write it")
    inventory = inspect_checkpoint(saved / ending)
    assert inventory.path.name == "ep0-ba2-rank0" + ending and inventory.timestamp["batch"] == 2
    found, expected = (torch.load(file, weights_only=False) for file in (unpacked(inventory.path, tmp_path), plain))
    assert_same(found["state"]["model"], expected["state"]["model"], in_bits=True)


def test_folder_of_the_checkpoint_package_is_read(saved: Path):
    """composer.checkpoint.save: model, optimizer and the rest have the same paths as in a monolithic file."""
    [folder] = (saved / "package").iterdir()
    inventory = inspect_checkpoint(saved / "package")
    assert inventory.path == folder and inventory.layout == "composer.checkpoint folder"
    assert inventory.writer.composer_version and inventory.writer.world_size == 1
    found = values_of(inventory)
    resumption = pickle.loads((folder / "resumption.pkl").read_bytes())
    resumption["timestamp"] = {"Timestamp": resumption["timestamp"]}
    rng = {"rng": resumption.pop("rng")}
    state = {
        "model": torch.load(folder / "model" / "model.pt"),
        "optimizers": {"": torch.load(folder / "optim" / "optim.pt")},
        **resumption,
    }
    found = {entry: value for entry, value in found.items() if entry[:2] != ("state", "metadata")}
    assert_same(found, parts({"state": state, **rng}), in_bits=True)


def check_sharded_package(folder: str) -> dict[str, torch.Tensor]:
    """Saves with FSDP1 on this rank; returns the full parameters."""
    from composer.checkpoint.save import CheckpointSaveOptions, save_checkpoint_to_disk

    with FSDP1():
        trainer = make_trainer({}, optimizer="adamw", batches=2)
        trainer.fit()
        # overwrite: rank 1 may create a folder before rank 0 checks for it, and Composer would refuse it.
        save_checkpoint_to_disk(folder, trainer.state, CheckpointSaveOptions(sharded_checkpoint=True, overwrite=True))
        parameters = full_parameters(trainer.state.model)
        trainer.close()
    return parameters


def test_sharded_folder_of_the_checkpoint_package_is_read(tmp_path: Path):
    """Two ranks of FSDP1: DCP directories for model and optimizer, without Composer's outer keys."""
    parameters = run_ranks(check_sharded_package, 2, str(tmp_path))[0]
    inventory = inspect_checkpoint(tmp_path)
    values = values_of(inventory)
    model = {entry[2]: value for entry, value in values.items() if entry[:2] == ("state", "model")}
    assert_same({name: model[name] for name in parameters}, parameters, in_bits=True)
    (optimizer,) = inventory.optimizers
    assert optimizer.keyed_by == "name" and set(optimizer.state) <= set(model)
    assert inventory.groups("")[0]["lr"] == 0.01 and inventory.timestamp["batch"] == 2
    assert inventory.writer.world_size == 2 and "DTensor" in str(inventory.writer.sharding)
