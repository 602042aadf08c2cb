"""The results of inspect for any path; it neither reads tensors nor runs pickles."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import stat
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from support.checkpoints.samples import FIXTURES, LEGACY, bytes_read, leaves

from composer_fsdp2 import CheckpointError, inspect_checkpoint, verify_checkpoint
from composer_fsdp2.checkpoint.describe import as_data, as_text
from composer_fsdp2.checkpoint.open import NotACheckpointError, find, inventory_of

pytestmark = pytest.mark.any_torch

# --- only metadata


def test_gigabytes_are_inspected_in_well_under_a_second(tmp_path: Path):
    """A checkpoint of any size is described from its directory: this one has 6 GiB of sparse tensors."""
    path, num_bytes = tmp_path / "big.pt", 6 << 30
    with torch.serialization.skip_data():
        torch.save({"state": {"model": {"w": torch.empty(num_bytes // 4)}}}, path)
    started, before = time.process_time(), bytes_read()
    inventory = inspect_checkpoint(path)
    assert bytes_read() - before < 1_000_000 and time.process_time() - started < 1
    assert {name: record.num_bytes for name, record in inventory.model.items()} == {"w": num_bytes}
    assert inventory.num_bytes > num_bytes


@pytest.mark.parametrize("error", [KeyError("params"), TypeError("no"), RecursionError("too deep")])
def test_what_no_layout_foresaw_is_our_error_too(error: Exception):
    """A bare KeyError would name neither the file nor a next step."""

    def read(path: Path, trust: bool) -> Any:
        raise error

    found = find(LEGACY / "c172" / "full")
    layout = dataclasses.replace(found.layout, read=read)
    with pytest.raises(CheckpointError, match=r"ep0-ba3-rank0\.pt: damaged, or not monolithic"):
        inventory_of(dataclasses.replace(found, layout=layout))


def test_values_that_composer_never_wrote_do_not_hide_the_rest(tmp_path: Path):
    """A timestamp or metadata of another type does not hide the weights."""
    state = {"metadata": {"composer_env_info": 3, "world_size": "x"}, "timestamp": [1], 7: 8}
    torch.save({"state": {**state, "model": {None: torch.ones(1)}}, 5: 6}, tmp_path / "x.pt")
    inventory = inspect_checkpoint(tmp_path / "x.pt")
    assert "[1]" in as_text(inventory) and len(as_data(inventory)["tensors"]) == 1


# --- files that are no checkpoints


def write_bytes(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


def write_zip(*names: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            for name in names:
                archive.writestr(name, b"x")

    return write


def write_folder(*names: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.mkdir()
        for name in names:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(b"x")

    return write


def write_pipe(name: str) -> Callable[[Path], None]:
    """A function that writes a folder with a named pipe, whose reader would block forever."""

    def write(path: Path) -> None:
        (path / name).parent.mkdir(parents=True)
        os.mkfifo(path / name)

    return write


def write_script(path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), str(path))


FOREIGN: dict[str, tuple[Callable[[Path], None], str]] = {
    "legacy.pt": (
        lambda path: torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False),
        r"known layout; it begins with b'\\x80",
    ),
    "arrays.npz": (lambda path: numpy.savez(path, a=numpy.ones(2)), r"begins with b'PK"),
    "scripted.pt": (write_script, r"begins with b'PK"),
    "model.gguf": (write_bytes(b"GGUF\3\0\0\0"), "begins with b'GGUF"),
    "model.h5": (write_bytes(b"\x89HDF\r\n\x1a\n"), r"begins with b'\\x89HDF"),
    "lfs.safetensors.pt": (write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n"), "git-lfs"),
    "run.yaml": (write_bytes(b"model:\n  name: mpt\n"), r"b'model:"),
    "page.zip": (write_zip("a/b.txt", "c"), r"b'PK.*a/b\.txt"),
    "empty.pt": (write_bytes(b""), "empty"),
    "nameless": (
        write_bytes((62).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}' + b" " * 12),
        "dtype",
    ),
    "pipe.pt": (os.mkfifo, "a pipe, a socket or a device"),
    "socket.pt": (lambda path: os.mknod(path, stat.S_IFSOCK | 0o600), "a pipe, a socket or a device"),
    "run": (write_pipe("ep0-ba3-rank0.pt"), "a pipe, a socket or a device"),
    "run of files": (write_pipe("ep0-ba3/ep0-ba3-rank0.pt"), "a pipe, a socket or a device"),
    "nothing": (write_folder(), "holds nothing"),
    "source": (write_folder("a.py", "b.py"), r"holds a\.py, b\.py"),
    "global_step3": (write_folder("mp_rank_00_model_states.pt"), r"holds mp_rank_00_model_states\.pt"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", FOREIGN)
def test_anything_else_is_refused_by_what_it_holds(tmp_path: Path, name: str):
    """For a wrong path, the error shows the first bytes of the file or the contents of the folder."""
    write, message = FOREIGN[name]
    write(tmp_path / name)
    with pytest.raises(NotACheckpointError, match=message) as caught:
        inspect_checkpoint(tmp_path / name)
    assert name in str(caught.value)


@pytest.mark.parametrize("path", ["x\0y", "a" * 5000, "/dev/zero", "/dev/null"])
def test_paths_that_cannot_be_are_refused(path: str):
    """An invalid path raises our error, not a Python traceback."""
    with pytest.raises(NotACheckpointError):
        inspect_checkpoint(path)


# --- the report

EVERY_LAYOUT = [
    LEGACY / "c172" / "full",
    LEGACY / "c172" / "local-flat",
    LEGACY / "c220" / "sharded-mesh",
    FIXTURES / "per-rank-checkpoints" / "sharded-rank0.pt",
    FIXTURES / "per-rank-checkpoints" / "local-rank0.pt",
]


@pytest.mark.parametrize("path", EVERY_LAYOUT, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_report_names_every_tensor(path: Path):
    """The report has each tensor's shape, dtype and size, and the total size of the files, as text and as JSON."""
    inventory = inspect_checkpoint(path)
    text, data = as_text(inventory), json.loads(json.dumps(as_data(inventory), allow_nan=False))
    assert data["num_bytes"] == sum(Path(file["path"]).stat().st_size for file in data["files"])
    records = {tensor["name"]: tensor for tensor in data["tensors"]}
    assert len(records) == len(data["tensors"]) >= len(inventory.tensors)
    for record in inventory.tensors.values():
        assert records[record.name]["shape"] == list(record.shape)
        assert records[record.name]["num_bytes"] == record.numel * record.dtype.itemsize
        (line,) = [line for line in text.splitlines() if line.startswith(record.name + " ")]
        assert str(list(record.shape)) in line and str(record.dtype).removeprefix("torch.") in line
    if path.name == "sharded-rank0.pt":  # rows over two ranks
        weight = {"offsets": [0, 0], "sizes": [3, 3]}, {"offsets": [3, 0], "sizes": [2, 3]}
        assert records["state.model.model.weight"]["chunks"] == [*weight] and "2 along dim 0" in text


