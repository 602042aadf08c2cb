"""Make Composer's monitors log norms of full tensors for a sharded model, equal on all ranks, by names without
wrappers.

[Note: metrics of sharded parameters] An optimizer computes a parameter's metrics with torch functions. For sharded
parameters and state, the results are sharded or partial DTensors. They are reduced together in one buffer, which yields
the metrics of full parameters. Metrics that are known to be norms are computed on local tensors instead, in an eighth
of the CPU time (benchmarks/dispatch.py). ``pre_reduce_metrics`` and ``dist_reduce_metrics`` combine shards of FSDP1's
flat parameters by a rule encoded in the metric's name, and are not needed.

Results with FSDP1 on 2 ranks (Composer 0.32.1, LLM Foundry 0.22.0, torch 2.7.0): with torch's optimizers, and with
``log_optimizer_metrics=False``, each rank logged the norms of its own shards, and no metrics for parameters without a
local shard; replicas (HYBRID_SHARD, NO_SHARD) were counted several times; DecoupledLionW raised a KeyError;
DecoupledAdaLRLion and DecoupledClipLion hung in the step.
"""

import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from composer.callbacks import ActivationMonitor, OptimizerMonitor
from composer.core import State
from composer.loggers import Logger
from composer.optim import DecoupledAdamW
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from composer_fsdp2._torch.local_tensors import local_tensor, local_tensors
from composer_fsdp2._torch.private_names import ActivationWrapper, own_parameters
from composer_fsdp2._torch.unit import hooks_of
from composer_fsdp2.config.text import and_more
from composer_fsdp2.errors import ComposerFSDP2Error, UnsupportedError
from composer_fsdp2.fsdp1.children import wrapped_children
from composer_fsdp2.sharding.agree import agree, all_gather_object
from composer_fsdp2.sharding.placements import shard_axes_of_all
from composer_fsdp2.sharding.sharded import is_sharded, reshard, sharded_roots
from composer_fsdp2.sharding.ties import join
from composer_fsdp2.training.guard import check_guard
from composer_fsdp2.training.reductions import LocalValues, all_reduce_values, reduce_to_floats
from composer_fsdp2.training.run import run_of

from .optimizers import reports_norms
from .seams import seam

log = logging.getLogger(__name__)

Metrics = dict[str, Any]

# The attributes in which the wrappers of FSDP1 and of activation checkpointing register the wrapped module.
_FSDP1_ATTRIBUTE = "_fsdp_wrapped_module"
_CHECKPOINT_ATTRIBUTE = "_checkpoint_wrapped_module"


def metric_paths(model: nn.Module, *, as_fsdp1: bool) -> list[tuple[nn.Module, str, str]]:
    """Return each module of ``model`` with its path and its logged path; a shared module once per path.

    Logged paths omit wrappers, so names do not depend on activation checkpointing. With ``as_fsdp1`` they include the
    wrappers of activation checkpointing and of FSDP1. A sharded module is then listed twice: as FSDP1's wrapper, and as
    the wrapped module, which owns the parameters.
    """
    # Children without parameters are in no unit, but FSDP1 wrapped all of them.
    children = wrapped_children(model) if as_fsdp1 else {}

    found: list[tuple[nn.Module, str, str]] = []

    def walk(module: nn.Module, path: str, logged: str) -> None:
        found.append((module, path, logged))
        # FSDP1 never wrapped the model itself, which is a unit here if its children share parameters.
        if as_fsdp1 and path and (isinstance(module, FSDPModule) or path in children):
            logged = join(logged, _FSDP1_ATTRIBUTE)
            found.append((module, path, logged))
        for name, child in module._modules.items():
            if child is not None:
                is_wrapped = isinstance(module, ActivationWrapper) and name == _CHECKPOINT_ATTRIBUTE
                walk(child, join(path, name), logged if is_wrapped and not as_fsdp1 else join(logged, name))

    walk(model, "", "")
    return found


def _logged_parameters(model: nn.Module, *, as_fsdp1: bool) -> dict[nn.Parameter, str]:
    """Return all parameters in the model's order, with the logged name of the first path of each."""
    paths: dict[nn.Parameter, str] = {}
    logged_as: dict[nn.Parameter, str] = {}
    for module, path, logged in metric_paths(model, as_fsdp1=as_fsdp1):
        for name, parameter in own_parameters(module):
            own = join(path, name)
            if paths.setdefault(parameter, own) == own:
                logged_as[parameter] = join(logged, name)  # inside FSDP1's wrapper, which comes second
    return logged_as


