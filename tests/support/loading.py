"""A Trainer that loads the old checkpoints of ``legacy.py``, and an object store in a folder.

Imports Composer only when called, to keep test collection fast.
"""

from __future__ import annotations

import functools
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from support.legacy import legacy_model, legacy_optimizer
from support.oracle import FSDP2
from support.trainers import make_trainer
from torch import nn


@contextmanager
def a_trainer(kind: str, config: Any = None, model: nn.Module | None = None, **options: Any) -> Iterator[Any]:
    """A Trainer over the model of a fixture, with other values; the values before loading are in ``trainer.own``."""
    model = legacy_model(kind, seed=3) if model is None else model
    own = {name: value.detach().clone() for name, value in model.state_dict().items()}
    options = {"optimizer": legacy_optimizer(model), "load_progress_bar": False, **options}
    with FSDP2(), quiet():
        trainer = make_trainer({} if config is None else config, model=model, **options)
        trainer.own = own
        yield trainer
        trainer.close()


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses Composer's warnings (one is that the tests' callback is not in a file) and its pauses."""
    with warnings.catch_warnings(), mock.patch("composer.utils.retrying.time.sleep"):
        warnings.simplefilter("ignore", UserWarning)
        yield


@functools.cache
def store_class() -> Any:
    from composer.utils import ObjectStore

    class FolderStore(ObjectStore):
        """An object store in a folder; records downloads, and fails where ``failures`` sets it."""

        def __init__(self, root: str | Path) -> None:
            self.root, self.downloaded, self.failures = Path(root), list[str](), dict[str, int]()

        def __str__(self) -> str:
            return f"FolderStore({self.root})"

        def get_uri(self, object_name: str) -> str:
            return f"folder://bucket/{object_name}"

        def get_object_size(self, object_name: str) -> int:
            if not (self.root / object_name).is_file():
                raise FileNotFoundError(object_name)
            return (self.root / object_name).stat().st_size

        def download_object(
            self, object_name: str, filename: Any, overwrite: bool = False, callback: Any = None
        ) -> None:
            self.get_object_size(object_name)
            if self.failures.get(object_name, 0) > 0:
                self.failures[object_name] -= 1
                raise ConnectionError("the line went dead")
            assert overwrite or not os.path.exists(filename)
            self.downloaded.append(object_name)
            shutil.copyfile(self.root / object_name, filename)

        def upload_object(self, object_name: str, filename: Any, callback: Any = None, **_: Any) -> None:
            (self.root / object_name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(filename, self.root / object_name)

        def list_objects(self, prefix: str | None) -> list[str]:
            names = (file.relative_to(self.root).as_posix() for file in self.root.rglob("*") if file.is_file())
            return [name for name in names if name.startswith(prefix or "")]

    return FolderStore
