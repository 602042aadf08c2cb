"""transformers' own models, small and from a configuration, as a ComposerModel holds them."""

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
    """As a ComposerModel holds it."""
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


def mixture(architecture: str, num_experts: int, *, device: str = "meta") -> nn.Module:
    """A mixture of experts: Qwen3Moe, Qwen2Moe or Mixtral."""
    names = {"Mixtral": "num_local_experts"}
    sizes = {names.get(architecture, "num_experts"): num_experts, "num_experts_per_tok": 2, "head_dim": 4}
    of_experts = {} if architecture == "Mixtral" else {"moe_intermediate_size": 8}
    words = f"{architecture}Config {architecture}ForCausalLM"
    return build(words, **TEXT, **sizes, **of_experts, device=device)


def mpt(**config: Any) -> nn.Module:
    """LLM Foundry's."""
    from llmfoundry.models.mpt.modeling_mpt import MPTConfig, MPTForCausalLM

    model = nn.Module()
    sizes = {"d_model": 16, "n_heads": 2, "n_layers": 2, "vocab_size": TEXT["vocab_size"], "max_seq_len": 32}
    model.model = MPTForCausalLM(MPTConfig(**sizes, attn_config={"attn_impl": "torch"}, **config))
    return model


# The classes, the block, where adapters go, and sizes.
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
    """A ComposerModel with values from seed 0: so wide that the tokens that it generates are not all the same.

    Args:
        kind: gpt2, llama or t5, whose generation runs the encoder by itself.
        adapters: Peft's, which alone are trained then.
        hooks: Those that LLM Foundry puts on a Hugging Face model.
    """
    from composer.models import HuggingFaceModel

    words, block, targets, sizes = _TRAINED[kind]
    torch.manual_seed(0)
    inner = build(words, **sizes, vocab_size=TEXT["vocab_size"], **config, device="cpu").model.to(dtype)
    peft_config = None
    if adapters:
        from peft import LoraConfig

        task = "SEQ_2_SEQ_LM" if kind == "t5" else "CAUSAL_LM"
        # A second matrix of zeros would make the adapter no different from none.
        peft_config = LoraConfig(
            r=3, task_type=task, target_modules=targets, fan_in_fan_out=kind == "gpt2", init_lora_weights=False
        )
    model: Any = HuggingFaceModel(inner, tokenizer=None, use_logits=True, peft_config=peft_config)
    if hooks:
        model.model.fsdp_wrap_fn = lambda module: type(module).__name__ == block
        model.model.activation_checkpointing_fn = model.model.fsdp_wrap_fn
    return model
