"""The memory of a GPU's autocast, attention and offloading, emulated on tensors without data."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper
from torch.nn import functional as F

from composer_fsdp2.estimate._torch import emulate_cuda as played
from composer_fsdp2.estimate._torch.emulate_cuda import emulate_cuda
from composer_fsdp2.estimate._torch.fake import fake_tensors
from composer_fsdp2.estimate._torch.live import LiveStorages

HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"


def listed(macro: str) -> set[str]:
    """The operators of one of torch's own lists; ``_(softmax, int)`` is ``softmax.int``."""
    after = HEADER.read_text().split(f"#define {macro}(_)")[1]
    lines = after[: after.find("\n\n")]
    of_names = {
        f"{name}.{overload}" if overload else name for name, overload in re.findall(r"_\((\w+)(?:, (\w+))?\)", lines)
    }
    return of_names | set(re.findall(r'"(\w+\.\w+)"', lines))


def test_the_lists_are_those_of_torch():
    """An operator that a GPU runs in fp32, and that this list lacks, would be counted with half of its saved memory."""
    lists = {
        "AT_FORALL_FP32": played.FP32,
        "AT_FORALL_FP32_SET_OPT_DTYPE": played.FP32_RESULT,
        "AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE": played.FP32_RESULT,
        "AT_FORALL_PROMOTE": played.WIDEST,
    }
    missing = {macro: listed(macro) - set(ours) for macro, ours in lists.items()}
    assert missing == {macro: set() for macro in lists}
    assert all(map(listed, lists))
    theirs = set().union(*map(listed, lists))
    unknown = {name for ours in (played.FP32, played.FP32_RESULT, played.WIDEST) for name in ours} - theirs
    assert unknown <= {
        "rms_norm",
        *(name for name in unknown if "imname" in name or "names_" in name),
    }  # of other versions
    found = {name for name, _, _ in played._operators()}
    on_cpu = {name for name in theirs if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU")}
    assert found == theirs - on_cpu


def dtypes(on_gpu: bool) -> dict[str, torch.dtype]:
    with fake_tensors():
        half, norm = torch.zeros(4, 4, dtype=torch.bfloat16), nn.LayerNorm(4)
    calls: dict[str, Any] = {
        "layer_norm": lambda: norm(half),
        "softmax": lambda: half.softmax(-1),
        "log_softmax": lambda: F.log_softmax(half, -1),
        "softmax as asked for": lambda: half.softmax(-1, dtype=torch.bfloat16),
        "pow": lambda: half**2,
        "rsqrt": lambda: half.rsqrt(),
        "sum": lambda: half.sum(-1),
        "norm": lambda: half.norm(),
        "cumsum": lambda: half.cumsum(0),
        "mean": lambda: half.mean(-1),
        "whole numbers": lambda: half.long().sum(),
        "two dtypes": lambda: torch.addcmul(half, half, half.float()),
        "gelu": lambda: F.gelu(half),
        "matmul": lambda: half.float() @ half.float(),
    }
    as_on_gpu = emulate_cuda(LiveStorages()) if on_gpu else contextlib.nullcontext()
    with fake_tensors(), as_on_gpu, torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled() is on_gpu  # models read CUDA's state with this call
        return {name: call().dtype for name, call in calls.items()}


# From "CUDA Ops that can autocast to float32", "that promote" and "to float16" of torch's page on torch.amp.
ON_GPU = {
    "layer_norm": torch.float32,
    "softmax": torch.float32,
    "log_softmax": torch.float32,
    "softmax as asked for": torch.bfloat16,
    "pow": torch.float32,
    "rsqrt": torch.float32,
    "sum": torch.float32,
    "norm": torch.float32,
    "cumsum": torch.float32,
    "mean": torch.bfloat16,
    "whole numbers": torch.int64,
    "two dtypes": torch.float32,
    "gelu": torch.bfloat16,
    "matmul": torch.bfloat16,
}


def test_operators_run_in_the_dtypes_of_a_gpu():
    """Normalization and softmax save fp32 for backward on a GPU; afterwards the CPU behaves as before."""
    on_cpu = dtypes(False)
    assert dtypes(True) == ON_GPU
    assert dtypes(False) == on_cpu
    assert on_cpu["layer_norm"] == on_cpu["softmax"] == torch.bfloat16
    assert not torch.is_autocast_enabled()


def test_dropout_in_attention_keeps_no_scores():
    """On a CPU, attention with dropout saves every score, which fused attention avoids."""
    kept = {}
    for name, dropout in (("none", 0.0), ("as given", 0.1)):
        live = LiveStorages()
        with fake_tensors(), emulate_cuda(live), live:
            query = torch.zeros(1, 2, 64, 8, requires_grad=True)
            by_place = F.scaled_dot_product_attention(query, query, query, None, dropout)
            result = F.scaled_dot_product_attention(by_place, query, query, dropout_p=dropout)
            kept[name] = live.now
            del result
    assert kept["none"] == kept["as given"]


def test_offloaded_activations_leave_the_device():
    """Offloaded activations use host memory from forward to backward, and device memory again when backward reads
    them."""
    size = 8 * 16 * 4
    live = LiveStorages()
    with fake_tensors(), emulate_cuda(live):
        block = offload_wrapper(nn.Sequential(nn.Tanh(), nn.Tanh()))
        given = torch.zeros(8, 16, requires_grad=True)
        live.know([given])
        with live:
            result = block(given)
            assert (live.now, live.on_host) == (size, 2 * size)  # each Tanh saves its result
            result.sum().backward()
            del result
            assert live.on_host == 0
            assert live.host_peak == 2 * size
