"""gradient_sync, reshard_after_backward and collective_guard as keys of a Trainer's configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import assert_same, full
from support.oracle import FSDP1, FSDP2, Under
from support.ranks import run_ranks
from support.references import reference
from support.trainers import build_model, close, fit, make_trainer, result
from torch.utils._python_dispatch import TorchDispatchMode

from composer_fsdp2 import RanksDivergedError, begin_microbatch

pytestmark = pytest.mark.composer

TIME_LIMIT_S = 180  # a hang
KEYS: dict[str, dict[str, Any]] = {
    "every": {},
    "last": {"gradient_sync": "last"},
    "last, kept": {"gradient_sync": "last", "reshard_after_backward": False},
}
CLIP = ("norm", 0.5)


class Reductions(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "c10d" and "reduce_scatter" in func.overloadpacket.__name__
        return func(*args, **(kwargs or {}))


def check_against_fsdp1() -> None:
    def check(optimizer: str, name: str, num_reductions: int) -> None:
        options = {"optimizer": optimizer, "clip": CLIP, "microbatch": 1, "eval_interval": "2ba"}
        with Reductions() as mode:
            ours = fit(FSDP2, KEYS[name], **options)
        theirs = reference(fit, FSDP1, {}, **options)
        assert close(ours.losses, theirs.losses), f"{ours.losses}, {theirs.losses}"
        assert ours.eval_parameters == [["DTensor"], ["DTensor"]], ours.eval_parameters
        assert_alike(ours.parameters, theirs.parameters, "after training")
        assert mode.count == num_reductions

    # Four batches of four microbatches over three units: the Trainer says which one is the last.
    cases = (("sgd", "every", 4 * 4 * 3), ("sgd", "last", 4 * 3), ("decoupled_adamw", "last, kept", 4 * 3))
    for_each(check, {name: (optimizer, name, number) for optimizer, name, number in cases})


def test_the_curve_is_fsdp1s():
    """FSDP1 under Composer reduced in every microbatch; who asks for less communicates less, and trains the same."""
    run_ranks(check_against_fsdp1, 2)


def fit_after_an_error(under: Under, keys: dict[str, Any], where: str) -> dict[str, torch.Tensor]:
    """The parameters after a batch, where the one before ended with an error in its second microbatch."""
    with under():
        model = build_model()
        loss, count = model.loss, 0

        def fail_once(*unused: Any) -> None:
            nonlocal count
            count += 1
            if count == 2:
                raise ValueError("once")

        def failing_loss(outputs: Any, batch: Any) -> Any:
            fail_once()
            return loss(outputs, batch)

        match where:
            case "loss":
                model.loss = failing_loss
            case "forward":
                model.model.blocks[1].up.register_forward_hook(fail_once)
            case "backward":
                model.model.wte.register_full_backward_hook(fail_once)
        trainer = make_trainer(keys, model=model, microbatch=1, batches=1, optimizer="adamw")
        with pytest.raises(ValueError, match="once"):
            trainer.fit()
        trainer.fit(duration="1ba", reset_time=True)
        parameters = result(trainer).parameters
        trainer.close()
    return parameters


def assert_alike(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], where: str) -> None:
    torch.testing.assert_close(ours, theirs, msg=lambda text: f"{where}: {text}")


def check_after_an_error() -> None:
    def check(where: str, name: str) -> None:
        ours = fit_after_an_error(FSDP2, KEYS[name], where)
        assert_alike(ours, reference(fit_after_an_error, FSDP1, {}, where), where)

    for_each(check, {f"{case}": case for case in (("forward", "every"), ("forward", "last"), ("loss", "last, kept"))})
    every, last = (fit_after_an_error(FSDP2, KEYS[name], "backward") for name in ("every", "last"))
    assert_alike(last, every, "backward")  # FSDP1 itself stays in its backward then


def test_a_fit_after_an_error():
    """Gradients that the broken batch had not communicated yet would be in the next one's, which no zero_grad sees."""
    run_ranks(check_after_an_error, 2)


def check_cleanup() -> None:
    from composer.trainer import trainer as composer_trainer

    x = torch.randint(0, 13, (2, 6))

    def gradients(fails: bool) -> dict[str, torch.Tensor]:
        with FSDP2():
            trainer = make_trainer({"gradient_sync": "last"}, batches=1)
            model = trainer.state.model.model
            if fails:
                begin_microbatch(trainer.state.model, is_last=False)
                model(x).sum().backward()  # whose gradients wait for the last microbatch
                handle = model.blocks[0].up.register_full_backward_hook(raise_out_of_memory)
                with pytest.raises(RuntimeError, match="out of memory"):
                    model(x).sum().backward()
                handle.remove()
                composer_trainer._fsdp_reshard_and_cleanup(trainer.state.model)
                trainer.state.model.zero_grad()
            model(x).sum().backward()
            found = {name: full(parameter.grad) for name, parameter in model.named_parameters()}
            trainer.close()
        return found

    assert_same(gradients(fails=True), gradients(fails=False))


def raise_out_of_memory(*unused: Any) -> None:
    raise RuntimeError("CUDA out of memory")


def test_composers_own_way_back_from_an_error():
    """A script that catches an error and calls Composer's `_fsdp_reshard_and_cleanup` goes on: the model is where it
    was between batches."""
    run_ranks(check_cleanup, 2)


# --- collective_guard


def check_guard() -> str:
    with FSDP2():
        trainer = make_trainer({"collective_guard": 3})
        if dist.get_rank() == 1:
            split = trainer._train_data_spec.split_batch
            trainer._train_data_spec.split_batch = lambda batch, size: split(batch, size)[:1]
        with pytest.raises(RanksDivergedError) as raised:
            trainer.fit()
    return str(raised.value)


def test_a_trainers_ranks_that_part():
    """A microbatch less on one rank: both ranks end, and say where each was."""
    for message in run_ranks(check_guard, 2, timeout_s=TIME_LIMIT_S, fresh=True):
        assert "rank 1 stands before the end of a training batch" in message
        assert "rank 0 stands before the all-gather of model in forward" in message
