"""Proposals for a run's own file: the planned memory of the changed file, and its approximate time."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.foundry_runs import YAML

from composer_fsdp2.errors import ConfigError, PlanError
from composer_fsdp2.estimate.bounds import GPUS
from composer_fsdp2.estimate.planned_step import PlannedStep
from composer_fsdp2.estimate.seconds import step_seconds
from composer_fsdp2.estimate.suggest import MAX_TRIED
from composer_fsdp2.migration.migrate import find_sections
from composer_fsdp2.migration.patched_file import Patch, apply_patch
from composer_fsdp2.preflight.batch_keys import batch_keys
from composer_fsdp2.preflight.fixed_settings import fixed_settings
from composer_fsdp2.preflight.planned import StepOptions, plan_step
from composer_fsdp2.preflight.preflight_run import PreflightRun
from composer_fsdp2.preflight.read_run import read_run
from composer_fsdp2.preflight.suggested_edits import replanning, suggest_edits
from composer_fsdp2.preflight.suggestion import SuggestedEdits

pytest.importorskip("transformers", reason="needs transformers' models")

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
}
TRAINER = """\
# a Trainer's arguments
fsdp: "full_shard auto_wrap"
fsdp_config:
  transformer_layer_cls_to_wrap: [LlamaDecoderLayer]  # the blocks
bf16: true
optim: adamw_torch
per_device_train_batch_size: 2  # what fitted
gradient_accumulation_steps: 2
"""
TITAN = """\
[training]
local_batch_size = 2
global_batch_size = 16
seq_len = 64
mixed_precision_param = "bfloat16"

[parallelism]
data_parallel_shard_degree = -1  # all

[activation_checkpoint]
mode = "none"
"""
ROLL = """\
actor_train:
  training_args:
    per_device_train_batch_size: 2
    gradient_accumulation_steps: 4
  strategy_args:
    strategy_name: fsdp2_train
    strategy_config:
      fsdp_size: 8
  device_mapping: list(range(0,8))
