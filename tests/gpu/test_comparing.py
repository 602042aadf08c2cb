"""``composer-fsdp2 compare`` on GPUs: the same command as on a CPU, and its verdict."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands import SCRIPT
from support.comparisons import compare_all
from support.gpus import Ranks, Recorder, on_gpus

pytestmark = [pytest.mark.composer, pytest.mark.timeout(1200)]


@on_gpus(2, packages=("mosaicml",), rehearsal=0)  # tests/compat/test_comparing.py has the CPU version
def test_the_same_run_is_told_so(ranks: Ranks, tmp_path: Path, record_property: Recorder):
    """A verdict from a laptop also applies on the training machine: the same data, state and numbers."""
    script = ["--optimizer", "adamw", "--microbatch", "2", "--clip", "0.1", "--device", "gpu"]
    # Without a precision in the script, Composer trains in fp16 on a GPU.
    options = ["-n", ranks.number, "--batches", 4, "--tolerance", "1e-3"]
    it = compare_all({"it": [SCRIPT, *options, "--", *script]}, tmp_path)["it"]
    assert it.ended.code == 0, f"{it.ended.out}\n{it.ended.err}"
    assert it.report["verdict"] == "same"
    fsdp1, fsdp2, _ = it.report["runs"]
    assert any(each["name"] == "deterministic_mode" for each in fsdp2["overrides"])
    assert "allocator" in fsdp1["memory_is"]
    cells = {each["name"]: str(each["distance"]) for each in it.report["quantities"]}
    ranks.record(record_property, "compare", cells)
