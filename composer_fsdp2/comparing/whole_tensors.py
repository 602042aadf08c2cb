"""Parameters and optimizer state of a sharded model, FSDP1's or FSDP2's, as full tensors by the model's own names.

FSDP1's own full state dict ends the process where there is no GPU (torch 2.7.0), so the ranks' pieces are gathered
here, one tensor at a time, in the order in which FSDP1 laid them into its flat parameters.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from composer_fsdp2._torch.parts import local_tensor
from composer_fsdp2._torch.private_names import FSDP1Wrapper
from composer_fsdp2.checkpoint.names import canonical
from composer_fsdp2.comparing.run_record import Fingerprint, Settings
from composer_fsdp2.sharding.full_values import gather_full

PARAMETER = "parameter"
# Of one tensor: what it is, and the parameter it belongs to.
Key = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """This rank's part of a tensor.

    Args:
        group: Of FSDP1's flat parameter; None for a DTensor and for what every rank has whole.
        copies: How many ranks have each element.
        contents: The names and sizes of what lies in a flat parameter, where it is one (``use_orig_params: false``).
    """

    tensor: torch.Tensor
    group: dist.ProcessGroup | None
    copies: int
    contents: tuple[tuple[str, int], ...] = ()

    def like(self, tensor: torch.Tensor) -> "_Part":
        return _Part(tensor=tensor, group=self.group, copies=self.copies, contents=self.contents)


@dataclass(frozen=True, slots=True)
class _State:
    """All that this rank has: parts of tensors, and numbers (such as the optimizer's count of steps)."""

    parts: dict[Key, _Part]
    numbers: dict[Key, float]


def gradient_squares(model: nn.Module) -> float:
    """This rank's share of the sum of all gradients' squares: the ranks' shares together are that sum.

    Does not communicate.
    """
    groups = _flat_groups(model)
    total = 0.0
    for parameter in model.parameters():
        if parameter.grad is not None:
            part = _part_of(parameter, groups)
            total += (
                float(torch.linalg.vector_norm(local_tensor(parameter.grad), dtype=torch.float64)) ** 2 / part.copies
            )
    return total


def fingerprints(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[Fingerprint, ...]:
    """Of every parameter and every tensor of the optimizers'. Called on all ranks; one gather."""
    state = _state_of(model, optimizers)
    own = {(kind, each): sums for (kind, name), part in state.parts.items() for each, sums in _sums(name, part)}
    of_ranks: dict[Key, list[tuple[float, float, float]]] = {}
    numbers: dict[Key, float] = {}  # of the lowest rank that has it: FSDP1 leaves out ranks without rows of a parameter
    for sums, its_numbers in _from_all((own, state.numbers)):
        numbers = {**its_numbers, **numbers}
        for key, each in sums.items():
            of_ranks.setdefault(key, []).append(each)
    totals: dict[Key, tuple[float, ...]] = {
        key: tuple(map(_sum, zip(*each, strict=True))) for key, each in of_ranks.items()
    }
    totals |= {key: (number, number**2, 1.0) for key, number in numbers.items()}
    return tuple(
        Fingerprint(kind=kind, name=name, total=total, squares=squares, size=round(size))
        for (kind, name), (total, squares, size) in totals.items()
    )


def _sum(numbers: Sequence[float]) -> float:
    """The sum; no finite number where one of them is none, or where it is too large."""
    try:
        return math.fsum(numbers)
    except (ValueError, OverflowError):  # of both infinities; of finite numbers
        return sum(numbers)


def settings(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[Settings, ...]:
    """What the optimizers' groups say, by the model's own names. Does not communicate."""
    names, groups = {}, _flat_groups(model)
    for name, parameter in model.named_parameters():
        contents = _part_of(parameter, groups).contents
        names[id(parameter)] = [each for each, _ in contents] or [canonical(name)]
    return tuple(
        Settings(
            values=dict(_numbers(group)),
            names=tuple(name for parameter in group["params"] for name in names.get(id(parameter), ())),
        )
        for optimizer in optimizers
        for group in optimizer.param_groups
    )


_HOW_IT_RUNS = {"params", "foreach", "fused", "capturable", "differentiable"}  # and not what it computes


def _numbers(group: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in group.items():
        if name in _HOW_IT_RUNS:
            continue
        if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            yield name, float(value)
        elif isinstance(value, list | tuple):
            numbers = enumerate(value)
            yield from ((f"{name}.{place}", float(each)) for place, each in numbers if isinstance(each, int | float))


def _sums(name: str, part: _Part) -> Iterator[tuple[str, tuple[float, float, float]]]:
    """This rank's sum, sum of squares and number of elements, of each tensor in a part."""
    values = local_tensor(part.tensor).detach()
    # Where this rank's piece of a flat parameter begins in it.
    offset = dist.get_rank(part.group) * values.numel() if part.contents else 0
    start = 0
    for each, size in part.contents or ((name, values.numel()),):
        piece = values.flatten()[max(0, start - offset) : max(0, start + size - offset)].double()
        start += size
        yield (
            each,
            (
                float(piece.sum()) / part.copies,
                float((piece**2).sum()) / part.copies,
                piece.numel() / part.copies,
            ),
        )


def full_tensors(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], notes: list[str]
) -> Iterator[tuple[Key, torch.Tensor]]:
    """Every parameter and every tensor of the optimizers', flat, on the CPU, one after the other.

    Called on all ranks, which go through all of it together.
    """
    state = _state_of(model, optimizers)
    sizes = _from_all(
        {key: (local_tensor(part.tensor).numel(), part.tensor.dtype) for key, part in state.parts.items()}
    )
    like = {key[1]: part for key, part in state.parts.items() if key[0] == PARAMETER}
    for key in dict.fromkeys(key for of_rank in sizes for key in of_rank):
        part = state.parts.get(key)
        if part is None or part.group is not None:
            of_parameter = like.get(key[1])
            if of_parameter is None or of_parameter.group is None:
                notes.append(f"{key[0]} of {key[1]} is not on every rank, and was not compared")
                continue
            yield from _of_flat(key, part, of_parameter, [each.get(key) for each in sizes])
        elif not all(key in each for each in sizes):
            notes.append(f"{key[0]} of {key[1]} is not on every rank, and was not compared")
        else:
            yield key, _on_cpu(gather_full(part.tensor) if isinstance(part.tensor, DTensor) else part.tensor)
    numbers: dict[Key, float] = {}
    for of_rank in _from_all(state.numbers):
        numbers = {**of_rank, **numbers}
    for key, number in numbers.items():
        yield key, torch.tensor([number], dtype=torch.float64)


def _of_flat(
    key: Key, part: _Part | None, like: _Part, sizes: Sequence[tuple[int, torch.dtype] | None]
) -> Iterator[tuple[Key, torch.Tensor]]:
    """A tensor of FSDP1's, or those in its flat parameter, from the pieces of all ranks of its group."""
    group = like.group
    assert group is not None
    of_ranks = [sizes[rank] for rank in dist.get_process_group_ranks(group)]
    lengths = [0 if each is None else each[0] for each in of_ranks]
    dtype = next(each[1] for each in sizes if each is not None)
    padded = torch.zeros(max(1, *lengths), dtype=dtype, device=_device_of(group))
    if part is not None:
        padded[: part.tensor.numel()] = part.tensor.detach().flatten()
    pieces = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(pieces, padded, group=group)
    flat = torch.cat([piece[:length] for piece, length in zip(pieces, lengths, strict=True)])
    if not like.contents:
        yield key, _on_cpu(flat)
    start = 0
    for name, size in like.contents:
        yield (key[0], name), _on_cpu(flat[start : start + size])
        start += size


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    if "nccl" in str(dist.get_backend(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """At least in fp32."""
    return tensor.detach().flatten().to("cpu", torch.promote_types(tensor.dtype, torch.float32))


# ---------------------------------------------------------------------------------------------------------------------
# What a rank has


def _state_of(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> _State:
    groups = _flat_groups(model)
    state = _State({}, {})
    for raw_name, parameter in model.named_parameters():
        name, part = canonical(raw_name), _part_of(parameter, groups)
        state.parts[PARAMETER, name] = part
        for optimizer in optimizers:
            for kind, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.is_floating_point():
                    state.parts[kind, name] = part.like(value)
                elif isinstance(value, torch.Tensor | int | float) and _size(value) == 1:
                    of_names = [each for each, _ in part.contents] or [name]
                    state.numbers.update(((kind, each), float(value)) for each in of_names)
    return state


def _size(value: Any) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else 1


def _part_of(parameter: nn.Parameter, groups: Mapping[int, tuple[Any, tuple[tuple[str, int], ...]]]) -> _Part:
    num_ranks = dist.get_world_size()
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        replicas = math.prod(
            mesh.size(axis) for axis, placement in enumerate(parameter.placements) if isinstance(placement, Replicate)
        )
        return _Part(tensor=parameter, group=None, copies=max(1, replicas * num_ranks // mesh.size()))
    if id(parameter) in groups:
        group, contents = groups[id(parameter)]
        return _Part(tensor=parameter, group=group, copies=num_ranks // dist.get_world_size(group), contents=contents)
    return _Part(tensor=parameter, group=None, copies=num_ranks)


def _flat_groups(model: nn.Module) -> dict[int, tuple[Any, tuple[tuple[str, int], ...]]]:
    """By the id of a parameter that FSDP1 shards, over which ranks; of a flat parameter also what lies in it."""
    found: dict[int, tuple[Any, tuple[tuple[str, int], ...]]] = {}
    for path, module in model.named_modules():
        handle: Any = module._handle if isinstance(module, FSDP1Wrapper) else None
        if handle is None or not handle.uses_sharded_strategy:
            continue
        flat = handle.flat_param
        if flat._params is not None:  # use_orig_params
            found |= {id(parameter): (handle.process_group, ()) for parameter in flat._params}
            continue
        prefix = f"{path}." if path else ""
        contents = zip(flat._fqns, flat._numels, strict=True)
        found[id(flat)] = (handle.process_group, tuple((canonical(prefix + name), size) for name, size in contents))
    return found


def _from_all(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
