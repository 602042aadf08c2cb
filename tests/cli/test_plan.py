"""``composer-fsdp2 plan`` as a user types it."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import io
import json
import multiprocessing
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from support.commands import Ended, run_here
from support.hub import REFUSED, hub
from support.known_runs import FOLDER, configs

import composer_fsdp2
from composer_fsdp2.cli.main import main
from composer_fsdp2.config.text import human_bytes
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
    """One command prints text or JSON and writes a page and a trace; a step that does not fit exits with 1."""
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
    assert run_here(folder, "plan", "run.yaml").code == 2  # without --world-size
    done = run_here(folder, "plan", "--json-schema")  # available with the command alone, without this repository
    assert done.code == 0 and json.loads(done.out) == json.loads(SCHEMA.read_text())


def test_settings_are_suggested(folder: Path):
    """Without suggestions, a user changes a run that does not fit by trial and error on a cluster."""
    words = ["plan", "run.yaml", *SIZES, "--memory", "170KiB", "--reserve", "0", "--suggest"]
    done = run_here(folder, *words, "--html", "plan.html", "--json")  # migration_docs/plan.md has the text form
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


def test_several_world_sizes_are_rows(folder: Path):
    """One table replaces a command per world size, and an impossible world size does not hide the others."""
    sizes, words = [4, 0, 8, 16], ["plan", "run.yaml", *SIZES[2:], "--reserve", 0]
    each = {
        size: json.loads(run_here(folder, *words, "--memory", "1GiB", "--world-size", size, "--json").out)
        for size in sizes
        if size
    }
    peaks = {size: found["per_rank"]["peak_bytes"] for size, found in each.items()}
    assert peaks[4] > peaks[8] > peaks[16]
    asked = [*words, "--world-size", "4,0,8,16", "--gpu", "h100"]

    done = run_here(folder, *asked, "--memory", f"{peaks[8] / 1024}KiB")
    header, *rows = done.out.splitlines()[1:6]
    assert done.code == 0 and " ".join(header.split()) == "ranks fits peak to spare exposed ≥ step ≥ tokens/s ≤ GPU h ≥"
    assert [row.split()[:2] for row in rows] == [["4", "no"], ["0", "-"], ["8", "yes"], ["16", "yes"]]
    assert max(map(len, done.out.splitlines())) <= 96
    assert "4 ranks: does not fit, by " in done.out and "0 ranks: world size 0; give the number of" in done.out
    assert done.out.endswith("verdict: does not fit on 4 ranks; cannot run on 0 ranks; fits on 8, 16 ranks\n")

    done = run_here(folder, *asked, "--memory", f"{(peaks[16] - 1) / 1024}KiB", "--json")
    found = json.loads(done.out)
    jsonschema.validate(found, json.loads(SCHEMA.read_text()))
    assert done.code == 1
    assert [plan.get("fits", plan.get("error", "")[:12]) for plan in found] == [False, "world size 0", False, False]
    assert [plan["per_rank"]["peak_bytes"] for plan in found if "per_rank" in plan] == list(peaks.values())

    done = run_here(folder, *words[:-2], "--world-size", "4,8")  # neither memory nor speeds are made up
    assert done.code == 0 and done.out.splitlines()[1].split() == ["ranks", "peak"]
    done = run_here(folder, *words[:-2], "--world-size", "0,-1")  # nothing is left of the table
    assert done.code == 2 and done.err.count("\n") == 1 and "world size 0" in done.err


def test_speeds_of_the_command_line_are_printed(folder: Path):
    """The text had the source of the GPU's own link beside bounds at another speed, and rows of 0 s without a speed."""
    gpu = run_here(folder, "plan", "run.yaml", *SIZES, "--gpu", "h100", "--inter-gbps", "50Gb/s").out
    assert "but --inter-gbps 50Gb/s" in " ".join(gpu.split()) and "  computing " in gpu
    link = run_here(folder, "plan", "run.yaml", *SIZES, "--inter-gbps", "50Gb/s").out
    assert "  --inter-gbps 50Gb/s\n" in link and "  computing " not in link and "sending in nodes" not in link


