"""CPU offload under the Trainer: what Composer's FSDP1 refused trains, clips, saves and resumes with FSDP1's curve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.cases import for_each
from support.commands import BIN, SCRIPT, run_all
from support.gpus import gpu_marks, num_ranks
from support.oracle import FSDP1, FSDP2
from support.ranks import run_ranks
from support.saved import named
from support.trainers import fit, largest_difference

pytestmark = pytest.mark.composer

BATCHES, SAVED_AT = 6, 3
COMMON = ["--batches", BATCHES, "--microbatch", "2", "--optimizer", "adamw", "--clip", "0.1"]

# Without a GPU only the wiring shows: parameters and communication share the CPU.
CASES = [
    pytest.param("cpu", "full", marks=pytest.mark.slow),
    pytest.param("cpu", "sharded", marks=pytest.mark.slow),
    pytest.param("gpu", "full", marks=gpu_marks()),
    pytest.param("gpu", "sharded", marks=gpu_marks()),
]


def check_offloaded(folder: str) -> None:
    training: dict[str, Any] = {"batches": BATCHES, "optimizer": "adamw", "clip": ("norm", 0.1)}
    theirs = fit(FSDP1, {}, **training)
    assert theirs.shards == {"FullyShardedDataParallel"}

    def check(state_dict_type: str) -> None:
        config = {"cpu_offload": True, "state_dict_type": state_dict_type}
        saved = f"{folder}/{state_dict_type}"
        whole = fit(FSDP2, dict(config), save_folder=saved, save_interval=f"{SAVED_AT}ba", **training)
        assert whole.shards == {"FSDPModule"}
        difference = largest_difference(whole.losses, theirs.losses)
        assert difference <= 1e-6, f"{whole.losses}, {theirs.losses}"
        resumed = fit(FSDP2, dict(config), load_path=f"{saved}/{named(state_dict_type, SAVED_AT)}", **training)
        assert resumed.losses == whole.losses[SAVED_AT:], f"{resumed.losses}, {whole.losses}"

    for_each(check, {state_dict_type: (state_dict_type,) for state_dict_type in ("full", "sharded")})


def test_offloaded_run_has_fsdp1s_curve(tmp_path: Path):
    """cpu_offload is carried over, and clipping, saving and loading know that parameters lie in host memory."""
    run_ranks(check_offloaded, 2, str(tmp_path))


def launched(device: str, *command: Any) -> list[Any]:
    return [BIN / "composer", "-n", 2 if device == "cpu" else num_ranks(2), *command, "--device", device, *COMMON]


@pytest.mark.parametrize(("device", "state_dict_type"), CASES)
def test_offloaded_run_saves_and_resumes_with_fsdp1s_curve(tmp_path: Path, device: str, state_dict_type: str):
    """A model too large for the device trains from host memory over plain NCCL, which knows no CPU tensors."""
    offloaded = json.dumps({"cpu_offload": True, "state_dict_type": state_dict_type})
    ours = launched(device, "-m", "composer_fsdp2", "run", SCRIPT, "--fsdp", offloaded)
    done = run_all(
        {
            "fsdp1": [
                "env",
                f"FSDP1_ON_CPU={'1' if device == 'cpu' else ''}",
                *launched(device, SCRIPT),
                "--out",
                "fsdp1.json",
            ],
            "whole": [*ours, "--out", "whole.json", "--save-folder", "saved", "--save-interval", SAVED_AT],
        },
        tmp_path,
    )
    checkpoint = f"saved/{named(state_dict_type, SAVED_AT)}"
    done |= run_all({"resumed": [*ours, "--out", "resumed.json", "--load-path", checkpoint]}, tmp_path)
    assert [each.code for each in done.values()] == [0, 0, 0], "\n".join(each.err for each in done.values())
    fsdp1, whole, resumed = (json.loads((tmp_path / f"{name}.json").read_text()) for name in done)
    assert "FullyShardedDataParallel" in fsdp1["kinds"] and "FSDPModule" in whole["kinds"]
    # On the GPU the default precision is a low one, whose sums depend on where they are taken.
    tolerance = 1e-6 if device == "cpu" else 1e-2
    assert largest_difference(whole["losses"], fsdp1["losses"]) <= tolerance, f"{whole['losses']}, {fsdp1['losses']}"
    assert resumed["losses"] == whole["losses"][SAVED_AT:]
