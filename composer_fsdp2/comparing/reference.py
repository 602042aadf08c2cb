"""The first run's tensors on disk, and the distances of other runs' tensors from them."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from composer_fsdp2.comparing.full_tensors import Key
from composer_fsdp2.comparing.run_record import PARAMETER, TensorDistance

# [Note: rounding alone] Some gradients are zero except for rounding, such as that of attention's key bias, to which
# softmax is invariant. Optimizers that divide by the size of a gradient, or take its sign, make full steps of them, in
# any direction. Elements whose gradients are that far below the model's largest are counted, but not judged, as long as
# such steps explain their difference. A gradient of exactly zero causes no step, and is judged.
_ROUNDING = 1e-6  # relative to the largest gradient: some steps of fp32
# Optimizer state from which the size of gradients is computed.
_SIZES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp_avg_sq": torch.sqrt,  # Adam and its kin
    "exp_avg": torch.abs,  # Lion, which has no other state
}
_STEP = 2.0  # learning rates that an element moves in a step at most; Adam's first ones after sparse gradients are more
_MOMENTUM = 8.0  # the largest ratio of Adam's exp_avg to the root of its exp_avg_sq, at the usual betas


def write_reference(folder: Path, tensors: Iterable[tuple[Key, torch.Tensor]], *, is_writing: bool) -> None:
    """Write all tensors. Called on all ranks, which gather each tensor together; one rank writes."""
    keys: list[Key] = []
    largest = dict.fromkeys(_SIZES, 0.0)
    for key, tensor in tensors:
        if is_writing:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(tensor.clone(), folder / f"{len(keys)}.pt")  # a view would be saved with all of its storage
            keys.append(key)
            if key[0] in _SIZES and tensor.numel():
                largest[key[0]] = max(largest[key[0]], float(_SIZES[key[0]](tensor).max()))
    if is_writing:
        (folder / "index.json").write_text(json.dumps({"keys": keys, "largest": largest}))


class Reference:
    """Reads the tensors that ``write_reference`` wrote."""

    def __init__(self, folder: Path) -> None:
        index = json.loads((folder / "index.json").read_text())
        self._paths: dict[Key, Path] = {
            (kind, name): folder / f"{number}.pt" for number, (kind, name) in enumerate(index["keys"])
        }
        self._largest: dict[str, float] = index["largest"]

    def distances(
        self, tensors: Iterable[tuple[Key, torch.Tensor]], *, learning_rates: float = 0.0
    ) -> tuple[TensorDistance, ...]:
        """The distance of each tensor from that of the first run, including tensors that only one of the two runs has.

        Args:
            learning_rates: The sum of the learning rates of all steps. It bounds the differences that count as
                rounding; 0 before the first step.
        """
        found, missing = [], dict.fromkeys(self._paths)
        for key, tensor in tensors:
            if key in missing:
                del missing[key]
                reference = self._read(key)
                found.append(_distance(key, reference, tensor, self._rounding_bounds(key, reference, learning_rates)))
            else:
                found.append(_without_counterpart(key, tensor.numel(), "this"))
        return (*found, *(_without_counterpart(key, self._read(key).numel(), "first") for key in missing))

    def _read(self, key: Key) -> torch.Tensor:
        tensor: torch.Tensor = torch.load(self._paths[key])
        return tensor

    def _rounding_bounds(self, key: Key, reference: torch.Tensor, learning_rates: float) -> torch.Tensor | None:
        """For each element, the largest difference that rounding can cause.

        Zero except where the gradient is no larger than its rounding error. None if it is unknown.
        """
        kind = next((kind for kind in _SIZES if (kind, key[1]) in self._paths), None)
        if kind is None or not learning_rates:
            return None
        sizes, rounding = _SIZES[kind](self._read((kind, key[1]))), _ROUNDING * self._largest[kind]
        if sizes.numel() != reference.numel() or not math.isfinite(rounding):
            return None
        bounds = {
            PARAMETER: 2 * _STEP * learning_rates,
            "exp_avg": 2 * _MOMENTUM * rounding,
            "exp_avg_sq": 2 * rounding**2,
        }
        return ((sizes > 0) & (sizes <= rounding)) * bounds.get(key[0], 0.0)


def _without_counterpart(key: Key, size: int, only_in: str) -> TensorDistance:
    kind, name = key
    return TensorDistance(kind=kind, name=name, distance=math.inf, largest=math.inf, size=size, only_in=only_in)


def _distance(
    key: Key, reference: torch.Tensor, tensor: torch.Tensor, rounding_bounds: torch.Tensor | None
) -> TensorDistance:
    if tensor.numel() != reference.numel():
        return _without_counterpart(key, reference.numel(), "")
    difference = tensor.double() - reference.double()
    rounding = difference.new_empty(0)
    if rounding_bounds is not None:
        is_rounding = (difference != 0) & (difference.abs() <= rounding_bounds)
        rounding = difference[is_rounding].abs()
        difference[is_rounding] = 0.0
    norm, reference_norm = float(difference.norm()), float(reference.double().norm())
    largest = float(difference.abs().max()) if difference.numel() else 0.0
    relative = norm / reference_norm if reference_norm else math.inf
    return TensorDistance(
        kind=key[0],
        name=key[1],
        distance=0.0 if norm == 0 else relative if math.isfinite(relative) else math.inf,
        largest=largest if math.isfinite(largest) else math.inf,
        size=reference.numel(),
        num_rounding=rounding.numel(),
        largest_rounding=float(rounding.max()) if rounding.numel() else 0.0,
    )
