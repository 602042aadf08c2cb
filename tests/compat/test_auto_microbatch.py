"""device_train_microbatch_size 'auto' on a sharded model trains as the run with the right size set by the user.

The Trainer refuses 'auto' without a GPU, and CPU memory cannot run out here. `on_gpu` makes it accept the CPU, and the
model raises CUDA's error where a rank runs more than ``limit`` samples at once. The test marked `gpu` runs out of
memory on a real GPU.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.callbacks import callback
from support.cases import for_each
from support.commands import BIN, SCRIPT, run_all
from support.comparing import assert_same
from support.gpus import Ranks, on_gpus
from support.on_ranks import on_ranks
from support.oracle import FSDP2
from support.trainers import Trained, build_model, eval_loader, make_trainer, on_gpu, result
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from composer_fsdp2 import prepare_fully_shard
from composer_fsdp2._torch.scaler import ShardedGradScaler
from composer_fsdp2._torch.unit import hooks_of
from composer_fsdp2.sharding.sharded import units
from composer_fsdp2.training import out_of_memory as of_engine
from composer_fsdp2.training.node import Node
from composer_fsdp2.training.out_of_memory import is_out_of_memory

pytestmark = pytest.mark.composer

TIME_LIMIT_S = 300  # a hang
BATCHES = 2  # the repeated batch, and one after it
OUT_OF_MEMORY = SCRIPT.with_name("out_of_memory.py")


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB (injected)")


class Hungry:
    """Raises in one phase of a microbatch of more than ``limit`` samples, on the ranks ``ranks``."""

    def __init__(
        self,
        model: nn.Module,
        phase: str,
        limit: int,
        ranks: tuple[int, ...],
        *,
        times: int = 1,
        in_training: bool = True,
    ) -> None:
        self.limit, self.is_here, self.model, self.in_training = limit, dist.get_rank() in ranks, model, in_training
        self.expected, self.times = times if self.is_here else 0, 0
        net = model.model
        match phase:
            case "before forward":
                model.register_forward_pre_hook(lambda module, args: self.check(args[0][0]))
            case "embedding":
                net.wte.register_forward_hook(lambda module, args, output: self.check(output))
            case "block":
                net.blocks[1].up.register_forward_hook(lambda module, args, output: self.check(output))
            case "last backward":
                net.wte.register_forward_hook(self.watch_gradient)
            case "metric":
                update = model.update_metric
                model.update_metric = lambda batch, outputs, metric: (
                    update(batch, outputs, metric),
                    self.check(outputs),
                )
            case "loss":
                loss = model.loss
                model.loss = lambda outputs, batch: self.check(outputs) or loss(outputs, batch)

    def watch_gradient(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(self.check)

    def check(self, tensor: torch.Tensor) -> None:
        if self.is_here and len(tensor) > self.limit and self.model.training == self.in_training:
            self.times += 1
            out_of_memory()


def nested_metric() -> Any:
    """A metric that contains another metric and a list."""
    import torchmetrics

    class Nested(torchmetrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.seen = torchmetrics.SumMetric(), []

        def update(self, value: float) -> None:
            self.inner.update(value)
            self.seen.append(value)

        def compute(self) -> torch.Tensor:
            return self.inner.compute() + 100 * sum(self.seen)

    return Nested()


def build() -> Any:
    """With dropout, a buffer that forward changes, and a metric in training and evaluation."""
    import torchmetrics

    model = build_model()

    def count(module: nn.Module, args: tuple[torch.Tensor]) -> None:
        module.samples += len(args[0])

    counted = nn.Sequential(model.model.blocks[0], nn.Dropout(0.25))
    counted.register_buffer("samples", torch.zeros(()))
    counted.register_forward_pre_hook(count)
    model.model.blocks[0] = counted
    metric = {"mean": torchmetrics.MeanMetric(), "samples": torchmetrics.SumMetric(), "nested": nested_metric()}
    model.train_metrics, model.val_metrics = metric, {n: m.clone() for n, m in metric.items()}
    model.get_metrics = lambda is_train=False: model.train_metrics if is_train else model.val_metrics

    def update_metric(batch: Any, outputs: torch.Tensor, metric: Any) -> None:
        metric.update(outputs.detach().mean() if isinstance(metric, torchmetrics.MeanMetric) else len(outputs))

    model.update_metric = update_metric
    return model


def run(
    microbatch: int | str,
    config: Any,
    hungry: dict[str, Any] | None = None,
    *,
    fp16: bool = False,
    limits: dict[int, int] | None = None,
    callbacks: tuple[Any, ...] = (),
    **options: Any,
) -> tuple[Trained, Any, list[int]]:
    """The results of a run, its closed Trainer, and the microbatch size at the end of each batch.

    ``limits`` maps a batch to the new limit from this batch on.
    """
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    sizes: list[int] = []

    def batch_start(state: Any) -> None:
        if limits and appetite:
            appetite.limit = limits.get(int(state.timestamp.batch), appetite.limit)

    watch = callback(batch_start=batch_start, batch_end=lambda state: sizes.append(state.device_train_microbatch_size))
    unshard = FlatParamHandle.unshard
    with FSDP2(), on_gpu():
        model = build()
        appetite = Hungry(model, **hungry) if hungry else None
        trainer = make_trainer(config, model=model, microbatch=microbatch, callbacks=[watch, *callbacks], **options)
        if fp16:
            use_fp16(trainer)
        trainer.fit()
        trained = result(trainer)
        trainer.close()
        if appetite is not None:
            assert appetite.times == appetite.expected, f"{hungry}: {appetite.times}"
    assert FlatParamHandle.unshard is unshard, "FSDP1 is left patched, for the next Trainer of this process"
    return trained, trainer, sizes


def use_fp16(trainer: Any) -> None:
    """Sets the state of a Trainer with precision 'amp_fp16' on a GPU: a scaler, which all-reduces overflows."""
    from composer.core import Precision

    trainer.state._precision = Precision.AMP_FP16
    trainer.state.scaler = ShardedGradScaler(device="cpu")


def left_by(trained: Trained, trainer: Any, sizes: list[int]) -> dict[str, Any]:
    state = trainer.state
    return {
        "run": trained,
        "size": sizes[-1],
        "buffers": {name: value.clone() for name, value in state.model.named_buffers() if "metric" not in name},
        "train metrics": {name: metric.compute().item() for name, metric in state.train_metrics.items()},
        "random": torch.rand(3),
    }


# The ranks that run out of memory; one alone leaves the others waiting.
PHASES: dict[str, tuple[int, ...]] = {
    "before forward": (0,), "embedding": (1,), "block": (0, 1), "loss": (0,),
    "last backward": (0, 1),
}  # fmt: skip


@on_ranks(2, timeout_s=TIME_LIMIT_S)
def test_the_run_is_the_one_with_the_smaller_microbatch():
    """Bit for bit: a user who finds the size in a short run trains the long one with it."""
    expected = left_by(*run(2, {}, batches=BATCHES))

    def check(phase: str, ranks: tuple[int, ...]) -> None:
        found = run("auto", {}, {"phase": phase, "limit": 2, "ranks": ranks}, batches=BATCHES)
        assert found[1].state.auto_microbatching
        assert_same(left_by(*found), expected)

    for_each(check, {phase: (phase, ranks) for phase, ranks in PHASES.items()})


@on_ranks(2, timeout_s=TIME_LIMIT_S)
def test_votes_go_on_for_as_long_after_each_halving():
    """Three batches, as in Composer's hooks: one rank runs out of memory in the third batch after a halving, and all
    halve."""
    hungry = {"phase": "block", "limit": 4, "ranks": (1,), "times": 2}
    *_, sizes = run("auto", {}, hungry, limits={1: 2, 4: 1}, batches=6, dist_timeout=60)
    assert sizes == [4, 2, 2, 2, 1, 1], sizes


@on_ranks(2, timeout_s=TIME_LIMIT_S)
def test_however_it_is_sharded():
    """With each sharding, and with FSDP2Config, for which Composer refuses 'auto'; halved twice, to one sample."""
    from composer.utils import FSDP2Config, ParallelismConfig

    hungry = {"phase": "block", "limit": 1, "ranks": (1,), "times": 2}
    configs: dict[str, tuple[Any, str]] = {
        "NO_SHARD": ({"sharding_strategy": "NO_SHARD"}, "sgd"),
        "last, recomputed": (
            {"gradient_sync": "last", "reshard_after_backward": False, "activation_checkpointing": True},
            "decoupled_adamw",
        ),
        "FSDP2Config": (ParallelismConfig(fsdp2=FSDP2Config()), "decoupled_adamw"),
    }

    def check(config: Any, optimizer: str) -> None:
        options = {"optimizer": optimizer, "clip": ("norm", 0.5), "batches": BATCHES}
        assert_same(left_by(*run("auto", config, hungry, **options)), left_by(*run(1, config, **options)))

    for_each(check, configs)


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@on_ranks(2, timeout_s=TIME_LIMIT_S)
def test_out_of_memory_before_the_trainers_own_reductions():
    """When one rank ran out of memory between the last vote and an all-reduce of the Trainer or of fp16's scaler, the
    others waited in that all-reduce."""
    from composer.devices import DeviceCPU

    counts, unscales = DeviceCPU.tensor_to_device, ShardedGradScaler._unscale_grads_
    times: list[int] = []

    def fail_once() -> None:
        if times and dist.get_rank() == 1:
            times.pop()
            out_of_memory()

    def count(self: Any, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0 and sys._getframe(1).f_code.co_name == "_train_microbatches":
            fail_once()
        return counts(self, tensor)

    def unscale(self: Any, *args: Any, **kwargs: Any) -> Any:
        fail_once()
        return unscales(self, *args, **kwargs)

    expected = {fp16: left_by(*run(2, {}, fp16=fp16, batches=BATCHES)) for fp16 in (False, True)}

    def check(patch: tuple[Any, str, Any] | None, hungry: dict[str, Any] | None, fp16: bool) -> None:
        times[:] = [1]
        with mock.patch.object(*patch) if patch else contextlib.nullcontext():
            found = left_by(*run("auto", {}, hungry, fp16=fp16, batches=BATCHES, dist_timeout=60))
        assert patch is None or dist.get_rank() == 0 or not times
        assert_same(found, expected[fp16])

    of_one = {"limit": 2, "ranks": (1,)}
    for_each(
        check,
        {
            "the number of samples": ((DeviceCPU, "tensor_to_device", count), None, False),
            "overflows": ((ShardedGradScaler, "_unscale_grads_", unscale), None, True),
            "fp16, the last backward": (None, of_one | {"phase": "last backward"}, True),
            # The training metrics run last before the scaler, with the model in evaluation mode.
            "fp16, metrics": (None, of_one | {"phase": "metric", "in_training": False}, True),
        },
    )


# --- an allocator that hardly finds memory


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@on_ranks(2, timeout_s=TIME_LIMIT_S)
def test_an_allocator_that_tries_again_and_again():
    """The next batch is halved. The optimizer has already stepped for this one, so its size stays as its callbacks
    expect."""
    from composer.trainer import trainer as composer_trainer

    from composer_fsdp2.compat import auto_microbatch

    sizes: list[int] = []

    def look(state: Any) -> None:
        assert hasattr(state, "loss") and hasattr(state, "outputs")
        assert any(p.grad.full_tensor().norm() > 0 for p in state.model.parameters() if p.grad is not None)
        sizes.append(state.device_train_microbatch_size)

    # Two consecutive batches with retries, as a GPU's allocator counts them.
    counts = [1, 2, 0, 0, 0, 0]
    with (
        mock.patch.object(auto_microbatch, "_has_allocator", return_value=True),
        mock.patch.object(composer_trainer, "_update_num_consecutive_thrashes", side_effect=counts),
    ):
        run("auto", {}, None, fp16=True, callbacks=(callback(batch_end=look),))
    assert sizes == [4, 2, 2, 2], sizes  # callbacks of the second batch already see the next batch's size


# --- evaluation


def evaluated(microbatch: int | str, hungry: dict[str, Any] | None) -> dict[str, Any]:
    from composer.core import Evaluator

    with FSDP2(), on_gpu():
        model = build()
        trainer = make_trainer({}, model=model, batches=1)
        trainer.fit()
        appetite = Hungry(model, **hungry) if hungry else None
        evaluator = Evaluator(
            label="eval",
            dataloader=eval_loader(),
            device_eval_microbatch_size=microbatch,
            metric_names=["mean", "samples", "nested"],
        )
        torch.manual_seed(5)
        if hungry and hungry["limit"] == 0:
            with pytest.raises(RuntimeError, match="memory"):
                trainer.eval(evaluator)
            appetite.limit = 100
            evaluator.device_eval_microbatch_size, evaluator.auto_microbatching = 2, False
        trainer.eval(evaluator)
        metrics = {name: metric.compute().item() for name, metric in trainer.state.eval_metrics["eval"].items()}
        buffers = {name: value.clone() for name, value in model.named_buffers() if "metric" not in name}
        trainer.fit(duration="1ba")  # training continues
        trained = result(trainer)
        trainer.close()
    if appetite is not None:
        assert appetite.times == appetite.expected, f"{hungry}: {appetite.times}"
    return {"metrics": metrics, "buffers": buffers, "size": evaluator.device_eval_microbatch_size, "run": trained}


@on_ranks(2, timeout_s=TIME_LIMIT_S)
def test_evaluation():
    """A repeated evaluation batch counts once, and training continues unchanged, also after an evaluation that failed
    and whose error the script caught."""
    expected = evaluated(2, None)

    def check(phase: str, ranks: tuple[int, ...]) -> None:
        assert_same(evaluated("auto", {"phase": phase, "limit": 2, "ranks": ranks, "in_training": False}), expected)

    for_each(check, {"embedding": ("embedding", (0,)), "block": ("block", (1,)), "metric": ("metric", (0, 1))})
    hungry = {"phase": "metric", "limit": 0, "in_training": False}
    ended = evaluated(2, {**hungry, "ranks": (0, 1), "times": 1})  # with a fixed size: an ordinary error
    found = evaluated("auto", {**hungry, "ranks": (1,), "times": 3})
    del found["buffers"], ended["buffers"]  # buffers that count attempts
    assert_same(found, ended, "not even one sample")


# --- steps that cannot be repeated


class HungryStep(torch.optim.SGD):
    """Adam's first step allocates its state."""

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        if dist.get_rank() == 1:
            out_of_memory()
        super().step()
        return loss


