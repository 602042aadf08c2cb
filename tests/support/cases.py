"""Many cases in one call of the ranks, all failures reported: ``for_each(check, {"name": (arguments), ...})``."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

PEER_GRACE = timedelta(seconds=5)  # Time for other ranks to finish the same case after a failure.

_numbers = itertools.count()


def for_each(check: Callable[..., Any], cases: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return the results of ``check(*arguments)`` by case name.

    A failed case does not hide later ones. Only if it leaves other ranks inside a collective are the remaining cases
    skipped, and listed.

    Raises:
        AssertionError: cases failed, with the traceback of each. Called on all ranks, with the same cases.
    """
    store = dist.PrefixStore(f"cases-{next(_numbers)}", dist.distributed_c10d._get_default_store())
    results: dict[str, Any] = {}
    failures: dict[str, str] = {}
    names = list(cases)
    for number, (name, arguments) in enumerate(cases.items()):
        try:
            results[name] = check(*arguments)
        except (Exception, pytest.fail.Exception):  # pytest.raises fails with the latter, a BaseException.
            failures[name] = traceback.format_exc()
        store.set(f"{number}/{dist.get_rank()}", "ended")
        if name in failures and not _all_ended(store, number):
            skipped = ", ".join(names[number + 1 :]) or "none"
            failures[name] += f"Other ranks are still within this case; not run: {skipped}\n"
            break
    assert cases, "no case: nothing was checked"
    assert not failures, f"{len(failures)} of {len(cases)} cases failed\n" + "\n".join(
        f"[{name}] {text}" for name, text in failures.items()
    )
    return results


def all_of(*checks: Callable[[], Any]) -> None:
    """Several checks in one call of the ranks, as ``for_each``. Called on all ranks."""
    for_each(lambda check: check(), {check.__name__: (check,) for check in checks})


def _all_ended(store: dist.Store, number: int) -> bool:
    try:
        store.wait([f"{number}/{rank}" for rank in range(dist.get_world_size())], PEER_GRACE)
    except RuntimeError:  # FileStore raises "Wait timeout", not torch's own class
        return False
    return True
