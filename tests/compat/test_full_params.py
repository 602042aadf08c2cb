"""``summon_full_params`` as scripts, Composer and Hugging Face reach it: under the Trainer, and past the unwrapping."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.comparing import assert_same, own_name
from support.known_models import hugging_face
from support.oracle import FSDP1, FSDP2, Under
from support.ranks import run_ranks
from support.trainers import fit, largest_difference
from support.training import FULL
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

pytestmark = pytest.mark.composer


# --- a script's callback under the Trainer


def train(under: Under, parallelism: dict[str, Any]) -> tuple[Any, list[Any]]:
    """A run whose callback reads and changes full weights and gradients, as it was written for FSDP1."""
    from composer import Callback, State

    seen: list[Any] = []

    class Surgery(Callback):
        def after_backward(self, state: State, logger: Any) -> None:
            root = state.model.model
            assert root.module is not None
            with FullyShardedDataParallel.summon_full_params(state.model, with_grads=True):
                norms = [p.grad.norm() for p in root.parameters() if p.grad is not None]
                seen.append(("gradients", float(torch.stack(norms).norm())))
                for parameter in root.parameters():
                    if parameter.grad is not None:
                        parameter.grad.clamp_(-0.05, 0.05)

        def batch_end(self, state: State, logger: Any) -> None:
            root = state.model.model
            with torch.no_grad(), root.summon_full_params(root, recurse=False):
                root.module.lm_head.weight.mul_(0.9)
            self.note("batch", state)

        def eval_end(self, state: State, logger: Any) -> None:
            self.note("eval", state)

        def note(self, when: str, state: State) -> None:
            root = state.model.model
            with root.summon_full_params(state.model, writeback=False, offload_to_cpu=False):
                assert root._fsdp_wrapped_module.lm_head.weight.shape == (13, 8)
                for name, parameter in state.model.named_parameters():
                    seen.append(
                        (when, own_name(name), tuple(parameter.shape), float(parameter.detach().square().sum()))
                    )
                    if when == "batch":  # not after an eval, where FSDP1 runs the next forward on what it discards
                        parameter.detach().zero_()

    trained = fit(under, parallelism, callbacks=[Surgery()], eval_interval="2ba")
    return trained, seen


def check_trainer() -> Any:
    keys = {"sharding_strategy": "SHARD_GRAD_OP"}
    return train(FSDP1, keys), train(FSDP2, keys)


def test_a_callback_written_for_fsdp1():
    """Clipping of full gradients, surgery on weights and reading them after an eval: the same run on FSDP2, without a
    line changed."""
    for (theirs, their_notes), (ours, our_notes) in run_ranks(check_trainer, 2):
        assert theirs.shards == {"FullyShardedDataParallel"} and ours.shards == {"FSDPModule"}
        assert largest_difference(ours.losses, theirs.losses) <= 1e-6
        assert [note[:-1] for note in our_notes] == [note[:-1] for note in their_notes]
        assert [note[-1] for note in our_notes] == pytest.approx([note[-1] for note in their_notes], rel=1e-5)
        assert {note[0] for note in our_notes} == {"gradients", "batch", "eval"}
        torch.testing.assert_close(ours.parameters, theirs.parameters, rtol=1e-5, atol=1e-7)


# --- where it is reached from


def check_static_form() -> None:
    from composer_fsdp2 import prepare_fully_shard

    original = vars(FullyShardedDataParallel)["summon_full_params"]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    whole = [parameter.detach().clone() for parameter in model.parameters()]
    prepare_fully_shard(model, None, FULL, device="cpu")
    with FSDP2():
        with FullyShardedDataParallel.summon_full_params(model, recurse=True, writeback=False):
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), whole, strict=True))
        with FullyShardedDataParallel.summon_full_params(nn.Linear(3, 4)):
            pass
        # A model of FSDP1's, say a reward model that a script wraps itself, is FSDP1's.
        other = nn.Linear(3, 4)
        weight = other.weight.detach().clone()
        wrapped = FullyShardedDataParallel(other, device_id=torch.device("cpu"), use_orig_params=True)
        assert wrapped.module.weight.shape != weight.shape
        for around in (wrapped, nn.ModuleList([wrapped])):
            with FullyShardedDataParallel.summon_full_params(around):
                assert torch.equal(wrapped.module.weight, weight)
        with wrapped.summon_full_params(wrapped):
            assert torch.equal(wrapped.module.weight, weight)
    assert vars(FullyShardedDataParallel)["summon_full_params"] is original
    with FullyShardedDataParallel.summon_full_params(model):
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_static_form():
    """`FullyShardedDataParallel.summon_full_params(model)` shows shards without the shim; with it a model that FSDP1
    wraps is still FSDP1's."""
    run_ranks(check_static_form, 2)


# --- Hugging Face


def check_unwrapping() -> None:
    """Each with the model, and with a unit within it."""
    import accelerate.utils
    from peft.tuners.lora.corda import get_model_device
    from transformers import modeling_utils

    from composer_fsdp2 import prepare_fully_shard

    model = hugging_face("gpt2")
    prepare_fully_shard(model, None, FULL, device="cpu")
    for unit in (model.model, model.model.transformer.h[0]):
        children = dict(unit.named_modules())
        assert modeling_utils.unwrap_model(unit) is unit
        assert modeling_utils.unwrap_model(unit, recursive=True) is unit
        with mock.patch.object(modeling_utils, "is_accelerate_available", return_value=False):
            assert modeling_utils.unwrap_model(unit) is unit
        for recursive in (False, True):
            assert accelerate.utils.extract_model_from_parallel(unit, recursive=recursive) is unit
            assert accelerate.utils.extract_model_from_parallel(unit, keep_fp32_wrapper=False) is unit
        assert get_model_device(unit) == "cpu"
        assert unit.module is unit  # for a script
        assert dict(unit.named_modules()) == children


def test_hugging_faces_unwrapping():
    """transformers' and accelerate's functions take wrappers off for as long as there is a `module`: saving a model
    would end in a RecursionError, or never."""
    run_ranks(check_unwrapping, 2)


def check_save_adapters(folder: str) -> None:
    from peft.utils import get_peft_model_state_dict
    from safetensors.torch import load_file

    from composer_fsdp2 import prepare_fully_shard

    model = hugging_face("gpt2", adapters=True)
    expected = {name: value.clone() for name, value in get_peft_model_state_dict(model.model).items()}
    prepare_fully_shard(model, None, FULL, device="cpu")
    root = model.model
    with root.summon_full_params(root, writeback=False):
        assert_same(get_peft_model_state_dict(root), expected)
        if dist.get_rank() == 0:
            root.save_pretrained(folder)
    dist.barrier()
    assert_same(load_file(Path(folder, "adapter_model.safetensors")), expected)


def test_save_adapters(tmp_path: Path):
    """peft writes its adapters, whole, and asks no unit what it wraps."""
    run_ranks(check_save_adapters, 2, str(tmp_path))
