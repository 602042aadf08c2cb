"""Batches and units from other systems' files, and the assumptions for missing keys."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from composer_fsdp2.config.findings import Origin
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.estimate.bounds import GPUS
from composer_fsdp2.estimate.events import Hook
from composer_fsdp2.estimate.plan_text import bounds_table, human_count
from composer_fsdp2.migration.dialect import Section
from composer_fsdp2.preflight.batch_keys import batch_keys
from composer_fsdp2.preflight.planned import StepOptions, plan_step
from composer_fsdp2.preflight.preflight_run import PreflightRun
from composer_fsdp2.preflight.read_run import read_run

pytest.importorskip("transformers")

YAMLS = Path(__file__).resolve().parents[2] / "yamls"
NARROW = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
NARROW |= {"num_key_value_heads": 2, "num_hidden_layers": 3, "max_position_embeddings": 131072}


def config(folder: Path, kind: str = "llama", **values: Any) -> Path:
    path = folder / f"{kind}.json"
    path.write_text(json.dumps({"model_type": kind} | NARROW | values))
    return path


def assumed(run: PreflightRun) -> set[str]:
    return {finding.key for finding in run.findings if finding.origin is Origin.IMPLICIT}


def batch(run: PreflightRun) -> tuple[int, int, int]:
    return run.microbatch_size, run.num_microbatches, run.sequence_length


def test_a_migrated_file_keeps_its_batch(tmp_path: Path):
    """The Trainer's arguments stay beside the section that migrate rewrote; without them the plan was for one row of
    2,048 tokens."""
    for side in ("fsdp1", "fsdp2"):
        run = read_run(YAMLS / f"huggingface/llama-sft-{side}.yaml", world_size=8, model_config=config(tmp_path))
        assert batch(run) == (1, 16, 4096), side
        assert "microbatches of a step" not in {each.key for each in run.findings}, "their number is planned"


def test_without_auto_wrap_a_trainer_s_model_is_one_unit(tmp_path: Path):
    """A plan by layers would promise a memory reduction that this run does not get."""
    mixture = config(tmp_path, "qwen3_moe", num_experts=4, moe_intermediate_size=16, head_dim=8)
    run = read_run(
        YAMLS / "huggingface/qwen3-moe-distillation-fsdp1.yaml", world_size=8, model_config=mixture, sequence=64
    )
    assert [unit.name for unit in run.plan.units if unit.parameters] == ["model"]
    assert len(run.plan.checkpointed) == 3
    assert batch(run) == (2, 8, 64)


def test_how_tokens_are_shared_out_is_said(tmp_path: Path):
    """An expert with more tokens than the others takes more memory, so the plan must state its assumption."""
    for kind, sizes in (
        ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}),
        ("llama", {}),
    ):
        run = read_run(config(tmp_path, kind, **sizes), world_size=2, microbatch=1, sequence=16, device="cpu")
        notes = plan_step(run, kind, StepOptions()).estimate.notes
        assert any("Every expert" in note for note in notes) == bool(sizes), kind


def test_layers_that_torchtitan_splits_are_split_in_the_plan(tmp_path: Path):
    """Uses the plan of Hugging Face's model; otherwise a plan without TP would be shown for the run."""
    path = YAMLS / "torchtitan/llama3-70b-torchtitan.toml"
    wide = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8}
    run = read_run(path, world_size=256, model_config=config(tmp_path, **wide))
    assert not [each.key for each in run.findings if each.outcome.blocks]
    assert run.plan.mesh.tensor_degree == 8
    assert any(each.path.endswith("layers.0.mlp.down_proj") for each in run.plan.split)
    assert batch(run) == (8, 1, 8192)
    # TorchTitan's own blocks are transformers' layers; the embeddings and the output layer are units as well.
    assert len([unit for unit in run.plan.units if unit.parameters]) == 3 + 2 + 1
    assert "wrap_policy" in assumed(run)


def titan(folder: Path, mode: str) -> PreflightRun:
    """Four Llama blocks, planned from a TorchTitan file."""
    path = folder / "run.toml"
    path.write_text(TITAN + mode)
    model = config(folder, num_hidden_layers=4)
    return read_run(path, world_size=4, model_config=model, microbatch=1, sequence=16)


@pytest.mark.parametrize(
    ("mode", "recomputed"),
    [
        ("[activation_checkpoint]\nmode = 'full'", [0, 1, 2, 3]),
        ("", [1, 3]),  # TorchTitan's default: selective, every second block
        ("[activation_checkpoint]\nmode = 'selective'\nselective_ac_option = '3'", [2]),
        ("[activation_checkpoint]\nmode = 'selective'\nselective_ac_option = '1'", [0, 1, 2, 3]),
        ("[activation_checkpoint]\nmode = 'none'", []),
        ("[activation_checkpoint]\nmode = 'memory_budget'", []),  # its selection is unknown
    ],
)
def test_torchtitan_recomputes_every_nth_block(tmp_path: Path, mode: str, recomputed: list[int]):
    """Counted like its ``_apply_layer_sac``: planned as ``full``, a run with the default ran out of memory."""
    run = titan(tmp_path, mode)
    assert list(run.plan.checkpointed) == [f"model.model.layers.{number}" for number in recomputed]
    said = [each.key for each in run.findings if each.key.startswith("activation_checkpoint.")]
    assert said == ["activation_checkpoint.mode"] * ("memory_budget" in mode)


