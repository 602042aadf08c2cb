"""``composer-fsdp2 plan`` as a user types it."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from support.commands import Ended, run_here

import composer_fsdp2
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
    made_by = f"--html plan.html --trace t.json (composer-fsdp2 {composer_fsdp2.__version__}, {datetime.date.today()})"
    assert made_by in (folder / "plan.html").read_text()
    assert json.loads((folder / "t.json").read_text())["traceEvents"]

    done = run_here(folder, "plan", "run.yaml", *SIZES, "--memory", "8MiB", "--reserve", "8191KiB", "--json")
    found = json.loads(done.out)
    jsonschema.validate(found, json.loads(SCHEMA.read_text()))
    assert (done.code, found["exit_code"], found["fits"]) == (1, 1, False)
    assert found["memory"]["usable_bytes"] == 1024
    assert run_here(folder, "plan", "run.yaml").code == 2  # for how many ranks?
    done = run_here(folder, "plan", "--json-schema")  # who has only the command can check what it prints
    assert done.code == 0 and json.loads(done.out) == json.loads(SCHEMA.read_text())


def test_settings_are_suggested(folder: Path):
    """A run that does not fit would be changed by trial and error on a cluster."""
    words = ["plan", "run.yaml", *SIZES, "--memory", "170KiB", "--reserve", "0", "--suggest"]
    done = run_here(folder, *words, "--html", "plan.html", "--json")  # as text: migration_docs/plan.md
    assert done.code == 1 and not done.err, done.err
    assert "suggestions for 170.0 KiB a rank" in (folder / "plan.html").read_text()
    found = json.loads(done.out)
    jsonschema.validate(found, json.loads(SCHEMA.read_text()))
    first = found["suggestions"]["proposals"][0]
    assert first["diff"].startswith("--- run.yaml\n+++ run.yaml\n") and first["peak_bytes"] <= 170 * 1024
    assert {change["key"].split(".")[0] for change in first["changes"]} == {"fsdp_config"}
    assert "assumed from the memory" in found["suggestions"]["speeds"][-1]
    of_own = [*words, "--gpu", "h100", "--json"]
    assert "assumed" not in str(json.loads(run_here(folder, *of_own).out)["suggestions"]["speeds"])
    assert yaml.safe_load((folder / "run.yaml").read_text()) == FILE


# By what is wrong: the words behind ``plan``, what is written into the folder before, and what is said.
ODD: dict[str, tuple[list[Any], dict[str, str], str]] = {
    # one line that names the way out
    "no file": (["none.yaml", *SIZES], {}, "none.yaml"),
    "memory": (["run.yaml", *SIZES, "--memory", 80], {}, "--memory 80 has no unit; write 80GiB"),
    "links": (["run.yaml", *SIZES, "--inter-gbps", 400], {}, "--inter-gbps 400 has no unit; write 400Gb/s"),
    "flops": (["run.yaml", *SIZES, "--flops", 989], {}, "--flops 989 has no unit; write 989TFLOPS"),
    "reserve": (["run.yaml", *SIZES, "--memory", "80GiB", "--reserve", "6"], {}, "--reserve 6 has no unit"),
    "no model": (["run.yaml", "--world-size", 4, "--microbatch", 1, "--sequence", 8], {}, "--model-config"),
    "no such model": (["run.yaml", *SIZES, "--model-config", "none"], {}, "none"),
    "suggest": (["run.yaml", *SIZES, "--suggest"], {}, "--suggest needs --memory"),
    "untraced": (["run.yaml", *SIZES, "--memory", "80GiB", "--suggest", "--no-activations"], {}, "--no-activations"),
    "edits of no run": (
        ["config.json", *SIZES, "--memory", "80GiB", "--suggest"],
        {},
        "with --model-config config.json",
    ),
    "nowhere": (["run.yaml", *SIZES, "--html", "nowhere/plan.html"], {}, "there is no folder nowhere"),
    # the file
    "a folder": ([".", *SIZES], {}, "no such file: ."),
    "empty": (["odd.yaml", *SIZES], {"odd.yaml": ""}, "odd.yaml:1:1: a mapping is expected"),
    "a list": (["odd.yaml", *SIZES], {"odd.yaml": "- 1"}, "odd.yaml:1:1: a mapping is expected"),
    "broken": (["odd.yaml", *SIZES], {"odd.yaml": "a: [1\nb: }"}, "odd.yaml:2:2"),
    "a script": (["odd.py", *SIZES], {"odd.py": "print()"}, "--model module:function"),
    "of nothing": (["odd.yaml", *SIZES], {"odd.yaml": "a: 1"}, "nothing here configures sharding"),
    "a name that steers the terminal": (["\x1b[31m.yaml", *SIZES], {}, r"\x1b[31m.yaml"),
    # numbers
    "ranks that nothing says": (
        ["odd.yaml", "--model-config", "config.json"],
        {"odd.yaml": "fsdp_config: {}\n"},
        "the number of ranks is not known; set --world-size",
    ),
    "no ranks": (["run.yaml", *SIZES, "--world-size", 0], {}, "world size 0"),
    "ranks for ever": (["run.yaml", *SIZES, "--world-size", 10**30], {}, "the number of ranks, from 1 to 1048576"),
    "no node": (["run.yaml", *SIZES, "--gpus-per-node", 0], {}, "gpus per node 0"),
    "no rows": (["run.yaml", *SIZES, "--microbatch", 0], {}, "microbatch 0"),
    "tokens that overflow": (["run.yaml", *SIZES, "--sequence", 10**30], {}, "--no-activations plans everything else"),
    "memory of an empty variable": (["run.yaml", *SIZES, "--memory", ""], {}, "--memory '' is no number with a unit"),
    "negative memory": (["run.yaml", *SIZES, "--memory", "-80GiB"], {}, "--memory '-80GiB' is no number"),
    "memory that overflows": (
        ["run.yaml", *SIZES, "--memory", "9" * 400 + "GiB"],
        {},
        "more than a computer can count",
    ),
    "a reserve of no memory": (["run.yaml", *SIZES, "--reserve", "6%"], {}, "give that as well"),
    "a reserve above the memory": (
        ["run.yaml", *SIZES, "--memory", "1GiB", "--reserve", "5GiB"],
        {},
        "--reserve 5GiB reserves all of --memory 1GiB",
    ),
    "a batch that is no number": (
        ["odd.yaml", "--world-size", 4, "--model-config", "config.json"],
        {"odd.yaml": "fsdp: full_shard\nper_device_train_batch_size: .nan"},
        "per_device_train_batch_size is nan; give a whole number above 0",
    ),
    "a part of a row": (
        ["odd.yaml", "--world-size", 4, "--model-config", "config.json"],
        {"odd.yaml": "fsdp: full_shard\nper_device_train_batch_size: 0.5"},
        "per_device_train_batch_size is 0.5",
    ),
    "microbatches for ever": (
        ["run.yaml", *SIZES, "gradient_accumulation_steps=100000000000"],
        {},
        "a batch of 100000000000 microbatches on each rank cannot be planned",
    ),
    "a batch for no rank": (
        ["odd.yaml", *SIZES],
        {"odd.yaml": "global_train_batch_size: many\nfsdp_config: {sharding_strategy: FULL_SHARD}"},
        "global_train_batch_size is 'many'",
    ),
    "ranks that do not fit": (
        ["odd.yaml", *SIZES],
        {"odd.yaml": "fsdp_config: {sharding_strategy: HYBRID_SHARD, data_parallel_shard_degree: 3}"},
        "use 1, 2 or 4",
    ),
    # changes on the command line
    "a word": (["run.yaml", "nonsense", *SIZES], {}, "nonsense is neither an option nor KEY=VALUE"),
    "a change of no key": (["run.yaml", "=3", *SIZES], {}, "=3 is neither an option nor KEY=VALUE"),
    "a change that is no YAML": (["run.yaml", "a=[1", *SIZES], {}, "a=[1: ParserError"),
    "a list for a mapping": (["run.yaml", "fsdp_config=[1]", *SIZES], {}, "fsdp_config=[1]: TypeError"),
    # the model's file
    "a configuration that is a list": (["run.yaml", *SIZES, "--model-config", "c"], {"c": "[1]"}, "no model_type"),
    "one that is broken": (["run.yaml", *SIZES, "--model-config", "c"], {"c": "{"}, "c is no config.json"),
    "one that is deep": (["run.yaml", *SIZES, "--model-config", "c"], {"c": "[" * 100_000}, "c is no config.json"),
    "of an empty variable": (["run.yaml", *SIZES, "--model-config", ""], {}, "there is no file"),
    "of a model that nobody knows": (
        ["run.yaml", *SIZES, "--model-config", "c"],
        {"c": json.dumps(CONFIG | {"model_type": "nobody"})},
        "knows no model_type nobody",
    ),
    "of negative sizes": (
        ["run.yaml", *SIZES, "--model-config", "c"],
        {"c": json.dumps(CONFIG | {"hidden_size": -32})},
        "c: the model cannot be built: RuntimeError",
    ),
    "of no tokens": (  # which torch logs in ten lines, too
        ["run.yaml", *SIZES, "--model-config", "c"],
        {"c": json.dumps(CONFIG | {"vocab_size": 0})},
        "cannot be traced without data: RuntimeError",
    ),
    "of positions that nobody knows": (  # of which transformers warns, too
        ["run.yaml", *SIZES, "--model-config", "c"],
        {"c": json.dumps(CONFIG | {"rope_scaling": {"rope_type": "nobody"}})},
        "c: the model cannot be built: KeyError",
    ),
    "of quantized weights": (
        ["run.yaml", *SIZES, "--model-config", "c"],
        {"c": json.dumps(CONFIG | {"quantization_config": {"quant_method": "gptq", "bits": 4}})},
        "quantization_config is not planned",
    ),
    "of a model without a loss": (
        ["run.yaml", *SIZES, "--model-config", "c"],
        {"c": json.dumps(CONFIG | {"architectures": ["LlamaModel"]})},
        "the model (LlamaModel) returns no loss",
    ),
    # a model in Python
    "no function": (["run.yaml", *SIZES, "--model", "none"], {}, "expected module:function"),
    "a function without a module": (["run.yaml", *SIZES, "--model", ":f"], {}, "--model :f: ValueError"),
    "a module that is no Python": (["run.yaml", *SIZES, "--model", "m.py:f"], {"m.py": "def ("}, "SyntaxError"),
    "a module that raises": (["run.yaml", *SIZES, "--model", "m.py:f"], {"m.py": "1 / 0"}, "ZeroDivisionError"),
    "a module that exits": (
        ["run.yaml", *SIZES, "--model", "m.py:f"],
        {"m.py": "raise SystemExit(0)"},
        "SystemExit: 0",
    ),
    "a function that raises": (
        ["run.yaml", *SIZES, "--model", "m.py:f"],
        {"m.py": "def f(): raise KeyError('one\\ntwo')"},
        "the model cannot be built on the meta device: KeyError",
    ),
    "a function that exits": (
        ["run.yaml", *SIZES, "--model", "m.py:f"],
        {"m.py": "def f(): raise SystemExit('bye')"},
        "the model cannot be built on the meta device: SystemExit: bye",
    ),
    # what is written
    "one name for two files": (["run.yaml", *SIZES, "--trace", "./plan.html"], {}, "plan.html cannot be written"),
    "the run itself": (["run.yaml", *SIZES, "--html", "run.yaml"], {}, "run.yaml as well"),
    "the model's file": (["run.yaml", *SIZES, "--trace", "./config.json"], {}, "config.json as well"),
    "no file at all": (["run.yaml", *SIZES, "--html", "."], {}, "is a folder"),
    "a place for nobody": (["run.yaml", *SIZES, "--html", "/proc/plan.html"], {}, "/proc/plan.html cannot be written"),
}


@pytest.mark.parametrize("case", ODD)
def test_whatever_is_given_is_answered_in_one_line(case: str, folder: Path):
    """Who reads a traceback, or waits for ever, does not know what to change; and no file is lost or left behind."""
    words, files, said = ODD[case]
    for name, text in files.items():
        (folder / name).write_text(text)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    html = [] if "--html" in words else ["--html", "plan.html"]
    done = run_here(folder, "plan", *words, *html)
    assert done.code == 2 and not done.out, done
    assert done.err.count("\n") == 1 and done.err.startswith("composer-fsdp2: ") and said in done.err, done.err
    assert {path: path.read_bytes() for path in folder.iterdir() if path.name != "__pycache__"} == before


def test_a_device_is_no_file(folder: Path):
    """A file that takes the place of /dev/null, where root may put one, breaks everything else on the machine."""
    os.mkfifo(folder / "pipe")
    done = run_here(folder, "plan", "run.yaml", *SIZES, "--html", "pipe")
    assert done.code == 2 and "pipe is a device or a pipe" in done.err
    assert (folder / "pipe").is_fifo()


INTERRUPTED = """
import os, signal, time
from torch import nn

