"""Names for optimizer states that a checkpoint keys by position, as ``optimizer.state_dict()`` does without FSDP."""

from collections.abc import Mapping, Sequence

from torch import nn

from composer_fsdp2.checkpoint.inventory import CheckpointInventory, OptimizerContents, TensorRecord
from composer_fsdp2.checkpoint.names import canonical
from composer_fsdp2.checkpoint.same_bytes import have_same_bytes
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
    records: list[tuple[str, TensorRecord]] = []
    for name, record in inventory.model.items():
        if not isinstance(record, TensorRecord) or (parameters is not None and canonical(name) not in parameters):
            continue
        is_tied = parameters is None and any(
            len(record.shape) > 1 and have_same_bytes(record, other) for _, other in records
        )
        if not is_tied:
            records.append((name, record))
    return [(name, record.shape) for name, record in records]


def _shape(contents: OptimizerContents, position: int) -> Shape | None:
    """The parameter's shape, from its moments; None where there is no state, or step counts alone."""
    entries = contents.state.get(position, {})
    shapes = [record.shape for record in entries.values() if isinstance(record, TensorRecord) and record.shape]
    if shapes:
        return shapes[0]
    return None


def _only_matching(shapes: Sequence[Shape | None], candidates: Sequence[Shape]) -> list[int] | str:
    """Places of the candidates that fit in order, if there is one way; else 'there is no way', or 'several'.

    ``ways[i][j]``: of matching the shapes from i on to candidates from j on, counted up to 2.
    """
    rows, columns = len(shapes), len(candidates)
    ways = [[0] * (columns + 1) for _ in range(rows)] + [[1] * (columns + 1)]
    for i in range(rows - 1, -1, -1):
        for j in range(columns - 1, -1, -1):
            fits = shapes[i] in (None, candidates[j])
            ways[i][j] = min(2, ways[i][j + 1] + (ways[i + 1][j + 1] if fits else 0))
    if ways[0][0] != 1:
        return "there is no way" if ways[0][0] == 0 else "there are several ways"
    found, j = [], 0
    for i in range(rows):
        while ways[i][j + 1]:
            j += 1
        found.append(j)
        j += 1
    return found
