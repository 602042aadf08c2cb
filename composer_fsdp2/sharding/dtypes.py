"""Convert between dtype names and torch's dtypes and policies."""

from functools import cache
from typing import cast

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from composer_fsdp2.config.sharding import MixedPrecision


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16``, without the ``torch.`` prefix."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else cast(torch.dtype, getattr(torch, name))


def dtype_bytes(name: str) -> int:
    dtype: torch.dtype = getattr(torch, name)
    return dtype.itemsize


@cache
def mixed_precision_policy(precision: MixedPrecision) -> MixedPrecisionPolicy:
    """The ``mp_policy`` of ``fully_shard``. It has no setting for buffers, nor for the inputs of roots."""
    return MixedPrecisionPolicy(
        param_dtype=torch_dtype(precision.param_dtype),
        reduce_dtype=torch_dtype(precision.reduce_dtype),
        output_dtype=torch_dtype(precision.output_dtype),
        cast_forward_inputs=precision.cast_forward_inputs,
    )
