"""Helpers of the conversion tests: ``from support.checkpoints.conversions import ...``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from composer_fsdp2.checkpoint.convert.conversion import ConversionReport, convert_checkpoint
from composer_fsdp2.checkpoint.convert.conversion_plan import ConversionPlan


def convert(source: Path, destination: Path, to: str, **options: Any) -> ConversionReport:
    report = convert_checkpoint(source, destination, to=to, **options)
    assert isinstance(report, ConversionReport)
    return report


def planned(source: Path, destination: Path, to: str, **options: Any) -> ConversionPlan:
    plan = convert_checkpoint(source, destination, to=to, dry_run=True, **options)
    assert isinstance(plan, ConversionPlan)
    return plan


def loaded(path: Path) -> Any:
    """Loaded by unmodified torch."""
    return torch.load(path, weights_only=False, map_location="cpu")


def loaded_folder(path: Path) -> Any:
    """Loaded by unmodified torch, with the optimizers at their place since torch 2.3, and without our list of empty
    dicts."""
    file = path.with_name(f"{path.name}.stock.pt")
    dcp_to_torch_save(path, file)
    value = loaded(file)
    if "optimizers" in value:
        value["state"]["optimizers"] = value.pop("optimizers")
    value.pop("composer_fsdp2", None)
    return value


def without_empty_dicts(value: Any) -> Any:
    """As stored in torch's folders."""
    if isinstance(value, dict):
        parts = {key: without_empty_dicts(part) for key, part in value.items()}
        return {key: part for key, part in parts.items() if part != {} or not isinstance(part, dict)}
    return value


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """All files in a folder: sizes and times."""
    return {str(p.relative_to(folder)): (p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(folder.rglob("*"))}


def staging_of(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}.converting")


class Normed(nn.Module):
    """Has buffers of the shape of its parameters, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight


def save_by_position(model: nn.Module, path: Path, groups: int = 1) -> torch.optim.Optimizer:
    """The file that Composer saved without FSDP."""
    parameters = list(model.parameters())
    split: Any = parameters if groups == 1 else [{"params": parameters[1:]}, {"params": parameters[:1]}]
    optimizer = torch.optim.Adam(split)
    sum(p.square().sum() for p in parameters).backward()  # type: ignore[union-attr]
    optimizer.step()
    torch.save({"state": {"model": model.state_dict(), "optimizers": {"Adam": optimizer.state_dict()}}}, path)
    return optimizer
