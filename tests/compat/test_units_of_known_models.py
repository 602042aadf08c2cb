"""The units that a policy chooses in transformers' and LLM Foundry's models: the plan names modules that a batch may
skip."""

from __future__ import annotations

from typing import Any

import pytest
from support.cases import for_each
from support.known_models import IMAGES, TEXT, build, llava, mllama, mpt, qwen_vl
from support.on_ranks import on_ranks
from torch import nn

from composer_fsdp2 import ShardingConfig, UnsupportedError, plan_sharding
from composer_fsdp2.config.wrap import Wrap, WrapKind
from composer_fsdp2.sharding.modality_towers import find_towers

pytestmark = [pytest.mark.composer, pytest.mark.foundry]

AUTO = Wrap(kind=WrapKind.CLASSES)


def notes_of(model: nn.Module, wrap: Wrap) -> list[str]:
    return [note for note in plan_sharding(model, ShardingConfig(wrap=wrap)).notes if "wrap_policy" in note]


@on_ranks(1)
def test_units_in_a_tower_are_told(folder: str):
    """A rank whose batch is text only never gathers them: the run aborts or hangs at the first such batch."""

    def check(model_of: Any, tower: str, first: str, layer: str) -> None:
        model = model_of()
        assert find_towers(dict(model.named_modules())) == [tower]
        ends = Wrap(kind=WrapKind.CLASSES, embeddings=True, output=True)
        for wrap in (AUTO, ends):
            [note] = notes_of(model, wrap)
            assert f"units in {tower} (" in note and f"does not use: {tower}.{first} and 1 more. Unless" in note
            assert note.endswith(f"for any batch, too: transformer_layer_cls_to_wrap: [{layer}]")
        by_size = Wrap(kind=WrapKind.SIZE, min_num_params=1000)
        assert any(f"units in {tower} (" in note for note in notes_of(model, by_size))
        plan = plan_sharding(model, ShardingConfig(wrap=Wrap(kind=WrapKind.CLASSES, classes=(layer,))))
        assert len(plan.units) == 3 and not plan.notes  # follows the note's advice

    cases = {
        "qwen_vl": (qwen_vl, "model.visual", "blocks.0", "Qwen2_5_VLDecoderLayer"),
        "llava": (llava, "model.vision_tower", "vision_model.encoder.layers.0", "LlamaDecoderLayer"),
    }
    for_each(check, cases)


@on_ranks(1)
def test_what_trains_in_a_tower_alone_is_told(folder: str):
    """LoRA and a projector: a rank with text only has no gradient to reduce where the others reduce the root's."""
    text = [f"model.language_model.{name}" for name in ("model.embed_tokens", "model.norm", "lm_head")]
    layers = Wrap(kind=WrapKind.CLASSES, classes=("LlamaDecoderLayer",))

    def notes(*frozen: str) -> tuple[str, ...]:
        return plan_sharding(llava(), ShardingConfig(wrap=layers, freeze=frozen)).notes

    [note] = notes("model.vision_tower", *text)
    assert note.startswith("all trained parameters of the unit around model.multi_modal_projector are in towers")
    assert not notes("model.vision_tower") and not notes("model.vision_tower", "model.multi_modal_projector", *text)


@on_ranks(1)
def test_layers_that_attend_to_images_are_towers(folder: str):
    """Text without an image skips them, like the vision tower."""
    found = find_towers(dict(mllama().named_modules()))
    assert found == ["model.vision_model", "model.language_model.model.layers.1"]


def models_without_towers() -> dict[str, nn.Module]:
    from transformers import BertConfig

    t5 = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": 67}
    speech = {"decoder_layers": 2, "encoder_layers": 2, "decoder_attention_heads": 2, "encoder_attention_heads": 2}
    speech |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0)
    bert = BertConfig(**{**TEXT, "is_decoder": False}).to_dict()
    return {
        "t5": build("T5Config T5ForConditionalGeneration", **t5),
        "qwen2-moe": build("Qwen2MoeConfig Qwen2MoeForCausalLM", **TEXT, num_experts=3, moe_intermediate_size=24),
        "switch": build("SwitchTransformersConfig SwitchTransformersForConditionalGeneration", **t5, num_experts=3),
        "mpt": mpt(),
        # Both parts run in each step.
        "clip": build("CLIPConfig CLIPModel", text_config=TEXT, vision_config=IMAGES),
        "two towers of text": build("EncoderDecoderConfig EncoderDecoderModel", encoder=dict(bert), decoder=dict(bert)),
        "whisper": build("WhisperConfig WhisperForConditionalGeneration", d_model=16, vocab_size=67, **speech),
    }


def warned_of(model: nn.Module, wrap: Wrap) -> list[str]:
    try:
        return [note for note in notes_of(model, wrap) if "makes units" in note]
    except UnsupportedError as error:
        return [str(error)]


HAVE_EXPERTS = {"qwen2-moe", "switch"}


@on_ranks(1)
def test_models_that_each_batch_runs_whole_are_not_warned_of(folder: str):
    """If every run of every model printed a warning, users would overlook the relevant one."""
    for name, model in models_without_towers().items():
        assert find_towers(dict(model.named_modules())) == [], name
        policies = [Wrap(kind=WrapKind.SIZE, min_num_params=size) for size in (1000, 3000)]
        for wrap in policies if name == "mpt" else [AUTO, *policies]:  # MPT names no classes
            told = warned_of(model, wrap)
            is_expected = name in HAVE_EXPERTS and "makes experts separate units" in "".join(told)
            assert not told or is_expected, (name, wrap, told)


@on_ranks(1)
def test_mpt_is_told_of_what_it_has(folder: str):
    """Its attributes choose units; a Dropout beside them is no unit."""
    [hook, attributes] = notes_of(mpt(), Wrap(kind=WrapKind.CLASSES, classes=("MPTBlock",)))
    assert "fsdp_wrap_fn of model is not called" in hook
    assert attributes.startswith("_fsdp_wrap on model.transformer.wte and 2 more takes precedence")
