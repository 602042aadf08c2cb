"""Map a function over values in worker processes. The result of a worker that is killed is computed by the caller."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

Given = TypeVar("Given")
Result = TypeVar("Result")


def in_processes(
    work: Callable[[Given], Result],
    values: Sequence[Given],
    *,
    num_processes: int | None,
    killed: Callable[[Given], Result],
) -> Iterator[Result]:
    """Yield ``work(value)`` for each value, in order.

    Args:
        work: A function at module level, or a partial of one.
        num_processes: The number of processes; None: one per core.
        killed: Called with a value whose process was killed, for example for lack of memory; returns the result.
    """
    num_done = 0
    try:
        with ProcessPoolExecutor(num_processes, initializer=_end_with_parent) as pool:
            for result in pool.map(work, values, chunksize=8):
                num_done += 1
                yield result
    except BrokenProcessPool:  # one process per value identifies the value
        yield from (_in_own_process(work, value, killed) for value in values[num_done:])


def _in_own_process(work: Callable[[Given], Result], value: Given, killed: Callable[[Given], Result]) -> Result:
    with ProcessPoolExecutor(1, initializer=_end_with_parent) as pool:
        try:
            return pool.submit(work, value).result()
        except BrokenProcessPool:
            return killed(value)


def _end_with_parent() -> None:
    """End this process when its parent process ends for any reason."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
