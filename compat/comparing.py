"""One rank of a run of ``compare``: run the user's unmodified file, and record it from the first ``fit`` to the last
compared batch.

The comparison overrides some arguments of the Trainer. Each is recorded as an ``Override`` with the reason, for the
report.
"""

import contextlib
import functools
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from composer import Trainer
from composer.callbacks import CheckpointSaver
from composer.core import Engine, Event, State
from composer.utils import dist, ensure_tuple, reproducibility
from torch import nn
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2._torch.private_names import FSDP1Wrapper
from composer_fsdp2._torch.replaced import replaced
from composer_fsdp2.comparing.counted_batch import Predict
from composer_fsdp2.comparing.full_tensors import full_tensors, gradient_squares, settings
from composer_fsdp2.comparing.job import Engine as Sharding
from composer_fsdp2.comparing.job import Job
from composer_fsdp2.comparing.reference import Reference, write_reference
from composer_fsdp2.comparing.run_record import BatchRecord, Override, Prediction, RunRecord, Settings, TensorDistance
from composer_fsdp2.config.text import short
from composer_fsdp2.config.value import json_text
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.parallel.contents import batch_values, digest_of
from composer_fsdp2.sharding.agree import all_gather_object
from composer_fsdp2.training.run import run_of

from .counted_batch import Counting
from .scripts import run_file
from .seams import Seam, replace, restore

_COUNTED_BATCH = 2  # index from 1; the first batch allocates memory that later ones reuse
_NOT_ON_THE_CPU = (
    "the CPU was passed to FSDP1 as the current CUDA device, and meta tensors were initialised there: without a GPU "
    "it raises otherwise"
)


class _Compared(BaseException):
    """Raised after the last compared batch, to skip the rest of the script."""


def run_job(job: Job, predict: Predict) -> None:
    """Run the user's file until the last compared batch. Rank 0 writes the record of the run.

    Args:
        job: The file, the options, and where to write the record.
        predict: Predicts the step's memory; called on rank 0 of the FSDP2 run after the last batch.
    Raises:
        ConfigError: the file ended without a call to ``Trainer.fit``.

    Called on all ranks, within ``fsdp2()`` if the job uses FSDP2.
    """
    watch = _Watch(job, predict)
    _seed(job.options.seed)
    around = contextlib.nullcontext() if job.engine is Sharding.FSDP2 else _fsdp1(watch)
    with around, watch.over_trainers(), contextlib.suppress(_Compared):
        _train(job)
    if not watch.is_done:
        raise ConfigError(f"{job.options.file} ended without Trainer.fit; there is nothing to compare")


def _train(job: Job) -> None:
    if not job.options.is_yaml:
        run_file(job.options.file, job.options.arguments)
    else:
        from llmfoundry.command_utils import train_from_yaml

        train_from_yaml(job.options.file, list(job.options.arguments))


@contextlib.contextmanager
def _fsdp1(watch: "_Watch") -> Iterator[None]:
    """Run Composer with FSDP1 in the block.

    Composer queries the current GPU. Without one, ``torch.cuda.current_device`` and ``to_empty`` are patched to use the
    CPU.
    """
    if torch.cuda.is_available():
        yield
        return
    to_empty = nn.Module.to_empty

    @functools.wraps(to_empty)
    def to_empty_on_cpu(self: nn.Module, *, device: Any, recurse: bool = True) -> nn.Module:
        return to_empty(self, device="cpu", recurse=recurse)

    watch.notes.append(_NOT_ON_THE_CPU)
    with (
        replaced(torch.cuda, "current_device", lambda: torch.device("cpu")),
        replaced(nn.Module, "to_empty", to_empty_on_cpu),
    ):
        yield


def _seed(seed: int) -> None:
    random.seed(seed)
    reproducibility.seed_all(seed)


