"""The benchmarks run, say what they promise to say, and keep the bars that no clock decides."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forked_scripts import run_script
from support.ranks import WITH_COMPOSER, WITH_TORCH

from composer_fsdp2.training.control import num_rounds

ROOT = Path(__file__).resolve().parents[2]
TINY = {"width": 16, "layers": 2, "heads": 2, "vocabulary": 32, "sequence": 8, "batch": 1, "steps": 2, "warmup": 1}
SIZES = [word for name, size in TINY.items() for word in (f"--{name}", str(size))]
# Not by import: a folder of tests might be found.
HAS_COMPOSER = any(metadata.distributions(name="mosaicml"))


# What the other torch does not change, `make test` runs on the official stack only.
ONCE = [] if HAS_COMPOSER else [pytest.mark.slow]


def benchmark(script: str, *arguments: str, is_forked: bool = True) -> dict[str, Any]:
    """What ``--json`` prints; timings of so small a model say nothing, so no bar decides the exit code.

    Forked, the script and its ranks have imported torch, and Composer, already.
    """
    path, words = ROOT / "benchmarks" / script, ("--json", "--no-bars", *arguments)
    if is_forked:
        done = run_script(WITH_COMPOSER if HAS_COMPOSER else WITH_TORCH, path, *words)
    else:
        done = subprocess.run([sys.executable, path, *words], cwd=ROOT, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module", params=["FULL_SHARD", pytest.param("SHARD_GRAD_OP", marks=ONCE)])
def step(request: pytest.FixtureRequest) -> dict[str, Any]:
    """One is started as a user starts it, where ranks need not import Composer."""
    is_forked = HAS_COMPOSER or request.param != "FULL_SHARD"
    return benchmark("step.py", "--device", "cpu", "--strategy", request.param, *SIZES, is_forked=is_forked)


def test_a_step_communicates_what_the_hand_written_loop_does(step: dict[str, Any]):
    """Nobody pays for the translation in gathers or in bytes; and the numbers count something."""
    collectives = step["collectives"]
    assert collectives["ours"] == collectives["hand"]
    num_layers, num_gathers = TINY["layers"], 1 if step["options"]["strategy"] == "SHARD_GRAD_OP" else 2
    gathers, reductions = collectives["ours"]["_allgather_base_"], collectives["ours"]["_reduce_scatter_base_"]
    assert gathers["calls"] == 1 + num_gathers * num_layers
    assert reductions["calls"] == 1 + num_layers
    parameters_bytes = step["state_bytes"]["hand"]["optimizer"]  # two moments of half of the parameters
    assert reductions["bytes"] == pytest.approx(parameters_bytes, rel=0.01)
    assert step["loss_difference"]["ours"] == 0


def test_a_step_needs_the_memory_of_the_hand_written_loop(step: dict[str, Any]):
    """What we hook into torch keeps no parameter or gradient alive for longer."""
    ours, hand = step["state_bytes"]["ours"], step["state_bytes"]["hand"]
    assert ours == hand
    assert ours["peak"] == sum(size for kind, size in ours.items() if kind != "peak")


def test_the_object_of_a_step(step: dict[str, Any]):
    """Whoever reads the object of another machine finds each variant there, or why it is missing."""
    variants = {"ours", "fsdp1"} | ({"composer"} if HAS_COMPOSER else set())
    assert step["ratio"].keys() == step["ratio_quartiles"].keys() == variants
    assert step["collectives"].keys() == step["state_bytes"].keys() == {"hand"} | variants
    assert step["missing"].keys() == {"composer"} - variants
    assert all(bar["promise"] and bar["measured"] for bar in step["bars"])
    assert all(difference < 1e-6 for difference in step["loss_difference"].values())


@pytest.mark.skipif(not HAS_COMPOSER, reason="mosaicml is not installed")
def test_shard_grad_op_gathers_less_than_composers_fsdp2(step: dict[str, Any]):
    """Composer's FSDP2 drops sharding_strategy and gathers each block a second time."""
    ours, theirs = (step["collectives"][name]["_allgather_base_"]["bytes"] for name in ("ours", "composer"))
    if step["options"]["strategy"] == "SHARD_GRAD_OP":
        assert ours < theirs
    else:
        assert ours == theirs


