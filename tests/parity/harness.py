"""Train one model twice from the same seed on the same data, with Composer's FSDP1 and with ours, and compare.

``from parity.harness import Run, train, difference``; everything here but the values runs on the ranks.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from parity.models import Parent, build
from torch import nn

STEPS = 10
EVAL_AFTER = (2, 6)
# Far enough below the norms of these models that most steps are clipped.
THRESHOLDS = {"norm": 0.3, "value": 0.05}
HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


class Sharding(enum.Enum):
    """Who shards."""

    FSDP1 = "Composer's prepare_fsdp_module"
    FSDP2 = "composer_fsdp2.prepare_fully_shard"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run; the defaults are FSDP1's own, with SGD on one group.

    Args:
        optimizer: ``sgd`` (with momentum) or ``adamw`` in fp32, ``sgd64`` or ``adamw64`` in float64.
        replicate: The replicate degree of a 2-D mesh, or None for a 1-D one.
        checkpointing: Words of ``reentrant``, ``non-reentrant`` and ``offload`` joined by ``+``, or ``off``.
        groups: ``one``, ``several`` (decayed or not, at two rates), ``subset`` (the first block has none), ``frozen``.
        clipping: Composer's clipping type (``value`` clips by the largest absolute value of a root), or None.
        more: Other FSDPConfig fields.
    """

    model: str = "mlp"
    tied: bool = False
    optimizer: str = "sgd"
    strategy: str = "FULL_SHARD"
    replicate: int | None = None
    checkpointing: str = "off"
    groups: str = "one"
    clipping: str | None = None
    microbatches: int = 1
    evaluate: bool = False
    dropout: bool = True
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.optimizer.endswith("64") else torch.float32

    def fsdp_config(self) -> dict[str, Any]:
        """The section ``fsdp_config`` of this run's YAML."""
        ways = set(self.checkpointing.split("+"))
        section: dict[str, Any] = {
            "sharding_strategy": self.strategy,
            "activation_checkpointing": bool(ways & {"reentrant", "non-reentrant"}),
            "activation_checkpointing_reentrant": "non-reentrant" not in ways,
            "activation_cpu_offload": "offload" in ways,
            "mixed_precision": "FULL" if self.dtype == torch.float64 else "DEFAULT",
        }
        if self.replicate is not None:
            section["data_parallel_replicate_degree"] = self.replicate
        return section | dict(self.more)


@dataclass(kw_only=True)
class Trained:
    """What one rank saw of a run. Names are the model's own, without wrappers."""

    losses: list[float] = field(default_factory=list)  # of this rank
    mean_losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # of all gradients, before clipping
    clip_norms: list[list[float]] = field(default_factory=list)  # of each root, as clipping gave them; ours only
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)  # of this rank
    last_grads: dict[str, torch.Tensor] = field(default_factory=dict)  # ours only
    units: list[str] = field(default_factory=list)
    roots: list[str] = field(default_factory=list)
    checkpointed: list[str] = field(default_factory=list)
    groups: list[tuple[dict[str, Any], list[str]]] = field(default_factory=list)


def train(run: Run, sharding: Sharding, *, gradient_scale: float = 1.0) -> Trained:
    """Build, shard and train; called on all ranks. ``gradient_scale`` is the wrong factor of a negative control."""
    model = build(run.model, tied=run.tied, dtype=run.dtype, dropout=run.dropout)
    optimizer = make_optimizer(run, model)
    shard(run, sharding, model, optimizer)
    trained = Trained()
    _describe(model, optimizer, trained)
    torch.manual_seed(100 + dist.get_rank())  # Each rank has its own dropout, the same under both.
    for step in range(STEPS):
        loss = 0.0
        optimizer.zero_grad()
        for microbatch in range(run.microbatches):
            part = model.loss(batch_of(model, dist.get_rank(), step, microbatch)) / run.microbatches
            (part * gradient_scale).backward()
            loss += part.item()
        _record_loss(trained, loss)
        trained.norms.append(_gradient_norm(run, model))
        _clip(run, sharding, model, trained)
        optimizer.step()
        if run.evaluate and step in EVAL_AFTER:
            model.eval()
            with torch.no_grad():
                _record_loss(trained, model.loss(batch_of(model, dist.get_rank(), 1000 + step, 0)).item())
            model.train()
    _collect(sharding, model, trained)
    return trained


