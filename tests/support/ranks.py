"""Run a test's body on several ranks of this machine, on gloo or on GPUs: ``from support.ranks import run_ranks``.

``pythonpath = ["tests"]`` in pyproject.toml puts the folder ``support`` on ``sys.path``, and the ranks copy the
parent's ``sys.path``.

    def check_sum(value):  # top-level, so that a rank can import it
        tensor = torch.tensor(value + dist.get_rank())
        dist.all_reduce(tensor)
        return tensor.item()

    def test_sum():
        assert run_ranks(check_sum, 2, 10) == [21, 21]

[Note: pooled ranks] Ranks are forked from processes that have imported torch, and Composer for the tests marked with it
(`choose_imports`). Adjacent ranks have different hash seeds and addresses, like the ranks of a launcher. Starting gloo
still takes a fraction of a second, so one pool of processes per world size lives until the session ends or a check
fails. Its process group lives as long: when ranks destroy a gloo group, the last one sometimes waits forever (torch
2.7.0, 3 of 100 times), and an abandoned group leaves its threads running. A mesh's group is therefore made once for the
same ranks and reused (`_reuse_groups`). Each call gets the parent's environment, folder and ``sys.path``, seed 0 and
default torch settings (`_reset`). These still leak into the next check: groups, imported modules and their globals
(monkeypatches, registries, "warned once" flags), threads, signal handlers. A check that leaves or needs such state
takes ``fresh=True``.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import inspect
import os
import pickle
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from support import measured, warm

import composer_fsdp2

# Imports of the processes that ranks are forked from. The first optimizer step imports torch._dynamo.
WITH_TORCH = (
    "pytest", "hypothesis", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch._dynamo",
    *(f"composer_fsdp2.{file}" for file in composer_fsdp2._FILES),
)  # fmt: skip
# Composer also runs without LLM Foundry, as on a newer torch (migration_docs/newest-torch.md).
_FOUNDRY = ("llmfoundry.command_utils",) if importlib.util.find_spec("llmfoundry") else ()
WITH_COMPOSER = (
    *WITH_TORCH, "composer.algorithms", "composer.loggers", *_FOUNDRY, "support.entry_points",
    "transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama", "support.about_the_machine",
    "composer_fsdp2.cli.explain", "composer_fsdp2.cli.plan", "composer_fsdp2.migration.files",
)  # fmt: skip
START_TIMEOUT_S = 180
MAX_CALLS = 200  # Then new processes, because some state always leaks.
PEER_GRACE_S = 1.0
STACK_GRACE_S = 0.3  # After SIGUSR1: faulthandler writes from the signal handler, within milliseconds.
TAIL_CHARS = 4000
# Errors of a healthy rank whose peer is gone or late; never the first cause if there is another error.
FOLLOW_UP = re.compile(r"closed by peer|reset by peer|broken pipe|connection refused|tim(ed|e)[ -]?out", re.I)


@dataclass(frozen=True)
class RankFailure:
    """One rank's error; ``at_s`` is on the monotonic clock, which all processes of a machine share."""

    rank: int
    at_s: float
    error: str  # "ValueError: ..."
    traceback: str

    @property
    def headline(self) -> str:
        return self.error.partition("\n")[0]

    @property
    def order(self) -> tuple[bool, float]:
        return bool(FOLLOW_UP.search(self.error)), self.at_s


class RankError(AssertionError):
    """A check failed or timed out; ``failures`` has the first cause first, ``running`` the ranks cut short."""

    def __init__(self, message: str, failures: list[RankFailure], running: list[int]):
        super().__init__(message)
        self.failures, self.running = failures, running


@dataclass(frozen=True)
class _Call:
    """The parent's message to every rank for one check; ``args`` stays pickled until the module is imported."""

    module: str
    file: str
    qualname: str
    args: bytes
    world_size: int
    store: str
    timeout_s: float
    environ: dict[str, str]
    sys_path: list[str]
    folder: str
    backend: str