def test_torchtitan_keeps_what_it_selects_by_operator(tmp_path: Path):
    """Saves attention and the first, third, fifth and seventh matrix product of each block; otherwise like ``full``."""
    kept = {}
    for option in ("mode = 'selective'\nselective_ac_option = 'op'", "mode = 'full'"):
        run = titan(tmp_path, f"[activation_checkpoint]\n{option}")
        events = run.trace().events
        kept[option] = next(each.live_bytes for each in events if each.hook is Hook.PRE_BACKWARD)
        assert sum(each.recomputed_flops for each in events) > 0
    width, wide, key = NARROW["hidden_size"], NARROW["intermediate_size"], NARROW["hidden_size"] // 2
    query, value, gate, down, attention = width, key, wide, width, width
    of_a_token = 2 * (query + value + gate + down + attention) + 4 * NARROW["num_attention_heads"]  # its logsumexp
    by_operator, full = kept.values()
    assert by_operator - full == 4 * 16 * of_a_token


AXOLOTL = "base_model: m\ndatasets: []\nmicro_batch_size: 1\nfsdp_version: 2\nbf16: true\n"
AXOLOTL += "fsdp_config: {auto_wrap_policy: TRANSFORMER_BASED_WRAP}\n"
TRAINER = "per_device_train_batch_size: 1\nbf16: true\nfsdp: full_shard auto_wrap\n"
ROLL = "a:\n  model_args: {freeze_module_prefix: model.layers.1}\n  device_mapping: list(range(0, 4))\n"
ROLL += "  strategy_args: {strategy_name: fsdp2_train, strategy_config: {fsdp_size: 4}}\n"
TITAN = "[model]\nname = 'llama3'\nflavor = '8B'\n[training]\nlocal_batch_size = 1\n"


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        ("run.yaml", AXOLOTL + "adapter: lora\n", "adapter"),
        ("run.yaml", TRAINER + "use_peft: true\n", "adapter"),
        ("run.yaml", AXOLOTL + "load_in_4bit: true\n", "quantized weights"),
        ("run.yaml", AXOLOTL + "unfrozen_parameters: ['lm_head.weight$[:9]']\n", "unfrozen_parameters"),
        ("run.yaml", ROLL, "model_args.freeze_module_prefix"),
        ("run.toml", TITAN, None),
        ("run.toml", TITAN.replace("flavor", "converters = ['float8']\nflavor"), "model.converters"),
    ],
)
def test_what_stops_a_migration_stops_a_plan(tmp_path: Path, name: str, text: str, key: str | None):
    """A plan of another run with exit code 0: of all parameters instead of an adapter's, in 16 bits instead of 4."""
    (tmp_path / name).write_text(text)
    run = read_run(tmp_path / name, world_size=4, model_config=config(tmp_path), microbatch=1, sequence=16)
    step = plan_step(run, name, StepOptions(machine=GPUS["h100"]))
    assert [each.key for each in step.blocking] == ([] if key is None else [key])
    assert step.bounds is not None
    peak = GPUS["h100"].fp8_flops if key == "model.converters" else GPUS["h100"].flops
    assert step.bounds.machine.flops == peak  # a lower peak would not give a lower bound of the time


def test_the_number_of_ranks_may_stand_in_the_file(tmp_path: Path):
    """accelerate's file has num_processes, which the user had to repeat on the command line."""
    text = "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 4\nfsdp_config: {fsdp_version: 2}\n"
    (tmp_path / "run.yaml").write_text(text)
    how = {"model_config": config(tmp_path), "microbatch": 1, "sequence": 16}
    assert read_run(tmp_path / "run.yaml", **how).world_size == 4
    assert read_run(tmp_path / "run.yaml", world_size=2, **how).world_size == 2


@pytest.mark.parametrize(("degree", "tokens"), [(1, 4 * 16), (2, 2 * 16)])
def test_tokens_and_hours_are_bounds(tmp_path: Path, degree: int, tokens: int):
    """Users compare costs in tokens a second and GPU hours. TP ranks read one batch, counted once."""
    text = TITAN + f"[parallelism]\ntensor_parallel_degree = {degree}\n"
    (tmp_path / "run.toml").write_text(text)
    run = read_run(tmp_path / "run.toml", world_size=4, model_config=config(tmp_path), microbatch=1, sequence=16)
    machine = replace(GPUS["h100"], flops=1e9)
    step = plan_step(run, "run.toml", StepOptions(machine=machine))
    assert step.bounds is not None and step.num_tokens == tokens
    rows = dict(bounds_table(step).rows)
    assert rows["tokens a second, all ranks"] == f"at most {human_count(tokens / step.bounds.lower_s)}"
    hours = 4 * step.bounds.lower_s / 3600 * (1e9 / tokens)
    assert rows["GPU hours for 1 B tokens"] == f"at least {hours:.3g}"


