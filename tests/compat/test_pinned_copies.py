"""Copies of GPU tensors: their contents, and the amount of host memory pinned for them."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.comparing import assert_same
from support.cuda_played import CudaPlayed
from support.gpus import gpu_marks
from support.on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.overrides import TorchFunctionMode

from composer_fsdp2._torch.local_tensors import local_tensor

pytestmark = pytest.mark.composer


@pytest.fixture
def cuda() -> Iterator[CudaPlayed]:
    with as_if_on_cuda() as cuda:
        yield cuda


@contextlib.contextmanager
def as_if_on_cuda() -> Iterator[CudaPlayed]:
    """Without a GPU: host tensors stand for GPU tensors, and CUDA's pinning is mocked. The copies are real."""
    from composer_fsdp2.compat import pinned_copies as module

    with CudaPlayed() as cuda, mock.patch.object(module, "_is_on_cuda", return_value=True):
        yield cuda


def pinned_copies() -> Any:
    from composer_fsdp2.compat.pinned_copies import PinnedCopies

    return PinnedCopies()


def samples() -> dict[str, torch.Tensor]:
    """Tensors of every kind that may occur in a state."""
    numbers = torch.arange(60.0).view(3, 4, 5)
    return {
        "scalar": torch.tensor(7, dtype=torch.int64),
        "flag": torch.tensor([True, False, True]),
        "bf16": torch.randn(33).bfloat16(),
        "complex": torch.randn(3, 2, dtype=torch.complex64),
        "empty": torch.empty(0, 5),
        "transposed": numbers.transpose(0, 2),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "every second": numbers[:, ::2],
        "a piece": numbers.view(-1)[7:11],
        "all of its storage": numbers.view(-1),
        "expanded": torch.tensor([1.5, 2.5])[:, None].expand(2, 1000),
        "parameter": nn.Parameter(torch.randn(5, 3)),
    }


def bytes_of(tensors: Any) -> int:
    return sum(local_tensor(tensor).nbytes for tensor in tensors)


