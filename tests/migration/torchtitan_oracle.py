"""Results of TorchTitan's ConfigManager for files: texts as JSON on stdin, its errors on stdout; run by ``ask``."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import tempfile
import types
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any


def ask(texts: Sequence[str], release: str) -> list[dict[str, Any]]:
    """Its configuration of each file, or its error."""
    from support.other_releases import run_with

    done = run_with([release], Path(__file__), stdin=json.dumps(texts))
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def read(text: str) -> dict[str, Any]:
    from torchtitan.config.manager import ConfigManager

    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        try:
            return asdict(ConfigManager().parse_args([f"--job.config_file={file.name}"]))
        except (Exception, SystemExit) as error:  # any exception is the result; tyro exits
            return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    # The package's own __init__ imports kernels that require a newer torch and that its configuration does not need.
    package = types.ModuleType("torchtitan")
    spec = importlib.util.find_spec("torchtitan")
    assert spec is not None and spec.submodule_search_locations is not None
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["torchtitan"] = package
    with contextlib.redirect_stdout(sys.stderr):
        answers = [read(text) for text in json.load(sys.stdin)]
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
