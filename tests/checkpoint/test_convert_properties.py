"""Converting back and forth is the identity, for all shapes, dtypes, views and numbers of files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints.conversions import convert, loaded, loaded_folder, without_empty_dicts
from support.checkpoints.samples import DTYPES
from support.checkpoints.views import strided
from support.comparing import assert_same
from support.examples import examples

from composer_fsdp2.checkpoint.convert import copying
from composer_fsdp2.checkpoint.layouts.safetensors import _DTYPES as SAFETENSORS_DTYPES

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

states = st.fixed_dictionaries(
    {
        "state": st.fixed_dictionaries(
            {
                "model": st.dictionaries(st.sampled_from(["a", "b.c", "b.d.e", "f"]), strided(), min_size=1),
                "callbacks": st.dictionaries(
                    st.sampled_from("xyz"), st.none() | st.integers() | st.text() | st.just({}) | strided(), max_size=3
                ),
                "algorithms": st.lists(st.tuples(st.text(max_size=3), st.integers()), max_size=2),
            }
        ),
        "rng": st.lists(st.fixed_dictionaries({"torch": strided([torch.uint8])}), max_size=2),
    }
)


@contextmanager
def folder_and_chunks(chunk_bytes: int) -> Iterator[Path]:
    # Without fsync, which takes most of the time, and has no effect on readers of the same system.
    chunks, syncs = mock.patch.object(copying, "CHUNK_BYTES", chunk_bytes), mock.patch.object(os, "fsync")
    with tempfile.TemporaryDirectory() as name, chunks, syncs:
        yield Path(name)


@examples(10)
@given(state=states, files=st.integers(1, 5), chunk_bytes=st.integers(16, 200))
def test_there_and_back(state: dict[str, Any], files: int, chunk_bytes: int):
    """No sharding loses or changes any value that torch.save writes, whatever a tensor's layout in its storage."""
    with folder_and_chunks(chunk_bytes) as folder:
        torch.save(state, folder / "source.pt")
        convert(folder / "source.pt", folder / "sharded", "dcp", files=files)
        assert_same(without_empty_dicts(loaded_folder(folder / "sharded")), without_empty_dicts(state), in_bits=True)
        convert(folder / "sharded", folder / "resharded", "dcp", files=6 - files)
        convert(folder / "resharded", folder / "back.pt", "monolithic")
        assert_same(loaded(folder / "back.pt"), state, in_bits=True)


@examples(10)
@given(
    model=st.dictionaries(
        st.sampled_from(["a", "b.c", "b.d.e", "f"]),
        strided([dtype for dtype in DTYPES if dtype in SAFETENSORS_DTYPES.values()]),
        min_size=1,
    ),
    files=st.integers(1, 5),
    chunk_bytes=st.integers(16, 200),
)
def test_through_safetensors(model: dict[str, torch.Tensor], files: int, chunk_bytes: int):
    """Weights are preserved in Hugging Face's layout; the safetensors library, if installed, reads the same."""
    with folder_and_chunks(chunk_bytes) as folder:
        torch.save({"state": {"model": model}}, folder / "source.pt")
        convert(folder / "source.pt", folder / "hf", "safetensors", files=files)
        convert(folder / "hf", folder / "back.pt", "monolithic")
        assert_same(loaded(folder / "back.pt"), {"state": {"model": model}}, in_bits=True)
        if (library := _safestrided()) is not None:
            found: dict[str, torch.Tensor] = {}
            for file in (folder / "hf").glob("*.safetensors"):
                found |= library(file)
            assert_same(found, model, in_bits=True)


def _safestrided() -> Any:
    try:
        from safetensors.torch import load_file
    except ImportError:
        return None
    return load_file
