"""What a conversion will do, decided from metadata alone: ``plan_conversion`` and what it prints."""

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composer_fsdp2.checkpoint.conversion.copying import CHUNK_BYTES
from composer_fsdp2.checkpoint.conversion.hugging_face import PREFIX, form_of_folder, hugging_face_form, without_ties
from composer_fsdp2.checkpoint.conversion.state import ConversionState, state_to_write
from composer_fsdp2.checkpoint.conversion.writers import OutputFile, dcp, monolithic, safetensors
from composer_fsdp2.checkpoint.flat import unflattened
from composer_fsdp2.checkpoint.formats import safetensors_folder
from composer_fsdp2.checkpoint.inventory import MODEL, OPTIMIZERS, CheckpointInventory, dotted
from composer_fsdp2.checkpoint.storage.archive_writer import Slot
from composer_fsdp2.errors import CheckpointError

__all__ = ["ConversionPlan", "Layout", "plan_conversion"]

_SHOWN = 12


class Layout(enum.StrEnum):
    """What ``convert`` writes."""

    MONOLITHIC = "monolithic"
    DCP = "dcp"
    SAFETENSORS = "safetensors"


@dataclass(frozen=True, kw_only=True)
class ConversionPlan:
    """Which bytes go where. ``print(plan)`` says it.

    Attributes:
        files: Each with its name, its size and what is in it, in the order in which they are finished.
        renamed: Parameters that get another name, by the name in the source.
        dropped: Keys of the source that the destination will not have; one key stands for all below it.
        remarks: What else the user should know.
        num_tensors: Tensors written; one that is split counts once.
        read_bytes: Tensor data to read.
        fingerprint: Of the source, its files' sizes and times, and of every byte to write but the tensors'.
    """

    source: Path
    source_layout: str
    destination: Path
    to: Layout
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
        """Memory for buffers, an estimate; never a whole tensor, if that is larger than a chunk."""
        return 3 * CHUNK_BYTES

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "source": str(self.source),
            "source_layout": self.source_layout,
            "destination": str(self.destination),
            "to": str(self.to),
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
        lines = [
            f"{self.source} ({self.source_layout}) → {self.destination} ({self.to})",
            f"  reads {self.num_tensors} tensors of {_size(self.read_bytes)}",
            f"  writes {_size(self.write_bytes)} in {len(self.files)} file{'s'[: len(self.files) != 1]}"
            + "".join(
                f"\n    {file.path(self.destination).name} {_size(file.num_bytes)}" for file in self.files[:_SHOWN]
            )
            + _more(len(self.files)),
            f"  needs about {_size(self.peak_bytes)} of memory for buffers",
            *_listed("renames", [f"{old} → {new}" for old, new in self.renamed.items()]),
            *_listed("leaves out", self.dropped),
            *(f"  {remark}" for remark in self.remarks),
        ]
        if not self.renamed and not self.dropped:
            lines.append("  keeps every key")
        return "\n".join(lines)


