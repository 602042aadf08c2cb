"""One rank runs out of memory: no rank hangs, and the repeated batch computes the same as an undisturbed one.

These tests run on CPU, whose memory does not run out. One rank therefore raises the error in place of the n-th
operation of a batch: in forward, in backward, while a unit's buffers are allocated or copied, or between units.
"""

from __future__ import annotations

import functools
import gc
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import language, reader
from support.cases import all_of, for_each
from support.comparing import full
from support.examples import IS_THOROUGH
from support.experts import MoELanguage
from support.models import VOCABULARY, Chain, Model, tie
from support.ranks import run_ranks
from support.training import FULL, HSDP_2X2, assert_close, reports_soon
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, placement_types
from torch.utils._python_dispatch import TorchDispatchMode

from composer_fsdp2 import begin_microbatch, prepare_fully_shard
from composer_fsdp2._torch import collectives
from composer_fsdp2._torch.private_names import random_of_dtensors
from composer_fsdp2._torch.unit import hooks_of, watch_collectives
from composer_fsdp2.sharding.agree import all_gather_object
from composer_fsdp2.sharding.sharded import units
from composer_fsdp2.training import guard
from composer_fsdp2.training.out_of_memory import OutOfMemoryVote, batch_snapshot, is_out_of_memory, reset

ALL_GATHER, REDUCE_SCATTER = (  # called by fully_shard; torch 2.13 has new names
    ("all_gather_single", "reduce_scatter_single")
    if hasattr(dist, "all_gather_single")
    else ("all_gather_into_tensor", "reduce_scatter_tensor")
)
TIME_LIMIT_S = 180  # longer is a hang


class OutOfMemoryAt(TorchDispatchMode):
    """Raises CUDA's error in place of the operation with this number, including operations on the local tensors of
    DTensors. Collectives do not count as operations."""

    def __init__(self, number: int | None) -> None:
        super().__init__()
        self.number = number
        self.count = 0
        self.raised = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        # The numbers of votes and guards are in host memory, which does not run out.
        if func.namespace not in ("c10d", "_c10d_functional", "_dtensor") and not IN_HOST_MEMORY:
            self.count += 1
            if self.count == self.number:
                self.raised = True
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 KiB (injected)")
        return func(*args, **(kwargs or {}))


IN_HOST_MEMORY: list[bool] = []


@contextmanager
def in_host_memory() -> Iterator[None]:
    IN_HOST_MEMORY.append(True)
    try:
        yield
    finally:
        IN_HOST_MEMORY.pop()


class Vote(OutOfMemoryVote):
    def _vote(self, where: object, is_out: bool) -> bool:
        with in_host_memory():
            return super()._vote(where, is_out)


class Counted(nn.Module):
    """A buffer that each forward changes and dropout, which a repetition must not apply twice; and a scalar, whose
    gradient our code averages."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model(tied=True)
        self.norm = nn.BatchNorm1d(VOCABULARY)
        self.dropout = nn.Dropout(0.25)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.dropout(self.inner(x)).flatten(0, 1)) * self.gain


def model_for(config: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.body = Counted()
    model.body.fsdp_wrap_fn = model.body.inner.decoder.fsdp_wrap_fn
    model.body.activation_checkpointing_fn = model.body.inner.decoder.activation_checkpointing_fn
    model.forward = model.body.forward
    prepare_fully_shard(model, None, {**FULL, **config}, precision="fp32")
    return model


def run_batch(model: nn.Module, microbatches: Sequence[torch.Tensor]) -> None:
    for number, x in enumerate(microbatches):
        begin_microbatch(model, is_last=number == len(microbatches) - 1)
        (model.body(x).square().mean() / len(microbatches)).backward()


Build = Callable[[], tuple[nn.Module, Callable[[int], None]]]  # a model, and its batch in parts of so many rows


def attempt(
    build: Build, size: int, fails_at: int | None = None
) -> tuple[int, OutOfMemoryAt, int, dict[str, torch.Tensor]]:
    """Runs one batch of a new model and halves it until it fits. Returns the size that fit, the mode that raised here,
    the first attempt's number of operations, and the state after the last attempt."""
    model, run = build()
    votes, failing = Vote(model), OutOfMemoryAt(fails_at)
    votes.start()
    torch.manual_seed(1 + dist.get_rank())
    random.seed(1)
    restore = batch_snapshot(model)
    with failing:
        done = votes.succeeded(functools.partial(run, size))
    num_operations = failing.count
    while not done:
        model.zero_grad()
        restore()
        size //= 2
        done = votes.succeeded(functools.partial(run, size))
    votes.stop()
    assert all(isinstance(p, DTensor) for p in model.parameters() if p.dim())
    return size, failing, num_operations, state_of(model)


