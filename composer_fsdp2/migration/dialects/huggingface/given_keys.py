"""Which keys of Hugging Face's a section gives, and which of them are read where they stand."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from composer_fsdp2.migration.dialects.huggingface.held import GivenKey
from composer_fsdp2.migration.dialects.huggingface.places import (
    BESIDE,
    DEGREES,
    DEGREES_PREFIX,
    MAPPINGS,
    OF_ACCELERATES_FILE,
    OLD_SIBLINGS,
    PREFIX,
    SETTINGS,
)
from composer_fsdp2.migration.dialects.huggingface.readers import Reader, reads
from composer_fsdp2.migration.dialects.huggingface.table import BY_PLACE, OF_AXOLOTL

# What a Trainer is told elsewhere, and passes over in such a file, where it answers what the file leaves open.
_ANSWERS = ("fsdp", "bf16", "fp16", "gradient_checkpointing")
# Keys that no other system's section has, all on their own.
OF_TRAINERS = ("transformer_layer_cls_to_wrap", "min_num_params", "cpu_ram_efficient_loading", "xla")


def reader_of(values: Mapping[str, Any]) -> Reader:
    """Whose words a section that is not axolotl's has."""
    settings = values if is_bare(values) else values.get("fsdp_config")
    given = settings if isinstance(settings, Mapping) else {}
    if values.get("distributed_type") == "DEEPSPEED":
        return Reader.ACCELERATE_DEEPSPEED
    is_fsdp2 = str(given.get("version", given.get("fsdp_version"))) == "2"
    if "distributed_type" in values:
        return Reader.ACCELERATE_FSDP2 if is_fsdp2 else Reader.ACCELERATE_FSDP1
    # transformers 4.51.3 reads no version at all; 5 reads it, with or without the prefix.
    return Reader.TRAINER_FSDP2 if is_fsdp2 else Reader.TRAINER_FSDP1


def is_bare(values: Mapping[str, Any]) -> bool:
    """Whether these are the keys of an ``fsdp_config`` itself, as in the JSON file that a Trainer is given."""
    if "fsdp_config" in values or "distributed_type" in values:
        return False
    # Beside fsdp these two are arguments of a Trainer's own.
    others = (*_ANSWERS, *(OLD_SIBLINGS if "fsdp" in values else ()))
    names = [str(name) for name in values if name not in others]
    plain = [name.removeprefix(PREFIX) for name in names]
    num_known = sum((SETTINGS, name) in BY_PLACE for name in plain)
    is_theirs = any(name.startswith(PREFIX) for name in names) or bool({*OF_TRAINERS}.intersection(plain))
    is_theirs |= {"version", "reshard_after_forward"}.issubset(plain)
    return is_theirs and 2 * num_known >= len(plain)


def given_keys(values: Mapping[str, Any], reader: Reader, *, is_file: bool) -> tuple[GivenKey, ...]:
    """The keys that are FSDP's own; what else a Trainer's arguments hold is none of it."""
    found: list[GivenKey] = []
    if is_bare(values):  # a file, of whose keys every release takes the prefix off
        names = [str(name) for name in values if name not in _ANSWERS]
        found = [
            _nested_key(name, name.removeprefix(PREFIX), values[name], SETTINGS, reader)
            for name in names
            if name in values
        ]
        values = {name: value for name, value in values.items() if name in _ANSWERS}
    for name, value in values.items():
        row = BY_PLACE.get((BESIDE, name))
        if name in MAPPINGS and isinstance(value, Mapping) and value:
            found += [_nested_key(f"{name}.{key}", str(key), each, name, reader) for key, each in value.items()]
        elif name in MAPPINGS:
            found.append(GivenKey(key=name, value=value, row=None, is_read=not value or isinstance(value, str)))
        elif reader.is_axolotl and name in OF_AXOLOTL:
            found.append(GivenKey(key=name, value=value, row=OF_AXOLOTL[name], is_read=value is not None))
        elif row is not None and reads(reader, row):
            found.append(GivenKey(key=name, value=value, row=row))
        elif name in OLD_SIBLINGS and reader.is_transformers:
            old = BY_PLACE[SETTINGS, name.removeprefix(PREFIX)]
            found.append(GivenKey(key=name, value=value, row=old, is_read=reader is Reader.TRAINER_FSDP1))
        elif str(name).startswith("fsdp"):
            found.append(GivenKey(key=name, value=value, row=None, is_read=False))
        elif not reader.is_trainer and is_file and name not in OF_ACCELERATES_FILE:
            found.append(GivenKey(key=str(name), value=value, row=None, is_read=False))
    return _last_of_each(found)


def _nested_key(key: str, name: str, value: Any, group: str, reader: Reader) -> GivenKey:
    prefix = {SETTINGS: PREFIX, DEGREES: DEGREES_PREFIX}.get(group, "")
    plain = name.removeprefix(prefix)
    row = BY_PLACE.get((group, plain))
    if row is None:
        return GivenKey(key=key, value=value, row=None, is_read=False)
    is_read = reads(reader, row)
    if reader is Reader.TRAINER_FSDP1 and plain != name:
        is_read = False  # stripped from the keys of a JSON file only
    if row.aliases:  # two systems' words for one thing: each reads its own
        is_read = is_read and (plain in row.aliases) == reader.is_transformers
    return GivenKey(key=key, value=value, row=row, is_read=is_read)


def _last_of_each(given: list[GivenKey]) -> tuple[GivenKey, ...]:
    """Most readers take a key with and without its prefix as the same, and the last one holds."""
    last = {(each.row.name, each.key in OLD_SIBLINGS): each.key for each in given if each.row and each.is_read}
    return tuple(
        each
        if each.row is None or last.get((each.row.name, each.key in OLD_SIBLINGS), each.key) == each.key
        else replace(each, is_read=False)
        for each in given
    )