def _as_fsdp1(state: State) -> bool:
    return bool(getattr(state.fsdp_config, "fsdp1_metric_names", False))


@seam(
    "composer.callbacks.optimizer_monitor",
    "OptimizerMonitor.batch_end",
    why="it logged the norms of this rank's shards, or raised",
)
def batch_end(original: Callable[..., Any], self: OptimizerMonitor, state: State, logger: Logger) -> None:
    """Replaces ``OptimizerMonitor.batch_end``: logs the norms of full parameters."""
    if not is_sharded(state.model):
        original(self, state, logger)
    elif state.timestamp.batch.value % self.batch_log_interval == 0:
        check_guard(state.model, "OptimizerMonitor")
        reshard(state.model)
        agreement = _agreements.setdefault(state.model, _Agreement())
        logger.log_metrics(_optimizer_metrics(state, agreement, with_optimizer=self.log_optimizer_metrics))


def _optimizer_metrics(state: State, agreement: "_Agreement", *, with_optimizer: bool) -> Metrics:
    """Compute the metrics of gradients and of the optimizer. Called on all ranks.

    One all-reduce per mesh. If the set of metrics changed, ranks also compare the names.

    Raises:
        ComposerFSDP2Error: on all ranks, if the optimizer's function raised on one rank, or ranks have different
            metrics.
    """
    reporter = _Reporter.of(state.optimizers[0]) if with_optimizer else None
    names = _logged_parameters(state.model, as_fsdp1=_as_fsdp1(state))
    unreduced = _unreduced_parameters(state.model, names)
    reported, norms = agreement.agree_on(lambda: _report(names, reporter, unreduced))
    metrics = reported.metrics
    metrics |= norms
    metrics |= reduce_to_floats({key: value for key, value in metrics.items() if isinstance(value, torch.Tensor)})
    if unreduced:
        metrics |= _mean_over_ranks({key: metrics[key] for key in reported.rank_local})
    squares = [value * value for key, value in metrics.items() if key.startswith("l2_norm/grad")]
    metrics["l2_norm/grad/global"] = math.sqrt(sum(squares))
    return metrics


@dataclass(frozen=True, slots=True)
class _Reporter:
    """Calls ``report_per_parameter_metrics`` of an optimizer.

    Args:
        only_norms: Whether all metrics are L2 norms of tensors sharded like the parameter. These are computed on local
            tensors. The function of an unknown optimizer is called with DTensors.
        part: An object instead of the optimizer, whose state is that of one local tensor.
    """

    optimizer: Any  # a torch.optim.Optimizer with report_per_parameter_metrics
    only_norms: bool
    part: Any

    @classmethod
    def of(cls, optimizer: Any) -> "_Reporter | None":
        if not callable(getattr(optimizer, "report_per_parameter_metrics", None)):
            return None
        kind: Any = type(optimizer)
        _warn_uncalled_methods(kind)
        only_norms, part = reports_norms(optimizer), None
        if only_norms:
            part = SimpleNamespace(
                param_groups=optimizer.param_groups, metric_functions=optimizer.metric_functions, state={}
            )
        return cls(optimizer, only_norms, part)

    def report(self, parameter: torch.Tensor, name: str, metrics: Metrics) -> Metrics:
        try:
            reported: Metrics = self.optimizer.report_per_parameter_metrics(parameter, name, metrics)
        except Exception as error:
            raise ComposerFSDP2Error(
                f"{type(self.optimizer).__name__}.report_per_parameter_metrics raised {type(error).__name__} for "
                f"{name}: {error}; its input is sharded parameters (DTensors), whose local tensor may be empty on "
                "this rank. "
                "OptimizerMonitor(log_optimizer_metrics=False) logs the gradients' norms without it"
            ) from error
        return reported

    def report_local(self, parameter: DTensor, name: str, metrics: Metrics) -> bool:
        """Call the optimizer's function with local tensors, and add the results to ``metrics``.

        Returns False, and adds nothing, if the metrics cannot be computed on local tensors.
        """
        gradient = parameter.grad
        if not self.only_norms or gradient is None:
            return False
        state = dict(self.optimizer.state.get(parameter, {}))
        keys = [key for key in state if key != "step"]
        parts = local_tensors(parameter, gradient, *[state[key] for key in keys])
        if parts is None or parts[0].dtype != parts[1].dtype:
            return False  # torch does not allow a gradient of another dtype
        own = parts[0].detach()
        own.grad = parts[1]
        state.update(zip(keys, parts[2:], strict=True))
        self.part.state = {own: state} if state else {}
        type(self.optimizer).report_per_parameter_metrics(self.part, own, name, metrics)
        return True