def batch_of(rank: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (8, 3), generator=torch.Generator().manual_seed(rank))


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    values = {f"gradient of {name}": full(p.grad) for name, p in model.named_parameters()}
    return values | {name: buffer.clone() for name, buffer in model.named_buffers()} | {"next": torch.rand(3)}


def points_of(num_operations: Sequence[int], num_points: int, number: int) -> list[tuple[int, int]]:
    """Ranks and the numbers of their operations to fail at (shards are uneven, so these counts differ): all, or a few.
    The last ones fall into the reductions of the first units. They differ by ``number``."""
    num_ranks = len(num_operations)
    if num_points >= sum(num_operations):
        return [(rank, point) for rank, count in enumerate(num_operations) for point in range(1, count + 1)]
    ranks = [(number + each) % num_ranks for each in range(num_points)]
    within = (0.5, 0.2, 0.8)[number % 3]
    return [(rank, 1 + int((each + within) / num_points * num_operations[rank])) for each, rank in enumerate(ranks)]


def check(build: Build, size: int, num_points: int, number: int, num_warm: int) -> None:
    """``num_warm``: two for DTensors, because torch computes the sharding of operations on new shapes once."""
    _, _, _, expected = attempt(build, size // 2)
    for _ in range(num_warm):
        _, _, total, _ = attempt(build, size)
    for rank, point in points_of(all_gather_object(total), num_points, number):
        found, failing, _, state = attempt(build, size, point if dist.get_rank() == rank else None)
        where = f"rank {rank}, operation {point}"
        assert failing.raised == (dist.get_rank() == rank), where
        assert found == size // 2, where
        for name, value in state.items():
            assert_close(f"{where}: {name}", value, expected[name], rtol=0, atol=0)


# By the number of ranks.
CONFIGS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "FULL_SHARD": {},
        "SHARD_GRAD_OP, recomputed": {"sharding_strategy": "SHARD_GRAD_OP", "activation_checkpointing": True},
        "accumulated, guarded": {"gradient_sync": "last", "reshard_after_backward": False, "collective_guard": 20},
    },
    4: {
        "replicas deferred": HSDP_2X2 | {"gradient_sync": "defer_replica"},
        "kept in twos": {"reshard_after_forward": 2},
    },
}


def plain(config: dict[str, Any]) -> tuple[nn.Module, Callable[[int], None]]:
    model, batch = model_for(config), batch_of(dist.get_rank())
    return model, lambda size: run_batch(model, batch.split(size))


def check_all(configs: dict[str, dict[str, Any]], num_points: int) -> None:
    cases = {
        name: (functools.partial(plain, config), 8, num_points, i, 1)
        for i, (name, config) in enumerate(configs.items())
    }
    make, wrapped = guard.collective_guard, in_host_memory()
    with mock.patch.object(guard, "collective_guard", lambda limit: wrapped(make(limit))):
        for_each(check, cases)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.any_torch)])
def test_out_of_memory_anywhere(num_ranks: int):
    """The repeated batch has the gradients, buffers and random numbers of a run that started with its size. A deferred
    reduction over replicas is dropped with the failed batch."""
    run_ranks(
        check_all, num_ranks, CONFIGS[num_ranks], 16 if IS_THOROUGH else 4 - num_ranks // 2, timeout_s=TIME_LIMIT_S
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS[2])
def test_out_of_memory_everywhere(name: str):
    """Fails at every operation of a batch, on each rank."""
    run_ranks(check_all, 2, {name: CONFIGS[2][name]}, 1_000_000, timeout_s=1800)


# ---------------------------------------------------------------------------------------------------------------------
# Tensor, context and expert parallelism


def divided_model(kind: str, degree: int | None = None) -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """A model divided over all ranks, or over groups of ``degree`` ranks, and the loss of some rows."""
    torch.set_default_dtype(torch.float64)  # torch 2.7 confuses the masks of TP-sharded embeddings of two dtypes
    torch.manual_seed(0)
    degree = degree or dist.get_world_size()
    if kind == "context":
        holder = reader.build(num_layers=1)
        prepare_fully_shard(holder, None, FULL | {"context_parallel_degree": degree}, device="cpu")
        return holder, lambda rows: holder.model(rows, rows)
    experts = {"expert_parallel_degree": degree} if kind == "experts" else {}
    split = {"tensor_parallel_degree": degree, "layer_plan": DIVIDED[kind]()} if kind in DIVIDED else None
    model: nn.Module = (MoELanguage if experts else language.Language)(num_layers=1)
    prepare_fully_shard(model, None, FULL | experts, device="cpu", tensor_parallel=split)
    return model, lambda rows: language.loss_of(model, rows)