def test_more_tokens_than_positions_are_a_finding(folder: Path):
    positions = CONFIG.get("max_position_embeddings", 2048)  # of Llama
    words = ["plan", "run.yaml", *SIZES, "--no-activations", "--sequence", 2 * positions]
    assert f"the model's configuration has {positions} positions" in " ".join(run_here(folder, *words).out.split())


def test_two_plans_stand_side_by_side(folder: Path):
    """The figures of two strategies stand in one table, with the settings that cause the difference."""
    fsdp = FILE["fsdp_config"] | {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}  # type: ignore[operator]
    (folder / "other.yaml").write_text(yaml.safe_dump(FILE | {"fsdp_config": fsdp}))
    words = ["plan", "run.yaml", *SIZES, "--gpu", "h100"]
    alone = [
        json.loads(run_here(folder, "plan", name, *words[2:], "--json").out) for name in ("run.yaml", "other.yaml")
    ]
    done = run_here(folder, *words, "--against", "other.yaml")
    rows = {name: cells for name, *cells in (re.split(r" {2,}", line.strip()) for line in done.out.splitlines())}
    assert done.code == 0 and rows["figures"] == ["run.yaml", "other.yaml"]
    calls = [f"{sum(call['calls'] for call in plan['collectives'])}" for plan in alone]
    assert calls[0] != calls[1] and rows["collectives"] == calls
    assert rows["peak of a rank"] == [human_bytes(plan["per_rank"]["peak_bytes"]) for plan in alone]
    assert rows["reshard_after_forward"] == ["True", "False"]
    assert "mixed_precision" not in done.out.split("settings that differ")[1]

    done = run_here(folder, *words, "mixed_precision=fp16", "--against", "run.yaml", "--json")
    found = json.loads(done.out)
    jsonschema.validate(found, json.loads(SCHEMA.read_text()))
    assert found["against"]["plan"]["per_rank"] == alone[0]["per_rank"]  # the change is FILE's alone
    assert found["against"]["settings"]["precision"] == ["amp_fp16", "amp_bf16"]


def with_terminal(folder: Path, stream: str, *words: Any) -> str:
    """What the command prints, in a fork, with one of its streams on a terminal of 80 columns."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    path = folder / "printed"

    def answer() -> None:
        os.environ.pop("COLUMNS", None)
        os.dup2(slave, sys.__stdout__.fileno())  # type: ignore[union-attr]
        with open(slave, "w", closefd=False) as terminal, path.open("w") as printed, contextlib.chdir(folder):
            streams = (terminal, io.StringIO()) if stream == "stdout" else (printed, terminal)
            with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
                sys.argv = ["composer-fsdp2", *map(str, words)]
                with contextlib.suppress(SystemExit):
                    main()

    process = multiprocessing.get_context("fork").Process(target=answer)
    process.start()
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):  # of a terminal that nobody holds any more
        while read := os.read(master, 4096):
            shown += read
    os.close(master)
    process.join()
    return shown.decode().replace("\r\n", "\n") if stream == "stdout" else path.read_text()


def test_lines_fit_the_terminal(folder: Path):
    """A terminal breaks wider lines in the middle of a table; a redirected report does not depend on the terminal."""
    name = "of-a-team-whose-names-are-long/the-large-run-on-all-of-the-nodes-that-there-are.yaml"
    (folder / name).parent.mkdir()
    (folder / name).write_text(yaml.safe_dump(FILE))
    (folder / "m.py").write_text(LONG_NAMES)
    model = ["--model", "m.py:model", "--no-activations"]
    bare = "fsdp_config: {sharding_strategy: FULL_SHARD}"
    (folder / "bare.yaml").write_text(bare)
    for words in (
        [name, *SIZES, "--memory", "80GiB", "--gpu", "h100"],
        [name, *SIZES, "--memory", "170KiB", "--reserve", 0, "--suggest"],
        [name, *SIZES[2:], "--world-size", "4,0,8", "--memory", "80KiB", "--gpu", "h100"],
        [name, *SIZES, "--against", "run.yaml"],
        ["bare.yaml", "--world-size", 16, "--gpus-per-node", 8, *model],
    ):
        shown = with_terminal(folder, "stdout", "plan", *words).splitlines()
        lines = [line for line in shown if not re.match(r"     [-+ @]", line)]  # but of a diff, which is the file's
        assert len(lines) > 5 and max(map(len, lines)) <= 80, (words, max(lines, key=len))
    words = [name, *SIZES, "--memory", "170KiB", "--reserve", 0, "--suggest"]
    assert with_terminal(folder, "stderr", "plan", *words) == run_here(folder, "plan", *words).out


LONG_NAMES = """
from torch import nn

