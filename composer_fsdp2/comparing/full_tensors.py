"""Parameters, optimizer state and buffers of a sharded model, FSDP1's or FSDP2's, as full tensors by canonical names.

FSDP1's own full state dict ends the process without a GPU (torch 2.7.0), so the shards are gathered here, one
tensor at a time, in the order in which FSDP1 concatenated them in its flat parameters.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate

from composer_fsdp2._torch.parts import local_tensor
from composer_fsdp2.checkpoint.names import canonical
from composer_fsdp2.comparing.run_record import BUFFER, PARAMETER, Settings
from composer_fsdp2.sharding.full_values import gather_full

# The kind of a tensor, and the name of its parameter or buffer.
Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Flat:
    """How FSDP1 shards a parameter: over ``group``; ``contents`` are names and sizes in a ``FlatParameter``."""

    group: dist.ProcessGroup
    contents: tuple[tuple[str, int], ...] = ()


def gradient_squares(model: nn.Module) -> float:
    """This rank's part of the sum of all gradients' squares: the sum over ranks is the full one.

    Does not communicate.
    """
    flat, total = _flat_parameters(model), 0.0
    for parameter in model.parameters():
        if parameter.grad is not None:
            norm = float(torch.linalg.vector_norm(local_tensor(parameter.grad), dtype=torch.float64))
            total += norm**2 / _num_copies(parameter, flat.get(id(parameter)))
    return total


def _num_copies(parameter: nn.Parameter, flat: _Flat | None) -> int:
    """How many ranks have each element."""
    num_ranks = dist.get_world_size()
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        axes = [axis for axis, each in enumerate(parameter.placements) if isinstance(each, Replicate)]
        return math.prod(map(mesh.size, axes)) * num_ranks // mesh.size()
    return num_ranks // dist.get_world_size(flat.group) if flat else num_ranks


def settings(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[Settings, ...]:
    """The numbers of each of the optimizers' parameter groups, by canonical names. Does not communicate."""
    flat = _flat_parameters(model)
    names = {id(each): _names(name, flat.get(id(each))) for name, each in model.named_parameters()}
    return tuple(
        Settings(
            values=dict(_numbers(group)),
            names=tuple(name for parameter in group["params"] for name in names.get(id(parameter), ())),
        )
        for optimizer in optimizers
        for group in optimizer.param_groups
    )


def _names(name: str, flat: _Flat | None) -> list[str]:
    return [each for each, _ in flat.contents] if flat and flat.contents else [canonical(name)]


_HOW_IT_RUNS = {"params", "foreach", "fused", "capturable", "differentiable"}  # not the mathematics of a step


def _numbers(group: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in group.items():
        values = {name: value}
        if isinstance(value, list | tuple):
            values = {f"{name}.{place}": each for place, each in enumerate(value)}
        for each, number in values.items():
            if name not in _HOW_IT_RUNS and _is_number(number):
                yield each, float(number)


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, int | float)


def full_tensors(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], notes: list[str], *, has_buffers: bool = True
) -> Iterator[tuple[Key, torch.Tensor]]:
    """Every parameter, the optimizers' state and every buffer, flat, on the CPU, one after the other.

    A buffer is that of all ranks, concatenated: each rank updates its own (batch norm's running mean). Called on all
    ranks, which must iterate to the end together; each tensor is gathered from all ranks.
    """
    flat = _flat_parameters(model)
    shards: dict[Key, torch.Tensor] = {}
    numbers: dict[Key, float] = {}
    layouts: dict[str, _Flat | None] = {}
    for raw_name, parameter in model.named_parameters():
        name, layout = canonical(raw_name), flat.get(id(parameter))
        layouts[name], shards[PARAMETER, name] = layout, parameter
        for kind, value in (pair for each in optimizers for pair in each.state.get(parameter, {}).items()):
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.is_floating_point():
                shards[kind, name] = value
            elif _is_number(value):
                numbers |= {(kind, each): float(value) for each in _names(name, layout)}
    of_ranks = _from_all({key: (local_tensor(each).numel(), each.dtype) for key, each in shards.items()})
    for key in dict.fromkeys(key for of_rank in of_ranks for key in of_rank):
        if gathered_from := layouts.get(key[1]):
            yield from _of_flat(key, shards.get(key), gathered_from, [each.get(key) for each in of_ranks])
        elif all(key in each for each in of_ranks):
            tensor = shards[key]
            yield key, _on_cpu(gather_full(tensor) if isinstance(tensor, DTensor) else tensor)
        else:
            notes.append(f"{key[0]} of {key[1]} is not on every rank, and was not compared")
    # The lowest rank's number: FSDP1 has no state of a parameter on ranks without rows of it.
    for key, number in {key: each for of_rank in _from_all(numbers)[::-1] for key, each in of_rank.items()}.items():
        yield key, torch.tensor([number], dtype=torch.float64)
    buffers = {canonical(name): buffer for name, buffer in model.named_buffers()} if has_buffers else {}
    for name in dict.fromkeys(name for names in _from_all(list(buffers)) for name in names):
        own = _on_cpu(local_tensor(buffers[name])) if name in buffers else None
        yield (BUFFER, name), torch.cat([each for each in _from_all(own) if each is not None])


def _of_flat(
    key: Key, shard: torch.Tensor | None, flat: _Flat, of_ranks: Sequence[tuple[int, torch.dtype] | None]
) -> Iterator[tuple[Key, torch.Tensor]]:
    """A tensor of FSDP1's, or those in its flat parameter, from the shards of all ranks of its group."""
    sizes = [of_ranks[rank] for rank in dist.get_process_group_ranks(flat.group)]
    lengths = [0 if each is None else each[0] for each in sizes]
    is_nccl = "nccl" in str(dist.get_backend(flat.group))
    padded = torch.zeros(
        max(1, *lengths),
        dtype=next(each[1] for each in of_ranks if each is not None),
        device=torch.device("cuda", torch.cuda.current_device()) if is_nccl else "cpu",
    )
    if shard is not None:
        padded[: shard.numel()] = shard.detach().flatten()
    pieces = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(pieces, padded, group=flat.group)
    full = _on_cpu(torch.cat([piece[:length] for piece, length in zip(pieces, lengths, strict=True)]))
    start = 0
    for name, size in flat.contents or ((key[1], full.numel()),):
        yield (key[0], name), full[start : start + size]
        start += size


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Flat, in fp32 or fp64; a complex number as its two parts."""
    flat = tensor.detach().flatten()
    flat = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
    dtype = torch.promote_types(flat.dtype, torch.float32) if flat.is_floating_point() else torch.float64
    return flat.to("cpu", dtype)


def _flat_parameters(model: nn.Module) -> dict[int, _Flat]:
    """The layouts of parameters that FSDP1 shards, by their ids."""
    found: dict[int, _Flat] = {}
    for path, module in model.named_modules():
        handle: Any = module._handle if isinstance(module, FullyShardedDataParallel) else None
        if handle is None or not handle.uses_sharded_strategy:
            continue
        flat = handle.flat_param
        if flat._params is not None:  # use_orig_params
            found |= {id(parameter): _Flat(handle.process_group) for parameter in flat._params}
        else:
            prefix = f"{path}." if path else ""
            contents = zip((canonical(prefix + name) for name in flat._fqns), flat._numels, strict=True)
            found[id(flat)] = _Flat(handle.process_group, tuple(contents))
    return found


def _from_all(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
