"""What a GPU does otherwise than the CPU on which tensors without data are traced.

Its autocast has a longer list of operators: it normalizes, takes softmaxes and powers in fp32 and keeps fp32 for
backward, where a CPU keeps bf16. The lists are those of torch's ATen/autocast_mode.h, which
``tests/estimate/test_as_cuda.py`` reads. Of its operators in lower precision a CPU's autocast has all that models spend
memory on. Its attention kernels drop scores without keeping a mask. And offloaded activations leave its memory.
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

_words = str.split

# Every tensor among the arguments is cast to fp32.
FP32 = _words(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim "
    "nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss "
    "multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits "
    "dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d "
    "_upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d "
    "_upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa"
)
# Computed as if called with dtype=torch.float32, unless a dtype is given.
FP32_RESULT = _words(
    "prod prod.dim_int prod.dim_Dimname softmax.int softmax.Dimname log_softmax.int log_softmax.Dimname cumprod "
    "cumprod.dimname cumsum cumsum.dimname linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord sum "
    "sum.dim_IntList sum.dim_DimnameList norm.Scalar norm.ScalarOpt_dim norm.names_ScalarOpt_dim"
)
# Every tensor among the arguments is cast to the widest of their dtypes.
WIDEST = _words("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")

_HALF = (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def as_cuda(live: LiveStorages) -> Iterator[None]:
    """In the block autocast and attention of CPU tensors do what a GPU's do, and activations are offloaded to a host.

    Args:
        live: Told what lies in the host's memory.
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


_ask = torch.is_autocast_enabled


def _is_autocast_enabled(*device_type: str) -> bool:
    """Models that name no device ask for CUDA's."""
    return _ask(*device_type) if device_type else _ask("cpu")


def _saved_on_host(live: LiveStorages) -> saved_tensors_hooks:
    """In place of ``save_on_cpu``, for which a tensor of the CPU is there already."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        with live.host():
            return tensor.detach().clone()

    return saved_tensors_hooks(pack, torch.clone)


class _Attention(TorchFunctionMode):
    """Attention without dropout, which keeps a state of the random numbers on a GPU, and a mask on a CPU."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            args, kwargs = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args, {**kwargs}
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)


def _operators() -> Iterator[tuple[str, Any, Callable[..., Any]]]:
    """Those that CUDA's autocast has here and a CPU's has not, and what becomes of a call."""
    for names, how in ((FP32, _in_fp32), (FP32_RESULT, _to_fp32), (WIDEST, _in_widest)):
        for name in names:
            if _has_kernel(name, "AutocastCUDA") and not _has_kernel(name, "AutocastCPU"):
                packet, _, overload = name.partition(".")
                yield name, getattr(getattr(torch.ops.aten, packet), overload or "default"), how


def _has_kernel(name: str, key: str) -> bool:
    has: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
    try:
        return has(f"aten::{name}", key)
    except RuntimeError:  # this torch has no such operator
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
    if "dtype" not in names:  # norms have overloads of their own for it
        return overload(first.float(), **given)
    return overload(first, **{**given, "dtype": torch.float32})


def _in_widest(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = [each.dtype for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    return (_in_fp32 if torch.float32 in given else _as_is)(overload, args, kwargs)


def _as_is(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return overload(*args, **kwargs)


def _cast(value: Any) -> Any:
    """Floating point tensors of lower precision to fp32; others are not eligible."""
    return tree_map(
        lambda each: each.float() if isinstance(each, torch.Tensor) and each.dtype in _HALF else each, value
    )
