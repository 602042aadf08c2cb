"""A Trainer whose configuration chooses the units, compared with FSDP1, whose model chooses them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from support.cases import for_each
from support.on_ranks import on_ranks
from support.oracle import FSDP1, FSDP2
from support.trainers import Trained, build_model, fit, largest_difference

pytestmark = pytest.mark.composer

SECTION = {"state_dict_type": "sharded"}
BLOCKS = {"transformer_layer_cls_to_wrap": ["Block"]}


def units_of(model: torch.nn.Module) -> set[str]:
    from torch.distributed.fsdp import FSDPModule

    return {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}


def as_object(section: dict[str, Any]) -> Any:
    """Keys that Composer's own FSDP2Config does not have are set as attributes."""
    from composer.utils import FSDP2Config, ParallelismConfig

    config = FSDP2Config(state_dict_type="sharded", activation_checkpointing=False)
    for name, value in section.items():
        setattr(config, name, value)
    return ParallelismConfig(fsdp2=config)


@on_ranks(2)
def test_a_policy_trains_as_fsdp1_with_the_same_units(folder: str):
    """A migrated file would train another model than its source, or none."""
    theirs = fit(FSDP1, SECTION, tied=False)

    def check(parallelism: Any, expected: set[str]) -> None:
        from support.scripts.train_with_trainer import Net

        model = build_model(tied=False)
        with mock.patch.object(Net, "fsdp_wrap_fn", None):  # the configuration alone chooses the units
            ours: Trained = fit(FSDP2, parallelism, model=model)
        assert ours.shards == {"FSDPModule"} and theirs.shards == {"FullyShardedDataParallel"}
        assert units_of(model) == expected, units_of(model)
        assert largest_difference(ours.losses, theirs.losses) <= 1e-6, f"{ours.losses}, FSDP1 {theirs.losses}"
        torch.testing.assert_close(ours.parameters, theirs.parameters, rtol=1e-6, atol=1e-6)

    layers = {"model", "model.blocks.0", "model.blocks.1"}
    for_each(
        check,
        {
            "by size": (SECTION | {"wrap_policy": {"min_num_params": "3e2"}}, layers),
            "with a head": (SECTION | {"wrap_policy": BLOCKS | {"wrap_lm_output": True}}, {*layers, "model.lm_head"}),
            "an object": (as_object({"wrap_policy": BLOCKS}), layers),
        },
    )


@on_ranks(1)
def test_composers_own_object_takes_our_keys(folder: str):
    """One script passes a section as a mapping, another as an object, which raised a TypeError."""
    from composer.utils import FSDP2Config

    from composer_fsdp2 import translate
    from composer_fsdp2.compat import fsdp2

    with fsdp2():
        config = FSDP2Config(activation_checkpointing=False, freeze=["model.wte"], wrap_policy=BLOCKS)
        with pytest.raises(TypeError, match="freze"):
            FSDP2Config(freze=["model.wte"])
    meant = translate(config, device="cpu").config
    assert meant.freeze == ("model.wte",) and meant.wrap.classes == ("Block",)
    assert not meant.activation_checkpointing.enabled
