"""Tensor parallelism in a Trainer, a script or LLM Foundry."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from composer.utils import TPConfig
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel

from composer_fsdp2.fsdp1.policy_values import AUTO
from composer_fsdp2.fsdp1.tensor_parallel import TensorParallel
from composer_fsdp2.parallel.tensor import LayerPlan, parallelize_model

from .seams import seam

log = logging.getLogger(__name__)

_shards_next: ContextVar[bool] = ContextVar("_shards_next", default=False)
# By model: the configuration with which the Trainer will shard it.
_PENDING_CONFIGS: WeakKeyDictionary[nn.Module, TensorParallel] = WeakKeyDictionary()


def pop_tensor_config(model: nn.Module) -> TensorParallel | None:
    """Return and remove the Trainer's tensor parallel configuration of this model."""
    return _PENDING_CONFIGS.pop(model, None)


@seam(
    "composer.trainer.trainer",
    "Trainer._wrap_model_for_distributed",
    why="layers were split before it was known whether the rest can be sharded",
)
def wrap_model(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Replaces Composer's function that TP-shards layers and then applies FSDP: one plan has both, and is checked
    first."""
    with _in_trainer():
        original(*args, **kwargs)


@contextmanager
def _in_trainer() -> Iterator[None]:
    token = _shards_next.set(True)
    try:
        yield
    finally:
        _shards_next.reset(token)


@seam(
    "composer.distributed.dist_strategy",
    "prepare_tp_module",
    why="it rejected optimizers with several groups, or with some of the parameters only; it untied weights, and "
    "ignored paths of the plan without a match",
)
def prepare_tp_module(original: Callable[..., None], model: nn.Module, optimizers: Any, tp_config: TPConfig) -> None:
    """Replaces Composer's function: in a Trainer, records the layer plan for the sharding that follows; else
    TP-shards the layers."""
    config = resolve_ffn_plan(model, TensorParallel.read(tp_config))
    if _shards_next.get():
        _PENDING_CONFIGS[model] = config
    else:
        parallelize_model(model, optimizers, config.layer_plan, tp_config.device_mesh)


# ---------------------------------------------------------------------------------------------------------------------
# LLM Foundry's strategy ``ffn``
#
# Its plan (0.22.0, llmfoundry/tp/ffn_tp_strategy.py) all-gathers the ranks' batches around each feed-forward.
# Everything else is computed on each rank's own batch, and FSDP1 averaged its gradients over the other axes only, so
# the ranks of a group diverged. MPTGLU's ``gate_proj`` was not sharded, unlike ``up_proj``.


def resolve_ffn_plan(model: nn.Module, config: TensorParallel) -> TensorParallel:
    """Replace the strategy ``ffn`` by a plan that TP-shards feed-forwards, and gather the batches of TP peers.

    FSDP1 trained each TP peer on its own batch, which is not tensor parallelism. Rank 0 logs a warning.
    """
    if not _is_of_ffn(config.layer_plan):
        return config
    if dist.is_initialized() and dist.get_rank() == 0:
        log.warning(
            "tp_config.strategy ffn: approximate: FSDP1 trained the ranks of a tensor-parallel group apart, each on "
            "its own batch; here they train on all of their batches together (broadcast_batch: gather), as one process "
            "does, and gate_proj is split as well"
        )
    return replace(config, layer_plan=_ffn_plan(model), gathers_batches=True)


@seam(
    "llmfoundry.utils.builders",
    "build_tp_strategies",
    why="it knows no strategy but ffn, which splits MPT's feed-forwards alone",
)
def layer_plan_of(original: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    """Replaces LLM Foundry's lookup of a strategy: returns "auto" for ``auto``, which is resolved when the model is
    sharded."""
    return AUTO if name == AUTO else original(name, *args, **kwargs)


def _is_of_ffn(layer_plan: LayerPlan) -> bool:
    if isinstance(layer_plan, str):
        return False
    gathers = [path for path, style in layer_plan.items() if _gathers_batches(style)]
    return bool(gathers) and all(path.rpartition(".")[2] == "ffn" for path in gathers)


def _gathers_batches(style: ParallelStyle) -> bool:
    """Whether the style all-gathers batch rows."""
    if not isinstance(style, PrepareModuleInput):
        return False
    return (style.input_layouts, style.desired_input_layouts) == ((Shard(0),), (Replicate(),))


def _ffn_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    styles = {"up_proj": ColwiseParallel, "gate_proj": ColwiseParallel, "down_proj": RowwiseParallel}
    plan: dict[str, ParallelStyle] = {}
    for path, _ in model.named_modules():
        holder, name = ["", *path.split(".")][-2:]
        if holder == "ffn" and name in styles:
            plan[path] = styles[name]()
    return plan
