"""Libraries that train with FSDP1's class, each in a script as their users write it. None imports our package.

tests/fsdp/test_clients.py and benchmarks/clients.py train them on FSDP1 and on ours.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from packaging.version import Version
from support.comparing import own_name
from support.models import Block, Decoder
from torch import nn
from torch.distributed.fsdp import fully_sharded_data_parallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy, transformer_auto_wrap_policy

STEPS, SAVED_AFTER, LR, MAX_NORM = 4, 2, 1e-2, 0.1


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training of a client.

    Args:
        folder: The folder of the checkpoint, the same on all ranks.
        resumes: Resume from the checkpoint; a run without it saves one after ``SAVED_AFTER`` steps.
        checkpoint: ``full`` or ``sharded``.
        precision: ``fp32``, ``bf16`` (mixed), or ``bf16 before``: mixed, with parameters that are bf16 before wrapping.
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
        """Seed the model; a resumed run starts with other values, which the checkpoint overwrites."""
        torch.manual_seed(7 if self.resumes else 0)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The losses of the steps on this rank, their gradient norms, and the parameters after them.

    Args:
        module: The module path of the FSDP class that the client used.
    """

    losses: list[float]
    norms: list[float]
    parameters: dict[str, torch.Tensor]
    module: str = field(default_factory=lambda: fully_sharded_data_parallel.FullyShardedDataParallel.__module__)

    def differences(self, other: Trained) -> tuple[float, float]:
        """The largest relative difference of a loss or norm, and of a parameter tensor."""
        assert len(self.losses) == len(other.losses) > 0 and len(self.norms) == len(other.norms), (self, other)
        assert list(self.parameters) == list(other.parameters), (list(self.parameters), list(other.parameters))
        numbers = zip([*self.losses, *self.norms], [*other.losses, *other.norms], strict=True)
        tensors = zip(self.parameters.values(), other.parameters.values(), strict=True)
        return (
            max(abs(one / two - 1) for one, two in numbers),
            max(((one - two).norm() / two.norm()).item() for one, two in tensors),
        )


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
    """FSDP1 requires a GPU where a client passes no ``device_id``, and crashes in its copies to the CPU.

    On a CPU these copies are views of memory that it frees.
    """
    from torch.distributed.fsdp import OptimStateDictConfig, StateDictConfig

    fsdp1 = fully_sharded_data_parallel
    cpu, find = torch.device("cpu"), fsdp1._init_device_handle  # type: ignore[attr-defined]
    never = property(lambda config: False, lambda config, value: None)
    is_fsdp1 = fsdp1.FullyShardedDataParallel.__module__ == fsdp1.__name__
    with contextlib.ExitStack() as stack:
        # accelerate's device; and torch 2.7's default device fails once one was reset.
        stack.enter_context(mock.patch("torch.cuda.current_device", return_value=cpu))
        stack.enter_context(mock.patch("torch.get_default_device", return_value=cpu))
        if is_fsdp1:
            on_cpu = mock.patch.object(fsdp1, "_init_device_handle", lambda *args: find(*args[:3], args[3] or cpu))
            stack.enter_context(on_cpu)
            for config in (StateDictConfig, OptimStateDictConfig):
                stack.enter_context(mock.patch.object(config, "offload_to_cpu", never))
        yield


# ---------------------------------------------------------------------------------------------------------------------
# accelerate and libraries on top of it


