"""CPU offload under the Trainer: what Composer's FSDP1 refused trains, clips, saves and resumes with FSDP1's curve.

Without a GPU only the wiring shows: parameters and communication share the CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.cases import for_each
from support.oracle import FSDP1, FSDP2
from support.ranks import run_ranks
from support.saved import named
from support.trainers import fit, largest_difference

pytestmark = pytest.mark.composer

BATCHES, SAVED_AT = 4, 2


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
