"""``make demo``: an LLM Foundry YAML trains on FSDP1 and saves; the same YAML resumes that checkpoint on FSDP2.

Prints the outcome of each FSDP1 key and the losses of both runs side by side, and draws ``demo/out/loss.png``. Takes
about a minute on two cores; on a machine with two or more GPUs it uses up to four of them.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import torch
from data import local_texts, make_data
from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from composer_fsdp2 import translate

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "demo" / "out"
YAML = ROOT / "yamls" / "mpt-tiny-fsdp1.yaml"
# Relative, of losses. The curves agree to rounding; a wrong gradient scale or a lost optimizer state shows in the
# second digit. The tolerance on GPUs is a little more than a step of bf16 (2 ** -7), the demo's dtype there, because
# kernels may sum in another order from run to run. It was not measured on any GPU.
TOLERANCE, TOLERANCE_ON_GPUS = 1e-5, 1e-2

console = Console(highlight=False)


def main() -> int:
    config = OmegaConf.load(YAML)
    num_ranks = min(4, torch.cuda.device_count()) if torch.cuda.device_count() >= 2 else 2
    kind = "GPUs" if torch.cuda.device_count() >= 2 else "CPU ranks"
    resume_at, last = _batches(config.save_interval), _batches(config.max_duration)
    OUT.mkdir(parents=True, exist_ok=True)

    console.rule("1. a tokenizer and a streaming dataset, from the text of Composer's sources")
    num_samples = make_data(OUT / "data", local_texts(), vocabulary=config.model.vocab_size, length=config.max_seq_len)
    console.print(f"{num_samples} samples of {config.max_seq_len} tokens in {_shown(OUT / 'data')}")

    console.rule(f"2. real FSDP1, {num_ranks} {kind}: {last} batches, a checkpoint after {resume_at}")
    launch = ["-n", str(num_ranks)]
    fsdp1 = _train("FSDP1", [*launch, "demo/fsdp1.py", str(YAML)], last)

    console.rule("3. the outcome of each key of the YAML's fsdp_config")
    console.print(
        translate(config.fsdp_config, precision=config.precision, world_size=num_ranks).explain(), soft_wrap=True
    )

    checkpoint = OUT / "FSDP1" / f"ep0-ba{resume_at}"
    console.rule(f"4. FSDP2: the same YAML, from the checkpoint that FSDP1 wrote after {resume_at} batches")
    resume = [*launch, "-m", "composer_fsdp2", "train", str(YAML), f"load_path={checkpoint}"]
    fsdp2 = _train("FSDP2", resume, last, resume_at)

    console.rule("5. both curves")
    return _compare(fsdp1, fsdp2, resume_at)


def _batches(duration: str) -> int:
    return int(str(duration).removesuffix("ba"))


def _train(name: str, arguments: Sequence[str], last: int, done: int = 0) -> dict[int, float]:
    """Run Composer's launcher with a progress bar; return the losses by batch."""
    losses, log = OUT / f"{name}.jsonl", OUT / f"{name}.log"
    losses.unlink(missing_ok=True)
    command = [
        str(Path(sys.executable).parent / "composer"),
        *arguments,
        f"save_folder={OUT / name}",
        f"variables.data={OUT / 'data'}",
        f"variables.losses={losses}",
        *(["precision=amp_bf16"] if torch.cuda.device_count() >= 2 else []),
    ]
    console.print("composer " + " ".join(_shown(word) for word in command[1:]), soft_wrap=True)
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | os.environ
    with log.open("w") as output, _progress() as progress:
        task = progress.add_task(f"{name}: starting the ranks", total=last, completed=done)
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment)
        while process.poll() is None:
            batches = _read(losses)
            if batches:
                progress.update(task, completed=max(batches), description=f"{name}: batches")
            time.sleep(0.3)
        if process.returncode == 0:
            progress.update(task, completed=last, description=f"{name}: batches")
    if process.returncode:
        console.print("".join(log.read_text().splitlines(keepends=True)[-30:]), markup=False)
        raise SystemExit(f"{name} ended with {process.returncode}; its output is in {_shown(log)}")
    return _read(losses)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )


def _read(losses: Path) -> dict[int, float]:
    if not losses.exists():
        return {}
    lines = [line for line in losses.read_text().split("\n")[:-1] if line]  # the last line may be incomplete
    return {record["batch"]: record["loss"] for record in map(json.loads, lines) if "batch" in record}


def _sharded_by(name: str) -> str:
    counts = json.loads((OUT / f"{name}.jsonl").read_text().split("\n")[0])["modules"]
    return f"{name}: " + ", ".join(f"{count} {kind} modules" for kind, count in counts.items())


def _compare(fsdp1: dict[int, float], fsdp2: dict[int, float], resume_at: int) -> int:
    table = Table("batch", "FSDP1", "FSDP2, resumed", "difference", box=None, header_style="bold")
    for batch, loss in fsdp1.items():
        other = fsdp2.get(batch)
        shown = ("", "") if other is None else (f"{other:.7f}", f"{other - loss:+.1e}")
        table.add_row(str(batch), f"{loss:.7f}", *shown)
    console.print(table)
    console.print(_sharded_by("FSDP1"), _sharded_by("FSDP2"), sep="\n")
    expected = [batch for batch in fsdp1 if batch > resume_at]
    if sorted(fsdp2) != expected:
        console.print(f"FSDP2 trained batches {sorted(fsdp2)}, expected were {expected}")
        return 1
    worst = max(abs(fsdp2[batch] - fsdp1[batch]) / abs(fsdp1[batch]) for batch in fsdp2)
    _draw(fsdp1, fsdp2, resume_at)
    tolerance = TOLERANCE_ON_GPUS if torch.cuda.device_count() >= 2 else TOLERANCE
    console.print(
        f"largest relative difference after the resumption: {worst:.1e}"
        + ("" if worst <= tolerance else f" (above {tolerance:.0e})")
    )
    console.print(f"picture: {_shown(OUT / 'loss.png')}")
    return 0 if worst <= tolerance else 1


def _draw(fsdp1: dict[int, float], fsdp2: dict[int, float], resume_at: int) -> None:
    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(7, 5), height_ratios=(3, 1), layout="constrained")
    top.plot(list(fsdp1), list(fsdp1.values()), color="tab:gray", linewidth=4, alpha=0.5, label="FSDP1")
    top.plot(list(fsdp2), list(fsdp2.values()), color="tab:blue", marker="o", markersize=3, label="FSDP2, resumed")
    top.axvline(resume_at, color="tab:gray", linestyle=":")
    top.annotate(
        "FSDP1's checkpoint",
        (resume_at, 0.92),
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        color="tab:gray",
    )
    top.set_ylabel("loss")
    top.set_title("One YAML and one checkpoint, on FSDP1 and on FSDP2")
    top.legend(frameon=False)
    differences = [fsdp2[b] - fsdp1[b] for b in fsdp2]
    bottom.plot(list(fsdp2), differences, color="tab:blue", marker="o", markersize=3)
    bottom.axhline(0, color="tab:gray", linewidth=0.5)
    widest = max(*map(abs, differences), 1e-6)  # at least the differences visible in fp32, where all are 0
    bottom.set_ylim(-1.2 * widest, 1.2 * widest)
    bottom.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    bottom.set_ylabel("difference")
    bottom.set_xlabel("batch")
    unfinished = OUT / "loss.unfinished.png"
    figure.savefig(unfinished, dpi=120)
    unfinished.rename(OUT / "loss.png")


def _shown(path: object) -> str:
    """A path as seen from the repository."""
    return str(path).replace(f"{ROOT}/", "")


if __name__ == "__main__":
    sys.exit(main())