def use_fsdp(accelerator: Any, run: Run, policy: Any) -> None:
    """accelerate requires a GPU for FSDP; set its states by hand, with the CPU as the device."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp import StateDictType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        auto_wrap_policy=policy,
        state_dict_type=StateDictType[f"{run.checkpoint.upper()}_STATE_DICT"],
        use_orig_params=True,
        sync_module_states=False,
        cpu_ram_efficient_loading=False,
        activation_checkpointing=run.precision == "bf16",
    )
    if run.precision != "fp32":
        plugin.set_mixed_precision("bf16")
    accelerator.state.fsdp_plugin = plugin
    for state in (PartialState, AcceleratorState):
        state._shared_state |= {"distributed_type": DistributedType.FSDP, "device": torch.device("cpu")}


def accelerate(run: Run) -> Trained:
    """``Accelerator``: prepare, accumulate, clip, save_state, load_state, get_state_dict, unwrap_model."""
    import accelerate as library
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    net = build(run)
    mixed = "no" if run.precision == "fp32" else "bf16"
    accelerator = Accelerator(cpu=True, mixed_precision=mixed, gradient_accumulation_steps=2)
    use_fsdp(accelerator, run, ModuleWrapPolicy({Block}))
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=LR, eps=1e-3))
    losses, norms = [], []

    def train(step: int) -> None:
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

    if run.resumes:
        if Version(library.__version__) >= Version("1.15") or run.checkpoint == "full":
            # accelerate 1.15 loads sharded state if an optimizer already has state; 1.8 refuses that on FSDP1.
            train(STEPS)
        accelerator.load_state(str(run.path))
        losses, norms = [], []
    for step in run.steps():
        train(step)
        if step + 1 == SAVED_AFTER and not run.resumes:
            accelerator.save_state(str(run.path))
    assert type(accelerator.unwrap_model(model)) is Language
    state = accelerator.get_state_dict(model)
    assert list(state) == ([] if dist.get_rank() else list(Language(tied=True).state_dict())), list(state)
    return Trained(losses=losses, norms=norms, parameters=full_parameters(model))


def trainer(run: Run) -> Trained:
    """transformers' ``Trainer``: accumulation, clipping, a checkpoint and ``resume_from_checkpoint``."""
    from transformers import Trainer, TrainingArguments

    class OnCPU(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            use_fsdp(self.accelerator, run, ModuleWrapPolicy({Block}))
            self.is_fsdp_enabled, self.is_fsdp_xla_enabled = True, False

    data = [{"tokens": each, "labels": each} for number in range(12) for each in tokens_of(number)]
    made = OnCPU(build(run), TrainingArguments(**_arguments(run)), train_dataset=data)
    made.train(resume_from_checkpoint=_checkpoint(run))
    return _logged(made, run)


def _arguments(run: Run) -> dict[str, Any]:
    return {
        "output_dir": str(run.folder), "use_cpu": True, "max_steps": STEPS, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "logging_steps": 1, "save_strategy": "no" if run.resumes else "steps",
        "save_steps": SAVED_AFTER, "report_to": [], "disable_tqdm": True, "learning_rate": LR,
        "max_grad_norm": MAX_NORM, "save_safetensors": False, "bf16": run.precision != "fp32",
    }  # fmt: skip


def _checkpoint(run: Run) -> str | None:
    return str(run.folder / f"checkpoint-{SAVED_AFTER}") if run.resumes else None


def _logged(trainer: Any, run: Run) -> Trained:
    logs = [log for log in trainer.state.log_history if "loss" in log][run.steps()[0] :]
    return Trained(
        losses=[log["loss"] for log in logs],
        norms=[log["grad_norm"] for log in logs],
        parameters=full_parameters(trainer.model_wrapped),
    )


def _llama(run: Run) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    run.seed()
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            use_cache=False,
        )
    )  # fmt: skip


