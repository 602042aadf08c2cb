"""Rows of the legality tables: combinations that all ranks refuse before changing anything, and combinations that
train."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.clips import CLIPS, Clip, assert_same_gradients, check_summoned
from support.comparing import assert_same, full_parameters
from support.language import Language, Layer, batch, layer_plan, loss_of
from support.training import FULL
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from composer_fsdp2 import ComposerFSDP2Error, begin_microbatch, clip_grad_norm_, prepare_fully_shard
from composer_fsdp2.estimate._torch.counting import Collectives
from composer_fsdp2.training.clipping import norm_of_gradients

TENSOR = 2
VOCABULARY = 20  # of the smallest model
Plan = Callable[[], Any]
Prepare = Callable[[Any], Any]


def one_layer() -> Language:
    return Language(num_layers=1)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A combination of features.

    Args:
        config: A function is called with the model.
        plan: The layer plan; None without tensor parallelism.
        build: Makes the model, as in one process.
        prepare: Changes that the script makes to the model before sharding.
    """

    config: dict[str, Any] = field(default_factory=dict)
    plan: Plan | None = None
    degree: Any = TENSOR
    build: Callable[[], nn.Module] = one_layer
    prepare: Prepare = lambda model: None

    def shard(self, model: nn.Module, *, optimizer: torch.optim.Optimizer | None = None, is_wrong: bool = True) -> None:
        """Shards as a script does; without the row's settings on ranks other than ``wrong_rank``."""
        given = FULL | self.config if is_wrong else FULL
        config = {key: value(model) if callable(value) else value for key, value in given.items()}
        tensor = None
        if self.plan is not None and is_wrong:
            tensor = {"tensor_parallel_degree": self.degree, "layer_plan": self.plan()}
        prepare_fully_shard(model, optimizer, config, device="cpu", tensor_parallel=tensor)


@dataclass(frozen=True, kw_only=True)
class Refused(Row):
    """A row that is refused.

    Args:
        says: Parts of the message: the mistake, and the way out.
            do: A function that runs instead of sharding.
        wrong_rank: The only rank with this combination; the others shard the plain model.
    """

    says: tuple[str, ...]
    do: Prepare | None = None
    wrong_rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class Carried(Row):
    """A row that is supported and trains like one process.

    Args:
        loss: Of a model and this rank's tokens.
        num_shared: The number of consecutive ranks that share a batch.
        optimizer: Made before sharding; over all parameters.
        steps_before: Steps of both models before sharding.
    """

    loss: Callable[[Any, torch.Tensor], torch.Tensor] = loss_of
    num_shared: int = 1
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(
        parameters, lr=0.1, momentum=0.9, weight_decay=0.1
    )
    steps_before: int = 0
    num_steps: int = 2
    num_microbatches: int = 1


