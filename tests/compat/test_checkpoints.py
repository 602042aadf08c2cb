"""Checkpoints of the real Trainer: a resumed run is equal bit for bit; state can be read after a forward.

FSDP1 resumes ours in test_saving.py; its own checkpoints, autoresume and load_monolith_rank0_only are in
test_loading.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import assert_same, full_parameters
from support.on_ranks import on_ranks
from support.oracle import FSDP2
from support.ranks import run_ranks
from support.saved import named
from support.trainers import build_on_rank_0, build_unlike_on_rank_1, fit, make_trainer

pytestmark = pytest.mark.composer

SAVED_AT, LAST = 2, 3
SAVING: dict[str, Any] = {"batches": LAST, "optimizer": "adamw", "save_interval": f"{SAVED_AT}ba"}
RESUMING: dict[str, Any] = {"batches": LAST, "optimizer": "adamw"}


# --- save and resume

# Keys of fsdp_config, the state_dict_type, and whether the model's embeddings are tied.
Case = tuple[dict[str, Any], str, bool]
RECOMPUTED = {"activation_checkpointing": True}
NOT_REENTRANT = {**RECOMPUTED, "activation_checkpointing_reentrant": False}
ON_TWO_RANKS: dict[str, Case] = {
    "NO_SHARD": ({"sharding_strategy": "NO_SHARD"}, "sharded", True),
    "CPU offload, recomputed": ({"cpu_offload": True, **RECOMPUTED}, "full", True),
    "CPU offload": ({"cpu_offload": True}, "sharded", True),
    "SHARD_GRAD_OP, untied": ({"sharding_strategy": "SHARD_GRAD_OP", **NOT_REENTRANT}, "sharded", False),
}
ON_FOUR_RANKS: dict[str, Case] = {
    "HYBRID_SHARD": ({"sharding_strategy": "HYBRID_SHARD", "data_parallel_replicate_degree": 2}, "sharded", True),
}


def check_resumption(path: str, keys: dict[str, Any], state_dict_type: str, tied: bool) -> None:
    config = {**keys, "state_dict_type": state_dict_type}
    continuous = fit(FSDP2, dict(config), tied=tied, save_folder=path, **SAVING)
    resumed = fit(FSDP2, dict(config), tied=tied, load_path=f"{path}/{named(state_dict_type, SAVED_AT)}", **RESUMING)
    assert resumed.shards == {"FSDPModule"}
    assert resumed.losses == continuous.losses[SAVED_AT:], f"{resumed.losses}, {continuous.losses}"
    assert_same(resumed.parameters, continuous.parameters)


@pytest.mark.parametrize(("world_size", "cases"), [(2, ON_TWO_RANKS), (4, ON_FOUR_RANKS)], ids=["shards", "replicas"])
def test_resumed_run_goes_on_bit_for_bit(tmp_path: Path, world_size: int, cases: dict[str, Case]):
    """A stopped and resumed run equals the run that was never stopped, in parameters, optimizer and data."""
    of_folders = {name: (f"{tmp_path}/{name}", *case) for name, case in cases.items()}
    run_ranks(for_each, world_size, check_resumption, of_folders)


# --- from rank 0's values


@on_ranks(2)
def test_load_monolith_rank0_only_without_a_file():
    """The first start of a run, without a checkpoint, is also sharded from rank 0's values."""
    monolith = {"load_monolith_rank0_only": True, "sync_module_states": True}
    expected = fit(FSDP2, {}, batches=2)

    def check(build: Callable[[], Any]) -> None:
        trained = fit(FSDP2, dict(monolith), model=build(), batches=2)
        assert trained.shards == {"FSDPModule"}
        assert trained.losses == expected.losses

    for_each(check, {build.__name__: (build,) for build in (build_unlike_on_rank_1, build_on_rank_0)})


# --- state after a forward


@on_ranks(2)
def test_state_can_be_read_after_a_forward_of_ones_own():
    """A save works after a callback that samples from the model without gradients."""
    with FSDP2():
        trainer = make_trainer({}, tied=False, batches=2, optimizer="adamw")
        trainer.fit()
        state = trainer.state
        before = full_parameters(state.model)
        with torch.no_grad():
            state.model([torch.zeros(2, 5, dtype=torch.long)])
        optimizer = state.get_optim_state_dict()["AdamW"]
        with torch.no_grad():
            state.model([torch.zeros(2, 5, dtype=torch.long)])
        model = state.get_model_state_dict()
        if dist.get_rank() == 0:  # only rank 0 has full state
            assert optimizer["state"].keys() == before.keys()
            assert_same(model, before, "after a forward of one's own")
        trainer.close()
