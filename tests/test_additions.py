"""Extensions in one place: a made-up key, dialect, layout and seam, and the number of files that must name them."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
from support.forked_scripts import run_script
from support.ranks import WITH_COMPOSER

ROOT = Path(__file__).resolve().parents[1]


class Checkout:
    """A copy of the code, and its files written or changed since."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.named: set[str] = set()
        for name in ("composer_fsdp2", "compat"):
            without = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=without)

    def add(self, file: str, text: str) -> None:
        assert not (self.folder / file).exists()
        (self.folder / file).write_text(text)
        self.named.add(file)

    def insert(self, file: str, text: str, *, before: str) -> None:
        """Insert text before a line that occurs once in the file."""
        old = (self.folder / file).read_text()
        assert old.count(before) == 1, f"{file}: {before!r}"
        (self.folder / file).write_text(old.replace(before, text + before))
        self.named.add(file)

    def python(self, script: str) -> str:
        """The output of a script in this copy; it can call ``cli(...)``, the command line, which returns its output."""
        (self.folder / "script.py").write_text(CLI + script)
        with contextlib.chdir(self.folder), mock.patch.dict(os.environ, COLUMNS="200"):
            done = run_script(WITH_COMPOSER, self.folder / "script.py")
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
        return done.stdout


CLI = """
import contextlib, io, os, sys

for name in [name for name in sys.modules if name.partition(".")[0] == "composer_fsdp2"]:
    del sys.modules[name]  # this process is forked from one that has imported the other tree
import composer_fsdp2
from composer_fsdp2.cli.main import main

assert composer_fsdp2.__file__.startswith(os.getcwd()), composer_fsdp2.__file__


def cli(*arguments):
    sys.argv = ["composer-fsdp2", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            main()
        except SystemExit as end:
            assert not end.code, (arguments, printed.getvalue())
    return printed.getvalue()
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


KEY = """
    Key(name="label", takes=TEXT, default="", group=KeyGroup.OURS, outcome=_EXACT, target="an attribute of the model",
        neutral=("",), fields=("label",), sets=True,
        meaning="what the model is called", reason="so that logs can say it"),
"""
USE_KEY = """
import torch, torch.distributed as dist
from composer_fsdp2 import ConfigError, prepare_fully_shard, translate

try:
    translate({"label": 3, "verbose": True}, device="cpu")
except ConfigError as error:
    print(error)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(2, 2))
prepare_fully_shard(model, None, {"label": "mine"}, device="cpu", precision="fp32")
print("labelled", model.label)
dist.destroy_process_group()

assert "what the model is called" in cli("explain", "fsdp_config.label")
with open("run.yaml", "w") as file:
    file.write("fsdp_config:\\n  label: mine\\n  limit_all_gathers: true\\n")
