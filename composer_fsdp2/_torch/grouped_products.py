"""Grouped matrix products, if the torch version and the device support them."""

import functools

import torch

_NAME = "_grouped_mm"  # missing in torch 2.7


def grouped_product(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply consecutive groups of rows by one matrix per group, or sum one outer product per group.

    Args:
        left: [rows, in], or [out, rows].
        right: [groups, in, out], or [rows, in].
        ends: The end index of each group of rows; int32, on the device.
    """
    product: torch.Tensor = getattr(torch, _NAME)(left, right, offs=ends)
    return product


@functools.cache
def has_grouped_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has grouped products for this device and dtype, with the same results as single products.

    Synchronizes with the device on the first call.
    """
    if not hasattr(torch, _NAME):
        return False
    numbers = torch.arange(2 * 32 * 16, device=device)
    rows, others = (((numbers * factor) % 5).to(dtype).view(2, 32, 16) for factor in (1, 3))
    ends = torch.tensor([32, 64], dtype=torch.int32, device=device)
    flat, other = rows.view(64, 16), others.view(64, 16)
    try:
        found = [
            grouped_product(flat, others.mT, ends),
            grouped_product(grouped_product(flat, others.mT, ends), others, ends),
            grouped_product(flat.mT, other, ends),
        ]
    except (RuntimeError, NotImplementedError):  # unsupported device or dtype
        return False
    first = rows @ others.mT
    expected = [first.view(64, 32), (first @ others).view(64, 16), rows.mT @ others]
    return all(torch.allclose(one, of_single, rtol=1e-2) for one, of_single in zip(found, expected, strict=True))