def test_report_of_a_file_agrees_with_torch_load():
    """Step, hyperparameters and RNG states equal the values that torch reads from the same file."""
    path = LEGACY / "c172" / "full" / "ep0-ba3-rank0.pt"
    state = torch.load(path, weights_only=False)
    group = state["state"]["optimizers"]["DecoupledAdamW"]["param_groups"][0]
    data = as_data(inspect_checkpoint(path))
    timestamp = state["state"]["timestamp"]["Timestamp"]
    assert data["timestamp"]["batch"] == timestamp["batch"]
    assert data["timestamp"]["total_wct"] == timestamp["total_wct"].total_seconds()
    assert data["optimizers"][0]["param_groups"][0]["lr"] == group["lr"]
    assert data["optimizers"][0]["param_groups"][0]["params"] == group["params"]
    names = {".".join(map(str, entry)) for entry, value in leaves(state) if isinstance(value, torch.Tensor)}
    assert {tensor["name"] for tensor in data["tensors"]} == names
    text = as_text(inspect_checkpoint(path), max_tensors=3)
    assert f"lr {group['lr']}" in text and f"random states of {len(state['rng'])} ranks" in text
    assert "Composer 0.17.2" in text and f"batch {timestamp['batch']}" in text
    assert f"{len(names) - 3} more" in text


def fit_of(path: Path, model: torch.nn.Module) -> tuple[bool, str]:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fit = inspect_checkpoint(path, model=model).fit
    assert fit is not None and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return fit.fits, fit.text


