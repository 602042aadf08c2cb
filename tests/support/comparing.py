"""Values that must be equal to the last bit, and full (unsharded) tensors to compare: one helper for all tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def assert_same(found: Any, expected: Any, what: str = "", *, in_bits: bool = False) -> None:
    """The same keys and classes, and every tensor equal in dtype, shape and each element; names all that differ.

    Mappings and sequences are walked; a number is compared as it is, NaN is equal to itself.

    Args:
        in_bits: Whether -0.0 is another tensor element than 0.0, as in a copy.
    """
    problems = list(differences(found, expected, in_bits=in_bits))
    assert not problems, "\n".join(filter(None, [what, *problems]))


def differences(found: Any, expected: Any, path: str = "", *, in_bits: bool = False) -> Iterator[str]:
    """A line for each place where two nested values differ."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key in [*expected, *(key for key in found if key not in expected)]:
            place = f"{path}/{key}" if path else str(key)
            if key not in found or key not in expected:
                yield f"{place}: {'missing' if key not in found else 'not expected'}"
            else:
                yield from differences(found[key], expected[key], place, in_bits=in_bits)
    elif isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        if problem := _tensor_difference(found, expected, in_bits):
            yield f"{path}: {problem}"
    elif isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        if (type(found), len(found)) != (type(expected), len(expected)):
            kinds = [f"{type(each).__name__} of {len(each)}" for each in (found, expected)]
            yield f"{path}: {kinds[0]}, expected {kinds[1]}"
        else:
            for number, (one, other) in enumerate(zip(found, expected, strict=True)):
                yield from differences(one, other, f"{path}[{number}]", in_bits=in_bits)
    elif type(expected).__module__ == "numpy" and type(found) is type(expected):
        if (found.dtype, found.shape, found.tobytes()) != (expected.dtype, expected.shape, expected.tobytes()):
            yield f"{path}: {found!r}, expected {expected!r}"
    elif _class(found) is not _class(expected) or not (found == expected or (found != found and expected != expected)):
        yield f"{path}: {found!r}, expected {expected!r}"


def _class(value: Any) -> type:
    """A kind of text is text: torch's TorchVersion is a plain string once it has been through a checkpoint."""
    return str if isinstance(value, str) else type(value)


def _tensor_difference(found: torch.Tensor, expected: torch.Tensor, in_bits: bool) -> str:
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return f"{found.dtype} of {tuple(found.shape)}, expected {expected.dtype} of {tuple(expected.shape)}"
    if (not in_bits and torch.equal(found, expected)) or torch.equal(_bits(found), _bits(expected)):  # of NaN, too
        return ""
    number = int((found != expected).sum())
    return f"{number} of {expected.numel()} elements differ: {found}, expected {expected}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor, gathered if it is sharded, without its history. Called on all ranks."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def own_name(name: str) -> str:
    """The name of a parameter or module without those of the wrappers around its modules."""
    for wrapper in WRAPPERS:
        name = f"{name}.".replace(wrapper, "").removesuffix(".")
    return name


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every parameter, full, by the name it had before any wrapping. Called on all ranks."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        with FullyShardedDataParallel.summon_full_params(model):
            return {own_name(name): parameter.detach().clone() for name, parameter in model.named_parameters()}
    return {own_name(name): full(parameter).clone() for name, parameter in model.named_parameters()}
