"""Composer's Trainer, one batch at a time: ``build(name, setting)``, for ``step.py --trainer``.

DecoupledAdamW and GradientClipping under the shim, over ``fully_shard`` by hand, Composer's FSDP2 and FSDP1. A batch
is timed from when the Trainer takes it to when it requests the next one. Imports Composer.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from composer import Trainer
from composer.algorithms import GradientClipping
from composer.optim import DecoupledAdamW
from composer.utils import FSDP2Config, ParallelismConfig
from timing import HAND, MAX_NORM
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trainer_parts import Language, UpdatesByHand
from variants import Setting, Trainee

from composer_fsdp2.compat import fsdp2


def _shard_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, *unused: Any) -> None:
    """An expert's code for this one model; the optimizer already exists."""
    decoder: Any = model.decoder
    mesh = init_device_mesh("cuda" if _is_on_gpu() else "cpu", (dist.get_world_size(),))
    for block in decoder.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(decoder, mesh=mesh, reshard_after_forward=False)
    (group,) = optimizer.param_groups  # the only group, with all parameters in order
    group["params"] = list(model.parameters())


def _is_on_gpu() -> bool:
    """Whether this rank trains on a GPU: the backend of its process group."""
    return dist.get_backend() == "nccl"


def _around(name: str) -> AbstractContextManager[Any]:
    """The patches that are active only while this Trainer is built or trains: the shim, for one, replaces functions of
    Composer in the whole process."""
    if name == HAND:  # The Trainer checks this function, and shards where its own FSDP2 would.
        return mock.patch("composer.distributed.prepare_distributed.parallelize_composer_model", _shard_by_hand)
    if name == "ours":
        return fsdp2()
    if name == "fsdp1" and not _is_on_gpu():  # Composer requires a current CUDA device; FSDP1 accepts any device.
        return mock.patch("torch.cuda.current_device", return_value=torch.device("cpu"))
    return contextlib.nullcontext()


class _Batches:
    """A dataloader that yields a batch when it is this Trainer's turn, and ends the turn at the next request.

    Several Trainers share one process, each inside ``fit`` in a separate thread, and one runs at a time. Separate
    processes would not need to switch the shim on and off, but one process may be faster than another throughout
    (because of its memory layout, for instance), which more rounds do not average out.
    """

    def __init__(self) -> None:
        self._is_wanted, self._is_done = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        while True:
            self._is_done.release()
            self._is_wanted.acquire()
            yield [self._tokens]

    def start(self, fit: Callable[[], None]) -> None:
        """Start a thread, and run it up to the first batch."""
        device = torch.cuda.current_device() if _is_on_gpu() else None

        def run() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)  # is per thread
                fit()
            except BaseException as error:
                self._error = error
                self._is_done.release()

        threading.Thread(target=run, daemon=True).start()
        self._wait()

    def train(self, tokens: torch.Tensor) -> None:
        self._tokens = tokens
        self._is_wanted.release()
        self._wait()

    def _wait(self) -> None:
        self._is_done.acquire()
        if self._error is not None:
            raise self._error


def build(name: str, setting: Setting) -> Trainee:
    """A Trainer before its first batch. Called on all ranks."""
    torch.manual_seed(0)
    model, batches = Language(setting.shape), _Batches()
    optimizer = (UpdatesByHand if name == HAND else DecoupledAdamW)(model.parameters(), lr=1e-3)
    own_fsdp2 = ParallelismConfig(fsdp2=FSDP2Config()) if name in (HAND, "composer") else None
    with _around(name):
        trainer = Trainer(
            model=model,
            optimizers=optimizer,
            train_dataloader=batches,
            max_duration=f"{10**9}ba",
            device="gpu" if _is_on_gpu() else "cpu",
            precision="fp32",  # the default on a GPU is amp_fp16
            device_train_microbatch_size=setting.shape.batch,
            parallelism_config=own_fsdp2 or {"fsdp": {}},
            algorithms=GradientClipping("norm", MAX_NORM),
            progress_bar=False,
            log_to_console=False,
            seed=17,
        )
        batches.start(trainer.fit)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        batches.train(tokens)
        return torch.tensor(trainer.state.total_loss_dict["loss/train/total"])

    return Trainee(model, optimizer, step, lambda: _around(name))
