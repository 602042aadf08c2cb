"""Migrating a folder of configurations, as a team does once: 1,000 files of 150 lines.

    python benchmarks/migrate.py
    python benchmarks/migrate.py --json --files 40

The files are LLM Foundry's kind (comments, interpolations, a section for FSDP1), each another, made by this script in a
temporary folder; the command runs as a user types it, with ``--write``, so that its start and the writing are in the
time. Processor time is that of all its processes, and says on a busy machine what the clock cannot. Exit code 0, or 1
if a bar does not hold.
"""

import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import report
from report import Bar, machine

MAX_SECONDS = 15.0
LINES = 150

_SECTIONS = (
    ("sharding_strategy", ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")),
    ("mixed_precision", ("PURE", "DEFAULT", "FULL")),
    ("activation_checkpointing", ("true", "false")),
    ("activation_checkpointing_reentrant", ("false", "${variables.reentrant}")),
    ("activation_cpu_offload", ("false",)),
    ("limit_all_gathers", ("true",)),
    ("backward_prefetch", ("BACKWARD_POST", "BACKWARD_PRE")),
    ("state_dict_type", ("sharded", "full")),
)


def file_text(number: int) -> str:
    """150 lines of a training YAML; which ones, the number decides."""
    draw = random.Random(number)
    lines = [
        f"# Run {number} of a sweep.",
        "variables:",
        "  reentrant: false",
        f"  lr: {draw.choice(['1.0e-4', '3.0e-4'])}",
        "",
        f"run_name: run-{number}",
        f"max_seq_len: {draw.choice([2048, 4096])}",
        "precision: amp_bf16",
        "model:",
        "  name: mpt_causal_lm",
        "  max_seq_len: ${max_seq_len}",
        f"  d_model: {draw.choice([768, 2048, 4096])}  # width",
        "optimizer: {name: decoupled_adamw, lr: '${variables.lr}', betas: [0.9, 0.95]}",
        "",
        "fsdp_config:  # for FSDP1",
        *(f"  {key}: {draw.choice(values)}{draw.choice(['', '  # as before'])}" for key, values in _SECTIONS),
        "",
    ]
    while len(lines) < LINES - 6:
        name = f"part_{len(lines)}"
        lines += [f"{name}:", f"  # {name} of run {number}", "  name: 'text'", f"  size: {draw.randrange(99)}"]
        lines += ["  kwargs: {a: 1, b: [1, 2, 3]}", "  path: ${run_name}/data"]
    return "\n".join([*lines, *(f"last_{line}: {line}" for line in range(LINES - len(lines)))]) + "\n"


def seconds_to_migrate(folder: Path, num_files: int) -> tuple[float, float]:
    """Of the command with its start: on the clock, and of processors."""
    for number in range(num_files):
        (folder / f"run-{number}.yaml").write_text(file_text(number))
    command = [sys.executable, "-m", "composer_fsdp2", "migrate", str(folder), "--write", "--report", "report.md"]
    began, used = time.perf_counter(), used_by_children()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    seconds, processor = time.perf_counter() - began, used_by_children() - used
    for number in range(num_files):
        text = (folder / f"run-{number}.yaml").read_text()
        assert "reshard_after_forward: " in text and "limit_all_gathers" not in text, f"run-{number}.yaml"
    return seconds, processor


def used_by_children() -> float:
    """Processor time, user and system, of all processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--files", type=report.count, default=1000)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        seconds, processor = seconds_to_migrate(Path(folder), options.files)
    bars = [
        Bar(
            f"{options.files} files of {LINES} lines in {MAX_SECONDS:.0f} s on {os.cpu_count()} cores",
            f"{seconds:.1f} s",
            seconds <= MAX_SECONDS,
        )
    ]
    text = (
        f"{machine()}\n{options.files} files: {seconds:.1f} s, {1000 * seconds / options.files:.1f} ms a file; "
        f"processors {processor:.1f} s"
    )
    summary = {"files": options.files, "seconds": seconds, "processor_seconds": processor}
    return report.conclude(options, bars, summary=summary, text=text)


if __name__ == "__main__":
    sys.exit(main())
