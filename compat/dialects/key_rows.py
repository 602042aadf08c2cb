"""The rows of all dialects' tables as one value, and for each the smallest files in which its key can be read.

Nothing is known here that the tables do not say: what becomes of one value of a key, its dialect's reader tells.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from composer_fsdp2.compat.dialects import composer_effects
from composer_fsdp2.compat.dialects import huggingface_keys as huggingface
from composer_fsdp2.compat.dialects import roll_keys as roll
from composer_fsdp2.compat.dialects import torchtitan_keys as torchtitan
from composer_fsdp2.compat.dialects.base import Path, Section
from composer_fsdp2.compat.dialects.rows import Row
from composer_fsdp2.config import BackwardPrefetch, GradientSync, ShardingStrategy
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.findings import Outcome
from composer_fsdp2.fsdp1 import keys as composer
from composer_fsdp2.fsdp1.legacy import FSDP2_DEFAULTS
from composer_fsdp2.fsdp1.translate import STATE_DICT_TYPES
from composer_fsdp2.fsdp1.values import DTYPE_KEYS, UNREAD_DTYPE_KEY

__all__ = ["TABLES", "Asked", "KeyRow", "Table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRow:
    """One key of one dialect: what it means there, and its usual fate.

    Args:
        group: Which of the dialect's tables it belongs to.
        places: Where a file says it, with dots; the usual place first, names of earlier releases last.
        defaults: By who reads the file; "" is everyone.
        aliases: Other names of the key, such as those of earlier releases.
        parts: Keys of its value, where that may be a mapping.
        read_by: Which readers read it; empty if there is one only.
        instead: By a reader that passes over it, what does the same there.
        elsewhere: What the system's own FSDP2 does with it.
        values: Those whose fates are worth telling.
    """

    dialect: str
    name: str
    group: str
    places: tuple[str, ...]
    defaults: Mapping[str, Any]
    meaning: str
    takes: str
    outcome: Outcome
    target: str
    reason: str
    hint: str = ""
    only_with: str = ""
    aliases: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    read_by: tuple[str, ...] = ()
    instead: Mapping[str, str]
    elsewhere: str = ""
    values: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A file that says one key, and as which key the report names it.

    Args:
        reader: Who would read such a file; "" if there is one only.
    """

    section: Section
    key: str
    reader: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A dialect's rows, and files to ask its reader with.

    Args:
        asked: The smallest files with this value of a key.
        silent: Files that say that there is sharding, and leave the rest unsaid.
    """

    dialect: str
    title: str
    rows: tuple[KeyRow, ...]
    asked: Callable[[KeyRow, Any], Iterable[Asked]]
    silent: tuple[Section, ...]


def _distinct(values: Iterable[Any]) -> tuple[Any, ...]:
    """By their looks, since 1 equals True and a list has no hash."""
    return tuple({repr(value): value for value in values}.values())


def _section(values: Mapping[str, Any], path: Path) -> Section:
    said: Any = values
    for key in path:
        said = said[key]
    return Section(path=path, said=said, around=values)


def _nested(name: str, value: Any) -> dict[str, Any]:
    for part in reversed(name.split(".")):
        value = {part: value}
    return dict(value)


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        key: _merged(first[key], value) if isinstance(first.get(key), Mapping) and isinstance(value, Mapping) else value
        for key, value in second.items()
    }
    return {**first, **both}


# ---------------------------------------------------------------------------------------------------------------------
# Composer

_COMPOSERS_PLACES = ("fsdp_config", "parallelism_config.fsdp", "parallelism_config.fsdp2")
_COMPOSERS_FILE = {"fsdp_config": {}, "algorithms": {"gradient_clipping": {"clipping_type": "value"}}}
_COMPOSERS_CHOICES: dict[str, tuple[Any, ...]] = {
    "sharding_strategy": tuple(strategy.value for strategy in ShardingStrategy),
    "backward_prefetch": tuple(prefetch.value for prefetch in BackwardPrefetch),
    "gradient_sync": tuple(mode.value for mode in GradientSync),
    "state_dict_type": (*filter(None, STATE_DICT_TYPES), "local"),
}


def _of_composer(key: composer.Key) -> KeyRow:
    defaults = {"": key.default}
    if key.name in FSDP2_DEFAULTS:
        defaults = {"FSDPConfig": key.default, "FSDP2Config": FSDP2_DEFAULTS[key.name]}
    is_bool = key.kind is composer.Kind.BOOL
    ignored = composer_effects.PLAIN_COMPOSER[""] if key.origin is composer.Origin.FSDP1 else ""
    return KeyRow(
        dialect="composer",
        name=key.name,
        group=key.origin.value,
        places=tuple(f"{place}.{key.name}" for place in _COMPOSERS_PLACES),
        defaults=defaults,
        meaning=key.meaning,
        takes=key.kind.value,
        outcome=key.outcome,
        target=key.target,
        reason=key.reason,
        instead={},
        parts=(*DTYPE_KEYS, UNREAD_DTYPE_KEY) if key.name == "mixed_precision" else (),
        elsewhere=composer_effects.PLAIN_COMPOSER.get(key.name, ignored),
        values=_COMPOSERS_CHOICES.get(key.name, (True, False) if is_bool else ()),
    )


BESIDE = "beside fsdp_config"


def _beside_composers(row: composer_effects.Beside) -> KeyRow:
    return KeyRow(
        dialect="composer",
        name=row.key,
        group=BESIDE,
        places=(row.key, "parallelism_config.tp") if row.key == "tp_config" else (row.key,),
        defaults={"": None},
        meaning="",
        takes="",
        outcome=row.outcome,
        target="",
        reason=row.reason,
        hint=row.hint,
        instead={},
    )


def _composers_file(row: KeyRow, value: Any) -> Iterator[Asked]:
    said = {row.name: value}
    values = {"fsdp_config": {}, **said} if row.group == BESIDE else {"fsdp_config": said}
    yield Asked(section=_section(values, ("fsdp_config",)), key=row.name)


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face

_Source, _Place = huggingface.Source, huggingface.Place
_PLACES = {
    _Place.SETTINGS: ("fsdp_config.", f"fsdp_config.{huggingface.PREFIX}"),
    _Place.BESIDE: ("",),
    _Place.DEGREES: ("parallelism_config.", f"parallelism_config.{huggingface.DEGREES_PREFIX}"),
}
# Of the systems; `migrate` takes these keys in any file, as the answer to what a hybrid's mesh was.
_READS_DEGREES = "accelerate 1.10"
# What FSDP1 saved and FSDP2 has no form for, so that it stands in no list of what a key takes.
_HUGGING_FACES_OLD_CHOICES: dict[huggingface.Kind, tuple[Any, ...]] = {
    huggingface.Kind.STATE_DICT: ("LOCAL_STATE_DICT",)
}


def _of_hugging_face(key: huggingface.Key) -> KeyRow:
    names = (key.name, *key.aliases)
    old = tuple(name for name in huggingface.OLD_SIBLINGS if name == huggingface.PREFIX + key.name)
    # A Trainer of transformers 4.51.3 passes over names with the prefix, those of keys that it reads as well.
    instead = {_Source.TRAINER_FSDP1: key.trainer}
    for source in (_Source.ACCELERATE_FSDP1, _Source.ACCELERATE_FSDP2):
        instead[source] = key.launcher if source not in key.read_by else ""
    return KeyRow(
        dialect="huggingface",
        name=key.name,
        group=key.place.value,
        places=(*(prefix + name for name in names for prefix in _PLACES[key.place]), *old),
        defaults={source.value: value for source, value in key.default.items()},
        meaning=key.meaning,
        takes=key.kind.value,
        outcome=key.outcome,
        target=key.target,
        reason=key.reason,
        aliases=(*key.aliases, *old),
        read_by=_readers(key),
        instead={source.value: way for source, way in instead.items() if way},
        values=_hugging_faces_choices(key.kind),
    )


def _readers(key: huggingface.Key) -> tuple[str, ...]:
    if key.place is _Place.DEGREES:
        return (_READS_DEGREES,)
    return tuple(source.value for source in _Source if source in key.read_by) or ("nobody",)


def _hugging_faces_choices(kind: huggingface.Kind) -> tuple[Any, ...]:
    """The words of what the key takes that its parser takes, each once: FULL_SHARD and not 1 as well."""
    if kind is huggingface.Kind.ANY:
        return ()
    meant: dict[str, Any] = {}
    for word in re.findall(r"'?\w+'?", kind.value):
        value = yaml.safe_load(word)
        try:
            parsed = huggingface.PARSERS[kind](value, _Source.ACCELERATE_FSDP1)
        except ConfigError:
            continue
        if kind not in (huggingface.Kind.CLASSES, huggingface.Kind.COUNT, huggingface.Kind.DEGREE):
            meant.setdefault(repr(parsed), value)
    return (*meant.values(), *_HUGGING_FACES_OLD_CHOICES.get(kind, ()))


# By who reads it, a file that turns sharding on, layer by layer.
_HUGGING_FACES_FILES: dict[huggingface.Source, dict[str, Any]] = {
    _Source.TRAINER_FSDP1: {"fsdp": "full_shard auto_wrap"},
    _Source.TRAINER_FSDP2: {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2}},
    _Source.ACCELERATE_FSDP1: {
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    },
    _Source.ACCELERATE_FSDP2: {
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    },
}
# What must stand beside a key for the system to look at it.
_HUGGING_FACES_COMPANIONS: dict[str, tuple[str, Any]] = {
    "min_num_params": ("auto_wrap_policy", "SIZE_BASED_WRAP"),
    "auto_wrap_policy": ("min_num_params", 1),
}


def _hugging_faces_files(row: KeyRow, value: Any) -> Iterator[Asked]:
    key = huggingface.ROWS[_Place(row.group), row.name]
    is_degree = key.place is _Place.DEGREES
    readers = {_Source.ACCELERATE_FSDP2} if is_degree else key.read_by or set(_Source)
    for source, base in _HUGGING_FACES_FILES.items():
        if source not in readers:
            continue
        plain, prefixed = _PLACES[key.place][0], _PLACES[key.place][-1]
        name = key.aliases[0] if key.aliases and source.is_trainer else key.name
        prefix = plain if source.is_trainer else prefixed
        place, values = prefix + name, base
        if key.name in _HUGGING_FACES_COMPANIONS:
            beside, its_value = _HUGGING_FACES_COMPANIONS[key.name]
            values = _merged(values, _nested(prefix + beside, its_value))
        values = _merged(values, _nested(place, value))
        yield Asked(section=_section(values, ()), key=place, reader=_READS_DEGREES if is_degree else source.value)


# ---------------------------------------------------------------------------------------------------------------------
# ROLL and TorchTitan, whose tables have the same rows


def _of_row(dialect: str, row: Row, *, group: str, places: Iterable[str]) -> KeyRow:
    # TOML has no null: there the table leaves a default out that decides nothing.
    defaults = {} if dialect == "torchtitan" and row.default is None else {"": row.default}
    return KeyRow(
        dialect=dialect,
        name=row.name,
        group=group,
        places=tuple(places),
        defaults=defaults,
        meaning=row.meaning,
        takes=row.takes.text,
        outcome=row.outcome,
        target=row.target,
        reason=row.reason,
        hint=row.hint,
        only_with=row.only_with,
        aliases=row.aliases,
        instead={},
        values=_distinct((*row.takes.choices, *row.neutral, *(() if row.default is None else (row.default,)))),
    )


def _switched_on(rows: Iterable[Row], only_with: str) -> dict[str, Any]:
    """The key without which another is not read, with a value that asks for something."""
    if not only_with:
        return {}
    name, _, value = only_with.partition(" = ")
    row = next(row for row in rows if row.name == name)
    return {name: value or next(each for each in (True, 2) if row.takes.fits(each) and not row.is_neutral(each))}


_ROLLS_OUTER = {"strategy_name": "strategy_args", "device_mapping": "", "model_args": ""}
_ROLLS_FILE = {"worker": {"strategy_args": {"strategy_name": roll.STRATEGIES[0], "strategy_config": {}}}}
_ROLLS_PATH: Path = ("worker", "strategy_args", "strategy_config")


def _in_roll(name: str) -> str:
    """Where a worker's part of the file says it."""
    where = _ROLLS_OUTER.get(name.split(".")[0], "strategy_args.strategy_config")
    return f"{where}.{name}" if where else name


