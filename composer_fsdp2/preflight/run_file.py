"""A user's file as values, with the place of each key."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.config.text import one_line, short
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.dialects.huggingface.deepspeed_file import WithSettings, with_settings
from composer_fsdp2.migration.documents import SUFFIXES, Document, open_document
from composer_fsdp2.migration.files import read_named
from composer_fsdp2.migration.interpolation import resolve
from composer_fsdp2.migration.paths import has_path


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """A file that was read.

    Args:
        document: With the settings of the DeepSpeed file that it names or is.
        written: As it stands there.
        values: With interpolations resolved where that can be done, and the command line's changes.
        overrides: The command line's changes (KEY=VALUE), as they were written.
    """

    path: Path
    document: Document
    written: Document
    values: Mapping[str, Any]
    overrides: tuple[str, ...] = ()
    deepspeed: WithSettings | None = None

    @classmethod
    def read(cls, path: Path, overrides: Iterable[str] = ()) -> "RunFile":
        """Raises ConfigError: there is no such file, or it is none that can be read; names it and the line."""
        overrides = tuple(overrides)
        if not path.is_file():
            raise ConfigError(f"no such file: {path}")
        if path.suffix.lower() not in SUFFIXES:
            raise ConfigError(
                f"{path}: a run can be planned from {', '.join(SUFFIXES)} files; for a script give the file that "
                "configures sharding, and the function that builds its model (--model module:function)"
            )
        try:
            document = written = open_document(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        if document.problem:
            raise ConfigError(document.problem)
        if not isinstance(document.values, Mapping):
            raise ConfigError(f"{path}:1:1: this is {short(document.values)}, and no configuration")
        deepspeed = with_settings(document, partial(read_named, path.parent), to="composer", alone=True)
        if deepspeed is not None:
            document = open_document(deepspeed.text, str(path), deepspeed.suffix)
        values = _overridden(resolve(document.values).values, overrides)
        return cls(
            path=path, document=document, written=written, values=values, overrides=overrides, deepspeed=deepspeed
        )

    def placed(self, findings: Iterable[Finding]) -> tuple[Finding, ...]:
        """The findings with file and line; those of keys that are not in the file with the file alone."""
        placed = (replace(each, where=self._place(each)) for each in findings)
        if self.deepspeed is None:
            return tuple(placed)
        told = self.deepspeed.told(placed)
        return tuple(each for each in told if each.outcome not in (Outcome.UNNEEDED, Outcome.EXACT))

    def _place(self, finding: Finding) -> str:
        key = finding.key
        if any(each.partition("=")[0] == key for each in self.overrides):
            return "the command line"
        parts = tuple(key.split("."))
        for depth in range(len(parts), 0, -1):
            if has_path(self.written.values, parts[:depth]):
                return f"{self.path}:{self.written.line_of(parts[:depth])}"
        return str(self.path)


def _overridden(values: Mapping[str, Any], overrides: tuple[str, ...]) -> Mapping[str, Any]:
    if not overrides:
        return values
    if wrong := [each for each in overrides if "=" not in each or not all(each.partition("=")[0].split("."))]:
        raise ConfigError(f"{wrong[0]} is neither an option nor KEY=VALUE")
    try:
        merged = OmegaConf.merge(OmegaConf.create(dict(values)), OmegaConf.from_cli(list(overrides)))
        found = OmegaConf.to_container(merged)
    except Exception as error:  # OmegaConf's own, of its YAML reader, and a TypeError where a list meets a mapping
        raise ConfigError(f"{' '.join(overrides)}: {one_line(error)}") from error
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def assumed(key: str, value: object, reason: str, hint: str = "") -> Finding:
    """What no key of the file says, and is needed."""
    return Finding(key=key, value=value, outcome=Outcome.APPROXIMATE, reason=reason, hint=hint, origin=Origin.IMPLICIT)
