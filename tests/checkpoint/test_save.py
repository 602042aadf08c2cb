"""A sharded state in one file: torch.load reads the full state, and no rank ever materializes it."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.checkpoints.samples import file_size_limit, peak_anonymous_bytes, random_tensor
from support.comparing import assert_same
from support.on_ranks import on_ranks
from support.ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from composer_fsdp2._torch.local_tensors import with_local_tensor
from composer_fsdp2.checkpoint.save import monolithic, rounds
from composer_fsdp2.checkpoint.save.monolithic import save_monolithic
from composer_fsdp2.errors import CheckpointError

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.complex64,
)


@dataclass
class Tracker:
    """A callback's state may be an object."""

    best: torch.Tensor
    name: str = "tracker"


def sharded(tensor: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """A shard as fully_shard creates it, by torch.chunk along one dimension. Does not communicate, so any dtype
    works."""
    local = tensor.clone()
    if isinstance(placement, Shard):
        chunks = tensor.chunk(mesh.size(), placement.dim)
        empty = tensor.narrow(placement.dim, 0, 0)
        local = [*chunks, *[empty] * (mesh.size() - len(chunks))][mesh.get_local_rank()].clone()
    stride = torch.empty(tensor.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=tensor.shape, stride=stride)


@contextlib.contextmanager
def slices_of(num_bytes: int) -> Iterator[None]:
    with mock.patch.object(rounds, "SLICE_BYTES", num_bytes):
        yield


# --- contents of the file


def records(path: str) -> dict[str, bytes]:
    """Every record of the archive, after its CRC32 check, except torch's own checksum, which no reader uses."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist() if "serialization_id" not in name}


@on_ranks(2)
def test_the_file_is_torch_saves(folder: str) -> None:
    """For each placement, dtype and shape, the file equals torch.save's file of the full state."""
    mesh = init_device_mesh("cpu", (2,))
    generator, choose = torch.Generator().manual_seed(1), random.Random(1)
    whole: dict[str, torch.Tensor] = {}
    cut: dict[str, torch.Tensor] = {}
    fixed = [((5, 3), 0), ((1, 4), 0), ((0, 3), 0), ((3, 5), 1), ((2, 3, 4), 1), ((2, 3, 5), 2), ((7,), 0), ((), None)]
    drawn = [tuple(choose.randint(0, 6) for _ in range(choose.randint(1, 4))) for _ in range(60)]
    for number, (shape, dim) in enumerate([*fixed, *((s, choose.randrange(len(s))) for s in drawn)]):
        for dtype in DTYPES if number < len(fixed) else [choose.choice(DTYPES)]:
            name = f"{number} {shape} {dim} {dtype}"
            whole[name] = random_tensor(shape, dtype, generator)
            cut[name] = sharded(whole[name], mesh, Replicate() if dim is None else Shard(dim))
    tied, step = torch.randn(4, 2), torch.tensor(3.0)
    cut_tied = sharded(tied, mesh, Shard(0))

    def state(model: dict[str, torch.Tensor], shared: torch.Tensor) -> dict[str, Any]:
        return {
            "state": {
                "model": OrderedDict(model),
                "optimizers": {"Adam": {"state": {"w": {"step": step, "exp_avg": shared}}, "groups": [{"lr": 0.1}]}},
                "callbacks": {"Tracker": Tracker(torch.ones(2))},
                "algorithms": [("Clip", {"repr": "Clip()"})],
                "pair": (shared, torch.arange(3)),
            },
            "rng": [{"rank": 0}, {"rank": 1}],
        }

    def check(num_bytes: int, from_host: bool) -> None:
        dist.barrier()  # rank 0 has read the last case's file
        with slices_of(num_bytes), mock.patch.object(monolithic, "sends_from_host", return_value=from_host):
            save_monolithic(state(cut, cut_tied), f"{folder}/ours.pt")
        if dist.get_rank() == 0:
            with open(f"{folder}/theirs.pt", "wb") as file:
                torch.save(state(whole, tied), file)
            ours, theirs = (torch.load(f"{folder}/{name}.pt", weights_only=False) for name in ("ours", "theirs"))
            assert_same(ours, theirs, in_bits=True, in_order=True)
            assert records(f"{folder}/ours.pt") == records(f"{folder}/theirs.pt")
            assert sorted(os.listdir(folder)) == ["ours.pt", "theirs.pt"]

    cases = {
        "many slices to a shard": (17, True),
        "one": (16 << 20, True),
        "as a group sends that takes no host memory": (1 << 10, False),
    }
    for_each(check, cases)


@on_ranks(4)
def test_replicas_share_what_is_sent(folder: str) -> None:
    """Among replicas each shard is sent once, and never from a process group whose values differ from rank 0's."""
    rank = dist.get_rank()
    whole = {"a": torch.randn(6, 4), "b": torch.randn(5)}  # the same on all ranks: one seed
    meshes = {"HSDP": init_device_mesh("cpu", (2, 2)), "NO_SHARD": init_device_mesh("cpu", (4, 1))}
    sent: list[int] = []
    send = dist.send

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        sent.append(tensor.numel())
        send(tensor, *args, **kwargs)

    def check(kind: str, mesh: DeviceMesh) -> None:
        sent.clear()
        state = {name: distribute_tensor(value, mesh, [Replicate(), Shard(0)]) for name, value in whole.items()}
        with mock.patch.object(dist, "send", counted):
            save_monolithic(state, f"{folder}/{kind}.pt")
        if rank == 0:
            assert_same(torch.load(f"{folder}/{kind}.pt"), whole, kind, in_bits=True, in_order=True)
        # Ranks 1 and 3 have the shards that rank 0 lacks: 3 rows of "a" and 2 elements of "b". A rank without data
        # sends one byte.
        half = (3 * 4 * 4 + 2 * 4) // 2
        assert sum(sent) == ([0, half, 1, half] if kind == "HSDP" else [0, 1, 1, 1])[rank]

    for_each(check, {kind: (kind, mesh) for kind, mesh in meshes.items()})
    # Process groups that train independently: rank 3 has the other half of rank 0's values, rank 2 of rank 1's.
    pairs = [DeviceMesh("cpu", [0, 3]), DeviceMesh("cpu", [1, 2])]
    apart = 1.0 if rank in (1, 2) else 0.0
    mine = sharded(whole["a"] + apart, pairs[int(apart)], Shard(0))
    save_monolithic({"a": mine}, f"{folder}/apart.pt")
    if rank == 0:
        assert_same(torch.load(f"{folder}/apart.pt"), {"a": whole["a"]}, "apart", in_bits=True, in_order=True)


# --- memory


def check_memory(folder: str) -> int:
    mesh = init_device_mesh("cpu", (2,))
    local = torch.ones(2048, 8192)  # 64 MiB
    state = {name: DTensor.from_local(local.clone(), mesh, [Shard(0)], run_check=False) for name in "ab"}
    save_monolithic({"a": sharded(torch.ones(4, 4), mesh, Shard(0))}, f"{folder}/small.pt")  # imports, connections
    with peak_anonymous_bytes() as samples:
        save_monolithic(state, f"{folder}/large.pt")
    assert len(samples) > 50, f"{len(samples)} samples"
    return max(samples)


@pytest.mark.any_torch
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_no_rank_holds_more_than_slices(tmp_path: Path):
    """Saving a model larger than any host's memory must not end the run: 256 MiB are sent in slices of 16 MiB.

    Rank 0 needs two slices, one being written and one being received; another rank needs one.
    """
    peaks = run_ranks(check_memory, 2, str(tmp_path), fresh=True)
    in_words = [f"{peak / 2**20:.1f} MiB" for peak in peaks]
    assert peaks[0] < 3 * rounds.SLICE_BYTES and peaks[1] < 2 * rounds.SLICE_BYTES, in_words
    assert (tmp_path / "large.pt").stat().st_size > 256 << 20


# --- errors


def refused(state: Any, path: str) -> str:
    """The message of the error on this rank."""
    with pytest.raises(CheckpointError) as caught:
        save_monolithic(state, path)
    return str(caught.value)


def a_state(mesh: DeviceMesh, size: int = 64) -> dict[str, Any]:
    return {"w": sharded(torch.ones(size, size), mesh, Shard(0)), "b": sharded(torch.ones(3), mesh, Shard(0))}


@on_ranks(2)
def test_errors_are_everybodys(folder: str) -> None:
    """A full disk or a missing folder is an error with its reason on every rank, and the old file is unchanged."""
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    path = f"{folder}/model.pt"
    save_monolithic({"old": sharded(torch.ones(4), mesh, Shard(0))}, path)
    old = Path(path).read_bytes() if rank == 0 else b""
    (Path(folder) / "file").touch()

    names, more = (("w", {}), ("v", {"more": sharded(torch.ones(3), mesh, Shard(0))}))[rank]
    unlike = {(names if name == "w" else name): value for name, value in a_state(mesh).items()}
    halves = a_state(mesh) | {"b": sharded(torch.ones(3, dtype=(torch.float32, torch.float16)[rank]), mesh, Shard(0))}
    hidden = {**a_state(mesh), "tracker": Tracker(sharded(torch.ones(4), mesh, Shard(0)))}
    quantized, sparse = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), torch.eye(2).to_sparse()
    cut_sparse = with_local_tensor(sharded(torch.ones(4, 2), mesh, Shard(0)), sparse)
    cases: dict[str, tuple[Any, str, list[str]]] = {
        "a file in the folder's place": (a_state(mesh), f"{folder}/file/model.pt", ["file/model.pt", "cannot be"]),
        "a rank with another name": (unlike, path, [path, "w (64, 64)", "v (64, 64)", "rank 1"]),
        "a rank with more": (a_state(mesh) | more, path, [path, "2 sharded tensors", "3"]),
        "a rank with another dtype": (halves, path, [path, "torch.float16", "b (3,)"]),
        "what cannot be pickled": ({**a_state(mesh), "f": lambda: 0}, path, [path, "pickle"]),
        "sparse": ({**a_state(mesh), "s": sparse}, path, [path, "sparse"]),
        "sharded and sparse": ({"s": cut_sparse}, path, ["sparse"]),
        "quantized": ({"q": quantized}, path, ["quantized"]),  # it ended the process
        "on meta": ({"m": torch.ones(2, device="meta")}, path, ["meta"]),
        "a sharded tensor in an object": (hidden, path, [path, "inside of an object"]),
    }

    def check(state: Any, where: str, words: list[str]) -> None:
        text = refused(state, where)
        assert all(word.lower() in text.lower() for word in words), text

    for_each(check, cases)
    with file_size_limit(4096) if rank == 0 else contextlib.nullcontext():
        assert "too large" in refused(a_state(mesh), path)
    # The disk is full midway: later writes fail, and the other rank continues to send until the end.
    calls: list[int] = []
    write_all = monolithic.write_all

    def full(*args: Any) -> None:
        calls.append(1)
        if len(calls) > 20:
            raise OSError(28, "No space left on device")
        write_all(*args)

    with slices_of(256), mock.patch.object(monolithic, "write_all", full):
        assert "No space left" in refused(a_state(mesh), path)
    if rank == 0:
        assert len(calls) == 21, "the error came before any piece or after all of them"
        assert Path(path).read_bytes() == old
        assert sorted(os.listdir(folder)) == ["file", "model.pt"], "something was left"
    dist.barrier()
    save_monolithic(a_state(mesh), path)  # no rank still waits for another
    if rank == 0:
        assert set(torch.load(path)) == {"w", "b"}


