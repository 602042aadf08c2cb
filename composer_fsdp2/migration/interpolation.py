"""Resolve OmegaConf's ``${...}`` interpolations. Those that cannot be resolved here remain as written.

Composer, LLM Foundry and ROLL read files with OmegaConf (``Dialect.interpolates``). In other systems' files, ``${...}``
is a string.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.documents.edits import reference_root, references_in
from composer_fsdp2.migration.interpolated import interpolations, leaves
from composer_fsdp2.migration.paths import Path, has_path, value_at

_MAX_TEXTS = 50_000  # texts to resolve in one file; OmegaConf resolves a text again for each reference
_register = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver  # before OmegaConf 2.4
_RESULT_KEY = "composer_fsdp2: here"  # a key that no file has
_SCALARS = bool | int | float | str | bytes  # the types that OmegaConf supports
_RELATIVE = re.compile(r"\$\{(\.+)")
_MAX_PUBLIC_LENGTH = 3  # characters; a value this short reveals nothing
_ESCAPED_OPEN = "$·{"  # replaces "${", which would be read as an interpolation


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The values of a file with interpolations resolved, in three forms.

    Args:
        values: Interpolations are resolved. Those that cannot be resolved here remain as written.
        written: As ``values``, but values that depend on environment variables are as in the file.
        public: As ``values``, but without values of environment variables that may be secrets. ``as_written`` converts
            these to the file's text.
    """

    values: Any
    written: Any
    public: Any


@dataclass(frozen=True, slots=True)
class _EnvironmentValue:
    """A value that depends on an environment variable, and its text in the file."""

    written: str
    value: Any

    def public(self, public_values: Collection[str]) -> Any:
        is_public = len(str(self.value)) <= _MAX_PUBLIC_LENGTH or str(self.value).lower() in public_values
        return self.value if is_public else self.written.replace("${", _ESCAPED_OPEN)


def as_written(text: str) -> str:
    """Restore the file's references in a text made from ``Resolved.public``."""
    return text.replace(_ESCAPED_OPEN, "${")


def resolve(values: Any, public_values: Collection[str] = (), *, place: str = "") -> Resolved:
    """Resolve the interpolations in the values of a file.

    Args:
        public_values: Values that keys accept, in lower case. These are not secrets.
        place: A prefix for error messages.
    Raises:
        ConfigError: the expansion is too large.
    """
    if root := reference_root(values):
        inner = resolve(value_at(values, root), public_values, place=place)
        around = {name: {**values, root[0]: getattr(inner, name)} for name in ("values", "written", "public")}
        return Resolved(**around)
    texts = list(interpolations(values, ()))
    if not texts:
        return Resolved(values=values, written=values, public=values)
    _check_size(values, texts, place)
    resolver = _Resolver(_config(values, texts))
    _register("oc.env", resolver.env, replace=True)
    try:
        found = _map_leaves(values, resolver.value_of)
    finally:
        _register("oc.env", oc.env, replace=True)
    return Resolved(
        values=_replace_environment_values(found, lambda each: each.value),
        written=_replace_environment_values(found, lambda each: each.written),
        public=_replace_environment_values(found, lambda each: each.public(public_values)),
    )


def _replace_environment_values(found: Any, of: Callable[[_EnvironmentValue], Any]) -> Any:
    return _map_leaves(found, lambda leaf, _: of(leaf) if isinstance(leaf, _EnvironmentValue) else leaf)


def _map_leaves(value: Any, function: Callable[[Any, Path], Any], path: Path = (), keys: Any = object) -> Any:
    """Return the value with each leaf replaced by ``function(leaf, path)``.

    Args:
        keys: The types of mapping keys to include. Entries with other keys are dropped.
    """
    if isinstance(value, Mapping):
        return {
            key: _map_leaves(each, function, (*path, key), keys) for key, each in value.items() if isinstance(key, keys)
        }
    if isinstance(value, list):
        return [_map_leaves(each, function, (*path, number), keys) for number, each in enumerate(value)]
    return function(value, path)


