"""The plan of a conversion, made from metadata only, and its text."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composer_fsdp2.checkpoint.convert.copying import CHUNK_BYTES, NUM_THREADS
from composer_fsdp2.checkpoint.convert.state import ConversionState, state_to_write
from composer_fsdp2.checkpoint.flat import unflattened
from composer_fsdp2.checkpoint.inventory import OPTIMIZERS, CheckpointInventory
from composer_fsdp2.checkpoint.layouts import LayoutWriter, written_layouts
from composer_fsdp2.checkpoint.layouts._layout import OutputFile, WriteRequest
from composer_fsdp2.checkpoint.trees import dotted, integer_keys
from composer_fsdp2.config.text import and_more, did_you_mean, human_bytes, lines_and_more
from composer_fsdp2.errors import CheckpointError, ConfigError

_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class ConversionPlan:
    """Which bytes of the source are written where. ``print(plan)`` explains it.

    Attributes:
        files: Each with its name, size and tensors, in the order in which they are completed.
        renamed: The new names of parameters that are renamed, by the name in the source.
        dropped: Keys of the source that are not converted; a key includes all keys below it.
        remarks: Messages for the user.
        num_tensors: The number of tensors to write. A tensor that is split over files counts once.
        read_bytes: The number of bytes of tensor data to read.
        fingerprint: A hash of the source's file sizes and times, and of every byte to write except tensor data.

    Example:
        >>> save_monolithic({"state": {"model": nn.Linear(4, 2).state_dict()}}, "ep1.pt")
        >>> plan = convert_checkpoint("ep1.pt", "weights", to="safetensors", dry_run=True)
        >>> plan.num_tensors, plan.read_bytes
        (2, 40)
    """

    source: Path
    source_layout: str
    destination: Path
    to: str
    files: tuple[OutputFile, ...] = field(repr=False)
    renamed: dict[str, str]
    dropped: tuple[str, ...]
    remarks: tuple[str, ...]
    num_tensors: int
    read_bytes: int
    fingerprint: str

    @property
    def write_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def peak_bytes(self) -> int:
        """An estimate of the memory for buffers. It does not grow with the size of a tensor beyond a chunk."""
        return (NUM_THREADS + 1) * CHUNK_BYTES

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON data."""
        return {
            "source": str(self.source),
            "source_layout": self.source_layout,
            "destination": str(self.destination),
            "to": self.to,
            "files": {str(file.path(self.destination)): file.num_bytes for file in self.files},
            "num_tensors": self.num_tensors,
            "read_bytes": self.read_bytes,
            "write_bytes": self.write_bytes,
            "peak_bytes": self.peak_bytes,
            "renamed": self.renamed,
            "dropped": list(self.dropped),
            "remarks": list(self.remarks),
        }

    def __str__(self) -> str:
        files = [f"{file.path(self.destination).name} {human_bytes(file.num_bytes)}" for file in self.files]
        lines = [
            f"{self.source} ({self.source_layout}) → {self.destination} ({self.to})",
            f"  reads {self.num_tensors} tensors of {human_bytes(self.read_bytes)}",
            f"  writes {human_bytes(self.write_bytes)} in {len(files)} file{'s'[: len(files) != 1]}",
            lines_and_more(files, _SHOWN, "    "),
            f"  needs about {human_bytes(self.peak_bytes)} of memory for buffers",
            *_listed("renames", [f"{old} → {new}" for old, new in self.renamed.items()]),
            *_listed("leaves out", self.dropped),
            *(f"  {remark}" for remark in self.remarks),
        ]
        if not self.renamed and not self.dropped:
            lines.append("  keeps every key")
        return "\n".join(lines)


def _listed(what: str, names: Sequence[str]) -> list[str]:
    return [f"  {what} ({len(names)})", lines_and_more(names, _SHOWN, "    ")] if names else []