def by(number, swallows=False):
    try:
        os.kill(os.getpid(), number)
        time.sleep(60)
    except KeyboardInterrupt:
        if not swallows:
            raise
    raise RuntimeError("half imported")

def sigint(): by(signal.SIGINT)
def sigterm(): by(signal.SIGTERM)
def swallowed(): by(signal.SIGTERM, swallows=True)
"""


def interrupted(folder: Path, by: str) -> Ended:
    """The command in a fork of this process, which a signal that nobody heeds ends."""
    fork = multiprocessing.get_context("fork")
    receive, send = fork.Pipe(duplex=False)
    words = ["plan", "run.yaml", *SIZES, "--html", "plan.html", "--model", f"m.py:{by}"]

    def answer() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # where the tests run in a shell's background
        send.send(run_here(folder, *words))

    process = fork.Process(target=answer)
    process.start()
    send.close()
    try:
        return receive.recv()
    finally:
        process.join()


@pytest.mark.parametrize("by", ["sigint", "sigterm", "swallowed"])
def test_an_interrupted_plan_leaves_nothing(folder: Path, by: str):
    """Ctrl-C, and a scheduler's SIGTERM, also where a library takes the interruption for its own failure."""
    (folder / "m.py").write_text(INTERRUPTED)
    before = sorted(folder.iterdir())
    assert interrupted(folder, by) == Ended(2, "", "composer-fsdp2: interrupted; nothing was written\n")
    assert [path for path in sorted(folder.iterdir()) if path.name != "__pycache__"] == before


