"""``composer-fsdp2 checkpoint verify`` in a script: exit codes, stdout and stderr, JSON."""

from __future__ import annotations

import json

import pytest
import torch
from support.checkpoints.corruptions import CORRUPTIONS, FoundBy, prepared
from support.checkpoints.samples import LEGACY, write_safetensors
from support.commands import Ended, run_forked

pytestmark = pytest.mark.composer

VERIFY = ["checkpoint", "verify"]
FULL, SHARDED = (LEGACY / "c172" / kind for kind in ("full", "sharded"))


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    folder = tmp_path_factory.mktemp("verify")
    flipped = next(c for c in CORRUPTIONS if c.layout == "dcp" and c.found_by is FoundBy.CONTENT)
    whole, damaged = prepared(flipped, folder)
    (folder / "notes.txt").write_text("no checkpoint")
    state = torch.load(FULL / "ep0-ba3-rank0.pt", weights_only=False)
    for value in state["state"]["model"].values():
        value += 1e-4
    torch.save(state, folder / "near.pt")
    write_safetensors(folder / "model.safetensors", {"weight": torch.ones(2)})
    near = [folder / "near.pt", "--against", FULL]
    commands = {
        "whole": [*VERIFY, whole],
        "damaged": [*VERIFY, damaged],
        "damaged, json": [*VERIFY, damaged, "--json"],
        "no checkpoint": [*VERIFY, "notes.txt"],
        "near": [*VERIFY, *near],
        "near, tolerated": [*VERIFY, *near, "--atol", "1e-3"],
        "no checksums": [*VERIFY, "model.safetensors"],
        "help": [*VERIFY, "--help"],
    }
    return run_forked(commands, folder)


def test_exit_codes_and_what_is_said(ended: dict[str, Ended]):
    """A script stops on damage, and distinguishes it from a wrong path; another program reads the complete report.

    The verdict is on stdout with file, tensor, expected and found value; an unusable path is one line on stderr.
    """
    codes = {"damaged": 1, "damaged, json": 1, "no checkpoint": 2, "near": 1, "no checksums": 2}
    assert {name: command.code for name, command in ended.items()} == {name: codes.get(name, 0) for name in ended}
    assert ended["whole"].out.splitlines()[-1] == "ok" and ended["whole"].err == ""
    assert ".distcp: state.model.model.wte.weight" in ended["damaged"].out
    assert "expected CRC32" in ended["damaged"].out and ended["damaged"].out.splitlines()[-1] == "1 fault"
    assert ended["no checkpoint"].out == "" and ended["no checkpoint"].err.startswith("composer-fsdp2: ")
    assert "Traceback" not in ended["no checkpoint"].err and "notes.txt" in ended["no checkpoint"].err
    assert ended["no checksums"].out.splitlines()[-1].endswith("no content was checked: --against OTHER compares it")
    assert "the largest absolute difference is" in ended["near"].out
    assert ended["near, tolerated"].out.splitlines()[-1] == f"ok, equal to {FULL}"
    assert all(option in ended["help"].out for option in ("--against", "--rtol", "--atol", "--trust", "--json"))
    report = json.loads(ended["damaged, json"].out)
    assert report["ok"] is False and report["layout"] == "DCP directory" and report["num_bytes"] > 0
    (fault,) = report["faults"]
    assert fault["kind"] == "content" and "model.wte.weight" in fault["name"] and fault["file"].endswith(".distcp")
