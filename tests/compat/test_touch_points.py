"""Algorithms, callbacks and Trainer calls that access the model have the same effect as under FSDP1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.callbacks import callback
from support.on_ranks import on_ranks
from support.oracle import FSDP1, FSDP2
from support.references import reference
from support.trainers import close, eval_loader, fit, largest_difference, make_trainer, result

from composer_fsdp2.estimate._torch.counting import Collectives

pytestmark = pytest.mark.composer


# --- eval, predict, several fits


def calls(trainer: Any) -> list[torch.Tensor]:
    """A script that does not only call fit once; returns this rank's predictions."""
    predicted: list[torch.Tensor] = []
    trainer.eval()
    trainer.fit(duration="2ba")
    predicted += trainer.predict(eval_loader())
    trainer.fit(duration="1ba")
    trainer.eval(eval_loader(8))
    trainer.eval()
    trainer.predict(eval_loader(8), return_outputs=False)
    trainer.fit(duration="1ba")
    predicted += trainer.predict(eval_loader(8))
    return predicted


@on_ranks(2)
def test_calls_in_any_order(folder: str):
    """Evaluations and predictions before, between and after fits change neither training nor the saved state."""
    results = []
    for under, config in ((FSDP1, {}), (FSDP2, {"sharding_strategy": "SHARD_GRAD_OP"})):
        outputs: list[float] = []  # a number for each evaluation batch of this rank
        note = callback(
            eval_after_forward=lambda state, outputs=outputs: outputs.append(state.outputs.square().sum().item())
        )
        with under():
            # The saver's last save follows a fit, with predictions in between.
            trainer = make_trainer(
                {**config, "state_dict_type": "sharded"},
                optimizer="adamw",
                eval_interval="1ba",
                callbacks=[note],
                save_folder=f"{folder}/{under.__name__}",
                save_interval="1ba",
            )
            predicted = calls(trainer)
            results.append((result(trainer), outputs, predicted))
            trainer.close()
    (theirs, their_outputs, their_predictions), (ours, outputs, predictions) = results
    assert len(their_predictions) == 3
    assert close(ours.losses, theirs.losses), f"{ours.losses}, {theirs.losses}"
    assert largest_difference(outputs, their_outputs) <= 1e-5, "evaluations differ"
    torch.testing.assert_close(predictions, their_predictions, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.parameters, theirs.parameters, rtol=1e-4, atol=1e-5)
    resumed = fit(FSDP2, {}, optimizer="adamw", load_path=f"{folder}/FSDP2/ep0-ba2")
    assert close(resumed.losses, theirs.losses[2:]), f"{resumed.losses}, {theirs.losses}"


# --- parameters at every event

BEFORE_SHARDING = {"init"}
# Events between forward and backward of a training step; FSDP1's parameters are unsharded there, too.
IN_A_STEP = {"after_forward", "before_loss", "after_loss", "before_backward"}


def reader(*events: str) -> Any:
    """A callback that chooses its events, reads parameters at these, and records their types by event."""
    from composer import Callback

    class Reader(Callback):
        def __init__(self) -> None:
            self.seen: dict[str, set[str]] = {}

        def run_event(self, event: Any, state: Any, logger: Any) -> None:
            if event.value in events:
                found = {type(parameter).__name__ for parameter in state.model.parameters()}
                assert found == {type(parameter).__name__ for _, parameter in state.model.named_parameters()}
                self.seen.setdefault(event.value, set()).update(found)

    return Reader()


def generate(state: Any) -> None:
    """Runs the model, as callbacks do that print samples."""
    with torch.no_grad():
        state.model([torch.arange(10).reshape(2, 5)])


@on_ranks(2)
def test_parameters_are_sharded_at_every_event(folder: str):
    """A callback that counts, compares or copies parameters sees one type of tensor, whatever ran before."""
    from composer.core import Event

    theirs = reference(fit, FSDP1, {}, optimizer="adamw")
    read = reader(*(event.value for event in Event))
    with FSDP2():
        trainer = make_trainer(
            {"sharding_strategy": "SHARD_GRAD_OP"},
            optimizer="adamw",
            eval_interval="1ba",
            train_subset_num_batches=4,  # an epoch
            callbacks=[callback(batch_end=generate), read],
        )
        calls(trainer)
        trainer.fit(duration="1ep")
        assert close(result(trainer).losses[:4], theirs.losses)
        trainer.close()
    missed = {event.value for event in Event} - read.seen.keys()
    assert missed <= {"iteration_start", "iteration_end", "iteration_checkpoint"}, f"events that did not run: {missed}"
    plain = {name for name, kinds in read.seen.items() if kinds != {"DTensor"}} - BEFORE_SHARDING
    assert plain == IN_A_STEP, f"plain parameters at {plain}"


@on_ranks(2)
def test_an_evaluation_gathers_once_where_nobody_looks(folder: str):
    """Parameters that SHARD_GRAD_OP does not reshard are not gathered again for each batch of an evaluation."""

    def num_gathers(*callbacks: Any) -> int:
        with FSDP2():
            trainer = make_trainer({"sharding_strategy": "SHARD_GRAD_OP"}, eval_interval="1ba", callbacks=callbacks)
            with Collectives() as sent:
                trainer.eval()
            trainer.close()
        return sent.counts["_allgather_base_"]["calls"]

    # Two batches; it could read parameters at any event.
    assert num_gathers(reader("eval_end")) == 2 * num_gathers()