class _Watch:
    """Records one rank's run."""

    def __init__(self, job: Job, predict: Predict) -> None:
        self.job, self.options = job, job.options
        self._predict = predict
        self.notes: list[str] = []
        self.is_done = False
        self._overrides: dict[str, Override] = {}
        self._state: State | None = None
        self._start: tuple[TensorDistance, ...] = ()
        self._settings: tuple[Settings, ...] = ()
        self._learning_rates = 0.0
        self._num_epochs = 0
        self._first_batch, self._first_sample = 1, 0
        self._batches: list[dict[str, Any]] = []
        self._batch: dict[str, Any] = {}
        self._counting = Counting()
        self._began = self._aside = 0.0

    @property
    def _counts_state(self) -> bool:
        return self.job.engine is Sharding.FSDP2 and dist.get_global_rank() == 0

    # --- replacements of Composer's methods

    @contextlib.contextmanager
    def over_trainers(self) -> Iterator[None]:
        """In the block, apply the comparison's settings to every new Trainer, and record the first one that calls
        ``fit``."""
        # Wraps the seams of compat, which read the arguments by the original's signature.
        rows: tuple[tuple[str, str, Callable[..., Any]], ...] = (
            ("composer.trainer.trainer", "Trainer.__init__", self._init),
            ("composer.trainer.trainer", "Trainer.fit", self._fit),
            ("composer.trainer.trainer", "Trainer.eval", self._eval),
            ("composer.core.engine", "Engine.run_event", self._run_event),
            ("composer.core.state", "State._apply_fsdp", self._apply_fsdp),
        )
        why = "a compared run is watched"
        replacements = replace([Seam(module=module, name=name, replacement=own, why=why) for module, name, own in rows])
        try:
            yield
        finally:
            restore(replacements)

    def _init(self, original: Callable[..., Any], trainer: Trainer, **given: Any) -> None:
        original(trainer, **{**given, **self._replacements(given)})

    def _apply_fsdp(self, original: Callable[..., Any], state: State) -> None:
        if self._counts_state:
            self._counting.note_unsharded(state.model)
        original(state)

    def _eval(self, original: Callable[..., Any], trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._note("Trainer.eval", "called", "left out", "it changes no weights")

    def _fit(self, original: Callable[..., Any], trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if self._state is None:
            self._state = trainer.state
            if trainer.state.evaluators:
                self._note("eval_interval", "evaluations", "none", "they change no weights")
            for evaluator in trainer.state.evaluators:
                evaluator.eval_interval = _never
            original(trainer, *args, **kwargs)
            self._finish()  # the run has fewer batches than requested
        raise _Compared

    def _run_event(self, original: Callable[..., Any], engine: Engine, event: Event | str) -> Any:
        event = Event(event)
        if self._state is None or engine.state is not self._state or self.is_done:
            return original(engine, event)
        if event is Event.AFTER_TRAIN_BATCH:
            self._measure_gradients(self._state)
        result = original(engine, event)
        match event:
            case Event.FIT_START:
                self._begin(self._state)
            case Event.EPOCH_START:
                self._begin_epoch()
            case Event.AFTER_DATALOADER:
                self._batch = {"digest": digest_of(batch_values(self._state.batch)).hex()}
            case Event.BEFORE_FORWARD if self._batch["is_counted"]:
                self._counting.note_microbatch(self._state.batch)
            case Event.BATCH_START:
                self._begin_batch()
            case Event.BATCH_END:
                self._end_batch(self._state)
        return result

    # --- settings

    def _replacements(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of Trainer that the comparison replaces."""
        used: dict[str, Any] = {}

        def use(name: str, value: Any, why: str) -> None:
            if given.get(name) != value:
                self._note(name, short(given.get(name)), short(value), why)
            used[name] = value

        for name, value, why in _SETTINGS:
            if given.get(name) and given[name] != value:
                use(name, value, why)
        if self.options.load_path:
            use("load_path", self.options.load_path, "--load-path")
        if given.get("seed") is None:
            use("seed", self.options.seed, "each run would draw another")
        if given.get("device_train_microbatch_size") == "auto":
            use("device_train_microbatch_size", 1, "which size is found depends on the memory that each run leaves")
        if self.options.is_deterministic and torch.cuda.is_available() and not given.get("deterministic_mode"):
            use("deterministic_mode", True, "kernels that add in any order compute another result in each run")
        callbacks = ensure_tuple(given.get("callbacks"))
        if any(_saves(callback) for callback in callbacks):
            names = ", ".join(type(callback).__name__ for callback in callbacks if _saves(callback))
            self._note("callbacks", names, "left out", "the comparison saves nothing")
            used["callbacks"] = [callback for callback in callbacks if not _saves(callback)]
        return used

    def _note(self, name: str, given: str, used: str, why: str) -> None:
        self._overrides[name] = Override(name=name, given=given, used=used, why=why)

    # --- measurements

    def _begin(self, state: State) -> None:
        """Seed this rank and record the initial state, before the first batch. Called on all ranks."""
        _check_sharded(state.model, self.job)
        # Without buffers: FSDP1 casts them to buffer_dtype in the first forward only.
        self._start = self._distances("start", has_buffers=False)
        self._settings = settings(state.model, state.optimizers)
        self._first_batch, self._first_sample = state.timestamp.batch.value + 1, state.timestamp.sample.value
        _seed(self.options.seed + dist.get_global_rank())
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def _begin_epoch(self) -> None:
        """Raise ConfigError if the dataloader is empty, because a Trainer would start epoch after epoch forever."""
        self._num_epochs += 1
        if self._num_epochs > 2 and not self._batches:
            raise ConfigError(
                f"{self.options.file} trained no batch in two epochs: its loader is empty, for example because it has "
                f"fewer samples than {dist.get_world_size()} ranks take; give it more, or a smaller -n"
            )

    def _begin_batch(self) -> None:
        self._batch |= {"is_counted": len(self._batches) + 1 == min(_COUNTED_BATCH, self.options.batches)}
        _synchronize()
        self._began, self._aside = time.perf_counter(), 0.0
        if self._batch["is_counted"]:
            assert self._state is not None
            self._counting.begin(self._state, counts_state=self._counts_state)

    def _measure_gradients(self, state: State) -> None:
        """Called when all gradients are unscaled and not yet clipped."""
        if self._batch["is_counted"]:
            self._counting.end_backward()
        _synchronize()
        began = time.perf_counter()
        self._batch["squares"] = gradient_squares(state.model)
        self._learning_rates += max((float(g["lr"]) for o in state.optimizers for g in o.param_groups), default=0.0)
        self._batch["memory_bytes"] = _memory_bytes()
        self._aside = time.perf_counter() - began

    def _end_batch(self, state: State) -> None:
        if self._batch["is_counted"]:
            self._counting.end(state.model)
        _synchronize()
        loss = (getattr(state, "total_loss_dict", None) or {}).get("loss/train/total", math.nan)
        self._batch |= {
            "seconds": time.perf_counter() - self._began - self._aside,
            "loss": float(loss),
            "samples": int(state.timestamp.sample.value),
            "memory_bytes": max(self._batch.get("memory_bytes", 0), _memory_bytes()),
        }
        self._batches.append(self._batch)
        if dist.get_global_rank() == 0:
            with self.job.progress_path.open("a") as progress:
                progress.write(f"{len(self._batches)} {loss}\n")
        if len(self._batches) == self.options.batches:
            self._finish()
            raise _Compared

    def _finish(self) -> None:
        """Compare the final state, and write the record. Called on all ranks."""
        state = self._state
        assert state is not None
        if not self._batches:
            raise ConfigError(
                f"{self.options.file} trained no batch: it is at batch {state.timestamp.batch.value} of max_duration "
                f"{state.max_duration}; give max_duration=... a later end"
            )
        self.is_done = True
        end = self._distances("end", learning_rates=self._learning_rates)
        of_ranks = all_gather_object(self._batches)
        if dist.get_global_rank() == 0:
            self.job.record_path.write_text(json_text(self._record(state, of_ranks, end)))
        dist.barrier()

    def _distances(
        self, when: str, *, learning_rates: float = 0.0, has_buffers: bool = True
    ) -> tuple[TensorDistance, ...]:
        """Return, on rank 0, the distances of parameters and optimizer state from the first run's, or write them as
        reference.

        Called on all ranks; all-gathers each tensor.
        """
        state = self._state
        assert state is not None
        tensors = full_tensors(state.model, state.optimizers, self.notes, has_buffers=has_buffers)
        folder, is_first = Path(self.job.reference, when), dist.get_global_rank() == 0
        if is_first and not self.job.writes_reference:
            return Reference(folder).distances(tensors, learning_rates=learning_rates)
        write_reference(folder, tensors, is_writing=is_first)
        return ()

    def _record(self, state: State, of_ranks: list[list[dict[str, Any]]], end: tuple[TensorDistance, ...]) -> RunRecord:
        run = run_of(state.model)
        on_gpu = torch.cuda.is_available()
        return RunRecord(
            title=self.job.title,
            engine=self.job.engine.value,
            device=torch.cuda.get_device_name() if on_gpu else "CPU",
            num_ranks=dist.get_world_size(),
            precision=state.precision.value,
            num_units=_num_units(state.model, self.job.engine),
            memory_is="the peak of CUDA's allocator so far"
            if on_gpu
            else "the process's own (RssAnon), with all that it has imported",
            first_batch=self._first_batch,
            batches=tuple(self._batch_record(number, of_ranks) for number in range(len(self._batches))),
            collectives=self._counting.counts,
            state_bytes=self._counting.state_bytes,
            peak_bytes=self._counting.peak_bytes,
            start=self._start,
            end=end,
            settings=self._settings,
            last_settings=settings(state.model, state.optimizers),
            overrides=tuple(self._overrides.values()),
            translation=run.report,
            findings=tuple(finding.to_json() for finding in run.findings),
            prediction=self._prediction(state),
            notes=tuple(self.notes),
        )

    def _prediction(self, state: State) -> Prediction:
        plan = run_of(state.model).plan
        if plan is None or not self._counting.num_microbatches:
            return Prediction(reason="the plan is of FSDP2" if plan is None else "no batch was counted")
        is_auto = "device_train_microbatch_size" in self._overrides
        batch = self._counting.batch(self.options, state, plan, num_ranks=dist.get_world_size(), is_auto=is_auto)
        return self._predict(batch)

    def _batch_record(self, number: int, of_ranks: list[list[dict[str, Any]]]) -> BatchRecord:
        each = [batches[number] for batches in of_ranks]
        return BatchRecord(
            batch=self._first_batch + number,
            digests=tuple(batch["digest"] for batch in each),
            loss=each[0]["loss"],
            gradient_norm=math.sqrt(sum(batch["squares"] for batch in each)),
            seconds=max(batch["seconds"] for batch in each),
            memory_bytes=max(batch["memory_bytes"] for batch in each),
            samples=each[0]["samples"] - (of_ranks[0][number - 1]["samples"] if number else self._first_sample),
            is_counted=each[0]["is_counted"],
        )


# Replaced arguments of Trainer: name, value, reason.
_SETTINGS: tuple[tuple[str, Any, str], ...] = (
    ("save_folder", None, "the comparison saves nothing"),
    ("autoresume", False, "each run begins where the first did"),
    ("loggers", None, "nothing is logged to services"),
    ("progress_bar", False, "the output is written to a file"),
    ("profiler", None, "it takes time and memory"),
)


def _never(state: State, event: Event) -> bool:
    return False


def _saves(callback: Any) -> bool:
    """Whether a callback of Composer or LLM Foundry writes checkpoints.

    Compares class names, to not import LLM Foundry.
    """
    names = {kind.__name__ for kind in type(callback).__mro__}
    return isinstance(callback, CheckpointSaver) or bool(
        names & {"HuggingFaceCheckpointer", "MonolithicCheckpointSaver"}
    )


def _check_sharded(model: nn.Module, job: Job) -> None:
    if not _num_units(model, job.engine):
        other = any(isinstance(module, FSDPModule | FSDP1Wrapper) for module in model.modules())
        raise ConfigError(
            f"{job.options.file}: on {dist.get_world_size()} ranks nothing is sharded by {job.engine.value}"
            + ("; the file uses FSDP2 itself" if other else "; it needs an fsdp_config, and at least two ranks")
        )


_UNITS: Mapping[Sharding, Any] = {Sharding.FSDP1: FSDP1Wrapper, Sharding.FSDP2: FSDPModule}


def _num_units(model: nn.Module, sharding: Sharding) -> int:
    return sum(isinstance(module, _UNITS[sharding]) for module in model.modules())


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _memory_bytes() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))
