"""Build the distributions, check them, and try the wheel in empty environments: `make release`.

    .venv/bin/python tools/release.py                             # torch 2.7.0, 2.13.0 and the newest that pip finds
    .venv/bin/python tools/release.py --torch 2.13.0 --torch newest

Writes `dist/`, for `twine upload`. pip resolves the wheel with each extra, without installing it. Each environment is a
temporary folder with torch, the wheel and its declared dependencies: 1 GB, or several GB where torch comes with CUDA
libraries. Exit code 1 at the first step that fails.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from make_venv import PIP, ROOT, STACKS

DIST = ROOT / "dist"
ENGINE_TORCH = STACKS["engine"].requirements[0].removeprefix("torch==")
TORCHES = ("2.7.0", ENGINE_TORCH, "newest")

# Commands whose optional package is not installed, and the pip command that their error must contain.
NEED_AN_EXTRA = (
    (("plan", "mpt-tiny-fsdp1.yaml", "--world-size", "8"), "pip install 'composer-fsdp2[foundry]'"),
    (("plan", "gpt2-script-fsdp1.yaml", "--world-size", "8", "--model-config", "."), "pip install transformers"),
    (("train", "mpt-tiny-fsdp1.yaml"), "pip install 'composer-fsdp2[foundry]'"),
    (("compare", "mpt-tiny-fsdp1.yaml"), "pip install 'composer-fsdp2[foundry]'"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the distributions, check them, and try the wheel.")
    parser.add_argument(
        "--torch",
        action="append",
        metavar="VERSION",
        help=f"a release of torch, or newest; may be repeated (default: {', '.join(TORCHES)})",
    )
    arguments = parser.parse_args()
    shutil.rmtree(DIST, ignore_errors=True)
    # The wheel is built from the source distribution.
    run(sys.executable, "-m", "build", "--outdir", DIST, ROOT)
    run(sys.executable, "-m", "twine", "check", "--strict", *DIST.iterdir())
    [wheel] = DIST.glob("*.whl")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in project["optional-dependencies"]:
        run(sys.executable, *PIP, "--quiet", "--dry-run", "--ignore-installed", f"{wheel}[{extra}]")
    for version in arguments.torch or TORCHES:
        try_wheel(wheel, version)
    print(f"{DIST.name}/: {', '.join(sorted(path.name for path in DIST.iterdir()))}")


def try_wheel(wheel: Path, torch: str) -> None:
    """Install the wheel beside ``torch`` (a version, or "newest") and run each part that needs no other package."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        commands = folder / "venv/bin"
        run(sys.executable, "-m", "venv", commands.parent)
        run(commands / "python", *PIP, "--quiet", "torch" if torch == "newest" else f"torch=={torch}", wheel)
        for file in ("tools/smoke.py", "yamls/mpt-tiny-fsdp1.yaml", "yamls/composer/gpt2-script-fsdp1.yaml"):
            shutil.copy(ROOT / file, folder)
        (folder / "config.json").write_text('{"model_type": "gpt2"}')
        product = commands / "composer-fsdp2"
        run(product, "--version", cwd=folder)
        run(product, "migrate", "mpt-tiny-fsdp1.yaml", cwd=folder)
        plan = ("plan", "gpt2-script-fsdp1.yaml", "--world-size", "8", "--memory", "80GiB", "--no-activations")
        run(product, *plan, "--model", "smoke.py:small_model", "--html", "plan.html", cwd=folder)
        for command, pip_command in NEED_AN_EXTRA:
            require_refusal(product, *command, names=pip_command, cwd=folder)
        run(commands / "torchrun", "--standalone", "--nproc-per-node", "2", "smoke.py", cwd=folder)
    print(f"torch {torch}: the wheel works; {time.monotonic() - began:.0f} s", flush=True)


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    print("$", *command, flush=True)
    if code := subprocess.run(command, cwd=cwd, env=environment(), stdin=subprocess.DEVNULL).returncode:
        sys.exit(f"{command[0]} ended with {code}")


def require_refusal(*command: str | Path, names: str, cwd: Path) -> None:
    """Run a command that must end with exit code 2 and one line on standard error that contains ``names``."""
    print("$", *command, flush=True)
    done = subprocess.run(command, cwd=cwd, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    print(done.stdout + done.stderr, end="", flush=True)
    if done.returncode != 2 or done.stdout or len(done.stderr.splitlines()) != 1 or names not in done.stderr:
        sys.exit(f"expected exit code 2 and one line with: {names}")


def environment() -> dict[str, str]:
    """Without PYTHONPATH, which would find the checkout instead of the installed wheel."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


if __name__ == "__main__":
    main()
