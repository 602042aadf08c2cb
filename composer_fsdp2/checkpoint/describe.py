"""Format an inventory as text for people, or as JSON data for programs."""

import datetime
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from composer_fsdp2.checkpoint.inventory import CheckpointInventory, OptimizerContents, TensorRecord, walk_tensors
from composer_fsdp2.checkpoint.trees import dotted
from composer_fsdp2.config.text import human_bytes
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.sharding.dtypes import dtype_name


def as_text(inventory: CheckpointInventory, *, max_tensors: int | None = None) -> str:
    """Format an inventory: a summary, the optimizers, notes, and a table of the tensors.

    Args:
        max_tensors: The maximum number of tensors to list; None for all.
    """
    sections = [_summary(inventory), *_optimizer_sections(inventory), _remarks(inventory)]
    if (fit := inventory.fit) is not None:
        sections.append([f"into the model: {'it fits' if fit.fits else 'it does not fit'}", *fit.text.split("\n")])
    sections.append(_tensor_section(inventory, max_tensors))
    return "\n\n".join("\n".join(map(_printable, section)) for section in sections if len(section) > 1)


def as_data(inventory: CheckpointInventory) -> dict[str, Any]:
    """The inventory as JSON data."""
    writer = inventory.writer
    return {
        "path": str(inventory.path),
        "layout": inventory.layout,
        "num_bytes": inventory.num_bytes,
        "files": [{"path": str(path), "num_bytes": size} for path, size in inventory.files],
        "writer": {
            "composer_version": writer.composer_version,
            "torch_version": writer.torch_version,
            "world_size": writer.world_size,
            "sharding": writer.sharding,
        },
        "timestamp": _plain(_read(lambda: inventory.timestamp, {})),
        "optimizers": [
            {
                "class": optimizer.name,
                "keyed_by": optimizer.keyed_by,
                "num_parameters": len(optimizer.state),
                "state_keys": sorted({key for entries in optimizer.state.values() for key in entries}),
                "num_bytes": sum(record.num_bytes for record in _tensors_of(optimizer)),
                "param_groups": _plain(_read(partial(inventory.groups, optimizer.name), None)),
            }
            for optimizer in inventory.optimizers
        ],
        "optimizer_at_root": inventory.optimizer_at_root,
        "flat": inventory.flat,
        "compressed": inventory.compressed,
        "remarks": list(inventory.remarks),
        "fit": None if inventory.fit is None else {"fits": inventory.fit.fits, "text": inventory.fit.text},
        "tensors": [
            {
                "name": record.name,
                "shape": list(record.shape),
                "dtype": dtype_name(record.dtype),
                "num_bytes": record.num_bytes,
                "chunks": [{"offsets": list(chunk.offsets), "sizes": list(chunk.sizes)} for chunk in record.chunks],
            }
            for record in _all_tensors(inventory)
        ],
        "objects": [dotted(path) for path in inventory.objects],
    }


# ---------------------------------------------------------------------------------------------------------------------
# Sections: a heading and lines


def _summary(inventory: CheckpointInventory) -> list[str]:
    writer = inventory.writer
    model = [record for record in inventory.model.values() if isinstance(record, TensorRecord)]
    dtypes = Counter(dtype_name(record.dtype) for record in model)
    written_by = [
        f"Composer {writer.composer_version}" if writer.composer_version else "",
        f"torch {writer.torch_version}" if writer.torch_version else "",
        _counted(writer.world_size, "rank") if writer.world_size else "",
        writer.sharding or "",
    ]
    fields = {
        "layout": inventory.layout,
        "written by": ", ".join(filter(None, written_by)) or "unknown",
        "step": _step(inventory),
        "files": f"{len(inventory.files)}, {human_bytes(inventory.num_bytes)}",
        "model": f"{len(model)} tensors, {human_bytes(sum(record.num_bytes for record in model))}"
        + (f" ({', '.join(f'{count} {dtype}' for dtype, count in dtypes.items())})" if model else ""),
        "also": ", ".join(_other_parts(inventory)) or "nothing",
    }
    width = max(map(len, fields)) + 2
    return [str(inventory.path), *(f"{name + ':':<{width}}{value}" for name, value in fields.items())]


def _step(inventory: CheckpointInventory) -> str:
    timestamp = _read(lambda: inventory.timestamp, None)
    if timestamp is None:
        return "cannot be read (see --trust)"
    units = ("epoch", "batch", "sample", "token")
    return ", ".join(f"{unit} {timestamp[unit]}" for unit in units if unit in timestamp) or "unknown"


