"""The ranks of one run, each a process of its own, started and ended here as a launcher would."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from composer_fsdp2.comparing.job import Job
from composer_fsdp2.comparing.run_record import RunRecord
from composer_fsdp2.errors import ConfigError

_POLL_S = 0.1
# After one rank has failed, or all have left their record: how long the others get.
_GRACE_S = 10.0
_LAST_LINES = 15
# Of a surrounding launcher, or what would have Composer shard by its own FSDP2.
_TAKEN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
SWITCHES = ("FSDP_VERSION",)


class RunFailedError(ConfigError):
    """A run ended before its last batch."""


class Interruptions:
    """SIGINT and SIGTERM as KeyboardInterrupt within the block; but not while something must not be left half done.

    A process that is being started is in no list yet, so that it would be left behind.
    """

    def __init__(self) -> None:
        self._num_holds = 0
        self._is_due = False

    def __enter__(self) -> "Interruptions":
        self._before = {number: signal.signal(number, self._interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _interrupt(self, number: int, frame: object) -> None:
        self._is_due = True
        self._raise()

    def _raise(self) -> None:
        if self._is_due and not self._num_holds:
            self._is_due = False
            raise KeyboardInterrupt

    def hold(self) -> None:
        """From here on too late."""
        self._num_holds += 1

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Interrupted at the end of the block, if at all."""
        self._num_holds += 1
        try:
            yield
        finally:
            self._num_holds -= 1
        self._raise()


def run_ranks(job: Job, num_ranks: int, show: Callable[[int], None], interruptions: Interruptions) -> RunRecord:
    """Start the job on so many ranks of this machine, wait for them, and read the record that they leave.

    Args:
        show: Told how many batches are done.
    Raises:
        RunFailedError: with the last lines of the rank that failed first, and where the rest is.

    However it ends, none of its processes is left.
    """
    Path(job.folder).mkdir(parents=True)
    path = Path(job.folder) / "job.json"
    job.write(path)
    with _ranks(job, path, num_ranks, interruptions) as ranks:
        failed = _wait(job, ranks, show)
    if not job.record_path.exists():
        rank = failed or 0  # all may have ended themselves, without an error
        raise RunFailedError(_failure(job, rank, ranks[rank].returncode))
    return RunRecord.read(job.record_path)


def _wait(job: Job, ranks: list[subprocess.Popen[bytes]], show: Callable[[int], None]) -> int | None:
    """Until all ranks have ended, or the rest has had time enough; the rank that failed first, if one did.

    The others fail because of it, and say less.
    """
    deadline = float("inf")
    shown, failed = -1, None
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        if (done := _num_batches(job)) != shown:
            shown = done
            show(done)
        if failed is None:
            failed = next((number for number, rank in enumerate(ranks) if rank.poll()), None)
        is_over = job.record_path.exists() or failed is not None
        if is_over and deadline == float("inf"):
            deadline = time.monotonic() + _GRACE_S
        time.sleep(_POLL_S)
    if (done := _num_batches(job)) != shown:
        show(done)
    return failed


@contextlib.contextmanager
def _ranks(
    job: Job, path: Path, num_ranks: int, interruptions: Interruptions
) -> Iterator[list[subprocess.Popen[bytes]]]:
    # As `composer -n` starts them: so many on this node. Not by its launcher, which imports Composer once more for
    # seconds, and keeps the output of the first rank alone.
    command = [sys.executable, "-m", "composer_fsdp2.cli.compare_rank", str(path)]
    port = _free_port()
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        with interruptions.held():
            for rank in range(num_ranks):
                environment = _environment(rank, num_ranks, port, is_deterministic=job.is_deterministic)
                with job.log_path(rank).open("wb") as log:
                    # A session of its own, so that the workers of its data loader end with it.
                    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
                    ranks.append(subprocess.Popen(command, env=environment, start_new_session=True, **streams))
        yield ranks
    finally:
        with interruptions.held():
            _end(ranks)


def _environment(rank: int, num_ranks: int, port: int, *, is_deterministic: bool) -> Mapping[str, str]:
    given = {name: value for name, value in os.environ.items() if name not in (*_TAKEN, *SWITCHES)}
    # One thread for each rank, or they fight for the cores; tokenizers warn of forks, as of a data loader's workers.
    defaults = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if is_deterministic:
        defaults["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return (
        defaults
        | given
        | {
            "RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "NODE_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        }
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """End what is left of all ranks and of the processes that they started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.pid, number)  # also of one that has ended, whose workers may not have
        deadline = time.monotonic() + _GRACE_S
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(_POLL_S / 5)


def _num_batches(job: Job) -> int:
    try:
        return job.progress_path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def _failure(job: Job, rank: int, code: int) -> str:
    log = job.log_path(rank)
    lines = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
    if code == -signal.SIGKILL:
        how += ", as the system does when memory is used up"
    if not lines:
        return f"{job.title}: rank {rank} ended {how}, and said nothing in {log}"
    return "\n".join(
        [f"{job.title}: rank {rank} ended {how}; the last lines of {log}:", *(f"  {each}" for each in lines)]
    )
