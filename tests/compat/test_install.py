"""install(), uninstall() and fsdp2(): every binding of Composer is patched, and restored afterwards.

On one rank: none of them communicates.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import operator
import pickle
import sys
import types
from typing import Any
from unittest import mock

import pytest
from support.cases import for_each
from support.on_ranks import on_ranks

from composer_fsdp2 import ComposerFSDP2Error, IncompatibleVersionError
from composer_fsdp2.compat import fsdp2, install, is_installed, seams, uninstall
from composer_fsdp2.compat.install import all_seams
from composer_fsdp2.compat.seams import Seam

pytestmark = pytest.mark.composer

Bindings = dict[str, dict[str, Any]]
WITH_CLASSES = ("composer.", "torch.distributed.fsdp.")


def bindings() -> Bindings:
    """The object of every name in every module, and every attribute of every class of Composer and of FSDP."""
    found: Bindings = {}
    for module_name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType):
            found[module_name] = dict(vars(module))
            if module_name.startswith(WITH_CLASSES):
                for name, value in found[module_name].items():
                    if isinstance(value, type):
                        found[f"{module_name}.{name}"] = dict(vars(value))
    return found


def changed(before: Bindings, after: Bindings) -> list[str]:
    """The names that are bound to another function, class or property; an equal copy also counts as another."""
    names = []
    for owner in before.keys() | after.keys():
        old, new = before.get(owner, {}), after.get(owner, {})
        if (
            len(old) == len(new)
            and all(map(operator.is_, old.keys(), new.keys()))
            and all(map(operator.is_, old.values(), new.values()))
        ):
            continue  # the case of nearly all of them, at the speed of C
        different = {name for name in old.keys() | new.keys() if old.get(name) is not new.get(name)}
        names += [f"{owner}.{name}" for name in different if is_code(old.get(name)) or is_code(new.get(name))]
    return sorted(names)


def is_code(value: Any) -> bool:
    return callable(value) or isinstance(value, property | classmethod | staticmethod)


def assert_unchanged(before: Bindings, what: str = "") -> None:
    left = changed(before, bindings())
    assert not left, f"{what}: not as before: {left}"


def import_composer() -> None:
    """Imports everything that the seams patch or that the first install imports, so that only bindings can differ."""
    import composer
    import composer.checkpoint.load
    import composer.functional  # noqa: F401

    all_seams()


@on_ranks(1)
def test_every_name_is_replaced_once_and_put_back():
    """After a notebook trains one model on FSDP2, Composer is unchanged. A script that imported a function at its top,
    under another name, does not continue with FSDP1. A library that installs inside the user's own block neither
    doubles the wrappers nor ends the block."""
    import_composer()
    import composer.distributed

    early = user_module("users_early")
    before, original = bindings(), early.prepare
    uninstall()  # nothing to undo
    install()
    once = bindings()
    moved = changed(before, once)
    assert "users_early.prepare" in moved and early.prepare is composer.distributed.prepare_fsdp_module
    assert not {"composer_fsdp2.prepare_fully_shard", "composer_fsdp2.compat.prepare_fsdp_module"} & {*moved}
    for seam in all_seams():
        assert f"{seam.module}.{seam.name}" in moved, f"{seam.module}.{seam.name} was not replaced: {moved}"
    install()
    assert_unchanged(once, "after a second install")
    with fsdp2():
        pass
    assert is_installed()
    assert_unchanged(once, "after fsdp2() inside an install")
    late = user_module("users_late")
    uninstall()
    assert not is_installed() and late.prepare is original
    del sys.modules["users_late"]
    assert_unchanged(before)

    with contextlib.suppress(ZeroDivisionError), fsdp2():
        with fsdp2():
            assert is_installed()
        assert is_installed(), "the inner block ended the outer one"
        assert early.prepare is not original, "not ours the second time"
        _ = 1 / 0
    assert_unchanged(before, "after an error in the block")


def user_module(name: str) -> Any:
    """A script that has imported the sharding function under another name."""
    module = sys.modules[name] = types.ModuleType(name)
    exec("from composer.distributed import prepare_fsdp_module as prepare", vars(module))
    return module


@on_ranks(1)
def test_replaced_functions_are_pickled():
    """A spawned worker or a job queue unpickles composer.utils.load_checkpoint by its qualified name."""
    import_composer()

    def pickled() -> set[str]:
        return {f"{seam.module}.{seam.name}" for seam in all_seams() if is_pickled(seam)}

    before = pickled()
    with fsdp2():
        lost = before - pickled()
    assert len(before) > 40 and not lost, f"of {len(before)} no longer pickled: {lost}"


def is_pickled(seam: Any) -> bool:
    function = operator.attrgetter(seam.name)(sys.modules[seam.module])
    try:
        return bool(pickle.loads(pickle.dumps(function)) == function)
    except pickle.PicklingError:
        return False


# --- if something fails


@on_ranks(1)
def test_a_seam_that_fails_leaves_nothing_behind():
    """With some seams missing, a run would not clip or would hang in a load; a failed install leaves Composer
    unchanged."""
    import_composer()

    before = bindings()
    bad = {
        "a module that is gone": Seam(module="composer.no_such_module", name="f", replacement=print, why=""),
        "a class that is gone": Seam(module="composer.core.state", name="NoState.f", replacement=print, why=""),
        "a method that is gone": Seam(module="composer.core.state", name="State.no_method", replacement=print, why=""),
    }

    def check(what: str, seam: Seam) -> None:
        with (
            mock.patch.object(seams, "_SEAMS", [*all_seams(), seam]),
            pytest.raises((ImportError, AttributeError, KeyError)),
        ):
            install()
        assert not is_installed()
        assert_unchanged(before, what)

    for_each(check, {what: (what, seam) for what, seam in bad.items()})


@on_ranks(1)
def test_other_versions_of_composer_are_refused():
    """Seams for an untested release would be patched blindly; the error names the release to install."""
    import_composer()

    before = bindings()

    def check(version: Any, words: tuple[str, ...]) -> None:
        for enter in (install, fsdp2().__enter__):
            other_version = mock.patch("importlib.metadata.version", side_effect=version)
            with other_version, pytest.raises(IncompatibleVersionError) as refusal:
                enter()
            assert isinstance(refusal.value, ComposerFSDP2Error)
            assert isinstance(refusal.value, ImportError)
            assert all(word in str(refusal.value) for word in words), refusal.value
            assert not is_installed()

    missing = importlib.metadata.PackageNotFoundError("mosaicml")
    cases = {version: ([version], (version, "pip install mosaicml==0.32.1")) for version in ("0.33.0", "0.31.0")}
    for_each(check, {**cases, "none": (missing, ("not installed", "pip install"))})
    assert_unchanged(before)
