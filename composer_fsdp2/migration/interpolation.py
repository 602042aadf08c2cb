"""OmegaConf's ``${...}``: resolved where that can be done here, found where it cannot, and kept out of reports.

Composer's, LLM Foundry's and ROLL's files are read by OmegaConf (``Dialect.interpolates``); in any other file it is
text.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from composer_fsdp2.config.findings import Finding
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.documents.edits import references_in
from composer_fsdp2.migration.documents.yaml import flow_text
from composer_fsdp2.migration.interpolated import interpolations
from composer_fsdp2.migration.paths import Path, has_path, value_at

# Where values are an environment variable's: what the file has there, and the value.
Environment = Mapping[Path, tuple[str, Any]]

_MOST = 50_000  # texts to resolve in one file; OmegaConf resolves each as often as it is referred to
_ENVIRONMENT = "oc.env"
_NOBODY = "composer_fsdp2.nobody"  # no resolver
_HERE = "composer_fsdp2: here"  # a key of nobody's
_UNRESOLVED = object()
_RELATIVE = re.compile(r"\$\{(\.+)")
_FIRST_NAME = re.compile(r"\$\{\s*([^\s.:\[\]{}$]+)")
# Of a resolver: its arguments may name any part of the file.
_OTHER_RESOLVER = re.compile(r"\$\{\s*(?!oc\.env\b|oc\.decode\b)[\w.]+\s*:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The values of a file as its system sees them.

    Args:
        values: With interpolations resolved; those that cannot be resolved here stay as they are written.
    """

    values: Any
    environment: Environment = field(default_factory=dict)


def resolve(values: Any) -> Resolved:
    """The values with interpolations resolved.

    What comes from the environment is what changes when nothing there can be resolved, by whichever way it came.
    """
    texts = list(interpolations(values, ()))
    if not texts:
        return Resolved(values=values)
    _check_size(values, texts)
    resolved = _resolved(values, (), _Resolver(values, texts))
    if not any(_ENVIRONMENT in text for text, _ in texts):
        return Resolved(values=resolved)
    without = _resolved(values, (), _Resolver(values, texts, hides_environment=True))
    return Resolved(values=resolved, environment=dict(_from_environment(values, resolved, without, ())))


def _check_size(values: Any, texts: Iterable[tuple[str, Path]]) -> None:
    """Refuse texts that stand for others that stand for others: forty lines can ask for a terabyte.

    Raises:
        ConfigError: says how many there would be to resolve, at least.
    """
    known: dict[Path, int] = {}

    def below(value: Any, path: Path) -> int:
        if isinstance(value, str):
            absolute = _absolute(value, path) if "${" in value else ""
            return 1 + sum(at(other) for other, _ in references_in(absolute))
        each = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
        return sum((at((*path, key)) for key, _ in each), start=1)

    def at(path: Path) -> int:
        if path not in known:
            known[path] = 0  # also while it is being counted: one that leads to itself is OmegaConf's to refuse
            known[path] = below(value_at(values, path), path) if has_path(values, path) else 1
        return known[path]

    try:
        count = sum(at(path) for _, path in texts)
    except RecursionError as error:
        raise ConfigError("interpolations refer to each other too deep") from error
    if count > _MOST:
        raise ConfigError(f"interpolations stand for {count} others, and {_MOST} are the most that is resolved")


def _absolute(text: str, path: Path) -> str:
    """``${.x}`` and ``${..x}`` as seen from the top of the file."""

    def above(found: re.Match[str]) -> str:
        return "${" + "".join(f"{key}." for key in path[: max(len(path) - len(found[1]), 0)])

    return _RELATIVE.sub(above, text)


def _resolved(value: Any, path: Path, resolver: "_Resolver") -> Any:
    if isinstance(value, Mapping):
        return {key: _resolved(each, (*path, key), resolver) for key, each in value.items()}
    if isinstance(value, list):
        return [_resolved(each, (*path, number), resolver) for number, each in enumerate(value)]
    return resolver.value_of(value, path) if isinstance(value, str) and "${" in value else value


