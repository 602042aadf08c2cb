"""States like Composer's, expected inventories, and files."""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import random
import resource
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from composer_fsdp2.checkpoint.inventory import CheckpointInventory
from composer_fsdp2.checkpoint.read import Reader, materialized
from composer_fsdp2.checkpoint.trees import EntryPath

FIXTURES = Path(__file__).parents[2] / "fixtures"
LEGACY = FIXTURES / "legacy-checkpoints"


def composer_state(*, by_id: bool = False, batch: int = 3) -> dict[str, Any]:
    """A small state with the contents of Composer's monolithic file."""
    model = {"model.weight": torch.randn(5, 3), "model.bias": torch.randn(5), "model.seen": torch.tensor(7)}
    names = ["model.weight", "model.bias"]
    state = {
        (number if by_id else name): {"step": torch.tensor(3.0), "exp_avg": torch.randn_like(model[name])}
        for number, name in enumerate(names)
    }
    group = {"lr": 0.01, "betas": (0.9, 0.95), "params": list(state)}
    return {
        "state": {
            "model": model,
            "optimizers": {"AdamW": {"state": state, "param_groups": [group]}},
            "schedulers": {"LambdaLR": {"last_epoch": batch}},
            "callbacks": [("SpeedMonitor", {"total": 1.5})],
            "timestamp": {"Timestamp": {"epoch": 0, "batch": batch, "total_wct": datetime.timedelta(seconds=4)}},
            "metadata": {
                "composer_env_info": {"composer_version": "0.32.1"},
                "torch_version": torch.__version__,
                "world_size": 1,
            },
        },
        "rng": [{"python": random.getstate(), "torch": torch.get_rng_state()}],
    }


def leaves(value: Any, path: EntryPath = ()) -> Iterator[tuple[EntryPath, Any]]:
    """Every leaf of a nested value: not a dict, list or tuple."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(part, (*path, key))
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from leaves(part, (*path, number))
    else:
        yield path, value


def values_of(inventory: CheckpointInventory) -> dict[EntryPath, Any]:
    """All values of an inventory, read: tensors and others."""
    with Reader() as reader:
        found = {path: reader.read_full(record) for path, record in inventory.tensors.items()}
        for path, entry in inventory.objects.items():
            found |= {path + below: value for below, value in leaves(materialized(entry.value(), reader))}
    return found


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def bytes_read() -> int:
    """The bytes that this process has read from files."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


@contextlib.contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """The kernel refuses longer files, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def peak_anonymous_bytes() -> Iterator[list[int]]:
    """The block's peak increase of this process's anonymous memory, sampled each millisecond."""

    def now() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

    samples, done, start = [0], threading.Event(), now()

    def sample() -> None:
        while not done.is_set():
            samples.append(now() - start)
            time.sleep(1e-3)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


# The dtype names of safetensors' README.
SAFETENSORS_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.bool: "BOOL"}


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor], **changed: Any) -> Path:
    """The format is a length, JSON, bytes; optionally with changed JSON entries for some tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        start, data = len(data), data + bytes_of(tensor)
        entry = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": [*tensor.shape],
            "data_offsets": [start, len(data)],
        }
        header[name] = entry | changed.get(name, {})
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def saveable(dtype: torch.dtype) -> bool:
    """Whether torch.save can write plain tensors of this dtype; it has no storage for uint4 and the like."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about experimental and deprecated dtypes
        try:
            tensor = torch.empty(2, dtype=dtype)
            torch.save(tensor, io.BytesIO())
        except (KeyError, RuntimeError):
            return False
    return not tensor.is_quantized


DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype) and saveable(value)}, key=str
)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator | None = None) -> torch.Tensor:
    """A tensor of random bits, valid for the dtype."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (num_bytes,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).reshape(shape) if num_bytes else torch.empty(shape, dtype=dtype)
