"""For any shapes, dtypes and shardings, another world size loads the saved values bit for bit."""

from __future__ import annotations

import itertools
import math
import os
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from support.checkpoints.samples import bytes_of
from support.examples import examples
from support.models import Running
from support.ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from composer_fsdp2 import CheckpointError, convert_checkpoint, load_checkpoint

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
OTHERS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128)
BUFFERS = (*FLOATS, *OTHERS, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Spec:
    """A parameter or a buffer."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_buffer: bool = False


@dataclass(frozen=True)
class Case:
    """A model, the form of its checkpoint, and the ranks that load it.

    Args:
        seed: For the values and the shardings.
        columns: Whether matrices are sharded by columns, if these divide evenly.
        num_files: Number of files in a DCP directory, each with some rows; 0 is one file of ``torch.save``.
        strided: Whether tensors have other strides, and several share a storage.
    """

    specs: tuple[Spec, ...]
    seed: int
    columns: bool
    num_files: int
    strided: bool


shapes = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)
parameters = st.builds(Spec, shapes, st.sampled_from((*FLOATS, *OTHERS)))
buffers = st.builds(Spec, st.lists(st.integers(0, 5), max_size=3).map(tuple), st.sampled_from(BUFFERS), st.just(True))
cases = st.builds(
    Case,
    specs=st.tuples(
        st.lists(st.builds(Spec, shapes, st.just(torch.float32)), min_size=1, max_size=2),
        st.lists(parameters, max_size=3),
        st.lists(buffers, max_size=2),
    ).map(lambda parts: tuple(itertools.chain(*parts))),
    seed=st.integers(0, 1000),
    columns=st.booleans(),
    num_files=st.sampled_from([0, 0, 1, 2, 3, 5]),
    strided=st.booleans(),
)


def model_of(case: Case) -> Any:
    """Two units and a root."""
    model = Running(lambda *_: None, first=Running(lambda *_: None), second=Running(lambda *_: None))
    for number, spec in enumerate(case.specs):
        module = (model.first, model.second, model)[number % 3]
        value = torch.zeros(spec.shape, dtype=spec.dtype)
        if spec.is_buffer:
            module.register_buffer(f"t{number}", value)
        else:
            module.register_parameter(f"t{number}", nn.Parameter(value, requires_grad=spec.dtype in FLOATS))
    return model


def make(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = model_of(case)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)


def filled(case: Case, rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bits, including NaNs of every kind; perhaps a view of a larger storage, with other strides."""
    order = rng.sample(range(len(shape)), len(shape)) if case.strided else list(range(len(shape)))
    numel, before = math.prod(shape), rng.choice([0, 3]) if case.strided else 0
    raw = bytes(rng.randrange(2 if dtype == torch.bool else 256) for _ in range((numel + before) * dtype.itemsize))
    if not raw:
        return torch.zeros(shape, dtype=dtype)
    run = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype)[before:]
    return run.view([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])


def state_of(case: Case) -> dict[str, Any]:
    """The state of the writing run: Composer's state dict with random values."""
    rng = random.Random(case.seed)
    model, optimizer = make(case)
    weights = {name: filled(case, rng, tuple(v.shape), v.dtype) for name, v in model.state_dict().items()}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    state = {
        name: {
            "step": torch.tensor(float(rng.randrange(9))),
            "exp_avg": filled(case, rng, tuple(parameter.shape), parameter.dtype),
            "exp_avg_sq": filled(case, rng, tuple(parameter.shape), parameter.dtype),
        }
        for name, parameter in trained.items()
    }
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    optimizers = {"AdamW": {"state": state, "param_groups": [{**group, "lr": 0.25, "params": list(trained)}]}}
    return {"state": {"model": weights, "optimizers": optimizers}, "rng": []}


def check_load(path: str, case: Case) -> None:
    root = state_of(case)["state"]
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    model, optimizer = make(case)
    if dist.is_initialized():

        def placement(parameter: nn.Parameter) -> Shard | None:
            is_even = parameter.dim() > 1 and parameter.shape[1] % world_size == 0
            return Shard(1) if case.columns and is_even else None

        for module in (model.first, model.second, model):
            fully_shard(module, shard_placement_fn=placement)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with mock.patch("composer_fsdp2.checkpoint.load.staging._SMALL_BYTES", 0):  # replicas share every read
        report = load_checkpoint(path, model, optimizer)
    assert (report.left_out, report.kept, report.cast) == ((), (), ()), str(report)
    assert report.unchecked_bytes == 0 or case.strided, str(report)  # no rank reads the rest of a larger storage
    for name, value in model.state_dict().items():
        assert_part(name, value, root["model"][name])
    state = root["optimizers"]["AdamW"]["state"]
    for name, parameter in model.named_parameters():
        assert (name in state) == (parameter in optimizer.state), name
        for key, value in state.get(name, {}).items():
            assert_part(f"{key} of {name}", optimizer.state[parameter][key], value)
    assert optimizer.param_groups[0]["lr"] == 0.25


def try_load(path: str, case: Case) -> str:
    """Runs the load and returns its error: an exception would restart the ranks in each step in which hypothesis
    shrinks."""
    try:
        check_load(path, case)
    except (AssertionError, CheckpointError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def assert_part(name: str, ours: torch.Tensor, whole: torch.Tensor) -> None:
    """Checks that this rank's shard equals that part of the full tensor; gloo could not gather fp8."""
    if isinstance(ours, DTensor):
        [place] = ours.placements
        parts = list(whole.chunk(dist.get_world_size(), place.dim))
        rank, ours = dist.get_rank(), ours.to_local()
        whole = parts[rank] if rank < len(parts) else whole.narrow(place.dim, 0, 0)
    assert (ours.shape, ours.dtype) == (whole.shape, whole.dtype), f"{name}: {ours.shape} of {ours.dtype}"
    assert bytes_of(ours) == bytes_of(whole), f"{name}: {ours}, not {whole}"


BY_COLUMNS = Case(
    specs=(Spec((3, 4), torch.float32), Spec((5, 2), torch.bfloat16)), seed=1, columns=True, num_files=2, strided=False
)


@given(case=cases, world_size=st.sampled_from([1, 1, 2, 2, 3]))
@example(case=BY_COLUMNS, world_size=2)
@examples(10)
def test_what_one_world_saved_another_loads(case: Case, world_size: int):
    """If two world sizes disagreed about a sharding, rows of a weight would move to another place."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(os, "fsync"):  # fsync takes most of the time
        path = Path(folder) / ("file.pt" if case.num_files == 0 else "directory")
        torch.save(state_of(case), Path(folder) / "file.pt")
        if case.num_files:  # test_convert_dcp.py reads them with torch
            convert_checkpoint(Path(folder) / "file.pt", path, to="dcp", files=case.num_files)
        if world_size == 1:
            check_load(str(path), case)
        else:
            assert run_ranks(try_load, world_size, str(path), case) == [""] * world_size
