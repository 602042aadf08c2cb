"""Components that copy the full model are refused before a sharded run trains; the alternative in the message works."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.on_ranks import on_ranks
from support.oracle import FSDP2
from support.ranks import run_ranks
from support.trainers import build_model, build_optimizer, fit, make_trainer

from composer_fsdp2.errors import UnsupportedError

pytestmark = pytest.mark.composer


@on_ranks(2)
def test_what_copies_a_sharded_model_is_refused_at_once(folder: str):
    """Otherwise SWA fails an assertion of torch after 70% of a run, and an export at its end, on one rank only."""
    from composer.algorithms import SWA
    from composer.callbacks import ExportForInferenceCallback

    warnings.simplefilter("ignore")
    export = ExportForInferenceCallback("torchscript", f"{folder}/exported.pt")
    for environment in ({}, {"FSDP_VERSION": "2"}):
        model = build_model()
        optimizer = build_optimizer("sgd", model)
        before = [id(parameter) for parameter in model.parameters()]
        with (
            mock.patch.dict("os.environ", environment),
            FSDP2(),
            pytest.raises(UnsupportedError, match=r"(?s)use the algorithm EMA.*ExportForInferenceCallback.*load_path"),
        ):
            make_trainer({}, model=model, optimizer=optimizer, algorithms=[SWA()], callbacks=[export])
        of_optimizer = [id(parameter) for parameter in optimizer.param_groups[0]["params"]]
        assert [id(parameter) for parameter in model.parameters()] == before == of_optimizer, "the model was changed"
    with FSDP2():
        trainer = make_trainer({})
        trainer.state.callbacks.append(export)
        with pytest.raises(UnsupportedError, match="load_path"):
            trainer.fit()
        assert trainer.state.timestamp.batch == 0
        with pytest.raises(UnsupportedError, match=r"export_for_inference[\s\S]*load_path"):
            trainer.export_for_inference("torchscript", f"{folder}/exported.pt")
        trainer.close()
    assert not os.listdir(folder)


def check_train(folder: str) -> None:
    fit(FSDP2, {}, save_folder=folder)


def check_export(folder: str) -> None:
    from composer.utils import export_for_inference

    warnings.simplefilter("ignore")
    saved, exported, batch = f"{folder}/latest-rank0.pt", f"{folder}/exported.pt", torch.arange(10).reshape(1, 2, 5)
    export_for_inference(build_model(), "torchscript", exported, load_path=saved)
    model = build_model()
    model.load_state_dict(torch.load(saved, weights_only=False)["state"]["model"])
    torch.testing.assert_close(torch.jit.load(exported)(batch), model(batch))


def test_a_checkpoint_is_exported_as_the_message_says(tmp_path: Path):
    """Wrong advice costs an afternoon; on several ranks that very call would wait forever."""
    run_ranks(check_train, 2, str(tmp_path))
    run_ranks(check_export, 1, str(tmp_path))
