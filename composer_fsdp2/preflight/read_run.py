"""``read_run``: from a user's file to a ``PreflightRun``."""

from collections.abc import Iterable
from pathlib import Path

from composer_fsdp2.config.text import one_line
from composer_fsdp2.errors import ComposerFSDP2Error, ConfigError
from composer_fsdp2.preflight.foundry_yaml import is_foundrys, read_foundry_yaml
from composer_fsdp2.preflight.other_files import read_other_file
from composer_fsdp2.preflight.planned_model import ModelOrFunction
from composer_fsdp2.preflight.preflight_run import PreflightRun
from composer_fsdp2.preflight.run_file import RunFile

# More than there are in the world; the ranks of a group are listed, and their number's divisors looked for.
MOST_RANKS = 2**20


def read_run(
    path: str | Path,
    *,
    world_size: int,
    gpus_per_node: int = 8,
    model_config: str | Path | None = None,
    model: ModelOrFunction | None = None,
    microbatch: int | None = None,
    sequence: int | None = None,
    device: str = "cuda",
    overrides: Iterable[str] = (),
) -> PreflightRun:
    """The run that a file asks for, with its model on the meta device; no GPU, no network, no weights.

    Args:
        path: An LLM Foundry YAML, another system's configuration (with ``model_config`` or ``model``), or a
            transformers model's ``config.json``.
        gpus_per_node: For a ``process_group`` by nodes.
        model_config: A ``config.json`` or its folder, for a model that the file does not describe.
        model: In the place of the file's: a module, or a function that builds it.
        microbatch: Rows, where the file says ``auto`` or nothing, or for another number than it has.
        sequence: Tokens of a row, likewise.
        device: For which type of device.
        overrides: ``KEY=VALUE``, changes of the file's values.
    Raises:
        ConfigError: no such file, no configuration, ranks that do not fit, or a model that cannot be built; one line.
        PlanError, UnsupportedError: the model cannot be sharded so.
    """
    if type(world_size) is not int or not 1 <= world_size <= MOST_RANKS:
        raise ConfigError(f"world size {world_size}; give the number of ranks, from 1 to {MOST_RANKS}")
    for name, value in (("microbatch", microbatch), ("sequence", sequence), ("gpus per node", gpus_per_node)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value}; give a number from 1 on")
    file = RunFile.read(Path(path), overrides)
    read = read_foundry_yaml if is_foundrys(file.values) else read_other_file
    try:
        return read(
            file,
            world_size=world_size,
            gpus_per_node=gpus_per_node,
            model_config=model_config,
            model=model,
            microbatch=microbatch,
            sequence=sequence,
            device=device,
        )
    except ComposerFSDP2Error:
        raise
    except (Exception, SystemExit) as error:  # whatever the code of a model, or of the system that reads the file, does
        raise ConfigError(f"{path}: no run can be made of it: {one_line(error)}") from error
