"""Public names are imported lazily, and are visible to every kind of import and tool."""

from __future__ import annotations

import ast
import json
import pickle
import pkgutil
import tomllib
from pathlib import Path

import pytest
from mypy import api as mypy
from support.forked_scripts import run_script
from support.ranks import WITH_COMPOSER
from test_house import ROOT, imported_without_torch

import composer_fsdp2

SOURCE = Path(composer_fsdp2.__file__)


# In a process that has imported torch, and then removes the modules that the names below must not import.
SCRIPT = """
import json, sys
import torch.distributed

def forget(*packages):
    for name in [name for name in sys.modules if f"{name}.".startswith(packages)]:
        del sys.modules[name]

forget("composer_fsdp2.", "omegaconf.", "torch.distributed.checkpoint.")
del torch.distributed.checkpoint
import composer_fsdp2

seen = dir(composer_fsdp2)  # before any of them is imported
from composer_fsdp2 import prepare_fully_shard
sharding = [*sys.modules]
forget("composer_fsdp2.")
import composer_fsdp2.checkpoint.inspect
looking = [*sys.modules]
from composer_fsdp2 import *
names = composer_fsdp2.__all__
others = [name for name in names if globals()[name] is not getattr(composer_fsdp2, name)]
print(json.dumps({"sharding": sharding, "looking": looking, "all": names, "others": others, "dir": seen}))
"""
WITHOUT_TORCH = """
import composer_fsdp2
composer_fsdp2.__version__, composer_fsdp2.ConfigError, composer_fsdp2.ShardingConfig(), composer_fsdp2.errors
composer_fsdp2.translate({"sharding_strategy": "FULL_SHARD"}, device="cpu")
assert "omegaconf" not in sys.modules
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    script = tmp_path_factory.mktemp("names") / "script.py"
    script.write_text(SCRIPT)
    done = run_script(WITH_COMPOSER, script)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_name_imports_what_it_needs(told: dict[str, list[str]]):
    """Scripts that catch an error or translate a dict do not wait for torch, scripts that shard do not import
    checkpoint code, and scripts that inspect a file do not import the loader."""
    assert "composer_fsdp2.prepare" not in imported_without_torch("composer_fsdp2.__init__", then=WITHOUT_TORCH)
    assert "composer_fsdp2.prepare" in told["sharding"]
    assert not {"omegaconf", "torch.distributed.checkpoint"} & {*told["sharding"]}
    assert [name for name in told["sharding"] if name.startswith("composer_fsdp2.checkpoint")] == []
    assert [name for name in told["looking"] if name.startswith("composer_fsdp2.checkpoint.load")] == []


def test_every_name_is_there_however_it_is_asked_for(told: dict[str, list[str]]):
    """A name imported, read as an attribute, or star-imported is the object of its file."""
    assert {*told["all"]} <= {*told["dir"]} and len({*told["all"]}) == len(told["all"])
    assert {"prepare_fully_shard", "translate", "ShardingConfig", "CheckpointError", "__version__"} <= {*told["all"]}
    assert told["others"] == []


def test_type_checkers_see_the_names_that_are_there():
    """An editor that completes a missing name, or none, would be worse than no types."""
    [block] = [node for node in ast.parse(SOURCE.read_text()).body if isinstance(node, ast.If)]
    seen = {
        (alias.asname, node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    files = composer_fsdp2._FILE_OF.items()
    assert seen == {(name, f"composer_fsdp2.{file}", name) for name, file in files}
    assert composer_fsdp2.__all__ == ["__version__", *composer_fsdp2._FILE_OF]


@pytest.mark.slow
def test_mypy_sees_the_real_types(tmp_path: Path):
    """Projects with strict type checks get our signatures, and an error for a misspelt name."""
    (tmp_path / "script.py").write_text(
        "from typing import assert_type\n"
        "import composer_fsdp2 as c\n"
        "from composer_fsdp2 import ShardingConfig, translate\n"
        "assert_type(translate({}), c.Translation)\n"
        "assert_type(translate({}).config, ShardingConfig)\n"
        "assert_type(c.__version__, str)\n"
        "c.prepare_fuly_shard\n"
    )
    (tmp_path / "mypy.ini").write_text(
        f"[mypy]\nmypy_path = {ROOT}\nstrict = true\n"
        "[mypy-composer_fsdp2.*]\nignore_errors = true\n"
        "[mypy-torch.*,omegaconf.*]\nfollow_imports = skip\n"  # other people's code, which takes long
    )
    said, errors, code = mypy.run(
        ["--config-file", str(tmp_path / "mypy.ini"), "--cache-dir", "/dev/null", str(tmp_path / "script.py")]
    )
    assert code == 1 and errors == "", errors
    [error, _] = said.splitlines()
    assert 'Module has no attribute "prepare_fuly_shard"' in error


def test_no_public_name_is_hidden_by_a_folder_or_file():
    """Python sets a submodule as an attribute of its package: a name that is both would depend on imports."""
    submodules = {module.name for module in pkgutil.iter_modules([str(SOURCE.parent)])}
    assert "prepare" in submodules
    assert submodules & {*composer_fsdp2.__all__} == set()


def test_a_misspelt_name_is_an_attribute_error():
    """`hasattr`, `getattr` with a default and copy work as on any module, and a typo does not search for files."""
    assert not hasattr(composer_fsdp2, "prepare_fuly_shard")
    with pytest.raises(AttributeError, match="module 'composer_fsdp2' has no attribute 'compatible'"):
        composer_fsdp2.compatible  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'prepare_fuly_shard'"):
        exec("from composer_fsdp2 import prepare_fuly_shard")


def test_values_are_pickled_under_the_names_of_their_files():
    """Values pickled by an earlier release, in messages between ranks or in checkpoints, can still be read."""
    config = composer_fsdp2.ShardingConfig()
    assert type(config).__module__ == "composer_fsdp2.config.sharding"
    assert pickle.loads(pickle.dumps(config)) == config


def test_the_version_has_one_source():
    """pip and scripts see the same version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"] and "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "composer_fsdp2.__version__"}
