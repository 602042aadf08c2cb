"""Plan a model on the meta device with its file's settings."""

import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from composer_fsdp2._torch.replaced import replaced
from composer_fsdp2.config.findings import Finding
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.estimate.trace import Loss
from composer_fsdp2.preflight.batch_keys import Batches
from composer_fsdp2.preflight.losses import composer_loss, labels_loss
from composer_fsdp2.preflight.preflight_run import PreflightRun
from composer_fsdp2.preflight.run_file import ModelOrFunction, Request, as_config_error
from composer_fsdp2.prepare import plan_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The settings of a file, except for the model.

    Args:
        fsdp_config, precision, tensor_parallel: As for ``prepare_fully_shard``.
        batches: The microbatches of a rank. Their findings are also in ``findings``.
        batch_rows: Rows of a batch on one rank; None: all microbatches have the same number of rows.
        keeps_outputs: For a model that is not a ComposerModel: whether outputs are referenced during backward, as by
            Composer's Trainer.
        has_fp8_layers: Whether layers compute in fp8, independent of ``precision``.
        findings: Substitutes and assumptions, with file and line.
    """

    fsdp_config: Any
    precision: Any
    tensor_parallel: Any
    batches: Batches
    batch_rows: int | None = None
    keeps_outputs: bool = False
    has_fp8_layers: bool = False
    findings: tuple[Finding, ...] = ()


class ModelWrapper(nn.Module):
    """Wraps a module that is not a ComposerModel.

    Its only child, ``model``, is the root unit, as in Composer's ``HuggingFaceModel``.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def built(model: ModelOrFunction) -> nn.Module:
    """Return the model in training mode, wrapped in ``ModelWrapper`` unless it is a ComposerModel.

    A function is called with ``meta`` as the default device.

    Raises:
        ConfigError: the function raised, or did not return a module.
    """
    if not isinstance(model, nn.Module):
        with as_config_error("the model cannot be built on the meta device"), torch.device("meta"):
            made = model()
        if not isinstance(made, nn.Module):
            raise ConfigError(f"the model's function returns a {type(made).__name__}, and no torch.nn.Module")
        model = made
    is_composers = callable(getattr(model, "loss", None)) and callable(getattr(model, "eval_forward", None))
    return model.train() if is_composers else ModelWrapper(model).train()


def planned_run(model: nn.Module, training: Training, request: Request) -> PreflightRun:
    """Plan a model that ``built`` returned, and return the run.

    Raises:
        ConfigError, PlanError, UnsupportedError: as raised by ``prepare_fully_shard`` on the ranks. Blocking findings
            are not raised but returned.
    """
    batches = training.batches
    _refuse_sizes(batches)
    # A process_group by nodes reads this variable, which launchers set.
    with replaced(os, "environ", {**os.environ, "LOCAL_WORLD_SIZE": str(request.gpus_per_node)}):
        translation, plan = plan_run(
            model,
            training.fsdp_config,
            world_size=request.world_size,
            precision=training.precision,
            device=request.device,
            tensor_parallel=training.tensor_parallel,
        )
    rows = batches.microbatch * batches.num_microbatches
    return PreflightRun(
        model=model,
        translation=translation,
        plan=plan,
        world_size=request.world_size,
        gpus_per_node=request.gpus_per_node,
        loss=_loss(model, keeps_outputs=training.keeps_outputs),
        precision=translation.precision,
        microbatch_size=batches.microbatch,
        num_microbatches=batches.num_microbatches,
        batch_rows=rows if training.batch_rows is None else training.batch_rows,
        sequence_length=batches.sequence,
        optimizer=batches.optimizer,
        findings=training.findings,
        has_fp8_layers=training.has_fp8_layers,
    )


def _loss(model: nn.Module, *, keeps_outputs: bool) -> Loss:
    """Return the loss function of Composer's Trainer for a ComposerModel, else that of a Hugging Face Trainer."""
    if isinstance(model, ModelWrapper):
        return partial(labels_loss, keeps_outputs=keeps_outputs)
    # An MPT that masks attention between packed documents reads another key of its batches.
    uses_ids = any(getattr(module, "attn_uses_sequence_id", False) for module in model.modules())
    return partial(composer_loss, keys=("sequence_id",) if uses_ids else ())


# Per rank; each microbatch is replayed, and no real batch has more.
_MOST_MICROBATCHES = 10_000


def _refuse_sizes(batches: Batches) -> None:
    if batches.sequence < 1:
        raise ConfigError(
            f"a microbatch of {batches.sequence} tokens in a row cannot be planned; give a number from 1 on"
        )
    if batches.num_microbatches > _MOST_MICROBATCHES:
        raise ConfigError(
            f"a batch of {batches.num_microbatches} microbatches on each rank cannot be planned; give a batch of 1 to "
            f"{_MOST_MICROBATCHES} of them"
        )
