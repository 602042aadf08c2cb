"""Expert parallelism of Hugging Face's mixtures through the real Trainer: runs, and checkpoints that load on any
ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import for_each
from support.comparing import assert_same
from support.known_models import small_mixture
from support.language_trainer import Run, train
from support.oracle import FSDP2
from support.ranks import run_ranks
from support.saved import read
from support.trainers import largest_difference
from torch import nn

pytestmark = [pytest.mark.composer, pytest.mark.filterwarnings("ignore")]

FULL = {"mixed_precision": "FULL"}
FORMS: dict[str, dict[str, Any]] = {
    "full": {"state_dict_type": "full"},
    "async": {"state_dict_type": "sharded", "async_save": True},
}
OF_ONE_PROCESS = "one process"


class Mixture(nn.Module):
    """A model from tokens to logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.inner = small_mixture("Qwen2Moe")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.inner(tokens, use_cache=False).logits


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Weight decay for matrices, half the learning rate for the rest."""
    parameters = list(model.parameters())
    rest = {"params": [p for p in parameters if p.ndim <= 1], "lr": 0.005}
    matrices = {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1}
    return torch.optim.AdamW([matrices, rest], lr=0.01)


def fit(config: dict[str, Any] | None, **options: Any) -> Run:
    with FSDP2():
        parallelism = None if config is None else {"fsdp": FULL | config}
        return train(parallelism, build=Mixture, make=adamw, **options)


def saving(folder: str) -> dict[str, Run]:
    """One run for each form of checkpoint, saving after every batch."""

    def save(form: str) -> Run:
        config = FORMS[form] | {"expert_parallel_degree": 2}
        return fit(config, keep_optimizer=True, save_folder=f"{folder}/{form}", save_interval="1ba")

    return for_each(save, {form: (form,) for form in FORMS})


def saved(folder: str | Path, form: str, batch: int) -> str:
    """The Trainer's checkpoint after ``batch`` batches."""
    [path] = [path for path in Path(folder, form).iterdir() if path.name.startswith(f"ep0-ba{batch}")]
    return str(path)


# For each world size, the form of the checkpoint, the degree, and other settings.
RESUMED: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {
    4: {
        "all ranks": ("async", {"expert_parallel_degree": 4}),
        "beside replicas": ("full", {"expert_parallel_degree": 2, "data_parallel_replicate_degree": 2}),
    },
    2: {"without": ("async", {}), "from one process": (OF_ONE_PROCESS, {"expert_parallel_degree": 2})},
}


def resume(folder: str, cases: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Run]:
    def resumed(form: str, config: dict[str, Any]) -> Run:
        return fit(FORMS.get(form, FORMS["full"]) | config, load_path=saved(folder, form, 1))

    return for_each(resumed, cases)


def alone(options: dict[str, Any]) -> Run:
    return fit(None, **options)


def test_a_trainer_splits_experts_trains_as_one_process_and_its_checkpoints_go_on_anywhere(tmp_path: Path):
    """With an optimizer's groups, clipping and a decaying learning rate. In each form a checkpoint has the model's own
    names and full experts, and loads with another degree, without one, on fewer ranks, and in one process."""
    [expected] = run_ranks(alone, 1, {"save_folder": f"{tmp_path}/{OF_ONE_PROCESS}", "save_interval": "1ba"})
    runs = run_ranks(saving, 4, str(tmp_path))[0]
    for form, run in runs.items():
        assert largest_difference(run.losses, expected.losses) <= 1e-12, form
        torch.testing.assert_close(run.parameters, expected.parameters, rtol=0, atol=1e-12)
        assert_same(run.optimizer, runs["full"].optimizer)
    file = read(saved(tmp_path, "full", 2))["state"]
    assert_same(file["model"], runs["full"].parameters, in_bits=True)
    plain = Mixture().double()
    plain.load_state_dict({name.removeprefix("model."): value for name, value in file["model"].items()})  # strict
    resumed = {"full, one process": run_ranks(alone, 1, {"load_path": saved(tmp_path, "full", 1)})[0]}
    for world_size, cases in RESUMED.items():
        resumed |= run_ranks(resume, world_size, str(tmp_path), cases)[0]
    for name, run in resumed.items():
        assert largest_difference(run.losses, expected.losses[1:]) <= 1e-12, name
        torch.testing.assert_close(run.parameters, expected.parameters, rtol=0, atol=1e-12)
