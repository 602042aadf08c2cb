"""Rules that select the modules to make FSDP units, independent of a framework's keys."""

import enum
from dataclasses import dataclass

from composer_fsdp2.config.value import Value
from composer_fsdp2.errors import ConfigError


class WrapKind(enum.Enum):
    """The rule that selects FSDP units."""

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
    """The rule that selects which modules below the root units are FSDP units themselves.

    Args:
        kind: HOOKS calls the model's hooks and reads no other argument. CLASSES and SIZE select modules by class or
            size. ROOT selects no module except by the last three arguments, which CLASSES reads as well.
        classes: With CLASSES, class names. Empty selects the model's ``_no_split_modules`` (transformers).
        min_num_params: With SIZE, the minimum number of a module's elements, not counting those in units below it.
        embeddings: Whether the input embeddings are a unit.
        output: Whether the output head is a unit.
        experts: Class names of experts that are units. ``AUTO_EXPERTS`` selects experts by module name, such as
            ``experts.0``.
    Raises:
        ConfigError: ``kind`` is SIZE and ``min_num_params`` is not positive, or an argument is set that ``kind`` does
            not read.
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
        """The names of the additional module kinds that are units."""
        kinds = {"embeddings": self.embeddings, "output": self.output, "experts": self.experts}
        return tuple(name for name, wanted in kinds.items() if wanted)
