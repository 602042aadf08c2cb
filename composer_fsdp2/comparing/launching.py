"""Start and stop the ranks of one run, one process each, as a launcher would."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping

from composer_fsdp2.comparing.job import Job
from composer_fsdp2.comparing.run_record import RunRecord
from composer_fsdp2.config.hub_errors import hub_advice
from composer_fsdp2.config.value import from_json, json_text
from composer_fsdp2.errors import ConfigError

_POLL_S = 0.1
# The time for the other ranks to exit after one has failed or rank 0 has written the record.
_GRACE_S = 10.0
_LAST_LINES = 15


class RunFailedError(ConfigError):
    """A run ended before its last batch."""


@contextlib.contextmanager
def interruptions() -> Iterator[Callable[[], None]]:
    """Defer SIGINT and SIGTERM within the block.

    Yields a function that raises KeyboardInterrupt once if one of them has arrived. An exception raised by the signal
    itself, between the start of a rank and its entry in the list of processes, would leave that process running.
    """
    arrived: list[int] = []

    def check() -> None:
        if arrived:
            arrived.clear()
            raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, frame: arrived.append(number)) for number in numbers]
    try:
        yield check
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def run_ranks(job: Job, show: Callable[[int], None], check: Callable[[], None]) -> RunRecord:
    """Start the job's ranks on this machine, wait for them, and read the record that rank 0 writes.

    All of their processes have ended when it returns or raises.

    Args:
        show: Called with the number of completed batches.
        check: Called until the ranks have ended; may raise KeyboardInterrupt.
    Raises:
        RunFailedError: with the last lines of the rank that failed first, and the path of its log.
        KeyboardInterrupt: from ``check``.
    """
    job.path.parent.mkdir(parents=True)
    job.path.write_text(json_text(job))
    with _ranks(job) as ranks:
        failed = _wait(job, ranks, show, check)
    if not job.record_path.exists():
        rank = failed or 0  # all may have ended without an error
        raise RunFailedError(_failure(job, rank, ranks[rank].returncode))
    return from_json(RunRecord, job.record_path.read_text())


def _wait(
    job: Job, ranks: list[subprocess.Popen[bytes]], show: Callable[[int], None], check: Callable[[], None]
) -> int | None:
    """Wait until all ranks have ended, or a few seconds after the first failure or after the record was written.

    Returns:
        The first rank that failed, or None. Later failures are mostly consequences of it.
    """
    deadline, shown, failed = float("inf"), -1, None
    is_running = True
    while is_running:
        is_running = any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline
        check()
        done = job.progress_path.read_bytes().count(b"\n") if job.progress_path.exists() else 0
        if done != shown:
            show(shown := done)
        if failed is None:
            failed = next((number for number, rank in enumerate(ranks) if rank.poll()), None)
        if failed is not None or job.record_path.exists():
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        time.sleep(_POLL_S * is_running)
    return failed


@contextlib.contextmanager
def _ranks(job: Job) -> Iterator[list[subprocess.Popen[bytes]]]:
    # Not Composer's launcher, which imports Composer once more (seconds) and keeps only rank 0's output.
    command = [sys.executable, "-m", "composer_fsdp2.cli.compare_rank", str(job.path)]
    environment = _environment(job)
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(job.options.num_ranks):
            with job.log_path(rank).open("wb") as log:
                process = subprocess.Popen(
                    command,
                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    start_new_session=True,  # so that the workers of its data loader can be killed with it
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            ranks.append(process)
        yield ranks
    finally:
        _end(ranks)


def _environment(job: Job) -> Mapping[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    num_ranks = str(job.options.num_ranks)
    # One thread per rank, because ranks compete for cores. tokenizers warns about forks, such as loader workers.
    defaults = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if job.options.is_deterministic:
        defaults["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    own = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "NODE_RANK": "0"}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    # FSDP_VERSION would make Composer use its own FSDP2 code.
    return {name: value for name, value in {**defaults, **os.environ, **own}.items() if name != "FSDP_VERSION"}


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Kill the ranks that are still running, and the processes that ranks started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.pid, number)  # also if the rank has exited, because its workers may still run
        deadline = time.monotonic() + _GRACE_S
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(_POLL_S / 5)


def _failure(job: Job, rank: int, code: int) -> str:
    log = job.log_path(rank)
    text = log.read_text(errors="replace")
    lines = text.splitlines()[-_LAST_LINES:]
    how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
    if code == -signal.SIGKILL:
        how += ", as the system does when memory is used up"
    if advice := hub_advice(text):
        how += f": {advice}"
    if not lines:
        return f"{job.title}: rank {rank} ended {how}, without output in {log}"
    return "\n".join(
        [f"{job.title}: rank {rank} ended {how}; the last lines of {log}:", *(f"  {each}" for each in lines)]
    )
