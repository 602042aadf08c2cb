"""Make Composer load checkpoints of any layout into a model sharded by ``fully_shard``, regardless of the
configuration.

Used for a Trainer's ``load_path``, ``autoresume``, ``load_weights_only``, ``load_ignore_keys`` and
``load_strict_model_weights``. Composer's own loader supports only the layout that the run itself would save.
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
from composer_fsdp2.sharding.agree import all_gather_object
from composer_fsdp2.sharding.sharded import is_sharded

from .full_state import keeping_shards
from .remote import local_checkpoint
from .seams import seam

log = logging.getLogger(__name__)

# Composer stores a scaler's state under its class name; FSDP1, FSDP2 and closures use different classes.
_SCALERS = ("GradScaler", "ShardedGradScaler", "ClosureGradScaler")
IgnoreKeys: TypeAlias = list[str] | Callable[[dict[str, Any]], None] | None


@seam(
    "composer.utils.checkpoint",
    "load_checkpoint",
    why="old checkpoints failed or silently loaded wrong values, and a layout loaded only with its own setting",
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
    """Replaces ``composer.utils.checkpoint.load_checkpoint`` for a model that is, or will be, sharded."""
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
    """The steps of loading a checkpoint into a Trainer's state. Each step is called on all ranks."""

    def __init__(self, state: State, weights_only: bool, strict: bool, ignore_keys: IgnoreKeys) -> None:
        self.state, self.weights_only, self.strict, self.ignore_keys = state, weights_only, strict, ignore_keys
        self.inventory: CheckpointInventory
        self.entries: dict[str, Any] = {}
        self.ignored: frozenset[EntryPath] = frozenset()

    @property
    def rng(self) -> list[dict[str, Any]] | None:
        return None if self.weights_only else self.entries.get("rng")

    def wants(self, root: EntryPath) -> bool:
        """Whether to read ``root``, an entry other than the model and the optimizers."""
        if self.ignore_keys:
            return True  # ignore functions see all entries, unsharded, as in Composer
        if self.weights_only:
            return root == ("state", "algorithms")  # some algorithms changed the model
        # Not restored: the tokenizer, with up to 50000 entries, and the version metadata.
        return root not in (("state", "integrations"), ("state", "metadata"))

    def read(self, inventory: CheckpointInventory) -> None:
        """Read and check everything except tensors, before anything is changed."""
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
        """Apply the algorithms of the saving run that change the model, so its tensors match.

        Shards the model if necessary.
        """
        if "algorithms" in self.entries["state"]:
            self.state._apply_required_algorithms(self.entries["state"], logger, exclude, passes)
        if not is_sharded(self.state.model):
            # load_monolith_rank0_only: Composer loads the full model on rank 0 and then shards it, which needs the
            # memory, and left random weights on other ranks. Here the model is sharded first, and each rank reads its
            # own shards.
            self.state._apply_fsdp()

    def into_model(self) -> None:
        """Load weights and optimizer state, all or nothing."""
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
        """The Trainer's optimizer, if the checkpoint contains its state."""
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
        """Load schedulers, timestamp, callbacks and the other entries."""
        if self.weights_only:
            return
        rest = {name: value for name, value in self.entries["state"].items() if name != "algorithms" or value}
        rest["scaler"] = _rekeyed(rest.get("scaler", {}), type(self.state.scaler).__qualname__)
        self.state.load_state_dict(rest, logger)


def _has_load_planner(state: State) -> bool:
    """Whether the user set a load planner for a DCP checkpoint. Composer's own loader then loads it."""
    return state.fsdp_sharded_state_dict_enabled and state.fsdp_config.load_planner is not None


def _trusts(state: State) -> bool:
    return bool(getattr(state.fsdp_config, "trust_checkpoint", False))


def _check_same_step(inventory: CheckpointInventory, timestamp: Any) -> None:
    """Raise on all ranks if ranks found checkpoints of different steps. Called on all ranks; all-gathers the step.

    Machines without a shared file system may have different latest checkpoints after a crash.
    """
    texts = all_gather_object(repr(timestamp))
    other = next((rank for rank, text in enumerate(texts) if text != texts[0]), None)
    if other is not None:
        raise CheckpointError(
            f"{inventory.path}: ranks 0 and {other} found checkpoints of different steps; name one that all ranks have "
            f"with load_path, and switch autoresume off\n  rank 0: {texts[0]}\n  rank {other}: {texts[other]}"
        )


def _restore_containers(entries: dict[str, Any], state: State, inventory: CheckpointInventory) -> None:
    """Rebuild nested containers from entries that DCP flattened, as DCP's loader does. Does not communicate."""
    in_pieces = {str(path[1]) for path in inventory.entries if path[0] == "state" and len(path) > 2} & entries.keys()
    attributes = [name for name in state.serialized_attributes if name in in_pieces]
    with keeping_shards(True), replaced(state, "serialized_attributes", attributes):
        live = state.state_dict() if attributes else {}
    entries.update((name, fitted(entries[name], live[name])) for name in in_pieces & live.keys())


def _rekeyed(scalers: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the gradient scaler's state under the class name of this run's scaler, if it has state."""
    scalers = {key: value for key, value in scalers.items() if value}  # a disabled scaler saves no state
    if name in scalers or name not in _SCALERS:
        return scalers
    return {name if key in _SCALERS else key: value for key, value in scalers.items()}


def without_ignored(
    inventory: CheckpointInventory, entries: dict[str, Any], ignore: Callable[[dict[str, Any]], None]
) -> tuple[CheckpointInventory, dict[str, Any], frozenset[EntryPath]]:
    """Apply a ``load_ignore_keys`` function: call it with the checkpoint in Composer's form, and drop the entries that
    it removes.

    Tensors are on the meta device: ``ignore`` may inspect, rename, move and remove them. A tensor that it sets is
    loaded instead of the checkpoint's.
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
    """Return the checkpoint in Composer's form on the meta device, and each tensor with its record by ``id``.

    The result keeps the tensors alive, so no ``id`` is reused.
    """
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
    """The paths of weights, and of parameters with optimizer state."""
    state = view.get("state", {})
    weights: set[EntryPath] = {(*MODEL, name) for name in state.get("model", {})}
    return weights | {
        (*OPTIMIZERS, name, "state", parameter)
        for name, optimizer in state.get("optimizers", {}).items()
        for parameter in optimizer.get("state", {})
    }