assert "so that logs can say it" in cli("migrate", "run.yaml", "--json")
told = cli("migrate", "run.yaml", "--to", "torchtitan", "--output", "run.toml")
assert "label: mine" in told and "composer_fsdp2's own, and TorchTitan" in told
"""


def test_a_key_is_named_in_four_files_with_its_test(checkout: Checkout):
    """A new key is parsed, checked, reported, explained and applied, without a search for the places to change."""
    keys, sharding, apply = (
        f"composer_fsdp2/{name}.py" for name in ("fsdp1/keys", "config/sharding", "sharding/apply")
    )
    checkout.insert(keys, KEY, before=")\n# fmt: on\n\nKEYS: tuple[Key, ...]")
    checkout.insert(keys, "TEXT, ", before="Row, idle")
    checkout.insert(sharding, '    label: str = ""\n', before="    shard_below_unwrapped: bool")
    checkout.insert(
        apply,
        '    model.__dict__["label"] = plan.config.label\n',
        before="    _verify(modules, plan)\n    return meshes\n",
    )
    message = checkout.python(USE_KEY)
    assert "fsdp_config.label is 3 (int); it takes a string" in message
    assert "labelled mine" in message
    assert len(checkout.named) <= 3  # and its test


DIALECT = '''
"""Made up: a file with `shards` and `bits`."""

from composer_fsdp2.config.findings import Outcome
from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.config.rows import POSITIVE_INT, one_of
from composer_fsdp2.migration.dialect import Dialect, Reading, Section
from composer_fsdp2.migration.effective import Effective
from composer_fsdp2.migration.lens import Lens, limits, unless
from composer_fsdp2.migration.run import RunConfig


class MadeUpDialect(Dialect):
    name = target = "madeup"
    title = "Made up"
    rows = (
        Lens(name="shards", takes=POSITIVE_INT, default=1, outcome=Outcome.EXACT,
            read={"mesh": lambda value, settings: MeshSpec.of_degrees(shard=value)},
            write=lambda run: run.config.mesh.shard_degree,
            meaning="over how many", target="a mesh", reason="it shards"),
        Lens(name="bits", takes=one_of(16, 32), default=32, outcome=Outcome.EXACT,
            read={"mixed_precision.param_dtype": lambda value, settings: "bfloat16" if value == 16 else None},
            write=lambda run: 16 if run.config.mixed_precision.param_dtype else None,
            meaning="how wide", target="param_dtype", reason="it computes"),
    )
    limits = (limits(Outcome.UNSUPPORTED, "async_save", reason="made up"),)
    heads = (("made_up", ()),)
    silent = (Section.at(("made_up",), {"made_up": {}}),)

    def find(self, path, values, parent):
        return path if path[-1:] == ("made_up",) else None

    def read(self, section):
        rows = {row.name: row for row in self.rows}
        given = Effective(given=section.given, rows=rows, around=section.around)
        findings = tuple(given.findings(lambda key, value: None))
        return Reading(run=RunConfig.of_fields(given.fields()), findings=findings, rows=rows)

    def places(self, row):
        return (f"made_up.{row.name}",)
'''


USE_DIALECT = """
assert "over how many" in cli("explain", "made_up.shards", "--dialect", "madeup")
with open("run.yaml", "w") as file:
    file.write("made_up: {shards: 4, bits: 16}  # mine\\n")
cli("migrate", "run.yaml", "--to", "torchtitan", "--output", "run.toml")
written = open("run.toml").read()
assert "data_parallel_shard_degree = 4" in written and 'mixed_precision_param = "bfloat16"' in written
with open("other.yaml", "w") as file:
    file.write("precision: fp32\\nfsdp_config: {data_parallel_shard_degree: 2, mixed_precision: FULL}\\n")
assert "shards: 2" in cli("migrate", "other.yaml", "--to", "madeup")
"""


def test_a_dialect_is_its_file_and_its_line_in_the_list(checkout: Checkout):
    """One file adds a new system: its files are found, read, explained, and written from other systems' files."""
    list_of_dialects = "composer_fsdp2/migration/dialects/__init__.py"
    checkout.add("composer_fsdp2/migration/dialects/madeup.py", DIALECT)
    line = "from composer_fsdp2.migration.dialects.madeup import MadeUpDialect\n"
    checkout.insert(list_of_dialects, line, before="from composer_fsdp2.migration.dialects.roll")
    checkout.insert(list_of_dialects, "        MadeUpDialect(),\n", before="        RollDialect(),\n")
    checkout.python(USE_DIALECT)
    assert checkout.named == {list_of_dialects, "composer_fsdp2/migration/dialects/madeup.py"}


