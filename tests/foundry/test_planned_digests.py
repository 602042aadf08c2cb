"""The digest that ``composer-fsdp2 plan`` prints, compared with the digest that ranks exchange before they shard."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.commands import run_here
from support.foundry_runs import ROOT, YAML, as_foundry_reads, build_without_weights, train
from support.known_runs import FOLDER, FOUNDRY, configs
from support.oracle import FSDP2
from support.ranks import run_ranks
from torch.testing._internal.distributed.fake_pg import FakeStore

from composer_fsdp2 import prepare_fully_shard
from composer_fsdp2.sharding import agree

pytestmark = pytest.mark.foundry


class _HaveCompared(Exception):
    """Raised before anything is sharded."""


@contextlib.contextmanager
def compared_digests() -> Iterator[list[str]]:
    """All digests that ranks compare within the block, as they send them."""
    found: list[str] = []
    compare = agree._is_equal_on_all_ranks

    def watched(digest: bytes) -> bool:
        found.append(digest.hex())
        return compare(digest)

    with mock.patch.object(agree, "_is_equal_on_all_ranks", watched):
        yield found


def printed_digest(folder: Path, file: Path, ranks: int, *words: object) -> str:
    """The digest of a plan for the CPU, like the ranks of this test."""
    sizes = ("--world-size", ranks, "--device", "cpu", "--no-activations", "--json")
    done = run_here(folder, "plan", file, *words, *sizes)
    assert done.code == 0, done.err
    digest: str = json.loads(done.out)["run"]["digest"]
    return digest


# --- a fake group, on meta tensors


def buildable(model: dict[str, Any], config: Path | None) -> dict[str, Any]:
    """The file's model at its own widths, on a machine without a GPU, flash attention, or weights."""
    if config is None:
        return model | {
            "attn_config": model["attn_config"] | {"attn_impl": "torch"},
            "loss_fn": "torch_crossentropy",
        }
    of_gpus = ("use_flash_attention_2", "attn_implementation")
    kept = {key: value for key, value in model.items() if key not in of_gpus}
    return kept | {"pretrained_model_name_or_path": str(config), "pretrained": False}


def compared_by_a_rank(file: Path, ranks: int, config: Path | None) -> list[str]:
    """The digests that rank 0 sends until it would shard; the others of the fake group send the same."""
    read = as_foundry_reads(file, ranks)
    model = build_without_weights(buildable(read.model, config))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    optimizer = torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with (
            compared_digests() as digests,
            mock.patch("composer_fsdp2.prepare.execute_plan", side_effect=_HaveCompared),
            pytest.raises(_HaveCompared),
        ):
            prepare_fully_shard(model, optimizer, read.fsdp, read.precision, "cpu")
    finally:
        dist.destroy_process_group()
    return digests


# megablocks is not available on the CPU, and the plan with TP-sharded layers comes from the seam, which real ranks have
# (below).
NAMES = [name for name in FOUNDRY if name not in ("dbrx/dbrx-like-megablocks", "mpt/mpt-7b-tp")]
# One of each kind: hybrid, expert parallelism, Hugging Face's with adapters.
QUICK = ("mpt/mpt-7b", "dbrx/dbrx-like-experts")


@pytest.fixture(scope="module")
def config_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("configs")
    for name in {run.config for run in FOUNDRY.values() if run.config}:
        configs()[name].save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in NAMES]
)
def test_ranks_of_a_large_run_compare_the_printed_digest(name: str, tmp_path: Path, config_folder: Path):
    """A plan is only useful for the run that it plans; here at the real widths and number of ranks."""
    run, file = FOUNDRY[name], FOLDER / f"{name}-fsdp1.yaml"
    config = config_folder / run.config if run.config else None
    words = ["--model-config", config] if config else []
    digests = compared_by_a_rank(file, run.ranks, config)
    assert digests == [printed_digest(tmp_path, file, run.ranks, *words)]


# --- real ranks

REAL = {
    "rank 0 has the weights, and another plan": (
        "model.init_device=mixed",
        "fsdp_config.sharding_strategy=SHARD_GRAD_OP",
        "fsdp_config.mixed_precision=DEFAULT",
        "fsdp_config.activation_checkpointing=false",
        "model.n_layers=2",
        "fsdp_config.activation_cpu_offload=true",
        "fsdp_config.forward_prefetch_limit=1",
    ),
    "split layers": ("tp_config={strategy: ffn, tensor_parallel_degree: 2}", "fsdp_config.broadcast_batch=first"),
}


def compared_in_training(folder: str) -> dict[str, list[str]]:
    def trained(name: str, *overrides: str) -> list[str]:
        with compared_digests() as digests:
            train(FSDP2, YAML, folder, name.replace(" ", "-"), *overrides, "max_duration=1ba", "save_folder=null")
        return digests

    return for_each(trained, {name: (name, *overrides) for name, overrides in REAL.items()})


def test_real_ranks_compare_the_printed_digest(folder: str, tmp_path: Path):
    """LLM Foundry trains on two ranks from the same file; the digests that they compare before sharding equal the
    printed one."""
    ranks = run_ranks(compared_in_training, 2, folder, timeout_s=500)
    for name, overrides in REAL.items():
        printed = printed_digest(tmp_path, YAML, 2, f"code_paths=[{ROOT}/demo/record_loss.py]", *overrides)
        for compared in ranks:
            assert printed in compared[name], name
    assert len({compared for each in ranks[0].values() for compared in each}) >= 2, "all of them are one plan"
