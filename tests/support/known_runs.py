"""What is known of the runs in ``yamls/`` without reading them: ``from support.known_runs import PAIRS, configs``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "yamls"


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is known of a pair of files, without reading them.

    Args:
        ranks: That it is meant for.
        parameters: As published with the model; of those from scratch by their formula.
        config: Of the model on the hub, by ``CONFIGS``; None: the file describes it.
        replaced: Keys of what cannot be built here, or needs no weights.
        decisions: Keys of what is left to decide.
        right: The values, in the words of Composer, that make the right side's model transformers'.
    """

    ranks: int
    parameters: int
    config: str | None = None
    replaced: frozenset[str] = frozenset()
    decisions: frozenset[str] = frozenset()
    right: tuple[str, ...] = field(default=())


# --- how many parameters


def mpt(width: int, blocks: int, *, vocabulary: int = 50368, positions: int = 2048, biases: bool = True) -> int:
    """Of LLM Foundry's MPT with a feed-forward of four times the width, and tied embeddings.

    Each block has 3 + 1 squares of attention, 8 of the feed-forward, and two norms.
    """
    of_biases = (3 + 1 + 4 + 1 + 2) * width if biases else 0
    norm = (2 if biases else 1) * width
    return blocks * (12 * width**2 + 2 * width + of_biases) + norm + (vocabulary + positions) * width


def grouped(width: int, blocks: int, *, feed_forwards: int, hidden: int, routers: int = 0) -> int:
    """Of an MPT with 8 key and value heads of 128, gated feed-forwards, no biases and an output layer of its own."""
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

