"""A patch as ROLL's keys."""

from collections.abc import Iterator

from composer_fsdp2.migration.dialect import Section
from composer_fsdp2.migration.dialects.roll.roll_lacks import LACKS
from composer_fsdp2.migration.patch import Assignment, Patch, PatchStep, Unavailable, accumulated
from composer_fsdp2.migration.paths import Path

_RECOMPUTES = "disable_gradient_checkpointing"


def patch_steps(patch: Patch, section: Section) -> Iterator[PatchStep]:
    path, recomputed = section.path, patch.activations
    worker: Path = path[: path.index("strategy_args")] if "strategy_args" in path else path[:-1]
    if path[-1:] == ("strategy_args",):  # there is no strategy_config
        path = (*path, "strategy_config")
    if patch.reshard_after_forward is not None:
        yield Assignment(path=(*path, "reshard_after_forward"), value=patch.reshard_after_forward)
    if patch.degrees is not None:
        is_alone = patch.degrees.shards == 1
        reason = "fsdp_size 1 is all ranks to ROLL, so that it cannot keep full parameters on each rank"
        yield (
            Unavailable(reason=reason)
            if is_alone
            else Assignment(path=(*path, "fsdp_size"), value=patch.degrees.shards)
        )
    if patch.cpu_offload is not None:
        yield Assignment(path=(*path, "offload_policy"), value=patch.cpu_offload)
    if recomputed is not None and recomputed.offload:
        yield Unavailable(reason=next(each.reason for each in LACKS if each.asked == "activation offloading"))
    elif recomputed is not None and recomputed.every > 1:
        yield Unavailable(reason="ROLL recomputes all layers, or none")
    elif recomputed is not None:
        yield Assignment(path=(*worker, "model_args", _RECOMPUTES), value=recomputed.every == 0)
    if patch.microbatches is not None:
        yield from accumulated(section.around, worker, patch.microbatches)
