"""How many examples a property gets: ``@examples(20)``, in place of hypothesis's ``settings``.

``make test`` draws as many, the same ones each time; ``make test-all`` (``THOROUGH=1``) ten times as many; and
``MORE_EXAMPLES=20`` twenty times as many, others in each run.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

IS_THOROUGH = os.environ.get("THOROUGH", "0") not in ("", "0")
THOROUGH_FACTOR = 10


def examples(number: int) -> settings:
    """A decorator. Nothing is kept between runs, and no example fails for being slow; one that is filtered out may."""
    factor = int(os.environ.get("MORE_EXAMPLES", "0"))
    return settings(
        derandomize=not factor,
        max_examples=number * (factor or (THOROUGH_FACTOR if IS_THOROUGH else 1)),
        deadline=None,
        database=None,
        print_blob=bool(factor),
        suppress_health_check=set(HealthCheck) - {HealthCheck.filter_too_much},
    )
