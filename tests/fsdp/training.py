"""One small model trained with FSDP1's class, torch's own or ours, by the same script."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.comparing import own_name
from support.models import Block, Decoder
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import fully_sharded_data_parallel as fsdp1
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

BF16 = torch.bfloat16
PRECISIONS: dict[str, tuple[torch.dtype, MixedPrecision | None]] = {
    "float64": (torch.float64, None),
    "fp32": (torch.float32, None),
    "bf16": (torch.float32, MixedPrecision(BF16, BF16, BF16)),
    "bf16 reduced in fp32": (torch.float32, MixedPrecision(BF16, torch.float32, BF16)),
    "reduced in bf16": (torch.float32, MixedPrecision(reduce_dtype=BF16)),
    "bf16 cast in each": (torch.float32, MixedPrecision(BF16, buffer_dtype=BF16, cast_forward_inputs=True)),
    "bf16 parameters": (torch.bfloat16, None),
}
POLICIES: dict[str, Any] = {
    "none": None,
    "classes": ModuleWrapPolicy({Block}),
    "transformer": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "size": functools.partial(size_based_auto_wrap_policy, min_num_params=100),
    "lambda": functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.LayerNorm)),
    "custom": CustomPolicy(lambda module: {"forward_prefetch": True} if isinstance(module, Block) else False),
}
STEPS, LR, MAX_NORM = 4, 1e-2, 0.05


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run.

    Args:
        wrap: A name in ``POLICIES``, or ``by hand``.
        microbatches: The number of backwards a step, and whether all but the last are under ``no_sync``.
        optimizer: Made ``before`` or ``after`` wrapping.
        trained: ``all``, or ``biases`` only.
        recompute: Blocks, wrapped ``before`` or ``after`` they get instances.
        norm: ``layer``, or ``batch``, which mixed precision excludes.
        groups: ``all`` ranks, or ``pairs`` that do not communicate with each other.
    """

    strategy: str = "FULL_SHARD"
    precision: str = "float64"
    wrap: str = "none"
    microbatches: str = "1"
    optimizer: str = "after"
    trained: str = "all"
    offload: str = "no"
    recompute: str = "no"
    norm: str = "layer"
    groups: str = "all"

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in vars(self).items())


class Net(Decoder):
    """Takes floats beside tokens; mixed precision casts them at the root."""

    def use_batch_norm(self) -> None:
        self.norm = nn.Sequential(Transposed(6), nn.Identity())

    def forward(self, tokens: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + noise
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Transposed(nn.BatchNorm1d):
    """Channels last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def recompute(model: nn.Module) -> None:
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda module: isinstance(module, Block)
    )


def build(run: Run) -> Net:
    torch.manual_seed(0)
    net = Net(tied=True)
    if run.norm == "batch":
        net.use_batch_norm()
    if run.recompute == "before":
        recompute(net)
    net.to(PRECISIONS[run.precision][0])
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(run.trained == "all" or name.endswith("bias"))
    return net


def wrapped(cls: Any, net: nn.Module, run: Run) -> Any:
    options: dict[str, Any] = {
        "sharding_strategy": getattr(ShardingStrategy, run.strategy),
        "mixed_precision": PRECISIONS[run.precision][1],
        "device_id": torch.device("cpu"),
        "use_orig_params": True,
    }
    if "HYBRID" in run.strategy:
        options["process_group"] = groups()
    if run.offload == "yes":
        options["cpu_offload"] = fsdp1.CPUOffload(offload_params=True)
    if run.groups == "pairs":
        options["process_group"] = groups()[0]
    model = _wrapped(cls, net, run.wrap, options)
    if run.recompute == "after":
        recompute(model)
    return model


def _wrapped(cls: Any, net: nn.Module, wrap: str, options: dict[str, Any]) -> Any:
    if wrap != "by hand":
        return cls(net, auto_wrap_policy=POLICIES[wrap], **options)
    first = getattr(net.blocks[0], "_checkpoint_wrapped_module", net.blocks[0])
    first.fc_in = cls(first.fc_in, **options)
    for number, block in enumerate(net.blocks):
        net.blocks[number] = cls(block, **options)
    return cls(net, **options)


@functools.cache
def _groups(world_size: int, world: object) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    size = max(2, world_size // 2)
    shards = [list(range(first, first + size)) for first in range(0, world_size, size)]
    replicas = [list(range(place, world_size, size)) for place in range(size)]
    made = [[dist.new_group(ranks) for ranks in of_axis] for of_axis in (shards, replicas)]
    return made[0][dist.get_rank() // size], made[1][dist.get_rank() % size]


def groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """(shard, replicate): with four ranks, pairs shard."""
    return _groups(dist.get_world_size(), dist.group.WORLD)


def train(cls: Any, run: Run) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """This rank's losses, its gradient norms, and the trained parameters. Called on all ranks."""
    net = build(run)
    optimizer = make_optimizer(net)
    model = wrapped(cls, net, run)
    if run.optimizer == "after":
        optimizer = make_optimizer(model)
    with norms_in_float64() if run.precision == "float64" else contextlib.nullcontext():
        steps = [clipped_step(model, optimizer, run, number) for number in range(STEPS)]
    losses, norms = map(list, zip(*steps, strict=True))
    with cls.summon_full_params(model):
        return losses, norms, {own_name(name): each.detach().clone() for name, each in model.named_parameters()}


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=LR, eps=1e-3)


def step(model: Any, optimizer: torch.optim.Optimizer, run: Run, number: int) -> float:
    return clipped_step(model, optimizer, run, number)[0]


def clipped_step(model: Any, optimizer: torch.optim.Optimizer, run: Run, number: int) -> tuple[float, float]:
    """The loss, and the norm of the gradients before clipping."""
    count, total = int(run.microbatches[0]), 0.0
    optimizer.zero_grad()
    for microbatch in range(count):
        is_put_off = "no_sync" in run.microbatches and microbatch < count - 1
        with model.no_sync() if is_put_off else contextlib.nullcontext():
            loss = forward(model, 1 + dist.get_rank() + 10 * microbatch + 100 * number) / count
            loss.backward()
        total += loss.item()
    norm = model.clip_grad_norm_(MAX_NORM).item()
    optimizer.step()
    return total, norm


def forward(model: Any, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(11, (3, 5), generator=generator)
    dtype = next(model.parameters()).dtype
    logits = model(tokens, torch.randn(3, 5, 6, generator=generator, dtype=torch.float64).to(dtype))
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return nn.functional.cross_entropy(wide.flatten(0, 1), tokens.flatten())


@contextlib.contextmanager
def norms_in_float64() -> Iterator[None]:
    """FSDP1 computes norms in fp32, which torch refuses for float64 gradients: this computes them in float64."""

    def norm(parameters: Any, p: float, zero: torch.Tensor, device: Any) -> torch.Tensor:
        found = [each.grad for each in parameters if each.grad is not None]
        return nn.utils.get_total_norm(found, p) if found else zero.double()

    with mock.patch.object(fsdp1, "_get_grad_norm", norm):
        yield
