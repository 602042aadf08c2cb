"""``composer-fsdp2 compare``: real runs on FSDP1 and on FSDP2, equal ones, and ones with faults on FSDP2."""

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

from composer_fsdp2.comparing.judging import BUFFERS, LOSSES, NORMS, OPTIMIZER, PARAMETERS, SETTINGS, START
from composer_fsdp2.comparing.outcome import SCHEMA

pytestmark = [pytest.mark.composer, pytest.mark.foundry]

SHARDED = '{"state_dict_type": "sharded"}'
BATCHES = {"yaml": 2, "script": 3}
ADAMW = ["--optimizer", "adamw", "--microbatch", "2", "--clip", "0.1"]
# Lines that replace lines of the script on FSDP2 only.
FAULTS = {
    "    def batch_end(self": (
        "    def fit_start(self, state, logger):\n"
        "        state.optimizers[0].state.clear()\n"
        "        state.optimizers[0].param_groups[0]['weight_decay'] = 0.0\n\n"
        "    def batch_end(self"
    ),
    "json.loads(args.fsdp)": "{'mixed_precision': {'param_dtype': 'fp32', 'reduce_dtype': 'bf16'}}",
}


# Batch norm in every block; on FSDP2 only rank 1 ends with another running mean, which no training forward reads.
NORMED = {"nn.LayerNorm(d)": "nn.BatchNorm1d(5)"}
STALE_MEAN = {
    "    def batch_end(self": (
        "    def batch_start(self, state, logger):\n"
        "        if dist.get_global_rank() == 1:\n"
        "            state.model.model.blocks[1].ln.running_mean.add_(0.5)\n\n"
        "    def batch_end(self"
    ),
}


def write_faulty(path: Path, faults: dict[str, str], changes: dict[str, str] | None = None) -> Path:
    """Writes a script that equals the user's on FSDP1 and has a fault on FSDP2."""
    source = SCRIPT.read_text()
    for old, new in (changes or {}).items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    faulty = source
    for old, new in faults.items():
        assert source.count(old) == 1
        faulty = faulty.replace(old, new)
    path.write_text(
        "from composer_fsdp2.compat import is_installed\n"
        f"source = {faulty!r} if is_installed() else {source!r}\n"
        "exec(compile(source, __file__, 'exec'))\n"
    )
    return path


# Scripts that train no batch, and the expected error.
FAILING = {
    "no-fit": ("print('nothing to do')\n", "ended without Trainer.fit; there is nothing to compare"),
    "unsharded": (
        SCRIPT.read_text().replace('parallelism_config={"fsdp"', 'profiler=None and {"fsdp"'),
        "needs an fsdp_config",
    ),
    # Composer's Trainer would start epochs forever.
    "empty-loader": (
        SCRIPT.read_text()
        .replace("(n: int = 96)", "(n: int = 6)")
        .replace("batch_size=4,", "batch_size=4, drop_last=True,", 1),
        "trained no batch in two epochs",
    ),
}


