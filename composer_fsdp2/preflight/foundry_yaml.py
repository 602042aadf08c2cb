"""An LLM Foundry YAML as a run: read and built by Foundry itself, with what cannot be built here replaced."""

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from composer_fsdp2.config.findings import Finding
from composer_fsdp2.config.text import one_line
from composer_fsdp2.errors import ComposerFSDP2Error, ConfigError
from composer_fsdp2.preflight.batch_sizes import batches_of, fitting_world_sizes
from composer_fsdp2.preflight.model_config import find_model_config, folder_with
from composer_fsdp2.preflight.planned_model import ModelOrFunction, built, of_model
from composer_fsdp2.preflight.preflight_run import OptimizerChoice, PreflightRun
from composer_fsdp2.preflight.run_file import RunFile

_PATH = "pretrained_model_name_or_path"
_BESIDE_MODEL = ("train_loader", "tokenizer", "scheduler")


def is_foundrys(values: Mapping[str, Any]) -> bool:
    """Whether Foundry trains from a file with these values."""
    model = values.get("model")
    return isinstance(model, Mapping) and "name" in model and any(key in values for key in _BESIDE_MODEL)


def read_foundry_yaml(
    file: RunFile,
    *,
    world_size: int,
    gpus_per_node: int,
    model_config: str | Path | None,
    model: ModelOrFunction | None,
    microbatch: int | None,
    sequence: int | None,
    device: str,
) -> PreflightRun:
    """The run of the file; see ``read_run``."""
    try:
        from composer_fsdp2.compat import foundry_run, foundry_substitutes
    except ImportError as error:
        raise ConfigError(
            f"{file.path}: LLM Foundry reads its own files, and it is not installed ({error}): pip install "
            "composer-fsdp2[foundry]"
        ) from error
    foundry = _read(foundry_run.read_foundry, file, world_size)
    if foundry.fsdp is None:
        is_alone = world_size == 1
        why = "on one rank Foundry trains without FSDP" if is_alone else "it has no fsdp_config"
        way_out = "; plan it for 2 ranks or more" if is_alone else ""
        raise ConfigError(f"{file.path}: {why}, so that nothing is sharded{way_out}")
    findings: list[Finding] = []
    if model is None:
        given, findings = foundry_substitutes.substituted(foundry.model)
        model = _built(foundry_run.build_foundry, foundry, given, model_config, file)
        foundry_substitutes.stand_in(model, findings)
    whole = built(model)
    config = foundry.config
    rows, num_microbatches, assumptions = batches_of(
        config.device_train_batch_size, config.device_train_microbatch_size, microbatch
    )
    options = dict(config.optimizer)
    name = options.pop("name", None)
    return of_model(
        whole,
        foundry_run.sharding_of(foundry),
        world_size=world_size,
        precision=config.precision,
        tensor_parallel=foundry_run.tensor_parallel_of(foundry, whole),
        microbatch=rows,
        num_microbatches=num_microbatches,
        batch_rows=math.ceil(config.device_train_batch_size),
        sequence=sequence or config.max_seq_len,
        optimizer=OptimizerChoice(name=str(name), options=options) if name is not None else None,
        device=device,
        gpus_per_node=gpus_per_node,
        findings=file.placed([*findings, *assumptions]),
    )


def _read(read: Any, file: RunFile, world_size: int) -> Any:
    try:
        return read(str(file.path), file.overrides, world_size=world_size)
    except Exception as error:
        batch = file.values.get("global_train_batch_size")
        if isinstance(batch, int) and batch % world_size:
            raise ConfigError(
                f"{file.path}: global_train_batch_size {batch} is not a multiple of world size {world_size}; "
                f"{fitting_world_sizes(batch, world_size)} would do"
            ) from error
        raise ConfigError(f"{file.path}: LLM Foundry refuses it: {one_line(error)}") from error


def _built(
    build: Any, foundry: Any, given: dict[str, Any], model_config: str | Path | None, file: RunFile
) -> nn.Module:
    """Foundry's model; one from the Hugging Face hub by its ``config.json``."""
    with contextlib.ExitStack() as exits:
        if _PATH in given:
            path = find_model_config(model_config, given[_PATH])
            given = given | {_PATH: str(exits.enter_context(folder_with(path)))}
        try:
            made: nn.Module = build(foundry, given)
        except ComposerFSDP2Error:
            raise
        except Exception as error:
            raise ConfigError(f"{file.path}: the model cannot be built: {one_line(error)}") from error
    return made.train()
