"""Expert parallelism through the real Trainer: LLM Foundry's torch_dmoe, whose ranks hold different experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import full_parameters
from support.context_runs import Trained
from support.oracle import FSDP2
from support.ranks import run_ranks
from support.trainers import largest_difference

from composer_fsdp2 import UnsupportedError, prepare_fully_shard

pytestmark = pytest.mark.composer

FULL = {"mixed_precision": "FULL"}
VOCABULARY, LENGTH, BATCH = 29, 9, 8


def mpt(mlp_type: str = "glu", **options: Any) -> Any:
    """Two layers of four experts, two for each token."""
    from llmfoundry.models.mpt.modeling_mpt import ComposerMPTCausalLM

    torch.manual_seed(5)
    experts = {"moe_num_experts": 4, "moe_top_k": 2, "mlp_type": mlp_type, "moe_normalize_expert_weights": 1}
    experts |= {"moe_jitter_eps": None, "uniform_expert_assignment": False, "ffn_act_fn": {"name": "gelu"}}
    model = ComposerMPTCausalLM(
        d_model=16, n_heads=4, n_layers=2, max_seq_len=16, vocab_size=VOCABULARY, norm_type="layernorm",
        loss_fn="torch_crossentropy", attn_config={"attn_impl": "torch"}, init_device="cpu",
        ffn_config={"ffn_type": "torch_dmoe", "ffn_hidden_size": 12, **experts},
    )  # fmt: skip
    return model.double()


def loader() -> Any:
    """Rows in order; every rank reads others."""
    from composer.utils import dist as composer_dist
    from torch.utils.data import DataLoader

    tokens = torch.randint(VOCABULARY, (48, LENGTH), generator=torch.Generator().manual_seed(3))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    sampler = composer_dist.get_sampler(rows)
    return DataLoader(rows, batch_size=BATCH // dist.get_world_size(), sampler=sampler)


def train(config: dict[str, Any] | None, *, batches: int = 4, mlp_type: str = "glu", **options: Any) -> Trained:
    """Train with clipping, in two microbatches, with an evaluation in between. None: one process, not sharded."""
    from composer import Trainer
    from composer.algorithms import GradientClipping
    from composer.core import Evaluator
    from support.scripts.train_with_trainer import Record

    torch.set_default_dtype(torch.float64)
    record, model = Record(), mpt(mlp_type)
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3),
        train_dataloader=loader(),
        eval_dataloader=Evaluator(label="eval", dataloader=loader(), metric_names=["LanguageCrossEntropy"]),
        eval_interval="3ba",
        max_duration=f"{batches}ba",
        device="cpu",
        precision="fp32",
        device_train_microbatch_size=BATCH // dist.get_world_size() // 2,
        parallelism_config=None if config is None else {"fsdp": FULL | config},
        algorithms=[GradientClipping("norm", 0.5)],
        callbacks=[record],
        save_interval="2ba",
        progress_bar=False,
        log_to_console=False,
        seed=17,
        **options,
    )
    trainer.fit()
    metrics = {name: float(each.compute()) for name, each in trainer.state.eval_metrics["eval"].items()}
    trained = Trained(losses=record.losses, metrics=metrics, parameters=full_parameters(trainer.state.model))
    trainer.close()
    return trained


def split(degree: int, **config: Any) -> dict[str, Any]:
    return {"expert_parallel_degree": degree, **config}


def assert_same(found: Trained, expected: Trained, what: str) -> None:
    assert largest_difference(found.losses, expected.losses[-len(found.losses) :]) <= 1e-12, what
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-6), what  # fp32 accumulators
    for name, value in expected.parameters.items():
        torch.testing.assert_close(
            found.parameters[name], value, rtol=0, atol=1e-10, msg=lambda t, n=name: f"{what}, {n}: {t}"
        )


KINDS = {"sharded": "glu", "full": "mlp"}
RECOMPUTED = {"activation_checkpointing": True, "activation_checkpointing_reentrant": False}


def runs_split(folder: str) -> dict[str, Trained]:
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "glu": (split(4), {}),
        "glu, sequences divided too": (split(2, context_parallel_degree=2), {}),
        "glu, saved": (split(2, state_dict_type="sharded"), {"save_folder": f"{folder}/sharded"}),
        "mlp, saved in full": (
            split(2, state_dict_type="full", **RECOMPUTED),
            {"save_folder": f"{folder}/full", "mlp_type": "mlp"},
        ),
    }

    def run(config: dict[str, Any], options: dict[str, Any]) -> Trained:
        with FSDP2():
            return train(config, **options)

    return for_each(run, cases)


def runs_alone() -> dict[str, Trained]:
    return {kind: train(None, mlp_type=kind) for kind in ("glu", "mlp")}


def resume(folder: str, cases: list[tuple[str, int | None]]) -> dict[str, Trained]:
    """None: one process, to which Composer gives one file alone."""

    def run(form: str, degree: int | None) -> Trained:
        name = f"{folder}/{form}/ep0-ba2{'' if form == 'sharded' else '-rank0.pt'}"
        config = None if degree is None else split(degree, state_dict_type=form)
        with FSDP2():
            return train(config, mlp_type=KINDS[form], load_path=name)

    return for_each(run, {f"{KINDS[form]}, {form} at {degree}": (form, degree) for form, degree in cases})


def test_a_trainer_splits_experts_and_trains_as_one_process(tmp_path: Path):
    """The curve, metrics and weights; and from a checkpoint of degree 2, at 4 and on one process."""
    expected = run_ranks(runs_alone, 1)[0]
    runs = run_ranks(runs_split, 4, str(tmp_path))[0]
    runs |= run_ranks(resume, 4, str(tmp_path), [("sharded", 4)])[0]
    runs |= run_ranks(resume, 1, str(tmp_path), [("full", None)])[0]
    assert len(runs) == 6
    for name, found in runs.items():
        assert_same(found, expected[name.split(",")[0]], name)


def check_own_values() -> None:
    """From the meta device; and with replicas, which LLM Foundry refuses too."""
    torch.set_default_dtype(torch.float64)
    values = []
    for config in ({}, split(2)):
        torch.manual_seed(7)
        with torch.device("meta"):
            model = mpt()
        torch.manual_seed(7)
        prepare_fully_shard(model, None, FULL | config, device="cpu")
        values.append(full_parameters(model))
    assert values[0].keys() == values[1].keys()
    for name, value in values[0].items():
        torch.testing.assert_close(values[1][name], value, rtol=0, atol=0, msg=lambda t, n=name: n + t)
    replicas = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}
    with FSDP2(), pytest.raises(UnsupportedError, match=r"HSDP [+] MoE is not supported"):
        train(split(2, sharding_strategy="HYBRID_SHARD", **replicas))


def test_split_experts_get_the_values_of_foundrys_initialization():
    """The same weights as without the key, drawn by MPT's own param_init_fn."""
    run_ranks(check_own_values, 4)