@pytest.mark.parametrize("revision", [pytest.param("HEAD", marks=ONCE)])
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git repository")
def test_a_step_against_a_revision(revision: str):
    """The package of another commit trains in the same processes; on one node votes need no collective, either."""
    step = benchmark("step.py", "--device", "cpu", "--against", revision, *SIZES)
    collectives = step["collectives"]
    assert collectives.keys() == {"hand", "ours", "voting", "in step", "revision"}
    assert all(collectives[name] == collectives["ours"] for name in ("revision", "in step", "voting"))
    assert set(step["loss_difference"].values()) == {0}
    assert len([bar for bar in step["bars"] if "revision" in bar["promise"]]) == 1


@pytest.mark.any_torch
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("step.py --ranks 0", "argument --ranks: 0 is less than 1"),
        ("step.py --pipelined 0", "argument --pipelined: 0 is less than 1"),
        ("many_ranks.py --ranks -1", "argument --ranks: -1 is less than 1"),
        ("checkpoint.py --gib 0", "argument --gib: 0 is not above 0"),
        ("saving.py --folder nowhere", "argument --folder: there is no folder nowhere"),
        ("votes.py --votes many", "argument --votes: invalid count value: 'many'"),
    ],
)
def test_options_that_cannot_be(words: str, message: str):
    """Exit code 2: 1 would say that a bar does not hold."""
    script, *options = words.split()
    done = run_script(WITH_COMPOSER if HAS_COMPOSER else WITH_TORCH, ROOT / "benchmarks" / script, *options)
    assert done.returncode == 2 and message in done.stderr, done.stderr


def test_fewer_devices_than_ranks():
    """Said before the ranks are started, each of which would end with a stack."""
    num_ranks = torch.cuda.device_count() + 1
    words = ("--device", "cuda", "--ranks", str(num_ranks))
    done = run_script(WITH_COMPOSER if HAS_COMPOSER else WITH_TORCH, ROOT / "benchmarks" / "step.py", *words)
    assert done.returncode == 1 and f"{num_ranks} asked for" in done.stderr, done.stderr


@pytest.mark.parametrize("revision", [pytest.param("no-such-commit", marks=ONCE)])
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git repository")
def test_a_revision_that_is_not_there(revision: str):
    command = [sys.executable, str(ROOT / "benchmarks" / "step.py"), "--against", revision]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=60)
    assert done.returncode == 1
    assert f"--against {revision}" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.skipif(not HAS_COMPOSER, reason="mosaicml is not installed")
def test_a_step_with_composers_optimizer_and_clipping():
    """All variants train with them: a variant that forgot to clip, or updated nothing, would win."""
    words = ("--device", "cpu", "--optimizer", "decoupled_adamw", "--clipping", "--pipelined", "2", *SIZES)
    step = benchmark("step.py", *words)
    for name, counts in step["collectives"].items():
        assert sum(count["calls"] for kind, count in counts.items() if "reduce" in kind and "scatter" not in kind), name
    ours, hand = step["collectives"]["ours"], step["collectives"]["hand"]
    assert (ours.pop("allreduce_"), hand.pop("allreduce_")) == ({"bytes": 8, "calls": 1}, {"bytes": 4, "calls": 1})
    assert ours == hand
    assert step["loss_difference"].keys() == {"ours", "composer", "fsdp1"}
    assert all(difference < 1e-5 for difference in step["loss_difference"].values())
    unclipped = benchmark("step.py", "--device", "cpu", "--variants", "ours", *SIZES)
    assert unclipped["collectives"]["ours"].keys() == ours.keys()


