"""What is wished for of a run that a file describes already, and what the file would have to say for it.

A dialect answers a ``Wish`` with ``Asked`` values: where its words for it stand. What it has no word for it says as a
``NoWord``. ``fulfil`` writes them into the text.
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
class Wish(Value):
    """What a run is to have; None leaves it as it is."""

    reshard_after_forward: bool | int | None = None
    degrees: Degrees | None = None
    activations: Recomputation | None = None
    microbatches: Microbatches | None = None
    cpu_offload: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A key that is to have a value.

    Args:
        path: From the top of the file.
        value: None: the key goes, if it is there.
        instead: Other keys of the same mapping that say the same and go.
    """

    path: Path
    value: Any
    instead: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NoWord:
    """Why a system cannot be told of it in this file.

    Args:
        until_migrated: Whether the file's words for FSDP2 have one.
    """

    reason: str
    until_migrated: bool = False


Answer = Asked | NoWord


def holder_of(values: Mapping[str, Any], path: Path, key: str) -> Path | None:
    """The path of the nearest mapping around ``path`` that has a key."""
    for depth in range(len(path), -1, -1):
        here = value_at(values, path[:depth])
        if isinstance(here, Mapping) and key in here:
            return path[:depth]
    return None


def accumulated(
    values: Mapping[str, Any], path: Path, wish: Microbatches, *, beside: str = "training_args"
) -> tuple[Answer, ...]:
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
                Asked(path=(*place, rows), value=wish.rows),
                Asked(path=(*place, steps), value=wish.number),
            )
    return (NoWord(reason="the rows of a microbatch stand in the training script"),)
