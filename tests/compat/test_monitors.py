"""OptimizerMonitor and ActivationMonitor on a sharded model log values of the full model, under the expected names."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections import UserDict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import own_name
from support.models import Thin
from support.on_ranks import on_ranks
from support.oracle import FSDP1, FSDP2, UNSHARDED, Under
from support.references import reference
from support.trainers import build_model, build_optimizer, make_trainer, objects_of_ranks, with_child
from torch import nn

from composer_fsdp2 import prepare_fully_shard

pytestmark = pytest.mark.composer


def with_thin() -> Any:
    return with_child(Thin(13), lambda thin, x: thin(x), tied=False)


def run(
    under: Under,
    keys: dict[str, Any] | None = None,
    callback: Any = None,
    *,
    optimizer: Any = "decoupled_adamw",
    build: Callable[[], Any] = with_thin,
    ac: bool = False,
) -> dict[str, list[float]]:
    """The metrics of two batches by key, without the Trainer's own. Called on all ranks. ``optimizer`` is a name of
    ``build_optimizer`` or of Foundry, or a function of the model."""
    from composer.callbacks import OptimizerMonitor
    from composer.loggers import InMemoryLogger

    model, memory = build(), InMemoryLogger()
    if keys is not None:
        keys = keys | {"activation_checkpointing": ac}
        keys |= {"ignored_modules": [model.child]} if "ignored_modules" in keys else {}
    with under():
        trainer = make_trainer(
            keys,
            model=model,
            optimizer=made_by(optimizer, model) if isinstance(optimizer, str) else optimizer(model),
            batches=2,
            callbacks=[callback or OptimizerMonitor(batch_log_interval=2)],
            loggers=[memory],
        )
        trainer.fit()
        trainer.close()
    kinds = ("l2_norm", "activations", "layerwise_lr", "clipped_batches", "user")
    return {
        key.replace("/module.", "/"): [value for _, value in values]
        for key, values in memory.data.items()
        if key.startswith(kinds) and "/module_" not in key  # the inputs and outputs of DDP itself
    }


def made_by(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name.islower():
        return build_optimizer(name, model)
    import llmfoundry.optim

    return getattr(llmfoundry.optim, name)(model.parameters(), lr=1e-3, weight_decay=1e-4)


def assert_same_log(ours: dict[str, list[float]], theirs: dict[str, list[float]], what: str) -> None:
    assert set(ours) == set(theirs), f"{what}: {sorted(set(ours) ^ set(theirs))[:6]}"
    for key, values in theirs.items():
        assert ours[key] == pytest.approx(values, rel=2e-5, abs=1e-7), f"{what}, {key}: {ours[key]}, {values}"


# ---------------------------------------------------------------------------------------------------------------------
# Values


# For each optimizer, the sharding configuration.
VALUES: dict[str, dict[str, Any]] = {
    "sgd": {},
    "decoupled_sgdw": {"sharding_strategy": "NO_SHARD"},
    **{name: {} for name in ("decoupled_adamw", "DecoupledLionW", "DecoupledClipLion", "DecoupledAdaLRLion")},
}


@pytest.mark.foundry
@on_ranks(2, timeout_s=300)
def test_the_norms_are_the_whole_models(folder: str):
    """FSDP1 logged each rank's shard for most of these norms and counted replicas twice; DecoupledLionW raised a
    KeyError, and adaptive Lion hung."""

    def check(name: str, keys: dict[str, Any]) -> dict[str, Any]:
        logged = run(FSDP2, keys, optimizer=name)
        assert_same_log(logged, reference(run, UNSHARDED, optimizer=name), name)
        assert ("l2_norm/moment/child.row" in logged) == ("sgd" not in name)
        assert "l2_norm/grad/child.row" in logged
        return logged

    found = for_each(check, {name: (name, keys) for name, keys in VALUES.items()})
    # FSDP1's all-reduce squared it.
    assert found["DecoupledAdaLRLion"]["layerwise_lr/child.row"] == pytest.approx([1e-3])
    assert objects_of_ranks(found) == [found] * 2


@on_ranks(4, timeout_s=300)
def test_replicas_and_groups(folder: str):
    """Replicas are not counted twice; process groups that do not communicate each log the norms of their own model."""

    def check(keys: dict[str, Any]) -> None:
        ours = run(FSDP2, keys)
        if "process_group" not in keys:
            assert_same_log(ours, run(UNSHARDED), f"{keys}")
        squares = sum(v[0] ** 2 for key, v in ours.items() if key.startswith("l2_norm/grad/") and "global" not in key)
        assert ours["l2_norm/grad/global"][0] == pytest.approx(math.sqrt(squares))

    for_each(check, {f"{k}": (k,) for k in ({"data_parallel_replicate_degree": 2}, {"process_group": "set2"})})


@on_ranks(2, timeout_s=300)
def test_like_fsdp1(folder: str):
    """A dashboard shows one curve across the migration: names without wrappers, or FSDP1's with fsdp1_metric_names."""
    theirs = run(FSDP1, {}, build=build_model, ac=True)
    ours = run(FSDP2, {"fsdp1_metric_names": True}, build=build_model, ac=True)
    assert_same_log(ours, theirs, "FSDP1's names")
    plain = run(FSDP2, {}, build=build_model, ac=True)
    assert_same_log(plain, {own_name(key): value for key, value in theirs.items()}, "plain")
    assert any("_checkpoint_wrapped_module" in key for key in theirs)
    assert not any("wrapped_module" in key for key in plain)