DIVIDED: dict[str, Callable[[], Any]] = {"tensor": language.layer_plan, "sequence": language.sequence_plan}


def divided(kind: str) -> tuple[nn.Module, Callable[[int], None]]:
    model, loss_of = divided_model(kind)
    own_rows = dist.get_rank() if kind == "experts" else 0  # EP ranks have their own rows
    rows = language.batch(own_rows, 4) % reader.VOCABULARY

    def run(size: int) -> None:
        for part in rows.split(size):
            (loss_of(part) * len(part) / len(rows)).backward()

    return model, run


def check_all_divided(num_points: int) -> None:
    kinds = (*DIVIDED, "context", "experts")
    # Memory for these launches is allocated before the vote: nothing fails after it.
    launches = {name: in_host_memory()(launch) for name, launch in collectives._functional.items()}
    of_torch = vars(torch.distributed._functional_collectives)  # restored when votes stop
    with mock.patch.dict(of_torch), mock.patch.dict(collectives._functional, launches):
        for_each(check, {kind: (functools.partial(divided, kind), 4, num_points, i, 2) for i, kind in enumerate(kinds)})


@pytest.mark.any_torch
def test_out_of_memory_between_collectives_of_divided_layers():
    """Otherwise the others would wait forever in an all-to-all (of attention, for instance), and then for the
    device."""
    run_ranks(check_all_divided, 2, 14 if IS_THOROUGH else 2, timeout_s=TIME_LIMIT_S)


def tied_siblings() -> nn.Module:
    """Blocks with a shared parameter: one unit of several modules."""
    blocks = {name: nn.Sequential(nn.Linear(6, 6)) for name in "abc"}
    tie(blocks["a"][0], blocks["c"][0])
    return Chain(net=Chain(dict.fromkeys(blocks, True), **blocks, head=nn.Linear(6, 6)))


def check_nothing_left() -> None:
    """A run with a thousand evaluations starts and stops votes a thousand times. A second Trainer in the process needs
    the memory of the first."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    model = tied_siblings()
    prepare_fully_shard(model, None, FULL, precision="fp32")
    states = [unit._get_fsdp_state() for unit in model.modules() if isinstance(unit, FSDPModule)]
    watched = [*states, *(state._fsdp_param_group for state in states if hasattr(state, "_fsdp_param_group"))]
    before = [dict(vars(each)) for each in watched]
    votes = OutOfMemoryVote(model)
    for _ in range(3):
        votes.start()
        model(torch.ones(2, 6)).sum().backward()
        votes.stop()
        model.zero_grad()
    for each, names in zip(watched, before, strict=True):
        assert {n for n, v in vars(each).items() if callable(v)} == {n for n, v in names.items() if callable(v)}
    assert _fsdp_collectives.dist is dist and not any(hooks_of(unit).watches for unit in units(model).values())
    # A model that is deleted while votes run frees the votes, too.
    votes.start()
    alive = weakref.ref(model)
    del model, states, watched, before, votes, each, names
    gc.collect()
    assert alive() is None
    assert _fsdp_collectives.dist is dist


def check_part() -> None:
    """An encoder's forward, called directly, begins at this module, and so does its backward."""
    model = model_for({})
    part = model.body.inner.decoder.blocks[0]
    votes = OutOfMemoryVote(model)
    votes.start()

    def fail(*unused: Any) -> None:
        if dist.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")

    handle = part.fc_out.register_forward_hook(fail)
    x = torch.randn(2, 6)
    assert not votes.succeeded(lambda: part(x).sum().backward())
    handle.remove()
    assert all(isinstance(p, DTensor) for p in part.parameters())
    assert votes.succeeded(lambda: part(x).sum().backward())
    votes.stop()


def check_settings() -> None:
    """After a reset, a custom loop without microbatches must communicate again."""
    model = model_for({"gradient_sync": "last", "reshard_after_backward": False})
    begin_microbatch(model, is_last=False)
    model.body(batch_of(0)).square().mean().backward()
    reset(model)
    model.body(batch_of(0)).square().mean().backward()
    assert all(isinstance(p, DTensor) and isinstance(p.grad, DTensor) for p in model.parameters() if p.dim())


