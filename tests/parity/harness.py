"""Train a model from the same seed on the same data: with Composer's FSDP1, with FSDP2, or in one process.

``from parity.harness import Run, Sharding, train``. ``train`` runs on the ranks; Composer, Transformers and LLM Foundry
are imported there only.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from parity.models import Parent, build
from support.comparing import full, full_parameters, own_name
from support.examples import IS_THOROUGH
from support.oracle import FSDP1
from torch import nn

# Momentum takes two steps to have an effect, and there are steps before and after an evaluation.
STEPS = 10 if IS_THOROUGH else 3
# Far enough below these models' norms that most steps are clipped.
THRESHOLDS = {"norm": 0.3, "value": 0.05}

STRATEGIES: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {"sharding_strategy": "FULL_SHARD"},
    "SHARD_GRAD_OP": {"sharding_strategy": "SHARD_GRAD_OP"},
    "NO_SHARD": {"sharding_strategy": "NO_SHARD"},
    # The number of replicas follows the colon; without replicas the mesh still has two axes.
    "HYBRID_SHARD:1": {"sharding_strategy": "HYBRID_SHARD", "data_parallel_replicate_degree": 1},
    "HYBRID_SHARD:2": {"sharding_strategy": "HYBRID_SHARD", "data_parallel_replicate_degree": 2},
    "_HYBRID_SHARD_ZERO2:2": {"sharding_strategy": "_HYBRID_SHARD_ZERO2", "data_parallel_replicate_degree": 2},
    # FSDP2's own key, which FSDP1 ignores: reshards after forward to shards over two ranks.
    "reshard:2": {"sharding_strategy": "FULL_SHARD", "reshard_after_forward": 2},
    # Groups of ranks that do not communicate with each other; each rank makes the groups of "given" and "objects".
    "self": {"process_group": "self"},
    "mod1": {"process_group": "mod1"},  # all ranks
    "set2": {"process_group": "set2"},
    "mod2": {"process_group": "mod2", "sharding_strategy": "SHARD_GRAD_OP"},
    "given": {"process_group": "given"},
    "objects": {"process_group": "objects"},
    "set2-NO_SHARD": {"process_group": "set2", "sharding_strategy": "NO_SHARD"},
    # Replicas without a mesh: shards within the first group, all-reduce over the second.
    "pair": {"process_group": ("set2", "mod2"), "sharding_strategy": "HYBRID_SHARD"},
    "pair-ZERO2": {"process_group": ("mod2", "set2"), "sharding_strategy": "_HYBRID_SHARD_ZERO2"},
}
# FSDP1's equivalent of strategies that use keys unknown to it.
SAME_UNDER_FSDP1 = {"reshard:2": "FULL_SHARD"}

BF16 = {"param_dtype": "bf16", "reduce_dtype": "bf16", "buffer_dtype": "bf16"}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "prefetch-pre": {"backward_prefetch": "BACKWARD_PRE"},
    "prefetch-none": {"backward_prefetch": "NONE", "limit_all_gathers": False},
    "prefetch-far": {"forward_prefetch": True, "forward_prefetch_limit": 2, "backward_prefetch_limit": 2},
    "flat": {"use_orig_params": False},
    "bf16": {"mixed_precision": BF16},
    "bf16-reduced-in-fp32": {"mixed_precision": BF16 | {"reduce_dtype": "fp32"}},
    "reduced-in-bf16": {"mixed_precision": {"reduce_dtype": "bf16"}},
    "sync_module_states": {"sync_module_states": True},
    "cpu_offload": {"cpu_offload": True},
    # The model chooses the modules: `Parent.ignored`.
    "ignored": {"ignored_modules": True},
    "low-gradients": {"mixed_precision": BF16, "keep_low_precision_grads": True},
}


class Sharding(enum.Enum):
    """The implementation that shards."""

    FSDP1 = "Composer's prepare_fsdp_module"
    FSDP2 = "composer_fsdp2.prepare_fully_shard"
    NONE = "nobody: each process trains the whole model on the batches of all ranks"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run; the defaults are FSDP1's own, with SGD on one group.

    Args:
        optimizer: ``sgd`` (with momentum) or ``adamw`` in fp32, ``sgd64`` or ``adamw64`` in float64, ``sgd16`` on a
            model in bf16.
        strategy: A name in ``STRATEGIES``.
        checkpointing: ``reentrant``, ``non-reentrant`` and ``offload`` joined by ``+``, or ``off``.
        groups: ``one``, ``several`` (matrices, and the rest undecayed at half the rate), ``subset`` (without the first
            block) or ``frozen`` (the first block's matrices need no gradient).
        clipping: ``off`` or Composer's clipping type; ``value`` clips by the largest absolute value under a root.
        settings: A name in ``SETTINGS``.
        evaluate: Whether to evaluate before the first step, after the second, and after the middle one.
        steps: Of the optimizer.
    """

    model: str = "mlp"
    tied: bool = False
    optimizer: str = "sgd"
    strategy: str = "FULL_SHARD"
    checkpointing: str = "off"
    groups: str = "one"
    clipping: str = "off"
    microbatches: int = 1
    evaluate: bool = False
    dropout: bool = True
    settings: str = "default"
    steps: int = STEPS

    def __str__(self) -> str:
        """Non-default values, as a test's id; without the key where the value is unambiguous."""
        words = [self.model]
        for entry in fields(self)[1:]:
            value = getattr(self, entry.name)
            if value != entry.default:
                words.append(entry.name if value is True else f"no-{entry.name}" if value is False else str(value))
        return "-".join(words)

    @property
    def dtype(self) -> torch.dtype:
        return {"64": torch.float64, "16": torch.bfloat16}.get(self.optimizer[-2:], torch.float32)

    @property
    def is_grouped(self) -> bool:
        """Whether some ranks do not communicate with each other."""
        return isinstance(STRATEGIES[self.strategy].get("process_group"), str)

    @property
    def is_adamw(self) -> bool:
        return self.optimizer.startswith("adamw")

    @property
    def lr(self) -> float:
        if self.dtype == torch.bfloat16:
            return 2**-6  # A product that needs no rounding: rounding depends on an element's position.
        return 0.001 if self.is_adamw else 0.02

    def num_replicas(self, world_size: int) -> int:
        """The number of ranks with the same shard."""
        if self.strategy == "NO_SHARD":
            return world_size
        if self.strategy.startswith(("pair", "set2-NO_SHARD")):
            return 2
        return STRATEGIES[self.strategy].get("data_parallel_replicate_degree", 1)

    def fsdp_config(self) -> dict[str, Any]:
        """The section ``fsdp_config`` of this run's YAML."""
        ways = self.checkpointing.split("+")
        section = {
            "activation_checkpointing": "reentrant" in ways or "non-reentrant" in ways,
            "activation_checkpointing_reentrant": "non-reentrant" not in ways,
            "activation_cpu_offload": "offload" in ways,
            "mixed_precision": "FULL" if self.dtype == torch.float64 else "DEFAULT",
        }
        return section | STRATEGIES[self.strategy] | SETTINGS[self.settings]


