"""Ranks that wait for each other for hours, in no collective, and learn when one of them is gone."""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

from composer_fsdp2._torch.private_names import default_store
from composer_fsdp2.checkpoint.open import together
from composer_fsdp2.errors import CheckpointError

T = TypeVar("T")

_NUMBERS = itertools.count()
_ASK_EVERY_S = 0.2
_BEAT_EVERY_S = 5.0
# A rank that says nothing for so long has ended, or its machine has.
_GONE_AFTER_S = 120.0


class Meeting:
    """The ranks of the default process group, or one process without a group. Use it in a with block.

    A collective would time out while one rank copies for longer than the group's timeout; with a timeout of days, a
    rank that was killed would be waited for for days. So each rank says in the group's store that it lives, and waits
    there for what the others say.
    """

    def __init__(self) -> None:
        self._is_alone = not (dist.is_available() and dist.is_initialized())
        self._number = 0
        self._ended = threading.Event()
        if self._is_alone:
            return
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._store: Any = default_store()
        self._prefix = f"meeting/{next(_NUMBERS)}"  # ranks make them in one order
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> "Meeting":
        if not self._is_alone:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if not self._is_alone:
            self._thread.join()

    def together(self, work: Callable[[], T], fingerprint: Callable[[T], str] = lambda _: "") -> T:
        """``opening.together`` for work that may take long. Called on all ranks.

        Raises:
            CheckpointError: as there; or a rank is gone, which is told without a collective that would wait for it.
        """
        error: Exception | None = None
        try:
            value = work()
        except Exception as caught:
            error = caught
        self._wait_for_all()

        def done() -> T:
            if error is not None:
                raise error
            return value

        return together(done, fingerprint)

    def on_first_rank(self, work: Callable[[], T]) -> T | None:
        """Do ``work`` on rank 0 alone, with its error on all ranks; gives None on the others."""
        return self.together(lambda: work() if self._is_alone or self._rank == 0 else None)

    def _wait_for_all(self) -> None:
        """Wait until every rank is here.

        Raises:
            CheckpointError: one is gone; names it.
        """
        if self._is_alone:
            return
        self._number += 1
        arrived = f"{self._prefix}/{self._number}/arrived"
        seen, looked_at = dict[int, tuple[bytes, float]](), 0.0
        with self._connected():
            self._store.set(self._key("here", self._rank), "")
            self._store.add(arrived, 1)
            # One question each time, whatever the number of ranks; who is missing is asked less often.
            while self._store.add(arrived, 0) < self._num_ranks:
                if time.monotonic() - looked_at > _BEAT_EVERY_S:
                    self._look_for_missing(seen)
                    looked_at = time.monotonic()
                time.sleep(_ASK_EVERY_S)

    def _look_for_missing(self, seen: dict[int, tuple[bytes, float]]) -> None:
        """Raise if a rank that is not here has sent nothing for too long; ``seen``: what each sent last, and when."""
        for rank in range(self._num_ranks):
            if self._store.check([self._key("here", rank)]):
                continue
            beat, now = self._last_beat(rank), time.monotonic()
            if rank not in seen or beat != seen[rank][0]:
                seen[rank] = beat, now
            elif now - seen[rank][1] > _GONE_AFTER_S:
                raise CheckpointError(
                    f"rank {rank} has stopped responding (no heartbeat for {_GONE_AFTER_S:.0f} s); check its log, and "
                    "run the conversion again to resume"
                )

    def _last_beat(self, rank: int) -> bytes:
        key = f"{self._prefix}/beat/{rank}"
        return bytes(self._store.get(key)) if self._store.check([key]) else b""

    def _beat(self) -> None:
        number = 0
        with contextlib.suppress(RuntimeError):  # the store has ended; who waits is told
            while not self._ended.is_set():
                self._store.set(f"{self._prefix}/beat/{self._rank}", str(number))
                number += 1
                self._ended.wait(_BEAT_EVERY_S)

    def _key(self, what: str, rank: int) -> str:
        return f"{self._prefix}/{self._number}/{what}/{rank}"

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except RuntimeError as error:
            raise CheckpointError(f"the other ranks cannot be reached any more (did rank 0 end?): {error}") from error
