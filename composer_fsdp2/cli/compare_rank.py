"""One rank of a run that ``composer-fsdp2 compare`` starts: ``python -m composer_fsdp2.cli.compare_rank JOB.json``."""

import sys
from pathlib import Path


def main() -> None:
    from composer_fsdp2.comparing.job import Job
    from composer_fsdp2.compat.comparing import run_job

    run_job(Job.read(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