@dataclass(kw_only=True)
class Observed:
    """Observations of a run on one rank. Names are the model's own, without wrappers."""

    losses: list[float] = field(default_factory=list)  # of this rank, in training and evaluation
    mean_losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # of all gradients, before clipping
    clip_norms: list[list[float]] = field(default_factory=list)  # of each root, as our clipping returned them
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)  # of the last step; not FSDP1's
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)  # of this rank
    left_out: list[str] = field(default_factory=list)  # replicated parameters; not FSDP1's
    units: list[str] = field(default_factory=list)
    unit_classes: set[type] = field(default_factory=set)
    roots: list[str] = field(default_factory=list)
    checkpointed: list[str] = field(default_factory=list)
    groups: list[tuple[dict[str, Any], list[str]]] = field(default_factory=list)


def train(run: Run, sharding: Sharding, *, gradient_scale: float = 1.0) -> Observed:
    """Build, shard and train. Called on all ranks.

    Args:
        gradient_scale: A wrong factor applied to the gradients, for negative controls.
    """
    model = build(run.model, tied=run.tied, dtype=run.dtype, dropout=run.dropout)
    if run.settings == "sync_module_states" and sharding is not Sharding.NONE:
        _scatter(model)
    optimizer = make_optimizer(run, model)
    shard(run, sharding, model, optimizer)
    trained = Observed()
    _describe(model, optimizer, trained)
    torch.manual_seed(100 + dist.get_rank())  # Each rank has its own dropout, the same for each implementation.
    if run.evaluate:
        _evaluate(model, 0, trained)  # Before any training, like a user's trainer.eval().
    for step in range(run.steps):
        optimizer.zero_grad()
        losses = []
        for microbatch in range(run.microbatches):
            loss, mean = _forward(run, sharding, model, step, microbatch)
            (mean * gradient_scale).backward()
            losses.append(loss)
        trained.losses.append(sum(losses))
        trained.norms.append(_gradient_squares(model))
        _clip(run, sharding, model, trained)
        optimizer.step()
        if run.evaluate and step in (1, run.steps // 2):
            _evaluate(model, 1 + step, trained)
    _reduce_numbers(run, sharding, trained)
    _collect(sharding, model, trained)
    return trained


def make_optimizer(run: Run, model: Parent) -> torch.optim.Optimizer:
    """Built before sharding, as Composer's users do."""
    first_block = set(model.blocks[0].parameters())
    if run.groups == "frozen":
        for parameter in first_block:
            parameter.requires_grad_(parameter.ndim <= 1)  # One unit has both kinds, as with LoRA.
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": parameters}]
    if run.groups == "several":
        matrices = [parameter for parameter in parameters if parameter.ndim > 1]
        rest = [parameter for parameter in parameters if parameter.ndim <= 1]
        groups = [{"params": matrices}, {"params": rest, "lr": run.lr / 2, "weight_decay": 0.0}]
    if run.groups == "subset":
        groups = [{"params": [parameter for parameter in parameters if parameter not in first_block]}]
    if run.is_adamw:
        return torch.optim.AdamW(groups, lr=run.lr, weight_decay=0.1)
    weight_decay = 2**-7 if run.dtype == torch.bfloat16 else 0.01
    return torch.optim.SGD(groups, lr=run.lr, momentum=0.9, weight_decay=weight_decay)


def shard(run: Run, sharding: Sharding, model: Parent, optimizer: torch.optim.Optimizer) -> None:
    """As Composer's State does it: the config gets its mesh, and the list of optimizers is passed."""
    if sharding is Sharding.NONE:
        return
    from composer.core.state import _create_device_mesh
    from composer.devices import DeviceCPU
    from composer.utils.parallelism import FSDPConfig

    config = FSDPConfig(**run.fsdp_config())
    config.process_group = _process_group(config.process_group)
    config.ignored_modules = model.ignored if config.ignored_modules else None
    mesh = _create_device_mesh(DeviceCPU(), config, None)
    assert mesh is not None and mesh.mesh_dim_names is not None
    config.device_mesh = mesh[tuple(mesh.mesh_dim_names)]
    if sharding is Sharding.FSDP2:
        from composer_fsdp2 import prepare_fully_shard

        prepare_fully_shard(model, [optimizer], config, "fp32", "cpu")
        return
    from composer.distributed import prepare_fsdp_module

    with FSDP1():
        prepare_fsdp_module(model, [optimizer], config, "fp32", "cpu", False)


def _process_group(value: Any) -> Any:
    """The pairs of ranks 0 and 3, 1 and 2, in the form that each rank passes."""
    if value not in ("given", "objects"):
        return value
    own = next(ranks for ranks in ((0, 3), (1, 2)) if dist.get_rank() in ranks)
    return list(own) if value == "given" else [dist.new_group(ranks) for ranks in ((0, 3), (1, 2))][own == (1, 2)]


def _scatter(model: Parent) -> None:
    """Different values on every rank but the first, which rank 0's are to replace."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data += dist.get_rank()


def _batch(model: Parent, rank: int, step: int, number: int) -> torch.Tensor:
    return model.batch(torch.Generator().manual_seed(1 + rank + 10 * number + 100 * step))


def _forward(run: Run, sharding: Sharding, model: Parent, step: int, microbatch: int) -> tuple[float, torch.Tensor]:
    """This rank's loss, and the tensor to differentiate: FSDP averages gradients, one process averages losses."""
    rank = dist.get_rank()
    if sharding is not Sharding.NONE:
        loss = model(_batch(model, rank, step, microbatch)) / run.microbatches
        return loss.item(), loss
    assert not run.dropout, "one process cannot draw every rank's dropout"
    ranks = range(dist.get_world_size())
    losses = [model(_batch(model, each, step, microbatch)) / run.microbatches for each in ranks]
    return losses[rank].item(), torch.stack(losses).mean()


def _evaluate(model: Parent, step: int, trained: Observed) -> None:
    """Two batches: in the second, the roots are in the state after a forward without gradients."""
    model.eval()
    with torch.no_grad():
        for number in range(2):
            trained.losses.append(model(_batch(model, dist.get_rank(), 1000 + step, number)).item())
    model.train()


def _gradient_squares(model: nn.Module) -> float:
    """Computed from the shards directly, independent of the code under test."""
    grads = [_local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    return sum(grad.double().square().sum().item() for grad in grads)


def _reduce_numbers(run: Run, sharding: Sharding, trained: Observed) -> None:
    """Replaces each rank's observations by those of the run: mean losses, and norms of all gradients. Two collectives a
    run."""
    world_size = dist.get_world_size()
    num_replicas = world_size if sharding is Sharding.NONE else run.num_replicas(world_size)
    trained.mean_losses = [total / world_size for total in _sum_over_ranks(trained.losses)]
    trained.norms = [math.sqrt(total / num_replicas) for total in _sum_over_ranks(trained.norms)]


def _sum_over_ranks(values: list[float]) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _clip(run: Run, sharding: Sharding, model: nn.Module, trained: Observed) -> None:
    if run.clipping == "off":
        return
    threshold, norm_type = THRESHOLDS[run.clipping], 2.0 if run.clipping == "norm" else math.inf
    if sharding is Sharding.FSDP2:
        from composer_fsdp2 import clip_grad_norm_

        norms = clip_grad_norm_(model, threshold, norm_type)
        trained.clip_norms.append([norm.item() for norm in norms.values()])
    elif sharding is Sharding.FSDP1:
        from composer.algorithms.gradient_clipping import apply_gradient_clipping

        apply_gradient_clipping(model, run.clipping, threshold, fsdp_enabled=True)
    else:
        for child in model.children():
            nn.utils.clip_grad_norm_(child.parameters(), threshold, norm_type)


def _describe(model: nn.Module, optimizer: torch.optim.Optimizer, trained: Observed) -> None:
    """The paths of units and wrappers, and the optimizer's contents."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    for path, module in model.named_modules():
        if _is_unit(module):
            trained.unit_classes.add(FSDPModule if isinstance(module, FSDPModule) else FullyShardedDataParallel)
            if _holds_parameters(module):
                trained.units.append(own_name(path))
        if isinstance(module, ActivationWrapper):
            trained.checkpointed.append(own_name(path))
    trained.roots = list(_roots(model))
    names = {parameter: own_name(name) for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        trained.groups.append((options, [names[parameter] for parameter in group["params"]]))


def _is_unit(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return isinstance(module, FSDPModule | FullyShardedDataParallel)


def _holds_parameters(unit: nn.Module) -> bool:
    """Whether the unit has parameters to all-gather; FSDP1 also made units of modules without parameters, such as
    dropouts.

    Batch norms do not count: FSDP1 made them units whenever a dtype was set, fp32 included, which changes no number.
    """
    from torch.distributed.fsdp import FSDPModule

    if isinstance(unit, FSDPModule):
        return unit._get_fsdp_state()._fsdp_param_group is not None and not isinstance(unit, nn.BatchNorm1d)
    return unit._handle is not None and not isinstance(unit.module, nn.BatchNorm1d)


def _roots(model: nn.Module, prefix: str = "") -> Iterator[str]:
    """Roots with parameters: FSDP1 wrapped a loss function as well."""
    for name, child in model.named_children():
        if not _is_unit(child):
            yield from _roots(child, f"{prefix}{name}.")
        elif next(child.parameters(), None) is not None:
            yield f"{prefix}{name}"


def _collect(sharding: Sharding, model: nn.Module, trained: Observed) -> None:
    """Full parameters on every rank, and this rank's buffers."""
    from torch.distributed.tensor import DTensor

    trained.buffers = {own_name(name): buffer.detach().clone() for name, buffer in model.named_buffers()}
    if sharding is Sharding.FSDP2:
        from composer_fsdp2 import reshard

        reshard(model)  # An evaluation leaves the roots unsharded.
    trained.parameters = full_parameters(model)
    if sharding is Sharding.FSDP1:
        return
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            trained.left_out.append(own_name(name))
        if parameter.grad is not None:
            trained.grads[own_name(name)] = full(parameter.grad).clone()
