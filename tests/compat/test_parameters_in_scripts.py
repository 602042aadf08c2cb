"""Composer scripts that use parameters in a loss, an algorithm or a metric: as in one process, or an error with the
module's name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.callbacks import algorithm
from support.cases import for_each
from support.comparing import full_parameters
from support.on_ranks import on_ranks
from support.oracle import FSDP1, FSDP2, UNSHARDED
from support.ranks import run_ranks
from support.references import reference
from support.trainers import make_trainer
from support.training import HSDP_2X2

pytestmark = pytest.mark.composer

CONFIGS: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {"sharding_strategy": "SHARD_GRAD_OP"},
    "NO_SHARD": {"sharding_strategy": "NO_SHARD"},
    "gathered between microbatches": {"gradient_sync": "last", "reshard_after_backward": False},
    "offloaded": {"cpu_offload": True},
}


def l2(model: Any) -> Any:
    return sum(parameter.pow(2).sum() for parameter in model.parameters())


def build(kind: str) -> Any:
    from support.scripts.train_with_trainer import Model
    from torchmetrics import MeanMetric

    class Script(Model):
        def __init__(self) -> None:
            super().__init__()
            self.metric = MeanMetric()

        def forward(self, batch: Any) -> Any:
            if kind == "encoded outside of forward":
                return self.model.lm_head(self.encode(batch[0]))
            if kind == "added up in forward":
                return super().forward(batch).pow(2).mean() + 0.01 * l2(self)
            return super().forward(batch)

        def encode(self, x: Any) -> Any:
            return self.model.wte(x)

        def loss(self, outputs: Any, batch: Any) -> Any:
            if kind == "added up in forward":
                return outputs
            loss, weight = super().loss(outputs, batch), self.model.blocks[0].up.weight
            if kind == "penalty":
                return loss + 0.01 * l2(self)
            if kind == "everything":  # several losses, one of them of outputs and parameters together
                of_outputs = F.linear(outputs[..., :8], weight).pow(2).mean()
                orthogonality = (weight.T @ weight - torch.eye(8)).pow(2).sum() + weight.norm()
                return {"main": loss + of_outputs, "penalties": 0.01 * (l2(self) + orthogonality)}
            return loss

        def get_metrics(self, is_train: bool = False) -> Any:
            return {} if is_train or kind != "everything" else {"Mean": self.metric}

        def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
            metric.update(F.linear(outputs[..., :8], self.model.blocks[0].up.weight).pow(2).mean() + 0.01 * l2(self))

    return Script()


def decay(state: Any) -> None:
    """Weight decay as a term of the losses."""
    state.loss["decay"] = 0.01 * l2(state.model)


def train(under: Any, config: dict[str, Any] | None, kind: str) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """The losses of batches, full parameters, and the evaluation's metric."""
    torch.set_default_dtype(torch.float64)
    with under():
        trainer = make_trainer(
            None if config is None else {"mixed_precision": "FULL", **config},
            model=build(kind),
            clip=("norm", 0.5) if kind == "everything" else None,  # FSDP1's clipping does not support float64
            eval_interval="2ba" if kind == "everything" else None,
            algorithms=[algorithm("Decay", "after_loss", decay)] if kind == "everything" else (),
            batches=2,
            precision="fp32",
        )
        trainer.fit()
        record = next(each for each in trainer.state.callbacks if type(each).__name__ == "Record")
        metrics = {name: float(value.compute()) for name, value in trainer.state.eval_metrics.get("eval", {}).items()}
        parameters = {name.removeprefix("module."): each for name, each in full_parameters(trainer.state.model).items()}
        trainer.close()
    return record.losses, parameters, metrics


def check_beside_unsharded(config: dict[str, Any]) -> None:
    losses, parameters, metrics = train(FSDP2, config, "everything")
    expected_losses, expected, expected_metrics = reference(train, UNSHARDED, None, "everything")
    torch.testing.assert_close(losses, expected_losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(parameters, expected, rtol=1e-6, atol=1e-8)
    assert metrics, "no metric"
    torch.testing.assert_close(metrics, expected_metrics, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("world_size", "configs"), [(2, CONFIGS), (4, {"HSDP": HSDP_2X2})], ids=["shards", "replicas"])
def test_a_loss_that_uses_parameters(world_size: int, configs: dict[str, dict[str, Any]]):
    """Penalties in the loss and in an algorithm, several losses, one on a batch; and a metric of an evaluation."""
    run_ranks(for_each, world_size, check_beside_unsharded, {name: (config,) for name, config in configs.items()})


@on_ranks(2)
def test_a_penalty_as_under_fsdp1():
    """FSDP1's gradients of an elementwise penalty equal those of one process; scripts with one train the same."""
    _, ours, _ = train(FSDP2, {}, "penalty")
    _, theirs, _ = train(FSDP1, {}, "penalty")
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


@on_ranks(2, fresh=True)
def test_what_cannot_work_is_named(folder: str):
    """torch's error names only an operator; ours names the module and the code to write."""
    notes = {}
    for kind in ("encoded outside of forward", "added up in forward"):
        with pytest.raises(RuntimeError) as error:
            train(FSDP2, {}, kind)
        notes[kind] = " ".join(error.value.__notes__)
    assert "model.wte.weight is sharded" in notes["encoded outside of forward"], notes
    assert "outside of the forward of its unit, model" in notes["encoded outside of forward"], notes
    assert "in the loss of the ComposerModel" in notes["added up in forward"], notes