def model():
    block = nn.ModuleDict({"a_layer_whose_name_is_long_enough_for_any_table": nn.Linear(4, 4)})
    block._fsdp_wrap = True
    return nn.ModuleDict({"blocks_of_the_decoder_of_the_language_model": nn.ModuleList([block])})
"""


@pytest.mark.foundry
@pytest.mark.parametrize(
    ("file", "config"),
    [
        ("mpt/mpt-7b-fsdp1.yaml", None),  # tied embeddings
        ("llama/llama2-70b-full-fsdp1.yaml", "llama 2 70b"),
        ("dbrx/dbrx-like-experts-fsdp1.yaml", None),  # experts, and two modules without parameters of their own
        (None, "llama 2 7b"),  # its config.json alone
    ],
)
def test_as_many_units_are_listed_as_are_counted(file: str | None, config: str | None, folder: Path):
    """A summary of 85 units above a table of 83 looks as if two were lost."""
    path = folder / "model.json"
    if config is not None:
        configs()[config].to_json_file(path)
    of_config = ["--model-config", path] if file and config else []
    words = [FOLDER / file if file else path, "--world-size", 32, "--no-activations", *of_config]
    done = run_here(folder, "plan", *words, "--html", "plan.html")
    number = int(re.search(r"parameters in (\d+) units", done.out)[1])  # type: ignore[index]
    lines = done.out.split("units of a kind")[1].split("collectives of a step")[0].splitlines()[1:]
    counts = [re.search(r"  (\d+)  |\((\d+) units?\)", line) for line in lines]
    assert sum(int(each[1] or each[2]) for each in counts if each) == number, done.out
    page = (folder / "plan.html").read_text()
    [table] = re.findall(r"<h2>Units</h2>(.*?)</table>", page, re.DOTALL)
    assert sum(map(int, re.findall(r"<tr><td>[^<]*</td><td>(\d+)</td>", table))) == number
    assert f"parameters in {number} units" in page
    assert len(json.loads(run_here(folder, "plan", *words, "--json").out)["units"]) == number


# By what is wrong: the words behind ``plan``, what is written into the folder before, and what is said.
ODD: dict[str, tuple[list[Any], dict[str, str], str]] = {
    # a one-line message with the next step
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
    "no world sizes": (["run.yaml", "--world-size", "4,many"], {}, "--world-size 4,many: give the number of ranks, or"),
    "a page of several": (
        ["run.yaml", *SIZES, "--world-size", "4,8", "--html", "plan.html"],
        {},
        "--html takes one plan",
    ),
    "a diff of several": (
        ["run.yaml", *SIZES, "--against", "run.yaml", "--memory", "1GiB", "--suggest"],
        {},
        "takes one plan",
    ),
    "two files at several": (
        ["run.yaml", *SIZES, "--world-size", "4,8", "--against", "run.yaml"],
        {},
        "one --world-size",
    ),
    "two files": (["run.yaml", "config.json", *SIZES], {}, "--against config.json plans it beside run.yaml"),
    "against nothing": (["run.yaml", *SIZES, "--against", "none.yaml"], {}, "no such file: none.yaml"),
    "nowhere": (["run.yaml", *SIZES, "--html", "nowhere/plan.html"], {}, "no such folder: nowhere"),
    # the file
    "a folder": ([".", *SIZES], {}, ". is a folder"),
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
    "a reserve of no memory": (["run.yaml", *SIZES, "--reserve", "6%"], {}, "--reserve is a part of --memory"),
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
    # overrides on the command line
    "a change of a misspelt key": (
        ["run.yaml", "mixed_precison=fp16", *SIZES],
        {},
        "mixed_precison: neither run.yaml nor accelerate has this key; did you mean mixed_precision?",
    ),
    "a model of the Hub": (
        ["run.yaml", *SIZES, "--model-config", "meta-llama/Llama-2-7b-hf"],
        {},
        "huggingface-cli download meta-llama/Llama-2-7b-hf config.json",
    ),
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
    "of no tokens": (  # torch also logs ten lines
        ["run.yaml", *SIZES, "--model-config", "c"],
        {"c": json.dumps(CONFIG | {"vocab_size": 0})},
        "cannot be traced without data: RuntimeError",
    ),
    "of positions that nobody knows": (  # transformers also warns
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
    # the outputs
    "one name for two files": (["run.yaml", *SIZES, "--trace", "./plan.html"], {}, "plan.html cannot be written"),
    "the run itself": (["run.yaml", *SIZES, "--html", "run.yaml"], {}, "run.yaml cannot be written: it is an input"),
    "the model's file": (
        ["run.yaml", *SIZES, "--trace", "./config.json"],
        {},
        "config.json cannot be written: it is",
    ),
    "no file at all": (["run.yaml", *SIZES, "--html", "."], {}, "is a folder"),
    "a place for nobody": (["run.yaml", *SIZES, "--html", "/proc/plan.html"], {}, "/proc/plan.html cannot be written"),
}


@pytest.mark.parametrize("case", ODD)
def test_whatever_is_given_is_answered_in_one_line(case: str, folder: Path):
    """An error is one line, without a traceback; the command never hangs, and no file is lost or left behind."""
    words, files, said = ODD[case]
    for name, text in files.items():
        (folder / name).write_text(text)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    html = [] if {"--html", "--against"}.intersection(map(str, words)) else ["--html", "plan.html"]
    done = run_here(folder, "plan", *words, *html)
    assert done.code == 2 and not done.out, done
    assert done.err.count("\n") == 1 and done.err.startswith("composer-fsdp2: ") and said in done.err, done.err
    assert {path: path.read_bytes() for path in folder.iterdir() if path.name != "__pycache__"} == before


def test_a_device_is_no_file(folder: Path):
    """Replacing /dev/null by a file, as root could, would break everything else on the machine."""
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
    """Runs the command in a fork of this process and interrupts it with a signal."""
    fork = multiprocessing.get_context("fork")
    receive, send = fork.Pipe(duplex=False)
    words = ["plan", "run.yaml", *SIZES, "--html", "plan.html", "--model", f"m.py:{by}"]

    def answer() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # needed if the tests run in a shell's background
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
    """Ctrl-C and a scheduler's SIGTERM end the command without a file, even if a library catches the interrupt as its
    own error."""
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
    """A program that parses the JSON would fail on text that a model's code prints."""
    (folder / "m.py").write_text(CHATTY)
    (folder / "bare.yaml").write_text("fsdp_config: {sharding_strategy: FULL_SHARD}")
    words = ["--world-size", 4, "--no-activations", "--json", "--model", "m.py:model"]
    done = run_here(folder, "plan", "bare.yaml", *words)
    assert json.loads(done.out)["run"]["parameters"] == 20
    assert done.err == "loading\n"


