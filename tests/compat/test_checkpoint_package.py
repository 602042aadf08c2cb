"""``composer.checkpoint``, Composer's functions for saving and loading parts of a state, with a sharded model."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import assert_same, full_parameters
from support.on_ranks import on_ranks
from support.oracle import FSDP2, FSDP1_saving, Under
from support.saved import form, read
from support.trainers import build_model, full_optimizer_state, make_trainer
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2._torch.groups import groups_of, state_of

pytestmark = pytest.mark.composer

STEPS = 2


def trained(**options: Any) -> Any:
    """A Trainer after fit; its values agree under FSDP1 and under FSDP2 to the last digits. Called within ``under``."""
    trainer = make_trainer({}, batches=STEPS, optimizer="groups", **options)
    trainer.fit()
    return trainer


# --- is_model_fsdp


@on_ranks(2)
def test_is_model_fsdp():
    """Callbacks and scripts that call `composer.utils.is_model_fsdp` treated a sharded model as unsharded."""
    import composer.utils
    from composer.algorithms.ema import ema
    from composer.utils import misc

    model = build_model()
    with FSDP2():
        assert not composer.utils.is_model_fsdp(model)
        trainer = make_trainer({}, model=model)
        assert composer.utils.is_model_fsdp(model) and misc.is_model_fsdp(model)
        with ema.get_model_context_manager(model):  # EMA averages shards
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        trainer.close()
    assert not composer.utils.is_model_fsdp(model)  # Composer's own result


# --- saving


# The paths of sharded and full checkpoints by part.
FILES = {
    True: {"model": "model", "optimizer": "optim"},
    False: {"model": "model/model.pt", "optimizer": "optim/optim.pt"},
}


def saved(under: Under, folder: Path) -> dict[bool, dict[str, Any]]:
    """The files of ``save_checkpoint_to_disk``, sharded and full."""
    from composer.checkpoint.save import save_checkpoint_to_disk

    with under():
        trainer = trained(eval_interval="2ba")  # after an evaluation the parameters are unsharded
        for sharded in FILES:
            options = {"sharded_checkpoint": sharded, "overwrite": True}  # on FSDP1 rank 1 may create it first
            save_checkpoint_to_disk(str(folder / f"{sharded}"), trainer.state, options)
        trainer.close()
    dist.barrier()
    return {
        sharded: {part: read(folder / f"{sharded}" / f"ep0-ba{STEPS}" / file) for part, file in files.items()}
        for sharded, files in FILES.items()
    }


@on_ranks(2)
def test_a_checkpoint_is_fsdp1s(folder: str):
    """`save_checkpoint_to_disk` of a sharded model writes the values, keys and dtypes that FSDP1 wrote, full or
    sharded. It refused the sharded form."""
    theirs, ours = (saved(under, Path(folder, under.__name__)) for under in (FSDP1_saving, FSDP2))
    assert_same(ours[True], theirs[True], "in shards")
    for part, found in ours[False].items():
        assert form(found) == form(theirs[False][part]), f"{part}, whole"
        # On the CPU FSDP1 gathers every entry of the optimizer state into the same memory, so the last one is saved as
        # all of them; its shards are correct.
        assert_same(found, theirs[part == "optimizer"][part], f"{part}, whole")


@on_ranks(2)
def test_a_new_folder_is_not_there_already(folder: str):
    """Composer's rank 0 checks for the folder while rank 1 creates it: a sharded save hung at times. An existing folder
    is refused on all ranks, or overwritten with ``overwrite``."""
    from composer.checkpoint.save import save_model_to_disk

    with FSDP2():
        trainer = trained()
        slow_exists = os.path.exists

        def exists(path: str) -> bool:
            time.sleep(0.5 * (dist.get_rank() == 0))  # until rank 1 would have created it
            return slow_exists(path)

        path = f"{folder}/model"
        with mock.patch("os.path.exists", exists):
            save_model_to_disk(trainer.state.model, path, sharded_checkpoint=True)
            with pytest.raises(ValueError, match="already exists"):
                save_model_to_disk(trainer.state.model, path, sharded_checkpoint=True)
            save_model_to_disk(trainer.state.model, path, sharded_checkpoint=True, overwrite=True)
        trainer.close()


# --- loading


@on_ranks(2)
def test_its_checkpoints_load(folder: str):
    """`load_checkpoint` into a sharded model and optimizer, and `shard_as_needed_during_load` into a model that it
    shards first."""
    from composer.checkpoint import state_dict
    from composer.checkpoint.load import load_checkpoint
    from composer.checkpoint.save import save_checkpoint_to_disk

    with FSDP2():
        trainer = trained()
        weights, state = full_parameters(trainer.state.model), full_optimizer_state(trainer)
        for sharded in (False, True):
            save_checkpoint_to_disk(f"{folder}/{sharded}", trainer.state, {"sharded_checkpoint": sharded})
        trainer.close()
        dist.barrier()
    in_shards, whole = (Path(folder, str(sharded), f"ep0-ba{STEPS}") for sharded in (True, False))

    def sharded_model() -> None:
        with FSDP2():
            other = trained(model=with_other_values())
            before = full_parameters(other.state.model)
            assert not all(torch.equal(before[name], weights[name]) for name in weights)
            options = {"sharded_checkpoint": True, "load_optimizer": True}
            load_checkpoint(str(in_shards), options, state=other.state)
            assert_same(full_parameters(other.state.model), weights, "weights")
            assert_same(full_optimizer_state(other), state, "optimizer")
            other.close()

    def shard_as_needed(path: Path, sharded: bool) -> None:
        model = with_other_values()
        with FSDP2():
            options = {"sharded_checkpoint": sharded, "shard_as_needed_during_load": True, "fsdp_config": {}}
            load_checkpoint(str(path), options, model=model)
            assert any(isinstance(parameter, DTensor) for parameter in model.parameters())
            assert_same(full_parameters(model), weights, "weights")

    def whole_state_on_rank_0() -> None:
        with FSDP2():
            other = trained()
            forward_without_gradients(other.state.model)
            moments = state_dict.get_optim_state_dict(other.state.model, other.state.optimizers[0], True)["state"]
            assert all(isinstance(own["exp_avg"], DTensor) for own in moments.values())
            forward_without_gradients(other.state.model)
            shards = state_dict.get_model_state_dict(other.state.model, sharded_state_dict=True)
            assert all(isinstance(value, DTensor) for value in shards.values())
            found = state_dict.get_model_state_dict(other.state.model)
            if dist.get_rank() == 0:
                assert found.keys() == other.state.model.state_dict().keys()
                assert_same({name: found[name] for name in weights}, weights)
            else:
                assert found == {}
            other.close()

    for_each(
        lambda check, *arguments: check(*arguments),
        {
            "a sharded model, in shards": (sharded_model,),
            "sharded as needed, in shards": (shard_as_needed, in_shards, True),
            "sharded as needed, whole": (shard_as_needed, whole, False),
            "the state of a sharded model, whole": (whole_state_on_rank_0,),
        },
    )


def forward_without_gradients(model: Any) -> None:
    """After it the root's parameters are unsharded, although its modules show the shards."""
    with torch.no_grad():
        model.model(torch.zeros(2, 6, dtype=torch.long))
    [group] = groups_of(state_of(model.model))
    assert group.is_unsharded


def with_other_values() -> Any:
    model = build_model()
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.5)
    return model
