"""Ranks decide together: whoever cannot go on takes all others along, before any of them waits."""

from __future__ import annotations

import os
import pickle
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from support.ranks import run_ranks

from composer_fsdp2 import ComposerFSDP2Error, ConfigError, PlanError
from composer_fsdp2.sharding.agree import agree, gather, require_process_group


def check_agree(values: list[str]) -> Any:
    try:
        return agree(lambda: values[dist.get_rank()], lambda value: value)
    except PlanError as error:
        return str(error)


def test_equal_decisions_are_returned():
    """The usual case: every rank goes on with what it decided."""
    assert run_ranks(check_agree, 2, ["same", "same"]) == ["same", "same"]


def test_different_decisions_show_where_they_differ():
    """A model that was built differently on one rank is found with both versions, out of thousands of characters."""
    common = "x" * 5000
    for message in run_ranks(check_agree, 2, [f"{common} 3 layers {common}", f"{common} 4 layers {common}"]):
        assert "ranks 0 and 1 decided differently" in message
        assert "3 layers" in message and "4 layers" in message
        assert len(message) < 1000


def check_sent(length: int) -> tuple[str, int]:
    """The error, and the longest that this rank gathered."""
    text = "x" * length + ("same" if dist.get_rank() in (0, 2) else "other") + "y" * length
    with mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as gathers:
        with pytest.raises(PlanError) as error:
            agree(lambda: text, lambda value: value)
        sent = [len(pickle.dumps(call.args[1])) for call in gathers.call_args_list]
    return str(error.value), max(sent)


def test_different_decisions_are_not_gathered():
    """Plans of two megabytes, of 1,024 ranks, are two gigabytes on every GPU, where an error was to be read."""
    for message, longest in run_ranks(check_sent, 3, 10**6):
        assert "ranks 0 and 1 decided differently" in message
        assert "xsame" in message and "xother" in message
        assert longest < 1000


def test_a_longer_decision_is_a_different_one():
    """One rank's text may be the beginning of the other's."""
    for message in run_ranks(check_agree, 2, ["units a", "units a, b"]):
        assert "decided differently" in message


def check_one_rank_fails() -> tuple[str, str]:
    def decide() -> str:
        if dist.get_rank() == 1:
            raise KeyError("no such layer")
        return "fine"

    try:
        agree(decide, str)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_an_error_on_one_rank_is_raised_on_all():
    """The others do not wait in a collective until NCCL gives up; they say whose error it was."""
    (kind_0, text_0), (kind_1, text_1) = run_ranks(check_one_rank_fails, 2)
    assert kind_1 == "KeyError" and "no such layer" in text_1
    assert kind_0 == "PlanError"
    assert "rank 1 could not go on: KeyError" in text_0 and "no such layer" in text_0


def check_all_fail() -> str:
    def decide() -> None:
        raise ConfigError(f"error of rank {dist.get_rank()}")

    try:
        agree(decide, str)
    except ConfigError as error:
        return str(error)
    return ""


def test_each_rank_raises_its_own_error():
    """The type of the error, which a script may catch, is the original one."""
    assert run_ranks(check_all_fail, 2) == ["error of rank 0", "error of rank 1"]


def check_text_that_begins_as_an_error() -> str:
    return agree(lambda: "error of measurement", lambda value: value)


def test_a_decision_about_errors_is_no_error():
    """What a plan says cannot be mistaken for a failure."""
    assert run_ranks(check_text_that_begins_as_an_error, 2) == ["error of measurement"] * 2


def check_gather() -> list[tuple[int, str]]:
    return gather((dist.get_rank(), "a"))


def test_gather_is_in_rank_order():
    """Messages that name ranks name the right ones."""
    assert run_ranks(check_gather, 2) == [[(0, "a"), (1, "a")]] * 2


def test_without_a_process_group():
    """The error tells each way to start one, and who needs it."""
    with pytest.raises(ConfigError) as caught:
        require_process_group("prepare_fully_shard")
    for part in ("prepare_fully_shard needs a process group", "composer -n N", "torchrun", "init_process_group"):
        assert part in str(caught.value)


def check_path_that_is_no_text() -> str:
    def decide() -> str:
        if dist.get_rank() == 1:
            raise PlanError(os.fsdecode(b"run-\xff/ep1.pt is damaged"))
        return "fine"

    try:
        agree(decide, str)
    except PlanError as error:
        return str(error)
    return ""


def test_an_error_with_a_path_that_is_no_text():
    """A folder's name may be any bytes; the others would wait for the rank that cannot write it down."""
    assert all("ep1.pt is damaged" in text for text in run_ranks(check_path_that_is_no_text, 2))


def check_gather_what_cannot_be_sent() -> str:
    with pytest.raises(ComposerFSDP2Error) as caught:
        gather((lambda: 1) if dist.get_rank() == 1 else 1)
    assert gather(dist.get_rank()) == [0, 1], "no more messages after an error"
    return str(caught.value)


def test_a_value_that_cannot_be_sent():
    """A value that does not pickle raised on its own rank, while the others waited for it until the time-out."""
    for message in run_ranks(check_gather_what_cannot_be_sent, 2):
        assert "rank 1 cannot send a function to the other ranks" in message
