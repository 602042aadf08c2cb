"""``composer-fsdp2 compare``: real runs on FSDP1 and on FSDP2, alike, and with one thing that is wrong on FSDP2."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import pytest
from support.commands import SCRIPT
from support.comparisons import Compared, compare_all
from support.foundry_runs import YAML, make_data_of_runs, surroundings
from support.oracle import FSDP1
from support.ranks import run_ranks

from composer_fsdp2.comparing.judging import DATA, LOSSES, NORMS, OPTIMIZER, PARAMETERS, SETTINGS, START
from composer_fsdp2.comparing.outcome import SCHEMA

pytestmark = [pytest.mark.composer, pytest.mark.foundry]

SHARDED = '{"state_dict_type": "sharded"}'
ADAMW = ["--optimizer", "adamw", "--microbatch", "2", "--clip", "0.1"]
# What FSDP2 alone runs in place of a line of the script.
FAULTS = {
    "gradient-scale": ("F.cross_entropy(outputs", "scaled(F.cross_entropy)(outputs"),
    "another-seed": ("manual_seed(3)", "manual_seed(4)"),
    "lost-state": (
        "    def batch_end(self",
        "    def fit_start(self, state, logger):\n        state.optimizers[0].state.clear()\n\n    def batch_end(self",
    ),
    "reduce-dtype": ("json.loads(args.fsdp)", "json.loads(args.fsdp) | REDUCED_IN_BF16"),
    "weight-decay": ("AdamW(model.parameters(), lr=1e-2)", "AdamW(in_groups(model), lr=1e-2)"),
}
BEFORE = """
import torch


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context, loss):
        return loss.clone()

    @staticmethod
    def backward(context, gradient):
        return 2 * gradient


def scaled(loss):
    return lambda *inputs: Doubled.apply(loss(*inputs))


def in_groups(model):
    some = [parameter for name, parameter in model.named_parameters() if name.endswith("blocks.1.ln.bias")]
    rest = [parameter for parameter in model.parameters() if all(parameter is not each for each in some)]
    return [{"params": some, "weight_decay": 0.0}, {"params": rest}]


