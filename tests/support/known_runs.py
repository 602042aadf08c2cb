"""Facts about the runs in ``yamls/``, written independently of the files: ``from support.known_runs import PAIRS,
configs``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "yamls"


@dataclass(frozen=True, kw_only=True)
class Run:
    """Facts about a pair of files, independent of their text.

    Args:
        ranks: The number of ranks that it is written for.
        parameters: As published with the model; by formula for models trained from scratch.
        config: The model's configuration on the hub, by ``configs``; None: the file describes it.
        replaced: Keys of components that cannot be built here, or of weights.
        decisions: Keys that ``migrate`` leaves to the user.
        right: Values, under Composer's keys, with which the right side uses transformers' model.
        is_quick: Whether it is planned even when only one run of each kind is.
        blocks: The path of the blocks, and their number.
        others: The other units with parameters.
        experts: The path of experts that are units, and their number; they are not checkpointed.
        reshard: Whether a block reshards after forward.
        mesh: Replicas and shards, or shards and TP ranks; None: every rank has a shard.
        dtypes: Of parameters in forward, of the gradient reduction, and of buffers.
        recomputed: The number of checkpointed modules, the kind of checkpointing, and the prefetch.
        has_no_blocks: Whether checkpointing is on for a model that names no modules for it.
        split_experts: The units with experts that are EP-sharded over 8 ranks.
        tied: Modules that share a weight.
    """

    ranks: int
    parameters: int
    blocks: Mapping[str, int]
    others: tuple[str, ...]
    config: str | None = None
    replaced: frozenset[str] = frozenset()
    decisions: frozenset[str] = frozenset()
    right: tuple[str, ...] = ()
    is_quick: bool = True
    experts: Mapping[str, int] | None = None
    reshard: bool = True
    mesh: tuple[int, int] | None = None
    dtypes: tuple[str | None, ...] = ("bfloat16", "bfloat16", "bfloat16")
    recomputed: int = 0
    has_no_blocks: bool = False
    reentrant: bool = False
    offloads: bool = False
    forward_prefetch: int = 0
    backward_prefetch: int | None = None
    split_experts: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()


# --- how many parameters


def mpt(width: int, blocks: int, *, vocabulary: int = 50368, positions: int = 2048, biases: bool = True) -> int:
    """LLM Foundry's MPT with a feed-forward of four times the width, and tied embeddings.

    Each block has 3 + 1 squares of attention, 8 of the feed-forward, and two norms.
    """
    of_biases = (3 + 1 + 4 + 1 + 2) * width if biases else 0
    norm = (2 if biases else 1) * width
    return blocks * (12 * width**2 + 2 * width + of_biases) + norm + (vocabulary + positions) * width


def grouped(width: int, blocks: int, *, feed_forwards: int, hidden: int, routers: int = 0) -> int:
    """An MPT with 8 key and value heads of width 128, gated feed-forwards, no biases and a separate output layer."""
    attention = 2 * width**2 + 2 * 8 * 128 * width
    block = attention + 3 * feed_forwards * width * hidden + routers * width + 2 * width
    return blocks * block + width + 2 * 50368 * width


LLAMA_3_8B = 8_030_261_248
ADAPTERS = 41_943_040  # rank 16 on all seven linear layers
DBRX_LIKE = grouped(6144, 40, feed_forwards=16, hidden=10752, routers=16)
ATTENTION, LOSS = "model.attn_config.attn_impl", "model.loss_fn"
KERNELS = frozenset({ATTENTION, LOSS})
WEIGHTS = frozenset({"model.pretrained", "model.init_device"})
FLASH = "model.use_flash_attention_2"
SUMS_IN_FP32 = ("bfloat16", "float32", "bfloat16")
LAYERS = "model.model.layers"


def of_mpt(ranks: int, num_blocks: int, *others: str, parameters: int, **known: Any) -> Run:
    """A run of LLM Foundry's own model. Each of its blocks, its embeddings and its last norm are units."""
    units = (*(f"model.transformer.{name}" for name in ("wte", *others, "norm_f") if name != "lm_head"),)
    head = ("model.lm_head",) if "lm_head" in others else ()
    known = {"replaced": KERNELS, "blocks": {"model.transformer.blocks": num_blocks}} | known
    return Run(ranks=ranks, parameters=parameters, others=(*units, *head), **known)


