"""Determine settings that ``--suggest`` must not change: they affect results, or a finding needs a decision first."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from composer_fsdp2.estimate.trace import num_experts
from composer_fsdp2.preflight.preflight_run import PreflightRun

# Keys of model configurations whose layers use random numbers without an nn.Dropout module. Classification and summary
# heads are not trained here.
_RANDOM = re.compile(r"(?!summary|classifier).*(dropout|pdrop|jitter)")


def fixed_settings(run: PreflightRun) -> dict[str, str]:
    """Map fields of ``Settings`` to the reason for not changing them. Of several reasons, the last is returned."""
    return dict(_reasons(run))


def _reasons(run: PreflightRun) -> Iterator[tuple[str, str]]:
    if any(finding.key.endswith("microbatch_size") and finding.value == "auto" for finding in run.findings):
        yield "microbatch_size", "the file sets auto; these numbers are for 1 row"
    if random_part := next(_random_parts(run.model), ""):
        yield "microbatch_size", f"{random_part} draws other random numbers for other microbatches"
    if num_experts(run.model) > 1:
        yield "microbatch_size", "what balances experts is summed up over a microbatch"
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in run.model.modules()):
        why = "batch norm takes its statistics of a microbatch, and of a recomputed one twice"
        yield from ((setting, why) for setting in ("microbatch_size", "activations"))
    blocking = next((each for each in (*run.translation.findings, *run.findings) if each.outcome.blocks), None)
    if blocking is not None:
        why = f"{blocking.key} needs a decision first"
        yield from ((setting, why) for setting in ("microbatch_size", "replicas"))


def _random_parts(model: nn.Module) -> Iterator[str]:
    """The parts of a model that use random numbers in training."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            yield f"dropout ({name})"
        config: Any = getattr(module, "config", None)
        values = config.to_dict() if hasattr(config, "to_dict") else config
        if isinstance(values, Mapping) and id(config) not in seen:
            seen.add(id(config))
            yield from _random_settings(values)


def _random_settings(config: Mapping[str, Any]) -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _random_settings(value)
        elif isinstance(value, int | float) and not isinstance(value, bool) and value > 0 and _RANDOM.match(str(key)):
            yield f"{key} of the model"