def run_ranks(
    check: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 180,
    env: dict[str, str] | None = None,
    fresh: bool = False,
    backend: str = "gloo",
    peer_grace_s: float = PEER_GRACE_S,
) -> list[Any]:
    """Return ``check(*args)`` of every rank, in rank order.

    The check runs inside an initialised process group and may use any collective; a barrier of all ranks follows it.
    pytest does not rewrite a check's ``assert`` on the ranks: add the values as a message, or use
    ``torch.testing.assert_close``.

    Args:
        check: A top-level function; its arguments and result must pickle (CPU tensors do).
        timeout_s: Time for the check and the import of its module, not for the start of the ranks.
        env: Variables for this call only, above the parent's environment and the rank variables.
        fresh: Fork new processes and end them afterwards. See [Note: pooled ranks].
        backend: ``gloo``, or ``nccl`` with a GPU for each rank. The latter always forks new processes, which import
            torch themselves: CUDA does not work in the child of a process that has enumerated devices.
        peer_grace_s: Time for other ranks to report their own errors after a failure.
    Raises:
        RankError: a rank failed, died or was still running at ``timeout_s``; the pool is then discarded.
        ValueError: the check cannot be imported by the ranks.
    Tests call it in the pytest process, from the main thread: ranks die with the thread that started the first ones.
    """
    module = sys.modules[check.__module__]
    if "<" in check.__qualname__ or check.__module__ == "__main__":
        raise ValueError(f"{check.__module__}.{check.__qualname__} must be a top-level function of a module")
    environ = {**os.environ, **(env or {})}
    fresh = fresh or backend == "nccl"
    imports = () if backend == "nccl" else _imports
    pool = _Pool(world_size, imports) if fresh else _pooled(world_size)
    call = _Call(
        module.__name__, inspect.getfile(module), check.__qualname__, pickle.dumps(args), world_size,
        str(pool.folder / f"store-{pool.num_calls}"), timeout_s, environ, list(sys.path), os.getcwd(), backend,
    )  # fmt: skip
    try:
        return pool.run(call, env or {}, peer_grace_s)
    except BaseException:  # KeyboardInterrupt and pytest-timeout too: the ranks are in an unknown state.
        pool.close()
        raise
    finally:
        if fresh:
            pool.close()


# --- In the parent ---

_pools: dict[tuple[int, tuple[str, ...]], _Pool] = {}
_imports = WITH_TORCH


def choose_imports(*, composer: bool) -> None:
    """Choose the imports of the next test's ranks; conftest.py calls it with the test's markers."""
    global _imports
    _imports = WITH_COMPOSER if composer else WITH_TORCH


def _pooled(world_size: int) -> _Pool:
    key = world_size, _imports
    pool = _pools.get(key)
    if pool is None or not pool.is_alive() or pool.num_calls >= MAX_CALLS:
        if pool is not None:
            pool.close()
        pool = _pools[key] = _Pool(world_size, _imports)
    return pool


def close_pools() -> None:
    """Kill the ranks; conftest.py and ``atexit`` call it in the parent."""
    while _pools:
        _pools.popitem()[1].close()


atexit.register(close_pools)