class _Resolver:
    """Resolves texts of one file, each once, beside those parts of the file that texts refer to.

    Args:
        texts: All of the file's.
        hides_environment: Resolve as if no variable could be had.
    """

    def __init__(self, values: Any, texts: list[tuple[str, Path]], *, hides_environment: bool = False) -> None:
        self._hides = hides_environment
        self._known: dict[str, Any] = {}
        absolute = [_absolute(*each) for each in texts]
        names = {name for text in absolute for name in _FIRST_NAME.findall(text)}
        needs_all = any(map(_OTHER_RESOLVER.search, absolute))
        around = values if isinstance(values, Mapping) else {}
        held = {key: self._holdable(each, (key,)) for key, each in around.items() if needs_all or str(key) in names}
        try:
            self._config = OmegaConf.create(_with_fit_keys(held))
        except (OmegaConfBaseException, RecursionError):
            self._config = OmegaConf.create({})

    def value_of(self, text: str, path: Path) -> Any:
        """The text's value; the text itself, if it cannot be resolved."""
        asked = self._asked(text, path)
        if asked not in self._known:
            self._known[asked] = _UNRESOLVED  # also while it is being resolved: it may lie in what it stands for
            self._known[asked] = self._found(asked, path)
        found = self._known[asked]
        return text if found is _UNRESOLVED else found

    def _found(self, asked: str, path: Path) -> Any:
        try:
            self._config[_HERE] = asked
            found = self._config[_HERE]
        except (OmegaConfBaseException, RecursionError):
            return _UNRESOLVED
        # Each value of a mapping may be resolved or not.
        return _resolved(OmegaConf.to_container(found), path, self) if OmegaConf.is_config(found) else found

    def _asked(self, text: str, path: Path) -> str:
        absolute = _absolute(text, path)
        return absolute.replace(_ENVIRONMENT, _NOBODY) if self._hides else absolute

    def _holdable(self, value: Any, path: Path) -> Any:
        """The value as OmegaConf can hold it: its YAML reader takes a date for text, and no broken interpolation."""
        if isinstance(value, Mapping):
            return _with_fit_keys({key: self._holdable(each, (*path, key)) for key, each in value.items()})
        if isinstance(value, list):
            return [self._holdable(each, (*path, number)) for number, each in enumerate(value)]
        if isinstance(value, str) and "${" in value:
            asked = self._asked(value, path)
            try:
                OmegaConf.create([asked])
            except OmegaConfBaseException:
                return None
            return asked
        return value if isinstance(value, bool | int | float | str | bytes | None) else str(value)


def _with_fit_keys(values: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in values.items() if isinstance(key, bool | int | float | str | bytes)}


def _from_environment(raw: Any, resolved: Any, without: Any, path: Path) -> Iterator[tuple[Path, tuple[str, Any]]]:
    if isinstance(raw, Mapping):
        for key, each in raw.items():
            yield from _from_environment(each, resolved[key], without[key], (*path, key))
    elif isinstance(raw, list):
        for number, each in enumerate(raw):
            yield from _from_environment(each, resolved[number], without[number], (*path, number))
    elif isinstance(resolved, Mapping):  # an interpolation that stands for a mapping
        for key, each in resolved.items():
            other = without.get(key) if isinstance(without, Mapping) else None
            own = other.replace(_NOBODY, _ENVIRONMENT) if isinstance(other, str) and "${" in other else raw
            yield from _from_environment(own, each, other, (*path, key))
    elif resolved != without and resolved != raw:
        yield path, (raw, resolved)


# ---------------------------------------------------------------------------------------------------------------------
# Reports, which may be shown to anybody


def shown(finding: Finding, path: Path | None, environment: Environment, words: Collection[str]) -> Finding:
    """The finding with references in the place of values that come from environment variables.

    Args:
        path: Of its key in the file; None if it has none.
        words: In small letters, what keys take: no secrets, and the report's own words.
    """
    if not environment:
        return finding
    each = [(text, value) for text, value in environment.values() if isinstance(value, str)]
    each += [environment[path]] if path is not None and path in environment else []
    secrets = {_pattern(value, words): text for text, value in each}
    value = finding.value if path is None else _shown_value(finding.value, path, environment)

    def without(text: str) -> str:
        for secret, reference in secrets.items():
            text = re.sub(secret, lambda found: reference, text, flags=re.IGNORECASE)  # noqa: B023
        return text

    return replace(
        finding,
        value=without(value) if isinstance(value, str) and "${" not in value else value,
        target=without(finding.target),
        reason=without(finding.reason),
        hint=without(finding.hint),
    )


def _shown_value(value: Any, path: Path, environment: Environment) -> Any:
    if path in environment:
        return environment[path][0]
    if isinstance(value, Mapping):
        return {key: _shown_value(each, (*path, key), environment) for key, each in value.items()}
    if isinstance(value, list):
        return [_shown_value(each, (*path, number), environment) for number, each in enumerate(value)]
    return value


_CUT = 60  # messages cut long values


_TELLING = 4  # characters; what is shorter is found in quotes only


def _pattern(value: Any, words: Collection[str]) -> str:
    """Finds a value in a text: as it is, or as it is quoted there."""
    text = str(value)
    if len(text) < _TELLING or text.lower() in words:
        return rf"(?<!\w){re.escape(repr(value))}" if isinstance(value, str) else r"(?!)"
    forms = dict.fromkeys((text, repr(text)[1:-1], flow_text(value).strip('"')))
    each = (re.escape(form[:_CUT]) + (r"\S*" if len(form) > _CUT else r"(?!\w)") for form in forms)
    return rf"(?<!\w)(?:{'|'.join(each)})"
