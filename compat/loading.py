"""Composer's checkpoint loading, for a model sharded by ``fully_shard``: every layout, whatever the configuration says.

A Trainer's ``load_path``, ``autoresume``, ``load_weights_only``, ``load_ignore_keys`` and ``load_strict_model_weights``
come here; Composer's own loader knew only the layout that the run itself would save.
"""

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from composer.core import State
from composer.utils.checkpoint import glob_filter
from composer.utils.misc import partial_format

from composer_fsdp2._torch.replaced import replaced
from composer_fsdp2.checkpoint.inventory import MODEL, OPTIMIZERS, CheckpointInventory, ObjectRecord, TensorRecord
from composer_fsdp2.checkpoint.load.into_model import load_inventory, other_entries
from composer_fsdp2.checkpoint.open import long_together, opened_checkpoint, together
from composer_fsdp2.checkpoint.trees import EntryPath, dotted, fitted
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.sharding.agree import gather
from composer_fsdp2.sharding.sharded import is_sharded

from .full_state import keeping_shards
from .remote import local_checkpoint
from .seams import seam

log = logging.getLogger(__name__)

# Composer keys an entry by the class that saved it; these are one thing under FSDP1, FSDP2 and closures.
_SCALERS = ("GradScaler", "ShardedGradScaler", "ClosureGradScaler")
IgnoreKeys: TypeAlias = list[str] | Callable[[dict[str, Any]], None] | None


@seam(
    "composer.utils.checkpoint",
    "load_checkpoint",
    why="old checkpoints failed or loaded wrong in silence, and a layout loaded under its own setting only",
)
def load_checkpoint(
    original: Callable[..., Any],
    path: str,
    state: State,
    logger: Any,
    object_store: Any = None,
    load_weights_only: bool = False,
    strict_model_weights: bool = True,
    progress_bar: bool = True,
    ignore_keys: IgnoreKeys = None,
    exclude_algorithms: list[str] | None = None,
    algorithm_passes: Any = None,
) -> list[dict[str, Any]] | None:
    """``composer.utils.checkpoint.load_checkpoint``, taken over where the model is, or will be, sharded."""
    is_ours = is_sharded(state.model) or state.load_monolith_rank0_only
    if not is_ours or _has_load_planner(state):
        return original(
            path=path,
            state=state,
            logger=logger,
            object_store=object_store,
            load_weights_only=load_weights_only,
            strict_model_weights=strict_model_weights,
            progress_bar=progress_bar,
            ignore_keys=ignore_keys,
            exclude_algorithms=exclude_algorithms,
            algorithm_passes=algorithm_passes,
        )
    loading = _Loading(state, load_weights_only, strict_model_weights, ignore_keys)
    path = partial_format(path, run_name=state.run_name)
    with (
        local_checkpoint(path, object_store, progress_bar) as located,
        opened_checkpoint(located, trust=_trusts(state)) as inventory,
    ):
        loading.read(inventory)
        loading.apply_algorithms(logger, exclude_algorithms, algorithm_passes)
        loading.into_model()
        loading.into_state(logger)
    log.info("%s loaded from %s", "Model weights" if load_weights_only else "Trainer checkpoint", path)
    return loading.rng


