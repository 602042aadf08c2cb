"""State that several ranks of a node hold: never all of it in host memory, checked before it is put into place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
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
from torch.distributed.tensor import DTensor

from composer_fsdp2 import CheckpointError, load_checkpoint
from composer_fsdp2._torch.parts import local_tensor
from composer_fsdp2.checkpoint.load import replicated, staging
from composer_fsdp2.checkpoint.read import Reader
from tests.checkpoint.test_load import (
    adamw,
    composer_state,
    contents,
    machines,
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
    """1 MiB, in tensors of which none is a piece."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))


def checkpoint(path: str, make: Callable[[], nn.Module] = Large) -> tuple[Path, dict[str, torch.Tensor]]:
    """What a run without sharding saves after two steps, and what a load of it has to give. Called on all ranks."""
    model, optimizer = trained(make)
    return saved(composer_state(model, optimizer), path), contents(model, optimizer)


def stepped(make: Callable[[], M], config: dict[str, Any] | None) -> tuple[M, torch.optim.Optimizer]:
    """A model with other values, whose optimizer has state, as in a run that goes back to a checkpoint."""
    model = make()
    _, optimizer = untrained(lambda: model, config=config)
    step(model, optimizer, 5)
    return model, optimizer


def memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.UntypedStorage]:
    """This rank's memory, by what lies in it; step counts, of 4 bytes each, are left out."""
    tensors = {name: local_tensor(parameter.detach()) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        tensors |= {f"{key} of {name}": local_tensor(v) for key, v in optimizer.state[parameter].items() if v.dim()}
    return {name: tensor.untyped_storage() for name, tensor in tensors.items()}


@on_ranks(2)
def test_replicated_state_is_never_all_in_host_memory(folder: str) -> None:
    """A node of 8 GPUs held 672 GB of a model of 7B parameters and its moments, before one of them was in place."""
    path, expected = checkpoint(f"{folder}/a.pt")

    def check(config: dict[str, Any] | None, one_reader: bool) -> None:
        ours, own = stepped(Large, config)
        with mock.patch.object(replicated, "_PIECE_BYTES", PIECE_BYTES), HostMemory() as host:
            load_checkpoint(path, ours, own, one_reader_per_node=one_reader)
        assert_same(contents(ours, own), expected, in_bits=True)
        # Without pieces it is the full state, 48 times as much.
        assert PIECE_BYTES <= host.peak_bytes <= 4 * PIECE_BYTES, f"{host.peak_bytes / PIECE_BYTES} pieces"

    for_each(check, {"not sharded": (None, False), "one reader": (NO_SHARD, True)})


@on_ranks(2)
def test_an_optimizer_keeps_its_memory(folder: str) -> None:
    """Moments that are there already lay on the GPU twice while the new ones were loaded beside them.

    Two parameters that share one tensor of state, by an optimizer's own doing, get one each: both have their own.
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
    """The same values by columns, and by rows far apart."""
    weights = root["state"]["model"]
    for number, (name, value) in enumerate(list(weights.items())):
        if value.dim() == 2:
            columns, apart = value.t().contiguous().t(), torch.cat([value, value], 1)[:, : value.shape[1]]
            weights[name] = (columns, apart)[number % 2]
    return root


def layouts(folder: str) -> tuple[dict[str, Path], dict[str, torch.Tensor]]:
    """One state in files of several kinds, and what a load of any of them has to give. Called on all ranks."""
    paths = {"directory": Path(folder, "directory")}
    paths["one file"], expected = checkpoint(f"{folder}/a.pt", tied_model)
    paths["by columns"] = saved(strided(composer_state(*trained(tied_model))), f"{folder}/b.pt")
    save_directory(composer_state(*trained(tied_model)), checkpoint_id=paths["directory"])
    return paths, expected


@contextlib.contextmanager
def counting_passed_on(*, sharded: bool) -> Iterator[list[int]]:
    """How many tensors each load in the block passes on; of a sharded model, without what is not sharded in it."""
    counts: list[int] = []
    pass_on = replicated.ReplicatedState.pass_on

    def counted(self: replicated.ReplicatedState, reader: Reader) -> None:
        counts.append(sum(not sharded or isinstance(tensor.box.like, DTensor) for tensor in self._tensors))
        pass_on(self, reader)

    with mock.patch.object(replicated.ReplicatedState, "pass_on", counted):
        yield counts


def check_equal(folder: str, config: dict[str, Any] | None, num_holders: int) -> None:
    paths, expected = layouts(folder)

    def check(path: Path, piece_bytes: int, ranks_per_machine: int) -> None:
        ours, own = untrained(tied_model, config=config)
        with (
            mock.patch.object(replicated, "_PIECE_BYTES", piece_bytes),
            # Every tensor, the smallest too, which each rank reads for itself.
            mock.patch("composer_fsdp2.checkpoint.load.exchange._SMALL_BYTES", 0),
            machines(ranks_per_machine),
            counting_passed_on(sharded=config is not None) as counts,
        ):
            report = load_checkpoint(path, ours, own)
        assert_same(contents(ours, own), expected, in_bits=True)
        assert report.unchecked_bytes == 0, str(report)
        # Where machines are replicas, one rank of each holds a shard.
        assert bool(counts[0]) == (ranks_per_machine > num_holders), f"{counts}, {ranks_per_machine}"

    world_size = dist.get_world_size()
    cases = {f"{name}, in pieces": (path, 20, world_size) for name, path in paths.items()}
    cases |= {"whole": (paths["one file"], 64 << 20, world_size), "apart": (paths["directory"], 20, num_holders)}
    few = ("directory, in pieces", "apart") if config == HSDP_2X2 else ("one file, in pieces",)
    for_each(check, cases if config == NO_SHARD or IS_THOROUGH else {name: cases[name] for name in few})


@pytest.mark.any_torch
def test_pieces_give_what_staging_gives(tmp_path: Path):
    """However a tensor lies in its file and is cut into pieces, every rank has all of it, and all of it was checked.

    Replicas on machines of their own go on as before: each machine holds the state once."""
    for config in (NO_SHARD, None):
        run_ranks(check_equal, 2, str(tmp_path), config, 1)


@pytest.mark.any_torch
def test_pieces_of_shards(tmp_path: Path):
    """HYBRID_SHARD within one machine: two ranks hold each shard."""
    run_ranks(check_equal, 4, str(tmp_path), HSDP_2X2, 2)


@pytest.mark.any_torch
@on_ranks(4)
def test_one_reader_of_replicas(folder: str) -> None:
    """Whatever a machine's ranks hold alike, all of them know what its first rank reads for them."""
    path, expected = checkpoint(f"{folder}/a.pt")

    def check(config: dict[str, Any], ranks_per_machine: int) -> None:
        ours, own = stepped(Large, config)
        with machines(ranks_per_machine):
            load_checkpoint(path, ours, own, one_reader_per_node=True)
        assert_same(contents(ours, own), expected, in_bits=True)

    configs = {"HSDP": HSDP_2X2, "NO_SHARD": NO_SHARD, "shards": {}}
    chosen = [("HSDP", 2), ("HSDP", 3), ("NO_SHARD", 3), ("shards", 3)]
    every = [(name, ranks) for name in configs for ranks in (1, 2, 3, 4)]
    cases = {
        f"{name}, {ranks} on a machine": (configs[name], ranks) for name, ranks in (every if IS_THOROUGH else chosen)
    }
    for_each(check, cases)


# ---------------------------------------------------------------------------------------------------------------------
# Failures


def last_bytes_of(path: Path, name: str) -> int:
    """Where the last element of a tensor that is nowhere else in a file lies."""
    content = path.read_bytes()
    value = torch.load(path, weights_only=True)["state"]["model"][name]
    at = content.find(value.numpy().tobytes())
    assert at > 0 and content.find(value.numpy().tobytes(), at + 1) < 0
    return at + value.nbytes - 1


@pytest.mark.any_torch
@on_ranks(2)
def test_damage_is_found_before_anything_is_changed(folder: str) -> None:
    """A bit that flipped in the last piece of a tensor: what was put into place piece by piece cannot be put back."""
    for name in ("body.0.weight", "body.3.weight"):
        path, _ = checkpoint(f"{folder}/{name}.pt")
        if dist.get_rank() == 0:
            flip(path, last_bytes_of(path, name))
        dist.barrier()
        with mock.patch.object(replicated, "_PIECE_BYTES", PIECE_BYTES):
            refused(name, path, *stepped(Large, NO_SHARD), ["damaged content; nothing was changed"])


class Late(Large):
    """Its own code runs once all is checked, before anything is in place."""

    def __init__(self) -> None:
        super().__init__()
        self.then: Callable[[], None] = lambda: None

    def get_extra_state(self) -> Any:
        return {"seen": 1}

    def set_extra_state(self, state: Any) -> None:
        self.then()


@pytest.mark.any_torch
@on_ranks(2)
def test_a_file_that_changes_after_its_check(folder: str) -> None:
    """The one thing that cannot be undone: all ranks say that the model is partly changed, and none trains on it."""
    intact, expected = checkpoint(f"{folder}/intact.pt", Late)

    def check(name: str, damage: Callable[[Path], None], config: dict[str, Any] | None) -> None:
        path, _ = checkpoint(f"{folder}/damaged.pt", Late)
        ours, own = stepped(Late, config)

        def then() -> None:
            dist.barrier()
            if dist.get_rank() == 0:
                damage(path)
            dist.barrier()

        ours.then = then
        with (
            mock.patch.object(replicated, "_PIECE_BYTES", PIECE_BYTES),
            pytest.raises(
                CheckpointError, match=rf"damaged.pt: was undamaged when .*{name}.* partly changed: load again"
            ),
        ):
            load_checkpoint(path, ours, own)
        ours.then = lambda: None
        load_checkpoint(intact, ours, own)
        assert_same(contents(ours, own), expected, in_bits=True)

    # Each of two neighbouring tensors is another rank's to read.
    kinds: dict[str, Callable[[Path], None]] = {
        "body.0.weight: its bytes differ": lambda path: flip(path, last_bytes_of(path, "body.0.weight")),
        "body.1.weight: its bytes differ": lambda path: flip(path, last_bytes_of(path, "body.1.weight")),
        "ends at byte": lambda path: os.truncate(path, path.stat().st_size // 2),
    }
    for_each(check, {name: (name, kinds[name], (NO_SHARD, None)[at % 2]) for at, name in enumerate(kinds)})


@on_ranks(2)
def test_a_rank_without_memory_for_its_state(folder: str) -> None:
    """A GPU is fuller than the others: they hear of it, and do not wait in a broadcast. (The error is made: no GPU.)"""
    path, expected = checkpoint(f"{folder}/a.pt")
    ours, own = untrained(Large, config=NO_SHARD)
    place = staging._StatePlace.local

    def full(self: staging._StatePlace) -> torch.Tensor:
        if dist.get_rank() == 1 and self.box.numel > 1024:  # what is smaller each rank reads for itself
            raise torch.OutOfMemoryError("CUDA out of memory")
        return place(self)

    with (
        mock.patch.object(staging._StatePlace, "local", full),
        pytest.raises(CheckpointError, match=r"CUDA out of memory\); the model and the optimizer are partly changed"),
    ):
        load_checkpoint(path, ours, own)
    own = adamw(ours)
    load_checkpoint(path, ours, own)
    assert_same(contents(ours, own), expected, in_bits=True)
