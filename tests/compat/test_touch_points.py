"""Algorithms, callbacks and calls of a Trainer that touch the model: what they did under FSDP1, they do here."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import for_each
from support.oracle import FSDP1, FSDP2, Under
from support.ranks import run_ranks
from support.references import reference
from support.trainers import Trained, close, fit, largest_difference, make_trainer, result
from torch.utils.data import DataLoader

pytestmark = pytest.mark.composer


# --- SAM


def sam_run(under: Under, parallelism: Any, **options: Any) -> Any:
    from composer.algorithms import SAM

    algorithms = [SAM(rho=0.5, interval=options.pop("interval", 1))]
    return fit(under, parallelism, optimizer="adamw", algorithms=algorithms, eval_interval="2ba", **options)


def check_sam() -> None:
    warnings.simplefilter("ignore")

    def fsdp1s(interval: int) -> Trained:
        # The norm of a shard is not that of the gradient: under FSDP1 SAM was right without shards only.
        return reference(sam_run, FSDP1, {"sharding_strategy": "NO_SHARD"}, interval=interval)

    def check(strategy: str, interval: int) -> None:
        ours, theirs = sam_run(FSDP2, {"sharding_strategy": strategy}, interval=interval), fsdp1s(interval)
        assert close(ours.losses, theirs.losses), f"{ours.losses}, {theirs.losses}"

    cases = itertools.product(("NO_SHARD", "FULL_SHARD", "SHARD_GRAD_OP"), (1, 2))
    for_each(check, {f"{strategy}, every {interval}": (strategy, interval) for strategy, interval in cases})
    with_shards, theirs = sam_run(FSDP1, {}, interval=2), fsdp1s(2)
    assert not close(with_shards.losses, theirs.losses), "FSDP1's SAM is right now: compare every strategy with it"
    plain = fit(FSDP2, {}, optimizer="adamw")
    assert largest_difference(plain.losses, theirs.losses) > 1e-3, "SAM changes nothing"


def test_sam_climbs_the_whole_gradient():
    """With each rank's own norm, ranks would climb by different steps, and their shards part from one another."""
    run_ranks(check_sam, 2)


# --- eval, predict, several fits


def note_outputs() -> Any:
    """A callback that notes a number for each evaluation batch of this rank."""
    from composer import Callback

    class Note(Callback):
        def __init__(self) -> None:
            self.outputs: list[float] = []

        def eval_after_forward(self, state: Any, logger: Any) -> None:
            self.outputs.append(state.outputs.double().square().sum().item())

    return Note()


def loader(num_samples: int = 16) -> DataLoader[Any]:
    from composer.utils import dist
    from support.scripts.train_with_trainer import data

    dataset = data(num_samples)
    return DataLoader(dataset, batch_size=4, sampler=dist.get_sampler(dataset))


def calls(trainer: Any) -> list[torch.Tensor]:
    """A script that does not call fit once and end; returns this rank's predictions."""
    predicted: list[torch.Tensor] = []
    trainer.eval()
    trainer.fit(duration="2ba")
    predicted += trainer.predict(loader())
    trainer.fit(duration="1ba")
    trainer.eval(loader(8))
    trainer.eval()
    trainer.predict(loader(8), return_outputs=False)
    trainer.fit(duration="1ba")
    predicted += trainer.predict(loader(8))
    return predicted


