"""The contents of a saved checkpoint, through torch's and Composer's own readers."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def named(state_dict_type: str, batch: int) -> str:
    """Composer's name for a checkpoint of the first epoch."""
    return f"ep0-ba{batch}" + ("-rank0.pt" if state_dict_type == "full" else "")


def tree(folder: str) -> list[str]:
    """Every name below a folder, and the targets of links."""
    found = []
    for root, folders, files in os.walk(folder):
        for path in (Path(root) / name for name in folders + files):
            name = str(path.relative_to(folder))
            found.append(f"{name} -> {os.readlink(path)}" if path.is_symlink() else name)
    return sorted(found)


def read(path: str | Path) -> dict[str, Any]:
    """A complete checkpoint, loaded in this process: a file, packed or not, or a DCP directory."""
    from composer.utils.compression import get_compressor, is_compressed_pt
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    path = str(path)
    loaded: dict[str, Any] = {}
    if os.path.isdir(path):
        planner = _EmptyStateDictLoadPlanner()
        _load_state_dict(loaded, storage_reader=FileSystemReader(path), planner=planner, no_dist=True)
        return loaded
    with tempfile.TemporaryDirectory() as folder:
        plain = f"{folder}/composer_states.pt"
        if ".tar" in path:
            shutil.unpack_archive(path, folder, "tar" if path.endswith("tar") else "gztar")
        elif is_compressed_pt(path):
            with get_compressor(path).decompress(path) as file:
                Path(plain).write_bytes(file.read())
        else:
            plain = path
        loaded = torch.load(plain, weights_only=False)
    return loaded


def checkpoint_differences(ours: str | Path, theirs: str | Path, *, except_for: str = "nothing") -> list[str]:
    """The paths at which two checkpoints differ in a key, a class, a value or a bit."""
    left, right = (_leaves(read(path), _content) for path in (ours, theirs))
    assert len(right) > 20, f"{theirs} is almost empty"
    paths = sorted(path for path in left.keys() | right.keys() if except_for not in path)
    return [f"{path}: {left.get(path)}, {right.get(path)}"[:200] for path in paths if left.get(path) != right.get(path)]


def form(value: Any) -> dict[str, Any]:
    """Keys, classes, shapes and dtypes in a nested value, by path; and the names of parameters."""
    return _leaves(value, lambda leaf, path: leaf if "/'params'/" in path else _shape(leaf))


def _leaves(value: Any, what: Callable[[Any, str], Any], path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        parts = [(f"{path}/{key!r}", part) for key, part in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(f"{path}/{number}", part) for number, part in enumerate(value)]
    else:
        return {path: what(value, path)}
    return {path: type(value)} | {key: leaf for name, part in parts for key, leaf in _leaves(part, what, name).items()}


def _shape(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf)


def _content(leaf: Any, path: str) -> Any:
    if isinstance(leaf, torch.Tensor):
        return _shape(leaf), leaf.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    return type(leaf), leaf.tolist() if hasattr(leaf, "tolist") else leaf  # numpy's
