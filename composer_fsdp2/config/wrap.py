"""Which modules become units, in no system's words."""

import enum
from dataclasses import dataclass

from composer_fsdp2.config.value import Value
from composer_fsdp2.errors import ConfigError


class WrapKind(enum.Enum):
    """Who chooses the modules that become units."""

    HOOKS = "the model's own hooks (Composer's fsdp_wrap_fn, _fsdp_wrap)"
    CLASSES = "modules of these classes"
    SIZE = "modules with so many parameters"
    ROOT = "the whole model is one unit"


AUTO_EXPERTS = ("auto",)

_FIELDS = {
    WrapKind.HOOKS: (),
    WrapKind.CLASSES: ("classes", "embeddings", "output", "experts"),
    WrapKind.SIZE: ("min_num_params",),
    WrapKind.ROOT: ("embeddings", "output", "experts"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrap(Value):
    """Which modules become units of their own, below the roots.

    Args:
        classes: Under CLASSES, by name; empty means those that the model itself names (transformers'
            ``_no_split_modules``).
        min_num_params: Under SIZE: a module with at least so many elements that no unit below it holds.
        embeddings: Whether the input embeddings are a unit.
        output: Whether the output head is one.
        experts: Classes of experts that are; ``AUTO_EXPERTS`` for all that the model calls experts.
    Raises:
        ConfigError: SIZE without a number from 1 on, or what the kind has no use for.
    """

    kind: WrapKind = WrapKind.HOOKS
    classes: tuple[str, ...] = ()
    min_num_params: int = 0
    embeddings: bool = False
    output: bool = False
    experts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("classes", "min_num_params", "embeddings", "output", "experts"):
            if getattr(self, name) and name not in _FIELDS[self.kind]:
                raise ConfigError(f"a Wrap by {self.kind.name} has no use for {name}={getattr(self, name)!r}")
        if self.kind is WrapKind.SIZE and self.min_num_params < 1:
            raise ConfigError(f"a Wrap by SIZE has min_num_params={self.min_num_params}; give a number from 1 on")

    @property
    def others(self) -> tuple[str, ...]:
        """The further kinds of modules that are units of their own, by name."""
        kinds = {"embeddings": self.embeddings, "output": self.output, "experts": self.experts}
        return tuple(name for name, wanted in kinds.items() if wanted)
