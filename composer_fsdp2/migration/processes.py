"""What many values become in processes of their own, of which one may be killed."""

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
    """``work`` of each value, in order.

    Args:
        work: A function at the top of a module, or a partial of one.
        num_processes: None for one a core.
        killed: The result of a value whose process was killed, as by a machine without memory.
    """
    num_done = 0
    try:
        with ProcessPoolExecutor(num_processes, initializer=_end_with_parent) as pool:
            for result in pool.map(work, values, chunksize=8):
                num_done += 1
                yield result
    except BrokenProcessPool:  # one value a process tells which it was
        yield from (_alone(work, value, killed) for value in values[num_done:])


def _alone(work: Callable[[Given], Result], value: Given, killed: Callable[[Given], Result]) -> Result:
    with ProcessPoolExecutor(1, initializer=_end_with_parent) as pool:
        try:
            return pool.submit(work, value).result()
        except BrokenProcessPool:
            return killed(value)


def _end_with_parent() -> None:
    """Let this process end when the one that started it does, however that ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
