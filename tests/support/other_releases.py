"""Releases of other systems that are not in the environment, each in a separate folder: ``run_with``, ``needs``.

``python tests/support/other_releases.py`` installs them, as ``make test-others`` does. Separate processes import them
in addition to the official stack; their dependencies replace no package of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / ".others"
# The release, and dependencies of its configuration that are missing in the official stack.
RELEASES = {
    "accelerate-1.10.1": ("accelerate==1.10.1",),
    "axolotl-0.12.2": ("axolotl==0.12.2", "addict==2.4.0"),
    "transformers-4.55.2": ("transformers==4.55.2", "tokenizers==0.21.4", "huggingface-hub==0.34.4"),
    "accelerate-1.15.0": ("accelerate==1.15.0",),
    "trl-0.17.0": ("trl==0.17.0",),
    "torchtitan-0.2.2": (
        "torchtitan==0.2.2",
        "tyro==0.9.31",
        "docstring-parser==0.18.0",
        "shtab==1.8.0",
        "typeguard==4.6.1",
    ),
}


def needs(*releases: str) -> None:
    """Skip a test if a release is not installed."""
    missing = [name for name in releases if not (FOLDER / name).is_dir()]
    if missing:
        pytest.skip(f"{', '.join(missing)}: not installed; make test-others installs it")


def run_with(releases: Sequence[str], script: Path, stdin: str) -> subprocess.CompletedProcess[str]:
    """``python script`` with these releases before the installed packages on the path."""
    paths = os.pathsep.join(str(FOLDER / name) for name in releases)
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(
        [sys.executable, str(script)], input=stdin, env=environment, capture_output=True, text=True, check=False
    )


def main() -> None:
    for name, requirements in RELEASES.items():
        if not (FOLDER / name).is_dir():  # pip moves a complete folder there
            print(f"{FOLDER.name}/{name}: installing", flush=True)
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
            subprocess.run([*pip, "--no-deps", "--target", str(FOLDER / name), *requirements], check=True)


if __name__ == "__main__":
    main()
