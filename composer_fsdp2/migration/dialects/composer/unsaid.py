"""Findings for implicit defaults of FSDP1."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from composer_fsdp2.config.findings import Finding, Outcome
from composer_fsdp2.migration.dialect import Section, implicit
from composer_fsdp2.migration.dialects.composer.set_by_foundry import foundrys
from composer_fsdp2.migration.dialects.composer.surroundings import Given, clipping_of


def _is_argument_of_a_script(section: Section, around: Given) -> bool:
    return section.path[-1:] == ("fsdp_config",) and foundrys(around) is None


def _leaves_backward_prefetch(section: Section, around: Given) -> bool:
    return "backward_prefetch" not in section.given and "reshard_after_forward" not in section.given


def _casts(section: Section, around: Given) -> bool:
    return section.given.get("mixed_precision", "DEFAULT") != "FULL"


def _leaves_units_to_hooks(section: Section, around: Given) -> bool:
    return section.given.get("wrap_policy") is None


def _leaves_state_dict_type(section: Section, around: Given) -> bool:
    return "state_dict_type" not in section.given


def _clips_by_value(section: Section, around: Given) -> bool:
    return clipping_of(around).get("clipping_type") == "value"


_IN_PARALLELISM_CONFIG = implicit(
    "parallelism_config",
    Outcome.UNNEEDED,
    "Composer's Trainer has taken no argument fsdp_config since 0.26; a script hands the section over in "
    "parallelism_config, LLM Foundry does so by itself",
    value="fsdp_config",
    target="parallelism_config={'fsdp': ...}",
)
# fmt: off
_IMPLICIT: tuple[tuple[Callable[[Section, Given], bool], Finding], ...] = (
    (_leaves_backward_prefetch, implicit("backward_prefetch", Outcome.APPROXIMATE,
        "FSDP2 gathers the next unit before a unit's gradients, FSDP1 by default after: the same numbers, one more "
        "unit in memory at the peak",
        "backward_prefetch: NONE spares it, at the price of speed",
        value="BACKWARD_POST", target="FSDP2's own prefetch")),
    (_casts, implicit("casting of inputs and buffers", Outcome.EXACT,
        "as FSDP1 did; FSDP2 by itself casts each unit's inputs, and no buffer, which plain Composer leaves so",
        target="inputs cast at roots only, buffers cast")),
    (_leaves_state_dict_type, implicit("state_dict_type", Outcome.EXACT,
        "checkpoints are full ones, as FSDP1's were by default; plain Composer's FSDP2 saves sharded ones",
        "say state_dict_type: full to have it there, too",
        value="full", target="state_dict_type: full")),
    (_leaves_units_to_hooks, implicit("wrapping", Outcome.EXACT,
        "the same modules become units, each around its own checkpointing as under FSDP1; plain Composer puts the "
        "checkpointing outside",
        target="the model's fsdp_wrap_fn, _fsdp_wrap and activation_checkpointing_fn")),
    (_clips_by_value, implicit("clipping by value", Outcome.EXACT,
        "as under FSDP1; plain Composer's FSDP2 clips each element instead",
        "clipping_type: norm is the same everywhere",
        value="clipping_type: value", target="scaled by the largest absolute value")),
)
# fmt: on


def implicit_findings(
    section: Section, around: Given, set_by_foundry: Mapping[str, tuple[Any, str]]
) -> Iterator[Finding]:
    if _is_argument_of_a_script(section, around):
        yield _IN_PARALLELISM_CONFIG
    for name, (value, reason) in set_by_foundry.items():
        if name not in section.given:
            yield implicit(name, Outcome.EXACT, reason, value=value, target=f"{name}: {str(value).lower()}")
    yield from (finding for applies, finding in _IMPLICIT if applies(section, around))