class _Pool:
    """``world_size`` rank processes; the parent talks to each over a socket pair."""

    def __init__(self, world_size: int, imports: tuple[str, ...]):
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.num_calls = 0
        self.processes: list[warm.WarmProcess] = []
        self.connections: list[Connection] = []
        self.output_start = [0] * world_size
        for hash_seed in warm.HASH_SEEDS[:world_size]:
            warm.begin(imports, hash_seed)
        try:
            for rank in range(world_size):
                self._start(rank, imports)
            self._collect("starting the ranks", START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, imports: tuple[str, ...]) -> None:
        ours, theirs = Pipe()
        self._file(rank, "stack").touch()  # Read even if the rank dies before it opens the file.
        with theirs, open(self._file(rank, "output"), "wb") as output, open(os.devnull) as nothing:
            process = warm.start(
                imports, "support.ranks:serve", [rank, str(self._file(rank, "stack"))],
                streams=[nothing.fileno(), output.fileno(), output.fileno()], descriptors=[theirs.fileno()],
                hash_seed=warm.HASH_SEEDS[rank % len(warm.HASH_SEEDS)],
            )  # fmt: skip
        self.processes.append(process)
        self.connections.append(ours)

    def _file(self, rank: int, kind: str) -> Path:
        return self.folder / f"rank{rank}.{kind}"

    def is_alive(self) -> bool:
        return self.folder.exists() and all(process.poll() is None for process in self.processes)

    def run(self, call: _Call, env: dict[str, str], peer_grace_s: float) -> list[Any]:
        """Run the check on every rank; each sends its result once all have passed the barrier."""
        self.num_calls += 1
        self.output_start = [self._file(rank, "output").stat().st_size for rank in range(call.world_size)]
        name = f"{call.module}.{call.qualname}"
        for rank, connection in enumerate(self.connections):
            environ = {**call.environ, **_rank_variables(rank, call.world_size), **env}
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # A dead rank is reported by _collect.
                connection.send_bytes(pickle.dumps(_Call(**{**vars(call), "environ": environ})))
        results = self._collect(name, call.timeout_s, peer_grace_s)
        return [pickle.loads(result) for result in results]

    def _collect(self, doing: str, timeout_s: float, peer_grace_s: float = PEER_GRACE_S) -> list[bytes]:
        """Wait for one result of every rank; on an error, the others have ``peer_grace_s`` for theirs."""
        asked = range(len(self.connections))
        answers: dict[int, bytes | RankFailure] = {}
        deadline = time.monotonic() + timeout_s
        timed_out = False
        while len(answers) < len(asked):
            pending = {self.connections[rank]: rank for rank in asked if rank not in answers}
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                timed_out = not any(isinstance(answer, RankFailure) for answer in answers.values())
                break
            for connection in ready:
                answer = answers[pending[connection]] = self._receive(pending[connection], connection)
                if isinstance(answer, RankFailure):
                    deadline = min(deadline, time.monotonic() + peer_grace_s)
        failures = sorted((a for a in answers.values() if isinstance(a, RankFailure)), key=lambda f: f.order)
        running = [rank for rank in asked if rank not in answers]
        if failures or running:
            raise self._error(doing, failures, running, timeout_s if timed_out else None)
        return [answers[rank] for rank in asked]

    def _receive(self, rank: int, connection: Connection) -> bytes | RankFailure:
        try:
            answer = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            at_s, code = time.monotonic(), self.processes[rank].wait()
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return RankFailure(rank, at_s, f"process died with {how}", self._file(rank, "stack").read_text())
        return RankFailure(rank, *answer) if isinstance(answer, tuple) else answer

    def _error(self, doing: str, failures: list[RankFailure], running: list[int], timeout_s: float | None) -> RankError:
        for rank in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        if running:
            time.sleep(STACK_GRACE_S)
        names = ", ".join(map(str, running))
        if timeout_s is None:
            first = failures[0]
            lines = [f"{doing} failed first on rank {first.rank} of {len(self.processes)}: {first.headline}"]
        else:
            lines = [f"{doing} took more than {timeout_s:g} s; still running: rank {names}"]
        lines += [f"--- rank {f.rank}: {f.headline}\n{f.traceback.rstrip()}" for f in failures]
        for rank in running:
            stack = self._file(rank, "stack").read_text().rstrip()
            lines.append(f"--- rank {rank} was still running, at:\n{stack or '(no stack: before its start)'}")
        for rank, start in enumerate(self.output_start):
            if output := self._file(rank, "output").read_bytes()[start:].decode(errors="replace").strip():
                lines.append(f"--- output of rank {rank}\n{output[-TAIL_CHARS:]}")
        return RankError("\n".join(lines), failures, running)

    def close(self) -> None:
        """Kill the ranks and their child processes; without waiting, since results have already arrived."""
        for process, connection in zip(self.processes, self.connections, strict=True):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            connection.close()
        self.processes, self.connections = [], []  # Never signal these process ids again: they may be reused.
        shutil.rmtree(self.folder, ignore_errors=True)


