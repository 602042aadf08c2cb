"""Every run of ``yamls/`` as ``plan`` reads it: at its real widths, without weights, with the network refused."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.commands import run_here
from support.known_runs import FOLDER, PAIRS, configs
from support.network import network_refused

from composer_fsdp2.preflight.planned import Questions, plan_step
from composer_fsdp2.preflight.preflight_run import PreflightRun
from composer_fsdp2.preflight.read_run import read_run

pytestmark = pytest.mark.foundry


# Of 6,144 experts, each of three modules; that of half as many stays.
SLOW = {"roll/moe-qwen3-30b-a3b-roll.yaml": [pytest.mark.slow]}
each_pair = pytest.mark.parametrize(
    "pair", [pytest.param(pair, id=pair[0], marks=SLOW.get(pair[0], ())) for pair in PAIRS]
)


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Both sides of a pair, read once, with neither a network nor anything that was downloaded before."""
    folder = tmp_path_factory.mktemp("configs")
    for name, config in configs().items():
        config.save_pretrained(folder / name)

    @cache
    def of(pair: tuple[str, str]) -> tuple[PreflightRun, PreflightRun]:
        run = PAIRS[pair]
        config = folder / run.config if run.config else None
        with network_refused():
            left, right = (
                read_run(FOLDER / name, world_size=run.ranks, model_config=config, overrides=overrides)
                for name, overrides in zip(pair, ((), run.right), strict=True)
            )
        return left, right

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "an empty cache"))
        yield of


def test_every_file_is_tested():
    """A file that is in the folder and in no table here can go wrong unseen."""
    files = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.suffix in (".yaml", ".toml")}
    assert files == {name for pair in PAIRS for name in pair} | {"mpt-tiny-fsdp1.yaml"}


@each_pair
def test_a_run_is_read_at_its_real_widths(pair: tuple[str, str], read: Any):
    """Of a model that is smaller than the run's, or of whose weights some are not tied, every number is wrong."""
    for run in read(pair):
        tensors = [*run.model.parameters(), *run.model.buffers()]
        assert sum(parameter.numel() for parameter in run.model.parameters()) == PAIRS[pair].parameters
        assert sum(unit.numel for unit in run.plan.units) == PAIRS[pair].parameters
        assert {parameter.device.type for parameter in run.model.parameters()} == {"meta"}
        # Rotary frequencies, which transformers computes where it builds.
        assert sum(tensor.nbytes for tensor in tensors if not tensor.is_meta) <= 1024


@each_pair
def test_both_sides_are_one_plan(pair: tuple[str, str], read: Any):
    """Who migrated a file would be told that the run is another one."""
    left, right = read(pair)
    assert left.plan.digest == right.plan.digest
    assert math.prod(left.plan.mesh.shape) == PAIRS[pair].ranks


# Those of accelerate and TorchTitan say nothing of batches, on one side or on both.
SAYING = [pair for pair in PAIRS if pair[0].split("/")[0] not in ("accelerate", "torchtitan") and pair[0] not in SLOW]


@pytest.mark.parametrize("pair", SAYING, ids=[left for left, _ in SAYING])
def test_both_sides_have_one_batch(pair: tuple[str, str], read: Any):
    """What migrate leaves beside the section is read as before it: memory is that of a microbatch."""
    left, right = read(pair)
    for field in ("microbatch_size", "num_microbatches", "sequence_length"):
        assert getattr(left, field) == getattr(right, field), field


@each_pair
def test_what_was_replaced_is_said(pair: tuple[str, str], read: Any):
    """A plan of other attention, or of no weights, must not pass for the run's own; and each has its line."""
    for run, name in zip(read(pair), pair, strict=True):
        replaced = {each.key: each for each in run.findings if each.key.startswith("model.")}
        assert set(replaced) == PAIRS[pair].replaced
        for finding in replaced.values():
            assert finding.reason and finding.target and str(FOLDER / name) in finding.where
    left, _ = read(pair)
    assert {each.key for each in left.findings if each.outcome.blocks} == PAIRS[pair].decisions


@pytest.mark.parametrize("name", ["mpt/mpt-7b", "t5/t5-base"])
def test_a_step_is_planned_with_its_activations(name: str, read: Any):
    """The whole of what ``plan`` does for such a file, from flash attention's place to four tied weights."""
    pair = (f"{name}-fsdp1.yaml", f"{name}-fsdp2.yaml")
    with network_refused():
        left, right = (plan_step(run, "run.yaml", Questions()) for run in read(pair))
    assert left.estimate.peak_bytes == right.estimate.peak_bytes
    assert json.loads(json.dumps(left.to_json()))["per_rank"]["activations_bytes"] > 0


def test_the_command_needs_no_network(tmp_path: Path):
    """From the file to the text as a user gets it: nothing is looked up on the way."""
    with network_refused():
        done = run_here(tmp_path, "plan", FOLDER / "mpt/mpt-125m-fsdp1.yaml", "--world-size", 8, "--memory", "80GiB")
    assert done.code == 0 and not done.err, done.err
    assert "125.3 M parameters" in done.out and "verdict: fits" in done.out


# Changes of a small run, and what is said of each.
UNUSABLE = {
    "max_seq_len=none": "LLM Foundry refuses it",
    "max_seq_len=0": "a microbatch of 0 tokens in a row cannot be planned",
    "global_train_batch_size=6": "not a multiple of world size 4; 3 or 6 would do",
    "global_train_batch_size=-16": "device_train_microbatch_size is -4",
    "global_train_batch_size=400000000": "a batch of 25000000 microbatches on each rank cannot be planned",
    "device_train_microbatch_size=.nan": "LLM Foundry refuses it",
    "optimizer=null": "LLM Foundry refuses it",
    "precision=half": "precision is 'half'; expected one of",
    "fsdp_config=null": "it has no fsdp_config",
    "fsdp_config.data_parallel_shard_degree=3": "use 1, 2 or 4",
    "model=null": "which model is trained is not said here",
    "model.name=nobody": "the model cannot be built: RegistryError",
    "model.d_model=-64": "the model cannot be built: RuntimeError",
    "model.attn_config=3": "no run can be made of it: AttributeError",
    "model={name: hf_causal_lm, pretrained_model_name_or_path: nobody/nothing}": "nothing is downloaded while planning",
    "model={name: hf_causal_lm, pretrained_model_name_or_path: 3}": "no run can be made of it: TypeError",
    "tp_config={strategy: nobody, tensor_parallel_degree: 2}": "no run can be made of it: RegistryError",
    "nobody=3": "LLM Foundry refuses it: ValueError: Unused parameters",
}


FILE = (str(FOLDER / "mpt-tiny-fsdp1.yaml"), f"code_paths=[{FOLDER.parent}/demo/record_loss.py]")


@pytest.mark.parametrize("change", UNUSABLE)
def test_what_foundry_or_a_model_raises_is_one_line(change: str, tmp_path: Path):
    """Their errors are tracebacks through three packages; what is wrong stands in the last line, if anywhere."""
    with network_refused():
        done = run_here(tmp_path, "plan", *FILE, change, "--world-size", 4, "--html", "plan.html")
    assert done.code == 2 and not done.out, done
    assert done.err.count("\n") == 1 and UNUSABLE[change] in done.err, done.err
    assert not list(tmp_path.iterdir())


def test_one_rank_is_not_sharded(tmp_path: Path):
    """On one rank Foundry drops the section: a plan by it would be another run's."""
    done = run_here(tmp_path, "plan", *FILE, "--world-size", 1)
    assert done.code == 2 and "on one rank Foundry trains without FSDP" in done.err
