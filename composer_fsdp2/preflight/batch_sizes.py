"""Rows of a microbatch, and microbatches of a batch, on one rank."""

import math
from typing import Any

from composer_fsdp2.config.findings import Finding
from composer_fsdp2.config.mesh import divisors_text
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.preflight.run_file import assumed

AUTO = "auto"
_KEY = "device_train_microbatch_size"


def batches_of(device_batch: int | float, microbatch: Any, given: int | None) -> tuple[int, int, list[Finding]]:
    """The rows of a microbatch and how many of them a rank's batch has, as Composer's Trainer divides it.

    Args:
        device_batch: A rank's rows of a batch.
        microbatch: The file's; ``auto`` is found out on the GPU.
        given: The command line's, which takes precedence.
    """
    findings = []
    rows = microbatch if given is None else given
    if rows == AUTO:
        rows = 1
        findings = [
            assumed(
                _KEY,
                AUTO,
                "which microbatch fits is tried out on the GPUs; 1 row is planned",
                "give one with --microbatch",
            )
        ]
    if not isinstance(rows, int | float) or rows <= 0:
        raise ConfigError(f"{_KEY} is {rows!r}; give a number of rows above 0, or auto")
    rows = max(int(min(rows, device_batch)), 1)  # a part of a row is the whole to the ranks that share it
    return rows, math.ceil(device_batch / rows), findings


def fitting_world_sizes(batch: int, world_size: int) -> str:
    """Numbers of ranks over which a batch can be divided: the nearest below and above."""
    divisors = [number for number in range(1, batch + 1) if batch % number == 0]
    near = [
        *[each for each in divisors if each < world_size][-1:],
        *[each for each in divisors if each > world_size][:1],
    ]
    return " or ".join(map(str, near)) or divisors_text(batch)
