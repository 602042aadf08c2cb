"""Values that must be equal to the last bit, and full (unsharded) tensors to compare: one helper for all tests."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def assert_same(found: Any, expected: Any, what: str = "", *, in_bits: bool = False, in_order: bool = False) -> None:
    """Compare keys, classes and values, of tensors also dtype, shape and each element; the error lists all differences.

    Mappings, sequences and dataclasses are traversed. Mapping classes need not be equal. NaN differs from everything:
    equal errors on both sides must not pass.

    Args:
        in_bits: As in a copy: NaN equals itself, and -0.0 differs from 0.0.
        in_order: Mappings must also have the same class, and their keys the same order.
    """
    problems = list(differences(found, expected, in_bits=in_bits, in_order=in_order))
    assert not problems, "\n".join(filter(None, [what, *problems]))


def differences(
    found: Any, expected: Any, path: str = "", *, in_bits: bool = False, in_order: bool = False
) -> Iterator[str]:
    """A line for each place where two nested values differ."""
    below = functools.partial(differences, in_bits=in_bits, in_order=in_order)
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        if in_order and type(found) is not type(expected):
            yield f"{path}: {type(found).__name__}, expected {type(expected).__name__}"
        if in_order and found.keys() == expected.keys() and list(found) != list(expected):
            yield f"{path}: keys in the order {list(found)}, expected {list(expected)}"
        for key in [*expected, *(key for key in found if key not in expected)]:
            place = f"{path}/{key}" if path else str(key)
            if key not in found or key not in expected:
                yield f"{place}: {'missing' if key not in found else 'not expected'}"
            else:
                yield from below(found[key], expected[key], place)
    elif isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        if problem := _tensor_difference(found, expected, in_bits):
            yield f"{path}: {problem}"
    elif isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        if (type(found), len(found)) != (type(expected), len(expected)):
            kinds = [f"{type(each).__name__} of {len(each)}" for each in (found, expected)]
            yield f"{path}: {kinds[0]}, expected {kinds[1]}"
        else:
            for number, (one, other) in enumerate(zip(found, expected, strict=True)):
                yield from below(one, other, f"{path}[{number}]")
    elif dataclasses.is_dataclass(expected) and type(found) is type(expected):
        yield from below(vars(found), vars(expected), path)
    elif _class(found) is not _class(expected) or not _is_same_leaf(found, expected, in_bits):
        yield f"{path}: {found!r}, expected {expected!r}"


def _class(value: Any) -> type:
    """Subclasses of str count as str: torch's TorchVersion is a plain string after saving and loading."""
    return str if isinstance(value, str) else type(value)


def _is_same_leaf(found: Any, expected: Any, in_bits: bool) -> bool:
    if type(expected).__module__ == "numpy" and type(found) is type(expected):
        alike = (found.dtype, found.shape) == (expected.dtype, expected.shape)
        return alike and (found.tobytes() == expected.tobytes() if in_bits else bool((found == expected).all()))
    if in_bits and isinstance(expected, float | complex):
        return repr(found) == repr(expected)  # distinguishes -0.0 from 0.0
    return bool(found == expected)


def _tensor_difference(found: torch.Tensor, expected: torch.Tensor, in_bits: bool) -> str:
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return f"{found.dtype} of {tuple(found.shape)}, expected {expected.dtype} of {tuple(expected.shape)}"
    differing = (_bits(found) != _bits(expected)).any(1) if in_bits else found != expected
    if not differing.any():
        return ""
    return f"{int(differing.sum())} of {expected.numel()} elements differ: {found}, expected {expected}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of each element."""
    packed = tensor.detach().clone(
        memory_format=torch.contiguous_format
    )  # contiguous() leaves an empty one its strides
    return packed.reshape(-1).view(torch.uint8).reshape(tensor.numel(), tensor.itemsize)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor, all-gathered if sharded, detached, on the device of its shards. Called on all ranks."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    # Offloaded shards are sent on the mesh's device, because NCCL does not support CPU tensors.
    return tensor.detach().to(tensor.device_mesh.device_type).full_tensor().to(tensor.device)


def own_name(name: str) -> str:
    """The name of a parameter or module without the prefixes of wrappers."""
    for wrapper in WRAPPERS:
        name = f"{name}.".replace(wrapper, "").removesuffix(".")
    return name


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """A full copy of every parameter, by its name without wrappers. Called on all ranks."""
    from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel  # under the shim, too

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        with FullyShardedDataParallel.summon_full_params(model):
            return {own_name(name): parameter.detach().clone() for name, parameter in model.named_parameters()}
    return {own_name(name): full(parameter).clone() for name, parameter in model.named_parameters()}
