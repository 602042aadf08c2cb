"""The user's options, and the job of each run, which its ranks read from a file."""

import enum
from dataclasses import dataclass
from pathlib import Path

from composer_fsdp2.config.value import Value

TOLERANCE = 1e-6  # relative


class Engine(enum.Enum):
    """What shards the model."""

    FSDP1 = "FSDP1"
    FSDP2 = "FSDP2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Value):
    """The options of a comparison, from the command line.

    Args:
        file: A training YAML of LLM Foundry, or a script.
        arguments: Overrides of the YAML's keys, or the script's own arguments.
        repeat: The number of additional runs on FSDP1, for the noise floor.
        load_path: The checkpoint to start from; "" uses the file's own.
        is_deterministic: Whether CUDA runs deterministic kernels only.
    """

    file: str
    arguments: tuple[str, ...] = ()
    num_ranks: int = 2
    batches: int = 10
    repeat: int = 1
    seed: int = 17
    tolerance: float = TOLERANCE
    load_path: str = ""
    is_deterministic: bool = True

    @property
    def is_yaml(self) -> bool:
        return Path(self.file).suffix.lower() in (".yaml", ".yml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Value):
    """The settings of one run.

    Args:
        title: Its name in the report.
        folder: Where ranks write their logs, and rank 0 the record.
        reference: The folder with the first run's tensors, with which the other runs' tensors are compared.
        writes_reference: Whether this is the first run.
    """

    title: str
    engine: Engine
    options: Options
    folder: str
    reference: str
    writes_reference: bool

    @property
    def record_path(self) -> Path:
        return Path(self.folder, "record.json")

    @property
    def progress_path(self) -> Path:
        return Path(self.folder, "batches")

    @property
    def path(self) -> Path:
        """Of the job itself."""
        return Path(self.folder, "job.json")

    def log_path(self, rank: int) -> Path:
        return Path(self.folder, f"rank-{rank}.log")