def lora(run: Run) -> Trained:
    """``Trainer`` with a LoRA of PEFT: frozen parameters beside trained ones, wrapped by PEFT's own policy."""
    from peft import LoraConfig, get_peft_model
    from peft.utils.other import fsdp_auto_wrap_policy
    from transformers import Trainer, TrainingArguments

    model = get_peft_model(_llama(run), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))

    class OnCPU(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            use_fsdp(self.accelerator, run, fsdp_auto_wrap_policy(model))
            self.is_fsdp_enabled, self.is_fsdp_xla_enabled = True, False

    data = [{"input_ids": each, "labels": each} for number in range(12) for each in tokens_of(number)]
    made = OnCPU(model, TrainingArguments(**_arguments(run)), train_dataset=data)
    made.train(resume_from_checkpoint=_checkpoint(run))
    return _logged(made, run)


def sft(run: Run) -> Trained:
    """TRL's ``SFTTrainer``: packs nothing, completes a Llama's tokens."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer
    from trl import SFTConfig, SFTTrainer

    class OnCPU(SFTTrainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            use_fsdp(self.accelerator, run, ModuleWrapPolicy({LlamaDecoderLayer}))
            self.is_fsdp_enabled, self.is_fsdp_xla_enabled = True, False

    from datasets import Dataset

    model = _llama(run)
    words = {f"{number}": number for number in range(11)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "3")), pad_token="0", bos_token="1", eos_token="2"
    )
    rows = [each.tolist() for number in range(12) for each in tokens_of(100 * number)]
    made = OnCPU(
        model, SFTConfig(**_arguments(run), max_seq_length=16), train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=tokenizer,
    )  # fmt: skip
    made.train(resume_from_checkpoint=_checkpoint(run))
    return _logged(made, run)


# ---------------------------------------------------------------------------------------------------------------------
# Lightning


def _strategy(base: Any, run: Run) -> Any:
    """Lightning requires a GPU for ``FSDPStrategy``, but not for a subclass."""
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
            # Lightning refuses gradient_clip_val with FSDP, and suggests this method.
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


# ---------------------------------------------------------------------------------------------------------------------
# PyTorch's own


class Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(8 * 4 * 4, 16), nn.Linear(16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = nn.functional.max_pool2d(self.conv2(self.conv1(images).relu()).relu(), 2)
        found = self.dropout1(found).flatten(1)
        return self.fc2(self.dropout2(self.fc1(found).relu())).log_softmax(1)


def tutorial(run: Run) -> Trained:
    """The calls of PyTorch's tutorial "Getting Started with Fully Sharded Data Parallel", on digits of noise.

    It saves the model only, and loads nothing; here a resumed run loads into the model before wrapping it.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (32,), generator=generator)
    images = labels.view(-1, 1, 1, 1) / 10 + torch.randn(32, 1, 12, 12, generator=generator)
    dataset = torch.utils.data.TensorDataset(images, labels)
    sampler = torch.utils.data.DistributedSampler(dataset, rank=rank, num_replicas=world_size, shuffle=True)
    loader = torch.utils.data.DataLoader(dataset, batch_size=8, sampler=sampler)
    run.seed()
    net = Digits()
    if run.resumes:
        net.load_state_dict(torch.load(run.path, weights_only=True))
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=300)
    model = FSDP(net, auto_wrap_policy=policy)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    losses = []
    for epoch in run.steps():
        torch.manual_seed(epoch)  # of the dropouts
        for trains in (True, False):
            model.train(trains)
            sampler.set_epoch(epoch)
            total = torch.zeros(2)
            for batch, target in loader:
                with contextlib.nullcontext() if trains else torch.no_grad():
                    loss = nn.functional.nll_loss(model(batch), target, reduction="sum")
                if trains:
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                total += torch.tensor([loss.item(), len(batch)])
            dist.all_reduce(total, op=dist.ReduceOp.SUM)
            losses.append((total[0] / total[1]).item())
        scheduler.step()
        if epoch + 1 == SAVED_AFTER and not run.resumes:
            dist.barrier()
            states = model.state_dict()
            if rank == 0:
                torch.save(states, run.path)
    return Trained(losses=losses, norms=[], parameters=full_parameters(model))


