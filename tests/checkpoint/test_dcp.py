"""DCP directories: torch's own reader and ours see the same; what is missing or outside is refused."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from support.checkpoints.samples import LEGACY, composer_state, leaves, values_of
from support.comparing import assert_same
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from composer_fsdp2 import CheckpointError, inspect_checkpoint
from composer_fsdp2.checkpoint.layouts import dcp
from composer_fsdp2.checkpoint.verify.verification import verify_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")

OLD = ["c172/sharded", "c172/local-flat", "c220/sharded", "c220/sharded-mesh"]


def of_torch(folder: Path, scratch: Path) -> dict[Any, Any]:
    """Everything in a directory, read by torch."""
    dcp_to_torch_save(folder, scratch)
    whole = torch.load(scratch, weights_only=False)
    if "optimizers" in whole:  # torch < 2.3 wrote it beside the state
        whole["state"]["optimizers"] = whole.pop("optimizers")
    return dict(leaves(whole))


@pytest.mark.parametrize("name", OLD)
def test_old_directory_holds_what_torch_reads(tmp_path: Path, name: str):
    """ShardedTensor, DTensor and flat checkpoints of Composer 0.17 and 0.22 are read whole, entry by entry."""
    folder = LEGACY / name / "ep0-ba3"
    assert_same(values_of(inspect_checkpoint(folder)), of_torch(folder, tmp_path / "x.pt"), in_bits=True)


def test_verify_finds_torchs_conversion_equal(tmp_path: Path):
    """A sharded checkpoint and torch's own conversion of it are equal, though one is flattened and in boxes."""
    source = LEGACY / "c220" / "sharded" / "ep0-ba3"
    dcp_to_torch_save(str(source), str(tmp_path / "file.pt"))
    assert (report := verify_checkpoint(tmp_path / "file.pt", source)).ok, str(report)
    assert (report := verify_checkpoint(source, tmp_path / "file.pt")).ok, str(report)


def test_old_directories_are_told_apart():
    """The layout decides how a checkpoint can be loaded: optimizer at the root, flat parameters, or neither."""
    found = {name: inspect_checkpoint(LEGACY / name / "ep0-ba3") for name in OLD}
    assert {name: i.optimizer_at_root for name, i in found.items()} == {n: n.startswith("c172") for n in OLD}
    assert {name: i.flat for name, i in found.items()} == {n: n == "c172/local-flat" for n in OLD}
    assert {i.writer.composer_version for i in found.values()} == {"0.17.2", "0.22.0"}
    assert str(found["c220/sharded-mesh"].writer.sharding).split(",")[0] == "DTensor"
    assert all(i.remarks == () and i.timestamp["batch"] == 3 for i in found.values())


def test_directory_of_this_torch_holds_what_was_saved(tmp_path: Path):
    """Since torch 2.4 every leaf is an entry of its own; they come together again."""
    state = composer_state()
    torch_dcp.save(state, checkpoint_id=str(tmp_path))
    inventory = inspect_checkpoint(tmp_path)
    assert_same(values_of(inventory), dict(leaves(state)), in_bits=True)
    assert inventory.groups("AdamW")[0]["params"] == ["model.weight", "model.bias"]
    assert inventory.writer.composer_version == "0.32.1"


def test_part_of_a_state_is_read_to_where_it_belongs(tmp_path: Path):
    """Composer's newer package saves the optimizer alone, without Composer's keys above it."""
    optimizer = composer_state()["state"]["optimizers"]["AdamW"]
    torch_dcp.save(optimizer, checkpoint_id=str(tmp_path))
    inventory = dcp.read(tmp_path, False, prefix=("state", "optimizers", "AdamW"))
    assert_same(
        values_of(inventory),
        {("state", "optimizers", "AdamW", *path): v for path, v in leaves(optimizer)},
        in_bits=True,
    )


def test_directory_of_another_trainer_is_refused(tmp_path: Path):
    """torch's own examples save {'model': ..., 'optim': ...}: the keys are said, nothing is guessed."""
    torch_dcp.save({"model": {"w": torch.ones(2)}, "optim": {"lr": 1.0}}, checkpoint_id=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"not by Composer.*model, optim"):
        inspect_checkpoint(tmp_path)


def edited(change: Callable[[Any], None], folder: Path) -> Path:
    """A copy of an old directory whose .metadata was changed, with torch's classes."""
    shutil.copytree(LEGACY / "c220" / "sharded" / "ep0-ba3", folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def leave_the_folder(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = "../" + info.relative_path


def lose_a_chunk(metadata: Any) -> None:
    metadata.state_dict_metadata["state.model.model.wte.weight"].chunks.pop()


def lose_a_path(metadata: Any) -> None:
    """Of an entry whose name does not say that one of its parts is a number: ``rng.0.torch``."""
    metadata.planner_data.pop(next(name for name in metadata.planner_data if name.startswith("rng.0")))


def point_beyond_the_end(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).length = 1 << 40


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (leave_the_folder, "outside of the folder"),
        (lose_a_chunk, "wte.weight.*holds? .* elements"),
        (point_beyond_the_end, "truncated"),
        (lose_a_path, "the path of rng.0.* is that of another entry"),
    ],
)
def test_metadata_that_lies_is_refused(tmp_path: Path, change: Callable[[Any], None], text: str):
    """torch follows '../', and leaves rows of a tensor as they were where a chunk is not listed."""
    with pytest.raises(CheckpointError, match=text):
        inspect_checkpoint(edited(change, tmp_path / "x"))


@pytest.mark.parametrize(("lost", "text"), [(".metadata", "no .metadata"), ("__1_0.distcp", "__1_0.distcp: missing")])
def test_missing_file_is_named(tmp_path: Path, lost: str, text: str):
    """One file less after a copy between machines is found before training starts."""
    folder = edited(lambda metadata: None, tmp_path / "x")
    (folder / lost).unlink()
    with pytest.raises(CheckpointError, match=text):
        inspect_checkpoint(folder)