# ---------------------------------------------------------------------------------------------------------------------
# Ignored modules


def on_rank_1_only() -> Any:
    model = with_thin()
    if dist.get_rank() == 0:
        model.forward = type(model).forward.__get__(model)
    return model


@on_ranks(2)
def test_ignored_parameters(folder: str):
    """Gradients of ignored modules differ between ranks, since FSDP does not average them, but the logged values must
    be equal. A branch that only rank 1 ran makes no rank wait, and is in rank 0's log."""
    found = [run(FSDP2, {"ignored_modules": True}, build=build) for build in (with_thin, on_rank_1_only)]
    for name in ("child.row", "child.gain"):
        assert f"l2_norm/update/{name}" in found[0]
    assert found[1]["l2_norm/grad/child.row"][0] > 0
    assert objects_of_ranks(found) == [found] * 2


# ---------------------------------------------------------------------------------------------------------------------
# Communication and errors


def monitored(
    model: nn.Module, optimizer: torch.optim.Optimizer, monitor: Any = None
) -> Callable[[], dict[str, float]]:
    """Runs OptimizerMonitor at the end of a batch and returns its metrics; all calls share one monitor."""
    from composer.callbacks import OptimizerMonitor

    from composer_fsdp2.compat.monitors import batch_end

    monitor = monitor or OptimizerMonitor(batch_log_interval=1)
    state: Any = SimpleNamespace(
        model=model, optimizers=[optimizer], timestamp=SimpleNamespace(batch=SimpleNamespace(value=1)), fsdp_config=None
    )

    def log() -> dict[str, float]:
        logged: dict[str, float] = {}
        batch_end(OptimizerMonitor.batch_end, monitor, state, SimpleNamespace(log_metrics=logged.update))
        return logged

    return log


def check_changes(config: dict[str, Any], *expected: int) -> None:
    """Checks the number of all-reduces of a batch, of the next one, of one with other metrics on all ranks, and of the
    one after."""
    from composer.optim import DecoupledAdamW

    from composer_fsdp2.compat import monitors
    from composer_fsdp2.errors import ComposerFSDP2Error

    is_rank_1 = dist.get_rank() == 1
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 3, bias=False))
    optimizer = DecoupledAdamW(model.parameters(), lr=1e-3)
    prepare_fully_shard(model, optimizer, dict(config), "fp32", torch.device("cpu"))
    first, second = model.parameters()
    log = monitored(model, optimizer)

    def num_reductions(*, without: nn.Parameter | None = None, is_alike: bool = True) -> int:
        optimizer.zero_grad()
        model(torch.rand(2, 3)).sum().backward()
        optimizer.step()
        if without is not None:
            without.grad = None
        with contextlib.ExitStack() as stack:
            for name in OTHERS if is_alike else ():
                stack.enter_context(mock.patch.object(dist, name, side_effect=NotImplementedError))
            all_reduce = stack.enter_context(mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce))
            logged = log()
        trained = {name: each for name, each in model.named_parameters() if each.grad is not None}
        for name, parameter in trained.items():
            norm = parameter.grad.full_tensor().norm().item()
            assert logged[f"l2_norm/grad/{name}"] == pytest.approx(norm), f"{name}, without {without}"
        assert len(logged) == 4 * len(trained) + 1, sorted(logged)
        return all_reduce.call_count

    counts = [num_reductions(without=each) for each in (None, None, first, first)]
    with pytest.raises(ComposerFSDP2Error, match="ranks 0 and 1 decided differently"):
        num_reductions(without=second if is_rank_1 else first, is_alike=False)
    assert num_reductions(without=first) == counts[3], "they no longer know what they agreed on"
    with (
        mock.patch.object(monitors, "_report", side_effect=ArithmeticError("no metric")) if is_rank_1 else NOTHING,
        pytest.raises(ArithmeticError if is_rank_1 else ComposerFSDP2Error, match="no metric"),
    ):
        num_reductions(is_alike=False)
    assert num_reductions() == counts[2]
    assert counts == [*expected]