def test_composers_optimizer_is_not_compared_with_a_revision():
    """That revision's shim would be missing, and its update would be the slow one."""
    command = [sys.executable, ROOT / "benchmarks" / "step.py", "--against", "HEAD", "--optimizer", "decoupled_adamw"]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=120)
    assert done.returncode == 2 and "--against has torch's AdamW only" in done.stderr


@pytest.mark.skipif(not HAS_COMPOSER, reason="mosaicml is not installed")
def test_a_trainers_batch():
    """Trainers under the shim, FSDP1 and Composer's FSDP2 take turns in one process, and each still trains right."""
    result = benchmark("step.py", "--trainer", "--device", "cpu", "--microbatches", "2", *SIZES[:-2])
    assert result["processor_ratio"].keys() == {"clipping by hand", "ours", "composer", "fsdp1"}
    assert all(seconds > 0 for seconds in result["processor_s"].values())
    assert all(difference < 1e-5 for difference in result["loss_difference"].values())
    assert len(result["bars"]) == 3 and result["bars"][-1]["holds"]


@pytest.mark.parametrize("strategy", [pytest.param("FULL_SHARD", marks=ONCE)])
def test_saves_take_turns(strategy: str, tmp_path: Path):
    """Each way of saving is timed in each round, and leaves nothing on the disk."""
    options = ("--device", "cpu", "--mib", "1", "--rounds", "2", "--strategy", strategy, "--folder", str(tmp_path))
    result = benchmark("saving.py", *options, *(("--against", "HEAD") if (ROOT / ".git").exists() else ()))
    names = {"ours", "torch"} | ({"revision"} if (ROOT / ".git").exists() else set())
    assert result["seconds"].keys() == result["ratio"].keys() == names
    assert all(len(each) == 2 and min(each) > 0 for each in result["seconds"].values())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("num_ranks", [pytest.param(16, marks=ONCE)])
def test_what_many_ranks_would_send(num_ranks: int):
    """The counts follow from the model's sizes: Llama 70B has 70,553,706,496 parameters, each with Adam's moments."""
    counts = benchmark("saving.py", "--simulate", str(num_ranks))
    assert counts["bytes"] == 3 * 4 * 70_553_706_496
    assert counts["bytes_a_round"] <= 128 << 20
    assert counts["rounds"] >= counts["bytes"] * (num_ranks - 1) / num_ranks / (128 << 20)


@pytest.mark.parametrize("num_ranks", [pytest.param(512, marks=ONCE)])
def test_what_a_rank_has_of_many_others(num_ranks: int):
    """Where each rank has something of all others', it has a bounded part of it at a time, and sends little."""
    result = benchmark("many_ranks.py", "--ranks", str(num_ranks))
    holds = {bar["promise"].partition(": at most")[0]: bar["holds"] for bar in result["bars"]}
    assert holds.keys() == result["ours"].keys()
    for name, most in (("CRC32s: bytes of the others' on a rank", 16 << 20), ("groups: bytes that a rank sends", 1024)):
        assert holds[name] and 0 < result["ours"][name] <= most, name


