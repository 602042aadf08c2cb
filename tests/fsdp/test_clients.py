"""accelerate with its FSDP1 plugin, and transformers' Trainer on it, unchanged, on our class."""

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


def use_fsdp(found: Any) -> Any:
    """accelerate insists on a GPU for FSDP; its states are told that these ranks use it on the CPU."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

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


def train(folder: str, saves: bool) -> list[tuple[float, float]]:
    """Losses and norms of four steps; with ``saves`` the last two again, from a saved state."""
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerate = use_fsdp(Accelerator(cpu=True))
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
    if not saves:  # as FSDP1, which crashes on the CPU
        return [*found, step(2), step(3)]
    accelerate.save_state(folder)
    found += [step(2), step(3)]
    assert type(accelerate.unwrap_model(model)) is Decoder
    state = accelerate.get_state_dict(model)
    assert list(state) == ([] if dist.get_rank() else list(Decoder(tied=True).state_dict()))
    accelerate.load_state(folder)
    assert [step(2), step(3)] == found[2:]
    return found


class Language(nn.Module):
    """A model as the Trainer calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder(tied=True)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.decoder(tokens).flatten(0, 1), labels.flatten())}


def train_with_trainer(folder: str, saves: bool) -> list[tuple[float, float]]:
    """Losses and norms that the Trainer logs; with ``saves`` the last three again, from a checkpoint."""
    from transformers import Trainer, TrainingArguments

    class OnCPU(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            use_fsdp(self.accelerator)
            self.is_fsdp_enabled, self.is_fsdp_xla_enabled = True, False

    def fit(resume_from: str | None = None) -> list[tuple[float, float]]:
        torch.manual_seed(0)
        data = [{"tokens": (tokens := torch.randint(11, (5,))), "labels": tokens} for _ in range(48)]
        trainer = OnCPU(Language(), arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=resume_from)
        return [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]

    arguments = TrainingArguments(
        folder, use_cpu=True, max_steps=6, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        logging_steps=1, save_strategy="steps" if saves else "no", save_steps=3, report_to=[], disable_tqdm=True,
        learning_rate=1e-2, max_grad_norm=0.1, save_safetensors=False,
    )  # fmt: skip
    found = fit()
    if saves:
        assert fit(f"{folder}/checkpoint-3")[3:] == found[3:]
    return found


def check(fit: Any, is_ours: bool, folder: str) -> list[tuple[float, float]]:
    cpu = {"return_value": torch.device("cpu")}
    on_cpu = mock.patch("torch.cuda.current_device", **cpu)
    default = mock.patch("torch.get_default_device", **cpu)  # torch 2.7's fails once a default was set and taken back
    with on_cpu, default, install_fsdp() if is_ours else contextlib.nullcontext():
        return fit(folder, is_ours)


@pytest.mark.any_torch
@pytest.mark.parametrize(
    "fit",
    [pytest.param(train, id="accelerate"), pytest.param(train_with_trainer, id="Trainer", marks=pytest.mark.slow)],
)
def test_train_clip_save_and_resume(fit, tmp_path):
    """The losses of FSDP1 and its norms, to 1e-6; a resumed run repeats its steps."""
    theirs = run_ranks(check, 2, fit, False, str(tmp_path), fresh=True)
    ours = run_ranks(check, 2, fit, True, str(tmp_path), fresh=True)
    for found, expected in zip(ours, theirs, strict=True):
        assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=1e-6)
        assert [norm for _, norm in found] == pytest.approx([norm for _, norm in expected], rel=1e-6)
