"""The table of keys: each row must be usable by the translation and readable by a user."""

from __future__ import annotations

from collections import Counter

import pytest

from composer_fsdp2 import ConfigError, Outcome, translate
from composer_fsdp2.fsdp1.keys import KEYS, KEYS_BY_NAME, Key, Kind, Origin, nearest_key

pytestmark = pytest.mark.any_torch

WRONG_VALUES = {
    Kind.BOOL: "yes",
    Kind.INT: 1.5,
    Kind.OPTIONAL_INT: "2",
    Kind.BOOL_OR_INT: "true",
    Kind.STR: 3,
    Kind.OPTIONAL_STR: False,
    Kind.OPTIONAL_SECONDS: "60",
}


def test_each_key_has_one_row():
    """Two rows for one key would make the report contradict itself."""
    assert [name for name, count in Counter(key.name for key in KEYS).items() if count > 1] == []
    assert set(KEYS_BY_NAME) == {key.name for key in KEYS}


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_saying_the_default_changes_nothing(key: Key):
    """A configuration that spells out FSDP1's defaults trains as one that leaves them out, and is never refused."""
    said = translate({key.name: key.default}, device="cpu", world_size=4)
    assert said.config == translate({}, device="cpu", world_size=4).config
    assert said.config is not None
    assert [finding.key for finding in said.findings] == [key.name]
    assert said.findings[0].outcome in (Outcome.EXACT, Outcome.APPROXIMATE, Outcome.UNNEEDED)


@pytest.mark.parametrize("key", [key for key in KEYS if key.kind is not Kind.ANY], ids=lambda key: key.name)
def test_a_value_of_the_wrong_type_is_refused_by_name(key: Key):
    """`sync_module_states: "false"` does not turn it on, as any non-empty string did under FSDP1."""
    with pytest.raises(ConfigError, match=rf"fsdp_config\.{key.name} is .*it takes {key.kind.value}"):
        translate({key.name: WRONG_VALUES[key.kind]}, device="cpu")


@pytest.mark.parametrize(
    "key",
    [key for key in KEYS if key.kind in (Kind.INT, Kind.OPTIONAL_INT, Kind.OPTIONAL_SECONDS)],
    ids=lambda k: k.name,
)
def test_true_is_no_number(key: Key):
    """`forward_prefetch_limit: true` is a mistake, not 1."""
    with pytest.raises(ConfigError, match=key.name):
        translate({key.name: True}, device="cpu")


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_each_row_can_be_read(key: Key):
    """The documentation made from the table has no empty cell where a user looks for the reason."""
    assert key.meaning and key.reason
    assert (
        key.target
        or key.outcome in (Outcome.UNNEEDED, Outcome.UNSUPPORTED)
        or "as before" in key.reason
        or (key.origin is Origin.OURS or key.name == "verbose")
    )


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("sharding_stratgy", "sharding_strategy"),
        ("Sharding_Strategy", "sharding_strategy"),
        ("activation_checkpoint", "activation_checkpointing"),
        ("reshard_after_fwd", "reshard_after_forward"),
        ("sync_module_state", "sync_module_states"),
        ("mixed_percision", "mixed_precision"),
    ],
)
def test_a_misspelt_key_finds_its_neighbour(written: str, meant: str):
    """FSDP1 accepted any key, so a misspelt one trained with the default for weeks."""
    assert nearest_key(written) == meant


def test_a_strange_key_has_no_neighbour():
    """No wrong advice where nothing is near."""
    assert nearest_key("zzz") is None