def _other_parts(inventory: CheckpointInventory) -> list[str]:
    """Further entries, under Composer's names."""
    paths = [*inventory.objects, *inventory.tensors]
    parts = dict.fromkeys(str(path[1]) for path in paths if path[0] == "state" and len(path) > 1)
    rng = _read(lambda: inventory.tree(("rng",)), None)
    if isinstance(rng, list):
        parts[f"random states of {_counted(len(rng), 'rank')}"] = None
    return [part for part in parts if part not in ("model", "optimizers", "timestamp", "metadata")]


def _optimizer_sections(inventory: CheckpointInventory) -> Iterator[list[str]]:
    for optimizer in inventory.optimizers:
        records = _tensors_of(optimizer)
        keys = Counter(key for entries in optimizer.state.values() for key in entries)
        lines = [
            f"optimizer {optimizer.name or '(class not stored)'}",
            f"state of {len(optimizer.state)} parameters by {optimizer.keyed_by}: {', '.join(keys) or 'none'}; "
            f"{human_bytes(sum(record.num_bytes for record in records))}",
        ]
        groups = _read(partial(inventory.groups, optimizer.name), None)
        if groups is None:
            lines.append("param_groups cannot be read (see --trust)")
        for number, group in enumerate(groups or []):
            shown = {
                key: value for key, value in group.items() if not (key == "params" or value is None or value is False)
            }
            values = ", ".join(f"{key} {_short(value)}" for key, value in shown.items())
            lines.append(f"group {number}: {len(group.get('params', []))} parameters; {values}")
        yield lines


def _remarks(inventory: CheckpointInventory) -> list[str]:
    remarks = list(inventory.remarks)
    if inventory.optimizer_at_root:
        remarks.append("the optimizer lies beside 'state', as torch before 2.3 wrote it")
    if inventory.flat:
        remarks.append("flat parameters, without names and shapes: loading and converting need the model")
    if inventory.compressed:
        remarks.append("packed: the file is unpacked before tensors are read")
    return ["notes", *(f"- {remark}" for remark in remarks)]


def _tensor_section(inventory: CheckpointInventory, max_tensors: int | None) -> list[str]:
    records = _all_tensors(inventory)
    shown = records if max_tensors is None else records[:max_tensors]
    rows = [
        (
            record.name,
            str(list(record.shape)),
            dtype_name(record.dtype),
            _split(record),
            human_bytes(record.num_bytes),
        )
        for record in shown
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(5)]
    lines = [
        "  ".join([*(text.ljust(width) for text, width in zip(row[:4], widths, strict=False)), row[4].rjust(widths[4])])
        for row in rows
    ]
    if len(records) > len(shown):
        lines.append(f"... and {len(records) - len(shown)} more (--tensors lists all)")
    return [f"{len(records)} tensors, {human_bytes(sum(record.num_bytes for record in records))}", *lines]


def _all_tensors(inventory: CheckpointInventory) -> list[TensorRecord]:
    return [*inventory.tensors.values(), *inventory.nested.values()]


def _split(record: TensorRecord) -> str:
    """Describe how a tensor is sharded: along one dimension, or in boxes."""
    if len(record.chunks) <= 1:
        return "unsharded"
    split = [dim for dim in range(len(record.shape)) if len({chunk.offsets[dim] for chunk in record.chunks}) > 1]
    return f"{len(record.chunks)} along dim {split[0]}" if len(split) == 1 else f"{len(record.chunks)} boxes"


# ---------------------------------------------------------------------------------------------------------------------
# Plain data


def _tensors_of(optimizer: OptimizerContents) -> list[TensorRecord]:
    records = [record for entries in optimizer.state.values() for record in entries.values()]
    return [record for record in records if isinstance(record, TensorRecord)]


def _plain(value: Any) -> Any:
    """Convert a value to JSON data: durations in seconds, tensors as their shapes, other objects as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, TensorRecord):
        return {"tensor": list(value.shape), "dtype": dtype_name(value.dtype)}
    is_plain = value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    return value if is_plain else str(value)


def _read(what: Callable[[], Any], otherwise: Any) -> Any:
    """The value of an entry; ``otherwise`` if it contains more than plain data.

    The rest of the checkpoint can still be described.
    """
    try:
        return what()
    except CheckpointError:
        return otherwise


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _short(value: Any) -> str:
    text = "a tensor" if any(walk_tensors(value)) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _printable(line: str) -> str:
    """Replace control characters in a line: names come from the file, and the line is printed to a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in line)
