"""Allocated bytes of a rank's device, by kind, and their peak."""

from composer_fsdp2.estimate.step import Kind

_PLACE = {kind: place for place, kind in enumerate(Kind)}


class AllocatedBytes:
    """Sums allocations and frees by ``Kind``, in the order in which the CPU issues them.

    Attributes:
        now: The bytes allocated now, one number per ``Kind``.
        total: The sum of ``now``.
        at_peak: The value of ``now`` at the largest total since ``reset_peak``.
        peak: The largest total since ``reset_peak``.
    """

    def __init__(self) -> None:
        self.now = [0] * len(_PLACE)
        self.total = self.peak = 0
        self.at_peak = list(self.now)

    def alloc(self, kind: Kind, num_bytes: int) -> None:
        self.now[_PLACE[kind]] += num_bytes
        self.total += num_bytes
        if self.total > self.peak:
            self.at_peak, self.peak = list(self.now), self.total

    def free(self, kind: Kind, num_bytes: int) -> None:
        self.now[_PLACE[kind]] -= num_bytes
        self.total -= num_bytes

    def reset_peak(self) -> None:
        self.at_peak, self.peak = list(self.now), self.total