def test_axolotl_takes_the_accumulation_from_the_batch_of_a_rank(tmp_path: Path):
    """A step of 16 microbatches was planned as one; beside a new accumulation axolotl refuses the old key."""
    (tmp_path / "run.yaml").write_text(AXOLOTL.replace("micro_batch_size: 1", "micro_batch_size: 2\nbatch_size: 32"))
    run = read_run(tmp_path / "run.yaml", world_size=4, model_config=config(tmp_path), sequence=16)
    assert batch(run) == (2, 16, 16)
    values = {"micro_batch_size": 2, "batch_size": 32}
    keys = batch_keys("axolotl", Section.at((), values), rows=1, number=32, global_rows=128)
    assert keys == {("micro_batch_size",): 1, ("gradient_accumulation_steps",): 32, ("batch_size",): None}


def test_ranks_of_one_sequence_compute_the_rows_of_all(tmp_path: Path):
    """Each of 2 CP ranks computes a part of both ranks' rows; the trace divides them."""
    path = YAMLS / "roll/vision-language-qwen2.5-vl-7b-roll.yaml"
    run = read_run(
        path,
        world_size=8,
        model_config=config(tmp_path, "qwen2"),
        overrides=["actor_train.model_args.freeze_module_prefix=null"],
    )
    assert batch(run) == (1, 256, 16384 + 16384)
    assert (run.computed_rows, run.sequence_length) == (2, 32768)


def test_a_model_takes_no_more_tokens_than_it_has_positions(tmp_path: Path):
    """Without a length, 2,048 tokens are assumed. GPT-2 has 1,024 positions, and its trace failed."""
    short, long = (
        config(tmp_path, "gpt2", max_position_embeddings=1024, n_layer=2, n_embd=32, n_head=4),
        config(tmp_path),
    )
    assert read_run(short, world_size=2).sequence_length == 1024
    run = read_run(long, world_size=2)
    assert run.sequence_length == 2048
    assert {"precision", "fsdp_config", "wrap_policy", "device_train_microbatch_size", "max_seq_len"} <= assumed(run)
    assert {finding.where for finding in run.findings} == {str(long)}  # a model's file has no line for them


def test_composer_recomputes_what_a_hook_or_a_policy_names(tmp_path: Path):
    """Composer checkpoints nothing for a model without the hook: a plan that checkpointed its layers was 13 % too
    low."""
    file = tmp_path / "run.yaml"
    file.write_text("fsdp_config: {activation_checkpointing: true}\nprecision: amp_bf16\n")
    run = read_run(file, model_config=config(tmp_path), world_size=8)
    assert run.plan.checkpointed == () and "activation_checkpointing_policy" in assumed(run)
    override = "fsdp_config.activation_checkpointing_policy=auto"
    assert read_run(file, model_config=config(tmp_path), world_size=8, overrides=[override]).plan.checkpointed


def test_the_command_line_says_what_a_model_file_does_not(tmp_path: Path):
    """A model's file can be planned with any settings, and with fewer layers, without a run's file."""
    overrides = ["fsdp_config.sharding_strategy=SHARD_GRAD_OP", "fsdp_config.activation_checkpointing=true"]
    overrides += ["precision=amp_fp16", "num_hidden_layers=2", "global_train_batch_size=64", "optimizer.name=adam"]
    run = read_run(config(tmp_path), world_size=8, overrides=[*overrides, "device_train_microbatch_size=2"])
    assert len(run.plan.units) == 3
    assert not run.plan.units[0].reshard_after_forward
    assert run.plan.checkpointed == ("model.model.layers.0", "model.model.layers.1")
    assert run.precision == "amp_fp16" and run.plan.units[0].mixed_precision.param_dtype == "float16"
    assert batch(run)[:2] == (2, 4)
    assert run.optimizer is not None and run.optimizer.name == "adam"
    assert not {"precision", "fsdp_config", "optimizer.name"} & assumed(run)
    with pytest.raises(ConfigError, match="did you mean sharding_strategy"):
        read_run(config(tmp_path), world_size=8, overrides=["fsdp_config.shardin_strategy=FULL_SHARD"])


def test_a_cached_model_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A model trained before has its configuration in the cache, so users need no path."""
    from huggingface_hub import constants

    folder = tmp_path / "models--Qwen--Qwen3-8B"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc" / "config.json").write_bytes(config(tmp_path, "qwen3", head_dim=8).read_bytes())
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    run = read_run(YAMLS / "roll/text-qwen3-8b-roll.yaml", world_size=16)
    assert len(run.plan.checkpointed) == 3