def check_default_device() -> None:
    """Under torch.set_default_device("cuda"), the vote must not allocate device memory, which has just run out."""
    model = model_for({"collective_guard": 20})
    votes = OutOfMemoryVote(model)
    votes.start()
    with torch.device("meta"):  # like a script's torch.set_default_device
        model.body.inner.decoder.blocks[0](torch.randn(2, 6, device="cpu"))
    votes.stop()
    reset(model)


def test_buffers_that_a_forward_replaces():
    """A cache that grew during the batch is restored to its old tensor, also where the larger one could be copied into
    it."""
    for size in (1, 3):
        module = nn.Module()
        module.register_buffer("cache", torch.arange(float(size)))
        restore = batch_snapshot(module)
        before = module.cache
        before += 1
        module.cache = torch.zeros(8)
        restore()
        assert module.cache is before
        assert before.tolist() == list(range(size))


@reports_soon
def check_inside_a_collective(folder: str) -> list[str]:
    """Rank 1 fails in the launch itself, after all ranks voted. Returns the text and the notes of each rank's error."""
    from torch.distributed import distributed_c10d

    rank, num_ranks, limit = dist.get_rank(), dist.get_world_size(), timedelta(seconds=2)
    distributed_c10d._update_default_pg(None)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit)
    model = model_for({})
    votes = OutOfMemoryVote(model, timeout=limit)
    votes.start()
    launch, count = getattr(dist, ALL_GATHER), 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if dist.get_rank() == 1 and count == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. NCCL's own buffers (injected)")
        return launch(*args, **kwargs)

    try:
        with mock.patch.object(dist, ALL_GATHER, failing):
            votes.succeeded(functools.partial(run_batch, model, batch_of(dist.get_rank()).split(8)))
    except Exception as error:
        return [str(error), *getattr(error, "__notes__", ())]
    finally:
        distributed_c10d._update_default_pg(None)  # it is broken, so without a barrier
    raise AssertionError("no error")


def test_out_of_memory_inside_a_collective(tmp_path: Path):
    """No vote is possible inside a collective: the timeout ends all ranks, and each error names the unit."""
    of_peer, of_failed = run_ranks(check_inside_a_collective, 2, str(tmp_path), timeout_s=TIME_LIMIT_S, fresh=True)
    assert "the all-gather of body.inner.decoder.blocks.0 in forward" in "\n".join(of_peer)
    assert "rank 1 stands before its vote that it ran out of memory after" in of_failed[0]
    assert "the all-gather of body.inner.decoder.blocks.0 in forward" in of_failed[0]


# --- out of memory in a GPU's libraries


def groups_in_warm_up(model: nn.Module) -> dict[tuple[int, ...], set[str]]:
    """By the ranks of each group: the collectives that ran on it before the first vote."""
    seen: dict[tuple[int, ...], set[str]] = {}

    def noted(name: str, function: Any) -> Any:
        def call(*args: Any, group: Any = None, **kwargs: Any) -> Any:
            given = next((each for each in args if isinstance(each, dist.ProcessGroup)), group)
            ranks = range(dist.get_world_size()) if given is None else dist.get_process_group_ranks(given)
            seen.setdefault(tuple(ranks), set()).add(name)
            return function(*args, **kwargs) if group is None else function(*args, group=group, **kwargs)

        return call

    names = (ALL_GATHER, REDUCE_SCATTER, "all_reduce", "all_to_all_single")
    with mock.patch.multiple(dist, **{name: noted(name, getattr(dist, name)) for name in names}):
        OutOfMemoryVote(model)
    return seen


def check_warm_up() -> dict[str, dict[tuple[int, ...], set[str]]]:
    seen = {"replicas": groups_in_warm_up(model_for(HSDP_2X2))}
    return seen | {
        kind: groups_in_warm_up(divided_model(kind, degree=2)[0]) for kind in (*DIVIDED, "context", "experts")
    }


