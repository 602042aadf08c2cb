"""What a rank's device holds while a step is replayed, by kind, and the largest sum of it."""

from composer_fsdp2.estimate.step import Kind

_PLACE = {kind: place for place, kind in enumerate(Kind)}


class Ledger:
    """Bytes taken and given back, one after the other as the CPU asks for them.

    ``now`` has one number for each ``Kind``. ``largest`` is what it was when the sum was largest since ``mark()``.
    """

    def __init__(self) -> None:
        self.now = [0] * len(_PLACE)
        self.total = 0
        self.largest = list(self.now)
        self.largest_total = 0

    def take(self, kind: Kind, num_bytes: int) -> None:
        self.now[_PLACE[kind]] += num_bytes
        self.total += num_bytes
        if self.total > self.largest_total:
            self.largest, self.largest_total = list(self.now), self.total

    def give_back(self, kind: Kind, num_bytes: int) -> None:
        self.now[_PLACE[kind]] -= num_bytes
        self.total -= num_bytes

    def mark(self) -> None:
        """Begin to look for the largest sum anew."""
        self.largest, self.largest_total = list(self.now), self.total
