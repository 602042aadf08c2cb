"""``summon_full_params``: the full parameters of a sharded model within a with block."""

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from composer_fsdp2._torch.local_tensors import with_local_tensor
from composer_fsdp2._torch.unit import ParameterOverride, hooks_of
from composer_fsdp2._torch.unit_parameters import (
    UnitParameter,
    distinct_units,
    has_unreduced_gradients,
    is_in_forward_or_backward,
    is_inside_unit,
    override_parameters,
    owners_of_unit,
    parameters_of_unit,
)
from composer_fsdp2.config.text import and_more
from composer_fsdp2.errors import ComposerFSDP2Error, UnsupportedError
from composer_fsdp2.sharding.full_values import gather_full_tensor, local_shard
from composer_fsdp2.sharding.placements import shard_axes
from composer_fsdp2.training.guard import check_guard

log = logging.getLogger(__name__)


@contextlib.contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Within the block, parameters of ``module`` are full tensors in full precision, under their original names.

    The arguments are those of ``FullyShardedDataParallel.summon_full_params``. As there, a rank's writes persist for
    the rows of its own shard only, so all ranks should write the same values. On a mesh that does not shard
    (``NO_SHARD``, one rank), the full parameter shares the model's memory, and writes persist regardless of
    ``writeback``. After the block, also if it raises, the same parameter objects as before are registered, which the
    optimizer references.

    ``requires_grad`` may be changed in the block. A parameter in the block is a different object from the optimizer's
    (under FSDP1 it was the same), so read ``optimizer.state`` outside of the block.

    In addition to FSDP1, these are supported: a forward inside the block (with the values written so far, in the unit's
    precision), parameters that are replaced or loaded, gradients that are replaced or set to None, ``with_grads`` with
    ``offload_to_cpu``, ``offload_to_cpu`` on a mesh that does not shard, and nested blocks with the same options.
    Buffers, and parameters that no unit shards, are full already and unchanged.

    Args:
        module: A sharded model, a unit of it, or a module that contains units. Does nothing for other modules.
        recurse: Include the units below ``module``. If False, only the parameters of ``module``'s own unit.
        writeback: Keep the values that the block writes into parameters, and with ``with_grads`` into gradients.
        rank0_only: Full parameters on the first rank of each shard group only; the other ranks keep their shards.
            Requires ``writeback=False``.
        offload_to_cpu: Full parameters on the CPU instead of the mesh's device.
        with_grads: Unshard the gradients too. If False, ``.grad`` is None in the block.
    Raises:
        UnsupportedError: ``rank0_only`` with ``writeback``, which FSDP1 rejected as well.
        ComposerFSDP2Error: during a forward or backward; for a part of a unit; for a nested block with different
            options; with ``with_grads``, while gradients are not yet reduced (``gradient_sync``). Within the block: for
            an optimizer step, a forward with ``rank0_only``, or a backward with ``with_grads``. After the block: if
            written values cannot be kept; names the parameters.

    Called on all ranks with the same arguments. One all-gather per parameter (and gradient); ``with_grads`` adds one
    all-reduce per unit. The end of the block does not communicate.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 2))
        >>> _ = prepare_fully_shard(model, None, {}, precision="fp32", device="cpu")
        >>> with summon_full_params(model):
        ...     type(model[0].weight).__name__, tuple(model[0].weight.shape)
        ('Parameter', (2, 4))
    """
    options = _Options(writeback=writeback, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu, with_grads=with_grads)
    units = _units_to_summon(module, recurse, options)
    check_guard(module, "summon_full_params")
    for unit in units:
        unit.reshard()  # may be unsharded after a forward without gradients, in low precision
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    problems: list[str] = []
    with contextlib.ExitStack() as stack:
        summoned = [parameter for unit in units for parameter in parameters_of_unit(unit)]
        stack.callback(register_optimizer_step_pre_hook(partial(_refuse_step, summoned)).remove)
        for unit in units:
            stack.enter_context(_unsharded(unit, options, names, problems))
        yield
    if problems:  # not if the block raised; its own error takes precedence
        raise ComposerFSDP2Error(f"after summon_full_params: {and_more(problems, 5, '; ')}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    writeback: bool
    rank0_only: bool
    offload_to_cpu: bool
    with_grads: bool

    def __str__(self) -> str:
        return ", ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


def _refuse_step(summoned: Sequence[UnitParameter], optimizer: torch.optim.Optimizer, *unused: Any) -> None:
    """Raise for an optimizer step in the block: it would update the shards, which the end of the block overwrites."""
    split = {id(each.sharded) for each in summoned if shard_axes(each.sharded)}
    if any(id(parameter) in split for group in optimizer.param_groups for parameter in group["params"]):
        name = type(optimizer).__name__
        raise ComposerFSDP2Error(f"{name}.step within summon_full_params of its parameters; leave the block")


def _units_to_summon(module: nn.Module, recurse: bool, options: _Options) -> list[FSDPModule]:
    """The units to unshard. All checks that may raise run here, before any communication."""
    if options.rank0_only and options.writeback:
        raise UnsupportedError(
            "summon_full_params(writeback=True, rank0_only=True): one rank alone would hold what is written (FSDP1 "
            "refused it too); pass writeback=False, or rank0_only=False and write on every rank alike"
        )
    if is_inside_unit(module) and not isinstance(module, FSDPModule):
        _refuse_part_of_unit(module)
    paths = {id(each): path for path, each in module.named_modules()}
    units = []
    for unit in distinct_units(module.modules() if recurse else [module]):
        _refuse_during_step(unit, paths[id(unit)], options)
        if not owners_of_unit(unit):
            continue  # without own parameters
        outer = hooks_of(unit).override
        if outer is None:
            units.append(unit)
        elif outer.options != options:
            raise ComposerFSDP2Error(
                f"summon_full_params({options}) within summon_full_params({outer.options}) of the same parameters; "
                "pass the same options, or leave the outer block first"
            )
    if units and options.offload_to_cpu and not options.rank0_only:
        _warn_of_copies()
    return units


def _refuse_during_step(unit: FSDPModule, path: str, options: _Options) -> None:
    """Raise during a step."""
    if is_in_forward_or_backward(unit):
        where = f" of {path!r}" if path else ""
        raise ComposerFSDP2Error(
            f"summon_full_params during a forward or backward{where}; call it between steps. After one that an "
            "error ended, call composer_fsdp2.training.out_of_memory.reset(model) first"
        )
    if options.with_grads and has_unreduced_gradients(unit):
        raise ComposerFSDP2Error(
            "summon_full_params(with_grads=True) between microbatches whose gradients are not communicated yet "
            "(gradient_sync); call it after the last one"
        )


def _refuse_part_of_unit(module: nn.Module) -> None:
    below = {id(each.sharded) for unit in distinct_units(module.modules()) for each in parameters_of_unit(unit)}
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and id(parameter) not in below:
            raise ComposerFSDP2Error(
                f"summon_full_params of a {type(module).__name__} whose {name} is sharded by a unit above it; summon "
                "that unit (with recurse=False, if it alone is wanted) or the model"
            )


@functools.cache
def _warn_of_copies() -> None:
    log.warning(
        "summon_full_params(offload_to_cpu=True, rank0_only=False) holds a full copy for each rank in the memory of "
        "its machine; rank0_only=True (with writeback=False) holds one"
    )


@contextlib.contextmanager
def _unsharded(unit: FSDPModule, options: _Options, names: Mapping[int, str], problems: list[str]) -> Iterator[None]:
    """Unshard one unit within the block. Called on all ranks of its mesh."""
    parameters = parameters_of_unit(unit)
    grads = _gradients(parameters) if options.with_grads else [None] * len(parameters)
    full = [
        _FullParameter(parameter, names.get(id(parameter.sharded), parameter.registrations[0][1]), grad, options)
        for parameter, grad in zip(parameters, grads, strict=True)
    ]

    def before_gather(is_backward: bool) -> None:
        _check_pass(options, is_backward)
        for each in full:
            each.write_for_forward()

    def after_reshard() -> None:
        for each in full:
            each.register()

    override = ParameterOverride(options=options, before_gather=before_gather, after_reshard=after_reshard)
    end = override_parameters(unit, override)
    try:
        after_reshard()
        yield
    finally:
        end()
        try:
            for each in full:
                problems.extend(each.write_back())
        finally:
            for each in full:
                each.parameter.register(each.parameter.sharded)


def _check_pass(options: _Options, is_backward: bool) -> None:
    """Raise for a forward or backward within the block that the options do not allow."""
    if options.rank0_only:
        raise ComposerFSDP2Error(
            "a forward within summon_full_params(rank0_only=True): the other ranks lack what the first may have "
            "written; leave the block first, or pass rank0_only=False"
        )
    if options.with_grads and is_backward:
        raise ComposerFSDP2Error(
            "a backward within summon_full_params(with_grads=True): its gradients and the block's would overwrite "
            "each other; leave the block first"
        )


def _gradients(parameters: list[UnitParameter]) -> list[DTensor | None]:
    """The sharded gradients of a unit. A missing gradient is filled with zeros if another rank has one.

    Called on all ranks of the unit's mesh, which then all-gather the same gradients.
    """
    if not parameters:
        return []
    grads = [cast(DTensor | None, each.sharded.grad) for each in parameters]
    shard = cast(DTensor, parameters[0].sharded)
    if axes := shard_axes(shard):
        mesh = shard.device_mesh
        is_there = torch.tensor([grad is not None for grad in grads], dtype=torch.int32, device=mesh.device_type)
        for axis in axes:
            dist.all_reduce(is_there, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))
        for number, anywhere in enumerate(is_there.tolist()):
            if anywhere and grads[number] is None:
                grads[number] = cast(DTensor, torch.zeros_like(parameters[number].sharded))
    return grads


@torch.no_grad()
def _gather(tensor: DTensor, options: _Options) -> torch.Tensor | None:
    """All-gather a tensor. Called on all ranks of its mesh.

    With ``rank0_only``, returns None on the other ranks. On a mesh that does not shard, the full tensor is not a copy,
    except with ``offload_to_cpu``.
    """
    mesh, axes = tensor.device_mesh, shard_axes(tensor)
    full = gather_full_tensor(tensor)
    if not axes:
        return full.to("cpu", copy=True) if options.offload_to_cpu else full
    if options.rank0_only and any(mesh.get_local_rank(axis) for axis in axes):
        return None
    return full.cpu() if options.offload_to_cpu else full


class _FullParameter:
    """The full parameter of one shard within the block, on ranks that have it."""

    @torch.no_grad()
    def __init__(self, parameter: UnitParameter, name: str, grad: DTensor | None, options: _Options) -> None:
        self.parameter, self.name, self.options = parameter, name, options
        self.shard = cast(DTensor, parameter.sharded)
        self.local = self.shard.to_local().detach()
        # the shard's previous values, if a forward needed values that do not persist
        self.before: torch.Tensor | None = None
        self.full: nn.Parameter | None = None
        full, full_grad = _gather(self.shard, options), None if grad is None else _gather(grad, options)
        if full is not None:
            self.full = nn.Parameter(full, requires_grad=self.shard.requires_grad)
            vars(self.full).update(vars(self.shard))  # attributes that a script or an optimizer set
            self.full.grad = full_grad

    def register(self) -> None:
        if self.full is not None:
            self.parameter.register(self.full)

    def write_for_forward(self) -> None:
        """Write the full parameter's values into the shard, so that a forward in the block all-gathers them."""
        if not self.options.writeback and self.before is None and not self._is_shard(self._registered()):
            self.before = self.local.clone()
        if problem := self._write():
            raise ComposerFSDP2Error(f"a forward within summon_full_params: {problem}")
        self.full = self._registered()  # a replacement is registered again afterwards

    def write_back(self) -> list[str]:
        """Write the values that persist into the shard, at the end of the block.

        Returns:
            A message for each written value that is lost.
        """
        if self.full is not None and self._registered() is self.full:
            # changes of requires_grad persist with any options
            self.parameter.sharded.requires_grad_(self.full.requires_grad)
        if self.options.writeback:
            problem = self._write() or self._write_grad()
            return [problem] if problem else []
        if self.before is not None:
            self.local.copy_(self.before)
        return []

    @torch.no_grad()
    def _write(self) -> str:
        """Write the full parameter's values into the shard. Return a message if that is not possible, or ""."""
        written = self._registered()
        if written is None:
            return f"{self.name} was replaced by different parameters in the places that share it"
        if written.shape != self.shard.shape:
            return f"{self.name} was replaced by one of shape {tuple(written.shape)}; it has {tuple(self.shard.shape)}"
        if self._is_shard(written):
            return ""
        self.local.copy_(local_shard(self.shard, written))
        return ""

    @torch.no_grad()
    def _write_grad(self) -> str:
        written = self._registered()
        grad = None if written is None else written.grad
        if not self.options.with_grads:
            return f"{self.name} was given a gradient, which with_grads=True would keep" if grad is not None else ""
        shard = self.parameter.sharded
        if grad is None:
            if written is self.full:  # a replacement does not define a gradient
                shard.grad = None
        elif shard.grad is None:
            shard.grad = with_local_tensor(self.shard, local_shard(self.shard, grad).to(self.local.device, copy=True))
        else:
            cast(DTensor, shard.grad).to_local().copy_(local_shard(self.shard, grad))
        return ""

    def _registered(self) -> nn.Parameter | None:
        """The parameter that the block leaves registered: the full parameter or a replacement; None if several."""
        own = (id(self.full), id(self.parameter.sharded))
        others = {id(each): each for each in self.parameter.registered() if id(each) not in own}
        if len(others) > 1:
            return None
        return next(iter(others.values()), self.full)

    def _is_shard(self, full: torch.Tensor | None) -> bool:
        """Whether the full parameter shares the shard's memory, as on a mesh that does not shard."""
        return full is not None and full.untyped_storage().data_ptr() == self.local.untyped_storage().data_ptr()
