"""A patch as keys of an ``fsdp_config``, and of the file around it."""

from collections.abc import Iterator, Mapping

from composer_fsdp2.fsdp1.parsing import ShardingStrategy, parse_strategy
from composer_fsdp2.migration.dialect import Section
from composer_fsdp2.migration.patch import (
    Assignment,
    Patch,
    PatchStep,
    Recomputation,
    Unavailable,
    accumulated,
    holder_of,
)

_STRATEGY, _RESHARD = "sharding_strategy", "reshard_after_forward"
_SHARDS, _REPLICAS = "data_parallel_shard_degree", "data_parallel_replicate_degree"
_TARGET = "activation_checkpointing_target"
_ROWS = "device_train_microbatch_size"


def patch_steps(patch: Patch, section: Section) -> Iterator[PatchStep]:
    path, given = section.path, section.given
    keeps_all = parse_strategy(given.get(_STRATEGY) or "FULL_SHARD") is ShardingStrategy.NO_SHARD
    if keeps_all and patch.degrees is not None:
        reshard = False if patch.reshard_after_forward is None else patch.reshard_after_forward
        yield Assignment(path=(*path, _RESHARD), value=reshard, instead=(_STRATEGY,))
    elif patch.reshard_after_forward is not None:
        yield (
            Unavailable(reason="NO_SHARD frees nothing")
            if keeps_all
            else _resharding(patch.reshard_after_forward, section)
        )
    if patch.degrees is not None:
        yield Assignment(path=(*path, _SHARDS), value=patch.degrees.shards)
        replicas = patch.degrees.replicas
        yield Assignment(path=(*path, _REPLICAS), value=replicas if replicas > 1 or _REPLICAS in given else None)
    if patch.activations is not None:
        yield from _activations(patch.activations, section)
    if patch.cpu_offload is not None:
        yield Assignment(path=(*path, "cpu_offload"), value=patch.cpu_offload)
    if patch.microbatches is not None:
        place = next(
            (found for key in (_ROWS, "global_train_batch_size") if (found := _around(section, key)) is not None), None
        )
        if place is None:
            yield from accumulated(section.around, path[:-1], patch.microbatches)
        else:
            yield Assignment(path=(*place, _ROWS), value=patch.microbatches.rows)


def _around(section: Section, key: str) -> tuple[str | int, ...] | None:
    return holder_of(section.around, section.path[:-1], key)


def _resharding(wanted: bool | int, section: Section) -> PatchStep:
    """In FSDP1's word where the file has it, and it has one."""
    given = section.given
    if _RESHARD in given or _STRATEGY not in given:
        return Assignment(path=(*section.path, _RESHARD), value=wanted)
    strategy = parse_strategy(given[_STRATEGY])
    words = {
        True: ShardingStrategy.HYBRID_SHARD if strategy.is_hybrid else ShardingStrategy.FULL_SHARD,
        False: ShardingStrategy.HYBRID_SHARD_ZERO2 if strategy.is_hybrid else ShardingStrategy.SHARD_GRAD_OP,
    }
    if isinstance(wanted, bool):
        return Assignment(path=(*section.path, _STRATEGY), value=words[wanted].value)
    return Assignment(path=(*section.path, _RESHARD), value=wanted, instead=(_STRATEGY,))


def _activations(wanted: Recomputation, section: Section) -> Iterator[PatchStep]:
    for key, value in (
        ("activation_checkpointing", wanted.recompute and wanted.every > 0),
        ("activation_cpu_offload", wanted.offload and wanted.every > 0),
    ):
        yield Assignment(path=(*section.path, key), value=True if value else False if key in section.given else None)
    if wanted.every == 0:  # it is refused where there is nothing to choose
        yield Assignment(path=(*section.path, "activation_checkpointing_policy"), value=None)
    model = section.around.get("model")
    is_mpt = isinstance(model, Mapping) and model.get("name") == "mpt_causal_lm"
    if is_mpt and wanted.every:
        blocks = {"mptblock": list(wanted.blocks)} if wanted.every > 1 else None
        yield Assignment(path=("model", _TARGET), value=blocks)
    elif wanted.every > 1:
        yield Unavailable(
            reason="which blocks are recomputed stands in the model's code: all of them, or none, by a file"
        )