@pytest.mark.any_torch
def test_every_axis_is_used_before_the_first_vote():
    """NCCL allocates memory at the first collective of an axis; in a full batch, one rank alone could fail inside it.
    Groups for TP, CP and EP are covered, too."""
    sums = {ALL_GATHER, REDUCE_SCATTER, "all_reduce"}
    for rank, of_kinds in enumerate(run_ranks(check_warm_up, 4)):
        neighbours, replicas = (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
        assert of_kinds["replicas"][neighbours] == of_kinds["replicas"][replicas] == sums, of_kinds
        for kind in DIVIDED:
            assert sums <= of_kinds[kind][neighbours], (kind, of_kinds)
        for kind in ("context", "experts"):
            assert sums | {"all_to_all_single"} <= of_kinds[kind][neighbours], (kind, of_kinds)


def check_exchange_of_split_layers() -> None:
    """A TP-sharded layer that moves from one sharded dimension to another calls a different function on GPU. gloo lacks
    torch's operator for NCCL, so it is mocked."""
    model, _ = divided_model("tensor")
    announced: list[str] = []
    launched: list[str] = []
    stop = watch_collectives(units(model), lambda flight: announced.append(flight.kind), between_units=True)
    exchange = placement_types.shard_dim_alltoall
    played = SimpleNamespace(shard_dim_alltoall=lambda *args: launched.append("all-to-all"))
    # The argument is the group's name in torch 2.7, the group in 2.13.
    groups = {"_resolve_group_name": mock.Mock(), "_resolve_group": mock.Mock()}
    with (
        mock.patch.object(torch.ops, "_dtensor", played),
        mock.patch.dict(vars(torch.distributed._functional_collectives), groups),
    ):
        exchange(torch.ones(2, 2), 0, 1, SimpleNamespace(device_type="cuda"), 0)
    stop()
    assert placement_types.shard_dim_alltoall is not exchange, "still watched"
    assert announced == launched == ["all-to-all"], (announced, launched)


def test_random_states_of_dtensors_are_put_back():
    """torch 2.7 draws TP-sharded dropout on GPU from its own RNG state; without it, a repeated batch would drop other
    elements. torch creates the tracker of this state on GPU only, so it is mocked."""
    tracker = SimpleNamespace(rng_states={"parallel-rng": torch.zeros(16, dtype=torch.uint8)})
    with mock.patch.object(random_of_dtensors, "_rng_tracker", tracker):
        restore = batch_snapshot(nn.Linear(1, 1))
        tracker.rng_states["parallel-rng"].add_(1)
        restore()
        assert not tracker.rng_states["parallel-rng"].any()


def check_reset_waits() -> None:
    """An error inside a block leaves its parameters unsharded, and an fp16 reduction may still divide a tensor on its
    own stream. Freeing memory before a synchronization would let that division write into another tensor. CPU stands in
    for the device."""

    def fail(*unused: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory (injected)")

    model = model_for({})
    model.body.inner.decoder.blocks[0].fc_out.register_forward_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        run_batch(model, [batch_of(dist.get_rank())])
    order: list[str] = []
    free, wait = torch.UntypedStorage.resize_, torch.cpu.synchronize

    def resize_(storage: torch.UntypedStorage, size: int) -> None:
        order.append("memory")
        free(storage, size)

    def synchronize(*args: Any) -> None:
        order.append("device")
        wait(*args)

    with (
        mock.patch.object(torch.UntypedStorage, "resize_", resize_),
        mock.patch.object(torch.cpu, "synchronize", synchronize),
    ):
        reset(model)
    assert order[0] == "device" and "memory" in order, order


@pytest.mark.parametrize(
    ("error", "is_repeated"),
    [
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"), False),
        (dist.DistBackendError("ncclUnhandledCudaError: ... Cuda failure 2 'out of memory'"), False),
    ],
)
def test_libraries_that_are_out_of_memory(error: RuntimeError, is_repeated: bool):
    """A matrix product without its workspace fits with a smaller microbatch, so the run need not end."""
    assert is_out_of_memory(error) == is_repeated


def check_nccls_memory() -> None:
    """The other ranks are inside the collective, so no vote is possible. The error names the settings to change."""
    model = model_for({})
    votes = OutOfMemoryVote(model)
    votes.start()

    def run() -> None:
        raise dist.DistBackendError("ncclUnhandledCudaError: ... Cuda failure 2 'out of memory'")

    with pytest.raises(RuntimeError, match="device_train_microbatch_size") as caught:
        votes.succeeded(run)
    votes.stop()
    assert "NCCL_BUFFSIZE" in str(caught.value)


@pytest.mark.any_torch
def test_votes_and_the_way_back():
    """The operations that are voted on, the cost of votes, their cleanup, and the synchronization of a reset."""
    checks = (check_nothing_left, check_part, check_settings, check_default_device, check_exchange_of_split_layers)
    run_ranks(all_of, 2, *checks, check_reset_waits, check_nccls_memory)