@functools.cache
def _warn_uncalled_methods(kind: type) -> None:
    for name in ("pre_reduce_metrics", "dist_reduce_metrics"):
        method = getattr(kind, name, None)
        if method is not None and method.__module__.split(".")[0] not in ("composer", "llmfoundry"):
            log.warning(
                "OptimizerMonitor does not call %s.%s: the results of report_per_parameter_metrics for sharded "
                "parameters are already those of full parameters",
                kind.__name__,
                name,
            )


@dataclass(slots=True)
class _Reported:
    """The metrics of one rank by key, before they are reduced.

    Args:
        local_norms: Each sharded parameter, with the keys of its local norms.
        rank_local: Keys of metrics that only some ranks have, or that differ between ranks.
    """

    metrics: Metrics = field(default_factory=dict)
    local_norms: list[tuple[DTensor, list[str]]] = field(default_factory=list)
    rank_local: set[str] = field(default_factory=set)


def _report(names: Mapping[nn.Parameter, str], reporter: _Reporter | None, unreduced: set[nn.Parameter]) -> _Reported:
    """All parameters' metrics; see [Note: metrics of sharded parameters]."""
    reported = _Reported()
    metrics = reported.metrics
    for parameter, name in names.items():
        if parameter.grad is None or not parameter.requires_grad:
            continue
        if isinstance(parameter, DTensor) and (norms := _local_norms(parameter, name, reporter)) is not None:
            metrics |= norms
            reported.local_norms.append((parameter, list(norms)))
            continue
        num_before = len(metrics)
        if reporter is not None:
            metrics |= reporter.report(parameter, name, metrics)
        if (key := f"l2_norm/grad/{name}") not in metrics:
            metrics[key] = torch.linalg.vector_norm(parameter.grad)
        if parameter in unreduced:
            # From the end: otherwise each parameter would iterate over the metrics of all earlier ones.
            reported.rank_local.update(itertools.islice(reversed(metrics), len(metrics) - num_before))
    return reported


def _local_norms(parameter: DTensor, name: str, reporter: _Reporter | None) -> Metrics | None:
    """Return the norms of this rank's shard by logged key; None if they cannot be computed on local tensors."""
    metrics: Metrics = {}
    if reporter is not None and not reporter.report_local(parameter, name, metrics):
        return None
    if (key := f"l2_norm/grad/{name}") not in metrics:
        assert parameter.grad is not None
        metrics[key] = torch.linalg.vector_norm(local_tensor(parameter.grad))
    return metrics


def _unreduced_parameters(model: nn.Module, parameters: Iterable[nn.Parameter]) -> set[nn.Parameter]:
    """Return the unsharded parameters whose gradients are not averaged: ignored parameters, and those in no unit."""
    unsharded = {each for each in parameters if not isinstance(each, DTensor) and each.requires_grad}
    if unsharded:
        for _, root in sharded_roots(model):
            unsharded.difference_update(*hooks_of(root).replicated.values())
    return unsharded


@dataclass(frozen=True, slots=True)
class _Layout:
    """The keys of the metrics, which must be the same on all ranks.

    Args:
        keys: The keys of all metrics.
        norms: Keys of local norms, by the mesh, mesh axes and device on which they are reduced.
    """

    keys: list[str]
    norms: dict[tuple[DeviceMesh, tuple[int, ...], torch.device], list[str]]

    @classmethod
    def of(cls, reported: _Reported) -> "_Layout":
        metrics, local_norms = reported.metrics, reported.local_norms
        norms: dict[tuple[DeviceMesh, tuple[int, ...], torch.device], list[str]] = {}
        axes_of_all = shard_axes_of_all(parameter for parameter, _ in local_norms)
        for (parameter, keys), axes in zip(local_norms, axes_of_all, strict=True):
            norms.setdefault((parameter.device_mesh, axes, metrics[keys[0]].device), []).extend(keys)
        return cls([key for key in metrics if key not in reported.rank_local], norms)

    def fingerprint(self) -> str:
        norms = [f"{len(keys)} norms along {axes}" for (_, axes, _), keys in self.norms.items()]
        return "\n".join([*self.keys, *norms])

    def parts(self, metrics: Metrics | None) -> list[LocalValues]:
        """This rank's squared norms; zeros if its metrics are None."""
        return [
            LocalValues(
                values=torch.zeros(len(keys), dtype=torch.float64, device=device)
                if metrics is None
                else torch.stack([metrics[key] for key in keys]).double() ** 2,
                mesh=mesh,
                axes=axes,
            )
            for (mesh, axes, device), keys in self.norms.items()
        ]

    def full_norms(self, squares: Sequence[torch.Tensor]) -> dict[str, float]:
        """Return the norms of full parameters by key. ``squares`` are already summed over ranks."""
        return {
            key: norm
            for keys, of_keys in zip(self.norms.values(), squares, strict=True)
            for key, norm in zip(keys, of_keys.sqrt().tolist(), strict=True)
        }

    def world_mesh(self) -> DeviceMesh | None:
        """A mesh with all ranks, or None."""
        return next((mesh for mesh, _, _ in self.norms if mesh.size() == dist.get_world_size()), None)


