"""Helpers of the translation tests: ``from support.translations import ...``."""

from __future__ import annotations

from typing import Any

import pytest

from composer_fsdp2 import ConfigError, ShardingConfig, translate


def config_of(fsdp_config: object, **options: Any) -> ShardingConfig:
    return translate(fsdp_config, **{"device": "cpu", "world_size": 4, **options}).config


def finding_of(fsdp_config: dict[str, Any], key: str, **options: Any) -> Any:
    findings = translate(fsdp_config, **{"device": "cpu", "world_size": 4, **options}).findings
    return next(finding for finding in findings if finding.key == key)


def refused(fsdp_config: object, **options: Any) -> str:
    """The error's text."""
    with pytest.raises(ConfigError) as caught:
        translate(fsdp_config, **{"device": "cpu", "world_size": 4, **options})
    return str(caught.value)
