"""Parallelism keys with more than a number as their value."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf
from support.translations import config_of, refused

from composer_fsdp2.config.parallel import TiledMLP
from composer_fsdp2.fsdp1.parallel_values import parse_tiled_mlp, tiled_mlp_value


def test_tiled_mlp_is_read_and_written():
    """Values from a YAML, OmegaConf or a script are parsed alike, and the written form parses to the same value."""
    meant = TiledMLP(classes=("LlamaMLP",), chunks=8)
    for written in (
        {"classes": ["LlamaMLP", "LlamaMLP"], "chunks": 8},
        {"classes": "LlamaMLP", "chunks": 8},
        OmegaConf.create({"classes": ["LlamaMLP"], "chunks": 8}),
    ):
        assert config_of({"tiled_mlp": written}).tiled_mlp == meant, written
    assert parse_tiled_mlp(tiled_mlp_value(meant)) == meant
    assert parse_tiled_mlp(None) is None is tiled_mlp_value(None)


BAD: tuple[tuple[Any, str], ...] = (
    (8, "fsdp_config.tiled_mlp is 8; it is a mapping such as {classes: [LlamaMLP], chunks: 8}, or null"),
    ({}, "without classes and chunks; give both classes and chunks"),
    ({"classes": ["A"]}, "without chunks; give both"),
    ({"classes": ["A"], "chunk": 4}, "with the unknown key chunk; did you mean chunks?"),
    ({"classes": [], "chunks": 4}, "in which classes is empty; name the classes of the model's MLPs"),
    ({"classes": "auto", "chunks": 4}, "in which classes has auto in a list; give a list of class names"),
    ({"classes": {"A": 1}, "chunks": 4}, "in which classes is {'A': 1}; give a list of class names"),
    ({"classes": ["A"], "chunks": 1}, "in which chunks is 1; give a whole number of pieces from 2 on"),
    ({"classes": ["A"], "chunks": True}, "in which chunks is True; give a whole number"),
    ({"classes": ["A"], "chunks": "4"}, "in which chunks is '4'; give a whole number"),
    ({"classes": ["A"], "chunks": 4.0}, "in which chunks is 4.0; give a whole number"),
)


def test_bad_settings_of_tiled_mlp():
    """An invalid setting stops the run before it starts, and the error lists valid ones."""
    for value, message in BAD:
        assert message in (said := refused({"tiled_mlp": value})), said
