"""Replicas of the same part of a tensor read it once and broadcast it."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from composer_fsdp2.checkpoint.target import LocalBox
from composer_fsdp2.sharding.agree import device_of_group, sends_from_host

# Below this many bytes a collective costs more than the read that it saves. Only tensors that are not split: replicas
# that each read a part of a record would count it several times (``check_content``).
_SMALL_BYTES = 1024
# Bytes on the device at once, if the group cannot send from host memory.
_BUFFER_BYTES = 64 << 20


def owners(boxes: Sequence[tuple[LocalBox, int]]) -> list[int | None]:
    """Which replica reads each box, so that all read about as much; None where each reads for itself.

    Args:
        boxes: Each with its element size in bytes; the same on all ranks that share a box.
    """
    loads: dict[object, list[int]] = {}
    chosen: list[int | None] = []
    for box, itemsize in boxes:
        num_bytes = box.numel * itemsize
        if box.num_replicas == 1 or (num_bytes <= _SMALL_BYTES and box.numel == box.like.numel()):
            chosen.append(None)
            continue
        key = (box.like.device_mesh, box.axes) if isinstance(box.like, DTensor) else None
        of_replicas = loads.setdefault(key, [0] * box.num_replicas)
        owner = of_replicas.index(min(of_replicas))
        loads[key][owner] += num_bytes
        chosen.append(owner)
    return chosen


def replica_of(box: LocalBox) -> int:
    """This rank's number among the replicas of the box."""
    if not isinstance(box.like, DTensor):
        return dist.get_rank() if dist.is_initialized() else 0
    number = 0
    for axis in box.axes:
        number = number * box.like.device_mesh.size(axis) + box.like.device_mesh.get_local_rank(axis)
    return number


def broadcast_replicas(local: torch.Tensor, box: LocalBox, owner: int) -> None:
    """Fill ``local`` on every replica with the owner's; called on all of them, in the same order."""
    if not isinstance(box.like, DTensor):
        _broadcast(local, owner, dist.group.WORLD)
        return
    mesh = box.like.device_mesh
    coordinates: list[int] = []
    for axis in reversed(box.axes):
        coordinates.insert(0, owner % mesh.size(axis))
        owner //= mesh.size(axis)
    for position, axis in enumerate(box.axes):
        # First along the first axis, among the ranks that stand beside the owner; then each of them along the next.
        later = zip(box.axes[position + 1 :], coordinates[position + 1 :], strict=True)
        if all(mesh.get_local_rank(other) == coordinate for other, coordinate in later):
            group = mesh.get_group(axis)
            _broadcast(local, dist.get_global_rank(group, coordinates[position]), group)


def _broadcast(local: torch.Tensor, source: int, group: dist.ProcessGroup | None) -> None:
    if local.numel() == 0:
        return
    if sends_from_host(group):
        dist.broadcast(local.view(-1).view(torch.uint8), source, group)  # gloo knows no fp8
        return
    is_source, device = dist.get_rank() == source, device_of_group(group)
    for part in local.view(-1).view(torch.uint8).split(_BUFFER_BYTES):
        is_there = is_source or part.device.type == device.type
        buffer = part.to(device) if is_there else torch.empty_like(part, device=device)
        dist.broadcast(buffer, source, group)
        if not is_there:
            part.copy_(buffer)
