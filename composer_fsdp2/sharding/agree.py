"""Decisions that all ranks make together: either all continue, or all raise before the next collective."""

import hashlib
import itertools
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from composer_fsdp2._torch.private_names import default_store
from composer_fsdp2.errors import ComposerFSDP2Error, ConfigError, PlanError

T = TypeVar("T")


def require_process_group(caller: str) -> None:
    """Raise unless torch.distributed is initialized.

    Raises:
        ConfigError: with instructions to start one.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            f"{caller} needs a process group, also on one rank: start the script with `composer -n N` or torchrun and "
            "call composer.utils.dist.initialize_dist or torch.distributed.init_process_group first (Composer's "
            "Trainer does)"
        )


def all_gather_object(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """All-gather one small picklable value per rank, in rank order. Called on all ranks of the group.

    Without a process group, returns this process's value only.

    Args:
        group: None means the default group.
    Raises:
        ComposerFSDP2Error: on all ranks, if a rank cannot pickle its value; names the rank and the type.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    pickled: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(pickled, _pickled(value), group)
    if error := next((each for each in pickled if isinstance(each, str)), None):
        raise ComposerFSDP2Error(error)
    return [pickle.loads(each) for each in pickled]


def _pickled(value: Any) -> bytes | str:
    """The pickled value, or an error message: the other ranks must receive something."""
    try:
        return pickle.dumps(value)
    except Exception as error:
        return f"rank {dist.get_rank()} cannot send a {type(value).__name__} to the other ranks: {error}"


def sends_from_host(group: dist.ProcessGroup | None = None) -> bool:
    """Whether the group's backend supports CPU tensors (gloo does, NCCL does not)."""
    return "cpu:" in str(dist.get_backend_config(group))


def device_of_group(group: dist.ProcessGroup | None = None) -> torch.device:
    """The device of the tensors that the group communicates."""
    if sends_from_host(group):
        return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def agree(
    decide: Callable[[], T], fingerprint: Callable[[T], str], error_type: type[ComposerFSDP2Error] = PlanError
) -> T:
    """Run ``decide`` on every rank. Return its result if it succeeded on all ranks with the same fingerprint.

    Args:
        decide: Only reads; does not communicate.
        fingerprint: Maps the result to a string that is equal on all ranks if their decisions are equal.
        error_type: The exception for the failure of another rank.
    Raises:
        The exception of ``decide`` on this rank; ``error_type`` if another rank raised, or if fingerprints differ.

    Called on all ranks; one all-reduce of 64 bytes. If the results differ, each rank all-gathers its digest or its
    error. Rank 0 then sends its fingerprint to the first rank that differs, which sends an excerpt of both.
    """
    value: T
    error: Exception | None = None
    try:
        value = decide()
        text = fingerprint(value)
    except Exception as caught:
        error, text = caught, f"error {type(caught).__name__}: {caught}"
    digest = hashlib.sha256(text.encode(errors="surrogatepass"))  # paths may contain surrogates
    is_same = _is_equal_on_all_ranks(digest.digest())
    if is_same and error is None:
        return value
    texts = [] if is_same else all_gather_object(text if error else digest.hexdigest())
    if error is not None:
        raise error
    failed = [rank for rank, text in enumerate(texts) if text.startswith("error ")]
    if failed:
        raise error_type(f"rank {failed[0]} could not go on: {texts[failed[0]].removeprefix('error ')}")
    other = next((rank for rank, digest in enumerate(texts) if digest != texts[0]), None)
    if other is not None:
        of_first, of_other = all_gather_object(_excerpts(text, other))[other]
        raise error_type(
            f"ranks 0 and {other} decided differently; build the same model and pass the same configuration on every "
            f"rank\n  rank 0: {of_first}\n  rank {other}: {of_other}"
        )
    return value


_COMPARED = itertools.count()


def _excerpts(text: str, other: int) -> tuple[str, str]:
    """On rank ``other``, excerpts of both texts where they differ; empty on other ranks. Called on all ranks.

    The plan of a large model has megabytes, so only rank 0's plan is sent, to one rank, through the default store.
    """
    store, key = default_store(), f"composer_fsdp2/compared/{next(_COMPARED)}"  # all ranks compare in the same order
    if dist.get_rank() == 0:
        store.set(key, text.encode(errors="surrogatepass"))
    if dist.get_rank() != other:
        return "", ""
    of_first = store.get(key).decode(errors="surrogatepass")
    return _excerpt(of_first, text), _excerpt(text, of_first)


def _is_equal_on_all_ranks(digest: bytes) -> bool:
    """Whether the 32-byte digest is equal on all ranks: the maximum over ranks must then equal the minimum."""
    if not (dist.is_available() and dist.is_initialized()):
        return True
    # 63 bits of each 8 bytes: the negative of the smallest int64 would overflow.
    numbers = [int.from_bytes(digest[at : at + 8], "big", signed=True) >> 1 for at in range(0, 32, 8)]
    own = torch.tensor([*numbers, *(-number for number in numbers)], dtype=torch.int64)
    largest = own.to(device_of_group(), copy=True)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return torch.equal(largest.cpu(), own)


_WIDTH = 120


def _excerpt(text: str, other: str) -> str:
    """The part of ``text`` around its first difference from ``other``."""
    at = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    start = max(0, at - _WIDTH // 2)
    return ("..." if start else "") + text[start : start + _WIDTH]