def _rank_variables(rank: int, world_size: int) -> dict[str, str]:
    """The variables of a one-node launch, as composer.utils.dist and torchrun name them."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(world_size), "NODE_RANK": "0",
        "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",  # For code that reads them; FileStore opens no port.
        "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",  # Host names may not resolve.
    }  # fmt: skip


# --- On the ranks ---


def serve(descriptor: int, rank: int, stack_file: str) -> None:
    """Act as rank ``rank`` until the parent dies or kills it; `_Pool._start` has a forked process call it."""
    stack = open(stack_file, "w")  # noqa: SIM115  Open until the process ends; faulthandler writes to it.
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGUSR1, stack)
    connection = Connection(descriptor)
    import torch.distributed  # Here, so the parent can import this file without torch.

    assert torch.distributed.is_available()
    _reuse_groups()
    name_own_file(rank)
    with contextlib.suppress(EOFError, BrokenPipeError):  # The parent has gone.
        _answer(connection, b"")
        while True:
            _run_call(connection, rank, pickle.loads(connection.recv_bytes()))


def name_own_file(rank: int) -> None:
    """Composer fixes a rank's checkpoint file name on import, which happened in the warm process, before the rank was
    known."""
    for name in ("composer.utils.checkpoint", "composer.checkpoint.save"):
        if module := sys.modules.get(name):
            module._TORCH_DISTRIBUTED_CHECKPOINTS_FILENAME = f"__{rank}_0.distcp"  # type: ignore[attr-defined]


def _reuse_groups() -> None:
    """Reuse the group when a mesh is made again for the same ranks; the pool's own group must be the same, too.

    Requests for a gloo group always make a new one: such callers make it once, for their own use, and may destroy it.
    """
    import torch
    from torch.distributed import device_mesh, distributed_c10d

    original = distributed_c10d.new_group
    made: dict[Any, Any] = {}

    def new_group(ranks: Any = None, *args: Any, **options: Any) -> Any:
        if options.get("backend") == "gloo":
            return original(ranks, *args, **options)
        described = {name: value for name, value in options.items() if name != "group_desc"}
        members = None if ranks is None else tuple(ranks)
        key = (id(distributed_c10d._get_default_group()), members, args, tuple(sorted(described.items())))
        if key not in made:
            made[key] = original(ranks, *args, **options)
        return made[key]

    for module in (torch.distributed, distributed_c10d, device_mesh):
        module.new_group = new_group


def _answer(connection: Connection, answer: bytes | tuple[float, str, str]) -> None:
    # Not Connection.send: torch teaches its pickler to pass tensors as shared memory of this process.
    connection.send_bytes(pickle.dumps(answer))


def _run_call(connection: Connection, rank: int, call: _Call) -> None:
    """Run one check and send the result after the final barrier. Communicates on gloo."""
    import torch.distributed as dist

    with warnings.catch_warnings():
        try:
            _reset(call)
            if not dist.is_initialized():
                _start_group(call, rank)
            check = _import_check(call)
            result = pickle.dumps(check(*pickle.loads(call.args)))
            if dist.is_initialized():
                dist.barrier()
            gc.collect()
            measured.save()
            _answer(connection, result)
        except BaseException as error:  # SystemExit and pytest.skip too: the parent must receive each.
            measured.save()
            text = "".join(traceback.format_exception_only(error)).strip()
            _answer(connection, (time.monotonic(), text, traceback.format_exc()))
            connection.recv_bytes()  # Keep the sockets open until killed: peers must not see them close.


def _start_group(call: _Call, rank: int) -> None:
    """Like Composer: without ``device_id``; NCCL makes a communicator at a group's first collective."""
    import torch
    import torch.distributed as dist

    if call.backend == "nccl":
        torch.cuda.set_device(rank)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    store = dist.FileStore(call.store, call.world_size)
    # The parent's timeout comes first, and shows every stack.
    dist.init_process_group(
        call.backend, store=store, rank=rank, world_size=call.world_size, timeout=timedelta(hours=1)
    )


@contextlib.contextmanager
def impatient(timeout_s: float) -> Iterator[None]:
    """Within the block, collectives of the default group time out after so many seconds. Called on the ranks."""
    import torch.distributed as dist

    # A group's own timeout was set when it was made.
    module: Any = dist.distributed_c10d
    world = module._get_default_group()
    module._update_default_pg(dist.new_group(timeout=timedelta(seconds=timeout_s)))
    try:
        yield
    finally:
        module._update_default_pg(world)


def _import_check(call: _Call) -> Callable[..., Any]:
    """Import the check's module under the parent's name for it, which pickles of its classes refer to."""
    module = sys.modules.get(call.module)
    if module is None:
        try:
            module = importlib.import_module(call.module)
        except ModuleNotFoundError as error:
            if not f"{call.module}.".startswith(f"{error.name}."):
                raise
    if module is None or not os.path.samefile(inspect.getfile(module), call.file):
        module = _import_by_path(call.module, call.file)
    check: Any = module
    for name in call.qualname.split("."):
        check = getattr(check, name)
    return check


def _import_by_path(name: str, file: str) -> types.ModuleType:
    """Like pytest's importlib mode: any name, with empty modules for missing parents."""
    parts = name.split(".")
    for parent in (".".join(parts[:end]) for end in range(1, len(parts))):
        sys.modules.setdefault(parent, types.ModuleType(parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _reset(call: _Call) -> None:
    """Reset state changed by an earlier check, as listed in [Note: pooled ranks]."""
    import torch

    os.environ.clear()
    os.environ.update(call.environ)
    measured.begin()
    os.chdir(call.folder)
    sys.path[:] = call.sys_path
    warnings.simplefilter("default")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    random.seed(0)
    torch.manual_seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
