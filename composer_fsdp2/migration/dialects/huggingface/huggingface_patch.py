"""A patch as a Trainer's arguments, or as keys of accelerate's file."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from composer_fsdp2.migration.dialect import Section
from composer_fsdp2.migration.dialects.huggingface.held import Held
from composer_fsdp2.migration.dialects.huggingface.places import DEGREES, DEGREES_PREFIX, PREFIX, SETTINGS
from composer_fsdp2.migration.dialects.huggingface.readers import Reader
from composer_fsdp2.migration.patch import Assignment, Patch, PatchStep, Unavailable, accumulated

_STRATEGIES = {True: "full_shard", False: "shard_grad_op"}


def patch_steps(patch: Patch, section: Section, held: Held) -> Iterator[PatchStep]:
    recomputed = patch.activations
    if held.reader is Reader.ACCELERATE_DEEPSPEED or held.reader.is_axolotl:
        reason = (
            "its words for sharding are no FSDP's" if not held.reader.is_axolotl else "axolotl has words of its own"
        )
        yield Unavailable(reason=reason, until_migrated=not held.reader.is_axolotl)
        return
    if patch.reshard_after_forward is not None:
        yield from _resharding(patch.reshard_after_forward, section, held)
    if patch.degrees is not None:
        yield from _degrees(patch.degrees.shards, patch.degrees.replicas, section, held)
    if recomputed is not None and recomputed.offload:
        yield Unavailable(reason="neither a Trainer nor accelerate keeps activations in host memory")
    elif recomputed is not None and recomputed.every > 1:
        yield Unavailable(reason="all layers are recomputed, or none")
    elif recomputed is not None:
        yield from _recomputing(recomputed.every == 1, section, held)
    if patch.cpu_offload is not None:
        yield from _offloading(patch.cpu_offload, section, held)
    if patch.microbatches is not None:
        yield from accumulated(section.around, section.path, patch.microbatches)


def _setting(section: Section, held: Held, name: str, value: Any) -> Assignment:
    """Where it stands, or as its reader would have it."""
    key = held.key_of(name)
    if key is not None:
        return Assignment(path=(*section.path, *key.split(".", 1)), value=value)
    prefix = "" if held.reader.is_trainer else PREFIX
    return Assignment(path=(*section.path, SETTINGS, prefix + name), value=value)


def _resharding(wanted: bool | int, section: Section, held: Held) -> Iterator[PatchStep]:
    if not isinstance(wanted, bool):
        yield Unavailable(reason="accelerate and a Trainer take true or false for reshard_after_forward, no group size")
    elif held.reader.is_fsdp2:
        yield _setting(section, held, "reshard_after_forward", wanted)
    elif held.reader.is_trainer and "fsdp" in section.given:
        words = [*({*_STRATEGIES.values()}.symmetric_difference({_STRATEGIES[wanted]}))]
        yield _words(section, gone=words, come=_STRATEGIES[wanted])
    else:
        name = held.settings["sharding_strategy"]
        is_hybrid = name is not None and name.is_hybrid
        strategy = ("HYBRID_SHARD" if wanted else "HYBRID_SHARD_ZERO2") if is_hybrid else _STRATEGIES[wanted].upper()
        yield _setting(section, held, "sharding_strategy", strategy)


def _words(section: Section, gone: Sequence[str], come: str | None) -> Assignment:
    """``fsdp`` with a word in the place of others, as text or list as before."""
    given = section.given.get("fsdp")
    words = given.split() if isinstance(given, str) else [str(each) for each in given or ()]
    new = [come if word in gone and come else word for word in words if word not in gone or come]
    if come and come not in new:
        new.insert(0, come)
    return Assignment(path=(*section.path, "fsdp"), value=new if isinstance(given, list) else " ".join(new))


def _degrees(shards: int, replicas: int, section: Section, held: Held) -> Iterator[PatchStep]:
    if held.reader.is_trainer:
        yield Unavailable(reason="a Trainer's arguments have no degrees: it shards over all ranks")
        return
    if shards == 1:
        yield Unavailable(reason="accelerate's FSDP2 has no run without shards")
        return
    if not isinstance(section.given.get(DEGREES), Mapping) and held.reader is Reader.ACCELERATE_FSDP1:
        yield Unavailable(reason="accelerate's FSDP1 has no degrees", until_migrated=True)
        return
    for name, size in (("dp_replicate_size", replicas), ("dp_shard_size", shards)):
        yield Assignment(path=(*section.path, DEGREES, DEGREES_PREFIX + name), value=size)


def _recomputing(wanted: bool, section: Section, held: Held) -> Iterator[PatchStep]:
    """By the key that decides it now, and else by FSDP's own, which gathers once."""
    if not wanted and held.key_of("gradient_checkpointing") is not None:
        yield _setting(section, held, "gradient_checkpointing", False)
    if wanted and held.settings["gradient_checkpointing"]:
        return
    if wanted or held.key_of("activation_checkpointing") is not None:
        yield _setting(section, held, "activation_checkpointing", wanted)


def _offloading(wanted: bool, section: Section, held: Held) -> Iterator[PatchStep]:
    if held.reader.is_trainer and "fsdp" in section.given and not held.reader.is_fsdp2:
        given = section.given["fsdp"]
        words = given.split() if isinstance(given, str) else [*given]
        new = [*(word for word in words if word != "offload"), *(["offload"] if wanted else [])]
        yield Assignment(path=(*section.path, "fsdp"), value=new if isinstance(given, list) else " ".join(new))
    else:
        yield _setting(section, held, "offload_params", wanted)
