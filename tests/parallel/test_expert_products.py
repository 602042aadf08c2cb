"""Products of rows with their experts' weights, compared with one product for each expert."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from composer_fsdp2._torch.grouped_products import has_grouped_product
from composer_fsdp2.parallel import expert_products
from composer_fsdp2.parallel.expert_products import Rows, gated_mlp

WIDTH, WIDE = 16, 24
# Similar numbers of rows, which are padded; very different ones, which are not; some of zero, and all of zero.
COUNTS = {"alike": [4, 3, 4], "unlike": [1, 20, 0], "none": [0, 0, 0]}


def rows_of(counts: list[int], dtype: torch.dtype) -> Rows:
    values = torch.randn(sum(counts), WIDTH, dtype=dtype, requires_grad=True)
    return Rows(values, counts, torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)))


def weights_of(num_experts: int, dtype: torch.dtype) -> list[torch.Tensor]:
    shapes = (WIDE, WIDTH), (WIDE, WIDTH), (WIDTH, WIDE)
    return [(torch.randn(num_experts, *shape, dtype=dtype) / 4).requires_grad_() for shape in shapes]


def apply_gate(*wide: torch.Tensor) -> torch.Tensor:
    gate, up = wide if len(wide) == 2 else wide[0].chunk(2, dim=-1)
    return F.silu(gate) * up


def one_by_one(rows: Rows, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    parts = zip(rows.values.split(rows.counts), gate, up, down, strict=True)
    return torch.cat([F.linear(F.silu(F.linear(x, g)) * F.linear(x, u), d) for x, g, u, d in parts])


def check(counts: list[int], form: str, dtype: torch.dtype, autocast: bool) -> None:
    torch.manual_seed(0)
    rows, (gate, up, down) = rows_of(counts, dtype), weights_of(len(counts), dtype)
    given: dict[str, tuple[Any, Any]] = {
        "modules": ((list(gate.unbind()), list(up.unbind())), list(down.unbind())),
        "two stacks": ((gate, up), down),
        "one stack": ((torch.cat([gate, up], 1),), down),
    }
    tolerance = 2e-2 if autocast or dtype == torch.bfloat16 else 1e-5 if dtype == torch.float32 else 1e-12
    leaves, found = (rows.values, gate, up, down), []
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for out in (gated_mlp(rows, *given[form], apply_gate), one_by_one(rows, gate, up, down)):
            found.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    for one, other in zip(*found, strict=True):
        scale = 1 + (other.abs().max().item() if other.numel() else 0)
        what = f"{counts}, {form}, {dtype}: "
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * scale, msg=lambda text, what=what: what + text)


def check_all(*dtypes: torch.dtype) -> None:
    for counts, form, dtype in itertools.product(COUNTS.values(), ("modules", "two stacks", "one stack"), dtypes):
        check(counts, form, dtype, False)
    check(COUNTS["alike"], "modules", torch.float32, True)


def test_each_form_computes_what_experts_compute_one_by_one():
    """An expert with another expert's rows or weights would silently train on wrong numbers."""
    with mock.patch.object(expert_products, "has_grouped_product", return_value=False):
        check_all(torch.float64, torch.float32)


def test_one_kernel_for_all_experts_computes_the_same():
    """Where torch has the kernel: on GPUs, and on CPU from 2.13 on."""
    if not has_grouped_product(torch.device("cpu"), torch.bfloat16):
        pytest.skip("no grouped product in this torch for the CPU")
    counted = []

    def product(*args: Any) -> torch.Tensor:
        counted.append(args)
        return original(*args)

    original = expert_products.grouped_product
    with mock.patch.object(expert_products, "grouped_product", product):
        check_all(torch.float32, torch.bfloat16)
    assert counted


def test_a_product_that_is_wrong_is_not_used():
    """torch's kernel is experimental: if it returns wrong results, no model may train with it."""
    has_grouped_product.cache_clear()
    try:
        with mock.patch.object(torch, "_grouped_mm", lambda left, right, offs: left.new_zeros(1), create=True):
            assert not has_grouped_product(torch.device("cpu"), torch.float32)
    finally:
        has_grouped_product.cache_clear()