REDUCED_IN_BF16 = {"mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "bf16", "buffer_dtype": "fp32"}}
"""


def write_faulty(path: Path, old: str, new: str) -> Path:
    """A script that is the user's on FSDP1, and another one on FSDP2."""
    source = SCRIPT.read_text()
    assert source.count(old) == 1
    path.write_text(
        "from composer_fsdp2.compat import is_installed\n"
        f"source = {source!r}\n"
        "if is_installed():\n"
        f"    source = {BEFORE!r} + source.replace({old!r}, {new!r})\n"
        "exec(compile(source, __file__, 'exec'))\n"
    )
    return path


def save_on_fsdp1(folder: str) -> None:
    words = [str(SCRIPT), *ADAMW, "--fsdp", SHARDED, "--batches", "2", "--save-folder", folder]
    with FSDP1(), mock.patch.object(sys, "argv", words), pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data for the YAML, and a checkpoint of the script's."""
    made = tmp_path_factory.mktemp("compare")
    with mock.patch.dict("os.environ", {"TOKENIZERS_PARALLELISM": "false"}):
        run_ranks(make_data_of_runs, 2, str(made))
    run_ranks(save_on_fsdp1, 2, str(made / "saved"))
    return made


@pytest.fixture(scope="module")
def compared(folder: Path) -> dict[str, Compared]:
    """Everything, each comparison with six processes of its own."""
    more = ["save_folder=saved-by-yaml", "save_overwrite=true", "eval_first=true"]
    yaml = [YAML, "--batches", "3", *surroundings(str(folder), folder / "losses.jsonl"), *more]
    resumed = ["--load-path", folder / "saved" / "ep0-ba2", "--batches", "3", "--", *ADAMW, "--fsdp", SHARDED]
    after = ["--eval", "--save-folder", "saved-by-script", "--exit-code", "7"]
    commands: dict[str, list[Any]] = {
        "yaml": yaml,
        "script": [SCRIPT, "--", *ADAMW, *after],
        "resumed": [SCRIPT, *resumed],
    }
    for name, fault in FAULTS.items():
        rest = resumed if name == "lost-state" else ["--batches", "3", "--", *ADAMW]
        commands[name] = [write_faulty(folder / f"{name}.py", *fault), *rest]
    return compare_all(commands, folder)


@pytest.mark.parametrize("name", ["yaml", "script", "resumed"])
def test_the_same_run_is_told_so(compared: dict[str, Compared], name: str):
    """A run that FSDP2 trains alike is let go on the cluster: a YAML, a script, and one from an old checkpoint."""
    it = compared[name]
    assert it.ended.code == 0, f"{it.ended.out}\n{it.ended.err}"
    assert it.report["verdict"] == "same"
    assert it.different == set()
    fsdp1, fsdp2, again = it.report["runs"]
    assert [fsdp1["engine"], fsdp2["engine"], again["engine"]] == ["FSDP1", "FSDP2", "FSDP1"]
    num_batches = {"yaml": 3, "script": 10, "resumed": 3}[name]
    assert [len(run["batches"]) for run in it.report["runs"]] == [num_batches] * 3
    assert all(len(set(batch["digests"])) == 2 for batch in fsdp1["batches"])  # each rank has its own data
    assert fsdp1["first_batch"] == (3 if name == "resumed" else 1)
    assert any(each["kind"] == "exp_avg" for each in fsdp2["start"]) == (name == "resumed")
    # Everything was looked at: both moments of every parameter, and the count of steps.
    names: dict[str, set[str]] = {}
    for each in fsdp2["distances"]:
        names.setdefault(each["kind"], set()).add(each["name"])
    assert names.keys() == {"parameter", "exp_avg", "exp_avg_sq", "step"}
    assert names["parameter"] == names["exp_avg"] == names["exp_avg_sq"] == names["step"]
    assert not any("_fsdp_wrapped_module" in name for name in names["parameter"])
    assert it.quantity(LOSSES)["distance"] < 1e-6


@pytest.mark.parametrize("name", ["yaml", "script", "gradient-scale"])
def test_report_holds_what_it_promises(compared: dict[str, Compared], name: str):
    """A CI reads report.json by its schema; who signs reads the rest."""
    it = compared[name]
    jsonschema.validate(it.report, json.loads(SCHEMA.read_text()))
    headings = ["## Batches", "## Tensors that are furthest apart", "## Time, memory and collectives", "## Signed"]
    headings += ["## What was set in place of what the file says", "## What became of each key"]
    assert [heading for heading in headings if heading not in it.markdown] == []
    assert it.report["versions"]["torch"]
    assert {len(it.report["hashes"][what]) for what in ("file", "data")} == {64}


def test_what_is_counted_is_what_was_predicted(compared: dict[str, Compared]):
    """What `plan` says of the user's own file can be believed: of its tied head, too, which is gathered twice."""
    for name, rests_on in (("script", "their model"), ("yaml", "the file alone, as `composer-fsdp2 plan` reads it")):
        fsdp2 = compared[name].report["runs"][1]
        predicted = fsdp2["prediction"]
        assert (predicted["reason"], predicted["notes"]) == ("", [])
        assert rests_on in predicted["rests_on"]
        counts = [each for each in fsdp2["collectives"] if each["op"] != "all_reduce"]  # Composer's own
        assert counts == predicted["collectives"] and {each["op"] for each in counts} == {
            "all_gather",
            "reduce_scatter",
        }
        assert fsdp2["state_bytes"] == predicted["state_bytes"] > 0, name
        # Composer adds up losses meanwhile.
        assert 0 <= fsdp2["peak_bytes"] - predicted["peak_bytes"] <= 0.002 * fsdp2["peak_bytes"], name
        assert f"{predicted['state_bytes']:,} | {predicted['state_bytes']:,}" in compared[name].markdown


def test_what_was_set_otherwise_is_listed(compared: dict[str, Compared], folder: Path):
    """Nobody takes a comparison for a run of his own file as it stands; and nothing is saved where the file says."""
    expected = {"yaml": {"save_folder", "Trainer.eval"}, "script": {"save_folder", "eval_interval"}}
    for name, names in expected.items():
        overrides = {each["name"] for run in compared[name].report["runs"] for each in run["overrides"]}
        assert names <= overrides, name
        assert all(f"`{each}`" in compared[name].markdown for each in names)
    assert [path.name for path in folder.glob("saved-by-*")] == []
    assert "current CUDA device is the CPU" in compared["yaml"].markdown


# What is different, at least; and what the report says of it.
NAMED = {
    "gradient-scale": ({NORMS}, "FSDP2's gradients are 2 times FSDP1's in every batch"),
    "another-seed": ({DATA, LOSSES, PARAMETERS}, "did not train on the same data: batch 1 of rank 0"),
    "lost-state": ({START, PARAMETERS, OPTIMIZER}, "optimizer state is lost: before the first batch FSDP1 has exp_avg"),
    "weight-decay": ({SETTINGS}, "set otherwise: weight_decay of model.blocks.1.ln.bias: 0, 0.01 on FSDP1"),
    "reduce-dtype": ({NORMS, PARAMETERS}, "gradients are reduced in float32 on FSDP1, in bfloat16 on FSDP2"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_turns_the_verdict_and_is_named(compared: dict[str, Compared], name: str):
    """What two curves side by side hide from an eye is found before the cluster is booked."""
    it, (different, cause) = compared[name], NAMED[name]
    assert it.ended.code == it.report["exit_code"] == 1, it.ended.err
    assert different <= it.different
    assert any(cause in each for each in it.report["causes"]), it.report["causes"]
    assert cause in it.ended.out and cause in it.markdown
    assert it.quantity(NORMS)["floor"] == 0.0  # FSDP1 itself repeats to the last bit


def test_a_scale_that_clipping_hides_is_in_the_norms_alone(compared: dict[str, Compared]):
    """Clipped to one norm, doubled gradients train the same weights: only the norms before clipping tell."""
    assert {LOSSES, PARAMETERS} & compared["gradient-scale"].different == set()


def test_nothing_is_left_but_the_report(compared: dict[str, Compared], folder: Path):
    """Copies of parameters and optimizer state would fill the disk of who compares a large model."""
    assert {path.name for path in (folder / "yaml").iterdir()} == {"report.md", "report.json", "report.png", "logs"}
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


@pytest.mark.slow
def test_replicas_and_flat_parameters_are_compared_too(tmp_path: Path):
    """Of HSDP each element counts once; a flat parameter that FSDP1 shows as one is taken apart into its tensors."""
    replicas = {"sharding_strategy": "HYBRID_SHARD", "data_parallel_shard_degree": 2}
    configs = {"replicas": replicas | {"data_parallel_replicate_degree": 2}, "flat": {"use_orig_params": False}}
    ranks = {"replicas": 4, "flat": 2}
    commands = {
        name: [SCRIPT, "-n", ranks[name], "--batches", "2", "--", *ADAMW, "--fsdp", json.dumps(config)]
        for name, config in configs.items()
    }
    for name, it in compare_all(commands, tmp_path).items():
        assert it.ended.code == 0, f"{name}: {it.ended.out}\n{it.ended.err}"
        assert len([each for each in it.report["runs"][1]["distances"] if each["kind"] == "exp_avg"]) == 13, name
        assert it.quantity(NORMS)["distance"] < 1e-7, name