def _check_size(values: Any, texts: Iterable[tuple[str, Path]], place: str) -> None:
    """Reject nested references that expand exponentially: forty lines can expand to a terabyte.

    Raises:
        ConfigError: there are too many strings to resolve (the message has a lower bound), or references are nested too
            deep.
    """
    known: dict[Path, int] = {}

    def size(path: Path) -> int:
        if path not in known:
            known[path] = 0  # set before counting: OmegaConf refuses circular references
            below = leaves(value_at(values, path), path) if has_path(values, path) else [("", path)]
            known[path] = sum(1 + sum(map(size, references_in(_absolute(*each)))) for each in below)
        return known[path]

    try:
        count = sum(size(path) for _, path in texts)
    except RecursionError as error:
        raise ConfigError(f"{place}interpolations refer to each other too deep") from error
    if count > _MAX_TEXTS:
        raise ConfigError(
            f"{place}interpolations stand for {count} others, and {_MAX_TEXTS} are the most that is resolved"
        )


def _absolute(text: Any, path: Path) -> str:
    """Convert relative interpolations (``${.x}``, ``${..x}``) in a string to absolute ones; return "" if it has no
    interpolation."""

    def above(found: re.Match[str]) -> str:
        return "${" + "".join(f"{key}." for key in path[: max(len(path) - len(found[1]), 0)])

    return _RELATIVE.sub(above, text) if isinstance(text, str) and "${" in text else ""


def _config(values: Any, texts: Iterable[tuple[str, Path]]) -> DictConfig:
    """Return an OmegaConf configuration of the top-level entries that interpolations of the file may read."""
    absolute = " ".join(_absolute(*each) for each in texts)
    around = values if isinstance(values, Mapping) else {}
    named = {key: each for key, each in around.items() if str(key) in absolute}
    try:
        return OmegaConf.create(_map_leaves(named, _omegaconf_value, keys=_SCALARS))
    except (OmegaConfBaseException, RecursionError):
        return OmegaConf.create({})


def _omegaconf_value(value: Any, path: Path) -> Any:
    """Convert a value for OmegaConf: dates to strings, and invalid interpolations to None, because OmegaConf rejects
    them."""
    if not (absolute := _absolute(value, path)):
        return value if isinstance(value, _SCALARS | None) else str(value)
    try:
        OmegaConf.create([absolute])
    except OmegaConfBaseException:
        return None
    return absolute


class _Resolver:
    """Resolves each string of a file once, and records which strings depend on environment variables, directly or
    indirectly."""

    def __init__(self, config: DictConfig) -> None:
        self._config = config
        self._cache: dict[tuple[str, str], Any] = {}
        self._has_read_environment = False

    def env(self, *arguments: Any) -> str | None:
        """Replace OmegaConf's ``oc.env``, and record the call."""
        self._has_read_environment = True
        return oc.env(*arguments)

    def value_of(self, text: Any, path: Path) -> Any:
        """Return the resolved value of a string, or the string if it has no interpolation or cannot be resolved."""
        cache_key = str(text), _absolute(text, path)
        if cache_key[1] and cache_key not in self._cache:
            self._cache[cache_key] = text  # set before resolving: the text may be part of its value
            self._cache[cache_key] = self._resolved_value(*cache_key, path)
        return self._cache.get(cache_key, text)

    def _resolved_value(self, text: str, absolute: str, path: Path) -> Any:
        self._has_read_environment = False
        try:
            self._config[_RESULT_KEY] = absolute
            found = self._config[_RESULT_KEY]
        except (OmegaConfBaseException, RecursionError):
            return text
        has_read_environment = self._has_read_environment
        if OmegaConf.is_config(found):  # each value of a mapping may be resolved or not
            found = _map_leaves(OmegaConf.to_container(found), self.value_of, path)
        return (
            _map_leaves(
                _replace_environment_values(found, lambda each: each.value),
                lambda leaf, _: _EnvironmentValue(text, leaf),
            )
            if has_read_environment
            else found
        )
