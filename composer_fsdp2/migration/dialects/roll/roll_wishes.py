"""A wish in ROLL's words."""

from collections.abc import Iterator

from composer_fsdp2.migration.dialect import Section
from composer_fsdp2.migration.dialects.roll.roll_lacks import LACKS
from composer_fsdp2.migration.paths import Path
from composer_fsdp2.migration.wish import Answer, Asked, NoWord, Wish, accumulated

_RECOMPUTES = "disable_gradient_checkpointing"


def answers_to(wish: Wish, section: Section) -> Iterator[Answer]:
    path, recomputed = section.path, wish.activations
    worker: Path = path[: path.index("strategy_args")] if "strategy_args" in path else path[:-1]
    if path[-1:] == ("strategy_args",):  # there is no strategy_config
        path = (*path, "strategy_config")
    if wish.reshard_after_forward is not None:
        yield Asked(path=(*path, "reshard_after_forward"), value=wish.reshard_after_forward)
    if wish.degrees is not None:
        is_alone = wish.degrees.shards == 1
        reason = "fsdp_size 1 is all ranks to ROLL, so that it cannot keep full parameters on each rank"
        yield NoWord(reason=reason) if is_alone else Asked(path=(*path, "fsdp_size"), value=wish.degrees.shards)
    if wish.cpu_offload is not None:
        yield Asked(path=(*path, "offload_policy"), value=wish.cpu_offload)
    if recomputed is not None and recomputed.offload:
        yield NoWord(reason=next(each.reason for each in LACKS if each.asked == "activation offloading"))
    elif recomputed is not None and recomputed.every > 1:
        yield NoWord(reason="ROLL recomputes all layers, or none")
    elif recomputed is not None:
        yield Asked(path=(*worker, "model_args", _RECOMPUTES), value=recomputed.every == 0)
    if wish.microbatches is not None:
        yield from accumulated(section.around, worker, wish.microbatches)
