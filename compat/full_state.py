"""Callbacks that ask FSDP1 for full state (LLM Foundry's MonolithicCheckpointSaver)."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from composer_fsdp2.sharding.sharded import is_sharded, reshard

from .seams import seam


@seam(
    "composer.core.state",
    "fsdp_state_dict_type_context",
    why="LLM Foundry's MonolithicCheckpointSaver asks FSDP1 for full state, which raised KeyError or AttributeError",
)
@contextlib.contextmanager
def state_dict_type_context(
    original: Callable[..., Any], module: torch.nn.Module, state_dict_type: str = "full"
) -> Iterator[None]:
    """``composer.core.state.fsdp_state_dict_type_context``: with 'full', state is full, in host memory, on rank 0."""
    if not is_sharded(module):
        with original(module, state_dict_type):
            yield
        return
    reshard(module)
    if state_dict_type != "full":
        yield
        return
    hook = module.register_state_dict_post_hook(_gather_full_values)
    token = _asks_for_full.set(True)
    try:
        yield
    finally:
        _asks_for_full.reset(token)
        hook.remove()


def _gather_full_values(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """A hook on ``state_dict``: full values, on rank 0 alone. Called on all ranks; gathers one tensor at a time."""
    for name, value in list(state_dict.items()):
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if dist.get_rank() == 0:
            state_dict[name] = full.cpu() if isinstance(full, torch.Tensor) else full
        else:
            del state_dict[name]


# Whether a block asks for full state. Of this context, since FSDP1's function is told of none.
_asks_for_full = ContextVar("asks_for_full", default=False)


@seam(
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "FullyShardedDataParallel.optim_state_dict",
    why="LLM Foundry's MonolithicCheckpointSaver asks it for full optimizer state; it knows FSDP1's modules only",
)
def optim_state_dict(
    original: Callable[..., Any], model: torch.nn.Module, optim: torch.optim.Optimizer, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """``FullyShardedDataParallel.optim_state_dict``; within ``fsdp_state_dict_type_context`` of a sharded model."""
    if not (_asks_for_full.get() and is_sharded(model)):
        found: dict[str, Any] = original(model, optim, *args, **kwargs)
        return found
    return get_optimizer_state_dict(model, optim, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


# Whether algorithms' shards go into a state dict as they are: an argument of ``State.state_dict``, which takes none.
keeps_shards = ContextVar("keeps_shards", default=False)


@contextlib.contextmanager
def shards_kept(keeps: bool) -> Iterator[None]:
    """A full file is written shard by shard, algorithms' shards too; elsewhere they are pickled, and must be full."""
    token = keeps_shards.set(keeps)
    try:
        yield
    finally:
        keeps_shards.reset(token)
