"""A patch as TorchTitan's keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from composer_fsdp2.migration.dialects.torchtitan.toml_file import File
from composer_fsdp2.migration.dialects.torchtitan.torchtitan_lacks import LACKS
from composer_fsdp2.migration.patch import Assignment, Patch, PatchStep, Unavailable


def patch_steps(patch: Patch, file: File) -> Iterator[PatchStep]:
    """Of a key that has an older name, that one; ``rewrite`` renews it."""
    reshard, recomputed, batch = patch.reshard_after_forward, patch.activations, patch.microbatches
    if isinstance(reshard, bool):
        yield _asked(file, "parallelism.fsdp_reshard_after_forward", "default" if reshard else "never")
    elif reshard is not None:
        yield _no_word("reshard_after_forward", reshard)
    if patch.degrees is not None:
        context = file["parallelism.context_parallel_degree"]
        yield _asked(file, "parallelism.data_parallel_replicate_degree", patch.degrees.replicas)
        if file["parallelism.data_parallel_shard_degree"] != -1:
            yield _asked(file, "parallelism.data_parallel_shard_degree", patch.degrees.shards // context)
    if recomputed is not None and recomputed.offload:
        yield _no_word("activation offloading", True)
    elif recomputed is not None:
        mode = {0: "none", 1: "full"}.get(recomputed.every, "selective")
        yield _asked(file, "activation_checkpoint.mode", mode)
        if recomputed.every > 1:
            yield _asked(file, "activation_checkpoint.selective_ac_option", str(recomputed.every))
    if patch.cpu_offload is not None:
        yield _asked(file, "training.enable_cpu_offload", patch.cpu_offload)
    if batch is not None:
        # Without the second TorchTitan would take a batch of so many rows on each rank.
        yield Assignment(path=("training", "local_batch_size"), value=batch.rows, instead=("batch_size",))
        yield Assignment(path=("training", "global_batch_size"), value=batch.global_rows)


def _asked(file: File, name: str, value: Any) -> Assignment:
    names = (name, *file.known[name].aliases)
    written = next((each for each in names if each in file.given), name)
    return Assignment(path=tuple(written.split(".")), value=value)


def _no_word(question: str, value: object) -> Unavailable:
    lack = next(each for each in LACKS if each.asked == question)
    return Unavailable(reason=lack.reason.replace("{value}", str(value)))
