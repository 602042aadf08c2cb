"""ROLL's words for dtypes and models."""

from composer_fsdp2.config.sharding import DTYPES_BY_SHORT_NAME

STRATEGIES = ("fsdp2_train", "fsdp2_infer")
DTYPES = {
    **{name: dtype for short, dtype in DTYPES_BY_SHORT_NAME.items() for name in (short, dtype)},
    "half": "float16",
    "float": "float32",
}
# By model_type, the MLPs that it can tile (verl's tiled_mlp.py, of which ROLL has a copy).
MLPS = {
    "llama": "LlamaMLP",
    "qwen2": "Qwen2MLP",
    "qwen2_5": "Qwen2MLP",
    "qwen3": "Qwen3MLP",
    "qwen3_moe": "Qwen3MoeMLP",
}
# What it clips gradients to where the top of the file has no max_grad_norm.
GRAD_NORM = 1.0
PRECISIONS = {"bfloat16": "amp_bf16", "float16": "amp_fp16"}


def dtype_of(name: str | None, default: str) -> str:
    return default if name is None else DTYPES[name.lower()]


def word_of(dtype: str) -> str:
    return next((name for name, each in DTYPES.items() if each == dtype), dtype)
