"""The collectives of a batch by operator and dtype, from what was seen of them."""

from collections.abc import Iterable

from composer_fsdp2.comparing.run_record import CollectiveCount
from composer_fsdp2.estimate._torch.sent import Sent


def counted(calls: Iterable[Sent]) -> tuple[CollectiveCount, ...]:
    """Calls, and bytes of their full buffers; barriers and the like are left out."""
    found: dict[tuple[str, str], list[int]] = {}
    for call in calls:
        if call.op and call.dtype:
            count = found.setdefault((call.op, call.dtype), [0, 0])
            count[0] += 1
            count[1] += call.num_bytes
    return tuple(
        CollectiveCount(op=op, dtype=dtype, calls=calls, num_bytes=num_bytes)
        for (op, dtype), (calls, num_bytes) in sorted(found.items())
    )