ASKS_THE_HUB = """
import functools, os, sys
from transformers import AutoConfig, LlamaForCausalLM

def load(name):
    return LlamaForCausalLM(AutoConfig.from_pretrained(name))

def __getattr__(name):  # a function for each model
    return functools.partial(load, name)
"""
PLANS = """
import contextlib, os, sys, urllib.error, urllib.request
import huggingface_hub.constants
from huggingface_hub.utils._http import reset_sessions
from composer_fsdp2.cli.main import main

for name, how in (each.split("=") for each in sys.argv[1:]):
    huggingface_hub.constants.HF_HUB_OFFLINE = how == "offline"
    reset_sessions()
    if how == "unreachable":
        with contextlib.suppress(urllib.error.HTTPError):
            urllib.request.urlopen(os.environ["HF_ENDPOINT"] + "/close")
    sys.argv = ["composer-fsdp2", "plan", "run.yaml", *SIZES, "--model", f"m.py:{name}"]
    try:
        main()
    except SystemExit as ended:
        assert ended.code == 2
"""


@pytest.mark.foundry
def test_a_model_that_the_hub_refuses(folder: Path):
    """The last line of a traceback names neither the licence to accept nor the login."""
    (folder / "m.py").write_text(ASKS_THE_HUB)
    sizes = ["--world-size", "4", "--microbatch", "2", "--sequence", "16"]
    names = [*(f"{name}=online" for name in REFUSED), "some/model=offline", "no/such/folder=online", "a/b=unreachable"]
    with hub(folder / "hub") as environment:
        command = [sys.executable, "-c", f"SIZES = {sizes}\n{PLANS}", *names]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)
    told = [line for line in done.stderr.splitlines() if line.startswith("composer-fsdp2: ")]
    expected = [
        ("https://huggingface.co/meta-llama/Llama-2-70b-hf", "accept its licence", "huggingface-cli login", "HF_TOKEN"),
        ("https://huggingface.co/meta-llama/Llama-3-8b", "accept its licence", "huggingface-cli login", "HF_TOKEN"),
        ("nobody/nothing", "correct the name", "https://huggingface.co/nobody/nothing", "huggingface-cli login"),
        ("some/model is not in the cache", "HF_HUB_OFFLINE"),
        ("there is no folder no/such/folder",),
        ("a/b is not in the cache", "the Hub cannot be reached", "huggingface-cli download a/b"),
    ]
    assert len(told) == len(expected), done.stderr
    for line, words in zip(told, expected, strict=True):
        assert all(word in line for word in (*words, "--model-config")), (line, words)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "meta-llama/Llama-2-70b-hf",
            ("huggingface-cli download", "https://huggingface.co/meta-llama/Llama-2-70b-hf", "huggingface-cli login"),
        ),
        ("./gone", ("there is no folder ./gone",)),
        ("no/such/folder", ("there is no folder no/such/folder",)),
        (".", ("the folder . has no config.json",)),
    ],
)
def test_a_file_whose_model_is_not_here(name: str, said: tuple[str, ...], folder: Path):
    """Planning does not contact the Hub, so the error names the download and the login that a gated model needs."""
    (folder / "config.json").unlink()
    (folder / "other.yaml").write_text(yaml.safe_dump({"base_model": name, "fsdp": ["full_shard"]}))
    done = run_here(folder, "plan", "other.yaml", *SIZES[:2], *SIZES[4:])
    assert done.code == 2 and done.err.count("\n") == 1
    assert all(word in done.err for word in (*said, "--model-config")), done.err


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
    """Unusual runs that users have are no error, and the plan lists its omissions."""
    words, files, said = LEGAL[case]
    for name, text in files.items():
        (folder / name).write_text(text)
    done = run_here(folder, "plan", *words)
    assert done.code == int("decision" in said) and not done.err, done
    assert said in done.out, done.out
