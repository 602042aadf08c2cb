"""A wish in the words of an ``fsdp_config``, and of what stands around it."""

from collections.abc import Iterator, Mapping

from composer_fsdp2.fsdp1.parsing import ShardingStrategy, parse_strategy
from composer_fsdp2.migration.dialect import Section
from composer_fsdp2.migration.wish import Answer, Asked, NoWord, Recomputation, Wish, accumulated, holder_of

_STRATEGY, _RESHARD = "sharding_strategy", "reshard_after_forward"
_SHARDS, _REPLICAS = "data_parallel_shard_degree", "data_parallel_replicate_degree"
_TARGET = "activation_checkpointing_target"
_ROWS = "device_train_microbatch_size"


def answers_to(wish: Wish, section: Section) -> Iterator[Answer]:
    path, given = section.path, section.given
    keeps_all = parse_strategy(given.get(_STRATEGY) or "FULL_SHARD") is ShardingStrategy.NO_SHARD
    if keeps_all and wish.degrees is not None:
        reshard = False if wish.reshard_after_forward is None else wish.reshard_after_forward
        yield Asked(path=(*path, _RESHARD), value=reshard, instead=(_STRATEGY,))
    elif wish.reshard_after_forward is not None:
        yield NoWord(reason="NO_SHARD frees nothing") if keeps_all else _resharding(wish.reshard_after_forward, section)
    if wish.degrees is not None:
        yield Asked(path=(*path, _SHARDS), value=wish.degrees.shards)
        replicas = wish.degrees.replicas
        yield Asked(path=(*path, _REPLICAS), value=replicas if replicas > 1 or _REPLICAS in given else None)
    if wish.activations is not None:
        yield from _activations(wish.activations, section)
    if wish.cpu_offload is not None:
        yield Asked(path=(*path, "cpu_offload"), value=wish.cpu_offload)
    if wish.microbatches is not None:
        place = next(
            (found for key in (_ROWS, "global_train_batch_size") if (found := _around(section, key)) is not None), None
        )
        if place is None:
            yield from accumulated(section.around, path[:-1], wish.microbatches)
        else:
            yield Asked(path=(*place, _ROWS), value=wish.microbatches.rows)


def _around(section: Section, key: str) -> tuple[str | int, ...] | None:
    return holder_of(section.around, section.path[:-1], key)


def _resharding(wished: bool | int, section: Section) -> Answer:
    """In FSDP1's word where the file has it, and it has one."""
    given = section.given
    if _RESHARD in given or _STRATEGY not in given:
        return Asked(path=(*section.path, _RESHARD), value=wished)
    strategy = parse_strategy(given[_STRATEGY])
    words = {
        True: ShardingStrategy.HYBRID_SHARD if strategy.is_hybrid else ShardingStrategy.FULL_SHARD,
        False: ShardingStrategy.HYBRID_SHARD_ZERO2 if strategy.is_hybrid else ShardingStrategy.SHARD_GRAD_OP,
    }
    if isinstance(wished, bool):
        return Asked(path=(*section.path, _STRATEGY), value=words[wished].value)
    return Asked(path=(*section.path, _RESHARD), value=wished, instead=(_STRATEGY,))


def _activations(wished: Recomputation, section: Section) -> Iterator[Answer]:
    for key, value in (
        ("activation_checkpointing", wished.recompute and wished.every > 0),
        ("activation_cpu_offload", wished.offload and wished.every > 0),
    ):
        yield Asked(path=(*section.path, key), value=True if value else False if key in section.given else None)
    if wished.every == 0:  # it is refused where there is nothing to choose
        yield Asked(path=(*section.path, "activation_checkpointing_policy"), value=None)
    model = section.around.get("model")
    is_mpt = isinstance(model, Mapping) and model.get("name") == "mpt_causal_lm"
    if is_mpt and wished.every:
        blocks = {"mptblock": list(wished.blocks)} if wished.every > 1 else None
        yield Asked(path=("model", _TARGET), value=blocks)
    elif wished.every > 1:
        yield NoWord(reason="which blocks are recomputed stands in the model's code: all of them, or none, by a file")
