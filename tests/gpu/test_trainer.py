"""Composer's Trainer on two GPUs: FSDP1's losses, async saves, and a step that cannot be repeated."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.callbacks import callback
from support.cases import for_each
from support.comparing import assert_same
from support.gpus import Ranks, Recorder, on_gpus
from support.memory import run_out_of_memory
from support.oracle import FSDP1_ON, FSDP2
from support.saved import named, read
from support.trainers import build_model, close, fit, largest_difference, make_trainer, optimizer_state

pytestmark = pytest.mark.composer

COMPOSER = ("mosaicml",)


def composers_device() -> Any:
    """Composer's device, which would compute fp32 in TF32, where the order of a sum changes the third digit."""
    from composer.devices import DeviceGPU

    return DeviceGPU(allow_tf32=False)


# --- curves

# Relative. Sums have another order on a GPU, and bf16 or fp16: for losses of about 3 in a few batches.
TOLERANCES = {"fp32": 1e-5, "amp_bf16": 1e-2, "amp_fp16": 5e-3}
CURVE = {"batches": 10, "optimizer": "decoupled_adamw", "clip": ("norm", 0.5)}


def check_curves(device: str) -> dict[str, float]:
    """The largest relative difference of ours to FSDP1's losses, by precision and setting."""

    def check(precision: str, config: dict[str, Any]) -> float:
        options = CURVE | {"precision": precision, "device": composers_device()}
        theirs = fit(FSDP1_ON[device], dict(config), **options)
        ours = fit(FSDP2, dict(config), **options)
        assert (theirs.shards, ours.shards) == ({"FullyShardedDataParallel"}, {"FSDPModule"})
        assert theirs.losses[-1] < theirs.losses[0], f"nothing is learnt: {theirs.losses}"
        difference = largest_difference(ours.losses, theirs.losses)
        assert difference <= TOLERANCES[precision], f"{difference}: {ours.losses}, FSDP1 {theirs.losses}"
        return difference

    configs: dict[str, dict[str, Any]] = {"DEFAULT": {}, "PURE": {"mixed_precision": "PURE"}}
    cases = {f"{precision} {name}": (precision, c) for precision in TOLERANCES for name, c in configs.items()}
    return for_each(check, cases)


@on_gpus(2, packages=COMPOSER, rehearsal=0)  # tests/parity/ has the CPU version
def test_curves_are_fsdp1s(ranks: Ranks, record_property: Recorder):
    """A run that moves to FSDP2 during training continues with the same losses, in every precision."""
    differences = ranks.run(check_curves)[0]
    ranks.record(record_property, "losses", {name: f"{value:.1e}" for name, value in differences.items()})


# --- async saves

WAIT_S = 60.0
SAVES = {"batches": 6, "optimizer": "adamw", "save_interval": "2ba"}


class Gate:
    """Blocks the thread that writes a snapshot until the model has trained another batch, and opens at the end."""

    def __init__(self) -> None:
        self._open = threading.Event()
        run = threading.Thread.run

        def held(thread: threading.Thread) -> None:
            if thread.name == "async_save":
                assert self._open.wait(WAIT_S), "no batch came"
            run(thread)

        self.holding = mock.patch.object(threading.Thread, "run", held)

    def callback(self, states: dict[int, Any]) -> Any:
        """A callback that stores the first moments by batch in ``states``, unsharded, in host memory. It runs before
        the saver."""

        def hold(state: Any) -> None:
            self._open.clear()
            [optimizer] = state.optimizers
            found = optimizer_state(state.model, optimizer)
            states[int(state.timestamp.batch)] = {name: each["exp_avg"].cpu() for name, each in found.items()}

        def open_gate(state: Any) -> None:
            self._open.set()

        return callback(batch_end=open_gate, batch_checkpoint=hold, fit_end=open_gate)


def check_async_saves(device: str, folder: str) -> None:
    from composer_fsdp2.compat.pinned_copies import PinnedCopies

    copied = mock.patch.object(PinnedCopies, "of", autospec=True, side_effect=PinnedCopies.of)

    def check(kind: str) -> None:
        options = SAVES | {"device": composers_device(), "precision": "fp32"}
        config = {"state_dict_type": kind}
        expected = fit(FSDP2, dict(config), save_folder=f"{folder}/{kind}/sync", **options)
        ours, gate = f"{folder}/{kind}/async", Gate()
        states: dict[int, Any] = {}
        with gate.holding, copied as made:
            callbacks = [gate.callback(states)]
            trained = fit(FSDP2, config | {"async_save": True}, save_folder=ours, callbacks=callbacks, **options)
        assert made.call_count == 3  # to pinned memory: tests/compat/test_pinned_copies.py
        assert close(trained.losses, expected.losses), f"{trained.losses}, {expected.losses}"
        if dist.get_rank() == 0:
            assert os.readlink(f"{ours}/latest-rank0.pt") == named(kind, 6)
            for batch in (2, 4, 6):
                saved = read(f"{ours}/{named(kind, batch)}")["state"]["optimizers"]["AdamW"]["state"]
                found = {name: saved[name]["exp_avg"].cpu() for name in states[batch]}
                assert_same(found, states[batch], f"batch {batch}", in_bits=True)

    for_each(check, {kind: (kind,) for kind in ("full", "sharded")})


@on_gpus(2, packages=COMPOSER, rehearsal=0)  # tests/compat/test_async_saving.py has the CPU version
def test_async_saves_hold_their_batch(ranks: Ranks, tmp_path: Path):
    """A copy to the host that the next step overwrote would be a checkpoint of no batch; and the copies use no more
    host memory than necessary."""
    ranks.run(check_async_saves, str(tmp_path))


# --- out of memory in the optimizer's first step


class HungryStep(torch.optim.SGD):
    """Adam's first step allocates its state."""

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        if dist.get_rank() == 1:
            run_out_of_memory("cuda")
        super().step()
        return loss


def check_first_step(device: str, dist_timeout_s: float) -> str:
    with FSDP2():
        model = build_model()
        trainer = make_trainer(
            {},
            model=model,
            microbatch="auto",
            optimizer=HungryStep(model.parameters(), lr=0.1),
            dist_timeout=dist_timeout_s,
            precision="fp32",  # a scaler could skip the first step
            device=composers_device(),
        )
        with pytest.raises(RuntimeError) as raised:
            trainer.fit()
        return str(raised.value)


@on_gpus(2, packages=COMPOSER, rehearsal=0)  # tests/compat/test_auto_microbatch.py has the CPU version
def test_a_gpu_runs_out_of_memory_in_the_first_step(ranks: Ranks):
    """A step that cannot be repeated raises at once with the setting to change, and the other rank does not wait
    forever."""
    of_waiting, of_failing = ranks.run(check_first_step, 30, fresh=True)
    assert "out of memory after backward" in of_failing and "below 4" in of_failing, of_failing
    assert "did not meet within" in of_waiting and "rank 1 has not come" in of_waiting, of_waiting
