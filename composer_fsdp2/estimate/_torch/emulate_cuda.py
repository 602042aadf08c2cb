"""Emulate a GPU's memory use while tracing fake tensors on the CPU.

CUDA's autocast has more fp32 operators than the CPU's: norms, softmax and powers run in fp32 and save fp32 tensors for
backward, where the CPU saves bf16. The lists below are those of ATen/autocast_mode.h, which
``tests/estimate/test_emulate_cuda.py`` checks. CPU autocast covers all lower-precision operators that matter for a
model's memory. CUDA's attention kernels apply dropout without saving a mask, and offloaded activations leave the
device.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from composer_fsdp2._torch.replaced import replaced
from composer_fsdp2.estimate._torch.live import LiveStorages

_names = str.split

# All tensor arguments are cast to fp32.
FP32 = _names(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim "
    "nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss "
    "multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits "
    "dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d "
    "_upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d "
    "_upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa"
)
# Called with dtype=torch.float32, unless the caller passes a dtype.
FP32_RESULT = _names(
    "prod prod.dim_int prod.dim_Dimname softmax.int softmax.Dimname log_softmax.int log_softmax.Dimname cumprod "
    "cumprod.dimname cumsum cumsum.dimname linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord sum "
    "sum.dim_IntList sum.dim_DimnameList norm.Scalar norm.ScalarOpt_dim norm.names_ScalarOpt_dim"
)
# All tensor arguments are cast to their widest dtype.
WIDEST = _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")

_HALF = (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def emulate_cuda(live: LiveStorages) -> Iterator[None]:
    """In the block, make autocast, attention and activation offloading of CPU tensors behave as on a GPU.

    Args:
        live: The tracker that counts offloaded activations as host memory.
    """
    library = torch.library.Library("aten", "IMPL")
    for name, overload, how in _operators():
        library.impl(name, partial(_run, overload, how), "AutocastCPU")
    try:
        with (
            _Attention(),
            replaced(torch, "is_autocast_enabled", _is_autocast_enabled),
            replaced(checkpoint_wrapper, "save_on_cpu", lambda **_: _saved_on_host(live)),
        ):
            yield
    finally:
        library._destroy()


_is_autocast_enabled_for = torch.is_autocast_enabled


def _is_autocast_enabled(*device_type: str) -> bool:
    """Without a device type, models query CUDA's autocast."""
    return _is_autocast_enabled_for(*device_type) if device_type else _is_autocast_enabled_for("cpu")


def _saved_on_host(live: LiveStorages) -> saved_tensors_hooks:
    """Replaces ``save_on_cpu``, which does not copy tensors that are already on the CPU."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        with live.host():
            return tensor.detach().clone()

    return saved_tensors_hooks(pack, torch.clone)


class _Attention(TorchFunctionMode):
    """Disables attention dropout: on the CPU it saves a mask for backward, on a GPU only the RNG state."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            args, kwargs = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args, {**kwargs}
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)


def _operators() -> Iterator[tuple[str, Any, Callable[..., Any]]]:
    """Yield (name, overload, implementation) of each operator that autocast casts on CUDA but not on the CPU."""
    for names, how in ((FP32, _in_fp32), (FP32_RESULT, _to_fp32), (WIDEST, _in_widest)):
        for name in names:
            if _has_kernel(name, "AutocastCUDA") and not _has_kernel(name, "AutocastCPU"):
                packet, _, overload = name.partition(".")
                yield name, getattr(getattr(torch.ops.aten, packet), overload or "default"), how


def _has_kernel(name: str, key: str) -> bool:
    has: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
    try:
        return has(f"aten::{name}", key)
    except RuntimeError:  # this version of torch lacks the operator
        return False


def _run(overload: Any, how: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch._C._DisableAutocast():
        return how(overload, args, kwargs)


def _in_fp32(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return overload(*_cast(args), **_cast(kwargs))


def _to_fp32(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = [each.name for each in overload._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    first = given.pop(names[0])
    if first.dtype not in _HALF or given.get("dtype") is not None:
        return overload(*args, **kwargs)
    if "dtype" not in names:  # norms have separate overloads with a dtype
        return overload(first.float(), **given)
    return overload(first, **{**given, "dtype": torch.float32})


def _in_widest(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = [each.dtype for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    return _in_fp32(overload, args, kwargs) if torch.float32 in given else overload(*args, **kwargs)


def _cast(value: Any) -> Any:
    """Cast bf16 and fp16 tensors to fp32; autocast leaves others unchanged."""
    return tree_map(
        lambda each: each.float() if isinstance(each, torch.Tensor) and each.dtype in _HALF else each, value
    )
