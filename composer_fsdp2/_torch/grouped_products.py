"""torch's product of rows with one matrix a group, where a version and a device have it."""

import functools

import torch

_NAME = "_grouped_mm"  # torch 2.7 has none


def grouped_product(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Of groups that lie one after the other: rows times the matrix of their group, or a sum of outer products each.

    Args:
        left: [rows, in], or [out, rows].
        right: [groups, in, out], or [rows, in].
        ends: Where each group of rows ends; int32, on the device.
    """
    product: torch.Tensor = getattr(torch, _NAME)(left, right, offs=ends)
    return product


@functools.cache
def has_grouped_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether it is there for tensors of this kind, and gives what single products give, in each form that is used.

    Waits for the device the first time.
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
    except (RuntimeError, NotImplementedError):  # too old a device, or another dtype
        return False
    first = rows @ others.mT
    expected = [first.view(64, 32), (first @ others).view(64, 16), rows.mT @ others]
    return all(torch.allclose(one, of_single, rtol=1e-2) for one, of_single in zip(found, expected, strict=True))
