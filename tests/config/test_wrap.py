"""Which modules become units, as a value: one that says nothing that can be carried out is refused where it is made."""

from __future__ import annotations

from typing import Any

import pytest

from composer_fsdp2 import ConfigError
from composer_fsdp2.config.wrap import Wrap, WrapKind


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kind": WrapKind.SIZE}, "min_num_params=0; give a number from 1 on"),
        ({"kind": WrapKind.SIZE, "min_num_params": -1}, "min_num_params=-1; give a number from 1 on"),
        ({"kind": WrapKind.SIZE, "min_num_params": 1, "classes": ("A",)}, "SIZE has no use for classes=('A',)"),
        ({"kind": WrapKind.CLASSES, "min_num_params": 1}, "CLASSES has no use for min_num_params=1"),
        ({"kind": WrapKind.ROOT, "classes": ("A",)}, "ROOT has no use for classes=('A',)"),
        ({"embeddings": True}, "HOOKS has no use for embeddings=True"),
    ],
)
def test_a_policy_without_a_meaning(given: dict[str, Any], words: str):
    """By size without a number would make no units, and could not be written into a file again."""
    with pytest.raises(ConfigError) as caught:
        Wrap(**given)
    assert words in str(caught.value)