def assert_copies(copies: dict[int, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
    assert list(copies) == [id(tensor) for tensor in tensors.values()]
    for name, tensor in tensors.items():
        copied = copies[id(tensor)]
        assert_same(copied, tensor.detach().cpu(), name, in_bits=True)
        assert copied.stride() == tensor.detach().to("cpu", copy=True).stride(), name
        assert not copied.requires_grad, name


def test_every_kind_of_tensor(cuda: CudaPlayed):
    """A checkpoint written in the background has the same values and strides as one written at once. The pinned memory
    is no larger than the state; torch pins powers of two, 1.1 to 1.7 times as much, on a node with the state of eight
    ranks."""
    tensors, copies = samples(), pinned_copies()
    for _ in range(2):
        made = copies.of(tensors.values())
        assert_copies(made, tensors)
        with torch.no_grad():
            for name in ("flag", "parameter", "all of its storage"):
                tensors[name].zero_()
    num_bytes = bytes_of(tensors.values())
    assert num_bytes <= sum(cuda.pinned.values()) <= num_bytes + 64 * len(tensors), cuda.events
    # torch.save writes the whole storage of a tensor: a scalar would become a file of the state's size.
    assert all(copied.untyped_storage().nbytes() == copied.nbytes for copied in made.values())


def test_nothing_but_empty_tensors(cuda: CudaPlayed):
    """A rank may have an empty shard of every saved tensor."""
    tensors = {"empty": torch.empty(0, 5), "bf16": torch.empty(3, 0, dtype=torch.bfloat16)}
    assert_copies(pinned_copies().of(tensors.values()), tensors)
    assert not cuda.pinned


@on_ranks(4)
def test_sharded_tensors(folder: str):
    """The writer maps each shard to its place, also when a rank's shard is empty."""
    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    unsharded = torch.arange(70.0).view(10, 7)
    tensors = {
        "rows": distribute_tensor(unsharded, flat, [Shard(0)]),
        "fewer rows than ranks": distribute_tensor(unsharded[:3], flat, [Shard(0)]),
        "columns": distribute_tensor(unsharded, flat, [Shard(1)]),
        "replicas": distribute_tensor(unsharded, square, [Replicate(), Shard(0)]),
        "scalar": distribute_tensor(torch.tensor(3.0), flat, [Replicate()]),
        "transposed": distribute_tensor(unsharded, flat, [Shard(0)]).t(),
        "parameter": nn.Parameter(distribute_tensor(unsharded.bfloat16(), flat, [Shard(0)])),
    }
    parts = {name: local_tensor(tensor) for name, tensor in tensors.items()}
    with as_if_on_cuda() as cuda:
        memory = pinned_copies()
        copies = memory.of(tensors.values())
        assert sum(cuda.pinned.values()) <= bytes_of(parts.values()) + 64 * len(parts)
        del memory
    assert_copies({id(parts[name]): local_tensor(copies[id(tensor)]) for name, tensor in tensors.items()}, parts)
    for name, tensor in tensors.items():
        copied = copies[id(tensor)]
        assert isinstance(copied, DTensor) and not copied.requires_grad, name
        assert copied.device_mesh is tensor.device_mesh and copied.placements == tensor.placements, name
        assert (copied.shape, copied.stride(), copied.dtype) == (tensor.shape, tensor.stride(), tensor.dtype), name
        assert_same(copied.full_tensor(), tensor.detach().full_tensor(), name, in_bits=True)


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def test_memory_grows_and_is_given_back(cuda: CudaPlayed):
    """Saves of weights only and of the full state take turns without pinning again; two buffers never exist at once."""
    small, large = [torch.randn(1000)], [torch.randn(1000), torch.randn(2000, 3)]
    copies = pinned_copies()
    for tensors in (small, large, small, [large[1], small[0]], large):
        made = copies.of(tensors)
        for tensor in tensors:
            assert torch.equal(made[id(tensor)], tensor)
    del copies
    assert [event for event in cuda.events if event[0] != "wait"] == [
        ("pin", 4032),
        ("unpin", 4032),
        ("pin", 4032 + 24000),
        ("unpin", 4032 + 24000),
    ]
    assert torch.equal(made[id(large[1])], large[1]), "memory was given back under a tensor that is still there"


def test_memory_that_cannot_be_pinned(cuda: CudaPlayed, caplog: pytest.LogCaptureFixture):
    """A host short of memory costs time and a warning, but no checkpoint."""
    tensors, copies = {"a": torch.randn(3000), "b": torch.randn(7)}, pinned_copies()
    cuda.limit_bytes = 4096
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert_copies(copies.of(tensors.values()), tensors)
    del copies
    assert {event for event, _ in cuda.events} == {"wait"}
    [message] = caplog.messages
    assert "could not be pinned (out of memory)" in message


def test_the_device_is_waited_for_once(cuda: CudaPlayed):
    """Copies are queued without waiting; a wait for each would leave the GPU's copy engine idle."""
    tensors, copies = [*samples().values()], pinned_copies()

    class Copying(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.copy_:
                cuda.events.append(("copy", kwargs["non_blocking"]))
            return func(*args, **(kwargs or {}))

    with Copying():
        copies.of(tensors)
    [pin, *copied, wait] = cuda.events
    assert (pin[0], wait[0]) == ("pin", "wait") and copied == [("copy", True)] * len(tensors), cuda.events


def test_forked_processes_do_not_have_it(cuda: CudaPlayed):
    """A data loader's worker does not inherit pages that a GPU writes to, and does not keep them from being freed."""
    maps = Path("/proc/self/smaps")
    if not maps.exists():
        pytest.skip("needs Linux's /proc")
    tensor, copies = torch.randn(1 << 20), pinned_copies()
    address = copies.of([tensor])[id(tensor)].data_ptr()
    pattern = r"^([0-9a-f]+)-([0-9a-f]+) [^\n]*\n(?:[A-Z][^\n]*\n)*?VmFlags:([^\n]*)"
    areas = re.findall(pattern, maps.read_text(), re.MULTILINE)
    [flags] = [flags for start, end, flags in areas if int(start, 16) <= address < int(end, 16)]
    assert "dc" in flags.split(), "it is copied on fork"


def test_other_accelerators_copy_to_plain_memory():
    """Without CUDA, no CUDA function is called."""
    tensors = samples()
    with CudaPlayed() as cuda:
        assert_copies(pinned_copies().of(tensors.values()), tensors)
    assert not cuda.events


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU

on_a_gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu_marks())])


@on_a_gpu
def test_copies_of_a_gpu_are_pinned(device: str):
    """Training waits for the copy, which from a GPU to pageable memory takes several times as long."""
    from composer_fsdp2.compat.pinned_copies import is_on_device

    tensors = {name: tensor.detach().to(device) for name, tensor in samples().items()}
    assert all(map(is_on_device, tensors.values())) and not is_on_device(tensors["bf16"].cpu())
    copies = pinned_copies()
    places = []
    for _ in range(2):
        num_allocated = torch.cuda.host_memory_stats().get("num_host_alloc", 0)
        made = copies.of(tensors.values())
        assert torch.cuda.host_memory_stats().get("num_host_alloc", 0) == num_allocated, "it is torch's, rounded up"
        assert_copies(made, tensors)
        places.append([copied.data_ptr() for copied in made.values()])
        for copied in made.values():
            assert copied.is_pinned() or not copied.numel()
        tensors["bf16"].add_(1)
    assert places[0] == places[1]


@on_a_gpu
def test_a_gpu_trains_on_after_memory_could_not_be_pinned(device: str, caplog: pytest.LogCaptureFixture):
    """CUDA reports an error of one call to the next caller, which must not be the next step's kernel."""
    from composer_fsdp2.compat import pinned_copies

    memory = torch.empty(1 << 20, dtype=torch.uint8)
    assert pinned_copies._pin(memory.data_ptr(), memory.nbytes)
    try:
        assert not pinned_copies._pin(memory.data_ptr(), memory.nbytes), "it was pinned twice"
        assert torch.full((3,), 2.0, device=device).sum().item() == 6
    finally:
        pinned_copies._unpin(memory.data_ptr())
    [message] = caplog.messages
    assert "already" in message
    assert not memory.is_pinned()