def of_llama(ranks: int, num_layers: int, parameters: int, config: str, **known: Any) -> Run:
    """A run of a transformers decoder. Each layer is a unit, and the rest of the model is one more."""
    known = {"blocks": {LAYERS: num_layers}, "others": ("model",), "recomputed": num_layers} | known
    return Run(ranks=ranks, parameters=parameters, config=config, **known)


def of_t5(parameters: int, config: str, num_blocks: int, *tied: str, **known: Any) -> Run:
    blocks = {f"model.{coder}.block": num_blocks for coder in ("encoder", "decoder")}
    tied = ("model.decoder.embed_tokens", "model.encoder.embed_tokens", *tied, "model.shared")
    return Run(
        ranks=8, parameters=parameters, config=config, blocks=blocks, others=("model",), replaced=WEIGHTS, tied=tied,
        **known,
    )  # fmt: skip


LORA_LAYERS = "model.base_model.model.model.layers"
LORA = tuple(
    f"{LORA_LAYERS}.{layer}.{linear}_proj.lora_{matrix}.default"
    for layer in range(32)
    for linear in (*(f"self_attn.{name}" for name in "qkvo"), "mlp.gate", "mlp.up", "mlp.down")
    for matrix in "AB"
)
FOUNDRY = {
    "mpt/mpt-125m": of_mpt(
        8, 12, "wpe", parameters=mpt(768, 12), reshard=False, mesh=(8, 1), dtypes=SUMS_IN_FP32
    ),
    # Norms of the queries and the keys.
    "mpt/mpt-350m": of_mpt(
        8, 24, "wpe", parameters=mpt(1024, 24) + 24 * 4 * 1024, reshard=False, dtypes=SUMS_IN_FP32, recomputed=24,
        reentrant=True,
    ),
    "mpt/mpt-760m": of_mpt(8, 24, parameters=mpt(1536, 24, positions=0), forward_prefetch=1),
    "mpt/mpt-1b": of_mpt(64, 24, "wpe", parameters=mpt(2048, 24), recomputed=24, is_quick=False),
    "mpt/mpt-3b": of_mpt(
        64, 32, "wpe", parameters=mpt(2560, 32), recomputed=32, forward_prefetch=2, backward_prefetch=2
    ),
    "mpt/mpt-7b": of_mpt(32, 32, parameters=6_649_286_656, mesh=(4, 8), dtypes=SUMS_IN_FP32, recomputed=32),
    # TP-sharded over 2 ranks.
    "mpt/mpt-7b-tp": of_mpt(32, 32, parameters=6_649_286_656, mesh=(16, 2), recomputed=32),
    "mpt/mpt-13b": of_mpt(
        64, 40, "wpe", parameters=mpt(5120, 40), replaced=KERNELS | {"model.init_device"}, recomputed=40,
        offloads=True, backward_prefetch=0,
    ),
    "mpt/mpt-30b": of_mpt(
        256, 48, "wpe", "lm_head", parameters=mpt(7168, 48) + 50368 * 7168, recomputed=32
    ),
    "mpt/mpt-70b": of_mpt(
        512, 80, "lm_head", parameters=grouped(8192, 80, feed_forwards=1, hidden=28672), reshard=False, mesh=(8, 64),
        recomputed=80, is_quick=False,
    ),
    "dbrx/dbrx-like-torch": of_mpt(
        512, 40, "lm_head", parameters=DBRX_LIKE, reshard=False, mesh=(8, 64), recomputed=40
    ),
    "dbrx/dbrx-like-experts": of_mpt(
        64, 40, "lm_head", parameters=DBRX_LIKE, recomputed=40,
        split_experts=tuple(f"model.transformer.blocks.{number}.ffn.experts" for number in range(40)),
    ),
    "dbrx/dbrx-like-megablocks": of_mpt(
        128, 40, "lm_head", parameters=DBRX_LIKE, replaced=KERNELS | {"model.ffn_config.ffn_type"},
        dtypes=SUMS_IN_FP32, recomputed=40,
    ),
    "dbrx/dbrx-instruct": of_llama(
        64, 40, 131_596_523_520, "dbrx", blocks={"model.transformer.blocks": 40},
        replaced=WEIGHTS | {"model.attn_implementation"}, offloads=True,
    ),
    "llama/llama2-7b-full": of_llama(8, 32, 6_738_415_616, "llama 2 7b", replaced=WEIGHTS | {FLASH}),
    "llama/llama2-70b-full": of_llama(
        64, 80, 68_976_648_192, "llama 2 70b", replaced=frozenset({FLASH}), dtypes=("bfloat16", "float32", None),
        is_quick=False,
    ),
    "llama/llama3-8b-lora": of_llama(
        8, 32, LLAMA_3_8B + ADAPTERS, "llama 3 8b", replaced=WEIGHTS | {FLASH}, blocks={LORA_LAYERS: 32},
        others=("model", *LORA),
        dtypes=(None, None, None),  # Foundry: the stored weights are bf16
    ),
    "t5/t5-base": of_t5(222_903_552, "t5 base", 12, "model.lm_head", reshard=False, dtypes=(None, None, None)),
    "t5/flan-t5-xl": of_t5(
        2_849_757_184, "flan t5 xl", 24, dtypes=SUMS_IN_FP32, recomputed=48, reentrant=True, is_quick=False
    ),
}  # fmt: skip
NOT_TRANSFORMERS = tuple(
    f"fsdp_config.{key}=auto"
    for key in ("wrap_policy.transformer_layer_cls_to_wrap", "activation_checkpointing_policy")
)
# 8 of the 128 experts, each with three matrices, and their rows of the routers.
QWEN_3_30B_OF_8 = 30_532_122_624 - 48 * 120 * (3 * 2048 * 768 + 2048)
FULL_SUMS: dict[str, Any] = {"dtypes": ("bfloat16", "float32", None)}
EMBEDDED, TITANS = ("model.model.embed_tokens", "model"), ("model.model.embed_tokens", "model.lm_head", "model")
OTHERS = {
    ("accelerate/llama-full-fsdp1.yaml", "accelerate/llama-full-fsdp2.yaml"): of_llama(
        8, 32, 6_738_415_616, "llama 2 7b", recomputed=0, backward_prefetch=0,
    ),
    ("accelerate/llama-hybrid-fsdp1.yaml", "accelerate/llama-hybrid-fsdp2.yaml"): of_llama(
        16, 32, 6_738_415_616, "llama 2 7b", mesh=(2, 8)
    ),
    ("huggingface/llama-sft-fsdp1.yaml", "huggingface/llama-sft-fsdp2.yaml"): of_llama(
        8, 32, LLAMA_3_8B, "llama 3 8b"
    ),
    # All prefixed keys were ignored: one unit, as large as the model.
    ("huggingface/qwen3-moe-distillation-fsdp1.yaml", "huggingface/qwen3-moe-distillation-fsdp2.yaml"): of_llama(
        8, 48, QWEN_3_30B_OF_8, "qwen 3 30b, of 8 experts", blocks={},
        # Keys that are not read at this place: the user decides whether they apply.
        decisions=frozenset(
            f"fsdp_config.fsdp_{key}"
            for key in ("auto_wrap_policy", "min_num_params", "transformer_layer_cls_to_wrap")
        ),
    ),
    ("roll/text-qwen3-8b-roll.yaml", "roll/text-qwen3-8b-composer.yaml"): of_llama(
        16, 36, 8_190_735_360, "qwen 3 8b", others=EMBEDDED, **FULL_SUMS
    ),
    ("roll/vision-language-qwen2.5-vl-7b-roll.yaml", "roll/vision-language-qwen2.5-vl-7b-composer.yaml"): of_llama(
        8, 28, 8_292_166_656, "qwen 2.5 vl 7b", blocks={LAYERS: 28, "model.visual.blocks": 32}, others=EMBEDDED,
        mesh=(2, 4), recomputed=60, **FULL_SUMS,
    ),
    ("roll/moe-qwen3-30b-a3b-roll.yaml", "roll/moe-qwen3-30b-a3b-composer.yaml"): of_llama(
        16, 48, QWEN_3_30B_OF_8, "qwen 3 30b, of 8 experts", others=EMBEDDED,
        experts={f"{LAYERS}.{number}.mlp.experts": 8 for number in range(48)}, **FULL_SUMS,
    ),
    ("torchtitan/llama3-8b-torchtitan.toml", "torchtitan/llama3-8b-composer.yaml"): of_llama(
        32, 32, LLAMA_3_8B, "llama 3 8b", right=NOT_TRANSFORMERS, others=TITANS, mesh=(4, 8), **FULL_SUMS
    ),
    ("torchtitan/llama3-70b-torchtitan.toml", "torchtitan/llama3-70b-composer.yaml"): of_llama(
        256, 80, 70_553_706_496, "llama 3 70b", right=NOT_TRANSFORMERS, others=TITANS,
        mesh=(32, 8), **FULL_SUMS,
    ),
    # transformers' models have no activation_checkpointing_fn, without which Composer checkpoints nothing.
    ("composer/gpt2-script-fsdp1.yaml", "composer/gpt2-script-fsdp2.yaml"): Run(
        ranks=8, parameters=124_439_808, config="gpt 2", blocks={"model.transformer.h": 12}, others=("model",),
        dtypes=("float16", "float16", "float32"), has_no_blocks=True, tied=("model.lm_head", "model.transformer.wte"),
    ),
    ("composer/llama-tp-script-fsdp1.yaml", "composer/llama-tp-script-fsdp2.yaml"): of_llama(
        8, 32, 6_738_415_616, "llama 2 7b", reshard=False, dtypes=SUMS_IN_FP32, recomputed=0,
        has_no_blocks=True,
    ),
}  # fmt: skip
PAIRS = {(f"{name}-fsdp1.yaml", f"{name}-fsdp2.yaml"): run for name, run in FOUNDRY.items()} | OTHERS


