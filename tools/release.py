"""Build the distributions, check them, and try the wheel in an empty environment: `make release`.

    .venv/bin/python tools/release.py

Leaves `dist/`, from which `twine upload` takes them. Exit code 1 at the first step that fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from make_venv import PIP, ROOT, STACKS

DIST = ROOT / "dist"


def main() -> None:
    shutil.rmtree(DIST, ignore_errors=True)
    # The wheel is built from the source distribution.
    run(sys.executable, "-m", "build", "--outdir", DIST, ROOT)
    run(sys.executable, "-m", "twine", "check", "--strict", *DIST.iterdir())
    [wheel] = DIST.glob("*.whl")
    torch = STACKS["engine"].requirements[0]
    with tempfile.TemporaryDirectory() as folder:
        commands = Path(folder, "venv", "bin")
        run(sys.executable, "-m", "venv", commands.parent)
        run(commands / "python", *PIP, "--quiet", torch, wheel)
        for file in ("tools/smoke.py", "yamls/mpt-tiny-fsdp1.yaml"):
            shutil.copy(ROOT / file, folder)
        run(commands / "composer-fsdp2", "--version", cwd=folder)
        run(commands / "composer-fsdp2", "migrate", "mpt-tiny-fsdp1.yaml", cwd=folder)
        run(commands / "torchrun", "--standalone", "--nproc-per-node", "2", "smoke.py", cwd=folder)
    print(f"{DIST.name}/: {', '.join(sorted(path.name for path in DIST.iterdir()))}")


def run(*command: str | Path, cwd: str | Path = ROOT) -> None:
    """Without PYTHONPATH, which would put the checkout before the installed package."""
    print("$", *command, flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if code := subprocess.run(command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL).returncode:
        sys.exit(f"{command[0]} ended with {code}")


if __name__ == "__main__":
    main()
