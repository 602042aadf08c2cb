"""What all dialects have in common: a section of a file, the run that it asks for, and how a target says it.

A dialect *reads* a section into a ``Run``, with a finding for every key: with what its system does with the key, which
may be nothing. A target *expresses* a run: entries, each for one part of the run, and findings for what it has no word
for. ``splice`` puts each entry where the old key stood that had decided the same part.

Imported by the dialects and ``migrate``; nothing here communicates.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from composer_fsdp2.config import MeshSpec, ShardingConfig
from composer_fsdp2.findings import Finding

__all__ = [
    "Dialect",
    "Entry",
    "Expression",
    "Frame",
    "MappingEdit",
    "Part",
    "Path",
    "Reading",
    "Run",
    "Section",
    "Wrap",
    "WrapKind",
    "mesh_text",
    "splice",
]

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The part of a file that configures sharding.

    Args:
        path: Of its mapping, from the top of the file.
        said: Its entries with interpolations resolved.
        around: The whole file's values, for what is said elsewhere (precision, model, number of processes).
    """

    path: Path
    said: Mapping[str, Any]
    around: Mapping[str, Any]

    @property
    def place(self) -> str:
        return ".".join(map(str, self.path))


def mesh_text(mesh: MeshSpec) -> str:
    """Without the type of device, which no file says."""
    return str(mesh).partition(" mesh, ")[2]


class WrapKind(enum.Enum):
    """Who chooses the modules that become units."""

    HOOKS = "the model's own hooks (Composer's fsdp_wrap_fn, _fsdp_wrap)"
    CLASSES = "modules of these classes"
    SIZE = "modules with so many parameters"
    ROOT = "the whole model is one unit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrap:
    """Which modules become units.

    Args:
        classes: Under CLASSES; empty means the classes that the model itself names (transformers'
            ``_no_split_modules``).
        min_num_params: Under SIZE.
        others: Further kinds of modules by the system's own word: embeddings, output head, experts.
    """

    kind: WrapKind
    classes: tuple[str, ...] = ()
    min_num_params: int = 0
    others: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a section asks for, in no system's words.

    Args:
        config: With -1 for what the number of ranks leaves.
        state_dict_type: "full" or "sharded", what checkpoints hold.
        extras: What belongs to the run and not to sharding by FSDP, by a name that dialects share: async_save,
            context_parallel, expert_parallel, expert_patch, tiled_mlp, max_grad_norm ...
    """

    config: ShardingConfig
    wrap: Wrap
    state_dict_type: str = "full"
    extras: Mapping[str, Any] = field(default_factory=dict)


class Part(enum.Enum):
    """The parts of a run that a key may decide; an entry of a target goes where the old key of its part stood."""

    MESH = "mesh"
    RESHARD = "reshard_after_forward"
    PRECISION = "mixed_precision"
    OFFLOAD = "cpu_offload"
    CHECKPOINTING = "activation_checkpointing"
    BACKWARD_PREFETCH = "prefetch in backward"
    FORWARD_PREFETCH = "prefetch in forward"
    GRADIENT_SYNC = "gradient_sync"
    SYNC = "sync_module_states"
    WRAP = "wrap"
    STATE_DICT = "state_dict_type"
    ASYNC_SAVE = "async_save"
    EXTRA = "extra"  # each its own: no key of a dialect stands for another's


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a section asks for: a run, unless something stands in the way, and a finding for each key.

    Args:
        parts: Which keys of the section decided which part, the most important first; none that asks for nothing.
    """

    run: Run | None
    findings: tuple[Finding, ...]
    parts: Mapping[str, Part] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A key of a target, with its value, for one part of the run."""

    part: Part
    key: str
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """A run in a target's words, and findings for what the target cannot say or does otherwise.

    Args:
        beside: What is said beside the section, not in it.
    """

    entries: tuple[Entry, ...]
    findings: tuple[Finding, ...] = ()
    beside: tuple[Entry, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MappingEdit:
    """For ``yaml_edit.edit_mapping``: by old key what comes in its place, and what is new at the end."""

    path: Path
    replacements: Mapping[str, Sequence[tuple[str, Any]]]
    additions: Sequence[tuple[str, Any]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What another system's section comes in the place of.

    Args:
        entry: The path of the key that goes with all that it holds.
        inner: The mapping in it that has the section's keys; None if there is none.
        prefix: What a finding's key has before the name in ``inner``.
        beside: Keys in the mapping around ``entry`` that belong to the section, too.
    """

    entry: Path
    inner: Path | None
    prefix: str = ""
    beside: tuple[str, ...] = ()


class Dialect(Protocol):
    """One system's words."""

    name: str

    def sections(self, values: Mapping[str, Any]) -> list[Path]:
        """Where sections of this dialect lie in a file with these values."""

    def read(self, section: Section) -> Reading:
        """What a section asks for; every key of ``section.said`` has a finding."""

    def express(self, run: Run) -> Expression:
        """A run in this dialect's FSDP2 words."""

    def rewrite(self, section: Section, reading: Reading) -> list[MappingEdit]:
        """A section of this very dialect in its FSDP2 words, with as few changes as possible."""

    def own_findings(self, reading: Reading) -> tuple[Finding, ...]:
        """What became of each key where a section stays in this dialect, with what its FSDP2 has no word for."""

    def frame(self, section: Section) -> Frame:
        """What goes where another system's section comes."""


def splice(
    entries: Iterable[Entry], keys: Iterable[str], parts: Mapping[str, Part], prefix: str = ""
) -> tuple[dict[str, list[tuple[str, Any]]], list[tuple[str, Any]]]:
    """Each entry in the place of the first old key of its part, the others at the end; all old keys go.

    Args:
        keys: The old ones, of one mapping.
        parts: A reading's.
        prefix: What a key has in ``parts`` before its name in ``keys``.
    """
    replacements: dict[str, list[tuple[str, Any]]] = {key: [] for key in keys}
    places: dict[Part, str] = {}
    for key, part in parts.items():
        name = key.removeprefix(prefix).split(".")[0]
        # Extras have nothing to do with each other.
        if key.startswith(prefix) and name in replacements and part is not Part.EXTRA:
            places.setdefault(part, name)
    additions: list[tuple[str, Any]] = []
    for entry in entries:
        place = places.get(entry.part)
        (additions if place is None else replacements[place]).append((entry.key, entry.value))
    return replacements, additions
