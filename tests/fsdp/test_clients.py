"""Unmodified libraries that use FSDP1's class train on ours: see ``fsdp.clients``.

The reference is the same script on FSDP1: losses, gradient norms and parameters to 1e-6, also for runs that resume from
each other's checkpoint. benchmarks/clients.py makes a table of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from fsdp.clients import CLIENTS, Client, Trained
from support import other_releases
from support.ranks import run_ranks
from torch.utils._pytree import tree_map

from composer_fsdp2 import install_fsdp

OTHERS = {"accelerate-1.15.0": ("accelerate", "accelerate bf16 before", "Trainer"), "trl-0.17.0": ("SFTTrainer",)}


def differences(client: Client, folder: Path) -> Iterator[tuple[str, tuple[float, float]]]:
    """Differences from FSDP1, for each run on our class with a matching one on FSDP1. Called on all ranks."""

    def train(folder: Path, *, ours: bool, resumes: bool = False) -> Trained:
        with install_fsdp() if ours else contextlib.nullcontext():
            trained = client(folder, resumes=resumes)
        assert trained.module.startswith("composer_fsdp2" if ours else "torch.distributed"), trained.module
        return trained

    of_fsdp1, of_ours = folder / "FSDP1", folder / "ours"
    yield "trained", train(of_ours, ours=True).differences(train(of_fsdp1, ours=False))
    expected = train(of_fsdp1, ours=False, resumes=True)
    yield "resumed from FSDP1", train(of_fsdp1, ours=True, resumes=True).differences(expected)
    yield "resumed from itself", train(of_ours, ours=True, resumes=True).differences(expected)
    yield "FSDP1 resumed from it", train(of_ours, ours=False, resumes=True).differences(expected)


def check(names: Sequence[str], folder: Path) -> list[str]:
    """Differences above 1e-6. Several clients in one call of the ranks, since their imports take seconds."""
    return [
        f"{name}: {run}: {found}"
        for name in names
        for run, found in differences(CLIENTS[name], folder / name)
        if max(found) > 1e-6
    ]


def compare(names: Sequence[str], folder: Path) -> None:
    missing = {package for name in names for package in CLIENTS[name].missing()}
    if missing:
        pytest.skip(f"not installed: {', '.join(sorted(missing))}")
    wrong = run_ranks(check, 2, names, folder, fresh=True, timeout_s=300)
    assert wrong == [[], []]


FAST = ("accelerate bf16 before", "Fabric full", "tutorial")


@pytest.mark.any_torch
def test_the_same_losses_as_on_fsdp1(tmp_path):
    """accelerate casts flat parameters, Lightning looks for DTensors, the tutorial passes no device: all must work as
    on FSDP1."""
    compare(FAST, tmp_path)


@pytest.mark.any_torch
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CLIENTS if name not in (*FAST, "T5 bf16")])
def test_all_clients(name, tmp_path):
    compare([name], tmp_path)


@pytest.mark.others
@pytest.mark.parametrize(("release", "names"), OTHERS.items(), ids=OTHERS)
def test_other_releases(release, names, tmp_path, monkeypatch):
    other_releases.needs(release)
    monkeypatch.syspath_prepend(other_releases.FOLDER / release)
    compare(names, tmp_path)


def train_t5(folder: Path) -> list[str]:
    from transformers.models.t5.modeling_t5 import T5Block

    with summing_per_call(T5Block):
        return check(["T5 bf16"], folder)


@contextlib.contextmanager
def summing_per_call(cls: type[torch.nn.Module]) -> Iterator[None]:
    """Sum an input's gradients within each module of this class first, and then over modules."""
    forward: Callable[..., Any] = cls.forward

    def own(value: Any) -> Any:
        return value.view_as(value) if isinstance(value, torch.Tensor) and value.requires_grad else value

    def through_own(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *tree_map(own, args), **tree_map(own, kwargs))

    with mock.patch.object(cls, "forward", through_own):
        yield


@pytest.mark.any_torch
@pytest.mark.slow
def test_t5_in_bf16_sums_per_unit(tmp_path):
    """Every block of T5's decoder reads the encoder's output; ``fully_shard`` sums its gradient by unit.

    FSDP1 sums all of them sequentially. In bf16 the last digit differs; in the same order both are equal.
    """
    pytest.importorskip("transformers")
    assert run_ranks(train_t5, 2, tmp_path, fresh=True) == [[], []]