"""
AXOLOTL = """\
base_model: some/model
micro_batch_size: 2
gradient_accumulation_steps: 2
bf16: true
optimizer: adamw_torch
fsdp_version: 2
fsdp_config:
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  transformer_layer_cls_to_wrap: LlamaDecoderLayer
"""
FILES = {
    "run.yaml": TRAINER.replace("\n", "\r\n"),  # Windows line ends
    "run.toml": TITAN,
    "roll.yaml": ROLL,
    "axolotl.yaml": AXOLOTL,
}


def how(folder: Path, name: str, world_size: int = 8, sequence: int | None = 64) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    of_model = {} if name == "mpt.yaml" else {"model_config": str(folder / "config.json"), "sequence": sequence}
    return {"world_size": world_size, "gpus_per_node": 4, "device": "cpu", **of_model}


Planned = tuple[PreflightRun, PlannedStep]


def read_and_planned(file: Path, given: dict[str, Any]) -> Planned:
    run = read_run(file, **given)
    return run, plan_step(run, str(file), StepOptions())


def planned(file: Path, given: dict[str, Any]) -> PlannedStep:
    return read_and_planned(file, given)[1]


def suggested(file: Path, given: dict[str, Any], now: Planned, memory_bytes: int, **options: Any) -> SuggestedEdits:
    with replanning(file, **given) as replan:
        return suggest_edits(
            *now,
            file.read_bytes().decode(),
            file.name,
            replan=replan,
            memory_bytes=memory_bytes,
            **{"machine": GPUS["a100"], **options},
        )


# Models dominated by computation, even when small.
SLOW = replace(GPUS["a100"], flops=1e9)


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs the command patch")
@pytest.mark.parametrize(
    "name",
    ["run.yaml", "run.toml", *(pytest.param(name, marks=pytest.mark.slow) for name in ("roll.yaml", "axolotl.yaml"))],
)
def test_each_proposal_fits_when_planned_anew(name: str, tmp_path: Path):
    """A user who applies the diff would find that the run does not fit, or takes more memory than promised."""
    file = tmp_path / name
    file.write_bytes(FILES[name].encode())
    given = how(tmp_path, name)
    run, now = read_and_planned(file, given)
    memory_bytes = round(0.8 * now.estimate.peak_bytes)
    found = suggested(file, given, (run, now), memory_bytes)
    assert not found.fits and found.peak_bytes == now.estimate.peak_bytes
    assert found.proposals, found.explain()
    assert file.read_bytes() == FILES[name].encode()
    for number, proposal in enumerate(found.proposals):
        folder = tmp_path / str(number)
        folder.mkdir()
        shutil.copy(file, folder)
        patch = ["patch", "--binary", "-p0"]
        subprocess.run(patch, cwd=folder, input=proposal.diff.encode(), check=True, capture_output=True)
        again = planned(folder / name, given)
        assert again.estimate.peak_bytes == proposal.peak_bytes <= memory_bytes, proposal.diff
        assert again.estimate.host_bytes == proposal.host_bytes, proposal.diff
        assert seconds_of(again) == pytest.approx(proposal.seconds), proposal.diff
        rows = (now, again)
        assert len({each.microbatch_size * each.num_microbatches for each in rows}) == 1, proposal.diff
        assert len({(each.precision, each.optimizer, each.sequence_length) for each in rows}) == 1
        by_fsdp = "+  activation_checkpointing: true" in proposal.diff and name in ("run.yaml", "axolotl.yaml")
        assert any("use_cache" in note for note in proposal.notes) == by_fsdp


def seconds_of(step: PlannedStep) -> float:
    assert step.trace is not None
    return step_seconds(step.plan, step.estimate, step.trace, GPUS["a100"], step.num_microbatches)


def every_file() -> dict[str, str]:
    """Settings that a person could write into the Trainer's file by hand, before resorting to the host's memory."""
    found = {}
    for shard, recomputed, rows in product(("full_shard", "shard_grad_op"), (False, True), (1, 2)):
        text = TRAINER.replace("full_shard", shard).replace("batch_size: 2", f"batch_size: {rows}")
        text = text.replace("steps: 2", f"steps: {2 // rows}") + "gradient_checkpointing: true\n" * recomputed
        found[f"{shard}, {rows} rows, {'recomputed' if recomputed else 'kept'}"] = text
    return found


def test_no_file_by_hand_is_faster(tmp_path: Path):
    """With too few steps in its ladder, the search would miss settings that fit by a full plan."""
    file = tmp_path / "run.yaml"
    file.write_text(TRAINER.replace("steps: 2", "steps: 1"))
    given = how(tmp_path, file.name)
    by_hand = {}
    for what, text in every_file().items():
        (other := tmp_path / "other.yaml").write_text(text)
        step = planned(other, given)
        by_hand[what] = (seconds_of(step), step.estimate.peak_bytes)
    peaks = sorted(peak for _, peak in by_hand.values())
    now = read_and_planned(file, given)
    found = suggested(file, given, now, peaks[2])
    assert min(each for each, peak in by_hand.values() if peak <= peaks[2]) == pytest.approx(
        min([each.seconds for each in found.proposals] + [found.seconds] * found.fits), rel=0.01
    ), (found.explain(), by_hand)
    # Nothing proposed fits such a limit. A user who sets the rows on the command line gets no proposal for other rows.
    decided = {"microbatch_size": "--microbatch gives them"}
    nothing = suggested(file, given, now, 1000, decided=decided)
    assert not nothing.proposals and nothing.nearest is not None
    assert "+per_device_train_batch_size" not in nothing.nearest.diff
    assert any("tensor parallelism" in each for each in nothing.helps) and "what would help" in nothing.explain()
    said = {each.what: each.reason for each in nothing.unsaid}
    assert said["microbatch_size = 1"] == "--microbatch gives them"
    assert any("replicas" in what for what in said)
    with pytest.raises(ConfigError, match="does not configure sharding"):
        suggested(tmp_path / "config.json", given, now, peaks[0])


def test_a_setting_that_all_units_refuse_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A reason for each of 40 units was a page of one sentence."""
    file = tmp_path / "run.yaml"
    file.write_text(TRAINER)
    given = how(tmp_path, file.name)
    now = read_and_planned(file, given)

    def refuse(*_: object, **__: object) -> None:
        raise PlanError("\n".join(f"layers.{number} reshards to 8 ranks; use true or false" for number in range(40)))

    monkeypatch.setattr("composer_fsdp2.preflight.suggested_edits.read_run", refuse)
    found = suggested(file, given, now, 1000)
    assert {each.reason for each in found.unsaid} >= {"layers.0 reshards to 8 ranks; use true or false (and 39 more)"}
    assert "layers.1 " not in found.explain()