FOUNDRY = {
    "mpt/mpt-125m": Run(ranks=8, parameters=mpt(768, 12), replaced=KERNELS),
    # Norms of the queries and the keys.
    "mpt/mpt-350m": Run(ranks=8, parameters=mpt(1024, 24) + 24 * 4 * 1024, replaced=KERNELS),
    "mpt/mpt-760m": Run(ranks=8, parameters=mpt(1536, 24, positions=0), replaced=KERNELS),
    "mpt/mpt-1b": Run(ranks=64, parameters=mpt(2048, 24), replaced=KERNELS),
    "mpt/mpt-3b": Run(ranks=64, parameters=mpt(2560, 32), replaced=KERNELS),
    "mpt/mpt-7b": Run(ranks=32, parameters=6_649_286_656, replaced=KERNELS),
    "mpt/mpt-7b-tp": Run(ranks=32, parameters=6_649_286_656, replaced=KERNELS),
    "mpt/mpt-13b": Run(ranks=64, parameters=mpt(5120, 40), replaced=KERNELS | {"model.init_device"}),
    "mpt/mpt-30b": Run(ranks=256, parameters=mpt(7168, 48) + 50368 * 7168, replaced=KERNELS),
    "mpt/mpt-70b": Run(ranks=512, parameters=grouped(8192, 80, feed_forwards=1, hidden=28672), replaced=KERNELS),
    "dbrx/dbrx-like-torch": Run(ranks=512, parameters=DBRX_LIKE, replaced=KERNELS),
    "dbrx/dbrx-like-experts": Run(ranks=64, parameters=DBRX_LIKE, replaced=KERNELS),
    "dbrx/dbrx-like-megablocks": Run(ranks=128, parameters=DBRX_LIKE, replaced=KERNELS | {"model.ffn_config.ffn_type"}),
    "dbrx/dbrx-instruct": Run(
        ranks=64, parameters=131_596_523_520, config="dbrx", replaced=WEIGHTS | {"model.attn_implementation"}
    ),
    "llama/llama2-7b-full": Run(ranks=8, parameters=6_738_415_616, config="llama 2 7b", replaced=WEIGHTS | {FLASH}),
    "llama/llama2-70b-full": Run(
        ranks=64, parameters=68_976_648_192, config="llama 2 70b", replaced=frozenset({FLASH})
    ),
    "llama/llama3-8b-lora": Run(
        ranks=8, parameters=LLAMA_3_8B + ADAPTERS, config="llama 3 8b", replaced=WEIGHTS | {FLASH}
    ),
    "t5/t5-base": Run(ranks=8, parameters=222_903_552, config="t5 base", replaced=WEIGHTS),
    "t5/flan-t5-xl": Run(ranks=8, parameters=2_849_757_184, config="flan t5 xl", replaced=WEIGHTS),
}
NOT_TRANSFORMERS = tuple(
    f"fsdp_config.{key}=auto"
    for key in ("wrap_policy.transformer_layer_cls_to_wrap", "activation_checkpointing_policy")
)
QWEN_3_30B = 30_532_122_624
OTHERS = {
    ("accelerate/llama-full-fsdp1.yaml", "accelerate/llama-full-fsdp2.yaml"): Run(
        ranks=8,
        parameters=6_738_415_616,
        config="llama 2 7b",
        # Hugging Face knows no such key; whether it was meant is not in the file.
        decisions=frozenset({"fsdp_config.fsdp_backward_prefetch_policy"}),
    ),
    ("accelerate/llama-hybrid-fsdp1.yaml", "accelerate/llama-hybrid-fsdp2.yaml"): Run(
        ranks=16, parameters=6_738_415_616, config="llama 2 7b"
    ),
    ("huggingface/llama-sft-fsdp1.yaml", "huggingface/llama-sft-fsdp2.yaml"): Run(
        ranks=8, parameters=LLAMA_3_8B, config="llama 3 8b"
    ),
    (
        "huggingface/qwen3-moe-distillation-fsdp1.yaml",
        "huggingface/qwen3-moe-distillation-fsdp2.yaml",
    ): Run(
        ranks=8,
        # Half of the experts, each of three matrices, and their lines of the routers.
        parameters=QWEN_3_30B - 48 * 64 * (3 * 2048 * 768 + 2048),
        config="qwen 3 30b, halved",
        # Not read where they stand: as trained or as written is the user's to say.
        decisions=frozenset(
            f"fsdp_config.fsdp_{key}"
            for key in ("auto_wrap_policy", "backward_prefetch", "min_num_params", "transformer_layer_cls_to_wrap")
        ),
    ),
    ("roll/text-qwen3-8b-roll.yaml", "roll/text-qwen3-8b-composer.yaml"): Run(
        ranks=16, parameters=8_190_735_360, config="qwen 3 8b"
    ),
    (
        "roll/vision-language-qwen2.5-vl-7b-roll.yaml",
        "roll/vision-language-qwen2.5-vl-7b-composer.yaml",
    ): Run(ranks=8, parameters=8_292_166_656, config="qwen 2.5 vl 7b"),
    ("roll/moe-qwen3-30b-a3b-roll.yaml", "roll/moe-qwen3-30b-a3b-composer.yaml"): Run(
        ranks=16, parameters=QWEN_3_30B, config="qwen 3 30b"
    ),
    ("torchtitan/llama3-8b-torchtitan.toml", "torchtitan/llama3-8b-composer.yaml"): Run(
        ranks=32, parameters=LLAMA_3_8B, config="llama 3 8b", right=NOT_TRANSFORMERS
    ),
    ("torchtitan/llama3-70b-torchtitan.toml", "torchtitan/llama3-70b-composer.yaml"): Run(
        ranks=256,
        parameters=70_553_706_496,
        config="llama 3 70b",
        decisions=frozenset({"tensor parallelism"}),
        right=NOT_TRANSFORMERS,
    ),
    ("composer/gpt2-script-fsdp1.yaml", "composer/gpt2-script-fsdp2.yaml"): Run(
        ranks=8, parameters=124_439_808, config="gpt 2"
    ),
    ("composer/llama-tp-script-fsdp1.yaml", "composer/llama-tp-script-fsdp2.yaml"): Run(
        ranks=8,
        parameters=6_738_415_616,
        config="llama 2 7b",
        decisions=frozenset({"trainer.parallelism_config.tp"}),
    ),
}
PAIRS = {(f"{name}-fsdp1.yaml", f"{name}-fsdp2.yaml"): run for name, run in FOUNDRY.items()} | OTHERS


def configs() -> dict[str, Any]:
    """What the ``config.json`` of these models says, by transformers' own classes."""
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
        "qwen 3 30b": Qwen3MoeConfig(**experts, num_experts=128),
        "qwen 3 30b, halved": Qwen3MoeConfig(**experts, num_experts=64),
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