def save_on_fsdp1(folder: str) -> None:
    words = [str(SCRIPT), *ADAMW, "--fsdp", SHARDED, "--batches", "2", "--save-folder", folder]
    with FSDP1(), mock.patch.object(sys, "argv", words), pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data for the YAML, and a checkpoint of the script."""
    made = tmp_path_factory.mktemp("compare")
    with mock.patch.dict("os.environ", {"TOKENIZERS_PARALLELISM": "false"}):
        run_ranks(make_data_of_runs, 2, str(made))
    run_ranks(save_on_fsdp1, 2, str(made / "saved"))
    return made


@pytest.fixture(scope="module")
def compared(folder: Path) -> dict[str, Compared]:
    """Comparisons of a YAML, a script that resumes from a checkpoint, scripts with faults on FSDP2, and some that
    fail."""
    more = ["save_folder=saved-by-yaml", "save_overwrite=true", "eval_first=true", "model.n_layers=2"]
    more += ["global_train_batch_size=8"]
    resumed = [
        "--load-path",
        folder / "saved" / "ep0-ba2",
        "--batches",
        BATCHES["script"],
        "--",
        *ADAMW,
        "--fsdp",
        SHARDED,
    ]
    after = ["--eval", "--save-folder", "saved-by-script", "--exit-code", "7"]
    commands: dict[str, list[Any]] = {
        "yaml": [YAML, "--batches", BATCHES["yaml"], *surroundings(str(folder), folder / "losses.jsonl"), *more],
        "script": [SCRIPT, *resumed, *after],
        "faulty": [write_faulty(folder / "faulty.py", FAULTS), *resumed],
        "buffers": [write_faulty(folder / "buffers.py", STALE_MEAN, NORMED), "--batches", 2],
    }
    for name, (source, _) in FAILING.items():
        (folder / f"{name}.py").write_text(source)
        commands[name] = [folder / f"{name}.py"]
    return compare_all(commands, folder)


@pytest.mark.parametrize("name", ["yaml", "script"])
def test_the_same_run_is_told_so(compared: dict[str, Compared], name: str):
    """Runs that train equally on FSDP2 get the verdict "same": a YAML, and a script from an old checkpoint."""
    it = compared[name]
    assert it.ended.code == 0, f"{it.ended.out}\n{it.ended.err}"
    assert it.report["verdict"] == "same"
    assert it.different == set()
    fsdp1, fsdp2, again = it.report["runs"]
    assert [fsdp1["engine"], fsdp2["engine"], again["engine"]] == ["FSDP1", "FSDP2", "FSDP1"]
    assert [len(run["batches"]) for run in it.report["runs"]] == [BATCHES[name]] * 3
    digests = [digest for batch in fsdp1["batches"] for digest in batch["digests"]]
    assert len(set(digests)) == len(digests) == 2 * BATCHES[name]  # each rank, and each batch, has its own data
    assert fsdp1["first_batch"] == (3 if name == "script" else 1)
    assert any(each["kind"] == "exp_avg" for each in fsdp2["start"]) == (name == "script")
    # Everything was compared: both moments of every parameter, and the step counts.
    names: dict[str, set[str]] = {}
    for each in fsdp2["end"]:
        names.setdefault(each["kind"], set()).add(each["name"])
    assert names.keys() == {"parameter", "exp_avg", "exp_avg_sq", "step"}
    assert names["parameter"] == names["exp_avg"] == names["exp_avg_sq"] == names["step"]
    assert not any("_fsdp_wrapped_module" in name for name in names["parameter"])
    assert it.quantity(LOSSES)["distance"] < 1e-6
    # The norms before clipping to 0.1: doubled gradients would train the same weights, so only these norms show them.
    norms = {batch["gradient_norm"] for batch in fsdp2["batches"]}
    assert len(norms) == BATCHES[name] and (name == "yaml" or min(norms) > 0.1), norms


@pytest.mark.parametrize("name", ["yaml", "faulty"])
def test_report_holds_what_it_promises(compared: dict[str, Compared], name: str):
    """A CI reads report.json by its schema; a reviewer reads the Markdown."""
    it = compared[name]
    jsonschema.validate(it.report, json.loads(SCHEMA.read_text()))
    headings = ["## Batches", "## Tensors that are furthest apart", "## Time, memory and collectives", "## Signed"]
    headings += ["## Settings that the comparison replaced", "## The outcome of each key"]
    assert [heading for heading in headings if heading not in it.markdown] == []
    assert it.report["versions"]["torch"]
    assert {len(it.report["hashes"][what]) for what in ("file", "data")} == {64}


def test_what_is_counted_is_what_was_predicted(compared: dict[str, Compared]):
    """The predictions of `plan` for the user's own file are correct, including its tied head, which is gathered
    twice."""
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
        # Composer accumulates losses during the batch.
        assert 0 <= fsdp2["peak_bytes"] - predicted["peak_bytes"] <= 0.002 * fsdp2["peak_bytes"], name
        assert f"{predicted['state_bytes']:,} | {predicted['state_bytes']:,}" in compared[name].markdown


def test_what_was_set_otherwise_is_listed(compared: dict[str, Compared], folder: Path):
    """The report lists every changed setting, and nothing is saved to the file's save_folder."""
    expected = {"yaml": {"save_folder", "Trainer.eval"}, "script": {"save_folder", "eval_interval"}}
    for name, names in expected.items():
        overrides = {each["name"] for run in compared[name].report["runs"] for each in run["overrides"]}
        assert names <= overrides, name
        assert all(f"`{each}`" in compared[name].markdown for each in names)
    assert [path.name for path in folder.glob("saved-by-*")] == []
    assert "the CPU was passed to FSDP1 as the current CUDA device" in compared["yaml"].markdown


