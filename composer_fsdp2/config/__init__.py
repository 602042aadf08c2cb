"""Frozen values: what a run is to be, independent of any framework's key names. They import no torch."""

from composer_fsdp2.config.choices import Choice, ModelChoices, UnitOverrides
from composer_fsdp2.config.findings import Finding, Origin, Outcome, format_findings
from composer_fsdp2.config.mesh import AxisRole, GroupRule, MeshAxis, MeshSpec, RankGroups
from composer_fsdp2.config.sharding import (
    Accumulation,
    ActivationCheckpointing,
    GradientDtype,
    GradientSync,
    MixedPrecision,
    Prefetch,
    ShardingConfig,
)

__all__ = [
    "Accumulation",
    "ActivationCheckpointing",
    "AxisRole",
    "Choice",
    "Finding",
    "GradientDtype",
    "GradientSync",
    "GroupRule",
    "MeshAxis",
    "MeshSpec",
    "MixedPrecision",
    "ModelChoices",
    "Origin",
    "Outcome",
    "Prefetch",
    "RankGroups",
    "ShardingConfig",
    "UnitOverrides",
    "format_findings",
]
