"""``read_run``: from a user's file to a ``PreflightRun``."""

from pathlib import Path
from typing import Any

from composer_fsdp2.preflight.foundry_yaml import is_foundrys, read_foundry_yaml
from composer_fsdp2.preflight.other_files import read_other_file
from composer_fsdp2.preflight.planned_model import planned_run
from composer_fsdp2.preflight.preflight_run import PreflightRun
from composer_fsdp2.preflight.run_file import Request, RunFile, as_config_error


def read_run(path: str | Path, **how: Any) -> PreflightRun:
    """The run that a file configures, with its model on the meta device; no GPU, no network, no weights.

    Args:
        path: An LLM Foundry YAML, another system's configuration (with ``model_config`` or ``model``), or a
            transformers model's ``config.json``.
        how: The fields of ``Request``, such as ``world_size``.
    Raises:
        ConfigError: no such file, no configuration, ranks that do not fit, or a model that cannot be built; one line.
        PlanError, UnsupportedError: the model cannot be sharded so.
    """
    request = Request(**how)
    file = RunFile.read(Path(path), request.overrides)
    read = read_foundry_yaml if is_foundrys(file.values) else read_other_file
    with as_config_error(f"{path}: no run can be made of it"):
        return planned_run(*read(file, request), request)
