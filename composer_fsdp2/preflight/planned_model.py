"""A model on the meta device and what its configuration asks for: the run, planned."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from composer_fsdp2.config.findings import Finding
from composer_fsdp2.config.text import one_line
from composer_fsdp2.errors import ComposerFSDP2Error, ConfigError
from composer_fsdp2.preflight.losses import ComposerLoss, LabelsLoss
from composer_fsdp2.preflight.preflight_run import Loss, OptimizerChoice, PreflightRun
from composer_fsdp2.prepare import plan_run

ModelOrFunction = nn.Module | Callable[[], Any]


class Holder(nn.Module):
    """A model that is no ComposerModel, below one: its only child is the root, under the name that Composer's
    ``HuggingFaceModel`` gives it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def built(model: ModelOrFunction) -> nn.Module:
    """A model as Composer shards it; a function is called with ``meta`` as the default device.

    Raises:
        ConfigError: the function fails, or returns no module.
    """
    if not isinstance(model, nn.Module):
        try:
            with torch.device("meta"):
                made = model()
        except ComposerFSDP2Error:
            raise
        except Exception as error:
            raise ConfigError(f"the model cannot be built on the meta device: {one_line(error)}") from error
        if not isinstance(made, nn.Module):
            raise ConfigError(f"the model's function returns a {type(made).__name__}, and no torch.nn.Module")
        model = made
    if isinstance(model, Holder):
        return model
    is_composers = callable(getattr(model, "loss", None)) and callable(getattr(model, "eval_forward", None))
    return model.train() if is_composers else Holder(model).train()


def loss_of(model: nn.Module, *, keeps_outputs: bool = False) -> Loss:
    """How a microbatch of this model is computed: as Composer does, or as a Hugging Face Trainer.

    Args:
        keeps_outputs: Whether a model that is not Composer's is trained by Composer's Trainer.
    """
    if isinstance(model, Holder):
        return LabelsLoss(keeps_outputs=keeps_outputs, num_experts=num_experts(model))
    return ComposerLoss(keys=sequence_keys(model), num_experts=num_experts(model))


# What configurations of mixtures of experts call them, of transformers and of LLM Foundry.
_EXPERTS = ("num_experts", "num_local_experts", "moe_num_experts", "n_routed_experts")


def num_experts(model: nn.Module) -> int:
    """How many experts a layer of the model has; 1 where it has none."""
    for module in model.modules():
        config = getattr(module, "config", None)
        parts = (config, getattr(config, "ffn_config", None))
        for part, name in ((part, name) for part in parts if part is not None for name in _EXPERTS):
            number = part.get(name) if isinstance(part, Mapping) else getattr(part, name, None)
            if isinstance(number, int) and number > 0:
                return number
    return 1


def sequence_keys(model: nn.Module) -> tuple[str, ...]:
    """What an MPT that keeps joined documents apart needs in its batches."""
    uses = any(getattr(module, "attn_uses_sequence_id", False) for module in model.modules())
    return ("sequence_id",) if uses else ()


def of_model(
    model: ModelOrFunction,
    fsdp_config: Any,
    *,
    world_size: int,
    precision: Any = "amp_bf16",
    tensor_parallel: Any = None,
    loss: Loss | None = None,
    microbatch: int = 1,
    num_microbatches: int = 1,
    batch_rows: int | None = None,
    sequence: int = 2048,
    optimizer: OptimizerChoice | None = None,
    device: str = "cuda",
    gpus_per_node: int = 8,
    findings: Iterable[Finding] = (),
) -> PreflightRun:
    """A run of a model that Python has, or a function that builds it.

    Args:
        model: A ComposerModel, whose children are the roots, or any other module, which is one root itself.
        fsdp_config: As ``prepare_fully_shard`` takes it.
        loss: Of the model, the rows of a microbatch and the tokens of a row; None: as Composer's Trainer has it where
            ``model`` is a ComposerModel, else ``model(input_ids=..., labels=...)["loss"]``.
        batch_rows: Of a rank; None: all microbatches have the same number.
    Raises:
        ConfigError, PlanError, UnsupportedError: as on the ranks, but for what blocks: that is in the findings.
    """
    whole = built(model)
    _refuse_sizes(microbatch, num_microbatches, sequence)
    with _on_nodes_of(gpus_per_node):
        translation, plan = plan_run(
            whole,
            fsdp_config,
            world_size=world_size,
            precision=precision,
            device=device,
            tensor_parallel=tensor_parallel,
        )
    return PreflightRun(
        model=whole,
        translation=translation,
        plan=plan,
        world_size=world_size,
        loss=loss or loss_of(whole),
        precision=translation.precision,
        microbatch_size=microbatch,
        num_microbatches=num_microbatches,
        batch_rows=microbatch * num_microbatches if batch_rows is None else batch_rows,
        sequence_length=sequence,
        optimizer=optimizer,
        findings=tuple(findings),
    )


# Of one rank's batch; each is replayed, and no batch in use has as many.
MOST_MICROBATCHES = 10_000


def _refuse_sizes(microbatch: int, num_microbatches: int, sequence: int) -> None:
    for what, number in (("rows", microbatch), ("tokens in a row", sequence)):
        if number < 1:
            raise ConfigError(f"a microbatch of {number} {what} cannot be planned; give a number from 1 on")
    if not 1 <= num_microbatches <= MOST_MICROBATCHES:
        raise ConfigError(
            f"a batch of {num_microbatches} microbatches on each rank cannot be planned; give a batch of 1 to "
            f"{MOST_MICROBATCHES} of them"
        )


@contextlib.contextmanager
def _on_nodes_of(num_ranks: int) -> Iterator[None]:
    """For a process_group by nodes, which reads what launchers set."""
    name, before = "LOCAL_WORLD_SIZE", os.environ.get("LOCAL_WORLD_SIZE")
    os.environ[name] = str(num_ranks)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