CHATTY = """
import logging, warnings
from torch import nn

def model():
    print("loading")
    warnings.warn("old")
    logging.getLogger("theirs").warning("slow")
    return nn.Linear(4, 4)
"""


def test_what_a_model_prints_is_not_in_the_answer(folder: Path):
    """A program that reads the object would stop at the first word that a model's code prints."""
    (folder / "m.py").write_text(CHATTY)
    (folder / "bare.yaml").write_text("fsdp_config: {sharding_strategy: FULL_SHARD}")
    words = ["--world-size", 4, "--no-activations", "--json", "--model", "m.py:model"]
    done = run_here(folder, "plan", "bare.yaml", *words)
    assert json.loads(done.out)["run"]["parameters"] == 20
    assert done.err == "loading\n"


# By what is odd and still a run: the words, what is written before, and what is said.
LEGAL: dict[str, tuple[list[Any], dict[str, str], str]] = {
    "one rank": (["run.yaml", *SIZES, "--world-size", 1], {}, "on 1 rank,"),
    "a million ranks": (["config.json", "--world-size", 2**20], {}, "on 1048576 ranks"),
    "a byte order mark": (["odd.yaml", *SIZES], {"odd.yaml": "\ufeff" + yaml.safe_dump(FILE)}, "3 units"),
    "tied weights": (
        ["c.json", "--world-size", 4],
        {"c.json": json.dumps(CONFIG | {"tie_word_embeddings": True})},
        "22.7 K parameters",  # 64 × 32 fewer than the 24.7 K of two embeddings
    ),
    "rows that no machine has memory for": (["run.yaml", *SIZES, "--microbatch", 10**9], {}, "1000000000 × 16 tokens"),
    "a node of three": (["run.yaml", *SIZES, "--gpus-per-node", 3], {}, "4 ranks, 3 a node"),
    "nothing that is trained": (
        ["odd.yaml", "--world-size", 4, "--no-activations", "--model", "m.py:f"],
        {
            "odd.yaml": "fsdp_config: {sharding_strategy: FULL_SHARD}",
            "m.py": "import torch\ndef f(): return torch.nn.Linear(4, 4).requires_grad_(False)",
        },
        "20 parameters",
    ),
    "layers that a script splits": (
        ["odd.yaml", *SIZES],
        {"odd.yaml": "tp_config: {tensor_parallel_degree: 2}\nfsdp_config: {sharding_strategy: FULL_SHARD}"},
        "finding: tp_config: 2 needs a decision",
    ),
}


@pytest.mark.parametrize("case", LEGAL)
def test_odd_runs_are_planned(case: str, folder: Path):
    """What a user may well have is no error, and what the plan leaves out of it is said."""
    words, files, said = LEGAL[case]
    for name, text in files.items():
        (folder / name).write_text(text)
    done = run_here(folder, "plan", *words)
    assert done.code == int("decision" in said) and not done.err, done
    assert said in done.out, done.out