@on_ranks(2, timeout_s=TIME_LIMIT_S, fresh=True)
def test_errors_come_on_every_rank():
    """If one sample does not fit, or the optimizer has begun its step, the rank raises at once. The others end with it,
    or, as here where its process continues, at the time-out."""
    with pytest.raises(RuntimeError, match="internal microbatch of size 1"):
        run("auto", {}, {"phase": "block", "limit": 0, "ranks": (1,)})
    assert _fsdp_collectives.dist is dist, "a script that goes on by itself would wait in votes"
    with FSDP2(), on_gpu():
        model = build()
        optimizer = HungryStep(model.parameters(), lr=0.1)
        trainer = make_trainer({}, model=model, microbatch="auto", optimizer=optimizer, dist_timeout=3)
        words = ("(?s)(?=.*did not meet within).*rank 1 has not come", "out of memory after backward")
        with pytest.raises(RuntimeError, match=words[dist.get_rank()]):
            trainer.fit()
        trainer.close()


# --- after the votes


@on_ranks(2, timeout_s=TIME_LIMIT_S)
def test_votes_end():
    """After three batches without running out of memory, a step has no votes and no copies of buffers. An evaluation
    starts the votes again."""
    from composer_fsdp2.compat import auto_microbatch

    # For each batch: the votes' messages, whether the units have no votes, and the copies of buffers and metrics.
    votes: list[tuple[int, bool, int]] = []

    def count(state: Any) -> None:
        num_copies = buffers.call_count + metrics.call_count
        is_off = not any(hooks_of(unit).watches for unit in units(state.model).values())
        votes.append((send.call_count, is_off, num_copies))
        for each in (send, buffers, metrics):
            each.reset_mock()

    with (
        mock.patch.object(Node, "send", autospec=True, side_effect=Node.send) as send,
        mock.patch.object(of_engine, "own_buffers", wraps=of_engine.own_buffers) as buffers,
        mock.patch.object(auto_microbatch, "_values", wraps=auto_microbatch._values) as metrics,
    ):
        run("auto", {}, None, batches=6, callbacks=(callback(batch_end=count),), eval_interval="5ba")
    counts, is_off, copies = zip(*votes, strict=True)
    assert all(counts[number] > 10 for number in (0, 1, 2, 5)), counts
    assert counts[3:5] == (0, 0), counts
    assert is_off == (False, False, True, True, True, False), is_off
    assert [bool(number) for number in copies] == [True, True, True, False, False, True], copies


