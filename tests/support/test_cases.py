"""Cases in one call of the ranks: a failure that hid later ones would reveal only one failure a run of the suite."""

from __future__ import annotations

import pytest
from support.cases import for_each
from support.ranks import RankError, run_ranks


def square(number: int) -> int:
    if number == 7:
        with pytest.raises(KeyError):
            pass
    assert number < 10, f"{number} is too large"
    return number * number


def check_squares(numbers: list[int]) -> dict[str, int]:
    return for_each(square, {f"case {number}": (number,) for number in numbers})


def test_results_by_name():
    """Each rank returns a case's result under its name; an empty table of cases does not pass."""
    assert run_ranks(check_squares, 2, [1, 2]) == [{"case 1": 1, "case 2": 4}] * 2
    with pytest.raises(RankError, match="no case"):
        run_ranks(check_squares, 1, [])


def test_every_failure_is_reported():
    """The first failure does not hide the second, and a missing exception counts as a failure."""
    with pytest.raises(RankError, match="3 of 5 cases failed") as caught:
        run_ranks(check_squares, 2, [1, 11, 2, 12, 7])
    message = str(caught.value)
    assert "[case 11]" in message and "12 is too large" in message and "[case 2]" not in message
    assert "DID NOT RAISE" in message
