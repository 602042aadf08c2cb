"""The number of examples of a property: ``@examples(20)``, instead of hypothesis's ``settings``.

``make test`` runs this number, the same examples each time; ``make test-all`` (``THOROUGH=1``) ten times as many; and
``MORE_EXAMPLES=20`` twenty times as many, different in each run.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

IS_THOROUGH = os.environ.get("THOROUGH", "0") not in ("", "0")
THOROUGH_FACTOR = 10


def examples(number: int) -> settings:
    """A decorator. Examples are not stored between runs, and slow ones do not fail; too many filtered ones do."""
    factor = int(os.environ.get("MORE_EXAMPLES", "0"))
    return settings(
        derandomize=not factor,
        max_examples=number * (factor or (THOROUGH_FACTOR if IS_THOROUGH else 1)),
        deadline=None,
        database=None,
        print_blob=bool(factor),
        suppress_health_check=set(HealthCheck) - {HealthCheck.filter_too_much},
    )