NOTHING: Any = contextlib.nullcontext()
OTHERS = ("all_gather_object", "broadcast")  # for ranks with different metrics, objects are gathered


@on_ranks(4, timeout_s=300)
def test_metrics_that_change(folder: str):
    """One all-reduce, whatever the model's size. Ranks compare the names of their metrics only if a rank has a new one,
    which saves a collective and a device synchronization. Metrics that differ or fail are an error on all ranks, and
    the next batch is logged again."""
    cases: dict[str, tuple[Any, ...]] = {
        "sharded": ({}, 2, 1, 3, 1),
        # One along each axis of the mesh, because new metrics make all ranks compare.
        "replicas of shards": ({"data_parallel_replicate_degree": 2}, 2, 2, 4, 2),
        "replicas": ({"sharding_strategy": "NO_SHARD"}, 1, 1, 2, 1),
        "groups apart": ({"process_group": "set2"}, 2, 2, 2, 2),  # no mesh contains all ranks
    }
    for_each(check_changes, cases)


@on_ranks(4, fresh=True)
def test_a_monitor_that_lives_longer_than_its_process_groups(folder: str):
    """In a notebook the next run reuses callbacks whose process groups were destroyed."""
    from composer.callbacks import OptimizerMonitor
    from composer.optim import DecoupledAdamW

    monitor = OptimizerMonitor(batch_log_interval=1)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for number, config in enumerate(({"data_parallel_replicate_degree": 2}, {})):
        dist.barrier()  # A rank that is still connecting would fail if the others left.
        dist.destroy_process_group()
        store = dist.FileStore(f"{folder}/{number}", num_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
        model = nn.Sequential(nn.Linear(3, 2, bias=False))
        optimizer = DecoupledAdamW(model.parameters(), lr=1e-3)
        prepare_fully_shard(model, optimizer, config, "fp32", torch.device("cpu"))
        model(torch.ones(1, 3)).sum().backward()
        assert monitored(model, optimizer, monitor)()["l2_norm/grad/0.weight"] == pytest.approx(math.sqrt(6))


class Walked(UserDict[str, Any]):
    """A dict that counts one call for each item read."""

    def __iter__(self) -> Iterator[str]:
        yield from self.data

    def __reversed__(self) -> Iterator[str]:
        yield from reversed(self.data)


def cost(num_layers: int, config: dict[str, Any], kind: Any) -> int:
    """For one logged batch: the number of Python calls, and of metrics read."""
    from composer_fsdp2.compat import monitors

    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(num_layers)))
    if "ignored_modules" in config:
        config = {"ignored_modules": [*model][1:]}
    optimizer = kind(model.parameters(), lr=1e-3)
    prepare_fully_shard(model, optimizer, config, "fp32", torch.device("cpu"))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    log, calls = monitored(model, optimizer), []
    with mock.patch.object(monitors, "_Reported", functools.partial(monitors._Reported, metrics=Walked())):
        sys.setprofile(lambda frame, event, argument: calls.append(event))
        try:
            logged = log()
        finally:
            sys.setprofile(None)
    assert len(logged) == 4 * num_layers + 1, sorted(logged)
    return sum(event in ("call", "c_call") for event in calls)


def own_optimizer() -> Any:
    """An optimizer with its own metrics method, which fails for some parameters on one rank."""
    from composer.optim import DecoupledAdamW

    class Own(DecoupledAdamW):
        def report_per_parameter_metrics(self, param: Any, name: str, optimizer_metrics: Any) -> Any:
            if dist.get_rank() == 1 and "down" in name:
                raise ArithmeticError(f"no metric of {name}")
            return super().report_per_parameter_metrics(param, name, optimizer_metrics)

    return Own


@on_ranks(2)
def test_the_cost_grows_with_the_model(folder: str):
    """The cost grows linearly, not quadratically: a mixture of experts has thousands of parameters, and a batch waits
    for their norms."""
    from composer.optim import DecoupledAdamW

    def check(config: dict[str, Any], kind: Any) -> None:
        cost(1, config, kind)  # one-time lookups
        of_16, of_32 = (cost(num_layers, config, kind) for num_layers in (16, 32))
        assert of_32 <= 2.1 * of_16, f"{of_16}, {of_32} for twice the parameters"

    cases: dict[str, tuple[dict[str, Any], Any]] = {
        "sharded": ({}, DecoupledAdamW),
        "own metrics": ({}, own_optimizer()),
    }
    cases |= {f"ignored, {name}": ({"ignored_modules": True}, kind) for name, (_, kind) in cases.items()}
    for_each(check, cases)


