"""Keys beside the section.

Source of the releases that accept them: the Trainer's signature in mosaicml 0.11 to 0.32.1.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from composer_fsdp2.config.findings import Finding, Outcome
from composer_fsdp2.config.rows import POSITIVE_INT, Row, idle, takes_if, undecided
from composer_fsdp2.migration.dialect import Section
from composer_fsdp2.migration.dialects.composer.surroundings import Given

BESIDE = "beside fsdp_config"
_DEGREE = "tensor_parallel_degree"
_TENSOR = takes_if(
    "a mapping with tensor_parallel_degree",
    lambda value: isinstance(value, Mapping) and POSITIVE_INT.fits(value.get(_DEGREE, 1)),
)


def tensor_degree(section: Section, around: Given) -> int:
    """Return the number of ranks over which layers are split."""
    given: Given = next((value for _, value in _given_beside(_ROWS_BY_NAME["tp_config"], section, around)), {})
    return given.get(_DEGREE, 1) if _TENSOR.fits(given) else 1


def _tensor(finding: Finding, section: Section) -> Finding:
    given: Any = finding.value
    if not _TENSOR.fits(given):
        return undecided(finding, f"it takes {_TENSOR.text}, a number from 1 on")
    if given.get(_DEGREE, 1) == 1:
        return idle(finding, "one rank, as where no degree is given, splits no layer; Composer turns it off")
    if given.get("strategy") == "ffn":
        return replace(
            finding,
            outcome=Outcome.APPROXIMATE,
            reason="FSDP1 trained the ranks that split a layer apart, each on data of its own; here they train as one "
            "process does, on what all of them read; the gate_proj of a GLU is split as well",
            hint="broadcast_batch: first, if they read the same",
        )
    return finding


# fmt: off
BESIDE_ROWS: tuple[Row, ...] = (
    Row(name="tp_config", group=BESIDE, aliases=("parallelism_config.tp",), outcome=Outcome.EXACT,
        nested=("tensor_parallel_degree", "layer_plan", "strategy"),
        target="tp_config", takes=_TENSOR, decide=_tensor,
        meaning="tensor parallelism: over how many ranks layers are split (tensor_parallel_degree), and by which layer "
        "plan, LLM Foundry's strategy or a script's layer_plan",
        reason="layers are split by the same plan, before the model is sharded",
        hint="the ranks that split a layer must read one batch: they compare it, and broadcast_batch lets them share "
        "what they read",
        elsewhere="plain Composer 0.32.1's FSDP2 fails with it if there is an optimizer"),
    Row(name="deepspeed_config", group=BESIDE, outcome=Outcome.UNSUPPORTED,
        reason="DeepSpeed instead of FSDP; Composer's Trainer has had no such argument since 0.28",
        hint="remove it; its ZeRO stage 3 is sharding_strategy FULL_SHARD, stage 2 SHARD_GRAD_OP"),
    Row(name="fsdp_auto_wrap", group=BESIDE, outcome=Outcome.NEEDS_DECISION, neutral=(True,),
        reason="the script wrapped the model itself (Composer's Trainer took it from 0.14 to 0.25)",
        hint="remove it, and the Trainer shards the model; or let the script call prepare_fully_shard before"),
    Row(name="grad_accum", group=BESIDE, outcome=Outcome.NEEDS_DECISION,
        reason="Composer's Trainer has had no such argument since 0.14",
        hint="device_train_microbatch_size: the batch of one rank divided by it"),
)
# fmt: on
_ROWS_BY_NAME = {row.name: row for row in BESIDE_ROWS}


def findings_beside(section: Section, around: Given) -> Iterator[Finding]:
    """Yield a finding for each key of ``BESIDE_ROWS`` in the file: keys outside the section that affect parallelism."""
    for row in BESIDE_ROWS:
        for key, value in _given_beside(row, section, around):
            finding = row.usual(key, dict(value) if isinstance(value, Mapping) else value)
            finding = idle(finding) if row.is_neutral(value) else finding
            yield finding if row.decide is None else row.decide(finding, section)


def _given_beside(row: Row, section: Section, around: Given) -> Iterator[tuple[str, Any]]:
    """Yield each name under which the row's key is set, with its value."""
    is_alone = section.path[-2:-1] == ("parallelism_config",)
    short_names = [alias.rpartition(".")[2] for alias in row.aliases] if is_alone else []
    for key in (row.name, *short_names):
        value = around.get(key)
        if value is not None and value != {}:
            yield key, value