@on_ranks(2, timeout_s=TIME_LIMIT_S)
def test_out_of_memory_after_the_votes():
    """A rank that waited for a vote without the other ranks would block the whole job until its time-out."""
    from composer import Evaluator

    hungry = {"phase": "block", "limit": 4, "ranks": (0, 1)}
    with pytest.raises(RuntimeError, match="Set device_train_microbatch_size below 4"):
        run("auto", {}, hungry, limits={3: 2}, batches=6)

    def later(state: Any) -> None:
        appetite.limit = 2 if int(state.eval_timestamp.batch) == 3 else 4

    with FSDP2(), on_gpu():
        model = build()
        appetite = Hungry(model, **hungry, in_training=False)
        trainer = make_trainer({}, model=model, callbacks=[callback(eval_batch_start=later)])
        evaluator = Evaluator(
            label="eval", dataloader=eval_loader(32), device_eval_microbatch_size="auto", metric_names=[]
        )
        with pytest.raises(RuntimeError, match="Set device_eval_microbatch_size below 4"):
            trainer.eval(evaluator)
        trainer.close()


ERRORS = (
    "CUDA out of memory. Tried to allocate 20.00 MiB",
    "CUDA error: out of memory",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    "CUDA error: an illegal memory access was encountered",
)


@on_ranks(1)
def test_errors_are_those_that_composer_repeats_for():
    """An error that FSDP1 repeated would end one rank and leave the others waiting."""
    from composer.trainer.trainer import _is_cuda_oom

    for is_repeated in (is_out_of_memory, _is_cuda_oom):
        assert [is_repeated(RuntimeError(text)) for text in ERRORS] == [True, True, True, False], is_repeated