@on_ranks(2)
def test_an_error_on_one_rank(folder: str):
    """A user's metric that fails on one rank, for example on an empty shard, does not leave the other ranks waiting."""
    with pytest.raises(Exception, match="no metric of") as error:
        run(FSDP2, {}, optimizer=lambda model: own_optimizer()(model.parameters(), lr=1e-3))
    first, second = objects_of_ranks(f"{type(error.value).__name__}: {error.value}")
    assert "rank 1" in first and "model.blocks.0.down.weight" in first and first.startswith("ComposerFSDP2Error")
    assert "Own.report_per_parameter_metrics raised ArithmeticError" in second and "DTensors" in second


# ---------------------------------------------------------------------------------------------------------------------
# User-defined callbacks


@pytest.mark.foundry
@pytest.mark.filterwarnings("ignore")
@on_ranks(2)
def test_callbacks_of_ones_own(folder: str):
    """A user's callback that reports as Composer did logs norms of the full model, also without CUDA; the methods of
    Foundry's Lion are unchanged."""
    from composer import Callback

    class Own(Callback):
        """Reports as OptimizerMonitor did, with the optimizer's three methods."""

        def batch_end(self, state: Any, logger: Any) -> None:
            if int(state.timestamp.batch) < 2:
                return
            optimizer, metrics = state.optimizers[0], {}
            for name, parameter in state.model.named_parameters():
                if parameter.grad is not None:
                    metrics = optimizer.report_per_parameter_metrics(parameter, name, metrics)
            metrics = optimizer.dist_reduce_metrics(optimizer.pre_reduce_metrics(metrics))
            logger.log_metrics({key: torch.as_tensor(value).item() for key, value in metrics.items()})

    def check(name: str) -> None:
        ours = run(FSDP2, {}, Own(), optimizer=name)
        whole = reference(run, UNSHARDED, optimizer=name)
        for key in set(whole) - {"l2_norm/grad/global"}:
            # Foundry's methods sum values over ranks even if each rank has the full one, as under FSDP1.
            if name.islower() or "child.gain" not in key:
                assert ours[key] == pytest.approx(whole[key], rel=2e-5, abs=1e-7), key

    for_each(check, {name: (name,) for name in ("decoupled_adamw", "DecoupledLionW")})


@on_ranks(2)
def test_all_reduce_of_a_sum_not_yet_reduced(folder: str):
    """A norm of one rank's shard, silently logged, would be worse than torch's error; ours names the call to use."""
    from composer.utils import dist as composer_dist

    with FSDP2():
        trainer = make_trainer({})
        [parameter, *_] = trainer.state.model.parameters()
        with pytest.raises(Exception, match=r"all_reduce[\s\S]*full_tensor\(\)"):
            composer_dist.all_reduce((parameter.detach() ** 2).sum())
        squared = torch.linalg.vector_norm(parameter.detach()) ** 2
        expected = parameter.full_tensor().norm().item() ** 2
        composer_dist.all_reduce(squared)
        assert squared.item() == pytest.approx(expected)
        trainer.close()


# ---------------------------------------------------------------------------------------------------------------------
# ActivationMonitor


@on_ranks(2, timeout_s=300)
def test_activation_monitor(folder: str):
    """Names and values of an unsharded run, even with activation checkpointing; or FSDP1's names, with each wrapper."""
    from composer.callbacks import ActivationMonitor

    def build() -> Any:
        return with_child(nn.Tanh(), lambda tanh, x: tanh(x))  # without parameters, so in no unit

    def logged(under: Under, keys: dict[str, Any] | None, ac: bool = True) -> dict[str, list[float]]:
        return run(under, keys, ActivationMonitor(interval="2ba"), optimizer="sgd", build=build, ac=ac)

    whole, theirs = logged(UNSHARDED, None, ac=False), logged(FSDP1, {})
    assert "activations/average/child_output.0" in whole
    for keys, expected in (({"fsdp1_metric_names": True}, theirs), ({}, whole)):
        ours = logged(FSDP2, keys)
        assert set(ours) == set(expected), sorted(set(ours) ^ set(expected))[:6]
        for key, values in expected.items():
            assert ours[key] == pytest.approx(values, rel=1e-4, abs=1e-6, nan_ok=True), key
