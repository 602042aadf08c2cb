"""``composer-fsdp2 plan`` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from support.commands import run_here

from composer_fsdp2.estimate.planned_step import SCHEMA

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}
FILE = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_version": 1,
        "fsdp_sharding_strategy": "FULL_SHARD",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "fsdp_use_orig_params": True,
    },
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 4,
}
SIZES = ["--world-size", 4, "--model-config", "config.json", "--microbatch", 2, "--sequence", 16]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(FILE))
    return tmp_path


def test_a_run_is_planned(folder: Path):
    """One command: text, the object that scripts read, a page and a trace; a step that does not fit ends with 1."""
    done = run_here(folder, "plan", "run.yaml", *SIZES, "--memory", "80GiB", "--html", "plan.html", "--trace", "t.json")
    assert done.code == 0, done.err
    assert done.out.startswith("run.yaml: ") and "verdict: fits" in done.out
    assert (folder / "plan.html").read_text().lower().startswith("<!doctype html>")
    assert json.loads((folder / "t.json").read_text())["traceEvents"]

    done = run_here(folder, "plan", "run.yaml", *SIZES, "--memory", "8MiB", "--reserve", "8191KiB", "--json")
    found = json.loads(done.out)
    jsonschema.validate(found, json.loads(SCHEMA.read_text()))
    assert (done.code, found["exit_code"], found["fits"]) == (1, 1, False)
    assert found["memory"]["usable_bytes"] == 1024


def test_settings_are_suggested(folder: Path):
    """A run that does not fit would be changed by trial and error on a cluster."""
    words = ["plan", "run.yaml", *SIZES, "--memory", "170KiB", "--reserve", "0", "--suggest"]
    done = run_here(folder, *words, "--html", "plan.html")
    assert done.code == 1 and not done.err, done.err
    assert "suggestions for 170.0 KiB a rank" in done.out and "\n     +++ run.yaml\n" in done.out, done.out
    assert "suggestions for 170.0 KiB a rank" in (folder / "plan.html").read_text()

    found = json.loads(run_here(folder, *words, "--json").out)
    jsonschema.validate(found, json.loads(SCHEMA.read_text()))
    first = found["suggestions"]["proposals"][0]
    assert first["diff"].startswith("--- run.yaml\n+++ run.yaml\n") and first["peak_bytes"] <= 170 * 1024
    assert {change["key"].split(".")[0] for change in first["changes"]} == {"fsdp_config"}
    assert yaml.safe_load((folder / "run.yaml").read_text()) == FILE


def test_what_cannot_be_used(folder: Path):
    """One line that names the way out, exit code 2, and no file left behind."""
    files = ["--html", "plan.html", "--trace", "t.json"]
    for words, said in (
        (["none.yaml", *SIZES], "none.yaml"),
        (["run.yaml", *SIZES, "--memory", 80], "--memory 80 has no unit; write 80GiB"),
        (["run.yaml", *SIZES, "--inter-gbps", 400], "--inter-gbps 400 has no unit; write 400Gb/s"),
        (["run.yaml", *SIZES, "--flops", 989], "--flops 989 has no unit; write 989TFLOPS"),
        (["run.yaml", *SIZES, "--memory", "80GiB", "--reserve", "6"], "--reserve 6 has no unit"),
        (["run.yaml", "--world-size", 4, "--microbatch", 1, "--sequence", 8], "--model-config"),
        (["run.yaml", *SIZES, "--model-config", "none"], "none"),
        (["run.yaml", *SIZES, "--suggest"], "--suggest needs --memory"),
        (["run.yaml", *SIZES, "--memory", "80GiB", "--suggest", "--no-activations"], "--no-activations"),
        (["run.yaml", *SIZES, "--memory", "80GiB", "--host-memory", "1GiB"], "--host-memory is for --suggest"),
        (["config.json", *SIZES, "--memory", "80GiB", "--suggest"], "config.json"),
    ):
        done = run_here(folder, "plan", *words, *files)
        assert done.code == 2 and not done.out, (words, done)
        assert done.err.count("\n") == 1 and said in done.err, (words, done.err)
        assert {path.name for path in folder.iterdir()} == {"config.json", "run.yaml"}, words
    done = run_here(folder, "plan", "run.yaml", *SIZES, "--html", "nowhere/plan.html")
    assert done.code == 2 and "there is no folder nowhere" in done.err
    assert run_here(folder, "plan", "run.yaml").code == 2  # for how many ranks?


def test_the_schema_is_told(folder: Path):
    """Who has only the command can check what it prints."""
    done = run_here(folder, "plan", "--json-schema")
    assert done.code == 0 and json.loads(done.out) == json.loads(SCHEMA.read_text())
