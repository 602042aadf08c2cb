"""install(), uninstall() and fsdp2(): Composer is switched over everywhere, and afterwards it is Composer again.

On one rank: none of it communicates.
"""

from __future__ import annotations

import contextlib
import operator
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from support.cases import for_each
from support.on_ranks import on_ranks

pytestmark = pytest.mark.composer

Bindings = dict[str, dict[str, Any]]
WITH_CLASSES = ("composer.", "torch.distributed.fsdp.")


def bindings() -> Bindings:
    """What every name of every module stands for, and every attribute of every class of Composer's and of FSDP."""
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
    """The names that stand for another function, class or property; an equal copy is not Composer's own."""
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
    """All that the shim touches or is imported by the first install, so that only bindings can differ."""
    import composer
    import composer.checkpoint.load
    import composer.functional  # noqa: F401

    from composer_fsdp2.compat.install import all_seams

    all_seams()


@on_ranks(1)
def test_every_name_is_replaced_once_and_put_back():
    """A notebook that trains one model on FSDP2 goes on with Composer as it was, our own functions included; and a
    library that installs inside the user's own block neither doubles the wrappers nor ends the block."""
    import_composer()
    from composer_fsdp2.compat import fsdp2, install, is_installed, uninstall
    from composer_fsdp2.compat.install import all_seams

    before = bindings()
    uninstall()  # nothing to undo
    install()
    once = bindings()
    moved = changed(before, once)
    for seam in all_seams():
        assert f"{seam.module}.{seam.name}" in moved, f"{seam.module}.{seam.name} was not replaced: {moved}"
    install()
    assert_unchanged(once, "after a second install")
    with fsdp2():
        pass
    assert is_installed()
    assert_unchanged(once, "after fsdp2() inside an install")
    uninstall()
    assert not is_installed()
    assert_unchanged(before)

    with contextlib.suppress(ZeroDivisionError), fsdp2():
        with fsdp2():
            assert is_installed()
        assert is_installed(), "the inner block ended the outer one"
        _ = 1 / 0
    assert_unchanged(before, "after an error in the block")


@on_ranks(1)
def test_replaced_functions_are_pickled():
    """A spawned worker, or a job queue, that is handed composer.utils.load_checkpoint gets it by its name."""
    import_composer()
    from composer_fsdp2.compat import fsdp2
    from composer_fsdp2.compat.install import all_seams

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


# --- who shards


def shards_with(prepare: Callable[..., Any]) -> set[str]:
    """Who sharded: what a function called ``prepare_fsdp_module`` makes of a small model."""
    from composer.core import Precision
    from composer.devices import DeviceCPU
    from composer.utils import FSDPConfig
    from support.trainers import shards
    from torch import nn

    model = nn.Sequential(nn.Linear(2, 2))
    prepare(model, [], FSDPConfig(), Precision.FP32, DeviceCPU(), False)
    return shards(model)


@contextlib.contextmanager
def user_module(name: str) -> Iterator[str]:
    """A module of the user's that has imported the function."""
    module = sys.modules[name] = types.ModuleType(name)
    exec("from composer.distributed import prepare_fsdp_module, prepare_fsdp_module as p", vars(module))
    try:
        yield name
    finally:
        del sys.modules[name]


@on_ranks(1)
def test_prepare_fsdp_module_is_ours_under_every_import_path():
    """A script that imported the function at its top, or under another name, would go on training with FSDP1."""
    import_composer()
    import composer.distributed

    import composer_fsdp2
    from composer_fsdp2 import compat

    original = composer.distributed.prepare_fsdp_module
    places = ["composer.distributed", "composer.distributed.dist_strategy", "composer.checkpoint.load"]

    def found() -> list[Any]:
        of_users = [vars(sys.modules[name])["p"] for name in places if name.startswith("users")]
        return [*of_users, *(vars(sys.modules[name])["prepare_fsdp_module"] for name in places)]

    own = [id(composer_fsdp2.prepare_fully_shard), id(compat.prepare_fsdp_module)]
    with contextlib.ExitStack() as stack:
        places.append(stack.enter_context(user_module("users_early")))
        for time in ("first", "second"):
            with compat.fsdp2():
                places.append(stack.enter_context(user_module(f"users_{time}")))
                ours = composer.distributed.prepare_fsdp_module
                assert all(each is ours for each in found()), f"not ours the {time} time: {found()}"
                assert shards_with(ours) == {"FSDPModule"}
            assert all(each is original for each in found()), f"not Composer's again the {time} time: {found()}"
            # Ours under their own names are not part of the shim.
            assert [id(composer_fsdp2.prepare_fully_shard), id(compat.prepare_fsdp_module)] == own
            assert shards_with(compat.prepare_fsdp_module) == {"FSDPModule"}


# --- if something fails


@on_ranks(1)
def test_a_seam_that_fails_leaves_nothing_behind():
    """Half a shim would clip nothing or hang in a load; an install that fails leaves Composer whole."""
    import_composer()
    from composer_fsdp2.compat import install, is_installed, seams
    from composer_fsdp2.compat.install import all_seams
    from composer_fsdp2.compat.seams import Seam

    before = bindings()
    bad = {
        "a module that is gone": Seam(module="composer.no_such_module", name="f", replacement=print, why=""),
        "a class that is gone": Seam(module="composer.core.state", name="NoState.f", replacement=print, why=""),
        "a method that is gone": Seam(module="composer.core.state", name="State.no_method", replacement=print, why=""),
    }

    def check(what: str, seam: Seam) -> None:
        with mock.patch.object(seams, "_SEAMS", [*all_seams(), seam]):
            try:
                install()
            except Exception:
                assert not is_installed(), what
            else:
                raise AssertionError(f"{what}: install() did not fail")
        assert_unchanged(before, what)

    for_each(check, {what: (what, seam) for what, seam in bad.items()})


@on_ranks(1)
def test_other_versions_of_composer_are_refused():
    """Seams of a release that nobody read would be patched blindly; the error says which release to install."""
    import importlib.metadata

    import_composer()
    from composer_fsdp2 import ComposerFSDP2Error, IncompatibleVersionError
    from composer_fsdp2.compat import fsdp2, install, is_installed

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
