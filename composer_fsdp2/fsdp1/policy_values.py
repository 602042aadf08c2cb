"""Parse and format ``wrap_policy``, ``activation_checkpointing_policy``, ``freeze`` and ``train_only``.

The keys of ``wrap_policy`` are those of ROLL (``strategy_config.wrap_policy``), plus FSDP1's ``min_num_params``.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from composer_fsdp2.config.text import did_you_mean, short
from composer_fsdp2.config.wrap import AUTO_EXPERTS, Wrap, WrapKind
from composer_fsdp2.errors import ConfigError

AUTO = "auto"  # the classes in the model's _no_split_modules
_CLASSES, _SIZE = "transformer_layer_cls_to_wrap", "min_num_params"
WRAP_KEYS = (_CLASSES, "wrap_embeddings", "wrap_lm_output", "moe_experts", _SIZE)


def parse_wrap_policy(value: object) -> Wrap:
    """Parse ``wrap_policy``. None selects units by the model's hooks. Entries with the value None are ignored."""
    if value is None:
        return Wrap()
    if not isinstance(value, Mapping):
        raise ConfigError(f"{short(value)}; it is a mapping with {', '.join(WRAP_KEYS)}, or null")
    given = {str(key): each for key, each in value.items()}
    for key in given:
        if key not in WRAP_KEYS:
            way_out = did_you_mean(key, WRAP_KEYS, f"it takes {', '.join(WRAP_KEYS)}")
            raise ConfigError(f"{short(given)}, with the unknown key {key}{way_out}")
    present = {key: each for key, each in given.items() if each is not None}
    if (_CLASSES in present) == (_SIZE in present):
        fault = "gives both" if _CLASSES in present else "gives neither"
        raise ConfigError(
            f"{short(given)}, which {fault} {_CLASSES} {'and' if _CLASSES in present else 'nor'} {_SIZE}; give one: "
            f"{_CLASSES} is a list of classes, {AUTO} for those that the model names, or [] for none"
        )
    try:
        return _wrap_of(present)
    except ConfigError as error:
        raise ConfigError(f"{short(given)}, in which {error}") from error


def _wrap_of(given: Mapping[str, Any]) -> Wrap:
    embeddings, output = _flag(given, "wrap_embeddings"), _flag(given, "wrap_lm_output")
    experts = _experts(given.get("moe_experts", ()))
    if _SIZE in given:
        others = {"wrap_embeddings": embeddings, "wrap_lm_output": output, "moe_experts": experts}
        beside = next((key for key, each in others.items() if each), None)
        if beside is not None:
            raise ConfigError(f"{beside} stands beside {_SIZE}, which chooses by size alone; leave one of them out")
        return Wrap(kind=WrapKind.SIZE, min_num_params=_number(given[_SIZE]))
    classes = None if _is_auto(given[_CLASSES]) else class_names(given[_CLASSES], _CLASSES, f"class names, or {AUTO}")
    return Wrap(
        kind=WrapKind.ROOT if classes == () else WrapKind.CLASSES,
        classes=classes or (),
        embeddings=embeddings,
        output=output,
        experts=experts,
    )


def _experts(value: object) -> tuple[str, ...]:
    """True, as in ``wrap_embeddings: true``, means all modules named as experts."""
    if isinstance(value, bool):
        return AUTO_EXPERTS if value else ()
    return AUTO_EXPERTS if _is_auto(value) else class_names(value, "moe_experts", f"class names, or {AUTO}")


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == AUTO


def _flag(given: Mapping[str, Any], key: str) -> bool:
    value = given.get(key, False)
    if not isinstance(value, bool):
        raise ConfigError(f"{key} is {value!r}; it takes true or false")
    return value


def _number(value: object) -> int:
    """1e8 is a string in PyYAML, and a float in OmegaConf."""
    number: object = value
    if isinstance(value, str):
        try:
            number = int(value) if value.strip().isdecimal() else float(value)
        except ValueError:
            number = None
    if isinstance(number, float) and math.isfinite(number) and number.is_integer():
        number = int(number)
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ConfigError(f"{_SIZE} is {value!r}; give a whole number of parameters from 1 on, such as 1e8")
    return number


