"""FLOPs of single operators."""

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_aten = torch.ops.aten
# torch's FLOP counter covers attention's CUDA kernels only; the CPU's kernel has the same arguments.
_FLASH = _aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the FLOPs of a matrix product, a convolution or attention; 0 for other operators.

    Causal attention counts half, because kernels skip masked blocks. torch's own counter counts it in full.
    """
    packet = getattr(func, "_overloadpacket", None)
    if packet is _FLASH:
        full = sdpa_flop_count(*(each.shape for each in args[:3]))
        return int(full) // (2 if _is_causal(args, kwargs, 4) else 1)
    if packet is _FLASH_BACKWARD:
        gradient, query, key, value = (each.shape for each in args[:4])
        full = sdpa_backward_flop_count(gradient, query, key, value)
        return int(full) // (2 if _is_causal(args, kwargs, 7) else 1)
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    return 0


def _is_causal(args: tuple[Any, ...], kwargs: dict[str, Any], place: int) -> bool:
    return bool(args[place] if len(args) > place else kwargs.get("is_causal", False))
