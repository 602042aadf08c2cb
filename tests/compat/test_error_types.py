"""A script that catches Composer's error catches ours: each has the type that Composer raises in the same place.

The reference is Composer, under FSDP1 or its own FSDP2; if it raises nothing, ours may.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import for_each
from support.on_ranks import on_ranks
from support.oracle import FSDP1, FSDP2, UNSHARDED, Under
from support.trainers import build_model, build_optimizer, make_trainer
from torch import nn

pytestmark = pytest.mark.composer


def error_of(under: Under, action: Callable[[], Any]) -> Exception:
    with under(), pytest.raises(Exception) as raised:  # noqa: PT011 - which one is the question
        action()
    return raised.value


# Not caught specifically by any script: base classes of all errors, and Python's own AssertionError.
_ANY = {Exception, BaseException, object, AssertionError}


def assert_caught_alike(action: Callable[[], Any], theirs: Under = FSDP1) -> None:
    """Every class that would have caught Composer's error catches ours."""
    expected, found = error_of(theirs, action), error_of(FSDP2, action)
    known = [cls for cls in type(expected).__mro__ if cls.__module__ == "builtins" and cls not in _ANY]
    assert known, f"Composer raised {expected!r}"
    assert isinstance(found, tuple(known[:1])), f"{found!r} is no {known[0].__name__}, as Composer's {expected!r}"
    assert type(found).__module__.startswith("composer_fsdp2"), f"{found!r} is not ours"


def accepts_nothing(path: str, *unused: Any) -> bool:
    return False


@on_ranks(2)
def test_errors_of_a_configuration():
    """A script's `except ValueError`, `TypeError`, `KeyError`, `RuntimeError` or `NotImplementedError` around a Trainer
    catches our errors."""
    from composer.distributed import dist_strategy
    from composer.utils import FSDP2Config, FSDPConfig, ParallelismConfig, get_device

    def other_optimizer() -> Any:
        return make_trainer({}, optimizer=build_optimizer("groups", build_model()), model=build_model())

    def odd_wrap_function() -> Any:
        model = build_model(tied=False)
        model.model.fsdp_wrap_fn = lambda module: {"sharding_stratgy": "FULL_SHARD"}
        return make_trainer(ParallelismConfig(fsdp2=FSDP2Config()), model=model, tied=False)

    def no_way_to_initialise() -> Any:
        with torch.device("meta"):
            model = build_model(tied=False)
        model.model.wte.bare = nn.Module()
        model.model.wte.bare.weight = nn.Parameter(torch.empty(8, device="meta"))
        return make_trainer({}, model=model, tied=False)

    def two_optimizers() -> Any:
        model = build_model()
        optimizers = [torch.optim.SGD([parameter]) for parameter in list(model.parameters())[:2]]
        return dist_strategy.prepare_fsdp_module(model, optimizers, FSDPConfig(), "fp32", get_device("cpu"), False)

    cases: dict[str, tuple[Callable[[], Any], Under]] = {
        "an unknown mixed precision": (lambda: make_trainer({"mixed_precision": "HALF"}), FSDP1),
        "a local state dict": (lambda: make_trainer({"state_dict_type": "local"}), FSDP1),
        "a process group that does not divide the world": (lambda: make_trainer({"process_group": "set3"}), FSDP1),
        "a process group of no kind": (lambda: make_trainer({"process_group": 3}), FSDP1),
        "another model's optimizer": (other_optimizer, FSDP1),
        "two optimizers": (two_optimizers, FSDP1),
        "an unknown key of a wrap function, FSDP2": (odd_wrap_function, UNSHARDED),
        "parameters that nothing initialises": (no_way_to_initialise, FSDP1),
    }
    for_each(assert_caught_alike, cases)


@on_ranks(2)
def test_errors_of_a_checkpoint(folder: str):
    """A script's `except FileNotFoundError` starts from scratch; `except ValueError` or `RuntimeError` tries the
    previous checkpoint."""

    def load(path: Path, config: Any = None, **options: Any) -> Callable[[], Any]:
        return lambda: make_trainer({} if config is None else config, load_path=str(path), **options)

    below = Path(folder)
    if torch.distributed.get_rank() == 0:
        other = {**build_model().state_dict(), "model.wte.weight": torch.zeros(5, 8)}
        torch.save({"state": {"model": other}}, below / "other.pt")
        torch.save({"state": {"model": {}}}, below / "whole.pt")
        torch.save({"state": {"model": {"large": torch.zeros(100_000)}}}, below / "cut.pt")
        os.truncate(below / "cut.pt", 200_000)
    torch.distributed.barrier()
    sharded = {"state_dict_type": "sharded"}

    def validated() -> Any:
        os.environ["CHECKPOINT_VALIDATION_FUNCTION"] = f"{__name__}.accepts_nothing"
        try:
            return make_trainer({}, load_path=str(below / "whole.pt"))
        finally:
            del os.environ["CHECKPOINT_VALIDATION_FUNCTION"]

    for_each(
        assert_caught_alike,
        {
            "no file": (load(below / "gone.pt"),),
            "no folder": (load(below / "gone", sharded),),
            "truncated": (load(below / "cut.pt"),),
            "refused by the user's own function": (validated,),
            "of another shape": (load(below / "other.pt", load_weights_only=True),),
        },
    )
