"""Checkpoints in object stores: what this node's ranks need of one, in a folder of its own."""

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from composer.utils import dist
from composer.utils.checkpoint import download_object_or_file
from composer.utils.file_helpers import extract_path_from_symlink, get_file

from composer_fsdp2.checkpoint.load import together

__all__ = ["local_checkpoint"]

log = logging.getLogger(__name__)


@contextlib.contextmanager
def local_checkpoint(path: str, object_store: Any, progress_bar: bool) -> Iterator[str]:
    """The path of the checkpoint on this node, for the length of a with block; called on all ranks."""
    if object_store is None:
        yield path
        return
    raise NotImplementedError