def test_a_run_that_fits_is_not_offloaded(tmp_path: Path):
    """An optimizer on the host, or half the rows, used to be the first advice for a run that already fits."""
    file = tmp_path / "run.yaml"
    file.write_text(TRAINER + "gradient_checkpointing: true\n")
    given = how(tmp_path, file.name, 1)  # no communication, only computation
    found = suggested(file, given, read_and_planned(file, given), 2**30)
    assert found.fits and found.num_tried <= MAX_TRIED
    assert [str(each) for each in found.proposals[0].changes] == ["gradient_checkpointing: false (was true)"]
    assert not any(each.host_bytes for each in found.proposals)
    file.write_text(TRAINER)
    found = suggested(file, given, read_and_planned(file, given), 2**30)
    assert found.proposals == () and "no setting available in this file makes it faster" in found.explain()


def test_more_ranks_help_as_many_as_are_said(tmp_path: Path):
    """A user who rents that many ranks would find that the run does not fit."""
    file = tmp_path / "run.yaml"
    file.write_text(TRAINER.replace("batch_size: 2", "batch_size: 1") + "gradient_checkpointing: true\n")
    given = how(tmp_path, file.name, 2)
    run, now = read_and_planned(file, given)
    keep = dict.fromkeys(("microbatch_size", "cpu_offload"), "as it is")
    memory_bytes = round(0.9 * now.estimate.peak_bytes)
    found = suggested(file, given, (run, now), memory_bytes, decided=keep)
    assert not found.proposals and found.nearest is None
    assert "no setting available in this file uses less memory" in found.explain()
    ranks = next(int(each.split()[1]) for each in found.helps if each.endswith("optimizer state"))
    assert planned(file, how(tmp_path, file.name, ranks)).estimate.peak_bytes <= memory_bytes * 1.02
    assert planned(file, how(tmp_path, file.name, ranks - 1)).estimate.peak_bytes > memory_bytes


@pytest.mark.slow
def test_405b_on_1024_ranks_takes_seconds(tmp_path: Path):
    """Users do not wait minutes for advice. The time limit fails a search that grows with the model."""
    file = tmp_path / "run.toml"
    file.write_text(TITAN.replace('"none"', '"full"').replace("= 16", "= 4096"))
    given = how(tmp_path, file.name, 1024, 8192) | {"device": "cuda", "gpus_per_node": 8}
    config = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128}
    of_405b = {**CONFIG, **config, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps(of_405b))
    now = read_and_planned(file, given)
    began = time.process_time()
    found = suggested(file, given, now, 73 * 2**30)
    assert not found.fits and 1 < found.num_tried <= MAX_TRIED
    assert [str(each) for each in found.proposals[0].changes] == ["training.local_batch_size: 1 (was 2)"]
    assert time.process_time() - began < 60


# Values that only the user can decide.
ASKED: dict[str, tuple[str, str, dict[str, str]]] = {
    "auto": (
        "mpt.yaml",
        YAML.read_text().replace("microbatch_size: 4", "microbatch_size: auto"),
        {"microbatch_size": "the file sets auto"},
    ),
    "layers that nobody splits yet": (
        "run.yaml",
        "tp_config: {strategy: mine, tensor_parallel_degree: 2}\nfsdp_config: {sharding_strategy: FULL_SHARD}\n",
        {"microbatch_size": "needs a decision first", "replicas": "needs a decision first"},
    ),
}
LEFT_ALONE: dict[str, tuple[str, str, dict[str, str]]] = {
    "dropout, and a model that cannot run without recomputation": (
        "mpt.yaml",
        YAML.read_text()
        .replace("attn_impl: torch", "attn_impl: torch\n    attn_pdrop: 0.1")
        .replace("n_layers: 3", "n_layers: 2"),
        {
            "microbatch_size = 1": "attn_pdrop of the model draws",
            "activations = none": "cannot be traced: RuntimeError",
        },
    ),
    "a batch that the file does not say": (
        "run.yaml",
        "device_train_microbatch_size: 8\nfsdp_config: {sharding_strategy: FULL_SHARD}\n",
        {"microbatch_size = 1": "does not set the number of rows of a batch"},
    ),
    "another training system": (
        "run.yaml",
        "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\nmixed_precision: bf16\n",
        {"reshard_after_forward = False": "before `composer-fsdp2 migrate`"},
    ),
}


