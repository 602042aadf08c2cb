"""``read_run``: from a user's file to a ``PreflightRun``."""

from pathlib import Path
from typing import Any

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.preflight.foundry_yaml import is_foundry_yaml, read_foundry_yaml
from composer_fsdp2.preflight.other_files import read_other_file
from composer_fsdp2.preflight.planned_model import planned_run
from composer_fsdp2.preflight.preflight_run import PreflightRun
from composer_fsdp2.preflight.run_file import Request, RunFile, as_config_error


def read_run(path: str | Path, **how: Any) -> PreflightRun:
    """Read the run that a file configures, with its model on the meta device. Requires no GPU, network or weights.

    Args:
        path: An LLM Foundry YAML, another system's configuration (with ``model_config`` or ``model``), or a
            transformers model's ``config.json``.
        how: Fields of ``Request``. Without ``world_size``, accelerate's ``num_processes`` in the file applies.
    Raises:
        ConfigError: the file does not exist or has no configuration, the world size does not fit it, or the model
            cannot be built.
        PlanError, UnsupportedError: the model cannot be sharded in this configuration.
    """
    file = RunFile.read(Path(path), how.get("overrides", ()))
    world_size = how.get("world_size")
    request = Request(**{**how, "world_size": _num_processes(file) if world_size is None else world_size})
    read = read_foundry_yaml if is_foundry_yaml(file.values) else read_other_file
    with as_config_error(f"{path}: no run can be made of it"):
        return planned_run(*read(file, request), request)


def _num_processes(file: RunFile) -> int:
    """The number of ranks in an accelerate file."""
    given = file.values.get("num_processes")
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    raise ConfigError(
        f"{file.path}: the number of ranks is not known; set --world-size, or num_processes of accelerate"
    )