def t5(run: Run) -> Trained:
    """The calls of ``distributed/FSDP`` in pytorch/examples: a T5, its checkpoints sharded or full."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )
    from torch.distributed.fsdp import FullStateDictConfig, MixedPrecision, ShardingStrategy, StateDictType
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from transformers import T5Config, T5ForConditionalGeneration
    from transformers.models.t5.modeling_t5 import T5Block

    run.seed()
    net = T5ForConditionalGeneration(
        T5Config(
            vocab_size=11, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2, use_cache=False,
            decoder_start_token_id=0,
        )
    )  # fmt: skip
    saved = run.path.with_suffix(".model.pt"), run.path.with_suffix(".optimizer.pt")
    is_full, is_first = run.checkpoint == "full", dist.get_rank() == 0
    if run.resumes and is_full:
        net.load_state_dict(torch.load(saved[0], weights_only=True))
    bf16 = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    model = FSDP(
        net,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block}),
        mixed_precision=bf16 if run.precision == "bf16" else None,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        device_id=torch.cuda.current_device(),
        limit_all_gathers=True,
    )
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda module: isinstance(module, T5Block)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-3)
    if run.resumes and is_full:
        full = torch.load(saved[1], weights_only=True) if is_first else None
        optimizer.load_state_dict(FSDP.scatter_full_optim_state_dict(full, model))
    elif run.resumes:
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = model.state_dict()
            dcp.load({"model": state}, checkpoint_id=run.path)
            model.load_state_dict(state)
    losses = []
    for step in run.steps():
        torch.manual_seed(step)  # of the dropouts
        tokens = tokens_of(step)
        optimizer.zero_grad()
        loss = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens.flip(1))["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step + 1 != SAVED_AFTER or run.resumes:
            continue
        if is_full:
            policy = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
            with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, policy):
                states = model.state_dict()
            of_optimizer = FSDP.full_optim_state_dict(model, optimizer)
            if is_first:
                torch.save(states, saved[0])
                torch.save(of_optimizer, saved[1])
        else:
            with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                named = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
                dcp.save(named, checkpoint_id=run.path)
        dist.barrier()
    return Trained(losses=losses, norms=[], parameters=full_parameters(model))


@dataclass(frozen=True, kw_only=True)
class Client:
    """A library with its training function.

    Args:
        train: One of the functions above.
        packages: Its imports, for the table; the first is the client itself.
        did: The objects and methods that ran, for the table.
    """

    train: Callable[[Run], Trained]
    packages: tuple[str, ...]
    did: str
    checkpoint: str = "sharded"
    precision: str = "fp32"

    def missing(self) -> list[str]:
        return [name for name in self.packages if importlib.util.find_spec(name) is None]

    def __call__(self, folder: Path, *, resumes: bool = False) -> Trained:
        with on_cpu():
            return self.train(Run(folder=folder, resumes=resumes, checkpoint=self.checkpoint, precision=self.precision))


_RESUMES = "accumulation, clipping, resume_from_checkpoint"
_ACCELERATE = functools.partial(
    Client,
    train=accelerate,
    packages=("accelerate",),
    did="`Accelerator`: prepare, accumulate, clip_grad_norm_, save_state, load_state, get_state_dict, unwrap_model",
)
_TRAINER = functools.partial(
    Client, train=trainer, packages=("transformers", "accelerate"), did=f"`Trainer`: {_RESUMES}"
)  # fmt: skip
_FABRIC = functools.partial(
    Client,
    train=fabric,
    packages=("lightning",),
    did="`Fabric`, `FSDPStrategy`: policies for wraps and recomputation, no_backward_sync, clip_gradients, save, load",
)
_LIGHTNING = functools.partial(
    Client,
    train=lightning,
    packages=("lightning",),
    did="`Trainer`, `FSDPStrategy`: policies for wraps and recomputation, accumulation, clipping, ckpt_path",
)
_T5 = functools.partial(
    Client,
    train=t5,
    packages=("torch", "transformers"),
    did="`distributed/FSDP` of pytorch/examples, T5: recomputation, SHARD_GRAD_OP, use_orig_params=False",
)
CLIENTS: dict[str, Client] = {
    "accelerate": _ACCELERATE(),
    "accelerate full": _ACCELERATE(checkpoint="full"),
    "accelerate bf16": _ACCELERATE(precision="bf16"),
    "accelerate bf16 before": _ACCELERATE(checkpoint="full", precision="bf16 before"),
    "Trainer": _TRAINER(),
    "Trainer full": _TRAINER(checkpoint="full"),
    "Trainer bf16": _TRAINER(checkpoint="full", precision="bf16"),
    "LoRA": Client(
        train=lora,
        packages=("peft", "transformers", "accelerate"),
        did=f"`Trainer` with a LoRA: {_RESUMES}",
        checkpoint="full",
    ),
    "SFTTrainer": Client(
        train=sft,
        packages=("trl", "transformers", "accelerate", "datasets"),
        did=f"`SFTTrainer`: {_RESUMES}",
        checkpoint="full",
    ),
    "Fabric": _FABRIC(),
    "Fabric full": _FABRIC(checkpoint="full"),
    "Fabric bf16": _FABRIC(precision="bf16"),
    "Lightning": _LIGHTNING(),
    "Lightning full": _LIGHTNING(checkpoint="full"),
    "tutorial": Client(
        train=tutorial,
        packages=("torch",),
        did="PyTorch's tutorial of FSDP1, MNIST: a policy by size, Adadelta, evaluation",
        checkpoint="full",
    ),
    "T5": _T5(),
    "T5 full": _T5(checkpoint="full"),
    "T5 bf16": _T5(checkpoint="full", precision="bf16"),
}


def main(folder: str, own: str, sources: str, *names: str) -> None:
    """Train each client, and resume it; write its results to ``own/NAME from SOURCE RANK.pt``.

    Args:
        folder: Of results and checkpoints, which are in ``own/NAME``.
        sources: ``nothing`` to train and save; whose checkpoint else. Several with commas.
    """
    dist.init_process_group("gloo")
    for name in names:
        client = CLIENTS[name]
        versions = {package: importlib.metadata.version(package) for package in client.packages}
        for source in sources.split(","):
            resumes = source != "nothing"
            trained = client(Path(folder, source if resumes else own, name), resumes=resumes)
            result = {"trained": vars(trained), "versions": versions}
            torch.save(result, Path(folder, own, f"{name} from {source} {dist.get_rank()}.pt"))
    dist.barrier()
    os._exit(0)  # if ranks end a gloo group one after the other, the last one may wait forever


if __name__ == "__main__":
    main(*sys.argv[1:])
