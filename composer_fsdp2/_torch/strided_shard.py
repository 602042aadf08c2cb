"""Preserve ``_StridedShard`` placements in operations on parameters that TP and FSDP shard along the same dimension.

The shards of such a parameter have a different order than those of a plain ``Shard``. In torch 2.7 ``_StridedShard`` is
a subclass of ``Shard`` and equals a ``Shard`` of the same dimension, so the rules of pointwise operations and
reductions return a plain ``Shard``. The local values of ``parameter * 2`` are then correct, but the full tensor has
permuted rows. For example, an optimizer with weight decay saved its momentum with permuted rows, without an error. In
torch 2.13 it is a separate class, which the rules preserve.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

_MARK = "_composer_fsdp2_repair"


def drops_strided_shard() -> bool:
    """Whether rules for ``Shard`` also match ``_StridedShard``, and are not patched yet."""
    return issubclass(_StridedShard, Shard) and not hasattr(_rules()[0], _MARK)


def patch_strided_shard() -> None:
    """Make operations on ``_StridedShard`` tensors return ``_StridedShard``. Idempotent; does not communicate."""
    if not drops_strided_shard():
        return
    from torch.distributed.tensor._ops import _math_ops, _pointwise_ops

    pointwise, reduced = _rules()

    def common_pointwise_strategy(args_schema: Any, followed_strategy: Any, linearity: bool) -> Any:
        made = pointwise(args_schema, followed_strategy, linearity)
        for each, like in zip(made.strategies, followed_strategy.strategies, strict=True):
            spec = each.output_specs  # not `output_spec`, which is cached
            each.output_specs = replace(spec, placements=_strided_as(like.output_spec.placements, spec.placements))
        return made

    def map_placements_after_reduction(placements: Any, *args: Any) -> Any:
        return _strided_as(placements, reduced(placements, *args))

    for function in (common_pointwise_strategy, map_placements_after_reduction):
        setattr(function, _MARK, True)
    _pointwise_ops.common_pointwise_strategy = common_pointwise_strategy
    _math_ops.map_placements_after_reduction = map_placements_after_reduction  # type: ignore[assignment]


def _rules() -> tuple[Callable[..., Any], Callable[..., Any]]:
    from torch.distributed.tensor._ops import _math_ops, _pointwise_ops

    return _pointwise_ops.common_pointwise_strategy, _math_ops.map_placements_after_reduction


def _strided_as(like: tuple[Placement, ...], placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    return tuple(
        _StridedShard(placement.dim, split_factor=given.split_factor)
        if isinstance(given, _StridedShard) and isinstance(placement, Shard)
        else placement
        for given, placement in zip(like, placements, strict=True)
    )
