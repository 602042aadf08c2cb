"""Puts this folder and that of Composer's tests on the path, and makes the data that Foundry's runs read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from ranks import run_ranks

# The ranks copy the parent's path.
sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "composer")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from runs import make_data_of_runs

    made = tmp_path_factory.mktemp("foundry")
    with mock.patch.dict("os.environ", {"TOKENIZERS_PARALLELISM": "false"}):
        run_ranks(make_data_of_runs, 2, str(made))
        yield str(made)
