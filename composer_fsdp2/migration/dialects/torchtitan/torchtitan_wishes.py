"""A wish in TorchTitan's words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from composer_fsdp2.migration.dialects.torchtitan.toml_file import File
from composer_fsdp2.migration.dialects.torchtitan.torchtitan_lacks import LACKS
from composer_fsdp2.migration.wish import Answer, Asked, NoWord, Wish


def answers_to(wish: Wish, file: File) -> Iterator[Answer]:
    """Of a key that has an older name, that one; ``rewrite`` renews it."""
    reshard, recomputed, batch = wish.reshard_after_forward, wish.activations, wish.microbatches
    if isinstance(reshard, bool):
        yield _asked(file, "parallelism.fsdp_reshard_after_forward", "default" if reshard else "never")
    elif reshard is not None:
        yield _no_word("reshard_after_forward", reshard)
    if wish.degrees is not None:
        context = file["parallelism.context_parallel_degree"]
        yield _asked(file, "parallelism.data_parallel_replicate_degree", wish.degrees.replicas)
        if file["parallelism.data_parallel_shard_degree"] != -1:
            yield _asked(file, "parallelism.data_parallel_shard_degree", wish.degrees.shards // context)
    if recomputed is not None and recomputed.offload:
        yield _no_word("activation offloading", True)
    elif recomputed is not None:
        mode = {0: "none", 1: "full"}.get(recomputed.every, "selective")
        yield _asked(file, "activation_checkpoint.mode", mode)
        if recomputed.every > 1:
            yield _asked(file, "activation_checkpoint.selective_ac_option", str(recomputed.every))
    if wish.cpu_offload is not None:
        yield _asked(file, "training.enable_cpu_offload", wish.cpu_offload)
    if batch is not None:
        # Without the second TorchTitan would take a batch of so many rows on each rank.
        yield Asked(path=("training", "local_batch_size"), value=batch.rows, instead=("batch_size",))
        yield Asked(path=("training", "global_batch_size"), value=batch.global_rows)


def _asked(file: File, name: str, value: Any) -> Asked:
    names = (name, *file.known[name].aliases)
    written = next((each for each in names if each in file.given), name)
    return Asked(path=tuple(written.split(".")), value=value)


def _no_word(question: str, value: object) -> NoWord:
    lack = next(each for each in LACKS if each.asked == question)
    return NoWord(reason=lack.reason.replace("{value}", str(value)))