class _Agreement:
    """Ensures that all ranks report the same metrics, so their all-reduces match. One object per sharded model.

    [Note: metrics are compared where they change] If the metrics of one rank change, or the optimizer's function raises
    there, the other ranks do not know it and would not join a comparison. A flag is therefore all-reduced together with
    the norms. A rank that sets the flag sends zeros instead of norms, as many as before. All ranks then discard the
    result and compare names. If no mesh contains all ranks, they compare each time.
    """

    def __init__(self) -> None:
        self._last: _Layout | None = None
        self._world: Any = None

    def agree_on(self, report: Callable[[], _Reported]) -> tuple[_Reported, dict[str, float]]:
        """Return this rank's metrics, and the norms of full parameters. Called on all ranks.

        One all-reduce per axis of each mesh. If the set of metrics changed, another one of 64 bytes, and then the first
        ones again.

        Raises:
            ComposerFSDP2Error: on all ranks, if ``report`` raised on one rank, or ranks have different metrics.
        """
        own, error = _attempted(report)
        last = self._last if self._world is dist.group.WORLD else None
        mesh = None if last is None else last.world_mesh()
        if last is not None and mesh is not None:
            is_new = own is None or _Layout.of(own) != last
            squares = _reduced_unless(is_new, last.parts(own.metrics if own and not is_new else None), mesh)
            if own is not None and squares is not None:
                return own, last.full_norms(squares)

        def decide() -> tuple[_Reported, _Layout]:
            if own is None:
                assert error is not None
                raise error
            return own, _Layout.of(own)

        reported, layout = agree(decide, lambda decided: decided[1].fingerprint(), ComposerFSDP2Error)
        self._last, self._world = layout, dist.group.WORLD
        return reported, layout.full_norms(all_reduce_values(layout.parts(reported.metrics)))


_agreements: WeakKeyDictionary[nn.Module, _Agreement] = WeakKeyDictionary()


def _attempted(report: Callable[[], _Reported]) -> tuple[_Reported | None, Exception | None]:
    try:
        return report(), None
    except Exception as error:
        return None, error


def _reduced_unless(is_new: bool, parts: Sequence[LocalValues], mesh: DeviceMesh) -> list[torch.Tensor] | None:
    """``all_reduce_values``, with a flag. Returns None on all ranks of ``mesh`` if ``is_new`` is true on one of them.

    Called on all ranks of ``mesh``.
    """
    device = torch.device(mesh.device_type)
    # Created on the device: no synchronisation
    new = torch.full((1,), float(is_new), dtype=torch.float64, device=device)
    *reduced, num_new = all_reduce_values([*parts, LocalValues(values=new, mesh=mesh, axes=tuple(range(mesh.ndim)))])
    return None if num_new.item() else reduced


def _mean_over_ranks(metrics: Mapping[str, float]) -> dict[str, float]:
    """Average each metric over the ranks that have it; norms as root mean squares, as in ``clip_grad_norm_``.

    Called on all ranks; all-gathers objects.
    """
    found: dict[str, list[float]] = {}
    for of_rank in all_gather_object(dict(metrics)):
        for key, value in of_rank.items():
            found.setdefault(key, []).append(value)
    return {
        key: math.sqrt(sum(value * value for value in values) / len(values))
        if key.startswith("l2_norm")
        else sum(values) / len(values)
        for key, values in found.items()
    }


def _is_over_shards(optimizer: torch.optim.Optimizer) -> bool:
    return any(isinstance(parameter, DTensor) for group in optimizer.param_groups for parameter in group["params"])


@seam(
    "composer.optim.decoupled_weight_decay",
    "DecoupledAdamW.pre_reduce_metrics",
    why="callbacks that report an optimizer's metrics themselves ran one collective for each",
)
def pre_reduce_metrics(original: Callable[..., Any], self: DecoupledAdamW, optimizer_metrics: Metrics) -> Metrics:
    """Replaces ``DecoupledAdamW.pre_reduce_metrics``: nothing to do; see [Note: metrics of sharded parameters]."""
    return optimizer_metrics if _is_over_shards(self) else original(self, optimizer_metrics)


