"""``convert_checkpoint``: convert a checkpoint of any layout to another, in little memory; restartable."""

import functools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from composer_fsdp2.checkpoint.archive.disk import sync, sync_folder, write_all
from composer_fsdp2.checkpoint.convert.conversion_plan import ConversionPlan, check_options, plan_conversion
from composer_fsdp2.checkpoint.convert.copying import (
    Copied,
    Copier,
    CopyTask,
    check_sources,
    crcs_of_writes,
    is_written,
    tasks_of,
)
from composer_fsdp2.checkpoint.convert.unfinished import Unfinished, writing
from composer_fsdp2.checkpoint.inventory import CheckpointInventory
from composer_fsdp2.checkpoint.open import Located, expanded, find, inventory_of, long_together, unpacked
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.sharding.agree import all_gather_object

Progress: TypeAlias = Callable[[int, int], None]
_Time: TypeAlias = tuple[int, int]
_Planner: TypeAlias = Callable[[CheckpointInventory], ConversionPlan]


@dataclass(frozen=True, kw_only=True)
class ConversionReport:
    """The result of a conversion.

    Args:
        files: The files of the destination.
        num_tensors: The number of tensors written. A tensor that is split over files counts once.
        read_bytes: The number of bytes of tensor data that this call read.
        written_bytes: The number of bytes that this call wrote.
        kept_bytes: The number of bytes of tensor data that an earlier, interrupted call had written.
        unchecked_bytes: The number of bytes of tensor data from sources without CRC32s (safetensors).
        dropped, renamed, remarks: As in ``ConversionPlan``.

    Example:
        >>> save_monolithic({"state": {"model": nn.Linear(4, 2).state_dict()}}, "ep1.pt")
        >>> report = convert_checkpoint("ep1.pt", "weights", to="safetensors")
        >>> report.num_tensors
        2
    """

    source: str
    destination: str
    to: str
    files: tuple[str, ...]
    num_tensors: int
    read_bytes: int
    written_bytes: int
    kept_bytes: int
    unchecked_bytes: int
    seconds: float
    dropped: tuple[str, ...]
    renamed: Mapping[str, str]
    remarks: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON data."""
        return asdict(self)


def convert_checkpoint(
    source: str | Path,
    destination: str | Path,
    *,
    to: str,
    model: nn.Module | None = None,
    optimizer: bool = True,
    dtype: torch.dtype | None = None,
    files: int | None = None,
    include: Sequence[str] | None = None,
    dry_run: bool = False,
    trust: bool = False,
    progress: Progress | None = None,
) -> ConversionReport | ConversionPlan:
    """Write a checkpoint in another layout.

    The source is not changed. The output is written next to the destination (``.{name}.converting``), synced and
    renamed. If a call is killed, the next call with the same arguments resumes. Each record of the source is checked
    against its CRC32. Memory is limited to a few chunks of 4 MiB plus the values that are not tensors, for any size of
    the checkpoint.

    Args:
        to: ``"monolithic"`` (Composer's ``state_dict_type: full``: one .pt), ``"dcp"`` (``sharded``: a folder, as
            Composer 0.24 and later write it on torch 2.4 and later), or ``"safetensors"`` (a Hugging Face folder of the
            weights only, with config.json and tokenizer if the checkpoint has them).
        model: The model that was saved. Required for flat parameters (``local``), whose files have no parameter names,
            and for an optimizer keyed by position if the file does not determine the names.
        optimizer: If False, the optimizers' states and hyperparameters are not converted.
        dtype: Cast the model's floating-point tensors; optimizer states keep their dtype.
        files: The number of files over which tensors are split. By default, as many as keep each file below 5 GB.
        include: Keep only tensors of the model that match one of these patterns (``model.blocks.*``), and their
            optimizer state.
        dry_run: Return the plan; print it to see what would be written. Changes nothing.
        trust: Unpickle classes that are not plain data, which can run any code; only for files whose author you trust.
        progress: Called on the rank that converts, with the number of completed bytes and the total.
    Raises:
        ConfigError: an invalid ``to``, or ``files`` or ``dtype`` that the layout does not support.
        CheckpointError: on every rank. The source is damaged or has no known layout, the destination exists or cannot
            be written, or the disk has too little space. The destination is not created.
    With a process group, called on all ranks. Rank 0 converts while the other ranks poll the store, outside of
    collectives. In a dry run each rank makes the plan itself.

    Example:
        >>> save_monolithic({"state": {"model": nn.Linear(4, 2).state_dict()}}, "ep1.pt")
        >>> _ = convert_checkpoint("ep1.pt", "weights", to="safetensors")
        >>> list(inspect_checkpoint("weights").tensors)
        [('state', 'model', 'weight'), ('state', 'model', 'bias')]
    """
    start = time.monotonic()
    check_options(to, files, dtype)
    target = expanded(destination).absolute()
    plan_from = functools.partial(
        plan_conversion,
        destination=target,
        to=to,
        model=model,
        optimizer=optimizer,
        dtype=dtype,
        files=files,
        include=include,
    )
    if dry_run:
        return long_together(lambda: _planned(source, target, plan_from, trust), "planning a conversion")
    report = long_together(
        lambda: _convert(source, target, plan_from, trust, progress, start), "converting a checkpoint", ranks=[0]
    )
    of_first: ConversionReport = all_gather_object(report)[0]
    return of_first


def _planned(source: str | Path, target: Path, plan_from: _Planner, trust: bool) -> ConversionPlan:
    with unpacked(_find(source, target)) as located:
        return plan_from(inventory_of(located, trust=trust))


def _convert(
    source: str | Path, target: Path, plan_from: _Planner, trust: bool, progress: Progress | None, start: float
) -> ConversionReport:
    located = _find(source, target)
    before = _times(located.files)
    staging = Unfinished(target)
    with staging.locked():
        with staging.discarded_unless_begun():
            inventory = inventory_of(staging.unpacked(located), trust=trust)
            plan = plan_from(inventory)
            staging.begin(plan.fingerprint, plan.files)
        sources = {path: before.get(path) for path, _ in inventory.files}
        return _Conversion(plan, staging, progress).run(sources, start)


def _find(source: str | Path, target: Path) -> Located:
    """Find the source, and check that the destination does not exist and is not inside of the source."""
    found = find(source)
    if os.path.lexists(target):
        raise CheckpointError(f"{target}: exists; remove it, or give another destination")
    if found.path.is_dir() and target.resolve().is_relative_to(found.path.resolve()):
        raise CheckpointError(f"{target}: lies inside of the source, {found.path}; give another destination")
    return found


class _Conversion:
    """The work itself: copy, check, finish, publish."""

    def __init__(self, plan: ConversionPlan, staging: Unfinished, progress: Progress | None) -> None:
        self.plan, self.staging, self.progress = plan, staging, progress
        self.tasks = tasks_of(plan.files)
        self.total_bytes = sum(task.num_bytes for task in self.tasks)
        self.read_bytes = self.written_bytes = self.kept_bytes = 0

    def run(self, sources: Mapping[Path, _Time | None], start: float) -> ConversionReport:
        """Execute the conversion.

        Args:
            sources: The source's files, with their modification times before anything was read.
        """
        with writing(self.plan.destination, self.staging.folder):
            copied = self.keep(self.staging.done(self.tasks))
            copied |= self.copy([task for task in self.tasks if task.number not in copied])
            unchecked = self.finish(copied)
            if _times(sources) != sources:
                raise CheckpointError(f"{self.plan.source}: changed during the conversion; run it again")
            self.staging.publish(self.plan.files)
        return ConversionReport(
            source=str(self.plan.source),
            destination=str(self.plan.destination),
            to=self.plan.to,
            files=tuple(str(file.path(self.plan.destination)) for file in self.plan.files),
            num_tensors=self.plan.num_tensors,
            read_bytes=self.read_bytes,
            written_bytes=self.written_bytes,
            kept_bytes=self.kept_bytes,
            unchecked_bytes=unchecked,
            seconds=time.monotonic() - start,
            dropped=self.plan.dropped,
            renamed=self.plan.renamed,
            remarks=self.plan.remarks,
        )

    def keep(self, earlier: Mapping[int, Copied]) -> dict[int, Copied]:
        """Determine which tasks of an earlier, interrupted run are complete."""
        kept: dict[int, Copied] = {}
        for task in self.tasks:
            if task.number in earlier and is_written(task, earlier[task.number], self.path(task.file)):
                kept[task.number] = earlier[task.number]
                self.kept_bytes += task.num_bytes
                self.report_progress()
        return kept

    def copy(self, tasks: Sequence[CopyTask]) -> dict[int, Copied]:
        """Copy, and record finished tasks in a journal."""
        copied: dict[int, Copied] = {}
        with self.staging.journal() as journal, Copier(self.plan.files) as copier:
            for task, now in copier.copy(tasks, self.path):
                self.staging.note(journal, task, now)
                copied[task.number] = now
                self.written_bytes += task.num_bytes
                self.read_bytes += sum(part.end - part.start for part in now.parts)
                self.report_progress()
        return copied

    def report_progress(self) -> None:
        if self.progress is not None:
            self.progress(self.kept_bytes + self.written_bytes, self.total_bytes)

    def path(self, file: int) -> Path:
        return self.staging.path(self.plan.files[file])

    def finish(self, copied: Mapping[int, Copied]) -> int:
        """Check the ranges that were read, and write everything except tensor data.

        Returns:
            The number of bytes that could not be checked.
        """
        try:
            unchecked = check_sources((part for task in copied.values() for part in task.parts), self.plan.files)
        except CheckpointError:
            self.staging.discard()  # it contains the damaged bytes
            raise
        for number, file in enumerate(self.plan.files):
            crcs = crcs_of_writes(number, self.plan.files, self.tasks, copied)
            with open(self.path(number), "r+b") as out:
                for at, data in file.rest(crcs):
                    write_all(out, data, at)
                    self.written_bytes += len(data)
                sync(out)
        sync_folder(self.staging.files)
        return unchecked


def _times(files: Iterable[Path]) -> dict[Path, _Time]:
    """The size and the modification time of each file."""
    return {file: (file.stat().st_size, file.stat().st_mtime_ns) for file in files}
