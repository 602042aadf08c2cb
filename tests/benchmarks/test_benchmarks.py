"""The benchmarks run, print their tables, and stay within the bars that do not depend on a clock."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.forked_scripts import run_script
from support.ranks import WITH_COMPOSER

pytestmark = pytest.mark.composer

ROOT = Path(__file__).resolve().parents[2]
TINY = {"width": 16, "layers": 2, "heads": 2, "vocabulary": 32, "sequence": 8, "batch": 1, "steps": 2, "warmup": 2}
SIZES = " ".join(f"--{name} {size}" for name, size in TINY.items())


def printed(words: str) -> str:
    """The output of a script. Timings of such a small model are not meaningful, so no bar decides the exit code.

    The script and its ranks are forked, with torch and Composer already imported.
    """
    script, *options = words.split()
    done = run_script(WITH_COMPOSER, ROOT / "benchmarks" / script, *options, "--no-bars")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("strategy", [pytest.param("FULL_SHARD", marks=pytest.mark.slow), "SHARD_GRAD_OP"])
def test_a_step_costs_what_the_hand_written_loop_does(strategy: str):
    """The translation costs no additional gathers, bytes or memory; and the numbers are non-zero."""
    step = json.loads(printed(f"step.py --json --device cpu --variants ours composer --strategy {strategy} {SIZES}"))
    collectives, state = step["collectives"], step["state_bytes"]
    assert collectives["ours"] == collectives["hand"] and state["ours"] == state["hand"]
    gathers, reductions = (collectives["ours"][name] for name in ("_allgather_base_", "_reduce_scatter_base_"))
    num_gathers = 1 if strategy == "SHARD_GRAD_OP" else 2
    assert (gathers["calls"], reductions["calls"]) == (1 + num_gathers * TINY["layers"], 1 + TINY["layers"])
    # Two moments of half of the parameters.
    assert reductions["bytes"] == pytest.approx(state["hand"]["optimizer"], rel=0.01)
    assert state["ours"]["peak"] == sum(size for kind, size in state["ours"].items() if kind != "peak")
    assert step["loss_difference"]["ours"] == 0 and step["loss_difference"]["composer"] < 1e-6
    # Composer's FSDP2 drops sharding_strategy and gathers each block a second time.
    is_less = gathers["bytes"] < collectives["composer"]["_allgather_base_"]["bytes"]
    assert is_less == (strategy == "SHARD_GRAD_OP")


# The command line, and the expected contents of its output.
TABLES = {
    f"step.py --trainer --device cpu {SIZES}": [
        "| fully_shard by hand ", "| composer_fsdp2 ", "| Composer's FSDP2 ", "| FSDP1 ",
        "holds: its losses of the first 10 steps", "the processor seconds of a step with Composer's FSDP2",
    ],
    f"step.py --device cpu --optimizer decoupled_adamw --clipping --pipelined 2 {SIZES}": [
        "| fully_shard by hand ", "| composer_fsdp2 ", "| Composer's FSDP2 ", "| FSDP1 ", "holds: its losses",
    ],
    "setup.py --modules 20 50 --repeat 1": ["| 30 ", "| 54 ", "our own part grows linearly"],
    "dispatch.py --layers 1 --rounds 1": ["| DecoupledAdamW, without the shim ", "| OptimizerMonitor ", "| clip_grad_"],
    "saving.py --device cpu --mib 1 --rounds 1 --folder {folder}": ["| save_monolithic ", "| full_tensor, torch.save "],
    "migrate.py --files 3": ["3 files: "],
    "start.py --rounds 1 --only version": ["| composer-fsdp2 --version ", "import typer"],
    "checkpoint.py --gib 0.001 --ranks 1 --rounds 1 --folder {folder}": [
        "holds: what was loaded is what was written: by all", "| load_checkpoint, on the disk alone ",
        "| verify_checkpoint, in the page cache ", "| convert_checkpoint, back ",
    ],
}  # fmt: skip


@pytest.mark.parametrize("words", TABLES, ids=lambda words: words.partition(" ")[0])
def test_a_table_is_printed(words: str, tmp_path: Path):
    """Each row is printed, and no file of gigabytes is left behind."""
    text = printed(words.format(folder=tmp_path))
    assert not [each for each in TABLES[words] if each not in text], text
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_clients_of_fsdp1s_class_compute_the_same():
    """Started as a user starts it: with torchrun, and with ``python -m composer_fsdp2 run``."""
    script = [sys.executable, str(ROOT / "benchmarks" / "clients.py"), "tutorial"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "MNIST" in done.stdout, done.stdout + done.stderr