# --- a real GPU


@on_gpus(1, 2, rehearsal=0)
@pytest.mark.parametrize(("precision", "gib", "rtol"), [("fp32", 1.5, 1e-6), ("amp_fp16", 0.9, 1e-3)])
def test_a_gpu_runs_out_of_memory(ranks: Ranks, tmp_path: Path, precision: str, gib: float, rtol: float):
    """16 samples need about 2.5 GiB of activations in fp32: the run ends with a size that fits, and with the losses of
    that size. fp16 uses the Trainer's scaler. With one GPU there is one rank, and no vote communicates."""
    command = [BIN / "composer", "-n", ranks.number, "-m", "composer_fsdp2", "run", OUT_OF_MEMORY]
    auto = run_all({"auto": [*command, "auto", str(gib), precision]}, tmp_path)["auto"]
    assert auto.code == 0, auto.err
    size = auto.last["size"]
    assert 1 <= size < 16
    fixed = run_all({"fixed": [*command, str(size), str(gib), precision]}, tmp_path)["fixed"]
    assert fixed.code == 0, fixed.err
    torch.testing.assert_close(auto.last["losses"], fixed.last["losses"], rtol=rtol, atol=0)
    # MemoryMonitor logs the memory of this process for each batch.
    assert len(auto.last["reserved_gb"]) == 4
    assert all(0 < reserved <= gib * 2**30 / 1e9 * 1.01 for reserved in auto.last["reserved_gb"])


# --- freeing the model


@on_ranks(2, timeout_s=TIME_LIMIT_S)
def test_a_model_that_was_trained_is_freed():
    """Without this, a sweep in one process would not free the models of earlier runs, with their shards on the GPU."""
    from composer_fsdp2.compat.auto_microbatch import _recovery_of

    model = build_model()
    prepare_fully_shard(model, None, {"collective_guard": 30.0}, device="cpu", precision="fp32")
    recovery = _recovery_of(SimpleNamespace(model=model))  # the only field of State that it reads
    assert recovery is _recovery_of(SimpleNamespace(model=model))
    alive = weakref.ref(model)
    del model, recovery
    gc.collect()
    assert alive() is None