class _Loading:
    """One load into a Trainer's state, step by step; each is called on all ranks."""

    def __init__(self, state: State, weights_only: bool, strict: bool, ignore_keys: IgnoreKeys) -> None:
        self.state, self.weights_only, self.strict, self.ignore_keys = state, weights_only, strict, ignore_keys
        self.inventory: CheckpointInventory
        self.entries: dict[str, Any] = {}
        self.ignored: frozenset[EntryPath] = frozenset()

    @property
    def rng(self) -> list[dict[str, Any]] | None:
        return None if self.weights_only else self.entries.get("rng")

    def wants(self, root: EntryPath) -> bool:
        """Whether an entry beside the model and the optimizers is read."""
        if self.ignore_keys:
            return True  # what may be ignored is shown unsharded, as Composer shows it
        if self.weights_only:
            return root == ("state", "algorithms")  # some of them changed the model
        # Not restored: a tokenizer of maybe 50000 entries, and who wrote the checkpoint.
        return root not in (("state", "integrations"), ("state", "metadata"))

    def read(self, inventory: CheckpointInventory) -> None:
        """Everything but tensors, checked, before anything is changed."""
        entries = long_together(lambda: other_entries(inventory, wanted=self.wants), "reading a checkpoint's entries")
        if not self.weights_only:
            together(lambda: _restore_containers(entries["state"], self.state, inventory))
        _check_same_step(inventory, entries["state"].get("timestamp"))
        if self.ignore_keys:
            ignore = self.ignore_keys if callable(self.ignore_keys) else glob_filter(self.ignore_keys)
            inventory, entries, self.ignored = long_together(
                lambda: without_ignored(inventory, entries, ignore), "reading a checkpoint's entries"
            )
        self.inventory, self.entries = inventory, entries

    def apply_algorithms(self, logger: Any, exclude: list[str] | None, passes: Any) -> None:
        """Algorithms that the saving run had, and that change the model, before its tensors are matched."""
        if "algorithms" in self.entries["state"]:
            self.state._apply_required_algorithms(self.entries["state"], logger, exclude, passes)
        if not is_sharded(self.state.model):
            # load_monolith_rank0_only: Composer loads rank 0's model and shards it then, which needs the memory for it
            # and left random weights on other ranks. Sharded first, each rank reads its own part.
            self.state._apply_fsdp()

    def into_model(self) -> None:
        """Weights and optimizer state, all or nothing."""
        optimizer = self.optimizer()
        report = load_inventory(
            self.inventory,
            self.state.model,
            optimizer,
            strict=self.strict,
            weights_only=self.weights_only,
            ignored=self.ignored,
        )
        other_optimizers = {f"optimizer {contents.name}" for contents in self.inventory.optimizers}
        is_partial = report.cast or {*report.left_out} - other_optimizers or (report.kept and not self.strict)
        log.log(logging.WARNING if is_partial else logging.INFO, "%s", report)

    def optimizer(self) -> torch.optim.Optimizer | None:
        """The Trainer's optimizer, if the checkpoint has state for it."""
        optimizers = self.state.optimizers
        if self.weights_only or not optimizers:
            return None
        [optimizer] = optimizers
        name = type(optimizer).__qualname__
        if {contents.name for contents in self.inventory.optimizers} & {name, ""}:
            return optimizer
        if not any(path[:2] == OPTIMIZERS for path in self.ignored):
            warnings.warn(f"{name} is not in the state_dict. Its state will not be restored.", stacklevel=2)
        return None

    def into_state(self, logger: Any) -> None:
        """Schedulers, timestamp, callbacks and the rest."""
        if self.weights_only:
            return
        rest = {name: value for name, value in self.entries["state"].items() if name != "algorithms" or value}
        rest["scaler"] = _rekeyed(rest.get("scaler", {}), type(self.state.scaler).__qualname__)
        self.state.load_state_dict(rest, logger)


def _has_load_planner(state: State) -> bool:
    """Whether the user decides how a DCP directory is read; that is Composer's, and torch's, to do then."""
    return state.fsdp_sharded_state_dict_enabled and state.fsdp_config.load_planner is not None


def _trusts(state: State) -> bool:
    return bool(getattr(state.fsdp_config, "trust_checkpoint", False))


def _check_same_step(inventory: CheckpointInventory, timestamp: Any) -> None:
    """Machines with disks of their own may have kept checkpoints of different steps after a crash. Gathers the step."""
    texts = gather(repr(timestamp))
    other = next((rank for rank, text in enumerate(texts) if text != texts[0]), None)
    if other is not None:
        raise CheckpointError(
            f"{inventory.path}: ranks 0 and {other} found checkpoints of different steps; name one that all ranks have "
            f"with load_path, and switch autoresume off\n  rank 0: {texts[0]}\n  rank {other}: {texts[other]}"
        )


def _restore_containers(entries: dict[str, Any], state: State, inventory: CheckpointInventory) -> None:
    """Put what DCP took apart into the containers of the Trainer's state, as its own load does; no communication."""
    in_pieces = {str(path[1]) for path in inventory.entries if path[0] == "state" and len(path) > 2} & entries.keys()
    attributes = [name for name in state.serialized_attributes if name in in_pieces]
    with keeping_shards(True), replaced(state, "serialized_attributes", attributes):
        live = state.state_dict() if attributes else {}
    entries.update((name, fitted(entries[name], live[name])) for name in in_pieces & live.keys())


