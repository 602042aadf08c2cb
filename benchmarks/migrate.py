"""Migrating a folder of 1,000 configurations, as a team does once.

    python benchmarks/migrate.py
    python benchmarks/migrate.py --json --files 40

The files are copies of ``yamls/mpt``'s FSDP1 files, each with a distinct line, in a temporary folder. The command runs
as a user types it, with ``--write``, and its time includes start-up and writing. Processor time covers all its
processes, and is less affected by other load than the clock. Exit code 0, or 1 if a bar fails.
"""

import os
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
FILES = sorted(Path(__file__).resolve().parents[1].glob("yamls/mpt/*-fsdp1.yaml"))


def file_text(number: int) -> str:
    """One of the project's examples; each number has its own text."""
    return f"# Run {number} of a sweep.\n{FILES[number % len(FILES)].read_text()}"


def seconds_to_migrate(folder: Path, num_files: int) -> tuple[float, float]:
    """The time of the command including its start: on the clock, and of processors."""
    for number in range(num_files):
        (folder / f"run-{number}.yaml").write_text(file_text(number))
    command = [sys.executable, "-m", "composer_fsdp2", "migrate", str(folder), "--write", "--report", "report.md"]
    began, used = time.perf_counter(), used_by_children()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    seconds, processor = time.perf_counter() - began, used_by_children() - used
    for number in range(num_files):
        assert (folder / f"run-{number}.yaml").read_text() != file_text(number), f"run-{number}.yaml"
    return seconds, processor


def used_by_children() -> float:
    """Processor time, user and system, of all ended child processes."""
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
            f"{options.files} files in {MAX_SECONDS:.0f} s on {os.cpu_count()} cores",
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
