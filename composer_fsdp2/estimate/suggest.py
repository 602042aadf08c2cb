"""Search for the fastest settings with which a run fits into a device's memory."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from composer_fsdp2.config.mesh import AxisRole
from composer_fsdp2.config.value import Value
from composer_fsdp2.estimate.settings import Activations, Settings, blocks_of
from composer_fsdp2.estimate.step import MemorySample
from composer_fsdp2.sharding.plan import ShardingPlan

MAX_TRIED = 24
MAX_PROPOSALS = 3
# Smaller relative gains are ignored: the estimate of seconds is less accurate than this.
GAIN = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(Value):
    """Settings, and the estimated duration and peak memory of a step with them."""

    settings: Settings
    seconds: float
    peak: MemorySample
    host_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        return self.peak.total_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder(Value):
    """The values to try in a search, in order of preference.

    Args:
        shardings: Settings without CPU offload: the run's own first, then with other values of
            ``reshard_after_forward`` and ``replicas``.
        activations: Activation checkpointing, from no block to all blocks.
        sizes: Microbatch sizes in rows, ascending.
    """

    shardings: tuple[Settings, ...]
    activations: tuple[Activations, ...]
    sizes: tuple[int, ...]


def ladder_of(plan: ShardingPlan, present: Settings, *, rows: int, gpus_per_node: int) -> Ladder:
    """Return the values to try for a run with the settings ``present``.

    Args:
        rows: Rows of a batch on one rank.
    """
    ranks = plan.mesh.shard_degree * plan.mesh.replicate_degree
    shards, on_node = ranks // present.replicas, gpus_per_node // plan.mesh.split_degree
    groups = (on_node,) if 1 < on_node < shards and shards % on_node == 0 else ()
    here = replace(present, cpu_offload=False)
    reshards = (replace(here, reshard_after_forward=each) for each in (True, *groups, False))
    nodes = ranks // gpus_per_node if ranks % gpus_per_node == 0 else 1
    counts = (1, nodes) if _may_replicate(plan) else ()
    replicas = (replace(here, reshard_after_forward=True, replicas=each) for each in counts)
    every = {each: Activations(every=each, recompute=True) for each in (4, 2, 1)} if blocks_of(plan) else {}
    longest = max(map(len, blocks_of(plan)), default=0)
    now, sizes = present.microbatch_size, [each for each in range(1, rows + 1) if rows % each == 0]
    below, above = [each for each in sizes if each < now], [each for each in sizes if each > now]
    return Ladder(
        shardings=tuple(dict.fromkeys((present, here, *reshards, *replicas))),
        activations=(Activations(), *(each for number, each in every.items() if number <= longest)),
        sizes=tuple(sorted({1, *below[-1:], now, *above})),
    )


def _may_replicate(plan: ShardingPlan) -> bool:
    """Whether the number of replicas may change: all units use one mesh with only shard and replicate axes."""
    roles = {axis.role for axis in plan.mesh.axes}
    is_plain = roles <= {AxisRole.SHARD, AxisRole.REPLICATE} and not plan.mesh.is_grouped
    return is_plain and plan.config.data_block_size == 1 and all(unit.mesh == plan.mesh for unit in plan.units)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestions(Value):
    """The result of ``suggest_settings``.

    Args:
        proposals: At most three candidates that fit, fastest first. If the unmodified run fits, each is faster.
        nearest: If no candidate fits, the one with the lowest peak.
    """

    proposals: tuple[Candidate, ...]
    nearest: Candidate | None
    num_tried: int


def suggest_settings(
    present: Candidate, ladder: Ladder, memory_bytes: int, rate: Callable[[Settings], Candidate | None]
) -> Suggestions:
    """Plan at most ``MAX_TRIED`` settings, and return the fastest that fit.

    First varies each setting alone. Then, starting with the fastest sharding, finds the largest microbatch that fits
    for each level of activation checkpointing. Tries CPU offload only if nothing else fits.

    Args:
        memory_bytes: The limit for the peak memory.
        rate: Plans settings and estimates their duration and peak; returns None if they cannot be planned.
    """
    search = _Search(present, memory_bytes, rate)
    search.climb(ladder)
    if not search.fitting():
        search.offload()
    fitting = search.fitting()
    now = present.settings
    faster = [each for each in fitting if each.seconds < present.seconds * (1 - GAIN)]
    proposals = _best(faster if present in fitting else fitting, now)
    return Suggestions(
        proposals=tuple(proposals)[:MAX_PROPOSALS],
        nearest=None if fitting else min(search.candidates(), key=lambda each: each.peak_bytes),
        num_tried=len(search.tried),
    )


def _best(candidates: Sequence[Candidate], present: Settings) -> Iterator[Candidate]:
    """Yield the fastest candidate, then repeatedly the fastest of those that need less memory than the last.

    Of candidates with nearly equal duration, the one with the fewest changes is chosen.
    """
    left = sorted(candidates, key=lambda each: each.seconds)
    while left:
        alike = [each for each in left if each.seconds <= left[0].seconds * (1 + GAIN)]
        best = min(alike, key=lambda each: (len(each.settings.changed_from(present)), each.peak_bytes))
        yield best
        left = [each for each in left if each.peak_bytes < best.peak_bytes and each not in alike]


class _Search:
    """The candidates tried so far."""

    def __init__(self, present: Candidate, memory_bytes: int, rate: Callable[[Settings], Candidate | None]) -> None:
        self.tried: dict[Settings, Candidate | None] = {present.settings: present}
        self._present, self._memory_bytes, self._rate = present.settings, memory_bytes, rate

    def candidates(self) -> list[Candidate]:
        return [each for each in self.tried.values() if each is not None]

    def fitting(self) -> list[Candidate]:
        return [each for each in self.candidates() if self._fits(each)]

    def _fits(self, candidate: Candidate | None) -> bool:
        return candidate is not None and candidate.peak_bytes <= self._memory_bytes

    def _try(self, settings: Settings) -> Candidate | None:
        if settings not in self.tried and len(self.tried) < MAX_TRIED:
            self.tried[settings] = self._rate(settings)
        return self.tried.get(settings)

    def climb(self, ladder: Ladder) -> None:
        now = self._present
        shardings = [each for each in map(self._try, ladder.shardings) if each is not None]
        activations = [each for each in ladder.activations if self._try(replace(now, activations=each))]
        others = [each for each in ladder.sizes if each != now.microbatch_size]
        may_cut = bool(others) and self._try(replace(now, microbatch_size=others[0])) is not None
        sizes = ladder.sizes if may_cut else (now.microbatch_size,)
        least = min(shardings, key=lambda each: each.peak_bytes)
        by_speed = sorted(shardings, key=lambda each: (not self._fits(each), each.seconds, each.peak_bytes))
        for sharding in dict.fromkeys(each.settings for each in (by_speed[0], least, *by_speed)):
            self._climb(sharding, activations or [now.activations], sizes)

    def _climb(self, sharding: Settings, activations: Sequence[Activations], sizes: Sequence[int]) -> None:
        """Increase the microbatch while it fits and the step is faster.

        If it does not fit, recompute more blocks at the same size.

        With more recomputation, smaller microbatches are not tried again.
        """
        if not self._fits(self._try(replace(sharding, activations=activations[-1], microbatch_size=sizes[0]))):
            return
        rising, fastest = iter(sizes), math.inf
        size = next(rising, None)
        for each in activations:
            while size and self._fits(found := self._try(replace(sharding, activations=each, microbatch_size=size))):
                assert found is not None
                if found.seconds > fastest * (1 - GAIN):
                    return
                fastest, size = found.seconds, next(rising, None)

    def offload(self) -> None:
        least = min(self.candidates(), key=lambda each: each.peak_bytes).settings
        activations = replace(least.activations, every=least.activations.every or 1, offload=True)
        for settings in (
            replace(least, activations=activations),
            replace(least, cpu_offload=True),
            replace(least, activations=activations, cpu_offload=True),
        ):
            self._try(settings)