def _rekeyed(scalers: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The gradient scaler's state under the name of the class that this run uses, if it has any."""
    scalers = {key: value for key, value in scalers.items() if value}  # one that was switched off saved nothing
    if name in scalers or name not in _SCALERS:
        return scalers
    return {name if key in _SCALERS else key: value for key, value in scalers.items()}


def without_ignored(
    inventory: CheckpointInventory, entries: dict[str, Any], ignore: Callable[[dict[str, Any]], None]
) -> tuple[CheckpointInventory, dict[str, Any], frozenset[EntryPath]]:
    """Show ``ignore`` the checkpoint as Composer would, and take out what it takes out.

    Tensors are shown as tensors without data (on the meta device): they can be looked at, renamed, moved and left out.
    One that ``ignore`` puts in itself is loaded instead.
    """
    view, records = _composer_view(inventory, entries)
    before = _paths(view)
    ignore(view)
    view.setdefault("state", {})
    state: dict[str, Any] = view["state"]
    flattened = {(*MODEL, name) for name, record in inventory.model.items() if getattr(record, "is_flattened", False)}
    tensors: dict[EntryPath, TensorRecord] = {}
    objects: dict[EntryPath, ObjectRecord] = {}

    def keep(path: EntryPath, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            known = records.get(id(value))
            if known is None and value.is_meta:
                raise CheckpointError(
                    f"{inventory.path}: ignore_keys computed {dotted(path)} from the checkpoint's tensors, which it is "
                    "shown without their data; it may take them out, rename them, or put in tensors of its own"
                )
            tensors[path] = known[1] if known else TensorRecord.of_tensor(value, dotted(path))
        else:
            objects[path] = ObjectRecord.of_value(dotted(path), value, is_flattened=path in flattened)

    for name, value in state.get("model", {}).items():
        keep((*MODEL, name), value)
    for name, optimizer in state.get("optimizers", {}).items():
        for parameter, values in optimizer.get("state", {}).items():
            for key, value in values.items():
                keep((*OPTIMIZERS, name, "state", parameter, key), value)
        keep((*OPTIMIZERS, name, "param_groups"), optimizer.get("param_groups", []))
    left = {**view, "state": {key: value for key, value in state.items() if key not in ("model", "optimizers")}}
    return inventory.replaced(tensors=tensors, objects=objects), left, frozenset(before - _paths(view))


def _composer_view(
    inventory: CheckpointInventory, entries: dict[str, Any]
) -> tuple[dict[str, Any], dict[int, tuple[torch.Tensor, TensorRecord]]]:
    """The checkpoint in Composer's form, and the record behind each of its tensors (which are kept, so ids stay)."""
    records: dict[int, tuple[torch.Tensor, TensorRecord]] = {}

    def shown_value(record: TensorRecord | ObjectRecord) -> Any:
        if not isinstance(record, TensorRecord):
            return record.value()
        tensor = torch.empty(record.shape, dtype=record.dtype, device="meta")
        records[id(tensor)] = (tensor, record)
        return tensor

    state = dict(entries["state"])
    if inventory.model:
        state["model"] = {name: shown_value(record) for name, record in inventory.model.items()}
    if inventory.optimizers:
        state["optimizers"] = {
            contents.name: {
                "state": {p: {k: shown_value(r) for k, r in values.items()} for p, values in contents.state.items()},
                "param_groups": inventory.groups(contents.name),
            }
            for contents in inventory.optimizers
        }
    return {**entries, "state": state}, records


def _paths(view: Mapping[str, Any]) -> set[EntryPath]:
    """Which weights and which parameters' optimizer state are there."""
    state = view.get("state", {})
    weights: set[EntryPath] = {(*MODEL, name) for name in state.get("model", {})}
    return weights | {
        (*OPTIMIZERS, name, "state", parameter)
        for name, optimizer in state.get("optimizers", {}).items()
        for parameter in optimizer.get("state", {})
    }
