"""Files of torch.save: our reader returns the same values as torch.load(weights_only=True), and names unsupported
contents."""

from __future__ import annotations

import collections
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints.samples import DTYPES
from support.checkpoints.views import strided
from support.comparing import assert_same
from support.examples import examples

from composer_fsdp2.checkpoint.archive.torch_archive import Archive
from composer_fsdp2.checkpoint.layouts._composer import with_records
from composer_fsdp2.checkpoint.read import Reader, materialized
from composer_fsdp2.errors import CheckpointError


def unsupported() -> dict[str, Any]:
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8) if sys.platform == "linux" else None
    return {
        "sparse": torch.eye(2).to_sparse(),
        "quantized": quantized,
        "meta": torch.empty(2, device="meta"),
        "conjugated": torch.ones(2, dtype=torch.complex64).conj(),
    }


@pytest.mark.filterwarnings("ignore")  # torch's, of deprecated kinds of tensors
@pytest.mark.parametrize("kind", ["sparse", "quantized", "meta", "conjugated"])
def test_tensors_of_another_kind(kind: str, tmp_path: Path):
    """The error names a sparse, quantized, meta or lazily conjugated tensor; it is neither read wrongly nor opened by
    --trust."""
    torch.save({"a": unsupported()[kind]}, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match=rf"holds a .*{kind}.*not supported"):
        Archive.open(tmp_path / "file.pt").unpickle(trust=False)


@st.composite
def tensors(draw: st.DrawFn) -> list[Any]:
    """A tensor and its rows, all in one storage, of every dtype; some are parameters."""
    whole = draw(strided())
    found: list[Any] = [whole, *whole.unbind()] if whole.dim() else [whole]
    if whole.dtype.is_floating_point and draw(st.booleans()):
        found[-1] = torch.nn.Parameter(found[-1], requires_grad=draw(st.booleans()))
    return found


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.binary(min_size=1, max_size=8),  # torch.load refuses b"" as torch.save writes it
    st.builds(complex, st.floats(), st.floats()),
    st.builds(bytearray, st.binary(max_size=4)),
    st.builds(torch.Size, st.lists(st.integers(0, 9), max_size=3)),
    st.sampled_from(DTYPES),
    st.sampled_from([torch.device("cpu"), torch.device("cuda", 1)]),
)
keys = st.one_of(st.text(max_size=8), st.integers(), st.tuples(st.integers(), st.text(max_size=3)))
trees = st.recursive(
    leaves | tensors(),
    lambda below: st.one_of(
        st.lists(below, max_size=3),
        st.tuples(below, below),
        st.dictionaries(keys, below, max_size=3),
        st.dictionaries(keys, below, max_size=3).map(collections.OrderedDict),
        st.sets(st.integers() | st.text(max_size=4), max_size=3),
        st.dictionaries(st.text(max_size=3), st.integers(0, 5), max_size=3).map(collections.Counter),
        below.map(lambda value: [value, value]),  # shared
    ),
    max_leaves=8,
)


@given(tree=trees)
@examples(60)
def test_reads_what_torch_load_reads(tree: Any):
    """All plain data and tensors that torch.load(weights_only=True) opens are read here with the same bits."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.pt"
        torch.save(tree, path)
        expected = torch.load(path, weights_only=True)
        found = Archive.open(path)
        with Reader() as reader:
            value = materialized(with_records(found.unpickle(trust=False), found), reader)
    assert_same(value, expected, in_bits=True, in_order=True)
