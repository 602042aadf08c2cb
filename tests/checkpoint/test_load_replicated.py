"""Replicated state: one of the ranks reads and checks it, and sends it to its replicas in pieces."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.checkpoints.corruptions import flip
from support.comparing import assert_same
from support.examples import IS_THOROUGH
from support.memory import HostMemory
from support.models import tied_model
from support.on_ranks import on_ranks
from support.ranks import run_ranks
from support.training import HSDP_2X2
from torch import nn
from torch.distributed.checkpoint import save as save_directory

from composer_fsdp2 import CheckpointError, load_checkpoint
from composer_fsdp2._torch.local_tensors import local_tensor
from composer_fsdp2.checkpoint.load import content, staging
from tests.checkpoint.test_load import (
    composer_state,
    contents,
    refused,
    saved,
    step,
    trained,
    untrained,
)

M = TypeVar("M", bound=nn.Module)

PIECE_BYTES = 64 << 10
NO_SHARD = {"sharding_strategy": "NO_SHARD"}


class Large(nn.Module):
    """1 MiB, in tensors larger than one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))


def checkpoint(path: str, make: Callable[[], nn.Module] = Large) -> tuple[Path, dict[str, torch.Tensor]]:
    """A file of an unsharded run after two steps, and the expected contents after a load. Called on all ranks."""
    model, optimizer = trained(make)
    return saved(composer_state(model, optimizer), path), contents(model, optimizer)


def stepped(make: Callable[[], M], config: dict[str, Any] | None) -> tuple[M, torch.optim.Optimizer]:
    """A model with other values, whose optimizer has state, as in a run that returns to an earlier checkpoint."""
    model = make()
    _, optimizer = untrained(lambda: model, config=config)
    step(model, optimizer, 5)
    return model, optimizer


def memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.UntypedStorage]:
    """This rank's storages by name of parameter or optimizer state, without step counts (4 bytes each)."""
    tensors = {name: local_tensor(parameter.detach()) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        tensors |= {f"{key} of {name}": local_tensor(v) for key, v in optimizer.state[parameter].items() if v.dim()}
    return {name: tensor.untyped_storage() for name, tensor in tensors.items()}


@on_ranks(2)
def test_host_memory_is_this_ranks_part_and_a_piece(folder: str) -> None:
    """A load needs host memory for this rank's share and one piece. A node of 8 GPUs needed 672 GB for a model of 7B
    parameters and its moments before it copied the first of them to a GPU."""
    path, expected = checkpoint(f"{folder}/a.pt")
    num_bytes = sum(tensor.nbytes for tensor in expected.values())

    def check(config: dict[str, Any] | None) -> None:
        ours, own = stepped(Large, config)
        with mock.patch.object(staging, "_PIECE_BYTES", PIECE_BYTES), HostMemory() as host:
            load_checkpoint(path, ours, own)
        assert_same(contents(ours, own), expected, in_bits=True)
        # Each rank reads entries below 1 KiB, such as step counts, itself.
        assert host.peak_bytes <= 1.01 * num_bytes / 2 + PIECE_BYTES, (host.peak_bytes, num_bytes)

    for_each(check, {"not sharded": (None,), "NO_SHARD": (NO_SHARD,), "sharded": ({},)})


@on_ranks(2)
def test_an_optimizer_keeps_its_memory(folder: str) -> None:
    """A load copies into the existing moments. They were on the GPU twice, because new ones were allocated first.

    If an optimizer shares one state tensor between two parameters, the load allocates a separate one for each, because
    the file has two.
    """
    path, expected = checkpoint(f"{folder}/a.pt")

    def check(config: dict[str, Any] | None) -> None:
        ours, own = stepped(Large, config)
        shared = own.state[ours.body[0].weight]["exp_avg"]
        own.state[ours.body[1].weight]["exp_avg"] = shared
        before = memory(ours, own)
        load_checkpoint(path, ours, own)
        assert_same(contents(ours, own), expected, in_bits=True)
        moved = [name for name, s in memory(ours, own).items() if s.data_ptr() != before[name].data_ptr()]
        assert moved == ["exp_avg of body.1.weight"], moved

    for_each(check, {"sharded": ({},), "NO_SHARD": (NO_SHARD,)})


# ---------------------------------------------------------------------------------------------------------------------
# The same values as before


def strided(root: dict[str, Any]) -> dict[str, Any]:
    """The same values, column-major or with gaps between rows."""
    weights = root["state"]["model"]
    for number, (name, value) in enumerate(list(weights.items())):
        if value.dim() == 2:
            columns, apart = value.t().contiguous().t(), torch.cat([value, value], 1)[:, : value.shape[1]]
            weights[name] = (columns, apart)[number % 2]
    return root


def layouts(folder: str) -> tuple[dict[str, Path], dict[str, torch.Tensor]]:
    """One state in files of several layouts, and the expected contents after a load. Called on all ranks."""
    paths = {"directory": Path(folder, "directory")}
    paths["one file"], expected = checkpoint(f"{folder}/a.pt", tied_model)
    paths["by columns"] = saved(strided(composer_state(*trained(tied_model))), f"{folder}/b.pt")
    save_directory(composer_state(*trained(tied_model)), checkpoint_id=paths["directory"])
    return paths, expected


def check_equal(folder: str, config: dict[str, Any] | None) -> None:
    paths, expected = layouts(folder)

    def check(path: Path, piece_bytes: int) -> None:
        ours, own = untrained(tied_model, config=config)
        with (
            mock.patch.object(staging, "_PIECE_BYTES", piece_bytes),
            # Also the smallest tensors, which each rank otherwise reads itself.
            mock.patch("composer_fsdp2.checkpoint.load.staging._SMALL_BYTES", 0),
        ):
            report = load_checkpoint(path, ours, own)
        assert_same(contents(ours, own), expected, in_bits=True)
        assert report.unchecked_bytes == 0, str(report)

    cases = {f"{name}, in pieces": (path, 20) for name, path in paths.items()}
    cases["whole"] = (paths["one file"], 64 << 20)
    few = ("directory, in pieces" if config == HSDP_2X2 else "one file, in pieces",)
    for_each(check, cases if config == NO_SHARD or IS_THOROUGH else {name: cases[name] for name in few})


@pytest.mark.any_torch
def test_every_rank_has_all_pieces(tmp_path: Path):
    """Every rank loads and checks each tensor completely, whatever its layout in the file and the piece size."""
    for config in (NO_SHARD, None):
        run_ranks(check_equal, 2, str(tmp_path), config)


@pytest.mark.any_torch
def test_pieces_of_shards(tmp_path: Path):
    """HYBRID_SHARD: each shard is on two ranks."""
    run_ranks(check_equal, 4, str(tmp_path), HSDP_2X2)


# ---------------------------------------------------------------------------------------------------------------------
# Failures


def last_bytes_of(path: Path, name: str) -> int:
    """The offset of the last byte of a tensor whose bytes occur once in the file."""
    content = path.read_bytes()
    value = torch.load(path, weights_only=True)["state"]["model"][name]
    at = content.find(value.numpy().tobytes())
    assert at > 0 and content.find(value.numpy().tobytes(), at + 1) < 0
    return at + value.nbytes - 1


@pytest.mark.any_torch
@on_ranks(2)
def test_damage_is_found_before_anything_is_changed(folder: str) -> None:
    """A flipped bit in the last piece of a tensor is found before the first piece changes the model; pieces cannot be
    undone."""
    for name in ("body.0.weight", "body.3.weight"):
        path, _ = checkpoint(f"{folder}/{name}.pt")
        if dist.get_rank() == 0:
            flip(path, last_bytes_of(path, name))
        dist.barrier()
        with mock.patch.object(staging, "_PIECE_BYTES", PIECE_BYTES):
            refused(name, path, *stepped(Large, NO_SHARD), ["damaged content; nothing was changed"])


class Late(Large):
    """Its load hook runs after all content is checked and before the model changes."""

    def __init__(self) -> None:
        super().__init__()
        self.then: Callable[[], None] = lambda: None

    def get_extra_state(self) -> Any:
        return {"seen": 1}

    def set_extra_state(self, state: Any) -> None:
        self.then()


@pytest.mark.any_torch
@on_ranks(2)
def test_a_file_is_not_read_after_its_check(folder: str) -> None:
    """The loaded values are the checked ones, even if the file changes after the check."""

    def check(config: dict[str, Any] | None) -> None:
        path, expected = checkpoint(f"{folder}/a.pt", Late)
        ours, own = stepped(Late, config)

        def then() -> None:
            dist.barrier()
            if dist.get_rank() == 0:
                os.truncate(path, path.stat().st_size // 2)
            dist.barrier()

        ours.then = then
        load_checkpoint(path, ours, own)
        assert_same(contents(ours, own), expected, in_bits=True)

    for_each(check, {"NO_SHARD": (NO_SHARD,), "not sharded": (None,)})


@on_ranks(2)
def test_a_rank_without_memory_for_its_state(folder: str) -> None:
    """If one GPU has less free memory, all ranks raise before anything is changed. (The error is mocked: no GPU.)"""
    path, _ = checkpoint(f"{folder}/a.pt")
    ours, own = untrained(Large, config=NO_SHARD)
    before = contents(ours, own)
    allocate = staging._Staged.allocate

    def full(self: staging._Staged, *, is_staged: bool) -> None:
        if dist.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        allocate(self, is_staged=is_staged)

    with mock.patch.object(staging._Staged, "allocate", full):
        error = torch.OutOfMemoryError if dist.get_rank() == 1 else CheckpointError
        with pytest.raises(error, match="CUDA out of memory"):
            load_checkpoint(path, ours, own)
    assert_same(contents(ours, own), before, in_bits=True)


@on_ranks(2)
def test_an_optimizer_that_fails_on_one_rank(folder: str) -> None:
    """An optimizer's error on one rank is raised on all ranks, after all sends are complete. (The error is mocked: no
    GPU.)"""
    path, _ = checkpoint(f"{folder}/a.pt")
    ours, own = untrained(Large, config=NO_SHARD)

    def full(*arguments: Any, **named: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    error = torch.OutOfMemoryError if dist.get_rank() == 1 else CheckpointError
    failing = mock.patch.object(torch.optim.Optimizer, "_process_value_according_to_param_policy", staticmethod(full))
    with (
        failing if dist.get_rank() == 1 else contextlib.nullcontext(),
        pytest.raises(error, match="CUDA out of memory"),
    ):
        load_checkpoint(path, ours, own)


@on_ranks(4)
def test_small_parts_of_replicas_are_counted_once(folder: str) -> None:
    """The CRC32 of an undamaged bias is computed without reading it again."""
    path, expected = checkpoint(f"{folder}/a.pt")
    ours, own = untrained(Large, config=HSDP_2X2)
    with mock.patch.object(content, "_read_again", side_effect=AssertionError):
        load_checkpoint(path, ours, own)
    assert_same(contents(ours, own), expected, in_bits=True)
