"""Tensor parallelism as a Trainer, a script or LLM Foundry asks for it."""

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
# By model, what the Trainer is about to have it split by.
_PENDING_CONFIGS: WeakKeyDictionary[nn.Module, TensorParallel] = WeakKeyDictionary()


def pop_tensor_config(model: nn.Module) -> TensorParallel | None:
    """What a Trainer asked for this model, once."""
    return _PENDING_CONFIGS.pop(model, None)


@seam(
    "composer.trainer.trainer",
    "Trainer._wrap_model_for_distributed",
    why="layers were split before anybody looked whether the rest could be sharded",
)
def wrap_model(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Composer splits layers and then shards; here one plan says both, and nothing is touched if either cannot be."""
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
    why="it refused optimizers with several groups, or some of the parameters; it untied weights, and passed over "
    "paths of the plan that match nothing",
)
def prepare_tp_module(original: Callable[..., None], model: nn.Module, optimizers: Any, tp_config: TPConfig) -> None:
    """In a Trainer the sharding that follows splits the layers; a script that calls it by itself has them split now."""
    config = resolve_ffn_plan(model, TensorParallel.read(tp_config))
    if _shards_next.get():
        _PENDING_CONFIGS[model] = config
    else:
        parallelize_model(model, optimizers, config.layer_plan, tp_config.device_mesh)


# ---------------------------------------------------------------------------------------------------------------------
# LLM Foundry's strategy ``ffn``
#
# Its plan (0.22.0, llmfoundry/tp/ffn_tp_strategy.py) gathers the batches of the ranks around each feed-forward, and
# leaves everything else of a rank to that rank's own batch, whose gradients FSDP1 averaged over the other axes alone:
# the ranks of a group trained apart. MPTGLU's ``gate_proj`` it left whole, beside a part of ``up_proj``.


def resolve_ffn_plan(model: nn.Module, config: TensorParallel) -> TensorParallel:
    """The same, or what the strategy means: each feed-forward split, on one batch of all ranks of a group."""
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
    """Of the strategy ``auto`` the plan of a known model, which is made where the model is sharded."""
    return AUTO if name == AUTO else original(name, *args, **kwargs)


def _is_of_ffn(layer_plan: LayerPlan) -> bool:
    if isinstance(layer_plan, str):
        return False
    gathers = [path for path, style in layer_plan.items() if _gathers_batches(style)]
    return bool(gathers) and all(path.rpartition(".")[2] == "ffn" for path in gathers)


def _gathers_batches(style: ParallelStyle) -> bool:
    """From a part of the batch's rows on each rank to all of them."""
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
