"""``convert_checkpoint``: a checkpoint of any layout as another, in memory for a chunk, restartable, on any ranks."""

import functools
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from composer_fsdp2.checkpoint.archive.disk import sync, sync_folder, write_all
from composer_fsdp2.checkpoint.convert.conversion_plan import ConversionPlan, plan_conversion
from composer_fsdp2.checkpoint.convert.copying import (
    Copied,
    Copier,
    CopyTask,
    check_sources,
    crcs_of_writes,
    is_written,
    share_of,
    tasks_of,
)
from composer_fsdp2.checkpoint.convert.unfinished import Unfinished, writing
from composer_fsdp2.checkpoint.inventory import CheckpointInventory
from composer_fsdp2.checkpoint.locate import Located, expanded, find
from composer_fsdp2.checkpoint.open import inventory_of, long_together, read_together, together
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.sharding.agree import gather

log = logging.getLogger(__name__)

T = TypeVar("T")
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class ConversionReport:
    """What was done.

    Args:
        files: Of the destination.
        num_tensors: Written; one that is split over files counts once.
        read_bytes, written_bytes: Tensor data read, and all bytes written, by all ranks in this call.
        kept_bytes: Tensor data that an earlier call had written.
        unchecked_bytes: Tensor data whose source says no CRC32 to check it against (safetensors).
        dropped, renamed, remarks: As in the plan.
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
        """The report as JSON holds it."""
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

    The source is left as it is. The output lies beside the destination (``.{name}.converting``) until it is complete
    and on the disk, and a call that was killed goes on there when it is made again. Each record of the source is
    checked against its CRC32. Memory is for a few chunks of 4 MiB and for what is not a tensor, whatever the sizes.

    Args:
        to: ``"monolithic"`` (Composer's ``state_dict_type: full``: one .pt), ``"dcp"`` (``sharded``: a folder, as
            Composer 0.24 and later write it on torch 2.4 and later), or ``"safetensors"`` (a Hugging Face folder of the
            weights alone, with config.json and tokenizer where the checkpoint has them).
        model: The model that was saved, for flat parameters (``local``), whose files hold no names; also where an
            optimizer keyed by position needs names that the file leaves open.
        optimizer: False leaves out the optimizers' states and hyperparameters, and nothing else.
        dtype: Cast the model's floating-point tensors; optimizer states keep their dtype.
        files: How many files to split the tensors over; left out, as many as keep each below 5 GB.
        include: Keep only tensors of the model that match one of these patterns (``model.blocks.*``), and their
            optimizer state.
        dry_run: Return the plan; print it to see what would be written. Changes nothing.
        trust: Unpickle classes that are not plain data, which can run any code; only for files whose author you trust.
        progress: Called on each rank with the bytes done and the bytes to do of its own share.
    Raises:
        CheckpointError: on every rank. The source is damaged or of no known layout, the destination exists or cannot be
            written, there is too little space; nothing was published.
    With a process group: called on all ranks, which share the work and a file system; gathers small values. Without
    one: works alone.
    """
    start = time.monotonic()
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
    located = together(lambda: _find(source, target))
    inventory = read_together(located, trust=trust)
    plan = together(lambda: plan_from(inventory), lambda plan: plan.fingerprint)
    if dry_run:
        return plan
    times = together(lambda: _times(inventory))
    unpack = located.layout.unpack

    def check_source() -> None:
        """What was read must be what is there, also where no CRC32 says so; of a packed file a copy was read."""
        is_same = _times(inventory) == times
        if is_same and unpack is None:
            is_same = plan_from(inventory_of(located, trust=trust)).fingerprint == plan.fingerprint
        if not is_same:
            raise CheckpointError(f"{source}: changed during the conversion; run it again")

    staging = Unfinished(target)
    with ExitStack() as stack:
        _on_first_rank(lambda: stack.enter_context(staging.locked()))
        _on_first_rank(lambda: _prepare(staging, plan))
        read, final = inventory, plan
        if unpack is not None:
            _on_first_rank(lambda: _unpack(unpack, located.path, staging))
            read = together(lambda: inventory_of(find(staging.unpacked_file()), trust=trust))
            # Other files than planned: which weights are tied shows only now.
            final = replace(together(lambda: plan_from(read), lambda plan: plan.fingerprint), source=located.path)
        _on_first_rank(lambda: _make_files(staging, final))
        return _Conversion(final, read, staging, progress, check_source).run(start)


_WHAT = "converting a checkpoint"


def _on_first_rank(work: Callable[[], T]) -> T | None:
    """Do ``work`` on rank 0 alone, with its error on all ranks; returns None on the others."""
    return long_together(work, _WHAT, ranks=[0])


def _find(source: str | Path, target: Path) -> Located:
    """The source; the destination is neither there nor in it."""
    found = find(source)
    if os.path.lexists(target):
        raise CheckpointError(f"{target}: exists; remove it, or give another destination")
    if found.path.is_dir() and target.resolve().is_relative_to(found.path.resolve()):
        raise CheckpointError(f"{target}: lies inside of the source, {found.path}; give another destination")
    return found


def _times(inventory: CheckpointInventory) -> list[tuple[int, int]]:
    """The size of each file, and when it was written."""
    return [(path.stat().st_size, path.stat().st_mtime_ns) for path, _ in inventory.files]


def _rank() -> int:
    return dist.get_rank() if _is_distributed() else 0


