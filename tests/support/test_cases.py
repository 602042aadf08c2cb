"""Cases in one call of the ranks: a failure that hid the next ones would be found one run of the suite at a time."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.ranks import RankError, run_ranks


def square(number: int) -> int:
    assert number < 10, f"{number} is too large"
    return number * number


def check_squares(numbers: list[int]) -> dict[str, int]:
    return for_each(square, {f"case {number}": (number,) for number in numbers})


def check_refusals() -> None:
    def refuses(number: int) -> None:
        with pytest.raises(AssertionError, match="too large"):
            square(number)

    for_each(refuses, {f"case {number}": (number,) for number in (11, 1, 12, 2)})


def meet(failing_rank: int) -> None:
    if dist.get_rank() == failing_rank:
        raise KeyError("left behind")
    dist.all_reduce(torch.ones(1))


def check_meeting() -> None:
    for_each(meet, {"all": (-1,), "one": (1,), "next": (-1,)})


def test_results_by_name():
    """What a case gave is found under its name, on each rank."""
    assert run_ranks(check_squares, 2, [1, 2]) == [{"case 1": 1, "case 2": 4}] * 2


def test_every_failure_is_reported():
    """The first failure does not hide the second."""
    with pytest.raises(RankError, match="2 of 4 cases failed") as caught:
        run_ranks(check_squares, 2, [1, 11, 2, 12])
    message = str(caught.value)
    assert "[case 11]" in message and "12 is too large" in message and "[case 2]" not in message


def test_errors_that_did_not_come_are_reported():
    """pytest.raises is for cases as well."""
    with pytest.raises(RankError, match="2 of 4 cases failed") as caught:
        run_ranks(check_refusals, 2)
    message = str(caught.value)
    assert "[case 1] " in message and "[case 2] " in message and "DID NOT RAISE" in message


def test_no_case_is_no_check():
    """A table of cases that became empty would pass."""
    with pytest.raises(RankError, match="no case"):
        run_ranks(check_squares, 1, [])


def test_a_rank_that_others_wait_for():
    """The ranks are apart then: to go on would compare one case's values with another's."""
    with pytest.raises(RankError, match=r"failed first on rank 1.*: AssertionError: 1 of 3 cases failed") as caught:
        run_ranks(check_meeting, 2)
    message = str(caught.value)
    assert "left behind" in message and "not run: next" in message
    assert caught.value.running == [0]
