"""Values that are written as JSON and read back, such as the record of a compared run."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from comparing.test_judging import made_run

from composer_fsdp2.comparing.job import Engine, Job, Options
from composer_fsdp2.comparing.run_record import CollectiveCount, Override, Prediction, Settings
from composer_fsdp2.config.value import from_json, json_text


def test_a_value_is_read_as_it_was_written():
    """Three runs of hours are judged by these files: a changed tuple, nested value or infinity would be a verdict on
    another run."""
    count = CollectiveCount(op="all_gather", dtype="bfloat16", calls=3, num_bytes=12)
    settings = Settings(values={"lr": 1e-3, "betas.0": 0.9}, names=("w", "v"))
    record = replace(
        made_run(losses=(3.0, math.inf), distance=math.inf),
        collectives=(count,),
        settings=(settings,),
        overrides=(Override(name="a", given="1", used="2", why="three"),),
        findings=({"key": "k", "value": [1, None]},),
        prediction=Prediction(collectives=(count,), notes=("a note",)),
    )
    job = Job(
        title="FSDP2",
        engine=Engine.FSDP2,
        options=Options(file="run.yaml", arguments=("a=1", "b=2")),
        folder="logs",
        reference="tensors",
        writes_reference=False,
    )
    for value in (record, job):
        assert from_json(type(value), json_text(value)) == value
    assert json.loads(json_text(job))["engine"] == "FSDP2"