@seam(
    "composer.optim.decoupled_weight_decay",
    "DecoupledAdamW.dist_reduce_metrics",
    why="one collective for each metric, and it requires a CUDA device",
)
def dist_reduce_metrics(original: Callable[..., Any], self: DecoupledAdamW, optimizer_metrics: Metrics) -> Metrics:
    """Replaces ``DecoupledAdamW.dist_reduce_metrics``: one all-reduce per mesh, and without a CUDA device."""
    if not _is_over_shards(self):
        return original(self, optimizer_metrics)
    optimizer_metrics.update(
        reduce_to_floats({key: v for key, v in optimizer_metrics.items() if isinstance(v, DTensor)})
    )
    return optimizer_metrics


@seam(
    "composer.callbacks.activation_monitor",
    "ActivationMonitor.before_forward",
    why="names of activation checkpointing's wrappers were logged; fsdp1_metric_names; parts of split layers",
)
def before_forward(original: Callable[..., Any], self: ActivationMonitor, state: State, logger: Logger) -> None:
    """Replaces ``ActivationMonitor.before_forward``, which reads the modules' names from the model once."""
    if not self.module_names and is_sharded(state.model):
        _refuse_split_activations(state.model)
        # Stored on the callback, because its hook below gets the callback and a module, but no model.
        self._composer_fsdp2_names = _logged_module_names(state.model, as_fsdp1=_as_fsdp1(state))
    original(self, state, logger)


def _refuse_split_activations(model: nn.Module) -> None:
    """Raise on all ranks if layers are TP-sharded, because metrics of local outputs are not those of full outputs."""
    plan = run_of(model).plan
    if plan is not None and plan.split:
        raise UnsupportedError(
            f"ActivationMonitor: {and_more([each.path for each in plan.split])}: TP-sharded, so each rank would log "
            "the norms and means of its own part of the activations; remove ActivationMonitor, or the layer plan"
        )


@seam(
    "composer.callbacks.activation_monitor",
    "ActivationMonitor.forward_hook",
    why="names of activation checkpointing's wrappers were logged; fsdp1_metric_names",
)
def forward_hook(
    original: Callable[..., Any], self: ActivationMonitor, logger: Logger, step: int | None, module: nn.Module, *io: Any
) -> None:
    """Replaces ``ActivationMonitor.forward_hook``: logs a module's values once per logged name."""
    names = getattr(self, "_composer_fsdp2_names", {}).get(module)
    if names is None:
        original(self, logger, step, module, *io)
        return
    for name in names:
        self.module_names[module] = name
        original(self, logger, step, module, *io)


def _logged_module_names(model: nn.Module, *, as_fsdp1: bool) -> dict[nn.Module, tuple[str, ...]]:
    """Return the logged names of each module.

    Wrappers of activation checkpointing have none, because their inputs and outputs are those of the wrapped module.
    With ``as_fsdp1``, every wrapper has a name.
    """
    names: dict[nn.Module, tuple[str, ...]] = {}
    paths: dict[nn.Module, str] = {}
    for module, path, logged in metric_paths(model, as_fsdp1=as_fsdp1):
        if paths.setdefault(module, path) == path:  # like named_modules, at its first place only
            names[module] = (*names.get(module, ()), logged)
            if isinstance(module, ActivationWrapper) and not as_fsdp1:
                names[module] = ()
    return names


def is_reduced(tensor: torch.Tensor) -> bool:
    """Whether a tensor that a caller all-reduces is a replicated DTensor.

    It is the full result, and must not be summed.

    The steps of LLM Foundry's DecoupledAdaLRLion and DecoupledClipLion, and its optimizers' metrics, sum values that
    FSDP1 computed on shards. The sum of ``norm ** 2`` of a replicated DTensor would count it once per rank.

    Raises:
        UnsupportedError: the tensor is a sharded or partial DTensor.
    """
    if not isinstance(tensor, DTensor):
        return False
    if not all(placement.is_replicate() for placement in tensor.placements):
        is_pending = any(placement.is_partial() for placement in tensor.placements)
        kind = "a sum or norm not yet reduced" if is_pending else "sharded"
        raise UnsupportedError(
            f"composer.utils.dist.all_reduce got a DTensor that is {kind} ({tensor.placements}); "
            "call its full_tensor() instead, on all ranks"
        )
    return True
