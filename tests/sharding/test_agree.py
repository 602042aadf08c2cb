"""Ranks decide together: if one rank fails, all raise before any of them waits."""

from __future__ import annotations

import os
import pickle
from unittest import mock

import pytest
import torch.distributed as dist
from support.cases import all_of
from support.on_ranks import on_ranks
from support.ranks import run_ranks

from composer_fsdp2 import ComposerFSDP2Error, ConfigError, PlanError
from composer_fsdp2.sharding.agree import agree, all_gather_object, require_process_group


def error_of(*values: str) -> str:
    with pytest.raises(PlanError) as error:
        agree(lambda: values[dist.get_rank()], lambda value: value)
    return str(error.value)


def check_decisions() -> None:
    """Every rank continues with the common decision, and a plan with the text "error" is not mistaken for a failure.
    For different versions the error shows the differing part out of thousands of characters, also if one is a prefix of
    the other."""
    for decision in ("same", "error of measurement"):
        assert agree(lambda decision=decision: decision, lambda value: value) == decision
    common = "x" * 5000
    message = error_of(f"{common} 3 layers {common}", f"{common} 4 layers {common}")
    assert "ranks 0 and 1 decided differently" in message
    assert "3 layers" in message and "4 layers" in message and len(message) < 1000
    assert "decided differently" in error_of("units a", "units a, b")


def check_failures() -> None:
    """The others do not wait in a collective until NCCL's timeout, and their error names the failed rank. On that rank
    the exception has its original type, which a script may catch. A folder's name may contain any bytes."""
    rank = dist.get_rank()

    def fail(error: Exception | None) -> str:
        if error is not None:
            raise error
        return "fine"

    with pytest.raises(PlanError if rank == 0 else KeyError, match="no such layer") as one:
        agree(lambda: fail(KeyError("no such layer") if rank == 1 else None), str)
    assert rank == 1 or "rank 1 could not go on: KeyError" in str(one.value)
    with pytest.raises(ConfigError, match=f"error of rank {rank}"):
        agree(lambda: fail(ConfigError(f"error of rank {rank}")), str)
    with pytest.raises(PlanError, match=r"ep1\.pt is damaged"):
        agree(lambda: fail(PlanError(os.fsdecode(b"run-\xff/ep1.pt is damaged")) if rank == 1 else None), str)


def check_gather() -> None:
    """Values are in rank order, so that errors name the right ranks. A value that cannot be pickled used to raise on
    its own rank only, while the others waited until the timeout."""
    rank = dist.get_rank()
    assert all_gather_object((rank, "a")) == [(0, "a"), (1, "a")]
    with pytest.raises(ComposerFSDP2Error, match="rank 1 cannot send a function to the other ranks"):
        all_gather_object((lambda: 1) if rank == 1 else 1)
    assert all_gather_object(rank) == [0, 1], "no more messages after an error"


@on_ranks(2)
def test_ranks_decide_together(folder: str) -> None:
    """If the model differs on one rank, or one rank fails, the run ends on all ranks at once."""
    all_of(check_decisions, check_failures, check_gather)


def check_sent(length: int) -> tuple[str, int]:
    """The error, and the largest value that this rank gathered."""
    text = "x" * length + ("same" if dist.get_rank() in (0, 2) else "other") + "y" * length
    with mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as gathers:
        with pytest.raises(PlanError) as error:
            agree(lambda: text, lambda value: value)
        sent = [len(pickle.dumps(call.args[1])) for call in gathers.call_args_list]
    return str(error.value), max(sent)


@pytest.mark.any_torch
def test_different_decisions_are_not_gathered():
    """Gathering plans of two megabytes from 1,024 ranks would take two gigabytes on every GPU."""
    for message, longest in run_ranks(check_sent, 3, 10**6):
        assert "ranks 0 and 1 decided differently" in message
        assert "xsame" in message and "xother" in message
        assert longest < 1000


def test_without_a_process_group():
    """The error names the function that needs a process group, and each way to start one."""
    with pytest.raises(ConfigError) as caught:
        require_process_group("prepare_fully_shard")
    for part in ("prepare_fully_shard needs a process group", "composer -n N", "torchrun", "init_process_group"):
        assert part in str(caught.value)
