"""torch's private names used by the engine: all are checked at the start, and a missing one raises at once."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.models import Chain, layer
from support.on_ranks import on_ranks
from support.ranks import run_ranks
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from composer_fsdp2 import prepare_fully_shard
from composer_fsdp2._torch import api
from composer_fsdp2.errors import IncompatibleVersionError

FOLDER = Path(api.__file__).parent
FOLDERS = (FOLDER, FOLDER.parent / "estimate" / "_torch")
# Our own attributes, those of Python's namedtuples, and names that only older or only newer torch has.
OTHERS = {
    "_modules",
    "_wrappers",
    "_replace",
    "_make",
    "_StorageInfo",
    "_all_reduce_state",
    "_fsdp_param_group",
    "_fsdp_param_groups",
    # For resetting after an error, in torch without `reset_iter_state`.
    "_post_forward_indices",
    "_reshard_after_forward_event",
    # For meshes without the method `_get_root_mesh`.
    "_get_root_mesh",
    "_mesh_resources",
    # Sharding rules that forget strides, which the engine corrects.
    "_math_ops",
    "_pointwise_ops",
}


def test_this_torch_has_all_of_them():
    """A missing name would otherwise raise in the middle of a backward."""
    assert api.missing_names() == []


def private_names() -> Iterator[tuple[str, str]]:
    """Every private attribute that the folder's code reads or sets on objects other than ``self``, with its place."""
    for file in sorted(file for folder in FOLDERS for file in folder.glob("*.py")):
        tree = ast.parse(file.read_text())
        own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        own |= {target.attr for node in ast.walk(tree) for target in attributes_set_on_self(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and not is_self(node.value):
                name = node.attr
            elif isinstance(node, ast.alias) and not node.name.startswith("composer_fsdp2"):
                name = node.name.rpartition(".")[2]
            else:
                continue
            if name.startswith("_") and not name.startswith(("__", "_composer_fsdp2")) and name not in own:
                yield name, f"{file.name}:{getattr(node, 'lineno', 0)}"


def is_self(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls", "sys", "built")


def attributes_set_on_self(node: ast.AST) -> Iterator[ast.Attribute]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    for target in targets:
        if isinstance(target, ast.Attribute) and is_self(target.value):
            yield target


@pytest.mark.any_torch
def test_every_private_name_is_in_the_table():
    """A name that is used and not checked would raise AttributeError on a torch without it."""
    listed = OTHERS | {name for names in (*api._IN_MODULES.values(), *api._IN_CLASSES.values()) for name in names}
    listed |= {part for path in api._IN_MODULES for part in path.split(".")}
    unknown = [f"{where} uses {name}" for name, where in private_names() if name not in listed]
    assert not unknown, "\n".join(unknown)
    assert len(list(private_names())) > 40


@on_ranks(2)
def test_a_name_that_is_gone_is_told_before_anything_is_sharded(folder: str) -> None:
    """With a newer torch that lacks a replaced method, the first use raises one error on every rank, with the missing
    names and the version to install. The model is unchanged."""
    api.require_known_torch.cache_clear()
    key = next(key for key in api._IN_CLASSES if key[1] == "FSDPParamGroup")
    model = Chain(first=layer())
    parameters = [id(parameter) for parameter in model.parameters()]
    gone = mock.patch.dict(api._IN_CLASSES, {key: ("post_backward", "renamed_by_torch")})
    with gone, pytest.raises(IncompatibleVersionError) as caught:
        prepare_fully_shard(model, None, {}, device="cpu")
    api.require_known_torch.cache_clear()
    assert [id(parameter) for parameter in model.parameters()] == parameters
    assert all(type(module) in (Chain, nn.Linear) for module in model.modules())
    prepare_fully_shard(model, None, {}, device="cpu")
    message = str(caught.value)
    assert "FSDPParamGroup.renamed_by_torch" in message and "post_backward" not in message
    assert torch.__version__ in message and api.KNOWN_VERSIONS in message


def check_import(gone: str) -> None:
    for name in [name for name in sys.modules if name.startswith("composer_fsdp2")]:
        del sys.modules[name]
    if gone == "module":
        sys.modules["torch.utils._foreach_utils"] = None  # type: ignore[assignment]
    else:
        del _fsdp_param_group.AllReduceState
    expected = "torch.utils._foreach_utils" if gone == "module" else "_fsdp_param_group.AllReduceState"
    with pytest.raises(Exception, match=re.escape(expected)) as error:
        from composer_fsdp2 import prepare_fully_shard  # noqa: F401
    assert type(error.value).__module__ == "composer_fsdp2.errors"
    assert type(error.value).__name__ == "IncompatibleVersionError"


@pytest.mark.parametrize("gone", ["module", "name"])
def test_a_module_that_is_gone_is_told_at_the_import(gone: str):
    """Likewise for a missing module, where the import would raise torch's own error for the first name only."""
    run_ranks(check_import, 1, gone, fresh=True)
