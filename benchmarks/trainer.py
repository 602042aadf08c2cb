"""Composer's Trainer as something that trains one batch at a time: ``build(name, setting)``, for ``step.py --trainer``.

DecoupledAdamW and GradientClipping under the shim, over ``fully_shard`` by hand, Composer's FSDP2 and FSDP1. A batch
lasts from where the Trainer has been given it to where it asks for the next one. Composer is imported with this file.
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
    """What an expert writes for this one model; the optimizer was made before."""
    decoder: Any = model.decoder
    mesh = init_device_mesh("cuda" if _is_on_gpu() else "cpu", (dist.get_world_size(),))
    for block in decoder.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(decoder, mesh=mesh, reshard_after_forward=False)
    (group,) = optimizer.param_groups  # which has all parameters, in their order
    group["params"] = list(model.parameters())


def _is_on_gpu() -> bool:
    """Of this rank, by what its process group was started for."""
    return dist.get_backend() == "nccl"


def _around(name: str) -> AbstractContextManager[Any]:
    """What must be in place while this Trainer is made and trains, and while no other does: the shim, say, replaces
    functions of Composer for everybody in the process."""
    if name == HAND:  # The Trainer shards where its own FSDP2 would, and asks this instead.
        return mock.patch("composer.distributed.prepare_distributed.parallelize_composer_model", _shard_by_hand)
    if name == "ours":
        return fsdp2()
    if name == "fsdp1" and not _is_on_gpu():  # Composer asks for the current CUDA device; FSDP1 takes any.
        return mock.patch("torch.cuda.current_device", return_value=torch.device("cpu"))
    return contextlib.nullcontext()


class _Batches:
    """A dataloader that gives a batch when it is this Trainer's turn, and gives the turn back when asked for more.

    So several Trainers stand in the midst of their ``fit`` in one process, each in a thread of its own, and one of them
    runs. Processes of their own would need no shim that comes and goes, but one may be faster than its like for as long
    as it lives (where its memory lies, say), which no number of rounds evens out.
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
        """In a thread of its own, up to the first batch."""
        device = torch.cuda.current_device() if _is_on_gpu() else None

        def run() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)  # which each thread has its own of
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
    """A Trainer that stands before its first batch; called on all ranks."""
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
            precision="fp32",  # on a GPU it would be amp_fp16 by default
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