@pytest.mark.parametrize("num_ranks", [pytest.param(4, marks=ONCE)])
def test_votes_are_timed_and_counted(num_ranks: int):
    """What the benchmark counts in its simulation is what ranks wait for, as long as they tell each other that way."""
    result = benchmark("votes.py", "--ranks", str(num_ranks), "--votes", "5")
    assert result["seconds"][str(num_ranks)].keys() == {"one node", "four nodes", "ring"}
    for counted_for, messages in result["messages"].items():
        num_nodes = -(-int(counted_for) // 8)
        assert messages["ours"] == 2 + num_rounds(num_nodes), counted_for
    assert [messages["ring"] for messages in result["messages"].values()] == [6, 126, 1022, 2046]


@pytest.mark.parametrize("rounds", [pytest.param(1, marks=ONCE)])
def test_an_mlp_in_pieces_keeps_its_bars(rounds: int):
    """The peak is below a third with 8 pieces, and each way's gradients are those of the whole."""
    sizes = ("--width", "32", "--hidden", "128", "--tokens", "512", "--rounds", str(rounds))
    result = benchmark("tiled_mlp.py", "--device", "cpu", *sizes)
    assert all(bar["holds"] for bar in result["bars"]), result["bars"]
    peaks = [each["peak_bytes"] for name, each in result["measured"].items() if "pieces" in name]
    assert len(peaks) == 4 and peaks == sorted(peaks, reverse=True)


@pytest.mark.skipif(not HAS_COMPOSER, reason="transformers is not installed")
def test_what_a_divided_sequence_keeps_and_communicates():
    """Long rows would not fit if a rank kept the whole of them; and the count sees what it should."""
    sizes = {"sequence": 64, "width": 16, "layers": 1, "heads": 4}
    found = benchmark("context.py", *(word for name, size in sizes.items() for word in (f"--{name}", str(size))))
    kept = {int(degree): each for degree, each in found["kept_bytes"].items()}
    logits_bytes = 64 * 512 * 4
    assert kept[1] > logits_bytes and kept[2] / kept[1] < 0.55 and kept[4] / kept[1] < 0.3, kept
    ours, by_hand = found["collectives"]["ours"], found["collectives"]["by hand"]
    assert ours["alltoall_base_"] == {"calls": 2 * 2, "bytes": 4 * 2 * (64 // 2 * 16 * 4)}
    for name in by_hand.keys() - {"allreduce_"}:
        assert ours[name] == by_hand[name], name
    assert ours.keys() == by_hand.keys() and ours["allreduce_"]["calls"] == by_hand["allreduce_"]["calls"] == 1


@pytest.mark.skipif(not HAS_COMPOSER, reason="transformers is not installed")
def test_what_split_layers_communicate():
    """A step of split layers sends what the same by hand sends, and clipping adds one number."""
    found = benchmark("split.py", "--width", "16", "--layers", "1")
    assert all(bar["holds"] for bar in found["bars"]), found["bars"]
    # Two for each layer and direction, of a row of 64 tokens in float64.
    assert found["collectives"]["composer_fsdp2"]["all_reduce"] == {"calls": 7, "bytes": 7 * 64 * 16 * 8}


@pytest.mark.parametrize("experts", [pytest.param(4, marks=ONCE)])
def test_what_split_experts_communicate(experts: int):
    """A step of experts on other ranks sends what the same by hand sends."""
    found = benchmark("experts.py", "--width", "8", "--layers", "1", "--experts", str(experts))
    assert all(bar["holds"] for bar in found["bars"]), found["bars"]
    # Numbers of rows and rows there and back; and rows in backward. Experts, layer and model are gathered once, those
    # that are given back between forward and backward twice.
    counts = found["collectives"]["composer_fsdp2"]
    calls = {name: each["calls"] for name, each in counts.items()}
    assert calls == {"_allgather_base_": 5, "alltoall_base_": 5, "_reduce_scatter_base_": 3}
    # A row for each of two choices of 64 tokens leaves the rank or comes back, four times; others' may be more.
    assert counts["alltoall_base_"]["bytes"] >= 4 * (2 * 64) * 8 * 8


def test_the_object_of_the_set_up():
    """Each size has its row, and the three parts of our time are all there."""
    result = benchmark("setup.py", "--modules", "20", "50", "--repeat", "1")
    sizes = [str(timing["modules"]) for timing in result["timings"]]
    assert list(result["ratio"]) == list(result["ratio_with_materialising"]) == sizes
    assert len(sizes) == 2
    assert len(result["bars"]) == 2
    for timing in result["timings"]:
        assert timing["units"] > 1
        assert all(timing[part] > 0 for part in ("bare_s", "fully_shard_s", "materialising_s", "own_s"))


def test_a_call_is_charged_for_what_it_frees_again(tmp_path: Path):
    """The peak is seen, not what is left at the end, and no page of the file that is read."""
    spec = importlib.util.spec_from_file_location("usage", ROOT / "benchmarks" / "usage.py")
    assert spec is not None and spec.loader is not None
    usage = sys.modules["usage"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(usage)
    file, num_bytes = tmp_path / "file", 96 << 20
    file.write_bytes(bytes(num_bytes))

    def read_and_forget() -> int:
        return sum(len(file.read_bytes()) for _ in range(3))

    total, used = usage.measured(read_and_forget)
    assert total == 3 * num_bytes
    assert 0.9 * num_bytes < used.anonymous_bytes < 1.2 * num_bytes  # sampled
    assert total <= used.read_bytes < 1.01 * total


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("checkpoint")
    options = ("--gib", "0.01", "--rounds", "1", "--folder", str(folder), "--beside", "replicated")
    result = benchmark("checkpoint.py", *options)
    assert list(folder.iterdir()) == []  # a checkpoint of 4 GiB would stay behind
    return result


def test_a_load_is_counted_and_right(checkpoint: dict[str, Any]):
    """Nobody compares the memory and time of loads that left other values, or of which a part was not seen."""
    digests = checkpoint["digests"]
    assert digests.keys() == {"file", "ours", "replicated", "torch"}
    assert digests["ours"] == digests["replicated"] == digests["torch"] == digests["file"] * 2  # cached and cold
    whole = checkpoint["file_bytes"]
    for cache, loads in checkpoint["loads"].items():
        for loader, [run] in loads.items():
            of_ranks = run["of_ranks"]
            num_holders = len(of_ranks) if loader == "replicated" else 1
            assert sum(rank["shard_bytes"] for rank in of_ranks) == pytest.approx(num_holders * whole, rel=0.05)
            # AdamW's moments stay: two thirds of what was loaded, where they were not there already.
            if loader != "replicated":
                assert all(rank["anonymous_bytes"] > 0.6 * rank["shard_bytes"] for rank in of_ranks), loader
            assert run["seconds"] == max(rank["seconds"] for rank in of_ranks) > 0
            from_disk = sum(rank["disk_bytes"] for rank in of_ranks)
            assert (from_disk > 0.9 * whole) == (cache == "cold"), (cache, loader)
        assert all(rank["read_bytes"] > rank["shard_bytes"] for rank in loads["ours"][0]["of_ranks"])
        assert sum(rank["read_bytes"] for rank in loads["torch"][0]["of_ranks"]) < whole  # it maps the file


def test_conversions_and_verifications_are_counted(checkpoint: dict[str, Any]):
    """Each has its row beside the speeds of the same disk in the same run; a check reads all that it checks."""
    assert checkpoint["conversions"].keys() == checkpoint["convert_ratio"].keys()
    assert len(checkpoint["conversions"]) == 5
    assert all(usage["seconds"] > 0 for [usage] in checkpoint["conversions"].values())
    # torch's converters hold the whole checkpoint, so that less would mean that the peak was missed.
    for converter in ("torch to DCP", "torch to monolithic"):
        assert checkpoint["conversions"][converter][0]["anonymous_bytes"] > 0.9 * checkpoint["file_bytes"]
    assert checkpoint["rates"].keys() == {"read", "write", "cache", "crc32"}
    for cache, [usage] in checkpoint["verifications"].items():
        assert usage["read_bytes"] >= checkpoint["file_bytes"], cache
        reference = checkpoint["rates"]["read" if cache == "cold" else "crc32"][0]
        assert checkpoint["verify_part"][cache] == checkpoint["file_bytes"] / usage["seconds"] / reference
    assert len(checkpoint["bars"]) == 15
    assert all(bar["holds"] for bar in checkpoint["bars"] if "peak memory" in bar["promise"])


@pytest.mark.parametrize("num_files", [pytest.param(25, marks=ONCE)])
def test_files_are_migrated(num_files: int):
    """The files of that benchmark are as long as it says, and each is migrated, which it checks itself."""
    spec = importlib.util.spec_from_file_location("migrate_benchmark", ROOT / "benchmarks" / "migrate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    texts = {module.file_text(number) for number in range(num_files)}
    assert len(texts) == num_files and {text.count("\n") for text in texts} == {150}
    result = benchmark("migrate.py", "--files", str(num_files))
    assert result["files"] == num_files and result["seconds"] > 0 and len(result["bars"]) == 1


@pytest.mark.parametrize("start", [pytest.param("version", marks=ONCE)])
def test_starts_are_compared_with_their_imports(start: str):
    """Each start has its ratio to what it must import at least; one that fails would be quick, and ends the script."""
    result = benchmark("start.py", "--rounds", "1", "--only", start, "explain")
    assert result["ratio"].keys() == {start, "explain"} and len(result["bars"]) == 2
    [libraries] = result["processor_s"].keys() - result["ratio"].keys()
    assert libraries == "import typer, rich, yaml, omegaconf"
    seconds = result["processor_s"]
    assert all(seconds[name] / seconds[libraries] == pytest.approx(ratio) for name, ratio in result["ratio"].items())


@pytest.mark.parametrize("strategy", ["FULL_SHARD", pytest.param("SHARD_GRAD_OP", marks=pytest.mark.slow)])
def test_bounds_stand_beside_what_was_measured(strategy: str):
    """A bound that a step beats would be none, and one of zero would hold for anything; of so small a model all are far
    below what is measured, so that no busy machine decides."""
    sizes = [word for name, size in TINY.items() if name != "warmup" for word in (f"--{name}", str(size))]
    result = benchmark("bounds.py", "--strategy", strategy, *sizes)
    rows, bounds = result["rows"], result["bounds"]
    for name in ("a step", "computing", "sending"):
        assert 0 < rows[name]["bound"] <= rows[name]["nearest"] <= rows[name]["measured"], name
    assert 0 < rows["MFU"]["nearest"] <= rows["MFU"]["bound"] <= 1
    assert max(bounds["compute_s"], bounds["intra_s"]) <= bounds["lower_s"] <= bounds["serial_s"] * 1.000001
    assert bounds["inter_s"] == 0 and bounds["exposed_s"] == pytest.approx(bounds["lower_s"] - bounds["compute_s"])
    assert len(result["bars"]) == 8


@pytest.mark.skipif(not HAS_COMPOSER, reason="transformers is not installed")
def test_a_plan_is_timed():
    """What is timed is a plan of the model that it says, with its activations."""
    result = benchmark("plan.py", "--layers", "2", "--ranks", "16", "--rounds", "1")
    width, hidden, vocabulary = 16384, 53248, 128256
    block = 2 * width * width + 2 * width * width // 16 + 3 * width * hidden + 2 * width
    assert result["plan"]["run"]["parameters"] == 2 * vocabulary * width + 2 * block + width
    assert result["plan"]["per_rank"]["activations_bytes"] > 0 and len(result["plan"]["units"]) == 3
    assert len(result["bars"]) == 2


@pytest.mark.skipif(not HAS_COMPOSER, reason="transformers is not installed")
def test_a_search_is_timed():
    """What is timed is a search of as many settings as it says, for a memory that does not let everything fit."""
    result = benchmark("suggest.py", "--ranks", "16", "--rows", "2", "--rounds", "1")
    # 2 microbatches, offloaded or not, and 25 treatments of activations; by 4 numbers of replicas, of 16, 8, 4 and 2
    # shards, after forward freed, kept, or kept by a smaller group of a node's 8 ranks.
    ways_to_reshard = (2 + 3) + (2 + 2) + (2 + 1) + 2
    assert result["choices"] == 2 * 2 * 25 * ways_to_reshard
    assert result["proposals"] and all(each["peak"]["bytes_by_kind"] for each in result["proposals"])
