"""Every public name has a docstring with an example, and the examples run."""

from __future__ import annotations

import doctest
import inspect
import os
from typing import Any

import torch
from support.on_ranks import on_ranks
from torch import nn

import composer_fsdp2

NAMES = [name for name in composer_fsdp2.__all__ if name != "__version__"]


def example_of(name: str) -> doctest.DocTest:
    """The example of a public name. It may use torch, nn and all public names without an import."""
    names: dict[str, Any] = {each: getattr(composer_fsdp2, each) for each in NAMES}
    docstring = inspect.getdoc(names[name]) or ""
    return doctest.DocTestParser().get_doctest(docstring, {"torch": torch, "nn": nn} | names, name, None, 0)


def test_every_public_name_has_an_example():
    """`help()` on a public name shows how to use it; a name without an example sends its reader to the source."""
    assert [name for name in NAMES if "Example:" not in (inspect.getdoc(getattr(composer_fsdp2, name)) or "")] == []
    assert [name for name in NAMES if not example_of(name).examples] == []


@on_ranks(1)
def test_the_examples_run(folder: str):
    """An example that raises, or that prints something else than it claims, would be copied into scripts."""
    failures = []
    for name in NAMES:
        os.makedirs(os.path.join(folder, name))
        os.chdir(os.path.join(folder, name))  # some write a file
        torch.manual_seed(0)
        text: list[str] = []
        runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
        if runner.run(example_of(name), out=text.append).failed:
            failures.append("".join(text))
    assert not failures, "\n".join(failures)
