"""The entry point of each rank in ``composer-fsdp2 compare``: ``python -m composer_fsdp2.cli.compare_rank
JOB.json``."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composer_fsdp2.comparing.counted_batch import CountedBatch
    from composer_fsdp2.comparing.run_record import Prediction


def main() -> None:
    from composer_fsdp2.comparing.job import Engine, Job
    from composer_fsdp2.compat import fsdp2
    from composer_fsdp2.compat.comparing import run_job
    from composer_fsdp2.config.value import from_json

    job = from_json(Job, Path(sys.argv[1]).read_text())
    with fsdp2() if job.engine is Engine.FSDP2 else contextlib.nullcontext():
        run_job(job, _predict)


def _predict(batch: CountedBatch) -> Prediction:
    from composer_fsdp2.preflight.compared_batch import predict_batch  # on one rank of one run

    return predict_batch(batch)


if __name__ == "__main__":
    main()