def failing_on(rank: int, owner: Any, name: str, after: int = 0) -> Any:
    """A context in which a function raises on this rank after ``after`` successful calls."""
    original, calls = getattr(owner, name), itertools.count()

    def call(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == rank and next(calls) >= after:
            raise MemoryError("no memory is left")
        return original(*args, **kwargs)

    return mock.patch.object(owner, name, call)


@pytest.mark.any_torch
@on_ranks(2, timeout_s=120)
def test_what_one_rank_cannot_do(folder: str) -> None:
    """Every rank raises with the reason, and none waits for another."""
    # The failing function and the expected error; the other rank would wait for it in a collective.
    mesh, path = init_device_mesh("cpu", (2,)), f"{folder}/model.pt"

    def check(failing: Any, words: list[str]) -> None:
        with slices_of(256), failing:
            text = refused(a_state(mesh), path)
        assert all(word in text for word in words), text
        assert dist.get_rank() or os.listdir(folder) == []
        dist.barrier()

    for_each(
        check,
        {
            "memory for a round, of a sender": (failing_on(1, monolithic, "_host_memory"), ["rank 1: MemoryError"]),
            "memory for a round, of rank 0": (failing_on(0, monolithic, "_host_memory"), ["MemoryError"]),
            "a thread": (failing_on(0, threading.Thread, "start"), ["MemoryError"]),
            "a sender's first read": (failing_on(1, monolithic, "bytes_of"), ["rank 1: MemoryError"]),
            "a sender's read in the midst": (failing_on(1, monolithic, "bytes_of", after=5), ["rank 1: MemoryError"]),
            "rank 0's second read": (failing_on(0, monolithic, "bytes_of", after=1), ["MemoryError"]),
            "the file's last bytes": (failing_on(0, monolithic, "sync"), ["MemoryError"]),
            "its name": (failing_on(0, os, "replace"), ["MemoryError"]),
        },
    )
    # The folder is read-only by now, so the staged file remains; or a network file system cannot sync folders.
    no_unlink = mock.patch.object(Path, "unlink", side_effect=PermissionError(1, "no"))
    with failing_on(0, monolithic, "write_all"), no_unlink:
        assert "MemoryError" in refused(a_state(mesh), path)
    with mock.patch.object(monolithic, "sync_folder", side_effect=OSError(22, "Invalid argument")):
        save_monolithic(a_state(mesh), path)
    dist.barrier()
    assert set(torch.load(path)) == {"w", "b"}, "it is written, and has its name"


@on_ranks(2)
def test_unusual_tensors(folder: str) -> None:
    """Conjugated, negated and frozen tensors are saved with their values."""
    mesh, path = init_device_mesh("cpu", (2,)), f"{folder}/model.pt"
    turned = torch.randn(5, 3, dtype=torch.complex64).conj()
    imaginary = torch.randn(4, dtype=torch.complex64).conj().imag  # has its negative bit set
    assert turned.is_conj() and imaginary.is_neg()
    shard = turned.chunk(2)[dist.get_rank()].resolve_conj()
    cut = DTensor.from_local(
        shard.conj_physical().conj(), mesh, [Shard(0)], run_check=False, shape=(5, 3), stride=(3, 1)
    )
    with torch.inference_mode():
        frozen = torch.ones(2)
    state = {"turned": turned, "imaginary": imaginary, "cut": cut, "frozen": frozen}
    save_monolithic(state, path)
    if dist.get_rank() == 0:
        expected = {"turned": turned, "imaginary": imaginary, "cut": turned, "frozen": frozen}
        assert_same(torch.load(path), {name: value.clone() for name, value in expected.items()}, in_bits=True)


@on_ranks(3)
def test_a_tensor_that_the_ranks_do_not_have(folder: str) -> None:
    """Such a tensor was saved as zeros."""
    # A mesh without rank 0, and a process group that does not contain the mesh.
    values = torch.randn(6, 2)
    mesh = DeviceMesh("cpu", [1, 2])
    if dist.get_rank() in (1, 2):
        elsewhere = distribute_tensor(values, mesh, [Shard(0)])
    else:
        elsewhere = DTensor.from_local(values[:0], mesh, [Shard(0)], run_check=False, shape=(6, 2), stride=(2, 1))
    assert "w (6, 2)" in refused({"w": elsewhere}, f"{folder}/model.pt")
    everywhere = sharded(values, init_device_mesh("cpu", (3,)), Shard(0))
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        with pytest.raises(CheckpointError, match="w \\(6, 2\\)"):
            save_monolithic({"w": everywhere}, f"{folder}/model.pt", group=group)
    dist.barrier()
    assert os.listdir(folder) == []


@on_ranks(2)
def test_a_group_of_its_own(folder: str) -> None:
    """With its own process group, a save runs concurrently with training's collectives and does not change them."""
    mesh = init_device_mesh("cpu", (2,))
    group = dist.new_group([1, 0])
    tensors = {name: torch.randn(64, 8) for name in "abcdefgh"}
    state = {name: sharded(value, mesh, Shard(0)) for name, value in tensors.items()}
    with slices_of(64), ThreadPoolExecutor(1) as threads:
        saving = threads.submit(save_monolithic, state, f"{folder}/beside.pt", group=group)
        for _ in range(200):  # the training's concurrent collectives on the default group
            dist.all_reduce(total := torch.ones(()))
            assert total.item() == 2.0
        saving.result()
    if dist.get_rank() == 0:
        assert_same(torch.load(f"{folder}/beside.pt"), tensors, in_bits=True, in_order=True)
