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
