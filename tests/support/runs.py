"""Runs independent of a system's keys: ``from support.runs import run_with``."""

from __future__ import annotations

import dataclasses
from typing import Any

from composer_fsdp2.config.sharding import MixedPrecision, ShardingConfig
from composer_fsdp2.config.wrap import Wrap
from composer_fsdp2.migration.run import RunConfig

OF_RUN, OF_CONFIG, OF_PRECISION = (
    {field.name for field in dataclasses.fields(kind)} for kind in (RunConfig, ShardingConfig, MixedPrecision)
)


def run_with(wrap: Wrap | None = None, **fields: Any) -> RunConfig:
    """A run with these fields, each set on the object that has it: the run, its configuration or its mixed
    precision."""
    assert fields.keys() <= OF_RUN | OF_CONFIG | OF_PRECISION, fields.keys() - OF_RUN - OF_CONFIG - OF_PRECISION
    dtypes = {name: value for name, value in fields.items() if name in OF_PRECISION}
    config = {name: value for name, value in fields.items() if name in OF_CONFIG}
    return RunConfig(
        config=ShardingConfig(mixed_precision=MixedPrecision(**dtypes), wrap=wrap or Wrap(), **config),
        **{name: value for name, value in fields.items() if name in OF_RUN},
    )
