"""The data for Foundry's runs."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
from support.ranks import run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from support.foundry_runs import make_data_of_runs

    made = tmp_path_factory.mktemp("foundry")
    with mock.patch.dict("os.environ", {"TOKENIZERS_PARALLELISM": "false"}):
        run_ranks(make_data_of_runs, 2, str(made))
        yield str(made)
