"""Libraries that train with FSDP1's class, each in a script as their users write it. None names our package.

    torchrun --nproc-per-node 2 -m fsdp.clients FOLDER CLIENT...                       # on FSDP1
    torchrun --nproc-per-node 2 -m composer_fsdp2 run -m fsdp.clients FOLDER CLIENT... # on FSDP2
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.comparing import own_name
from support.models import Block, Decoder
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy, transformer_auto_wrap_policy

STEPS, SAVED_AFTER, LR, MAX_NORM = 4, 2, 1e-2, 0.1


@dataclass(frozen=True, kw_only=True)
class Run:
    """Args:
    folder: Of the checkpoint, the same on all ranks.
    resumes: From the checkpoint, where a run without it saves one after ``SAVED_AFTER`` steps.
    checkpoint: ``full`` or ``sharded``.
    precision: ``fp32``, ``bf16`` (mixed), or ``bf16 before``: mixed, of parameters that are in bf16 before.
    """

    folder: Path
    resumes: bool = False
    checkpoint: str = "sharded"
    precision: str = "fp32"

    @property
    def path(self) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / "checkpoint"

    def steps(self) -> range:
        return range(SAVED_AFTER if self.resumes else 0, STEPS)

    def seed(self) -> None:
        """Another model where the checkpoint brings the values."""
        torch.manual_seed(7 if self.resumes else 0)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The losses of the steps on this rank, their gradient norms, and the parameters after them."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, torch.Tensor]


def tokens_of(number: int) -> torch.Tensor:
    """The batch of one microbatch on this rank."""
    return torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))


class Language(Decoder):
    """Returns the loss, as transformers' models do."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        logits = super().forward(tokens).float()
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def build(run: Run) -> Language:
    run.seed()
    return Language(tied=True).to(torch.bfloat16 if run.precision == "bf16 before" else torch.float32)


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    with FSDP.summon_full_params(model):
        return {own_name(name): each.detach().float().clone() for name, each in model.named_parameters()}


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """FSDP1 takes its device from a GPU, where a client names none, and ends with an error where it copies to the CPU.

    There the copies are views of memory that it frees.
    """
    from torch.distributed.fsdp import OptimStateDictConfig, StateDictConfig
    from torch.distributed.fsdp import fully_sharded_data_parallel as fsdp1

    cpu, find = torch.device("cpu"), fsdp1._init_device_handle  # type: ignore[attr-defined]
    never = property(lambda config: False, lambda config, value: None)
    is_fsdp1 = fsdp1.FullyShardedDataParallel.__module__ == fsdp1.__name__
    with contextlib.ExitStack() as stack:
        # accelerate's device; and torch 2.7's default device fails once one was taken back.
        stack.enter_context(mock.patch("torch.cuda.current_device", return_value=cpu))
        stack.enter_context(mock.patch("torch.get_default_device", return_value=cpu))
        if is_fsdp1:
            on_cpu = mock.patch.object(fsdp1, "_init_device_handle", lambda *args: find(*args[:3], args[3] or cpu))
            stack.enter_context(on_cpu)
            for config in (StateDictConfig, OptimStateDictConfig):
                stack.enter_context(mock.patch.object(config, "offload_to_cpu", never))
        yield


# ---------------------------------------------------------------------------------------------------------------------
# accelerate and what builds on it


def use_fsdp(accelerator: Any, run: Run, classes: set[type[nn.Module]]) -> Any:
    """accelerate insists on a GPU for FSDP; its states are told that these ranks use it on the CPU."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp import StateDictType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        auto_wrap_policy=ModuleWrapPolicy(classes),
        state_dict_type=StateDictType[f"{run.checkpoint.upper()}_STATE_DICT"],
        use_orig_params=True,
        sync_module_states=False,
        cpu_ram_efficient_loading=False,
    )
    if run.precision != "fp32":
        plugin.set_mixed_precision("bf16")
    accelerator.state.fsdp_plugin = plugin
    for state in (PartialState, AcceleratorState):
        state._shared_state |= {"distributed_type": DistributedType.FSDP, "device": torch.device("cpu")}
    return accelerator


def accelerate(run: Run) -> Trained:
    """``Accelerator``: prepare, accumulate, clip, save_state, load_state, get_state_dict, unwrap_model."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    net = build(run)
    mixed = "no" if run.precision == "fp32" else "bf16"
    accelerator = use_fsdp(
        Accelerator(cpu=True, mixed_precision=mixed, gradient_accumulation_steps=2), run, {Block}
    )  # fmt: skip
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=LR, eps=1e-3))
    if run.resumes:
        accelerator.load_state(str(run.path))
    losses, norms = [], []
    for step in run.steps():
        for microbatch in range(2):
            with accelerator.accumulate(model):
                tokens = tokens_of(2 * step + microbatch)
                loss = model(tokens, tokens)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)))
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        if step + 1 == SAVED_AFTER and not run.resumes:
            accelerator.save_state(str(run.path))
    assert type(accelerator.unwrap_model(model)) is Language
    return Trained(losses=losses, norms=norms, parameters=full_parameters(model))


