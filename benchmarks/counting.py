"""What one step communicates and how much memory it takes, counted at torch's dispatcher instead of timed.

``Collectives`` and ``StateBytes`` are the package's own, as ``composer-fsdp2 compare`` counts with them; they know
nothing of its estimates.
"""

from collections.abc import Iterable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from composer_fsdp2._torch.counting import Collectives, StateBytes
from composer_fsdp2._torch.live import tensors_of

__all__ = ["Collectives", "LiveBytes", "StateBytes", "gathered_bytes"]


class LiveBytes(TorchDispatchMode):
    """Measures the bytes of all storages that the block made and that can still be reached: ``now``, and ``peak``."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(tensor.untyped_storage()) for tensor in tensors_of(args)}
        for storage in (tensor.untyped_storage() for tensor in tensors_of(result)):
            if id(storage) not in given:
                self._made[storage] = None
        self.peak = max(self.peak, self.now)
        return result

    @property
    def now(self) -> int:
        return sum(storage.nbytes() for storage in self._made)


def gathered_bytes(counts: dict[str, dict[str, int]]) -> int:
    """The bytes of all all-gathers in what ``Collectives`` counted."""
    return sum(count["bytes"] for name, count in counts.items() if "gather" in name)