@pytest.mark.foundry
@pytest.mark.parametrize("what", [*ASKED, *LEFT_ALONE])
def test_what_would_change_the_run_is_not_proposed(what: str, tmp_path: Path):
    """Otherwise a proposal would train on other numbers or another batch, or could not train at all."""
    name, text, reasons = (ASKED | LEFT_ALONE)[what]
    file = tmp_path / name
    file.write_text(text)
    given = how(tmp_path, name)
    if what in ASKED:
        said = fixed_settings(read_run(file, **given))
    else:
        run, now = read_and_planned(file, given)
        found = suggested(file, given, (run, now), round(0.8 * now.estimate.peak_bytes))
        said = {what: each.reason for each in found.unsaid for what in each.what.split("; ")}
        for each in filter(None, (*found.proposals, found.nearest)):
            assert "batch_size" not in "".join(change.key for change in each.changes), each.diff
    for left_out, why in reasons.items():
        assert why in said.get(left_out, ""), (left_out, said)


@pytest.mark.parametrize("words", ["local_batch_size = 8\nglobal_batch_size = -1", "batch_size = 8"])
def test_torchtitan_s_batch_stays(words: str, tmp_path: Path):
    """-1 is TorchTitan's value for the batch implied by its microbatches; an old key beside the new one would set it
    twice."""
    file = tmp_path / "run.toml"
    file.write_text(TITAN.replace("local_batch_size = 2\nglobal_batch_size = 16", words))
    run = read_run(file, **how(tmp_path, file.name))
    assert (run.microbatch_size, run.num_microbatches, run.batch_rows) == (8, 1, 8)
    ((_, section),) = find_sections(file.read_text(), file.name)[1]
    keys = batch_keys("torchtitan", section, rows=2, number=4, global_rows=64)
    diff = apply_patch(file.read_text(), file.name, Patch(keys=keys)).diff()
    assert "+local_batch_size = 2\n" in diff and "+global_batch_size = 64\n" in diff
    assert diff.count("-batch_size") == words.startswith("batch_size")


@pytest.mark.parametrize(
    ("dialect", "text", "expected"),
    [
        ("composer", "device_train_microbatch_size: 8\nfsdp_config: {}", {"device_train_microbatch_size": 2}),
        ("composer", "global_train_batch_size: 8\nfsdp_config: {}", {"device_train_microbatch_size": 2}),
        (
            "composer",
            "a: {training_args: {per_device_train_batch_size: 8}, fsdp_config: {}}",
            {"a.training_args.per_device_train_batch_size": 2, "a.training_args.gradient_accumulation_steps": 4},
        ),
        (
            "huggingface",
            "fsdp: full_shard\nper_device_train_batch_size: 1",
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        ),
        ("huggingface", ROLL.replace("strategy_args", "x") + "distributed_type: FSDP", {}),
        (
            "axolotl",
            "base_model: m\nmicro_batch_size: 1\nfsdp: [full_shard]",
            {"micro_batch_size": 2, "gradient_accumulation_steps": 4},
        ),
        (
            "roll",
            ROLL,
            {
                "actor_train.training_args.per_device_train_batch_size": 2,
                "actor_train.training_args.gradient_accumulation_steps": 4,
            },
        ),
    ],
)
def test_a_batch_is_cut_by_keys_of_its_system(dialect: str, text: str, expected: dict[str, int]):
    """Otherwise a proposal would change the batch of a step, which the learning rate was tuned for."""
    ((_, section),) = find_sections(text, "run.yaml", dialect=dialect)[1]
    keys = batch_keys(dialect, section, rows=2, number=4, global_rows=64)
    assert {".".join(map(str, path)): value for path, value in keys.items()} == expected


@pytest.mark.foundry
def test_every_second_block_of_an_mpt_is_recomputed(tmp_path: Path):
    """All blocks would be recomputed where every second one is enough; the key is in the model's configuration, not in
    the section."""
    file = tmp_path / "mpt.yaml"
    file.write_text(YAML.read_text().replace("activation_checkpointing: true", "activation_checkpointing: false"))
    given = how(tmp_path, file.name)
    now = read_and_planned(file, given)
    decided = dict.fromkeys(("reshard_after_forward", "replicas", "microbatch_size", "cpu_offload"), "as it is")
    found = suggested(file, given, now, now[1].estimate.peak_bytes - 1, decided=decided, machine=SLOW)
    assert [str(each) for each in found.proposals[0].changes] == [
        "model.activation_checkpointing_target: {mptblock: [1]}",
        "fsdp_config.activation_checkpointing: true (was false)",
    ]
