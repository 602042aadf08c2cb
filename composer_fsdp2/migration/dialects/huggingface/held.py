"""What holds in a run: the keys that its file gives, and the settings that they and the defaults come to."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from composer_fsdp2.config.rows import Row
from composer_fsdp2.migration.dialects.huggingface.readers import Reader
from composer_fsdp2.migration.dialects.huggingface.values import SWITCHES, is_word_for_false
from composer_fsdp2.migration.run import Wrap, WrapKind


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenKey:
    """A key of the section, with its path from there, and whether the system reads it at that place."""

    key: str
    value: Any
    row: Row | None
    is_read: bool = True

    @property
    def is_off(self) -> bool:
        """Whether it says that there is to be none of it."""
        return self.row is not None and self.row.takes in SWITCHES and is_word_for_false(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What holds in the run, given or not, and by key what kept it from starting.

    Args:
        settings: By the names of the table.
        problems: By key: what is wrong with its value, and which would do.
    """

    reader: Reader
    given: tuple[GivenKey, ...]
    around: Mapping[str, Any]
    settings: dict[str, Any]
    problems: dict[str, str]

    def keys_of(self, *names: str) -> list[str]:
        """The keys that are read for one of these names of the table."""
        return [each.key for each in self.given if each.row is not None and each.is_read and each.row.name in names]

    def key_of(self, *names: str) -> str | None:
        """The key that set one of these; None if the file gives none of them."""
        keys = self.keys_of(*names)
        return keys[-1] if keys else None

    def value_of(self, key: str) -> Any:
        return next(each.value for each in self.given if each.key == key)

    @property
    def is_on_one_node(self) -> bool:
        """Whether a file of accelerate's says so, by num_machines, whose default is 1."""
        return not self.reader.is_trainer and self.around.get("num_machines", 1) in (None, 1)

    def asks_for_size(self) -> bool:
        """Whether any number of parameters that is read is above 0."""
        numbers = map(self.value_of, self.keys_of("min_num_params"))
        return any(isinstance(number, int | float) and number > 0 for number in numbers)


def wrap_of(settings: Mapping[str, Any]) -> Wrap:
    policy = settings["auto_wrap_policy"]
    if policy == "TRANSFORMER_BASED_WRAP":
        return Wrap(kind=WrapKind.CLASSES, classes=tuple(dict.fromkeys(settings["transformer_layer_cls_to_wrap"])))
    if policy == "SIZE_BASED_WRAP" and settings["min_num_params"] > 0:
        return Wrap(kind=WrapKind.SIZE, min_num_params=settings["min_num_params"])
    return Wrap(kind=WrapKind.ROOT)  # a size of 0 is passed over as well
