"""What a configuration can be migrated to, and where the words of each target stand in a file."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from composer_fsdp2.compat.dialects import DIALECTS
from composer_fsdp2.compat.dialects.base import Dialect, Entry, Expression
from composer_fsdp2.compat.dialects.composer_effects import PLAIN_COMPOSER
from composer_fsdp2.compat.dialects.torchtitan import tables_of
from composer_fsdp2.compat.migration.toml_edit import toml_text
from composer_fsdp2.compat.migration.yaml_edit import Entries, block_text

__all__ = ["TARGETS", "Target"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One word that ``--to`` takes.

    Args:
        dialect: Whose FSDP2 words it is.
        suffix: Of its files.
        heads: The keys that a section stands under, outermost first, each with what comes before in its mapping.
            Empty, if a section is a file of its own.
        elsewhere: What the target's system makes of a key without composer_fsdp2; under "" of those not named.
    """

    name: str
    dialect: str
    suffix: str = ".yaml"
    heads: tuple[tuple[str, Entries], ...] = ()
    elsewhere: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> Dialect:
        return DIALECTS[self.dialect]

    @property
    def is_file(self) -> bool:
        """Whether a section is a whole file, and cannot stand in one of another system's."""
        return not self.heads

    def text(self, expression: Expression, source: str) -> str:
        """A file that holds this section only."""
        head = f"# What {source} asks for, in the words of {self.name}; written by composer-fsdp2 migrate.\n"
        if self.suffix == ".toml":
            return head + "\n".join(_toml(expression)) + "\n"
        values: dict[str, Any] = _mapping(expression.entries)
        for name, first in reversed(self.heads):
            values = {name: {**dict(first), **values}}
        return head + "\n".join(block_text(_mapping(expression.beside) | values)) + "\n"


def _mapping(entries: Iterable[Entry]) -> dict[str, Any]:
    return {entry.key: entry.value for entry in entries}


def _toml(expression: Expression) -> Iterator[str]:
    for number, (table, said) in enumerate(tables_of(expression).items()):
        yield from ([""] if number else [])
        yield f"[{'.'.join(map(str, table))}]"
        yield from (f"{name} = {toml_text(value)}" for name, value in said.items())


TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target(name="composer", dialect="composer", heads=(("fsdp_config", ()),), elsewhere=PLAIN_COMPOSER),
        Target(
            name="roll",
            dialect="roll",
            heads=(("strategy_args", (("strategy_name", "fsdp2_train"),)), ("strategy_config", ())),
        ),
        Target(name="torchtitan", dialect="torchtitan", suffix=".toml"),
        Target(name="accelerate", dialect="huggingface"),
    )
}
