"""The first run's last tensors, in one file, and how far those of another run are from them."""

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from composer_fsdp2.comparing.run_record import TensorDistance
from composer_fsdp2.comparing.whole_tensors import PARAMETER, Key

# [Note: rounding alone] Some gradients are zero but for rounding, as that of attention's key bias, to which softmax is
# blind. Optimizers that divide by a gradient's own size, or take its sign, make full steps of them, in any direction.
# What lies so far below the model's largest gradient is counted and told, and not judged, as far as such steps explain
# how far it is off. A gradient of exactly zero moves nothing, and is judged.
_ROUNDING = 1e-6  # of the largest: some steps of fp32
# An optimizer's tensors that tell how large gradients were, and how to read that.
_SIZES: tuple[tuple[str, Callable[[torch.Tensor], torch.Tensor]], ...] = (
    ("exp_avg_sq", torch.sqrt),  # of Adam and its kin
    ("exp_avg", torch.abs),  # of Lion, which has no other
)
_STEP = 2.0  # learning rates that an element moves in a step at most; Adam's first ones after sparse gradients are more
_MOMENTUM = 8.0  # what Adam's exp_avg can be of the root of its exp_avg_sq, at the usual betas


def keep_tensors(path: Path, tensors: Iterable[tuple[Key, torch.Tensor]], *, is_writing: bool) -> None:
    """Write all tensors; the ranks that do not write go through them with the one that does."""
    if not is_writing:
        for _ in tensors:
            pass
        return
    index, unfinished, largest = [], path.with_suffix(".unfinished"), dict.fromkeys(dict(_SIZES), 0.0)
    with unfinished.open("wb") as file:
        for (kind, name), tensor in tensors:
            index.append([kind, name, str(tensor.dtype).removeprefix("torch."), tensor.numel(), file.tell()])
            file.write(tensor.contiguous().numpy().data)
            if kind in largest and tensor.numel():
                largest[kind] = max(largest[kind], float(dict(_SIZES)[kind](tensor).max()))
    path.with_suffix(".json").write_text(json.dumps({"tensors": index, "largest": largest}))
    unfinished.rename(path)


class KeptTensors:
    """What ``keep_tensors`` wrote."""

    def __init__(self, path: Path) -> None:
        self._path = path
        index = json.loads(path.with_suffix(".json").read_text())
        self._entries = {(kind, name): (dtype, size, start) for kind, name, dtype, size, start in index["tensors"]}
        self._largest: dict[str, float] = index["largest"]

    def __getitem__(self, key: Key) -> torch.Tensor:
        dtype, size, start = self._entries[key]
        kind: torch.dtype = getattr(torch, dtype)
        with self._path.open("rb") as file:
            file.seek(start)
            data = bytearray(file.read(size * kind.itemsize))
        return torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind)

    def distances(
        self, tensors: Iterable[tuple[Key, torch.Tensor]], *, learning_rates: float
    ) -> tuple[tuple[TensorDistance, ...], tuple[str, ...], tuple[str, ...]]:
        """How far each is from the one that was kept; the names of those that only the first run or this one has.

        Args:
            learning_rates: Their sum over all steps.
        """
        found, added, seen = [], [], set()
        for key, tensor in tensors:
            seen.add(key)
            if key in self._entries and self._entries[key][1] == tensor.numel():
                found.append(_distance(key, self[key], tensor, self._explained(key, learning_rates)))
            else:
                added.append(title_of(key))
        missing = tuple(title_of(key) for key in self._entries if key not in seen)
        return tuple(found), missing, tuple(added)

    def _explained(self, key: Key, learning_rates: float) -> torch.Tensor | None:
        """By how much each element may be off where its gradient is rounding alone; None where that is not known."""
        for kind, size in _SIZES:
            sizes_of = (kind, key[1])
            if sizes_of in self._entries:
                if self._entries[sizes_of][1] != self._entries[key][1]:
                    return None
                sizes, rounding = size(self[sizes_of]), _ROUNDING * self._largest[kind]
                if not math.isfinite(rounding):
                    return None
                of_kinds = {
                    PARAMETER: 2 * _STEP * learning_rates,
                    "exp_avg": 2 * _MOMENTUM * rounding,
                    "exp_avg_sq": 2 * rounding**2,
                }
                return ((sizes > 0) & (sizes <= rounding)) * of_kinds.get(key[0], 0.0)
        return None


def title_of(key: Key) -> str:
    """``exp_avg of model.weight``."""
    return f"{key[0]} of {key[1]}"


def _distance(key: Key, kept: torch.Tensor, tensor: torch.Tensor, explained: torch.Tensor | None) -> TensorDistance:
    difference = tensor.double() - kept.double()
    num_rounding, of_rounding = 0, 0.0
    if explained is not None:
        is_rounding = (difference != 0) & (difference.abs() <= explained)
        if num_rounding := int(is_rounding.sum()):
            of_rounding = float(difference[is_rounding].abs().max())
            difference[is_rounding] = 0.0
    norm, of_kept = float(difference.norm()), float(kept.double().norm())
    largest = float(difference.abs().max()) if difference.numel() else 0.0
    return TensorDistance(
        kind=key[0],
        name=key[1],
        distance=0.0 if norm == 0 else norm / of_kept if of_kept and math.isfinite(norm / of_kept) else math.inf,
        largest=largest if math.isfinite(largest) else math.inf,
        size=kept.numel(),
        num_rounding=num_rounding,
        largest_rounding=of_rounding,
    )
