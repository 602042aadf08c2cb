"""Small transformers models built from their configuration, nested like a ComposerModel."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

TEXT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 67,
}
IMAGES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def build(architecture: str, *, device: str = "meta", **config: Any) -> nn.Module:
    """Nested like a ComposerModel."""
    import transformers

    model = nn.Module()
    with torch.device(device):
        config_class, model_class = (getattr(transformers, name) for name in architecture.split())
        model.model = model_class(config_class(**config))
    return model


IMAGE_TOKEN = 66


def qwen_vl(device: str = "meta") -> nn.Module:
    return build(
        "Qwen2_5_VLConfig Qwen2_5_VLForConditionalGeneration",
        **TEXT,
        rope_scaling={"type": "mrope", "mrope_section": [1, 1, 0]},
        vision_config={"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 16},
        image_token_id=IMAGE_TOKEN,
        video_token_id=IMAGE_TOKEN - 2,
        vision_start_token_id=IMAGE_TOKEN - 1,
        device=device,
    )


def llava(device: str = "meta") -> nn.Module:
    from transformers import CLIPVisionConfig, LlamaConfig

    parts = {"vision_config": CLIPVisionConfig(**IMAGES), "text_config": LlamaConfig(**TEXT)}
    return build("LlavaConfig LlavaForConditionalGeneration", **parts, image_token_index=IMAGE_TOKEN, device=device)


def mllama(device: str = "meta") -> nn.Module:
    """Its second layer attends to an image through a gate, which is zero initially; here it is opened."""
    images = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_global_layers": 1,
        "attention_heads": 2, "image_size": 28, "patch_size": 14, "vision_output_dim": 32, "max_num_tiles": 1,
        "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]]}  # fmt: skip
    layers = {"num_hidden_layers": 3, "cross_attention_layers": [1], "rope_scaling": {"rope_type": "default"}}
    model = build(
        "MllamaConfig MllamaForConditionalGeneration",
        vision_config=images,
        text_config=TEXT | layers | {"pad_token_id": 0},
        image_token_index=IMAGE_TOKEN,
        device=device,
    )
    for name, parameter in model.named_parameters():
        if "gate" in name and parameter.dim() == 1 and "gate_proj" not in name:
            nn.init.constant_(parameter, 0.5)
    return model


# By configuration of a mixture of experts: the key for the number of experts, and additional sizes.
_MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("num_local_experts", {"head_dim": 4}),
    "Qwen2Moe": ("num_experts", {"moe_intermediate_size": 8}),
    "Qwen3Moe": ("num_experts", {"moe_intermediate_size": 8, "head_dim": 4}),
    "Olmoe": ("num_experts", {}),
    "DeepseekV3": ("n_routed_experts", {
        "moe_intermediate_size": 8, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "q_lora_rank": 8,
        "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "num_key_value_heads": 4}),
}  # fmt: skip


def mixture(architecture: str, num_experts: int, *, device: str = "meta") -> nn.Module:
    """A mixture of experts: one of ``_MIXTURES``."""
    name, sizes = _MIXTURES[architecture]
    words = f"{architecture}Config {architecture}ForCausalLM"
    return build(words, **TEXT | sizes | {name: num_experts, "num_experts_per_tok": 2}, device=device)


_NUM_EXPERTS = 4
_OF_EXPERTS = {
    "num_experts": _NUM_EXPERTS,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": _NUM_EXPERTS, "head_dim": 4},
    "Qwen2Moe": _OF_EXPERTS | {"shared_expert_intermediate_size": 12},
    "Qwen3Moe": _OF_EXPERTS | {"head_dim": 4, "norm_topk_prob": False},
    "Olmoe": {"num_experts": _NUM_EXPERTS},
    "DeepseekV3": {
        "n_routed_experts": _NUM_EXPERTS, "moe_intermediate_size": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "n_group": 2, "topk_group": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4, "v_head_dim": 4, "num_key_value_heads": 4,
    },
}  # fmt: skip


def small_mixture(architecture: str, num_layers: int = 1, **config: Any) -> Any:
    """transformers' own model with 4 experts, with weights large enough that tokens choose different ones.

    Args:
        num_layers: The number of layers with experts.
    """
    import transformers

    sizes = TEXT | {"num_hidden_layers": num_layers, "num_experts_per_tok": 2, "initializer_range": 0.4}
    if architecture == "DeepseekV3":
        sizes["num_hidden_layers"] += 1  # the first is dense
    config_class, model_class = (getattr(transformers, architecture + end) for end in ("Config", "ForCausalLM"))
    model = model_class(config_class(**sizes | MIXTURES[architecture] | config))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # float64 needs this implementation of transformers 5
    return model


def mpt(**config: Any) -> nn.Module:
    """LLM Foundry's MPT."""
    from llmfoundry.models.mpt.modeling_mpt import MPTConfig, MPTForCausalLM

    model = nn.Module()
    sizes = {"d_model": 16, "n_heads": 2, "n_layers": 2, "vocab_size": TEXT["vocab_size"], "max_seq_len": 32}
    model.model = MPTForCausalLM(MPTConfig(**sizes, attn_config={"attn_impl": "torch"}, **config))
    return model


# The classes, the block, the modules that adapters attach to, and sizes.
_TRAINED: dict[str, tuple[str, str, list[str], dict[str, Any]]] = {
    "gpt2": ("GPT2Config GPT2LMHeadModel", "GPT2Block", ["c_attn"], {
        "n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 32, "initializer_range": 0.5, "bos_token_id": 1,
        "eos_token_id": 2, **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)}),
    "llama": ("LlamaConfig LlamaForCausalLM", "LlamaDecoderLayer", ["q_proj", "v_proj"], {
        "hidden_size": 16, "intermediate_size": 26, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 32, "initializer_range": 0.5}),
    "t5": ("T5Config T5ForConditionalGeneration", "T5Block", ["q", "v"], {
        "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
        "initializer_factor": 3.0, "decoder_start_token_id": 0}),
}  # fmt: skip
BLOCKS = {kind: block for kind, (_, block, *_) in _TRAINED.items()}


def hugging_face(
    kind: str, *, adapters: bool = False, hooks: bool = True, dtype: torch.dtype = torch.float64, **config: Any
) -> Any:
    """A ComposerModel initialised with seed 0, with weights large enough that its generated tokens differ.

    Args:
        kind: gpt2, llama or t5, whose generation calls the encoder directly.
        adapters: Adds peft's adapters, which are then the only trainable parameters.
        hooks: Adds LLM Foundry's hooks for a Hugging Face model.
    """
    from composer.models import HuggingFaceModel

    words, block, targets, sizes = _TRAINED[kind]
    torch.manual_seed(0)
    inner = build(words, **sizes, vocab_size=TEXT["vocab_size"], **config, device="cpu").model.to(dtype)
    peft_config = None
    if adapters:
        from peft import LoraConfig

        task = "SEQ_2_SEQ_LM" if kind == "t5" else "CAUSAL_LM"
        # With a zero second matrix, an adapter would have no effect.
        peft_config = LoraConfig(
            r=3, task_type=task, target_modules=targets, fan_in_fan_out=kind == "gpt2", init_lora_weights=False
        )
    model: Any = HuggingFaceModel(inner, tokenizer=None, use_logits=True, peft_config=peft_config)
    if hooks:
        model.model.fsdp_wrap_fn = lambda module: type(module).__name__ == block
        model.model.activation_checkpointing_fn = model.model.fsdp_wrap_fn
    return model
