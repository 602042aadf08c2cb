"""What becomes of a key where its value or another key decides it."""

from __future__ import annotations

from dataclasses import replace

from composer_fsdp2.config.findings import Finding, Outcome
from composer_fsdp2.migration.dialects.torchtitan.toml_file import File

OPTION = "activation_checkpoint.selective_ac_option"


def of_shard_degree(finding: Finding, file: File) -> Finding:
    if finding.value != 1 or file.is_on("parallelism.context_parallel_degree"):
        return finding
    return replace(
        finding,
        outcome=Outcome.APPROXIMATE,
        reason="without shards TorchTitan uses DDP, and torch.autocast for mixed precision; here FSDP2 replicates "
        "full parameters and casts them",
        hint="leave it: the numbers differ by what is cast",
    )


def of_reshard(finding: Finding, file: File) -> Finding:
    if finding.value == "default" and file.is_on("parallelism.pipeline_parallel_degree"):
        return replace(finding, target="reshard_after_forward: false", reason="not freed, as there is a pipeline")
    if finding.value == "always":
        return replace(
            finding,
            outcome=Outcome.APPROXIMATE,
            reason="all units but the last norm, which is the root's here and stays gathered",
        )
    return finding


def of_mode(finding: Finding, file: File) -> Finding:
    if finding.value == "none":
        return replace(finding, outcome=Outcome.UNNEEDED, target="", reason="activations are kept")
    if finding.value == "memory_budget":
        return replace(
            finding,
            outcome=Outcome.APPROXIMATE,
            reason="the compiler chose what is recomputed; here each block is: less memory, more computation, the same "
            "numbers",
            hint="none keeps all activations instead",
        )
    if _is_partly_selective(file):
        return replace(
            finding,
            outcome=Outcome.APPROXIMATE,
            reason="all blocks are recomputed instead of some: less memory, more computation, the same numbers",
            hint="the model's activation_checkpointing_fn may choose every n-th block, if no policy names classes",
        )
    return finding


def _is_partly_selective(file: File) -> bool:
    return bool(file["activation_checkpoint.mode"] == "selective" and file[OPTION] != "1")


def of_option(finding: Finding, file: File) -> Finding:
    return replace(finding, outcome=Outcome.EXACT, reason="all blocks") if finding.value == "1" else finding


def of_compile(finding: Finding, file: File) -> Finding:
    if file["compile.components"] == ["loss"]:
        return replace(finding, reason="only the loss was compiled, which computes the same numbers uncompiled")
    return finding


def of_converters(finding: Finding, file: File) -> Finding:
    if not finding.asks or file.has_fp8_layers:
        return finding
    return replace(
        finding,
        outcome=Outcome.APPROXIMATE,
        reason="what a converter makes of the model is the model's, and no part of sharding",
        hint="convert the model where it is made",
    )


def of_loss(finding: Finding, file: File) -> Finding:
    if finding.value is True:
        return replace(finding, outcome=Outcome.EXACT, reason="logits are whole there as here")
    return finding


def of_async_mode(finding: Finding, file: File) -> Finding:
    if finding.value == "async_with_pinned_mem":
        return replace(
            finding, outcome=Outcome.APPROXIMATE, reason="written in the background, without a process of its own"
        )
    return finding