LAYOUT = '''
"""Made up: `tensors.json` says what lies in `data.bin`, one tensor behind the other."""

import json

import torch

from composer_fsdp2.checkpoint.archive.torch_archive import Blob
from composer_fsdp2.checkpoint.boxes import row_major
from composer_fsdp2.checkpoint.inventory import MODEL, CheckpointInventory, Strided, TensorRecord
from composer_fsdp2.checkpoint.layouts._layout import Layout, LayoutWriter
from composer_fsdp2.checkpoint.layouts._layout import Output, OutputFile, TensorWrite


def _read(path, trust):
    tensors, at = {}, 0
    for name, shape, dtype in json.loads((path / "tensors.json").read_text()):
        dtype = getattr(torch, dtype)
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        source = Strided(Blob(path / "data.bin", at, num_bytes), dtype, 0, row_major(tuple(shape)))
        tensors["state", "model", name] = TensorRecord.in_one_chunk(name, tuple(shape), dtype, source)
        at += num_bytes
    files = tuple((file, file.stat().st_size) for file in (path / "tensors.json", path / "data.bin"))
    return CheckpointInventory(
        path=path, layout="made up", tensors=tensors, objects={}, files=files, holds_only=MODEL
    )


def _lay_out(request):
    writes, at, described = [], 0, []
    for name, slot in request.model.items():
        writes.append(TensorWrite.full(slot, at))
        described.append([name, list(slot.shape), str(slot.dtype).removeprefix("torch.")])
        at += slot.num_bytes
    data = OutputFile("data.bin", at, tuple(writes), lambda crcs: iter(()))
    return Output(
        files=(data, OutputFile.of_bytes("tensors.json", json.dumps(described).encode())), renamed=request.renamed
    )


LAYOUT = Layout(
    name="made up",
    recognize=lambda path: (path / "tensors.json").is_file(),
    read=_read,
    written=LayoutWriter(name="madeup", lay_out=_lay_out, holds_only=MODEL),
)
'''
USE_LAYOUT = """
import torch
from composer_fsdp2 import load_checkpoint

model = torch.nn.Sequential(torch.nn.Linear(3, 2))
saved = model[0].weight.detach().clone()
torch.save(model.state_dict(), "model.pt")
cli("checkpoint", "convert", "model.pt", "made", "--to", "madeup")
assert set(os.listdir("made")) == {"data.bin", "tensors.json"}
assert "made up" in cli("checkpoint", "inspect", "made")
cli("checkpoint", "verify", "made", "--against", "model.pt")
cli("checkpoint", "convert", "made", "again.pt", "--to", "monolithic")
for path in ("made", "again.pt"):
    torch.nn.init.zeros_(model[0].weight)
    load_checkpoint(path, model)
    assert torch.equal(model[0].weight, saved), path
"""


def test_a_layout_is_one_file_and_its_place_in_the_order(checkout: Checkout):
    """A new layout is recognized, inspected, verified, loaded, and converted from and to."""
    list_of_layouts = "composer_fsdp2/checkpoint/layouts/__init__.py"
    checkout.add("composer_fsdp2/checkpoint/layouts/madeup.py", LAYOUT)
    checkout.insert(list_of_layouts, "    madeup,\n", before="    monolithic,\n")
    checkout.insert(list_of_layouts, "    madeup.LAYOUT,\n", before="    dcp.LAYOUT,\n")
    checkout.python(USE_LAYOUT)
    assert checkout.named == {list_of_layouts, "composer_fsdp2/checkpoint/layouts/madeup.py"}


SEAM = '''
"""Made up."""

from .seams import seam


@seam("composer.utils.misc", "is_notebook", why="made up")
def is_notebook(original):
    return "made up"
'''
INSTALL = """
import composer.utils
from composer_fsdp2.compat import install, uninstall

install()
print(composer.utils.is_notebook(), composer.utils.misc.is_notebook())
uninstall()
print(composer.utils.is_notebook())
"""


@pytest.mark.composer
def test_a_seam_is_one_decorated_function(checkout: Checkout):
    """A seam in a file of compat replaces a Composer function in every module that imported it, and can be undone."""
    checkout.add("compat/madeup.py", SEAM)
    assert checkout.python(INSTALL).splitlines()[-2:] == ["made up made up", "False"]
    assert len(checkout.named) == 1
