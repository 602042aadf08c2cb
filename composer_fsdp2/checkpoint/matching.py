"""A checkpoint's weights against a model: every tensor matched by name, everything that does not fit named."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from torch import nn

from composer_fsdp2.checkpoint.differences import Difference, DifferenceKind, can_cast, listed
from composer_fsdp2.checkpoint.flat import unflattened
from composer_fsdp2.checkpoint.inventory import MODEL, CheckpointInventory, ObjectRecord, TensorRecord
from composer_fsdp2.checkpoint.names import PREFIXES, canonical
from composer_fsdp2.checkpoint.same_bytes import same_content
from composer_fsdp2.checkpoint.target import TensorTarget, model_target
from composer_fsdp2.checkpoint.trees import EntryPath
from composer_fsdp2.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensor:
    """One tensor of the model, and what is read into it.

    Args:
        duplicates: The file's other entries for a shared parameter, of which only reading shows that they are equal.
    """

    target: TensorTarget
    record: TensorRecord
    duplicates: tuple[TensorRecord, ...] = ()


class ModelMatching:
    """The model's tensors against the file's, and everything that does not fit.

    Args:
        model: Sharded by any plan, or not at all; it is looked at, not changed.
        ignored: Weights that were taken out of the inventory; that they are missing is no difference.
    Attributes:
        inventory: The checkpoint, flat parameters taken apart.
        rename: From a name in the file to the model's.
        renamed: What that changes, where the names differ by more than wrappers' prefixes.
        kept: What the model keeps of its own, in words.
        others: Entries that a hook on ``state_dict`` added, for the modules' own loading code.
    Raises:
        CheckpointError: the checkpoint has no weights, is damaged, or holds flat parameters of another model.
    """

    def __init__(
        self, inventory: CheckpointInventory, model: nn.Module, ignored: frozenset[EntryPath] = frozenset()
    ) -> None:
        self.inventory = unflattened(inventory, model)
        if not self.inventory.model and not ignored:
            raise CheckpointError(f"{inventory.path}: holds no model weights")
        self.model = model
        self.target = model_target(model)
        self.rename = _renaming(map(canonical, self.inventory.model), frozenset(self.target.names()))
        self.ignored = frozenset(self.rename(str(path[2])) for path in ignored if path[:2] == MODEL)
        self.tensors: list[PlannedTensor] = []
        self.extra: dict[str, tuple[nn.Module, TensorRecord | ObjectRecord]] = {}
        self.others: dict[str, TensorRecord | ObjectRecord] = {}
        self.renamed: dict[str, str] = {}
        self.kept: list[str] = []
        self.differences: list[Difference] = []
        self.file: dict[str, TensorRecord | ObjectRecord] = {}
        for name, record in self.inventory.model.items():
            new = self.rename(name)
            if new in self.file:
                self._differ(DifferenceKind.SURPLUS, name, "a second entry under that name", "one")
            self.file[new] = record
            if new != canonical(name):
                self.renamed[name] = new
        self._match()

    def _differ(self, kind: DifferenceKind, name: str, found: object, expected: object) -> None:
        self.differences.append(Difference(kind, name, str(found), str(expected)))

    def _match(self) -> None:
        used: set[str] = set()
        for tensor in self.target.tensors:
            present = [name for name in tensor.names if name in self.file]
            used.update(present)
            if present:
                self._match_tensor(tensor, present)
            elif self.ignored.intersection(tensor.names):
                self.kept.append(f"{tensor.name} (ignored)")
            else:
                self._differ(DifferenceKind.MISSING, " = ".join(tensor.names), "nothing", f"{_describe(tensor)}")
        for name, module in self.target.extra.items():
            if name in self.file:
                used.add(name)
                self.extra[name] = (module, self.file[name])
            elif name in self.target.leafless:
                self.extra[name] = (module, ObjectRecord.of_value(name, {}, is_flattened=True))
            else:
                self._differ(DifferenceKind.MISSING, name, "nothing", "extra state")
        for name in (name for name in self.file if name in self.target.others):
            used.add(name)
            if self.target.is_loadable(name):
                self.others[name] = self.file[name]
            else:
                self._differ(
                    DifferenceKind.SURPLUS,
                    name,
                    "an entry",
                    "a parameter, a buffer or extra state: a state_dict hook or override added it, and no loading hook "
                    "or override of a module takes it",
                )
        for name in self.file:
            if name not in used:
                self._differ(DifferenceKind.SURPLUS, name, "an entry", "nothing of that name in this model")

    def _match_tensor(self, tensor: TensorTarget, present: list[str]) -> None:
        """One tensor of the model, which the file has under these names."""
        duplicates = self._check_ties(present)
        record = self.file[present[0]]
        if not isinstance(record, TensorRecord):
            self._differ(DifferenceKind.TYPE, present[0], "no tensor", _describe(tensor))
        elif record.shape != tensor.shape:
            self._differ(DifferenceKind.SHAPE, present[0], record.shape, tensor.shape)
        else:
            if record.dtype != tensor.value.dtype:
                kind = DifferenceKind.DTYPE if can_cast(record.dtype, tensor.value.dtype) else DifferenceKind.TYPE
                self._differ(kind, present[0], record.dtype, tensor.value.dtype)
            self.tensors.append(PlannedTensor(target=tensor, record=record, duplicates=duplicates))

    def _check_ties(self, names: list[str]) -> tuple[TensorRecord, ...]:
        """A parameter that the model shares was stored once or several times; all must be equal."""
        duplicates = []
        for name in names[1:]:
            copy = self.file[name]
            alike = same_content(self.file[names[0]], copy)
            if alike is False:
                self._differ(
                    DifferenceKind.TIED,
                    f"{names[0]} = {name}",
                    "different values",
                    "one parameter, which the model shares",
                )
            elif alike is None and isinstance(copy, TensorRecord):
                duplicates.append(copy)
        return tuple(duplicates)


def explained(
    tensors: Collection[PlannedTensor],
    renamed: Collection[str],
    left_out: Iterable[str],
    kept: Iterable[str],
    differences: Collection[Difference],
    *,
    num_states: int | None = None,
) -> str:
    """Whether and how it loads, as text.

    Args:
        num_states: How many parameters get optimizer state; None where none is asked for.
    """
    lines = [f"{len(tensors)} tensors of the model" + (f", {len(renamed)} renamed" if renamed else "")]
    if num_states is not None:
        lines.append(f"optimizer state of {num_states} parameters")
    lines += [f"left out: {name}" for name in left_out]
    lines += [f"kept: {name}" for name in kept]
    if differences:
        lines.append(f"does not fit:\n{listed(differences)}")
    return "\n".join(lines)


def _describe(tensor: TensorTarget) -> str:
    return f"{tensor.value.dtype} {tensor.shape}"


def _renaming(file_names: Iterable[str], target_names: frozenset[str]) -> Callable[[str], str]:
    """The change of prefix under which most names of the file are the model's."""
    names = list(file_names)
    ways: list[Callable[[str], str]] = []
    for prefix in PREFIXES:
        ways.append(lambda name, prefix=prefix: f"{prefix}{canonical(name)}")  # type: ignore[misc]
        ways.append(lambda name, prefix=prefix: canonical(name).removeprefix(prefix))  # type: ignore[misc]
    return max(ways, key=lambda way: sum(way(name) in target_names for name in names))  # the first of the best