def _size(num_bytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"


def _listed(what: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    return [
        f"  {what} ({len(names)})",
        *(f"    {name}" for name in names[:_SHOWN]),
        *([_more(len(names))[1:]] * (len(names) > _SHOWN)),
    ]


def _more(count: int) -> str:
    return f"\n    ... and {count - _SHOWN} more" if count > _SHOWN else ""


def plan_conversion(
    inventory: CheckpointInventory,
    destination: Path,
    *,
    to: Layout,
    model: nn.Module | None = None,
    optimizer: bool = True,
    dtype: torch.dtype | None = None,
    files: int | None = None,
    include: Sequence[str] | None = None,
) -> ConversionPlan:
    """Decide everything; see ``convert_checkpoint`` for the arguments.

    Raises:
        CheckpointError: it cannot be done, and what helps.
    Reads metadata and what is no tensor; writes nothing; does not communicate.
    """
    if files is not None and (files < 1 or (to is Layout.MONOLITHIC and files > 1)):
        raise CheckpointError(f"files={files}: a {to} checkpoint has {'one file' if files > 1 else 'at least one'}")
    if dtype is not None and not dtype.is_floating_point:
        raise CheckpointError(f"dtype={dtype}: weights can be cast to a floating-point dtype")
    if inventory.flat:
        if model is None:
            raise CheckpointError(
                f"{inventory.path}: holds flat parameters (state_dict_type: local) without their names; give the model "
                "that was saved (model=, --model module:function)"
            )
        inventory = unflattened(inventory, model)
    prefix = PREFIX if to is not Layout.SAFETENSORS and _is_hugging_face_folder(inventory) else ""
    chosen = state_to_write(
        inventory,
        optimizer=optimizer and to is not Layout.SAFETENSORS,
        dtype=dtype,
        include=include,
        named_optimizer=to is Layout.DCP,
        model=model,
        prefix=prefix,
    )
    remarks: list[str] = [f"adds {PREFIX!r} to every name, as Composer's HuggingFaceModel has it"] if prefix else []
    if "" in chosen.state["state"].get("optimizers", {}):
        remarks.append("the source does not say the optimizer's class, by which Composer finds its state (key '')")
    match to:
        case Layout.MONOLITHIC:
            output, dropped = monolithic.lay_out(chosen.state), chosen.dropped
        case Layout.DCP:
            output, dropped = dcp.lay_out(chosen.state, num_files=files), chosen.dropped
        case Layout.SAFETENSORS:
            chosen, output, dropped = _safetensors(inventory, chosen, dtype, files, remarks)
    records = {id(write.slot): write.record for file in output for write in file.writes}
    return ConversionPlan(
        source=inventory.path,
        source_layout=inventory.layout,
        destination=destination,
        to=to,
        files=output,
        renamed=chosen.renamed,
        dropped=dropped,
        remarks=tuple(remarks),
        num_tensors=len(records),
        read_bytes=sum(record.num_bytes for record in records.values()),
        fingerprint=_fingerprint(inventory, to, output),
    )


def _safetensors(
    inventory: CheckpointInventory,
    chosen: ConversionState,
    dtype: torch.dtype | None,
    files: int | None,
    remarks: list[str],
) -> tuple[ConversionState, tuple[OutputFile, ...], tuple[str, ...]]:
    """Weights under Hugging Face's names; all else is dropped."""
    weights = {name: slot for name, slot in chosen.model.items() if isinstance(slot, Slot)}
    if not weights:
        raise CheckpointError(f"{inventory.path}: holds no weights, and safetensors nothing else")
    form = hugging_face_form(inventory, dtype)
    renamed = dict(chosen.renamed)
    if _is_hugging_face_folder(inventory):  # re-sharded: names and files stay
        form = form_of_folder(_folder(inventory.path), dtype)
    elif form is None:
        remarks.append("the checkpoint says no Hugging Face model: names stay, and there is no config.json")
    elif all(name.startswith(PREFIX) for name in weights):
        remarks.append(f"{PREFIX!r} of Composer's HuggingFaceModel is taken off every name")
        old_names = {new: old for old, new in chosen.renamed.items()}
        weights = {name.removeprefix(PREFIX): slot for name, slot in weights.items()}
        renamed = {old_names.get(PREFIX + name, PREFIX + name): name for name in weights}
    weights, ties = without_ties(weights, form.config if form else None)
    remarks.extend(f"leaves out {tie}, which is the same bytes" for tie in ties)
    remarks.extend(f"leaves out {what}" for what in (form.left_out if form else ()))
    others = {
        dotted(path[: 3 if path[:2] == OPTIMIZERS else 2 if path[0] == "state" else 1]): None
        for path in (*inventory.tensors, *inventory.objects)
        if path[:2] != MODEL
    }
    extra = [dotted((*MODEL, name)) for name, value in chosen.model.items() if not isinstance(value, Slot)]
    output = safetensors.lay_out(weights, num_files=files, beside=form.beside if form else {})
    state = ConversionState(state=chosen.state, renamed=renamed, dropped=chosen.dropped)
    return state, output, tuple(dict.fromkeys([*chosen.dropped, *extra, *others]))


def _is_hugging_face_folder(inventory: CheckpointInventory) -> bool:
    return inventory.layout == safetensors_folder.NAME and (_folder(inventory.path) / "config.json").is_file()


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _fingerprint(inventory: CheckpointInventory, to: Layout, files: Sequence[OutputFile]) -> str:
    digest = hashlib.sha256(_encoded(f"{to} {CHUNK_BYTES} {inventory.path}"))
    for path, size in inventory.files:
        digest.update(_encoded(f"{path.name} {size} {path.stat().st_mtime_ns}"))
    for file in files:
        digest.update(_encoded(f"{file.name} {file.num_bytes}"))
        for write in file.writes:
            digest.update(_encoded(f"{write.record.name} {write.offsets} {write.sizes} {write.slot.dtype} {write.at}"))
            digest.update(_encoded(f"{write.record.chunks} {write.record.flat}"))  # where it lies in the source
        for offset, data in file.rest([0] * len(file.writes)):
            digest.update(_encoded(f"{offset}") + data)
    return digest.hexdigest()


def _encoded(text: str) -> bytes:
    """Of names that may be no text, as those of files are in a terminal that knows ASCII alone."""
    return text.encode(errors="backslashreplace")
