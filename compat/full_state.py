"""Callbacks that ask FSDP1 for full state (LLM Foundry's MonolithicCheckpointSaver)."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from composer_fsdp2.sharding.sharded import is_sharded, reshard

from .seams import seam


@seam(
    "composer.core.state",
    "fsdp_state_dict_type_context",
    why="LLM Foundry's MonolithicCheckpointSaver asks FSDP1 for full state: KeyError, AttributeError",
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
    hook = module.register_state_dict_post_hook(_made_whole)
    try:
        with _optimizer_state_made_whole():
            yield
    finally:
        hook.remove()


def _made_whole(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Called on all ranks; gathers one tensor after the other."""
    for name, value in list(state_dict.items()):
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if dist.get_rank() == 0:
            state_dict[name] = full.cpu() if isinstance(full, torch.Tensor) else full
        else:
            del state_dict[name]


@contextlib.contextmanager
def _optimizer_state_made_whole() -> Iterator[None]:
    """In the block, ``FullyShardedDataParallel.optim_state_dict(model, optimizer)`` answers for ``fully_shard``."""

    def optim_state_dict(model: torch.nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
        return get_optimizer_state_dict(model, optim, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

    before = vars(FullyShardedDataParallel)["optim_state_dict"]
    FullyShardedDataParallel.optim_state_dict = staticmethod(optim_state_dict)  # type: ignore[assignment]
    try:
        yield
    finally:
        FullyShardedDataParallel.optim_state_dict = before  # type: ignore[method-assign]