def _rolls_file(row: KeyRow, value: Any) -> Iterator[Asked]:
    values: dict[str, Any] = _ROLLS_FILE
    for name, each in {**_switched_on(roll.ROWS, row.only_with), row.name: value}.items():
        values = _merged(values, {"worker": _nested(_in_roll(name), each)})
    yield Asked(section=_section(values, _ROLLS_PATH), key=row.name)


def _torchtitans_file(row: KeyRow, value: Any) -> Iterator[Asked]:
    values: dict[str, Any] = {"parallelism": {}}
    for name, each in {**_switched_on(torchtitan.ROWS, row.only_with), row.name: value}.items():
        values = _merged(values, _nested(name, each))
    section = _section(values, ("parallelism",))
    yield Asked(section=section, key=row.name.removeprefix("parallelism."))


# ---------------------------------------------------------------------------------------------------------------------
# All of them

TABLES: dict[str, Table] = {
    table.dialect: table
    for table in (
        Table(
            dialect="composer",
            title="Composer and LLM Foundry",
            rows=(
                *map(_of_composer, composer.KEYS),
                *(_beside_composers(row) for row in composer_effects.BESIDE),
            ),
            asked=_composers_file,
            silent=(_section(_COMPOSERS_FILE, ("fsdp_config",)),),
        ),
        Table(
            dialect="huggingface",
            title="Hugging Face: Trainer and accelerate",
            rows=tuple(map(_of_hugging_face, huggingface.KEYS)),
            asked=_hugging_faces_files,
            silent=tuple(
                _section(_merged(_HUGGING_FACES_FILES[source], more), ())
                for source, more in (
                    (_Source.TRAINER_FSDP1, {"bf16": True, "gradient_accumulation_steps": 2}),
                    (_Source.TRAINER_FSDP1, {"fsdp": "full_shard"}),
                    (_Source.ACCELERATE_FSDP1, {"mixed_precision": "bf16"}),
                )
            ),
        ),
        Table(
            dialect="roll",
            title="ROLL",
            rows=tuple(
                _of_row(
                    "roll", row, group=_in_roll(row.name).rpartition(".")[0] or "worker", places=(_in_roll(row.name),)
                )
                for row in roll.ROWS
            ),
            asked=_rolls_file,
            silent=(_section(_ROLLS_FILE, _ROLLS_PATH),),
        ),
        Table(
            dialect="torchtitan",
            title="TorchTitan up to v0.2.2",
            rows=tuple(
                _of_row("torchtitan", row, group=row.name.rpartition(".")[0], places=(row.name, *row.aliases))
                for row in torchtitan.ROWS
            ),
            asked=_torchtitans_file,
            silent=(_section({"parallelism": {}}, ("parallelism",)),),
        ),
    )
}