def batch_of(model: Parent, rank: int, step: int, microbatch: int) -> torch.Tensor:
    return model.batch(torch.Generator().manual_seed(1 + rank + 10 * microbatch + 100 * step))


def make_optimizer(run: Run, model: Parent) -> torch.optim.Optimizer:
    """Built before sharding, as Composer's users build it."""
    first_block = set(model.blocks[0].parameters())
    if run.groups == "frozen":
        for parameter in first_block:
            parameter.requires_grad_(False)
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": parameters}]
    if run.groups == "several":
        matrices = [parameter for parameter in parameters if parameter.ndim > 1]
        others = [parameter for parameter in parameters if parameter.ndim <= 1]
        scale = 0.5
        groups = [{"params": matrices}, {"params": others, "lr": _lr(run) * scale, "weight_decay": 0.0}]
    if run.groups == "subset":
        groups = [{"params": [parameter for parameter in parameters if parameter not in first_block]}]
    if run.optimizer.startswith("adamw"):
        return torch.optim.AdamW(groups, lr=_lr(run), weight_decay=0.1)
    return torch.optim.SGD(groups, lr=_lr(run), momentum=0.9, weight_decay=0.01)


def _lr(run: Run) -> float:
    return 0.003 if run.optimizer.startswith("adamw") else 0.05


def shard(run: Run, sharding: Sharding, model: Parent, optimizer: torch.optim.Optimizer) -> None:
    """As Composer's State does it: the config gets its mesh, then the list of optimizers goes along."""
    from composer.core.state import _create_device_mesh
    from composer.devices import DeviceCPU
    from composer.utils.parallelism import FSDPConfig

    config = FSDPConfig(**run.fsdp_config())
    mesh = _create_device_mesh(DeviceCPU(), config, None)
    assert mesh is not None and mesh.mesh_dim_names is not None
    config.device_mesh = mesh[tuple(mesh.mesh_dim_names)]
    if sharding is Sharding.FSDP2:
        from composer_fsdp2 import prepare_fully_shard

        prepare_fully_shard(model, [optimizer], config, "fp32", "cpu")
        return
    from composer.distributed import prepare_fsdp_module

    # FSDP1 runs on gloo if it is given the CPU as its device; Composer asks CUDA for it.
    with mock.patch("torch.cuda.current_device", return_value=torch.device("cpu")):
        prepare_fsdp_module(model, [optimizer], config, "fp32", "cpu", False)


def _record_loss(trained: Trained, loss: float) -> None:
    trained.losses.append(loss)
    mean = torch.tensor(loss, dtype=torch.float64) / dist.get_world_size()
    dist.all_reduce(mean)
    trained.mean_losses.append(mean.item())


def _gradient_norm(run: Run, model: nn.Module) -> float:
    """From the shards as they lie there, so that neither side's own arithmetic measures itself."""
    from torch.distributed.tensor import DTensor

    squares = torch.zeros((), dtype=torch.float64)
    for parameter in model.parameters():
        grad = parameter.grad
        if grad is not None:
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            squares += local.double().square().sum()
    dist.all_reduce(squares)
    replicas = dist.get_world_size() if run.strategy == "NO_SHARD" else run.replicate or 1
    return math.sqrt(squares.item() / replicas)


def _clip(run: Run, sharding: Sharding, model: nn.Module, trained: Trained) -> None:
    if run.clipping is None:
        return
    threshold = THRESHOLDS[run.clipping]
    if sharding is Sharding.FSDP2:
        from composer_fsdp2 import clip_grad_norm_

        norms = clip_grad_norm_(model, threshold, 2.0 if run.clipping == "norm" else math.inf)
        trained.clip_norms.append([norm.item() for norm in norms.values()])
        return
    from composer.algorithms.gradient_clipping import apply_gradient_clipping

    apply_gradient_clipping(model, run.clipping, threshold, fsdp_enabled=True)


