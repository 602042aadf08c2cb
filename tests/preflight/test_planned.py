"""The report on a step, as one object and as text; tests/estimate/ tests its trace and its page."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from support.planned_runs import planned_run

from composer_fsdp2.config.findings import Finding, Outcome
from composer_fsdp2.config.sizes import Reserve
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.estimate.bounds import GPUS
from composer_fsdp2.estimate.plan_text import plan_text
from composer_fsdp2.estimate.planned_step import SCHEMA, Memory, PlannedStep
from composer_fsdp2.preflight.planned import StepOptions, plan_step
from composer_fsdp2.preflight.preflight_run import OptimizerChoice

ALL = StepOptions(memory=Memory(given_bytes=2**20, reserve=Reserve(share=0, fixed_bytes=0)), machine=GPUS["h100"])
BLOCK, ROOT = 4 * 280, 4 * 400  # bytes of a unit


@pytest.fixture(scope="module")
def step() -> PlannedStep:
    return plan_step(planned_run(), "run.yaml", ALL)


def object_of(step: PlannedStep) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(step.to_json(), allow_nan=False))
    jsonschema.validate(found, json.loads(SCHEMA.read_text()))
    return found


def test_the_object(step: PlannedStep):
    """Fields that scripts rely on, computed by hand: 960 parameters in fp32 on four ranks, AdamW, two microbatches."""
    jsonschema.Draft202012Validator.check_schema(json.loads(SCHEMA.read_text()))
    found = object_of(step)
    full = 2 * BLOCK + ROOT
    num_parameters = len(list(planned_run().model.parameters()))
    assert found["run"]["parameters"] * 4 == full
    per_rank = found["per_rank"]
    assert per_rank["parameters_bytes"] == per_rank["gradients_bytes"] == full // 4
    assert per_rank["optimizer_bytes"] == 2 * full // 4 + 4 * num_parameters
    assert sum(per_rank["peak"]["bytes"].values()) == per_rank["peak_bytes"]
    assert per_rank["activations_bytes"] > 0
    assert [(each["name"], each["parameters"], each["bytes"]) for each in found["units"]] == [
        ("decoder.blocks.0", 280, BLOCK),
        ("decoder.blocks.1", 280, BLOCK),
        ("decoder", 400, ROOT),
    ]
    names = ("op", "phase", "calls", "bytes", "ranks", "link")
    assert [tuple(each[name] for name in names) for each in found["collectives"]] == [
        ("all_gather", "forward", 6, 2 * full, 4, "intra"),
        ("all_gather", "backward", 4, 4 * BLOCK, 4, "intra"),
        ("reduce_scatter", "backward", 6, 2 * full, 4, "intra"),
    ]
    assert found["fits"] is True and found["exit_code"] == 0


def test_what_was_not_asked_is_null():
    """Unknown values are null: without a memory limit whether it fits, without a trace the size of activations."""
    found = object_of(plan_step(planned_run(), "run.yaml", StepOptions(counts_activations=False)))
    per_rank = found["per_rank"]
    assert [found["fits"], found["memory"], found["bounds"]] == [None] * 3
    assert [per_rank["activations_bytes"], per_rank["loss_bytes"]] == [None, None]
    assert found["exit_code"] == 0 and "no model was traced" in " ".join(found["notes"])


def test_the_reserve_decides(step: PlannedStep):
    """A step that exactly fills the memory fits; with a byte less, or a reserve, it does not."""
    peak = step.estimate.peak_bytes
    nothing, a_byte = Reserve(share=0, fixed_bytes=0), Reserve(share=0, fixed_bytes=1)
    for memory, fits in (
        (Memory(given_bytes=peak, reserve=nothing), True),
        (Memory(given_bytes=peak - 1, reserve=nothing), False),
        (Memory(given_bytes=peak, reserve=a_byte), False),
    ):
        asked = replace(step, memory=memory)
        assert (asked.fits, asked.exit_code, object_of(asked)["fits"]) == (fits, int(not fits), fits)
        assert ("does not fit" in plan_text(asked)) is not fits


def test_a_finding_that_blocks(step: PlannedStep):
    """It is the first finding in the text, and sets the exit code."""
    finding = Finding(key="fsdp_config.x", value=1, outcome=Outcome.NEEDS_DECISION, reason="nobody knows")
    asked = replace(step, findings=(*step.findings, finding))
    assert asked.exit_code == 1 and object_of(asked)["exit_code"] == 1
    said = [line for line in plan_text(asked).splitlines() if line.startswith("finding: ")]
    assert said[0].startswith("finding: fsdp_config.x: 1 needs a decision: nobody knows")


def test_an_optimizer_that_nobody_knows():
    """Its state is not ignored: AdamW's size is assumed, and a finding reports it."""
    run = planned_run(optimizer=OptimizerChoice(name="my_optimizer", options={}))
    step = plan_step(run, "run.yaml", StepOptions(counts_activations=False))
    (finding,) = (each for each in step.findings if each.value == "my_optimizer")
    assert "AdamW's state is counted" in finding.reason and step.estimate.optimizer_bytes > 0


def test_a_model_that_cannot_be_traced():
    """One line, with the way out."""

    def loss(*_: object) -> Any:
        raise RuntimeError("no kernel\nmore of it")

    with pytest.raises(ConfigError, match=r"run\.yaml: --no-activations plans .*: RuntimeError: no kernel"):
        plan_step(replace(planned_run(), loss=loss), "run.yaml", StepOptions())


def test_the_text_fits_a_screen(step: PlannedStep):
    """With all options, and with a name that contains terminal control characters."""
    lines = plan_text(replace(step, source="run\x1b[31m.yaml")).splitlines()
    assert max(map(len, lines)) <= 100 and len(lines) <= 45
    assert "\x1b" not in "".join(lines)
    words = "\n".join(lines)
    for said in (
        "960 parameters in 3 units on 4 ranks",
        "decoder.blocks.*",
        "exposed communication",
        "verdict: fits",
    ):
        assert said in words, words
    assert "Not known: " in words
