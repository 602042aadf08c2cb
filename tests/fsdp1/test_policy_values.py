"""The keys that choose modules: wrap_policy, activation_checkpointing_policy and freeze."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from support.examples import examples
from support.translations import config_of, refused

from composer_fsdp2.config.wrap import Wrap, WrapKind
from composer_fsdp2.fsdp1.policy_values import (
    checkpointed_value,
    freeze_value,
    parse_checkpointed_classes,
    parse_freeze,
    parse_wrap_policy,
    wrap_policy_value,
)

LAYERS = "transformer_layer_cls_to_wrap"


def test_each_spelling_of_a_policy():
    """A list, one name, auto and [] are four different runs; 1e8 is a string in PyYAML and a float in OmegaConf."""
    by_size = Wrap(kind=WrapKind.SIZE, min_num_params=10**8)
    for written, meant in (
        (None, Wrap()),
        ({LAYERS: ["A", "B", "A"]}, Wrap(kind=WrapKind.CLASSES, classes=("A", "B"))),
        ({LAYERS: "A"}, Wrap(kind=WrapKind.CLASSES, classes=("A",))),
        ({LAYERS: "auto"}, Wrap(kind=WrapKind.CLASSES)),
        ({LAYERS: []}, Wrap(kind=WrapKind.ROOT)),
        ({LAYERS: [], "wrap_embeddings": True}, Wrap(kind=WrapKind.ROOT, embeddings=True)),
        (
            {LAYERS: "auto", "wrap_embeddings": False, "wrap_lm_output": True, "moe_experts": ["E"]},
            Wrap(kind=WrapKind.CLASSES, output=True, experts=("E",)),
        ),
        *(
            ({LAYERS: ["A"], "moe_experts": each}, Wrap(kind=WrapKind.CLASSES, classes=("A",), experts=("auto",)))
            for each in (True, "auto")
        ),
        ({LAYERS: ["A"], "moe_experts": False}, Wrap(kind=WrapKind.CLASSES, classes=("A",))),
        *(({"min_num_params": number}, by_size) for number in (10**8, "1e8", 1e8, "100000000", "1E+8")),
        ({"min_num_params": "1e8", "moe_experts": None, "wrap_embeddings": False}, by_size),
        # null means not set; [] and false choose no module.
        ({"min_num_params": "1e8", LAYERS: None, "moe_experts": [], "wrap_lm_output": None}, by_size),
        ({LAYERS: ["A"], "min_num_params": None, "wrap_embeddings": None}, Wrap(kind=WrapKind.CLASSES, classes=("A",))),
    ):
        assert config_of({"wrap_policy": written}).wrap == meant, written


def test_what_a_configuration_file_hands_over_is_read():
    """OmegaConf's lists and mappings are not Python's types."""
    section = OmegaConf.create({"wrap_policy": {LAYERS: ["A"]}, "freeze": ["model.embed."]})
    config = config_of(section)
    assert config.freeze == ("model.embed",)
    assert parse_wrap_policy(section.wrap_policy) == config.wrap == Wrap(kind=WrapKind.CLASSES, classes=("A",))


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"transformer_layer_cls_to_warp": ["A"]}, "did you mean transformer_layer_cls_to_wrap?"),
        ({LAYERS: ["A"], "zzz": 1}, "unknown key zzz; it takes transformer_layer_cls_to_wrap"),
        ({}, "gives neither"),
        ({"wrap_embeddings": True}, "gives neither"),
        ({LAYERS: ["A"], "min_num_params": 5}, "gives both"),
        ({"min_num_params": 5, "wrap_embeddings": True}, "wrap_embeddings stands beside min_num_params"),
        ({LAYERS: ["A"], "wrap_lm_output": "false"}, "wrap_lm_output is 'false'; it takes true or false"),
        ({LAYERS: "A,B"}, "'A,B', which is no class name"),
        ({LAYERS: ["A", 3]}, "3, which is no class name"),
        ({LAYERS: ["auto", "A"]}, "give it alone"),
        ({LAYERS: ["A"], "moe_experts": 3}, "moe_experts is 3; give a list of class names, or auto"),
        ({"min_num_params": 5, "moe_experts": True}, "moe_experts stands beside min_num_params"),
        ({LAYERS: None}, "gives neither"),
        ({LAYERS: None, "min_num_params": None}, "gives neither"),
        ({"min_num_params": None}, "gives neither"),
        ({"min_num_params": 5, "moe_experts": ["E"]}, "moe_experts stands beside min_num_params"),
        ({"min_num_params": 5, "wrap_lm_output": "false"}, "wrap_lm_output is 'false'; it takes true or false"),
        ({LAYERS: True}, "is True; give a list of class names, or auto"),
        *(
            ({"min_num_params": wrong}, f"min_num_params is {wrong!r}; give a whole number")
            for wrong in (0, -1, True, 1.5, "1.5", "many", "nan", "inf", float("inf"), [1])
        ),
        ("auto", "it is a mapping with"),
        (["A"], "it is a mapping with"),
    ],
)
def test_a_policy_that_says_something_else(policy: Any, words: str):
    """Each would have other units than its author expects; the error starts with the key and shows an alternative."""
    text = refused({"wrap_policy": policy})
    assert text.startswith("fsdp_config.wrap_policy is ") and words in text


def test_what_is_recomputed_is_asked_for():
    """A policy with checkpointing turned off would checkpoint nothing, and the run would be out of memory."""
    for off in ({}, {"activation_checkpointing": False}):
        text = refused({"activation_checkpointing_policy": ["A"], **off})
        assert "activation_checkpointing is false; set activation_checkpointing: true, or leave the policy out" in text
    for written, meant in ((["A", "B"], ("A", "B")), ("A", ("A",)), ("auto", ()), (None, None)):
        for on in ("activation_checkpointing", "activation_cpu_offload"):
            config = config_of({on: True, "activation_checkpointing_policy": written})
            assert config.activation_checkpointing.classes == meant
    for wrong, words in (([], "recomputes nothing"), (["A B"], "no class name")):
        assert words in refused({"activation_checkpointing": True, "activation_checkpointing_policy": wrong})


def test_prefixes_of_frozen_parameters():
    """A trailing dot does not change a prefix; a value that is not a path would freeze nothing, or everything."""
    for written, meant in (
        ("model.embed", ("model.embed",)),
        (["model.embed.", "model.embed", "head"], ("model.embed", "head")),
        ([], ()),
        (None, ()),
    ):
        assert config_of({"freeze": written}).freeze == meant
    for wrong in ("", ".", "a..b", [""], [3], " a", True, {"a": 1}):
        assert "give a list of prefixes" in refused({"freeze": wrong})
    for written, meant in ((r"lm_head\.", (r"lm_head\.",)), (["a", "b", "a"], ("a", "b")), ([], ()), (None, ())):
        assert config_of({"train_only": written}).train_only == meant
    for wrong in ("a(", [3], True, {"a": 1}):
        assert "give a list of regular expressions" in refused({"train_only": wrong})


NAMES = st.lists(st.sampled_from(["A", "Block", "LlamaDecoderLayer"]), unique=True).map(tuple)
WRAPS = (
    st.just(Wrap())
    | st.builds(Wrap, kind=st.just(WrapKind.SIZE), min_num_params=st.integers(1, 10**12))
    | st.builds(
        Wrap,
        kind=st.just(WrapKind.CLASSES),
        classes=NAMES,
        embeddings=st.booleans(),
        output=st.booleans(),
        experts=NAMES,
    )
    | st.builds(Wrap, kind=st.just(WrapKind.ROOT), embeddings=st.booleans(), output=st.booleans())
)


@given(WRAPS, st.none() | NAMES, st.lists(st.sampled_from(["a", "a.b", "c"]), unique=True).map(tuple))
@examples(100)
def test_words_mean_what_they_are_written_for(
    wrap: Wrap, checkpointed: tuple[str, ...] | None, frozen: tuple[str, ...]
):
    """Otherwise a migrated file would have other units than the original."""
    assert parse_wrap_policy(wrap_policy_value(wrap)) == wrap
    assert parse_checkpointed_classes(checkpointed_value(checkpointed)) == checkpointed
    assert parse_freeze(freeze_value(frozen)) == frozen