def clean(name: str) -> str:
    for wrapper in WRAPPERS:
        name = f"{name}.".replace(wrapper, "").removesuffix(".")
    return name


def _describe(model: nn.Module, optimizer: torch.optim.Optimizer, trained: Trained) -> None:
    """Where the units and the wrappers are, and what the optimizer holds."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    for path, module in model.named_modules():
        if isinstance(module, FSDPModule | FullyShardedDataParallel) and _holds_parameters(module):
            trained.units.append(clean(path))
        if isinstance(module, ActivationWrapper):
            trained.checkpointed.append(clean(path))
    trained.roots = [clean(path) for path, _ in _roots(model)]
    names = {parameter: clean(name) for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        trained.groups.append((options, [names[parameter] for parameter in group["params"]]))


def _holds_parameters(unit: nn.Module) -> bool:
    """Whether the unit itself gathers something. FSDP1 made units of modules without parameters too, such as dropouts."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(unit, FSDPModule):
        return unit._get_fsdp_state()._fsdp_param_group is not None
    # FSDP1 gave batch norms units of their own wherever a dtype was named, fp32 too; that changes no number.
    return unit._handle is not None and not isinstance(unit.module, nn.BatchNorm1d)


def _roots(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    for name, child in model.named_children():
        if isinstance(child, FSDPModule | FullyShardedDataParallel):
            yield f"{prefix}{name}", child
        else:
            yield from _roots(child, f"{prefix}{name}.")


def _collect(sharding: Sharding, model: nn.Module, trained: Trained) -> None:
    """Full parameters on every rank, and this rank's buffers."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    if sharding is Sharding.FSDP1:
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            trained.parameters = {clean(name): p.detach().clone() for name, p in model.named_parameters()}
    else:
        from composer_fsdp2 import reshard

        reshard(model)
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor), f"{name} is not sharded"
            trained.parameters[clean(name)] = parameter.detach().full_tensor()
            if parameter.grad is not None:
                assert isinstance(parameter.grad, DTensor)
                trained.last_grads[clean(name)] = parameter.grad.full_tensor()
    trained.buffers = {clean(name): buffer.detach().clone() for name, buffer in model.named_buffers()}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far two runs are apart on one rank: relative for losses and norms, of a tensor's largest value for the rest."""

    losses: float
    norms: float
    parameters: float
    worst: str  # the parameter that is furthest off
    bit_equal: bool
    buffers: float


def difference(ours: Trained, reference: Trained, *, leave_out: dict[str, slice] | None = None) -> Difference:
    """Compare number by number.

    Args:
        leave_out: By the end of a parameter's name, the part of it that is not compared.
    """
    assert ours.parameters.keys() == reference.parameters.keys(), "the two have different parameters"
    assert len(ours.losses) == len(reference.losses)
    off = {}
    for name, theirs in reference.parameters.items():
        deviation = (ours.parameters[name] - theirs).abs()
        for ending, part in (leave_out or {}).items():
            if name.endswith(ending):
                deviation[part] = 0
        off[name] = (deviation.max() / theirs.abs().max()).item()
    worst = max(off, key=off.__getitem__)
    return Difference(
        losses=max(
            _relative(ours.losses, reference.losses),
            _relative(ours.mean_losses, reference.mean_losses),
        ),
        norms=_relative(ours.norms, reference.norms),
        parameters=off[worst],
        worst=worst,
        bit_equal=all(torch.equal(ours.parameters[name], p) for name, p in reference.parameters.items()),
        buffers=max((_off(ours.buffers[name], buffer) for name, buffer in reference.buffers.items()), default=0.0),
    )


def _relative(ours: list[float], reference: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, reference, strict=True))


def _off(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return ((ours.double() - reference.double()).abs().max() / reference.double().abs().max().clamp_min(1e-30)).item()
