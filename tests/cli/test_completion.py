"""Shell completion of the command line, once a user has installed it."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from composer_fsdp2.checkpoint.layouts import LAYOUTS

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120
COMMAND = f"""#!{sys.executable}
import sys
sys.path.insert(0, {str(ROOT)!r})
from composer_fsdp2.cli.main import main
main()
"""
# The text before the tab, and after it.
COMPLETED = {
    "composer-fsdp2 mig": "composer-fsdp2 migrate ",
    "composer-fsdp2 migrate sett": "composer-fsdp2 migrate settings.yaml ",
    "composer-fsdp2 checkpoint convert a b --to mono": "composer-fsdp2 checkpoint convert a b --to monolithic ",
    "composer-fsdp2 explain limit_all": "composer-fsdp2 explain limit_all_gathers ",
    "composer-fsdp2 explain x --dialect tor": "composer-fsdp2 explain x --dialect torchtitan ",
    "composer-fsdp2 run sett": "composer-fsdp2 run settings.yaml ",
}


class Shell:
    """An interactive bash with its own home folder."""

    def __init__(self, home: Path) -> None:
        path = f"{home / 'bin'}:/usr/bin:/bin"
        variables = {"HOME": str(home), "PATH": path, "TERM": "dumb", "PYTHONPATH": str(home / "no_torch")}
        self.process, self.terminal = pty.fork()
        if self.process == 0:
            os.chdir(home)
            os.execvpe("bash", ["bash", "--noprofile", "--norc", "-i"], variables)

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def wait_for(self, text: str) -> None:
        """Reads the output until it contains the text."""
        seen, deadline = "", time.monotonic() + TIMEOUT_S
        while text not in seen:
            assert time.monotonic() < deadline, f"{text!r} did not come: {seen!r}"
            if select.select([self.terminal], [], [], 0.5)[0]:
                seen += re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]|\r|\x07", "", os.read(self.terminal, 4096).decode())


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    for folder in ("bin", "no_torch"):
        (tmp_path / folder).mkdir()
    (tmp_path / "settings.yaml").touch()
    (tmp_path / "no_torch" / "torch.py").write_text("raise SystemExit('a word waited for torch')\n")
    (tmp_path / "bin" / "composer-fsdp2").write_text(COMMAND)
    (tmp_path / "bin" / "composer-fsdp2").chmod(0o755)
    shell = Shell(tmp_path)
    try:
        yield shell
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(shell.process, signal.SIGKILL)
        os.waitpid(shell.process, 0)
        os.close(shell.terminal)


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_bash_completes_verbs_options_values_and_files(shell: Shell):
    """After `--install-completion`, tab completes verbs, options, values and paths."""
    shell.type("composer-fsdp2 --install-completion\n")
    shell.wait_for("bash completion installed in ")
    shell.type("source ~/.bashrc; echo sour''ced\n")
    shell.wait_for("sourced")
    for typed, completed in COMPLETED.items():
        shell.type(f"{typed}\t")
        shell.wait_for(completed)
        shell.type("\x15")  # deletes the line


def test_the_layouts_that_are_offered_can_be_written():
    """Completion and help list the layouts without torch, which the layouts' files import."""
    from composer_fsdp2.cli import checkpoint_convert

    assert {*checkpoint_convert._LAYOUTS} == {layout.written.name for layout in LAYOUTS if layout.written}
