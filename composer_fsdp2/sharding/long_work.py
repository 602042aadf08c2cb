"""Run work that takes hours on some ranks while the other ranks wait, without a collective that could time out."""

import bisect
import collections
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from composer_fsdp2._torch.private_names import default_store
from composer_fsdp2.errors import ComposerFSDP2Error

T = TypeVar("T")

_BEAT_EVERY_S = 5.0
# A rank without a heartbeat for this long counts as dead.
_GONE_AFTER_S = 120.0
# The maximum delay of a rank that has not started yet. Scripts do other work between two loads, without heartbeats.
_COME_WITHIN_S = 1800.0
# A waiting rank polls the store at increasing intervals.
_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.001, 0.5


def long_work(
    work: Callable[[], T],
    what: str,
    *,
    ranks: Collection[int] | None = None,
    error_type: type[ComposerFSDP2Error] = ComposerFSDP2Error,
) -> T | None:
    """Run ``work`` on ``ranks``. Every rank returns after all of them have finished, regardless of the duration.

    With a collective, the waiting ranks would time out while one rank copies for longer than the group's timeout. With
    a timeout of days, they would wait for days for a killed rank. Here a thread of each working rank counts heartbeats
    in the default group's store, and the other ranks poll the store.

    Args:
        work: Must not communicate over the default group.
        what: A description for errors, such as "packing a checkpoint"; equal on all ranks. Concurrent calls in two
            threads need different ones.
        ranks: The working ranks, equal on all ranks; None means all.
        error_type: The exception on other ranks.
    Returns:
        The result of ``work``; None on a rank that is not in ``ranks``.
    Raises:
        The exception of ``work`` on this rank; ``error_type`` if ``work`` raised on another rank, or if a working rank
            stopped responding. All ranks raise, after the other ranks have finished.

    Called on all ranks, or in one process without a group. Messages to the store: two, and one per five seconds,
    from a working rank; two per second from a waiting rank; one per five seconds to watch another rank.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return work()
    workers = range(dist.get_world_size()) if ranks is None else sorted(set(ranks))
    return _LongWork(what, workers, error_type).run(work)


# Values that a rank adds to the counter of finished ranks if it failed, or if it found another rank dead.
_FAILED, _GONE = 1 << 24, 1 << 48
# Values that a rank adds to its heartbeats for each finished rank that it skipped, and when it finishes.
_PASSED, _FINISHED = 1 << 24, 1 << 48
_numbers: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)


class _LongWork:
    """One call of ``long_work`` on one rank.

    Keys in the store: the heartbeats of each working rank, the number of finished ranks, and the first error. Each rank
    watches the heartbeats of one working rank, the next unfinished one after itself, so the messages per rank do not
    grow with the number of ranks. The process of a finished rank may exit. Its watchers skip it, and also the ranks
    that it has skipped itself: one step per five seconds, and log2(number of ranks) steps past any number of live
    ranks.
    """

    def __init__(self, what: str, workers: Sequence[int], error_type: type[ComposerFSDP2Error]) -> None:
        self._what, self._workers, self._error_type = what, workers, error_type
        self._store: Any = default_store()
        self._prefix = f"long_work/{what}/{next(_numbers[what])}"  # all ranks call in the same order
        self._rank = dist.get_rank()
        self._is_worker = self._is_working = self._rank in workers
        self._num_passed = 0
        self._ended = threading.Event()

    def run(self, work: Callable[[], T]) -> T | None:
        thread = threading.Thread(target=self._beat_and_watch, name=f"heartbeat: {self._what}", daemon=True)
        value: T | None = None
        error: BaseException | None = None
        try:
            with self._explain_store_errors():
                self._send_heartbeat()
            thread.start()
            if self._is_working:
                try:
                    value = work()
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as caught:  # torch's CheckpointException is not an Exception
                    error = caught
                self._finish(error)
            self._wait(error)
        except (KeyboardInterrupt, SystemExit) as interrupted:  # otherwise the other ranks would poll forever
            self._finish(interrupted)
            raise
        finally:
            self._ended.set()
        return value

    def _finish(self, error: BaseException | None) -> None:
        """Write this rank's error, if any, to the store; then mark this rank as finished."""
        if not self._is_working:
            return
        self._is_working = False
        with self._explain_store_errors(error):
            if error is not None:
                self._set_error(f"rank {self._rank} could not go on: {type(error).__name__}: {error}")
            self._store.add(self._heartbeats_key(self._rank), _FINISHED)
            self._store.add(self._count_key, 1 if error is None else 1 + _FAILED)

    def _wait(self, own_error: BaseException | None) -> None:
        """Wait for the other working ranks.

        Raises:
            The error of this rank, else the error of another rank, or an error that a rank has stopped responding.
        """
        with self._explain_store_errors(own_error):
            pause_s = _SHORTEST_POLL_S
            while (finished := self._store.add(self._count_key, 0)) < _GONE and finished % _FAILED < len(self._workers):
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_POLL_S)
            first_error = self._store.get(self._error_key).decode() if finished >= _FAILED else None
        if own_error is not None:
            raise own_error
        if first_error is not None:
            raise self._error_type(first_error)

    def _beat_and_watch(self) -> None:
        """Count this rank's heartbeats, and check those of the next unfinished rank."""
        known, known_since = 0, time.monotonic()
        with contextlib.suppress(RuntimeError):  # if the store ends, the waiting thread raises
            while not self._ended.wait(_BEAT_EVERY_S):
                self._send_heartbeat()
                watched = self._watched_rank()
                if watched is None:
                    continue
                beats, now = self._store.add(self._heartbeats_key(watched), 0), time.monotonic()
                limit_s = _GONE_AFTER_S if beats else _COME_WITHIN_S
                if beats >= _FINISHED:
                    self._skip_finished(1 + beats % _FINISHED // _PASSED)
                    known, known_since = 0, now
                elif beats != known:
                    known, known_since = beats, now
                elif now - known_since > limit_s:
                    self._set_error(
                        f"rank {watched} has stopped responding while {self._what} (no heartbeat for "
                        f"{limit_s:.0f} s); check its log, and start again"
                    )
                    self._store.add(self._count_key, _GONE)
                    return

    def _watched_rank(self) -> int | None:
        """The next working rank that is not known to have finished; None if all others have."""
        if self._num_passed >= len(self._workers) - self._is_worker:
            return None
        return self._workers[(bisect.bisect_right(self._workers, self._rank) + self._num_passed) % len(self._workers)]

    def _skip_finished(self, num_finished: int) -> None:
        self._num_passed += num_finished
        if self._is_worker:  # for the ranks that watch this one
            self._store.add(self._heartbeats_key(self._rank), num_finished * _PASSED)

    def _send_heartbeat(self) -> None:
        if self._is_working:
            self._store.add(self._heartbeats_key(self._rank), 1)

    def _set_error(self, error: str) -> None:
        self._store.compare_set(self._error_key, "", error.encode(errors="replace").decode())

    def _heartbeats_key(self, rank: int) -> str:
        return f"{self._prefix}/heartbeats/{rank}"

    @property
    def _count_key(self) -> str:
        return f"{self._prefix}/finished"

    @property
    def _error_key(self) -> str:
        return f"{self._prefix}/error"

    @contextlib.contextmanager
    def _explain_store_errors(self, own_error: BaseException | None = None) -> Iterator[None]:
        """Convert an error of the store into an error with an explanation; ``own_error`` takes precedence."""
        try:
            yield
        except RuntimeError as error:
            raise own_error or self._error_type(
                f"the other ranks cannot be reached any more while {self._what} (did rank 0 end?): {error}"
            ) from error