def state_of(model: nn.Module, optimizers: Any = None) -> list[Any]:
    """State that a refusal must not change: objects by identity, tensors by value, classes, hooks and attributes of
    modules; the groups and states of an optimizer, or of several in a list."""
    seen: list[Any] = []
    for path, module in model.named_modules(remove_duplicate=False):
        hooks = [len(value) for name, value in sorted(vars(module).items()) if name.endswith("_hooks")]
        seen.append((path, id(module), type(module), hooks, sorted(vars(module))))
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        values = None if local.is_meta else local.clone().tolist()
        seen.append((name, id(tensor), str(tensor.device), tensor.dtype, tensor.requires_grad, values))
    for optimizer in filter(None, optimizers if isinstance(optimizers, list) else [optimizers]):
        seen.append((id(optimizer.param_groups), [id(group) for group in optimizer.param_groups]))
        seen.append([[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups])
        seen.append([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])
        seen.append([(id(parameter), repr(state)) for parameter, state in optimizer.state.items()])
    return seen


def check_refused(row: Refused) -> None:
    torch.manual_seed(0)
    model = row.build()
    row.prepare(model)
    before = state_of(model)
    is_wrong = row.wrong_rank in (None, dist.get_rank())
    with pytest.raises(ComposerFSDP2Error) as caught:
        row.do(model) if row.do else row.shard(model, is_wrong=is_wrong)
    missing = [text for text in row.says if text not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
    assert state_of(model) == before


# The largest differences from one process: in losses, clipped norms and final parameters.
Distances = dict[str, float]


def check_carried(row: Carried) -> Distances:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = row.build()
    reference = copy.deepcopy(model)
    row.prepare(model)
    optimizer, theirs = row.optimizer(model.parameters()), row.optimizer(reference.parameters())
    for step in range(row.steps_before):
        for each, stepped in ((model, optimizer), (reference, theirs)):
            row.loss(each, batch(100 + step, 2)).backward()
            stepped.step()
            stepped.zero_grad()
    row.shard(model, optimizer=optimizer)
    distances = assert_steps_are_those_of_one_process(model, reference, row, optimizer, theirs)
    assert ties_of(model) == ties_of(reference)
    return distances


def ties_of(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [each for each in names.values() if len(each) > 1]


def assert_steps_are_those_of_one_process(
    model: nn.Module,
    reference: nn.Module,
    row: Carried,
    optimizer: torch.optim.Optimizer,
    theirs: torch.optim.Optimizer | None = None,
) -> Distances:
    """Trains with clipped gradients on batches divided over consecutive blocks of ranks, and compares with one
    process."""

    def loss(each: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return row.loss(each, tokens % VOCABULARY)

    return compare_training(
        model,
        reference,
        optimizer,
        theirs or row.optimizer(reference.parameters()),
        num_steps=row.num_steps,
        num_microbatches=row.num_microbatches,
        num_shared=row.num_shared,
        loss=loss,
    )


def compare_training(
    model: nn.Module,
    reference: nn.Module,
    ours: torch.optim.Optimizer,
    theirs: torch.optim.Optimizer,
    *,
    num_steps: int,
    num_microbatches: int = 1,
    num_shared: int = 1,
    loss: Callable[[Any, torch.Tensor], torch.Tensor] = loss_of,
) -> Distances:
    """The loss and the clipped norm of each step, with a decaying rate, and the final parameters.

    Args:
        num_shared: The number of consecutive ranks that share a batch.
        loss: Of a model and this rank's tokens.
    """
    groups, group = dist.get_world_size() // num_shared, dist.get_rank() // num_shared
    tolerance = _tolerance(*reference.parameters())
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (ours, theirs)]
    distances = {"loss": 0.0, "norm": 0.0}
    for step in range(num_steps):
        tokens = batch(step, 2 * num_microbatches * groups)
        expected = loss(reference, tokens)
        expected.backward()
        total = torch.zeros((), dtype=expected.dtype)
        for number, microbatch in enumerate(tokens.chunk(groups)[group].chunk(num_microbatches)):
            begin_microbatch(model, is_last=number == num_microbatches - 1)
            part = loss(model, microbatch) / num_microbatches
            part.backward()
            total += part.detach()
        dist.all_reduce(total)
        torch.testing.assert_close(total / dist.get_world_size(), expected.detach(), rtol=0, atol=tolerance)
        norm, wanted = clip_grad_norm_(model, 0.1)["model"], nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        torch.testing.assert_close(norm, wanted, rtol=0, atol=tolerance, check_dtype=False)
        found = total / dist.get_world_size() - expected.detach()
        for name, difference in (("loss", found), ("norm", norm - wanted)):
            distances[name] = max(distances[name], float(difference.abs()))
        for optimizer, scheduler in zip((ours, theirs), schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return distances | {"parameters": assert_same_parameters(model, reference)}


def check_clips(row: Carried, *names: str) -> None:
    """Within summon_full_params the model equals the unsharded one, and writes are written back. An evaluation changes
    nothing, and its gradients are clipped as in one process."""
    torch.set_default_dtype(torch.float64)
    groups, group = dist.get_world_size() // row.num_shared, dist.get_rank() // row.num_shared

    torch.manual_seed(0)
    model = row.build()
    reference = copy.deepcopy(model)
    row.shard(model)
    check_summoned(model, reference)
    assert ties_of(model) == ties_of(reference)
    tokens = batch(0, 2 * groups) % VOCABULARY
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(2)  # as check_summoned did
        row.loss(model, batch(1, 2) % VOCABULARY)
    row.loss(model, tokens.chunk(groups)[group]).backward()
    row.loss(reference, tokens).backward()
    norm = torch.stack([parameter.grad.norm() for parameter in reference.parameters()]).norm()
    torch.testing.assert_close(norm_of_gradients(model.parameters()), norm, rtol=0, atol=1e-12)
    gradients = {parameter: parameter.grad for each in (model, reference) for parameter in each.parameters()}

    def clipped(clip: Clip, reference_clip: Clip) -> None:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient.clone()
        clip(model)
        reference_clip(reference)
        assert_same_gradients(model, reference, atol=1e-12)

    for_each(clipped, {name: CLIPS[name] for name in names or CLIPS})


def check_start(row: Carried, build: Callable[[], nn.Module], start: str, num_copies: int = 1) -> list[dict[str, int]]:
    """The sharded model starts with the values of an unparallelized model, from the same random state.

    Args:
        start: The values before sharding: "meta", "mixed" (on rank 0 only), "alike", or "unlike" (rank 0's are
            broadcast).
        num_copies: The number of consecutive ranks that start with the same values.
    Returns:
        The bytes of each collective that sends values, without and with TP or EP.
    """

    def drawn(seed: int, has_values: bool) -> nn.Module:
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(seed)
        with torch.device("cpu" if has_values else "meta"):
            return build()

    rank, sent = dist.get_rank(), []
    expected = drawn(3, start != "meta")
    has_values = start != "meta" and (start != "mixed" or rank == 0)
    model = drawn(3 + rank // num_copies * (start == "unlike"), has_values)
    row.prepare(model)
    for each, of in ((expected, Carried()), (model, row)):
        torch.manual_seed(5)
        with Collectives() as counted:
            replace(of, config=of.config | {"sync_module_states": start != "meta"}).shard(each)
        senders = ("broadcast_", "scatter_")
        sent.append({name: found["bytes"] for name, found in counted.counts.items() if name in senders})
    assert_same(full_parameters(model), full_parameters(expected))
    return sent


def assert_same_parameters(model: nn.Module, reference: nn.Module) -> float:
    """The largest difference."""
    wanted = dict(reference.named_parameters())
    tolerance = _tolerance(*wanted.values())
    found = full_parameters(model)
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        torch.testing.assert_close(
            value, wanted[name].detach(), rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )
    return max(float((value - wanted[name].detach()).abs().max()) for name, value in found.items() if value.numel())


def _tolerance(*parameters: torch.Tensor) -> float:
    """The tolerance of the lowest dtype, in which a sum over ranks is rounded."""
    trained = {parameter.dtype for parameter in parameters if parameter.requires_grad}
    return 1e-12 if trained == {torch.float64} else 1e-7


# --- layer plans


def with_plan(**changes: ParallelStyle | None) -> Plan:
    """The layer plan with entries changed or removed; double underscores are dots."""

    def make() -> dict[str, Any]:
        plan: dict[str, Any] = layer_plan() | {key.replace("__", "."): style for key, style in changes.items()}
        return {key: style for key, style in plan.items() if style is not None}

    return make


def only(**styles: Any) -> Plan:
    return lambda: {key.replace("__", "."): style for key, style in styles.items()}


# --- changes by scripts before sharding


def wrap(select: Callable[[Any], Any]) -> Prepare:
    """Sets ``fsdp_wrap_fn`` to return values by module, from a dict that ``select`` computes from the model's child."""

    def prepare(model: Any) -> None:
        answers: dict[nn.Module, Any] = select(model.model)
        model.model.fsdp_wrap_fn = lambda module: answers.get(module, isinstance(module, Layer))

    return prepare


def split_by_script(*names: str, shape: tuple[int, ...] = (2, 2), plan: Plan = layer_plan, **options: Any) -> Prepare:
    """Parallelizes along the last of the names, in a mesh with the others; ``options`` of parallelize_module."""

    def split(model: nn.Module) -> None:
        along, *axes = names
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple(axes))
        parallelize_module(model, mesh[along] if len(shape) > 1 else mesh, plan(), **options)

    return split


# --- experts that are modules


class Expert(nn.Sequential):
    """A separate class, to distinguish experts from other layers."""


def with_experts() -> Language:
    model = Language()
    for layer in model.model.layers:
        layer.mlp.experts = nn.ModuleList(Expert(nn.Linear(16, 16)) for _ in range(3))
    return model
