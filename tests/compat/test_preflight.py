"""What copies the whole model is refused before a sharded run trains; what the message says to do instead works."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.on_ranks import on_ranks
from support.oracle import FSDP2
from support.ranks import run_ranks
from support.trainers import build_model, build_optimizer, fit, make_trainer, result

from composer_fsdp2.errors import UnsupportedError

pytestmark = pytest.mark.composer


def refusal(act: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(UnsupportedError) as raised:
        act(*arguments, **options)
    return str(raised.value)


def check_refused(folder: str) -> None:
    from composer.algorithms import SWA
    from composer.callbacks import ExportForInferenceCallback

    warnings.simplefilter("ignore")
    export = ExportForInferenceCallback("torchscript", f"{folder}/exported.pt")
    for environment in ({}, {"FSDP_VERSION": "2"}):
        model = build_model()
        optimizer = build_optimizer("sgd", model)
        before = [id(parameter) for parameter in model.parameters()]
        with mock.patch.dict("os.environ", environment), FSDP2():
            options = {"model": model, "optimizer": optimizer, "algorithms": [SWA()], "callbacks": [export]}
            message = refusal(make_trainer, {}, **options)
        for words in ("use the algorithm EMA", "ExportForInferenceCallback", "load_path"):
            assert words in message
        of_optimizer = [id(parameter) for parameter in optimizer.param_groups[0]["params"]]
        assert [id(parameter) for parameter in model.parameters()] == before == of_optimizer, "the model was changed"
    with FSDP2():
        trainer = make_trainer({})
        trainer.state.callbacks.append(export)
        assert "load_path" in refusal(trainer.fit)
        assert trainer.state.timestamp.batch == 0
        message = refusal(trainer.export_for_inference, "torchscript", f"{folder}/exported.pt")
        assert "export_for_inference" in message and "load_path" in message
        trainer.close()


def test_what_copies_a_sharded_model_is_refused_at_once(tmp_path: Path):
    """SWA ends on an assertion of torch's after 70% of a run, and an export after all of it, on one rank alone."""
    run_ranks(check_refused, 2, str(tmp_path))
    assert not list(tmp_path.iterdir())


@on_ranks(2)
def test_runs_that_are_not_sharded_keep_swa(folder: str):
    """install() at the top of a shared script must not take SWA from those who train with DDP."""
    from composer.algorithms import SWA

    warnings.simplefilter("ignore")
    with FSDP2():
        trainer = make_trainer(None, batches=6, algorithms=[SWA("0.2dur", "0.5dur", "1ba")])
        trainer.fit()
        assert trainer.state.algorithms[0].swa_completed
        assert len(result(trainer).losses) == 6
        trainer.close()


def check_train(folder: str) -> None:
    trained = fit(FSDP2, {}, save_folder=folder)
    if dist.get_rank() == 0:
        torch.save(trained.parameters, f"{folder}/parameters.pt")


def check_export(folder: str) -> None:
    from composer.utils import export_for_inference

    warnings.simplefilter("ignore")
    exported, batch = f"{folder}/exported.pt", torch.arange(10).reshape(1, 2, 5)
    export_for_inference(build_model(), "torchscript", exported, load_path=f"{folder}/latest-rank0.pt")
    model = build_model()
    model.load_state_dict(torch.load(f"{folder}/parameters.pt"), strict=False)  # each tie is there once
    torch.testing.assert_close(torch.jit.load(exported)(batch), model(batch))


def test_a_checkpoint_is_exported_as_the_message_says(tmp_path: Path):
    """A message that leads nowhere costs an afternoon; on several ranks that very call waits for ever."""
    run_ranks(check_train, 2, str(tmp_path))
    run_ranks(check_export, 1, str(tmp_path))
