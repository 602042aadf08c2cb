"""One rank of a run that ``composer-fsdp2 compare`` starts: ``python -m composer_fsdp2.cli.compare_rank JOB.json``."""

import contextlib
import sys
from pathlib import Path


def main() -> None:
    from composer_fsdp2.comparing.job import Engine, Job
    from composer_fsdp2.compat import fsdp2
    from composer_fsdp2.compat.comparing import run_job

    job = Job.read(Path(sys.argv[1]))
    with fsdp2() if job.engine is Engine.FSDP2 else contextlib.nullcontext():
        run_job(job)


if __name__ == "__main__":
    main()