def test_faults_turn_the_verdict_and_are_named(compared: dict[str, Compared]):
    """A fault that is invisible in two loss curves is found before the run starts on a cluster."""
    it = compared["faulty"]
    assert it.ended.code == it.report["exit_code"] == 1, it.ended.err
    assert it.different >= {START, SETTINGS, NORMS, PARAMETERS, OPTIMIZER}
    for cause in (
        "optimizer state is lost: before the first batch FSDP1 has exp_avg",
        "set otherwise: weight_decay of model.",
        ": 0, 0.01 on FSDP1",
        "gradients are reduced in float32 on FSDP1, in bfloat16 on FSDP2",
    ):
        assert any(cause in each for each in it.report["causes"]), it.report["causes"]
        assert cause in it.ended.out and cause in it.markdown
    assert it.quantity(NORMS)["floor"] == 0.0  # FSDP1 itself repeats bit for bit


def test_buffers_of_all_ranks_are_compared(compared: dict[str, Compared]):
    """A model that evaluates with stale running means was reported as "the same", because no loss or gradient reads
    them."""
    it = compared["buffers"]
    assert it.ended.code == 1, f"{it.ended.out}\n{it.ended.err}"
    assert it.different == {BUFFERS}
    assert it.quantity(BUFFERS)["worst"] == "buffer of model.blocks.1.ln.running_mean"
    compared_buffers = [each for each in it.report["runs"][1]["end"] if each["kind"] == "buffer"]
    assert len(compared_buffers) == 2 * len(("running_mean", "running_var", "num_batches_tracked"))
    assert {each["size"] for each in compared_buffers} == {2 * 5, 2 * 1}  # of both ranks
    assert [each["name"] for each in compared_buffers if each["distance"]] == ["model.blocks.1.ln.running_mean"]


@pytest.mark.parametrize("name", FAILING)
def test_a_run_that_fails_tells_where_its_log_is(compared: dict[str, Compared], name: str):
    """The terminal shows the reason and the log's path among six logs; a failed run is not reported as a difference."""
    it = compared[name]
    assert it.ended.code == 2, it.ended.err
    assert it.report["verdict"] == "unusable"
    assert FAILING[name][1] in it.ended.err and FAILING[name][1] in it.report["error"]
    assert f"{name}/logs/fsdp1/rank-" in it.ended.err
    assert ".partial" not in it.ended.err


def test_nothing_is_left_but_the_report(compared: dict[str, Compared], folder: Path):
    """Copies of parameters and optimizer state would fill the disk if the model is large."""
    assert {path.name for path in (folder / "yaml").iterdir()} == {"report.md", "report.json", "report.png", "logs"}
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


@pytest.mark.slow
def test_replicas_and_flat_parameters_are_compared_too(tmp_path: Path):
    """With HSDP each element counts once; a flat parameter that FSDP1 exposes is split into its tensors."""
    replicas = {"sharding_strategy": "HYBRID_SHARD", "data_parallel_shard_degree": 2}
    configs = {"replicas": replicas | {"data_parallel_replicate_degree": 2}, "flat": {"use_orig_params": False}}
    ranks = {"replicas": 4, "flat": 2}
    commands = {
        name: [SCRIPT, "-n", ranks[name], "--batches", "2", "--", *ADAMW, "--fsdp", json.dumps(config)]
        for name, config in configs.items()
    }
    for name, it in compare_all(commands, tmp_path).items():
        assert it.ended.code == 0, f"{name}: {it.ended.out}\n{it.ended.err}"
        assert len([each for each in it.report["runs"][1]["end"] if each["kind"] == "exp_avg"]) == 13, name
        assert it.quantity(NORMS)["distance"] < 1e-7, name
