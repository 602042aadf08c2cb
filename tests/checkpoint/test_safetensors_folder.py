"""Hugging Face's folders of weights: whole, in shards, damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints.samples import bytes_of, values_of
from support.comparing import assert_same

from composer_fsdp2 import CheckpointError, inspect_checkpoint

pytestmark = pytest.mark.any_torch

# The format's own names (safetensors' README).
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.bool: "BOOL"}


def tensors() -> dict[str, torch.Tensor]:
    return {
        "a.weight": torch.randn(3, 5),
        "b.weight": torch.randn(4, dtype=torch.bfloat16),
        "steps": torch.arange(6).view(2, 3),
        "mask": torch.tensor(True),
        "none": torch.empty(0, 2),
    }


def write(path: Path, values: dict[str, torch.Tensor], **changed: Any) -> Path:
    """A file as the format's documentation says: length, JSON, bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in values.items():
        start, data = len(data), data + bytes_of(tensor)
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, len(data)],
            **changed.get(name, {}),
        }
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def in_shards(folder: Path, values: dict[str, torch.Tensor]) -> Path:
    weight_map = {}
    for number, (name, value) in enumerate(values.items(), start=1):
        file = f"model-{number:05}-of-{len(values):05}.safetensors"
        write(folder / file, {name: value})
        weight_map[name] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def expected(values: dict[str, torch.Tensor]) -> dict[Any, Any]:
    return {("state", "model", name): value for name, value in values.items()}


@pytest.mark.parametrize("form", ["file", "folder", "shards"])
def test_weights_are_found_in_the_file(tmp_path: Path, form: str):
    """A model from the Hub opens as a file, as a folder and in shards, each dtype with its values."""
    values = tensors()
    path = tmp_path if form == "shards" else write(tmp_path / "model.safetensors", values)
    if form == "shards":
        in_shards(tmp_path, values)
    inventory = inspect_checkpoint(tmp_path if form == "folder" else path)
    assert_same(values_of(inventory), expected(values), in_bits=True)
    assert inventory.layout == "safetensors" and "optimizer" in inventory.remarks[0]
    assert inventory.num_bytes == sum(file.stat().st_size for file in tmp_path.iterdir())


def test_what_the_library_writes_is_read(tmp_path: Path):
    """The library itself aligns headers and orders tensors in its own way, and knows more dtypes."""
    library = pytest.importorskip("safetensors.torch")
    kinds = {"f16": torch.float16, "f64": torch.float64, "u8": torch.uint8, "f8": torch.float8_e4m3fn}
    values = {name: torch.arange(6.0).to(dtype) for name, dtype in kinds.items()} | tensors()
    library.save_file(values, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same(values_of(inspect_checkpoint(tmp_path)), expected(values), in_bits=True)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"a.weight": {"dtype": "F99"}}, "F99"),
        ({"a.weight": {"shape": [3, 6]}}, "a.weight needs 72 bytes"),
        ({"a.weight": {"data_offsets": [4, 64]}}, "a.weight begins"),
        ({"b.weight": {"data_offsets": [56, 64]}}, "b.weight begins"),  # shares bytes with a.weight
        ({"a.weight": {"shape": "no"}}, "damaged"),
        ({"a.weight": {"data_offsets": [-60, 0]}}, "damaged"),
    ],
)
def test_header_that_contradicts_the_file_is_refused(tmp_path: Path, changed: dict[str, Any], message: str):
    """Bytes of one tensor are never read as another's."""
    with pytest.raises(CheckpointError, match=message):
        inspect_checkpoint(write(tmp_path / "model.safetensors", tensors(), **changed))


@pytest.mark.parametrize("kept_bytes", [4, 40, -3])
def test_truncated_file_is_refused(tmp_path: Path, kept_bytes: int):
    """A download that broke off is named, wherever it ended."""
    path = write(tmp_path / "model.safetensors", tensors())
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        inspect_checkpoint(path)


def test_shards_that_disagree_with_the_index_are_refused(tmp_path: Path):
    """A lost shard, a shard from elsewhere, an index that leaves the folder: named before anything is loaded."""
    folder = in_shards(tmp_path, tensors())
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]

    index.write_text(json.dumps({"weight_map": {**weight_map, "b.weight": "../b.safetensors"}}))
    with pytest.raises(CheckpointError, match="outside of the folder"):
        inspect_checkpoint(folder)
    index.write_text(json.dumps({"weight_map": {**weight_map, "c.weight": weight_map["mask"]}}))
    with pytest.raises(CheckpointError, match=r"disagree about c\.weight"):
        inspect_checkpoint(folder)
    index.write_text(json.dumps({"weight_map": weight_map}))
    (folder / weight_map["mask"]).unlink()
    with pytest.raises(CheckpointError, match=f"{weight_map['mask']}: missing"):
        inspect_checkpoint(folder)
    index.write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        inspect_checkpoint(folder)