def configs() -> dict[str, Any]:
    """The ``config.json`` of these models, from transformers' own classes."""
    from transformers import (
        DbrxConfig,
        GPT2Config,
        LlamaConfig,
        Qwen2_5_VLConfig,
        Qwen3Config,
        Qwen3MoeConfig,
        T5Config,
    )

    large = {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    }
    third = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}
    qwen = {"vocab_size": 151936, "num_attention_heads": 32, "head_dim": 128, "max_position_embeddings": 40960}
    experts = qwen | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
    }
    return {
        "llama 2 7b": LlamaConfig(),
        "llama 2 70b": LlamaConfig(**large),
        "llama 3 8b": LlamaConfig(**third, intermediate_size=14336),
        "llama 3 70b": LlamaConfig(**large | third),
        "qwen 3 8b": Qwen3Config(
            **qwen, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_key_value_heads=8
        ),
        "qwen 3 30b, of 8 experts": Qwen3MoeConfig(**experts, num_experts=8),
        "qwen 2.5 vl 7b": Qwen2_5_VLConfig(
            hidden_size=3584,
            intermediate_size=18944,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
            vocab_size=152064,
            max_position_embeddings=128000,
            rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
            vision_config={
                "depth": 32,
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "num_heads": 16,
                "out_hidden_size": 3584,
            },
        ),
        "dbrx": DbrxConfig(
            d_model=6144,
            n_heads=48,
            n_layers=40,
            vocab_size=100352,
            attn_config={"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 5e5},
            ffn_config={"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
        ),
        "t5 base": T5Config(d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0),
        "flan t5 xl": T5Config(
            d_model=2048,
            d_kv=64,
            d_ff=5120,
            num_layers=24,
            num_heads=32,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
            decoder_start_token_id=0,
        ),
        "gpt 2": GPT2Config(),
    }
