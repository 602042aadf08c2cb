"""Puts this folder on the path: ``composer`` is the package under test, so no helper can be ``composer.trainers``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # the ranks copy the parent's path