def test_says_whether_and_how_it_loads_into_a_model(tmp_path: Path):
    """Before ranks start, the report shows which names the load uses and every mismatch; the model is unchanged."""
    weights = {f"module.{name}": value.detach() for name, value in torch.nn.Linear(3, 2).state_dict().items()}
    path = tmp_path / "ddp.pt"
    torch.save({"state": {"model": weights}, "rng": []}, path)
    assert inspect_checkpoint(path).fit is None
    assert fit_of(path, torch.nn.Linear(3, 2)) == (True, "2 tensors of the model, 2 renamed")
    fits, text = fit_of(path, torch.nn.Linear(4, 2, bias=False))
    assert not fits and all(message in text for message in ("weight", "(2, 3)", "(2, 4)", "bias")), text
    data = as_data(inspect_checkpoint(path, model=torch.nn.Linear(4, 2)))
    assert data["fit"]["fits"] is False and "(2, 4)" in data["fit"]["text"]
    assert "it fits" in as_text(inspect_checkpoint(path, model=torch.nn.Linear(3, 2)))


def test_names_in_a_file_cannot_write_to_the_terminal(tmp_path: Path):
    """An escape sequence in a parameter's name is printed, not interpreted."""
    torch.save({"a\x1b[2Jb\n": torch.ones(1)}, tmp_path / "x.pt")
    text = as_text(inspect_checkpoint(tmp_path / "x.pt"))
    assert "\x1b" not in text and r"a\x1b[2Jb" in text


# --- output encodings


class Terminal(io.TextIOWrapper):
    """A terminal; other outputs are UTF-8 in any locale."""

    def isatty(self) -> bool:
        return True


def printed_by(*arguments: str) -> tuple[int, str]:
    """The exit code and the output of ``composer-fsdp2`` on an ASCII-only terminal."""
    from composer_fsdp2.cli import main as cli

    terminal = Terminal(io.BytesIO(), encoding="ascii", errors="strict")
    with (
        mock.patch.object(sys, "argv", ["composer-fsdp2", *arguments]),
        mock.patch.object(sys, "stdout", terminal),
        mock.patch.object(sys, "stderr", terminal),
    ):
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        terminal.flush()
    return code, terminal.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]


def test_names_that_a_terminal_cannot_show(tmp_path: Path):
    """In a container without a locale each command ended with a UnicodeEncodeError, on names and on our own arrows."""
    path = tmp_path / "gr\u00fcn.pt"
    weights = {"w": torch.ones(3), "\u00e9.weight": torch.ones(2), "half \ud800": torch.ones(1)}
    torch.save({"state": {"model": weights, "run_name": "\u00fc"}}, path)
    for verb in (["inspect"], ["inspect", "--json"], ["verify"], ["verify", "--json"]):
        code, text = printed_by("checkpoint", verb[0], str(path), *verb[1:])
        assert code == 0 and (r"\xfc" in text or r"\u00fc" in text), text
    for to, options in (("dcp", ["--dry-run"]), ("safetensors", ["--dry-run", "--json"]), ("monolithic", [])):
        code, text = printed_by(
            "checkpoint", "convert", str(path), str(tmp_path / f"\u00fc-{to}"), "--to", to, *options
        )
        assert code == 0, text
    assert verify_checkpoint(tmp_path / "\u00fc-monolithic").ok
    code, text = printed_by("checkpoint", "inspect", str(tmp_path / "\u00fc.pt"))
    assert code == 2 and r"\xfc.pt: no such file" in text


@pytest.mark.parametrize("where", ["lr", "a key", "timestamp"])
def test_a_number_that_python_does_not_write(where: str, tmp_path: Path):
    """Printing an integer of more than 4,300 digits, such as lr=10**5000, raised a ValueError."""
    value: Any = {
        "lr": {"optimizers": {"SGD": {"state": {}, "param_groups": [{"lr": 10**5000, "params": ["w"]}]}}},
        "a key": {"callbacks": {10**5000: 1}},
        "timestamp": {"timestamp": {"Timestamp": {"batch": 10**5000}}},
    }[where]
    torch.save({"state": {"model": {"w": torch.ones(3)}, **value}}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="holds a number of 2077 bytes, which is not supported"):
        inspect_checkpoint(tmp_path / "a.pt")
    for verb in ("inspect", "verify"):
        code, text = printed_by("checkpoint", verb, str(tmp_path / "a.pt"))
        assert code == 1 and "a number of 2077 bytes" in text
