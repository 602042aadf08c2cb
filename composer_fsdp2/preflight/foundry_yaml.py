"""Read an LLM Foundry YAML and build its model with LLM Foundry, replacing parts that are unavailable here."""

import contextlib
import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from composer_fsdp2.config.findings import Finding
from composer_fsdp2.config.text import one_line
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.preflight.batch_keys import Batches
from composer_fsdp2.preflight.model_config import find_model_config, folder_with
from composer_fsdp2.preflight.planned_model import Training, built
from composer_fsdp2.preflight.preflight_run import OptimizerChoice
from composer_fsdp2.preflight.run_file import Request, RunFile, as_config_error, assumed

_PATH = "pretrained_model_name_or_path"
_BESIDE_MODEL = ("train_loader", "tokenizer", "scheduler")
_MICROBATCH = "device_train_microbatch_size"


def is_foundry_yaml(values: Mapping[str, Any]) -> bool:
    """Whether LLM Foundry can train from a file with these values."""
    model = values.get("model")
    return isinstance(model, Mapping) and "name" in model and any(key in values for key in _BESIDE_MODEL)


def read_foundry_yaml(file: RunFile, request: Request) -> tuple[nn.Module, Training]:
    """The file's model and settings; see ``read_run``."""
    try:
        from composer_fsdp2.compat import foundry_run, foundry_substitutes
    except ImportError as error:
        raise ConfigError(
            f"{file.path}: LLM Foundry reads its own files, and it is not installed ({error}): pip install "
            "'composer-fsdp2[foundry]'"
        ) from error
    foundry = _read(foundry_run.read_foundry, file, request.world_size)
    if foundry.fsdp is None:
        is_alone = request.world_size == 1
        why = "on one rank Foundry trains without FSDP" if is_alone else "it has no fsdp_config"
        advice = "; plan it for 2 ranks or more" if is_alone else ""
        raise ConfigError(f"{file.path}: {why}, so nothing is sharded{advice}")
    findings: list[Finding] = []
    model = request.model
    if model is None:
        given, findings = foundry_substitutes.substituted(foundry.model)
        model = _built(foundry_run.build_foundry, foundry, given, file, request)
        foundry_substitutes.apply_substitutes(model, findings)
    model, config = built(model), foundry.config
    batches = _batches(config, request)
    return model, Training(
        fsdp_config=foundry_run.fsdp_config_of(foundry),
        precision=config.precision,
        tensor_parallel=foundry_run.tensor_parallel_of(foundry, model),
        batches=batches,
        batch_rows=math.ceil(config.device_train_batch_size),
        findings=file.placed([*findings, *batches.findings]),
    )


def _read(read: Any, file: RunFile, world_size: int) -> Any:
    try:
        return read(str(file.path), file.overrides, world_size=world_size)
    except Exception as error:
        batch = file.values.get("global_train_batch_size")
        if isinstance(batch, int) and batch > 0 and batch % world_size:
            divisors = [number for number in range(1, min(batch, 2 * world_size) + 1) if batch % number == 0]
            below = [number for number in divisors if number < world_size]
            near = [below[-1], *divisors[len(below) :][:1]]
            raise ConfigError(
                f"{file.path}: global_train_batch_size {batch} is not a multiple of world size {world_size}; "
                f"{' or '.join(map(str, near))} would do"
            ) from error
        raise ConfigError(f"{file.path}: LLM Foundry refuses it: {one_line(error)}") from error


def _built(build: Any, foundry: Any, given: dict[str, Any], file: RunFile, request: Request) -> nn.Module:
    """Foundry's model; a Hugging Face model is built from its ``config.json``."""
    with contextlib.ExitStack() as stack:
        if _PATH in given:
            path = find_model_config(request.model_config, given[_PATH])
            given = given | {_PATH: str(stack.enter_context(folder_with(path)))}
        stack.enter_context(as_config_error(f"{file.path}: the model cannot be built"))
        model: nn.Module = build(foundry, given)
    return model.train()


def _batches(config: Any, request: Request) -> Batches:
    """Return a rank's microbatches, computed as in Composer's Trainer.

    The command line's microbatch overrides the file's.
    """
    findings: tuple[Finding, ...] = ()
    rows = config.device_train_microbatch_size if request.microbatch is None else request.microbatch
    if rows == "auto":
        why = "which microbatch fits is tried out on the GPUs; 1 row is planned"
        rows, findings = 1, (assumed(_MICROBATCH, rows, why, "give one with --microbatch"),)
    if not isinstance(rows, int | float) or rows <= 0:
        raise ConfigError(f"{_MICROBATCH} is {rows!r}; give a number of rows above 0, or auto")
    rows = max(int(min(rows, config.device_train_batch_size)), 1)  # ranks that share a row each compute all of it
    options = dict(config.optimizer)
    name = str(options.pop("name", "none"))
    return Batches(
        microbatch=rows,
        num_microbatches=math.ceil(config.device_train_batch_size / rows),
        sequence=request.sequence or config.max_seq_len,
        optimizer=OptimizerChoice(name=name, options=options),
        findings=findings,
    )
