"""A user's file: its values with the command line's overrides, and the line of each key."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch import nn

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.config.hub_errors import hub_advice_of
from composer_fsdp2.config.text import one_line, short
from composer_fsdp2.errors import ComposerFSDP2Error, ConfigError
from composer_fsdp2.migration.dialects.huggingface.deepspeed_file import WithSettings, with_settings
from composer_fsdp2.migration.documents import SUFFIXES, Document, open_document
from composer_fsdp2.migration.files import read_named
from composer_fsdp2.migration.interpolation import resolve
from composer_fsdp2.migration.paths import has_path

ModelOrFunction = nn.Module | Callable[[], Any]
# Larger than any cluster; the code lists a group's ranks, and the divisors of their number.
_MOST_RANKS = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Options for reading a file.

    Args:
        gpus_per_node: Ranks per node, for a ``process_group`` by nodes.
        model_config: A ``config.json`` or its folder, for a model that the file does not describe.
        model: A module, or a function that builds it, instead of the file's model.
        microbatch: Rows per microbatch, instead of the file's value. With None, ``auto`` in the file is planned as 1
            row.
        sequence: Tokens per row, instead of the file's value.
        device: The device type of the ranks.
        overrides: ``KEY=VALUE`` strings that replace values of the file.
    Raises:
        ConfigError: a number is out of range.
    """

    world_size: int
    gpus_per_node: int = 8
    model_config: str | Path | None = None
    model: ModelOrFunction | None = None
    microbatch: int | None = None
    sequence: int | None = None
    device: str = "cuda"
    overrides: Iterable[str] = ()

    def __post_init__(self) -> None:
        if type(self.world_size) is not int or not 1 <= self.world_size <= _MOST_RANKS:
            raise ConfigError(f"world size {self.world_size}; give the number of ranks, from 1 to {_MOST_RANKS}")
        sizes = {"microbatch": self.microbatch, "sequence": self.sequence, "gpus per node": self.gpus_per_node}
        for name, value in sizes.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} {value}; give a number from 1 on")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """A parsed configuration file.

    Args:
        document: The parsed document. Settings of DeepSpeed, in a referenced file or in this file, are translated to
            the system's keys.
        written: The document as on disk, without these changes.
        values: The document's values with overrides, and with interpolations resolved where possible.
        overrides: ``KEY=VALUE`` strings of the command line.
    """

    path: Path
    document: Document
    written: Document
    values: Mapping[str, Any]
    overrides: tuple[str, ...] = ()
    deepspeed: WithSettings | None = None

    @classmethod
    def read(cls, path: Path, overrides: Iterable[str] = ()) -> "RunFile":
        """Read and parse a file.

        Raises:
            ConfigError: the file does not exist or cannot be read; names it and the line.
        """
        overrides = tuple(overrides)
        if not path.is_file():
            raise ConfigError(f"{path} is a folder; give a file" if path.is_dir() else f"no such file: {path}")
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
        deepspeed = with_settings(document, partial(read_named, path.parent), to="composer", allow_unreferenced=True)
        if deepspeed is not None:
            document = open_document(deepspeed.text, str(path), deepspeed.suffix)
        values = _overridden(resolve(document.values).values, overrides)
        return cls(
            path=path, document=document, written=written, values=values, overrides=overrides, deepspeed=deepspeed
        )

    def placed(self, findings: Iterable[Finding]) -> tuple[Finding, ...]:
        """Return the findings with file and line. For keys that are not in the file, only the file is added."""
        placed = (replace(each, where=self._place(each.key)) for each in findings)
        if self.deepspeed is None:
            return tuple(placed)
        completed = self.deepspeed.findings_of_file(placed)
        return tuple(each for each in completed if each.outcome not in (Outcome.UNNEEDED, Outcome.EXACT))

    def _place(self, key: str) -> str:
        if any(each.partition("=")[0] == key for each in self.overrides):
            return "the command line"
        parts = tuple(key.split("."))
        paths = (parts[:depth] for depth in range(len(parts), 0, -1))
        path = next((each for each in paths if has_path(self.written.values, each)), None)
        return f"{self.path}:{self.written.line_of(path)}" if path else str(self.path)


def _overridden(values: Mapping[str, Any], overrides: tuple[str, ...]) -> Mapping[str, Any]:
    if not overrides:
        return values
    if wrong := [each for each in overrides if "=" not in each or not all(each.partition("=")[0].split("."))]:
        raise ConfigError(f"{wrong[0]} is neither an option nor KEY=VALUE")
    # May raise errors of OmegaConf or of its YAML parser, or TypeError if a list is merged with a mapping.
    with as_config_error(" ".join(overrides)):
        merged: Any = OmegaConf.merge(OmegaConf.create(dict(values)), OmegaConf.from_cli(list(overrides)))
        found: Any = OmegaConf.to_container(merged)
    return {str(key): value for key, value in found.items()}


@contextlib.contextmanager
def as_config_error(what: str) -> Iterator[None]:
    """Convert any error that another package raises in the block to a ConfigError: ``what`` and the error, on one line.

    For an error of the Hugging Face Hub's client, the message has the next step instead.
    """
    try:
        yield
    except ComposerFSDP2Error:
        raise
    except (Exception, SystemExit) as error:
        advice = hub_advice_of(error)
        why = f"{advice}; or plan from a local config.json (--model-config)" if advice else one_line(error)
        raise ConfigError(f"{what}: {why}") from error


def assumed(key: str, value: object, reason: str, hint: str = "") -> Finding:
    """Return the finding for a value that this package assumes, because the file does not set it."""
    return Finding(key=key, value=value, outcome=Outcome.APPROXIMATE, reason=reason, hint=hint, origin=Origin.IMPLICIT)
