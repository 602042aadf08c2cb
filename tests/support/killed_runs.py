"""Runs of two ranks that are killed while saving, and restarted.

``main`` runs in its own process and forks the ranks, so that restarts need no imports. It prints one line of JSON after
each kill.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from composer import Callback
from composer.utils import get_composer_env_dict
from support.callbacks import callback
from support.examples import IS_THOROUGH
from support.oracle import FSDP2
from support.ranks import name_own_file
from support.saved import read
from support.trainers import make_trainer
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from composer_fsdp2.checkpoint.save import monolithic

NUM_RANKS = 2
WAIT_S = 120
INTERVAL, LAST = 3, 12  # of runs killed in the middle
# The kind of checkpoint, and whether it is saved in the background.
AT_RANDOM, IN_THE_MIDDLE = [("full", True), ("sharded", False)], [("full", False), ("sharded", True)]


@dataclass(frozen=True)
class Run:
    """One start of a run; the next one in the same folder resumes."""

    folder: Path
    number: int
    kind: str
    is_async: bool
    batches: int
    interval: int

    @property
    def saved(self) -> Path:
        return self.folder / "saved"

    @property
    def link(self) -> Path:
        return self.saved / "latest-rank0.pt"

    @property
    def steps_file(self) -> Path:
        return self.folder / f"steps-{self.number}"

    def steps(self) -> list[int]:
        """The last batch before this start, and the completed ones."""
        return [int(line) for line in self.steps_file.read_text().split()] if self.steps_file.exists() else []


def steps_of(run: Run) -> Callback:
    """Rank 0 records each step."""

    def note(state: Any) -> None:
        if dist.get_rank() == 0:
            with run.steps_file.open("a") as file:
                file.write(f"{state.timestamp.batch.value}\n")

    return callback(fit_start=note, batch_end=note)


@contextlib.contextmanager
def writers_call(before: Callable[[], None]) -> Iterator[None]:
    """``before`` is called before each write of a file's piece, and of a directory's last file."""
    write_all, finish = monolithic.write_all, FileSystemWriter.finish

    def after(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            before()
            return function(*args, **kwargs)

        return call

    with (
        mock.patch.object(monolithic, "write_all", after(write_all)),
        mock.patch.object(FileSystemWriter, "finish", after(finish)),
    ):
        yield


def train(run: Run, rank: int, before: Callable[[], None]) -> None:
    warnings.simplefilter("ignore")
    name_own_file(rank)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), NODE_RANK="0")
    os.environ.update(WORLD_SIZE=str(NUM_RANKS), LOCAL_WORLD_SIZE=str(NUM_RANKS))
    store = dist.FileStore(f"{run.steps_file}.store", NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    with writers_call(before):
        trainer = make_trainer(
            {"state_dict_type": run.kind, "async_save": run.is_async},
            batches=run.batches,
            optimizer="adamw",
            save_folder=str(run.saved),
            save_interval=f"{run.interval}ba",
            save_num_checkpoints_to_keep=2,
            # A kill between writing a file and its link leaves a file that Composer takes for another run's.
            save_overwrite=run.interval != INTERVAL,
            autoresume=True,
            run_name="killed",
            callbacks=[steps_of(run)],
        )
        trainer.fit()


def start(run: Run, before: Callable[[], None]) -> list[int]:
    """Starts the ranks; returns their process ids."""
    ranks = []
    for rank in range(NUM_RANKS):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                train(run, rank, before)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        ranks.append(pid)
    return ranks


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(1e-3)


def kill(ranks: list[int]) -> None:
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)


def report(run: Run, ranks: list[int]) -> None:
    """Wait until the ranks end, and print the state of their checkpoints."""
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    latest = None
    if os.path.lexists(run.link):
        latest = read(run.link)["state"]["timestamp"]["Timestamp"]["batch"]  # reads every tensor
    unfinished = [
        path.name
        for path in run.saved.iterdir()
        if path.name.startswith(".") or (path.is_dir() and not (path / ".metadata").exists())
    ]
    began, *steps = run.steps()
    text = {
        "kind": f"{run.kind}, async {run.is_async}",
        "codes": codes,
        "began": began,
        "reached": steps[-1] if steps else began,
        "latest": latest,
        "link": os.readlink(run.link) if latest is not None else None,
        "unfinished": sorted(unfinished),
    }
    print(json.dumps(text), flush=True)


def at_random_points(folder: Path, num_rounds: int) -> None:
    choose = random.Random(num_rounds)
    kinds = [*AT_RANDOM, *(IN_THE_MIDDLE if IS_THOROUGH else [])]
    for number in range(num_rounds):
        kind, is_async = kinds[number % len(kinds)]
        path = folder / f"{kind}-{is_async}"
        path.mkdir(exist_ok=True)
        run = Run(path, number, kind, is_async, batches=10**6, interval=1)
        ranks = start(run, lambda: time.sleep(2e-4))
        num_steps = choose.randint(2, 4)
        wait_until(lambda run=run, num_steps=num_steps: len(run.steps()) > num_steps, "steps")
        began = time.monotonic()
        wait_until(lambda run=run, num_steps=num_steps: len(run.steps()) > num_steps + 1, "another step")
        time.sleep(choose.uniform(0, 2 * (time.monotonic() - began)))  # within the next two steps and their saves
        kill(ranks)
        report(run, ranks)


def in_the_middle(folder: Path, kind: str, is_async: bool) -> None:
    folder.mkdir()
    run = Run(folder, 0, kind, is_async, batches=LAST, interval=INTERVAL)
    held, pieces = folder / "held", []

    def hold() -> None:
        """Pause in rank 0's third piece of a file, or before its ``.metadata``, once an earlier checkpoint exists."""
        if run.link.exists():
            pieces.append(None)
            if kind == "sharded" or len(pieces) == 3:
                held.touch()
                time.sleep(WAIT_S)

    ranks = start(run, hold)
    wait_until(held.exists, "the middle of the second checkpoint")
    if is_async:  # training continues
        wait_until(lambda: run.steps()[-1] >= 2 * INTERVAL + 2, "steps beside the writer")
    kill(ranks)
    report(run, ranks)
    again = Run(folder, 1, kind, is_async, batches=LAST, interval=INTERVAL)
    report(again, start(again, lambda: None))


def main(folder: Path, num_rounds: int | None) -> None:
    """Run ``num_rounds`` runs, each killed at a random point; or each kind of saving, killed in the second
    checkpoint."""
    get_composer_env_dict()  # queries the CPU's name, which takes half a second
    with FSDP2():
        if num_rounds is None:
            for kind, is_async in [*IN_THE_MIDDLE, *(AT_RANDOM if IS_THOROUGH else [])]:
                in_the_middle(folder / f"{kind}-{is_async}", kind, is_async)
        else:
            at_random_points(folder, num_rounds)
