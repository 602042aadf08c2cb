"""The value that ``plan`` reads from a file: a model on the meta device, its plan, and the loss of one microbatch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from composer_fsdp2.config.findings import Finding
from composer_fsdp2.config.parallel import BroadcastBatch
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.estimate.events import MicrobatchTrace
from composer_fsdp2.estimate.optimizers import OptimizerState, optimizer_state
from composer_fsdp2.estimate.replay import estimate_step
from composer_fsdp2.estimate.step import StepEstimate
from composer_fsdp2.estimate.trace import Loss, trace_microbatch
from composer_fsdp2.fsdp1.translate import Translation
from composer_fsdp2.preflight.run_file import assumed
from composer_fsdp2.sharding.plan import ShardingPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerChoice:
    """An optimizer: its name in Composer, Foundry or torch (``decoupled_adamw``, ``AdamW``), and its options."""

    name: str
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightRun:
    """A training run as configured by a file, for ``world_size`` ranks.

    Args:
        model: The model on the meta device. Its direct children are the root units, as in Composer.
        plan: The sharding plan for ``world_size`` ranks.
        loss: A function that computes the loss of one microbatch.
        microbatch_size: Rows that one rank reads per microbatch.
        num_microbatches: Microbatches of a batch on one rank.
        batch_rows: Rows of a batch on one rank. The last microbatch may have fewer rows than the others.
        sequence_length: Tokens per row.
        gpus_per_node: The number of consecutive ranks on each node.
        has_fp8_layers: Whether layers compute in fp8, independent of ``precision``.
        findings: Substitutes and assumptions, with file and line.
    """

    model: nn.Module
    translation: Translation
    plan: ShardingPlan
    world_size: int
    loss: Loss
    precision: str
    microbatch_size: int
    num_microbatches: int
    batch_rows: int
    sequence_length: int
    optimizer: OptimizerChoice
    findings: tuple[Finding, ...]
    has_fp8_layers: bool = False
    gpus_per_node: int = 8

    @property
    def computed_rows(self) -> int:
        """Rows that a rank computes per microbatch, including those gathered from other ranks."""
        config = self.plan.config
        is_gathered = config.effective_broadcast_batch is BroadcastBatch.GATHER
        return self.microbatch_size * (config.data_block_size if is_gathered else 1)

    def trace(self) -> MicrobatchTrace:
        """Trace one microbatch on fake tensors. Raises any error of the model's code on tensors without data."""
        return trace_microbatch(
            self.model,
            self.plan,
            self.loss,
            rows=self.computed_rows,
            tokens=self.sequence_length,
            precision=self.precision,
        )

    def estimate(self, trace: MicrobatchTrace | None, *, num_microbatches: int | None = None) -> StepEstimate:
        """Estimate one step with the state of ``counted_optimizer``.

        Args:
            num_microbatches: Overrides the run's number.
        """
        return estimate_step(
            self.plan,
            trace,
            world_size=self.world_size,
            optimizer=counted_optimizer(self.optimizer)[0],
            num_microbatches=num_microbatches or self.num_microbatches,
            gpus_per_node=self.gpus_per_node,
        )


def counted_optimizer(choice: OptimizerChoice) -> tuple[OptimizerState, tuple[Finding, ...]]:
    """Return the state sizes of the optimizer. An unknown optimizer is counted as AdamW, with a finding."""
    try:
        return optimizer_state(choice.name, choice.options), ()
    except ConfigError as error:
        finding = assumed("optimizer.name", choice.name, f"{error}; AdamW's state is counted")
        return optimizer_state("AdamW"), (replace(finding, target="AdamW"),)
