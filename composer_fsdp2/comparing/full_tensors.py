"""Parameters, optimizer state and buffers of a sharded model, FSDP1's or FSDP2's, as full tensors by canonical names.

FSDP1's own full state dict crashes the process without a GPU (torch 2.7.0). The shards are therefore gathered here, one
tensor at a time, in the order in which FSDP1 concatenated them in its flat parameters.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from composer_fsdp2._torch.local_tensors import local_tensor
from composer_fsdp2._torch.private_names import FSDP1Wrapper
from composer_fsdp2.checkpoint.names import canonical
from composer_fsdp2.comparing.run_record import BUFFER, PARAMETER, Settings
from composer_fsdp2.sharding.full_values import gather_full_tensor

# The kind of a tensor, and the name of its parameter or buffer.
Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Flat:
    """A parameter in one of FSDP1's flat parameters.

    Args:
        group: The process group over which the flat parameter is sharded.
        contents: The names and sizes of the parameters in the flat parameter.
    """

    group: dist.ProcessGroup
    contents: tuple[tuple[str, int], ...] = ()


def gradient_squares(model: nn.Module) -> float:
    """The sum of squares of this rank's gradients. Summed over ranks, it is that of the full gradients.

    Squares of gradients that several ranks have are divided by the number of these ranks. Does not communicate.
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
    """The numeric options of each parameter group, and the canonical names of its parameters. Does not communicate."""
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


# These do not affect the result of a step.
_IMPLEMENTATION_OPTIONS = {"params", "foreach", "fused", "capturable", "differentiable"}


def _numbers(group: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in group.items():
        values = {name: value}
        if isinstance(value, list | tuple):
            values = {f"{name}.{place}": each for place, each in enumerate(value)}
        for each, number in values.items():
            if name not in _IMPLEMENTATION_OPTIONS and _is_number(number):
                yield each, float(number)


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, int | float)


def full_tensors(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], notes: list[str], *, has_buffers: bool = True
) -> Iterator[tuple[Key, torch.Tensor]]:
    """Iterate over every parameter, the optimizers' state and every buffer, each gathered, flattened and on the CPU.

    Each rank updates its own buffers (batch norm's running mean), so a buffer is the concatenation of all ranks'
    values. Called on all ranks, which must iterate to the end together; each tensor is gathered from all ranks.
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
    of_ranks = _all_gather(list(shards))
    for key in dict.fromkeys(key for of_rank in of_ranks for key in of_rank):
        kind, name = key
        shard = shards.get(key)
        if layout := layouts.get(name):
            full = _concatenated(shard, dist.get_process_group_ranks(layout.group))
            contents = layout.contents or ((name, full.numel()),)
            sizes = [size for _, size in contents]
            for (each, _), tensor in zip(contents, full[: sum(sizes)].split(sizes), strict=True):  # without padding
                yield (kind, each), tensor
        elif shard is None or not all(key in each for each in of_ranks):
            notes.append(f"{kind} of {name} is not on every rank, and was not compared")
        else:
            yield key, _on_cpu(gather_full_tensor(shard) if isinstance(shard, DTensor) else shard)
    # The value of the lowest rank that has one: FSDP1 has no state on ranks without elements of the parameter.
    for key, number in {key: each for of_rank in _all_gather(numbers)[::-1] for key, each in of_rank.items()}.items():
        yield key, torch.tensor([number], dtype=torch.float64)
    buffers = {canonical(name): buffer for name, buffer in model.named_buffers()} if has_buffers else {}
    for name in dict.fromkeys(name for names in _all_gather(list(buffers)) for name in names):
        yield (BUFFER, name), _concatenated(buffers.get(name), range(dist.get_world_size()))


def _concatenated(own: torch.Tensor | None, ranks: Iterable[int]) -> torch.Tensor:
    """Gather the tensors of the ranks that have one, and concatenate them. Called on all ranks."""
    of_ranks = _all_gather(None if own is None else _on_cpu(local_tensor(own)))
    return torch.cat([of_ranks[rank] for rank in ranks if of_ranks[rank] is not None])


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A flat copy on the CPU, in fp32 or fp64. A complex number is two real ones."""
    flat = tensor.detach().flatten()
    flat = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
    dtype = torch.promote_types(flat.dtype, torch.float32) if flat.is_floating_point() else torch.float64
    return flat.to("cpu", dtype, copy=True)  # a view would be pickled with all of its storage


def _flat_parameters(model: nn.Module) -> dict[int, _Flat]:
    """The ``_Flat`` of each parameter that FSDP1 shards, by the parameter's id."""
    found: dict[int, _Flat] = {}
    for path, module in model.named_modules():
        handle: Any = module._handle if isinstance(module, FSDP1Wrapper) else None
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


def _all_gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