def _world_size() -> int:
    return dist.get_world_size() if _is_distributed() else 1


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _prepare(staging: Unfinished, plan: ConversionPlan) -> None:
    """Make the folder beside the destination, if there is space for what is still to write."""
    folder = staging.destination.parent
    with writing(staging.destination):
        folder.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(staging.destination):  # another process has finished it
            raise CheckpointError(f"{staging.destination}: exists; remove it, or give another destination")
        staging.discard_others(plan.fingerprint)
        needed, free = staging.needed_bytes(plan.files), shutil.disk_usage(folder).free
        if needed > free:
            raise CheckpointError(f"{staging.destination}: needs {needed} bytes, {folder} has {free} free")
        staging.prepare(plan.fingerprint)


def _make_files(staging: Unfinished, plan: ConversionPlan) -> None:
    with writing(staging.destination, staging.folder):
        staging.make_files(plan.files)


def _unpack(unpack: Callable[[Path, Path], Path], packed: Path, staging: Unfinished) -> None:
    if not staging.is_unpacked():
        with writing(staging.destination, staging.folder):
            staging.unpacked.mkdir(exist_ok=True)
        unpack(packed, staging.unpacked)


class _Conversion:
    """The work itself: copy, check, finish, publish."""

    def __init__(
        self,
        plan: ConversionPlan,
        inventory: CheckpointInventory,
        staging: Unfinished,
        progress: Progress | None,
        check_source: Callable[[], None],
    ) -> None:
        self.plan, self.staging, self.progress = plan, staging, progress
        self.check_source = check_source
        self.sources = [path for path, _ in inventory.files]
        self.tasks = tasks_of(plan.files)
        self.read_bytes = self.written_bytes = self.kept_bytes = self.share_bytes = 0

    def run(self, start: float) -> ConversionReport:
        """Called on all ranks."""
        earlier, number = gather(_on_first_rank(self.earlier))[0]
        mine = long_together(lambda: self.copy_share(earlier, number + _rank()), _WHAT)
        copied = {number: task for of_rank in gather(mine) for number, task in of_rank.items()}
        unchecked = _on_first_rank(lambda: self.finish(copied))
        counts = gather((self.read_bytes, self.written_bytes, self.kept_bytes, unchecked or 0))
        read, written, kept, unchecked = (sum(column) for column in zip(*counts, strict=True))
        return ConversionReport(
            source=str(self.plan.source),
            destination=str(self.plan.destination),
            to=self.plan.to,
            files=tuple(str(file.path(self.plan.destination)) for file in self.plan.files),
            num_tensors=self.plan.num_tensors,
            read_bytes=read,
            written_bytes=written,
            kept_bytes=kept,
            unchecked_bytes=unchecked,
            seconds=time.monotonic() - start,
            dropped=self.plan.dropped,
            renamed=self.plan.renamed,
            remarks=self.plan.remarks,
        )

    def copy_share(self, earlier: Mapping[int, Copied], journal_number: int) -> dict[int, Copied]:
        """This rank's tasks: those that an earlier run left are checked and kept."""
        share = share_of(self.tasks, _rank(), _world_size())
        self.share_bytes = sum(task.num_bytes for task in share)
        with writing(self.plan.destination, self.staging.folder):
            kept = self.keep(share, earlier)
            return kept | self.copy([task for task in share if task.number not in kept], journal_number)

    def keep(self, share: Iterable[CopyTask], earlier: Mapping[int, Copied]) -> dict[int, Copied]:
        """What an earlier run left, as far as it is in its place."""
        kept: dict[int, Copied] = {}
        for task in share:
            if task.number in earlier and is_written(task, earlier[task.number], self.path(task.file)):
                kept[task.number] = earlier[task.number]
                self.kept_bytes += task.num_bytes
                self.tell_progress()
        return kept

    def copy(self, tasks: Iterable[CopyTask], journal_number: int) -> dict[int, Copied]:
        """Copy, and note in a journal what is done."""
        places = {path: place for place, path in enumerate(self.sources)}
        copied: dict[int, Copied] = {}
        outputs: dict[int, IO[bytes]] = {}
        with ExitStack() as stack:

            def output(task: CopyTask) -> IO[bytes]:
                if task.file not in outputs:
                    outputs[task.file] = stack.enter_context(open(self.path(task.file), "r+b"))
                return outputs[task.file]

            journal = stack.enter_context(closing(self.staging.journal(journal_number)))
            copier = stack.enter_context(Copier(self.plan.files))
            for task, now in copier.copy(tasks, output):
                journal.note(task, now, places)
                copied[task.number] = now
                self.written_bytes += task.num_bytes
                self.read_bytes += sum(part.end - part.start for part in now.parts)
                self.tell_progress()
            for out in outputs.values():
                sync(out)
        return copied

    def tell_progress(self) -> None:
        if self.progress is not None:
            self.progress(self.kept_bytes + self.written_bytes, self.share_bytes)

    def path(self, file: int) -> Path:
        return self.staging.path(self.plan.files[file])

    def earlier(self) -> tuple[dict[int, Copied], int]:
        """What earlier runs finished, and the number of this run's first journal."""
        return self.staging.done(self.tasks, self.sources), len(self.staging.journals())

    def finish(self, copied: Mapping[int, Copied]) -> int:
        """Check what was read, write what follows from it, and publish. On one rank only.

        Returns:
            Bytes that could not be checked.
        """
        try:
            unchecked = check_sources((part for task in copied.values() for part in task.parts), self.plan.files)
        except CheckpointError:
            self.staging.discard()  # it has the damage in it
            raise
        with writing(self.plan.destination, self.staging.folder):
            for number, file in enumerate(self.plan.files):
                crcs = crcs_of_writes(number, self.plan.files, self.tasks, copied)
                with open(self.path(number), "r+b") as out:
                    for at, data in file.rest(crcs):
                        write_all(out, data, at)
                        self.written_bytes += len(data)
                    sync(out)
            sync_folder(self.staging.files)
            self.check_source()
            self.staging.publish(self.plan.files)
        return unchecked
