"""What one step communicates and how much state it keeps, counted at torch's dispatcher instead of timed.

``Collectives`` and ``StateBytes`` are the package's own, as ``composer-fsdp2 compare`` counts with them; they know
nothing of its estimates.
"""

from composer_fsdp2._torch.counting import Collectives, StateBytes

__all__ = ["Collectives", "StateBytes", "gathered_bytes"]


def gathered_bytes(counts: dict[str, dict[str, int]]) -> int:
    """The bytes of all all-gathers in what ``Collectives`` counted."""
    return sum(count["bytes"] for name, count in counts.items() if "gather" in name)
