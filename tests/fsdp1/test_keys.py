"""The table of keys: the translation can use each row, and a user can read it."""

from __future__ import annotations

from collections import Counter

import pytest

from composer_fsdp2 import ConfigError, Outcome, translate
from composer_fsdp2.config.rows import ANY, Row
from composer_fsdp2.config.text import nearest
from composer_fsdp2.fsdp1.keys import KEYS, KEYS_BY_NAME, KeyGroup

# By the text for a key's type.
WRONG_VALUES = {
    "true or false": "yes",
    "an integer": 1.5,
    "an integer from 1 on": 0,
    "an integer or null": "2",
    "true, false or an integer": "true",
    "a string": 3,
    "a string or null": False,
    "a number of seconds, or null": "60",
}
WRONG_OBJECT = 3  # for keys that take a torch object, or its name
TYPED = [row for row in KEYS if row.takes.text != ANY.text]


def test_each_key_has_one_row():
    """With two rows for one key the report would contradict itself."""
    assert [name for name, count in Counter(key.name for key in KEYS).items() if count > 1] == []
    assert set(KEYS_BY_NAME) == {key.name for key in KEYS}


@pytest.mark.parametrize("key", TYPED, ids=lambda key: key.name)
def test_a_value_of_the_wrong_type_is_refused_by_name(key: Row):
    """`sync_module_states: "false"` does not turn it on, as any non-empty string did under FSDP1."""
    with pytest.raises(ConfigError, match=rf"fsdp_config\.{key.name} is .*; (it takes|it is|expected|give) "):
        translate({key.name: WRONG_VALUES.get(key.takes.text, WRONG_OBJECT)}, device="cpu")


@pytest.mark.parametrize("key", [key for key in TYPED if "number" in key.takes.text], ids=lambda key: key.name)
def test_true_is_no_number(key: Row):
    """`forward_prefetch_limit: true` is a mistake, not 1."""
    if key.name != "reshard_after_forward":  # accepts true
        with pytest.raises(ConfigError, match=key.name):
            translate({key.name: True}, device="cpu")


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_each_row_can_be_read(key: Row):
    """The documentation generated from the table has no empty cell."""
    assert key.meaning and key.reason
    assert (
        key.target
        or key.outcome in (Outcome.UNNEEDED, Outcome.UNSUPPORTED)
        or "as before" in key.reason
        or (key.group == KeyGroup.OURS or key.name == "verbose")
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
    assert nearest(written, KEYS_BY_NAME) == meant


def test_a_strange_key_has_no_neighbour():
    """A key without similar ones gets no wrong suggestion."""
    assert nearest("zzz", KEYS_BY_NAME) is None