def plan_conversion(
    inventory: CheckpointInventory,
    destination: Path,
    *,
    to: str,
    model: nn.Module | None = None,
    optimizer: bool = True,
    dtype: torch.dtype | None = None,
    files: int | None = None,
    include: Sequence[str] | None = None,
) -> ConversionPlan:
    """Plan a conversion; see ``convert_checkpoint`` for the arguments.

    Raises:
        CheckpointError: the checkpoint cannot be converted; names the reason and an alternative.

    Reads metadata and values that are not tensors; writes nothing; does not communicate.
    """
    written = check_options(to, files, dtype)
    inventory = _with_names(inventory, model)
    # A folder without a configuration may contain any model's weights.
    prefix = inventory.name_prefix if inventory.hugging_face is not None and not written.name_prefix else ""
    chosen = state_to_write(
        inventory,
        optimizer=optimizer and written.holds_only in (None, OPTIMIZERS),
        dtype=dtype,
        include=include,
        named_optimizer=written.by_name,
        model=model,
        prefix=prefix,
    )
    output = written.lay_out(
        WriteRequest(inventory=inventory, state=chosen.state, dtype=dtype, num_files=files, renamed=chosen.renamed)
    )
    records = {id(write.slot): write.record for file in output.files for write in file.writes}
    return ConversionPlan(
        source=inventory.path,
        source_layout=inventory.layout,
        destination=destination,
        to=to,
        files=output.files,
        renamed=dict(output.renamed),
        dropped=tuple(dict.fromkeys([*chosen.dropped, *output.dropped])),
        remarks=(*_remarks(chosen, prefix), *_inferred(inventory), *output.remarks),
        num_tensors=len(records),
        read_bytes=sum(record.num_bytes for record in records.values()),
        fingerprint=_fingerprint(inventory, to, output.files),
    )


def check_options(to: str, files: int | None, dtype: torch.dtype | None) -> LayoutWriter:
    """The writer of the layout ``to``. Raises ConfigError for options that the layout does not support."""
    known = written_layouts()
    if to not in known:
        raise ConfigError(f"to={to!r}: expected one of {', '.join(known)}{did_you_mean(to, known)}")
    if files is not None and not 1 <= files <= (known[to].max_files or files):
        raise ConfigError(f"files={files}: a {to} checkpoint has {'one file' if files > 1 else 'at least one'}")
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"dtype={dtype}: weights can be cast to a floating-point dtype")
    return known[to]


def _inferred(inventory: CheckpointInventory) -> Iterator[str]:
    """A remark on keys whose type a DCP folder does not record."""
    found = dict.fromkeys(map(dotted, integer_keys(inventory.entries)))
    if found:
        yield (
            "the source does not record whether a key was text or an int, nor empty dicts or classes of dicts: a key "
            "such as '5' becomes 5, and only a load into a live state restores the rest: below "
            f"{and_more(list(found), 8)}"
        )


def _remarks(chosen: ConversionState, prefix: str) -> Iterator[str]:
    if prefix:
        yield f"adds {prefix!r} to every name, as Composer's HuggingFaceModel has it"
    if "" in chosen.state["state"].get("optimizers", {}):
        yield "the source does not say the optimizer's class, by which Composer finds its state (key '')"


def _with_names(inventory: CheckpointInventory, model: nn.Module | None) -> CheckpointInventory:
    """Split FSDP1's flat parameters into the model's parameters. Without the model they have no names."""
    if not inventory.flat:
        return inventory
    if model is None:
        raise CheckpointError(
            f"{inventory.path}: holds flat parameters (state_dict_type: local) without their names; give the model "
            "that was saved (model=, --model module:function)"
        )
    return unflattened(inventory, model)


def _fingerprint(inventory: CheckpointInventory, to: str, files: Sequence[OutputFile]) -> str:
    digest = hashlib.sha256(_encoded(f"{to} {CHUNK_BYTES} {inventory.path}"))
    for path, size in inventory.files:
        digest.update(_encoded(f"{path.name} {size} {path.stat().st_mtime_ns}"))
    for file in files:
        digest.update(_encoded(f"{file.name} {file.num_bytes}"))
        for write in file.writes:
            digest.update(_encoded(f"{write.record.name} {write.box} {write.slot.dtype} {write.at}"))
            digest.update(_encoded(f"{write.record.chunks} {write.record.flat}"))  # its location in the source
        for offset, data in file.rest([0] * len(file.writes)):
            digest.update(_encoded(f"{offset}") + data)
    return digest.hexdigest()


def _encoded(text: str) -> bytes:
    """Encode a name that may not be valid text, as a file name is in a terminal that supports ASCII only."""
    return text.encode(errors="backslashreplace")
