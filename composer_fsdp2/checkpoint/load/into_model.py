"""Load a checkpoint of any layout into a model with any sharding. Each rank reads its own shards."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composer_fsdp2.checkpoint.inventory import MODEL, OPTIMIZERS, CheckpointInventory
from composer_fsdp2.checkpoint.load.content import check_content, check_own_content
from composer_fsdp2.checkpoint.load.load_plan import LoadPlan, plan_load
from composer_fsdp2.checkpoint.load.staging import Staging
from composer_fsdp2.checkpoint.open import find, long_together, opened_checkpoint, together
from composer_fsdp2.checkpoint.read import Reader, materialized
from composer_fsdp2.checkpoint.trees import EntryPath
from composer_fsdp2.config.text import and_more
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.sharding.optimizer import Optimizers, check_optimizers, the_optimizer
from composer_fsdp2.sharding.sharded import reshard


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The result of a load on this rank.

    Args:
        inventory: The entries that were loaded.
        loaded: The names of the model's tensors that were loaded.
        optimizer_loaded: The names of the parameters whose optimizer state was loaded.
        renamed: The model's names of renamed parameters, by their names in the file.
        left_out: Entries of the file that were not loaded.
        kept: Values of model and optimizer that the file does not have, and that are unchanged.
        cast: Tensors whose dtype differed (``strict=False``).
        num_bytes: The number of bytes of tensor data that this rank read.
        unchecked_bytes: The number of bytes that all ranks read without a CRC32 to compare with.

    Example:
        >>> torch.save({"state": {"model": nn.Linear(4, 2).state_dict()}}, "ep1.pt")
        >>> report = load_checkpoint("ep1.pt", nn.Linear(4, 2))
        >>> report.loaded, report.num_bytes
        (('weight', 'bias'), 40)
    """

    inventory: CheckpointInventory
    loaded: tuple[str, ...]
    optimizer_loaded: tuple[str, ...]
    renamed: dict[str, str]
    left_out: tuple[str, ...]
    kept: tuple[str, ...]
    cast: tuple[str, ...]
    num_bytes: int
    unchecked_bytes: int
    seconds: float
    _entries: dict[str, Any] | None = field(default=None, repr=False)

    def other_entries(self) -> dict[str, Any]:
        """Read schedulers, timestamp, RNG states and so on now, as ``{'state': {...}, 'rng': [...]}``."""
        return other_entries(self.inventory) if self._entries is None else self._entries

    def __str__(self) -> str:
        lines = [
            f"{self.inventory.path} ({self.inventory.layout}): {len(self.loaded)} tensors, optimizer state of "
            f"{len(self.optimizer_loaded)} parameters, {self.num_bytes / 2**20:.1f} MiB read here in "
            f"{self.seconds:.2f} s"
        ]
        renamed = tuple(f"{old} -> {new}" for old, new in self.renamed.items())
        for title, names in (
            ("renamed", renamed),
            ("cast", self.cast),
            ("left out", self.left_out),
            ("not in the file", self.kept),
        ):
            if names:
                lines.append(f"{title}: {and_more(names, 8)}")
        if self.unchecked_bytes:
            lines.append(f"{self.unchecked_bytes / 2**20:.1f} MiB have no CRC32 to be checked against")
        return "\n".join(lines)


def load_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizers: Optimizers = None,
    *,
    strict: bool = True,
    weights_only: bool = False,
    trust: bool = False,
) -> LoadReport:
    """Load a checkpoint of any layout, saved with any sharding, into ``model`` and its optimizer.

    Each rank reads the bytes of its own shards. If a shard has replicas (``NO_SHARD``, HSDP, a DDP model), one of their
    ranks reads it. The bytes are staged in host memory and checked against the CRC32s in the file before the model or
    the optimizer is modified. If that fails on one rank, all ranks raise. Then replicas are broadcast into the model
    and the optimizer, in pieces of 64 MiB.

    Args:
        path: A file or folder; see ``inspect_checkpoint``.
        model: A model after ``prepare_fully_shard`` or ``apply_plan`` with any plan, a plain model or a DDP model.
        optimizers: The optimizer of the model's parameters. With None, optimizer state is not loaded.
        strict: Raise for missing and unexpected entries and for different dtypes; the error lists all of them. If
            False, the matching entries are loaded, floating dtypes are cast, and the report lists the others. Different
            shapes always raise.
        weights_only: Do not load optimizer state.
        trust: Execute the pickles of entries that are more than plain data; a warning names each.
    Returns:
        A report; ``other_entries()`` reads schedulers, timestamp and random states.
    Raises:
        CheckpointError: on all ranks; lists everything that is damaged, missing or does not match. Model and optimizer
            are unchanged.

    Called on all ranks of the default process group, or in one process without a group. It compares plans, sums CRC32s
    and broadcasts replicas.

    Example:
        >>> torch.save({"state": {"model": nn.Sequential(nn.Linear(4, 2)).state_dict()}}, "ep1.pt")
        >>> model = nn.Sequential(nn.Linear(4, 2))
        >>> _ = prepare_fully_shard(model, None, {}, precision="fp32", device="cpu")
        >>> load_checkpoint("ep1.pt", model).loaded
        ('0.weight', '0.bias')
    """
    started = time.perf_counter()
    optimizer = the_optimizer(optimizers)
    with opened_checkpoint(together(lambda: find(path)), trust=trust) as inventory:
        report = load_inventory(inventory, model, optimizer, strict=strict, weights_only=weights_only, started=started)
        # Entries of a temporary file must be read now.
        return replace(report, _entries=report.other_entries()) if inventory.compressed else report