def check_calls(folder: str) -> None:
    results = {}
    for under, config in ((FSDP1, {}), (FSDP2, {}), (FSDP2, {"sharding_strategy": "SHARD_GRAD_OP"})):
        what = f"{under.__name__} {config}"
        note = note_outputs()
        with under():
            # The saver's last one comes after a fit, where predictions were made in between.
            place = f"{folder}/{len(results)}"
            trainer = make_trainer(
                {**config, "state_dict_type": "sharded"},
                optimizer="adamw",
                eval_interval="1ba",
                callbacks=[note],
                save_folder=place,
                save_interval="1ba",
            )
            predicted = calls(trainer)
            results[what] = (result(trainer), note.outputs, predicted)
            trainer.close()
    whole = reference(fit, FSDP1, {}, optimizer="adamw")
    theirs, their_outputs, their_predictions = results.pop("FSDP1 {}")
    assert close(theirs.losses, whole.losses)
    assert len(their_predictions) == 3

    def check(ours: Trained, outputs: list[float], predictions: list[torch.Tensor]) -> None:
        assert close(ours.losses, theirs.losses), f"{ours.losses}, {theirs.losses}"
        assert largest_difference(outputs, their_outputs) <= 1e-5, "evaluations differ"
        for actual, expected in zip(predictions, their_predictions, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        for name, value in theirs.parameters.items():
            torch.testing.assert_close(ours.parameters[name], value, rtol=1e-4, atol=1e-5)

    for_each(check, results)
    resumed = fit(FSDP2, {}, optimizer="adamw", load_path=f"{folder}/1/ep0-ba2")
    assert close(resumed.losses, theirs.losses[2:]), f"{resumed.losses}, {theirs.losses}"


def test_calls_in_any_order(tmp_path: Path):
    """Evaluations and predictions before, between and after fits leave training, and what is saved, as they were."""
    run_ranks(check_calls, 2, str(tmp_path))


# --- what callbacks save


def check_kinds_of_state() -> list[dict[str, str]]:
    from collections import Counter, OrderedDict, defaultdict

    from composer import Callback

    class Counts(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"counts": Counter("ab"), "lists": defaultdict(list), "order": OrderedDict(a=1)}

    kinds = []
    for under in (FSDP1, FSDP2):
        with under():
            trainer = make_trainer({"state_dict_type": "sharded"}, callbacks=[Counts()])
            saved = next(v for k, v in trainer.state.state_dict()["callbacks"].items() if k.endswith("Counts"))
            kinds.append({name: type(value).__name__ for name, value in saved.items()})
            trainer.close()
    return kinds


def test_what_callbacks_save_keeps_its_classes():
    """A resumed callback that counts on a Counter or a defaultdict would end in a KeyError."""
    for theirs, ours in run_ranks(check_kinds_of_state, 2):
        assert ours == theirs


# --- parameters at every event

BEFORE_SHARDING = {"init"}
# A training step between its forward and its backward; FSDP1's parameters are whole there, too.
IN_A_STEP = {"after_forward", "before_loss", "after_loss", "before_backward"}


def reader(*events: str) -> Any:
    """A callback that reads parameters at these events, or at all, and notes what it was given by event."""
    from composer import Callback

    class Reader(Callback):
        def __init__(self) -> None:
            self.seen: dict[str, set[str]] = {}

        def run_event(self, event: Any, state: Any, logger: Any) -> None:
            if not events or event.value in events:
                found = {type(parameter).__name__ for parameter in state.model.parameters()}
                named = {type(parameter).__name__ for _, parameter in state.model.named_parameters()}
                assert found == named
                self.seen.setdefault(event.value, set()).update(found)

    return Reader()


def generator() -> Any:
    """A callback that runs the model itself, as those that look at samples do."""
    from composer import Callback

    class Generate(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            with torch.no_grad():
                state.model([torch.arange(10).reshape(2, 5)])

    return Generate()


def check_events() -> None:
    from composer.core import Event

    theirs = reference(fit, FSDP1, {}, optimizer="adamw")

    def check(strategy: str) -> None:
        read = reader()
        with FSDP2():
            trainer = make_trainer(
                {"sharding_strategy": strategy},
                optimizer="adamw",
                eval_interval="1ba",
                train_subset_num_batches=4,  # an epoch
                callbacks=[generator(), read],
            )
            calls(trainer)
            trainer.fit(duration="1ep")
            assert close(result(trainer).losses[:4], theirs.losses), strategy
            trainer.close()
        missed = {event.value for event in Event} - read.seen.keys()
        assert missed <= {"iteration_start", "iteration_end", "iteration_checkpoint"}, (
            f"events that did not run: {missed}"
        )
        plain = {name for name, kinds in read.seen.items() if kinds != {"DTensor"}} - BEFORE_SHARDING
        assert plain == IN_A_STEP, f"{strategy}: plain parameters at {plain}"

    for_each(check, {strategy: (strategy,) for strategy in ("FULL_SHARD", "SHARD_GRAD_OP")})


def test_parameters_are_sharded_at_every_event():
    """A callback that counts, compares or copies parameters gets one kind of tensor, whatever ran before it."""
    run_ranks(check_events, 2)


def check_gathers() -> None:
    """How often the root is gathered in an evaluation, with and without somebody who looks in between."""
    from torch.distributed.fsdp import FSDPModule

    def num_gathers(*callbacks: Any) -> int:
        with FSDP2():
            trainer = make_trainer({"sharding_strategy": "SHARD_GRAD_OP"}, eval_interval="1ba", callbacks=callbacks)
            gathered = 0
            root = next(module for module in trainer.state.model.modules() if isinstance(module, FSDPModule))
            group = root._get_fsdp_state()._fsdp_param_group
            unshard = group.unshard

            def count(*args: Any, **kwargs: Any) -> Any:
                nonlocal gathered
                gathered += group.is_sharded
                return unshard(*args, **kwargs)

            group.unshard = count
            trainer.eval()
            trainer.close()
        return gathered

    assert num_gathers() == 1
    assert num_gathers(reader("eval_end")) == 2  # it might look at any event


def test_an_evaluation_gathers_once_where_nobody_looks():
    """Parameters that SHARD_GRAD_OP keeps are not gathered again for each batch of an evaluation."""
    run_ranks(check_gathers, 2)
