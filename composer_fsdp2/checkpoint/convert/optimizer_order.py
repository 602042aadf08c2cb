"""Names for optimizer states that a checkpoint keys by position, as ``optimizer.state_dict()`` does without FSDP."""

from collections.abc import Mapping, Sequence

from torch import nn

from composer_fsdp2.checkpoint.inventory import CheckpointInventory, OptimizerContents, TensorRecord
from composer_fsdp2.checkpoint.names import canonical
from composer_fsdp2.checkpoint.same_bytes import SameBytes
from composer_fsdp2.errors import CheckpointError

Shape = tuple[int, ...]


def names_of_positions(
    inventory: CheckpointInventory, contents: OptimizerContents, model: nn.Module | None = None
) -> Mapping[int, str]:
    """The name in the file's model for each position.

    The optimizer was given ``model.parameters()``, whose order is that of the state dict: so the positions are its
    names in order, without buffers and second names of tied weights. Shapes must leave one way to match them.

    Raises:
        CheckpointError: there are several groups, which may have been made in any order, or several ways, or none;
            says what helps.
    """
    where = f"{inventory.path}: the state of {contents.name} is keyed by position"
    groups = inventory.groups(contents.name)
    positions = [key for group in groups for key in group.get("params", ())] or sorted(map(int, contents.state))
    if len(groups) > 1 and len(set(positions)) > 1:
        raise CheckpointError(
            f"{where} in {len(groups)} groups, so the model's order does not tell whose it is; leave it out "
            "(optimizer=False, --no-optimizer), or load the checkpoint in place into that optimizer (load_checkpoint)"
        )
    candidates = _candidates(inventory, model)
    shapes = [_shape(contents, position) for position in positions]
    found = _only_matching(shapes, [shape for _, shape in candidates])
    if isinstance(found, str):
        raise CheckpointError(
            f"{where}; {found} to give its {len(positions)} parameters the names of the model's {len(candidates)} "
            f"tensors in their order{'' if model else '; give the model (model=, --model), which tells its buffers'}, "
            "or leave the optimizer out (optimizer=False, --no-optimizer)"
        )
    return {position: candidates[place][0] for position, place in zip(positions, found, strict=True)}


def _candidates(inventory: CheckpointInventory, model: nn.Module | None) -> list[tuple[str, Shape]]:
    """The model's parameters as far as can be told, in order."""
    parameters = None if model is None else {canonical(name) for name, _ in model.named_parameters()}
    candidates: list[tuple[str, Shape]] = []
    known = SameBytes[str]()
    for name, record in inventory.model.items():
        if not isinstance(record, TensorRecord) or (parameters is not None and canonical(name) not in parameters):
            continue
        may_be_tied = parameters is None and len(record.shape) > 1
        if not may_be_tied or known.first(record, copies=True) is None:
            candidates.append((name, record.shape))
            known.add(name, record)
    return candidates


def _shape(contents: OptimizerContents, position: int) -> Shape | None:
    """The parameter's shape, from its moments; None where there is no state, or step counts alone."""
    entries = contents.state.get(position, {})
    shapes = [record.shape for record in entries.values() if isinstance(record, TensorRecord) and record.shape]
    if shapes:
        return shapes[0]
    return None


def _only_matching(shapes: Sequence[Shape | None], candidates: Sequence[Shape]) -> list[int] | str:
    """Places of the candidates that fit in order, if there is one way; else 'there is no way', or 'several'.

    Of all ways, one has each shape at its first possible place, and one at its last.
    """
    first = _earliest(shapes, candidates)
    if first is None:
        return "there is no way"
    backwards = _earliest(shapes[::-1], candidates[::-1])
    assert backwards is not None
    is_only = first == [len(candidates) - 1 - place for place in reversed(backwards)]
    return first if is_only else "there are several ways"


def _earliest(shapes: Sequence[Shape | None], candidates: Sequence[Shape]) -> list[int] | None:
    """For each shape the first candidate that fits, after that of the shape before; None where one has none."""
    places: list[int] = []
    for place, candidate in enumerate(candidates):
        if len(places) < len(shapes) and shapes[len(places)] in (None, candidate):
            places.append(place)
    return places if len(places) == len(shapes) else None
