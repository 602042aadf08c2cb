"""Numbers that ranks compare in the midst of a forward, before they run parts of the model that may differ."""

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch import nn

from composer_fsdp2.training.control import ANSWER_WITHIN, Operation, control
from composer_fsdp2.training.out_of_memory import vote_if_on

# From where this rank is and its numbers to the largest of all ranks'. Called on all ranks together.
Ask = Callable[[str, Sequence[int]], list[int]]


def asking(model: nn.Module, operation: Operation, limit_s: float | None) -> Ask:
    """How the ranks of a sharded model ask each other a operation. Called on all ranks.

    Args:
        model: The module inside which they ask.
        limit_s: For how many seconds they wait for each other's answers; None: for as long as for other votes.
    """
    limit = ANSWER_WITHIN if limit_s is None else timedelta(seconds=limit_s)
    all_reduce_max, this = control().all_reduce_max, weakref.ref(model)  # its hooks hold what is returned

    def ask(where: str, numbers: Sequence[int]) -> list[int]:
        if (found := this()) is not None:
            vote_if_on(found, f"the question of {operation.name} before {where}")
        return all_reduce_max(operation, where, numbers, limit)

    return ask