def load_inventory(
    inventory: CheckpointInventory,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    strict: bool = True,
    weights_only: bool = False,
    ignored: frozenset[EntryPath] = frozenset(),
    started: float | None = None,
) -> LoadReport:
    """As ``load_checkpoint``, for an inventory that is the same on every rank.

    Args:
        ignored: Weights, and parameters with optimizer states, that the caller removed from the inventory. That they
            are missing is not an error.
    """
    started = time.perf_counter() if started is None else started
    reshard(model)

    def decide() -> LoadPlan:
        check_optimizers(model, optimizer)
        plan = plan_load(inventory, model, optimizer, weights_only=weights_only, ignored=ignored)
        plan.refuse(strict=strict)
        return plan

    plan = long_together(decide, "planning a load")
    together(lambda: plan, lambda made: made.fingerprint)
    staging = Staging(plan, strict=strict)
    with Reader() as reader:
        long_together(lambda: staging.read(reader), "reading a checkpoint")
    unchecked_bytes = check_content(reader, staging.records(), plan.inventory.path)
    if staging.has_duplicates:
        together(staging.check_duplicates)
    staging.share()
    _run_custom_load(staging)
    together(staging.commit)
    return _report(
        plan, num_bytes=reader.num_bytes, unchecked_bytes=unchecked_bytes, seconds=time.perf_counter() - started
    )


def _run_custom_load(staging: Staging) -> None:
    """Run the user's loading code on all ranks. If it raises on one, undo it on all. Called on all ranks."""
    try:
        together(staging.run_custom_load)
    except CheckpointError:
        staging.undo_custom_load()  # if it succeeded on this rank
        raise


def _report(plan: LoadPlan, *, num_bytes: int, unchecked_bytes: int, seconds: float) -> LoadReport:
    return LoadReport(
        inventory=plan.inventory,
        loaded=tuple(name for planned in plan.tensors for name in planned.target.names),
        optimizer_loaded=tuple(state.name for state in plan.optimizer.states) if plan.optimizer else (),
        renamed=plan.renamed,
        left_out=plan.left_out,
        kept=plan.kept,
        cast=tuple(p.target.name for p in plan.tensors if p.record.dtype != p.target.value.dtype),
        num_bytes=num_bytes,
        unchecked_bytes=unchecked_bytes,
        seconds=seconds,
    )


def other_entries(
    inventory: CheckpointInventory, *, wanted: Callable[[EntryPath], bool] = lambda _: True
) -> dict[str, Any]:
    """Read all entries except model and optimizers as plain values, in Composer's structure.

    Args:
        wanted: Called with each root (``('state', 'timestamp')``, ``('rng',)``); entries below others are not read.
    Raises:
        CheckpointError: an entry is damaged, or contains more than plain data and is not trusted.

    Does not communicate; every rank reads all of these entries.
    """
    entries: dict[str, Any] = {"state": {}}
    paths = (*inventory.objects, *inventory.tensors)
    # Attributes of ``state`` and other top-level entries, in the file's order.
    roots = dict.fromkeys(path[:2] if path[0] == "state" else path[:1] for path in paths)
    with Reader() as reader:
        for root in roots:
            if root in (MODEL, OPTIMIZERS) or not wanted(root):
                continue
            value = materialized(inventory.tree(root), reader)
            if len(root) == 2:
                entries["state"][root[1]] = value
            else:
                entries[str(root[0])] = value
    check_own_content(reader, inventory.path)
    return entries
