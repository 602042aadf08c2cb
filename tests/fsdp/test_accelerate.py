"""accelerate with its FSDP1 plugin, unchanged, on our class."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.models import Block, Decoder
from support.ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from composer_fsdp2 import install_fsdp

pytest.importorskip("accelerate")


def accelerator() -> Any:
    """accelerate insists on a GPU for FSDP; its states are told that these ranks use it on the CPU."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    found = Accelerator(cpu=True)
    found.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        state_dict_type=StateDictType.FULL_STATE_DICT,
        state_dict_config=FullStateDictConfig(),
        optim_state_dict_config=FullOptimStateDictConfig(offload_to_cpu=False),
        use_orig_params=True,
        sync_module_states=False,
        cpu_ram_efficient_loading=False,
    )
    for state in (PartialState, AcceleratorState):
        state._shared_state |= {"distributed_type": DistributedType.FSDP, "device": torch.device("cpu")}
    return found


def train(folder: str | None) -> list[tuple[float, float]]:
    """Losses and norms of four steps; with a folder the third and fourth again, from a saved state."""
    torch.manual_seed(0)
    accelerate = accelerator()
    net = Decoder(tied=True)
    model, optimizer = accelerate.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))

    def step(number: int) -> tuple[float, float]:
        tokens = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        accelerate.backward(loss)
        norm = accelerate.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), float(norm)

    found = [step(0), step(1)]
    if folder is None:
        return [*found, step(2), step(3)]
    accelerate.save_state(folder)
    found += [step(2), step(3)]
    assert type(accelerate.unwrap_model(model)) is Decoder
    state = accelerate.get_state_dict(model)
    assert list(state) == ([] if dist.get_rank() else list(Decoder(tied=True).state_dict()))
    accelerate.load_state(folder)
    assert [step(2), step(3)] == found[2:]
    return found


def check_under_accelerate(is_ours: bool, folder: str | None) -> list[tuple[float, float]]:
    on_cpu = mock.patch("torch.cuda.current_device", return_value=torch.device("cpu"))
    with on_cpu, install_fsdp() if is_ours else contextlib.nullcontext():
        return train(folder)


@pytest.mark.any_torch
def test_prepare_clip_save_and_load(tmp_path):
    """The losses of FSDP1 and its norms, to 1e-6; a resumed run repeats its steps."""
    theirs = run_ranks(check_under_accelerate, 2, False, None, fresh=True)
    ours = run_ranks(check_under_accelerate, 2, True, str(tmp_path), fresh=True)
    for found, expected in zip(ours, theirs, strict=True):
        assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=1e-6)
        assert [norm for _, norm in found] == pytest.approx([norm for _, norm in expected], rel=1e-6)
