"""``composer-fsdp2 compare`` of a file that trains no batches: what failed, where its log is, and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands import SCRIPT
from support.comparisons import Compared, compare_all

pytestmark = [pytest.mark.composer, pytest.mark.foundry]

# By its name a script, its own arguments, and what is said of it.
FAILING = {
    "raises": ("raise ValueError('the script failed')\n", [], "ValueError: the script failed"),
    "no-fit": ("print('nothing to do')\n", [], "ended without Trainer.fit; there is nothing to compare"),
    "unsharded": (
        SCRIPT.read_text().replace('parallelism_config={"fsdp"', 'profiler=None and {"fsdp"'),
        [],
        "needs an fsdp_config",
    ),
    # Composer's Trainer begins one epoch after the other.
    "empty-loader": (
        SCRIPT.read_text()
        .replace("(n: int = 96)", "(n: int = 6)")
        .replace("batch_size=4,", "batch_size=4, drop_last=True,", 1),
        [],
        "trained no batch in two epochs",
    ),
}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compared]:
    folder = tmp_path_factory.mktemp("failing")
    commands = {}
    for name, (source, arguments, _) in FAILING.items():
        (folder / f"{name}.py").write_text(source)
        commands[name] = [folder / f"{name}.py", *arguments]
    return compare_all(commands, folder)


@pytest.mark.parametrize("name", FAILING)
def test_a_run_that_fails_tells_where_its_log_is(compared: dict[str, Compared], name: str, tmp_path: Path):
    """The reason is in the terminal, not in one of six logs; and a run that failed is not taken for a different one."""
    it = compared[name]
    assert it.ended.code == 2, it.ended.err
    assert it.report["verdict"] == "unusable"
    assert FAILING[name][2] in it.ended.err and FAILING[name][2] in it.report["error"]
    assert f"{name}/logs/fsdp1/rank-" in it.ended.err
    assert ".partial" not in it.ended.err
