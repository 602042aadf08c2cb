"""What one of the compared runs is to do, handed to its ranks as a file."""

import enum
import json
from dataclasses import dataclass
from pathlib import Path

from composer_fsdp2.config.value import Value, json_text

RECORD_NAME = "record.json"


class Engine(enum.Enum):
    """What shards the model."""

    FSDP1 = "FSDP1"
    FSDP2 = "FSDP2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Value):
    """One run.

    Args:
        title: As the report calls it.
        file: A YAML of LLM Foundry's, or a script.
        arguments: The YAML's overrides, or the script's own arguments.
        load_path: In place of the file's own; "" leaves that.
        is_deterministic: Whether CUDA may choose only operators whose results repeat.
        folder: Where ranks leave their logs, and the first the record.
        reference: The first run's last tensors.
    """

    title: str
    engine: Engine
    file: str
    arguments: tuple[str, ...]
    batches: int
    seed: int
    load_path: str
    is_deterministic: bool
    folder: str
    reference: str

    @property
    def is_yaml(self) -> bool:
        return is_yaml(self.file)

    @property
    def makes_reference(self) -> bool:
        """Whether this is the run from which the others' tensors are measured."""
        return not Path(self.reference).exists()

    @property
    def record_path(self) -> Path:
        return Path(self.folder) / RECORD_NAME

    @property
    def progress_path(self) -> Path:
        return Path(self.folder) / "batches"

    def log_path(self, rank: int) -> Path:
        return Path(self.folder) / f"rank-{rank}.log"

    def write(self, path: Path) -> None:
        path.write_text(json_text(self))

    @classmethod
    def read(cls, path: Path) -> "Job":
        given = json.loads(path.read_text())
        return cls(**{**given, "engine": Engine(given["engine"]), "arguments": tuple(given["arguments"])})


def is_yaml(file: str) -> bool:
    return Path(file).suffix.lower() in (".yaml", ".yml")
