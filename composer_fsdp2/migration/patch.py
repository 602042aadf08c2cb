"""A change of the run that a file configures, and the keys of the file that make it.

``Dialect.patch_steps`` turns a ``Patch`` into an ``Assignment`` for each key, or into ``Unavailable`` where its system
has no key for it. ``apply_patch`` writes them into the text.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from composer_fsdp2.config.value import Value
from composer_fsdp2.migration.paths import Path, value_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees(Value):
    """Over how many ranks parameters are sharded, and how many replicas of the model there are."""

    shards: int
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation(Value):
    """What is done with activations.

    Args:
        every: Of the blocks, every so many-th; 0: none.
        blocks: Their numbers, from 0, in each row of blocks.
        num_blocks: How many there are.
    """

    every: int
    recompute: bool
    offload: bool
    blocks: tuple[int, ...]
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatches(Value):
    """How the batch of one rank is cut.

    Args:
        rows: Of one microbatch.
        number: Of microbatches in a batch.
        global_rows: Of the batch of all ranks, which stays.
    """

    rows: int
    number: int
    global_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch(Value):
    """New values of a run's settings; None leaves one as it is."""

    reshard_after_forward: bool | int | None = None
    degrees: Degrees | None = None
    activations: Recomputation | None = None
    microbatches: Microbatches | None = None
    cpu_offload: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A key and its new value.

    Args:
        path: From the top of the file.
        value: None: the key goes, if it is there.
        instead: Other keys of the same mapping that say the same and go.
    """

    path: Path
    value: Any
    instead: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unavailable:
    """Why no key of this file sets it.

    Args:
        until_migrated: Whether a key of the migrated file does.
    """

    reason: str
    until_migrated: bool = False


PatchStep = Assignment | Unavailable


def holder_of(values: Mapping[str, Any], path: Path, key: str) -> Path | None:
    """The path of the nearest mapping around ``path`` that has a key."""
    for depth in range(len(path), -1, -1):
        here = value_at(values, path[:depth])
        if isinstance(here, Mapping) and key in here:
            return path[:depth]
    return None


def accumulated(
    values: Mapping[str, Any], path: Path, patch: Microbatches, *, beside: str = "training_args"
) -> tuple[PatchStep, ...]:
    """In transformers' words, which other systems took over: rows of a microbatch, and microbatches of a batch."""
    rows, steps = "per_device_train_batch_size", "gradient_accumulation_steps"
    places = (*(path[:depth] for depth in range(len(path), -1, -1)),)
    for place in (*places, *((*each, beside) for each in places)):
        try:
            here = value_at(values, place)
        except (KeyError, IndexError, TypeError):
            continue
        if isinstance(here, Mapping) and rows in here:
            return (
                Assignment(path=(*place, rows), value=patch.rows),
                Assignment(path=(*place, steps), value=patch.number),
            )
    return (Unavailable(reason="the rows of a microbatch stand in the training script"),)