def trainer(run: Run) -> Trained:
    """transformers' ``Trainer``: accumulation, clipping, a checkpoint and ``resume_from_checkpoint``."""
    from transformers import Trainer, TrainingArguments

    class OnCPU(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            use_fsdp(self.accelerator, run, {Block})
            self.is_fsdp_enabled, self.is_fsdp_xla_enabled = True, False

    data = [{"tokens": each, "labels": each} for number in range(12) for each in tokens_of(number)]
    arguments = TrainingArguments(
        str(run.folder), use_cpu=True, max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        logging_steps=1, save_strategy="no" if run.resumes else "steps", save_steps=SAVED_AFTER, report_to=[],
        disable_tqdm=True, learning_rate=LR, max_grad_norm=MAX_NORM, save_safetensors=False,
        bf16=run.precision != "fp32",
    )  # fmt: skip
    made = OnCPU(build(run), arguments, train_dataset=data)
    made.train(resume_from_checkpoint=str(run.folder / f"checkpoint-{SAVED_AFTER}") if run.resumes else None)
    return _logged(made, run)


def _logged(trainer: Any, run: Run) -> Trained:
    logs = [log for log in trainer.state.log_history if "loss" in log][run.steps()[0] :]
    return Trained(
        losses=[log["loss"] for log in logs],
        norms=[log["grad_norm"] for log in logs],
        parameters=full_parameters(trainer.model_wrapped),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Lightning


def _strategy(base: Any, run: Run) -> Any:
    """Lightning insists on a GPU for ``FSDPStrategy`` itself, not for one that derives from it."""
    from torch.distributed.fsdp import MixedPrecision

    bf16 = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    return type("OnCPU", (base,), {})(
        auto_wrap_policy={Block},
        activation_checkpointing_policy={Block},
        state_dict_type=run.checkpoint,
        mixed_precision=None if run.precision == "fp32" else bf16,
    )


def fabric(run: Run) -> Trained:
    """Lightning Fabric with ``FSDPStrategy``: setup, ``no_backward_sync``, clipping, save and load."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import FSDPStrategy

    lightning = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=_strategy(FSDPStrategy, run))
    lightning.launch()
    net = build(run)
    model, optimizer = lightning.setup(net, torch.optim.AdamW(net.parameters(), lr=LR, eps=1e-3))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if run.resumes:
        lightning.load(run.path, state)
        assert state["step"] == SAVED_AFTER
    losses, norms = [], []
    for step in run.steps():
        for microbatch in range(2):
            with lightning.no_backward_sync(model, enabled=microbatch == 0):
                tokens = tokens_of(2 * step + microbatch)
                loss = model(tokens, tokens)["loss"]
                lightning.backward(loss)
            losses.append(loss.item())
        norms.append(float(lightning.clip_gradients(model, optimizer, max_norm=MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == SAVED_AFTER and not run.resumes:
            lightning.save(run.path, {**state, "step": step + 1})
    return Trained(losses=losses, norms=norms, parameters=full_parameters(model._forward_module))


def lightning(run: Run) -> Trained:
    """Lightning's ``Trainer`` with ``FSDPStrategy``: accumulation, clipping, ``save_checkpoint`` and ``ckpt_path``."""
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import FSDPStrategy

    losses: list[float] = []
    norms: list[float] = []
    parameters: dict[str, torch.Tensor] = {}

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = build(run)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            loss = self.net(batch, batch)["loss"]
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=LR, eps=1e-3)

        def configure_gradient_clipping(self, *unused: Any, **options: Any) -> None:
            # Lightning refuses gradient_clip_val with FSDP, and names this method as the way.
            norms.append(float(self.trainer.strategy.model.clip_grad_norm_(MAX_NORM)))  # type: ignore[union-attr]

    class Saving(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *unused: Any) -> None:
            if trainer.global_step == SAVED_AFTER and not run.path.exists():
                trainer.save_checkpoint(run.path)

        def on_train_end(self, trainer: Any, module: Any) -> None:
            parameters.update(full_parameters(trainer.strategy.model))

    made = Trainer(
        accelerator="cpu", devices=dist.get_world_size(), strategy=_strategy(FSDPStrategy, run), max_steps=STEPS,
        max_epochs=1, accumulate_grad_batches=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[Saving()], use_distributed_sampler=False,
    )  # fmt: skip
    # A resumed run reads the loader from its beginning.
    numbers = [*range(2 * run.steps()[0], 2 * STEPS), *range(2 * run.steps()[0])]
    batches = torch.utils.data.DataLoader([tokens_of(number) for number in numbers], batch_size=None)
    made.fit(Module(), batches, ckpt_path=run.path if run.resumes else None)
    own = {name.removeprefix("net."): each for name, each in parameters.items()}
    return Trained(losses=losses, norms=norms, parameters=own)


CLIENTS: dict[str, tuple[Callable[[Run], Trained], dict[str, str]]] = {
    "accelerate": (accelerate, {"checkpoint": "sharded"}),
    "accelerate full": (accelerate, {"checkpoint": "full"}),
    "accelerate bf16": (accelerate, {"precision": "bf16"}),
    "accelerate bf16 before": (accelerate, {"precision": "bf16 before"}),
    "trainer": (trainer, {"checkpoint": "sharded"}),
    "trainer full": (trainer, {"checkpoint": "full"}),
    "fabric": (fabric, {"checkpoint": "sharded"}),
    "fabric full": (fabric, {"checkpoint": "full"}),
    "fabric bf16": (fabric, {"precision": "bf16"}),
    "lightning": (lightning, {"checkpoint": "sharded"}),
    "lightning full": (lightning, {"checkpoint": "full"}),
}