def class_names(value: object, key: str, what: str) -> tuple[str, ...]:
    """Parse one name or a list of names, without duplicates."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, Sequence) or isinstance(names, bytes):
        raise ConfigError(f"{key} is {value!r}; give a list of {what}")
    for name in names:
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(f"{key} has {name!r}, which is no class name; give a list of {what}")
        if name == AUTO:
            way_out = f"give it alone: {key}: {AUTO}" if AUTO in what else f"give a list of {what}"
            raise ConfigError(f"{key} has {AUTO} in a list; {way_out}")
    return tuple(dict.fromkeys(names))


def wrap_policy_value(wrap: Wrap) -> dict[str, Any] | None:
    """Inverse of ``parse_wrap_policy``; None for the hooks."""
    if wrap.kind is WrapKind.HOOKS:
        return None
    if wrap.kind is WrapKind.SIZE:
        return {_SIZE: wrap.min_num_params}
    classes = list(wrap.classes) or ([] if wrap.kind is WrapKind.ROOT else AUTO)
    others = {"wrap_embeddings": wrap.embeddings, "wrap_lm_output": wrap.output, "moe_experts": _experts_value(wrap)}
    return {_CLASSES: classes, **{key: value for key, value in others.items() if value}}


def _experts_value(wrap: Wrap) -> list[str] | str:
    return AUTO if wrap.experts == AUTO_EXPERTS else list(wrap.experts)


def parse_checkpointed_classes(value: object) -> tuple[str, ...] | None:
    """Parse class names of modules to recompute.

    ``auto`` returns (), the model's ``_no_split_modules``; None returns None, its hooks.
    """
    if value is None:
        return None
    if _is_auto(value):
        return ()
    try:
        names = class_names(value, "the value", f"class names, or {AUTO}")
    except ConfigError as error:
        raise ConfigError(f"{short(value)}; {error}") from error
    if not names:
        raise ConfigError(f"{short(value)}, which recomputes nothing; give class names or {AUTO}, or leave it out")
    return names


def checkpointed_value(classes: tuple[str, ...] | None) -> list[str] | str | None:
    """Inverse of ``parse_checkpointed_classes``."""
    return None if classes is None else list(classes) or AUTO


def parse_freeze(value: object) -> tuple[str, ...]:
    """Parse the paths of modules or parameters; removes trailing dots and duplicates."""
    if value is None:
        return ()
    paths = [value] if isinstance(value, str) else value
    if not isinstance(paths, Sequence) or isinstance(paths, bytes) or not all(isinstance(each, str) for each in paths):
        raise ConfigError(f"{short(value)}; give a list of prefixes of parameters' names, such as [model.embed_tokens]")
    for path in paths:
        if not all(part and part == part.strip() for part in path.removesuffix(".").split(".")):
            raise ConfigError(
                f"{short(value)}, in which {path!r} is no path; give a list of prefixes of parameters' names, such as "
                "[model.embed_tokens]"
            )
    return tuple(dict.fromkeys(path.removesuffix(".") for path in paths))


def parse_train_only(value: object) -> tuple[str, ...]:
    """Parse regular expressions of parameter names, without duplicates."""
    if value is None:
        return ()
    patterns = [value] if isinstance(value, str) else value
    problem = f"{short(value)}; give a list of regular expressions of parameters' names, such as ['lm_head\\.']"
    if not isinstance(patterns, Sequence) or isinstance(patterns, bytes):
        raise ConfigError(problem)
    for each in patterns:
        try:
            re.compile(each)
        except (re.error, TypeError) as error:
            raise ConfigError(f"{problem}: {error}") from error
    return tuple(dict.fromkeys(patterns))


def freeze_value(frozen: tuple[str, ...]) -> list[str] | None:
    """Inverse of ``parse_freeze`` and ``parse_train_only``."""
    return list(frozen) or None
