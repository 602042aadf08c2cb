"""Reading pickles without running them: refused and accepted contents."""

from __future__ import annotations

import collections
import contextlib
import copyreg
import datetime
import fractions
import io
import logging
import pickle
import resource
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import malicious
from support.checkpoints.malicious import CONTAINERS, archive, hostile, payloads, torch_records
from support.comparing import assert_same
from support.examples import examples

from composer_fsdp2.checkpoint.archive.torch_archive import Archive
from composer_fsdp2.checkpoint.inspect import inspect_checkpoint
from composer_fsdp2.checkpoint.layouts._composer import with_records
from composer_fsdp2.checkpoint.pickles.trust import read_pickle
from composer_fsdp2.checkpoint.read import Reader, materialized
from composer_fsdp2.checkpoint.verify.verification import verify_checkpoint
from composer_fsdp2.errors import CheckpointError

pytestmark = pytest.mark.any_torch

PAYLOADS = list(payloads(Path("marker")))
HOSTILE = list(hostile())


def read_all(path: Path, *, trust: bool = False) -> None:
    """Reads everything in a checkpoint that any of our functions reads."""
    inventory = inspect_checkpoint(path, trust=trust)
    for entry in inventory.objects.values():
        entry.value()


# --- pickles that would run code


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # some payloads open files
@pytest.mark.parametrize("name", PAYLOADS)
def test_payload_is_refused_before_it_runs(name: str, tmp_path: Path):
    """A file from a stranger cannot run code, however its pickle encodes the call."""
    marker = tmp_path / "marker"
    data = payloads(marker)[name]
    with contextlib.suppress(RuntimeError, pickle.UnpicklingError):  # raised after the payload ran
        pickle.loads(data)
    assert marker.exists(), "the payload runs nothing, so that this test shows nothing"
    marker.rmdir() if marker.is_dir() else marker.unlink()
    with pytest.raises(CheckpointError, match=r"file\.pt: the pickle names [a-zA-Z_.]+\w, .*--trust"):
        read_pickle(data, where="file.pt")
    assert not marker.exists()


@pytest.mark.parametrize("container", CONTAINERS)
def test_payload_is_refused_wherever_it_lies(container: str, tmp_path: Path):
    """No pickle of any layout, such as .metadata or a byte entry, runs code during inspect or verify."""
    marker = tmp_path / "marker"
    path = CONTAINERS[container](tmp_path, payloads(marker)["builtins.exec by reduce"])
    with pytest.raises(CheckpointError, match=r"the pickle names .*builtins\.exec.*--trust"):
        read_all(path)
    assert not marker.exists()
    with contextlib.suppress(CheckpointError):
        verify_checkpoint(path)
    if container == "dcp metadata":  # --trust opens user objects; torch's own .metadata contains none
        with pytest.raises(CheckpointError, match=r"builtins\.exec"):
            read_all(path, trust=True)
    assert not marker.exists()


@pytest.mark.parametrize("container", ["monolithic", "dcp byte entry", "resumption.pkl", "compressed", "in a tar file"])
def test_trust_opens_the_rest_with_a_warning(container: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A checkpoint with a user-defined class opens with trust=True, and a warning lists the classes."""
    state = {"callbacks": [("Mine", {"share": fractions.Fraction(1, 3)})], "model": {}, "metadata": {}}
    value = {"state": state, "rng": []} if container not in ("dcp byte entry", "resumption.pkl") else state
    path = CONTAINERS[container](tmp_path, pickle.dumps(value, protocol=2))
    with pytest.raises(CheckpointError, match=r"names fractions\.Fraction, .*--trust"):
        read_all(path)
    with caplog.at_level(logging.WARNING):
        inventory = inspect_checkpoint(path, trust=True)
        values = [entry.value() for entry in inventory.objects.values()]
    assert str(fractions.Fraction(1, 3)) == "1/3" and repr(fractions.Fraction(1, 3)) in repr(values)
    assert "trusted, so fractions.Fraction is imported and may run" in caplog.text


def test_trust_says_what_is_not_installed(caplog: pytest.LogCaptureFixture):
    """A trusted checkpoint with an uninstalled callback names the missing package, and is not reported as damaged."""
    with pytest.raises(CheckpointError, match=r"file\.pt: names gone\.Callback, which cannot be imported here"):
        read_pickle(malicious.reduce("gone", "Callback", b""), where="file.pt", trust=True)
    nested = malicious.stack_global("collections", "OrderedDict.fromkeys", malicious.text("ab"))
    assert read_pickle(nested, where="file.pt", trust=True) == {"a": None, "b": None}
    assert "collections.OrderedDict.fromkeys is imported" in caplog.text


def test_registered_extension_is_no_way_in():
    """An extension code is an integer for a class that find_class never sees once it is in Python's cache."""
    copyreg.add_extension("fractions", "Fraction", 0xF0)
    try:
        data = pickle.dumps(fractions.Fraction, protocol=2)
        assert b"\x82\xf0" in data and pickle.loads(data) is fractions.Fraction
        with pytest.raises(CheckpointError, match="opcode"):
            read_pickle(data, where="file.pt")
    finally:
        copyreg.remove_extension("fractions", "Fraction", 0xF0)


# --- pickles that would hang, exhaust memory, read elsewhere, or change this process


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.timeout(20)
def test_hostile_pickle_is_refused(name: str, tmp_path: Path):
    """A few bytes can neither cost gigabytes or minutes, nor read outside a tensor's storage, nor change a class."""
    before = dict(vars(collections.Counter)), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    path = archive(tmp_path / "file.pt", torch_records(hostile()[name], {"0": bytes(16)}))
    with pytest.raises(CheckpointError, match=r"file\.pt"):
        Archive.open(path).unpickle(trust=False)
    assert dict(vars(collections.Counter)) == before[0] and collections.OrderedDict(a=1).items()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before[1] < 200 << 10  # KiB


def test_depth_counts_through_shared_containers():
    """A chain of lists that was already visited may be the end of a longer chain, deeper than a reader's limit."""
    inner: list[Any] = []
    for _ in range(150):
        inner = [inner]
    outer: list[Any] = [inner]
    for _ in range(100):
        outer = [outer]
    assert read_pickle(pickle.dumps([inner, inner]), where="file.pt") == [inner, inner]
    with pytest.raises(CheckpointError, match="nested deeper"):
        read_pickle(pickle.dumps([inner, outer]), where="file.pt")


def test_plain_pickle_has_no_storages():
    """A tensor in resumption.pkl refers to a record of an archive that does not exist."""
    with pytest.raises(CheckpointError, match="storage 0"):
        read_pickle(malicious.STORAGE + b".", where="resumption.pkl")


@pytest.mark.parametrize("where", ["absolute", "above", "link", "link to a folder"])
def test_metadata_cannot_lead_out_of_the_folder(where: str, tmp_path: Path):
    """A checkpoint whose metadata names /etc/passwd or ../other does not read it."""
    path = CONTAINERS["dcp byte entry"](tmp_path, b"N.")
    outside = tmp_path / "outside"
    outside.mkdir()
    (path / "__0_0.distcp").rename(outside / "__0_0.distcp")
    named = {
        "absolute": str(outside / "__0_0.distcp"),
        "above": "../outside/__0_0.distcp",
        "link": "__0_0.distcp",
        "link to a folder": "inside/__0_0.distcp",
    }[where]
    (path / "__0_0.distcp").symlink_to(outside / "__0_0.distcp")
    (path / "inside").symlink_to(outside)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = named
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=rf"names '{named}', which lies outside of the folder"):
        inspect_checkpoint(path)


# --- inconsistent archives


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("other", ["archive", "another"])
def test_record_twice(other: str, tmp_path: Path):
    """Of two records with one name, torch's reader (which drops the folder) and ours could read different ones."""
    path = tmp_path / "file.pt"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", b"N.")
        file.writestr(f"{other}/data.pkl", b"K\x01.")
    with pytest.raises(CheckpointError, match=rf"{other}/data\.pkl is there twice"):
        Archive.open(path)


@given(data=st.data())
@examples(40)
def test_damaged_archive_is_ours_to_report(data: st.DataObject):
    """Any changed byte raises our error with the file's name, never one of zipfile or struct."""
    whole = _example_archive()
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        new = data.draw(st.binary(min_size=0, max_size=8))
        changed[at : at + data.draw(st.integers(0, 8))] = new
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(CheckpointError):
        path = Path(folder) / "file.pt"
        path.write_bytes(bytes(changed))
        found = Archive.open(path)
        value = with_records(found.unpickle(trust=False), found)
        with Reader() as reader:
            materialized(value, reader)


def _example_archive() -> bytes:
    buffer = io.BytesIO()
    torch.save({"a": torch.arange(6.0).view(2, 3).t(), "b": [torch.tensor(3), numpy.arange(2)]}, buffer)
    return buffer.getvalue()


# --- accepted contents


def _numpy_values() -> dict[str, Any]:
    return {
        "float": numpy.arange(6.0).reshape(2, 3),
        "columns": numpy.asfortranarray(numpy.arange(6, dtype=numpy.int16).reshape(2, 3)),
        "big-endian": numpy.arange(3, dtype=">u4"),
        "scalar": numpy.float32(1.5),
        "0-d": numpy.array(7),
        "empty": numpy.zeros((0, 3)),
        "text": numpy.array(["ab", "c"]),
        "complex": numpy.array([1 + 2j]),
        "bool": numpy.array([True, False]),
        "times": numpy.array(["2024-01-01", "1969-07-20"], dtype="M8[D]"),
        "time": numpy.datetime64("2024-01-01T12:00", "15m"),
        "big-endian durations": numpy.arange(3).astype(">m8[us]"),
        "no unit": numpy.array([3]).astype("m8"),
        "random state": numpy.random.RandomState(0).get_state(),
    }


@pytest.mark.parametrize(("protocol", "numpy_version"), [(0, 1), (1, 2), (2, 1), (2, 2), (3, 1), (4, 2), (5, 2)])
def test_numpy_names_of_both_versions(protocol: int, numpy_version: int):
    """An RNG state saved under NumPy 1 opens under NumPy 2, which renamed the functions in its pickles."""
    values = _numpy_values()
    data = pickle.dumps(values, protocol=protocol)
    old, new = b"numpy.core.", b"numpy._core."
    if numpy_version == 1:  # beyond protocol 3, lengths would change with the names; the names read are the same
        data = data.replace(b"c" + new, b"c" + old)
    assert (new in data) == (numpy_version == 2) and (old in data) == (numpy_version == 1)
    found = read_pickle(data, where="file.pt")
    assert_same(found, values)
    assert [getattr(found[name], "dtype", None) for name in values] == [
        getattr(values[name], "dtype", None) for name in values
    ]


@pytest.mark.parametrize(
    "value",
    [
        numpy.array([{"a": 1}], dtype=object),
        numpy.zeros(2, dtype=[("x", "f4"), ("y", object)]),
        numpy.zeros(2, dtype=[("x", "f4")]),
        numpy.zeros(2, dtype=[("x", "f4")])[0],
        {range(3): 1},
        collections.defaultdict(torch.Tensor),
    ],
    ids=["objects", "fields with objects", "fields", "scalar with fields", "range as a key", "defaultdict"],
)
def test_what_is_harmless_and_unsupported(value: Any):
    """A checkpoint with such a value in a callback's state was reported as damaged. (An object array pickles its
    elements, and would bypass the list of allowed names.)"""
    with pytest.raises(CheckpointError, match=r"^file\.pt: holds .*which is not supported$"):
        read_pickle(pickle.dumps(value, protocol=2), where="file.pt")


FACTORIES = [int, float, bool, str, list, dict, tuple, set, frozenset, bytes, bytearray, complex]
FACTORIES += [collections.OrderedDict, collections.Counter, collections.deque, collections.defaultdict]


@pytest.mark.parametrize("protocol", [2, 4])
def test_trust_finds_python_2s_names(protocol: int, caplog: pytest.LogCaptureFixture):
    """A trusted file with an exception in a callback's state: protocol 2 stores it under a Python 2 module."""
    value = {"error": FileNotFoundError(2, "gone"), "filled": collections.defaultdict(fractions.Fraction)}
    data = pickle.dumps(value, protocol=protocol)
    with pytest.raises(CheckpointError, match=r"names builtins\.\w+Error, .*--trust; trust_checkpoint: true"):
        read_pickle(data, where="file.pt")
    found = read_pickle(data, where="file.pt", trust=True)
    assert type(found["error"]) is FileNotFoundError and found["filled"]["a"] == 0
    assert "Error is imported" in caplog.text


@pytest.mark.parametrize("protocol", range(6))
def test_composers_plain_data(protocol: int):
    """Timestamps, versions, counters and similar values are restored from every protocol of pickle.

    A callback with a defaultdict(int) could not resume: protocol 2, torch.save's, stores int under its Python 2 name.
    """
    value = {
        "grouped": [collections.defaultdict(factory, {"a": factory()}) for factory in FACTORIES],
        "classes": (FACTORIES, range, {"a": int}),
        "ranges": [range(3), range(10, 0, -2), range(0)],
        "wct": datetime.timedelta(days=1, microseconds=7),
        "at": datetime.datetime(2024, 2, 29, tzinfo=datetime.timezone(datetime.timedelta(hours=2))),
        "torch_version": torch.__version__ if protocol >= 2 else "2.7.0",  # protocol 2 came with Python 2.3
        "ordered": collections.OrderedDict(b=1, a=[2.5, None, (True,)]),
        "counts": collections.Counter("aab"),
        "queue": collections.deque([1, 2], maxlen=3),
        "set": {1, "x"},
        "frozen": frozenset({(1, 2)}),
        "bytes": bytes(range(256)),
        "array": bytearray(b"\0\xff"),
        "number": 2**200,
        "complex": 1 - 2j,
        "slice": slice(1, None, 2),
        "size": torch.Size([2, 3]),
        "device": torch.device("cuda", 1),
        "dtype": torch.bfloat16,
        "text": "ü\n",
    }
    found = read_pickle(pickle.dumps(value, protocol=protocol), where="file.pt")
    assert found == value and type(found["torch_version"]) is str
    assert {key: type(part) for key, part in found.items() if key != "torch_version"} == {
        key: type(part) for key, part in value.items() if key != "torch_version"
    }, "torch.Size is no plain tuple"
    assert [each.default_factory for each in found["grouped"]] == FACTORIES and found["grouped"][0]["b"] == 0


# --- stand-ins for pickled objects


def all_names() -> list[tuple[str, str]]:
    """Every name that a checkpoint's pickle may contain, and the classes of DCP's metadata."""
    from composer_fsdp2.checkpoint.layouts.dcp import _METADATA_NAMES
    from composer_fsdp2.checkpoint.pickles import allowed

    tables = [*allowed.TENSOR, *allowed.DATA, *allowed.INERT, *_METADATA_NAMES]
    others = ["torch.float32", "torch.FloatStorage", "numpy.dtypes.UInt32DType", "builtins.getattr"]
    return [(name.rpartition(".")[0], name.rpartition(".")[2]) for name in (*tables, *others)]


STATES = {
    "attributes": b"}" + malicious.text("__new__") + b"K\x01s",
    "slots": b"N}" + malicious.text("__new__") + b"K\x01s\x86",
    "a slot that is there": b"N}" + malicious.text("kind") + b"K\x01s\x86",
    "a method": b"N}" + malicious.text("append") + b"cbuiltins\nset\ns\x86",
    "how it is built": b"N}" + malicious.text("__setstate__") + b"cbuiltins\nset\ns\x86",
}


def test_no_name_can_be_changed_for_everybody():
    """A pickle set `__new__` of the stand-in for torch's version, and every later file in the process was "damaged"."""
    from composer_fsdp2.checkpoint.layouts.dcp import _METADATA_NAMES

    def read(data: bytes) -> Any:
        return read_pickle(data, where="x", inert=_METADATA_NAMES)

    plain = pickle.dumps(torch.torch_version.TorchVersion("2.7.0"))
    fresh = {name: _content_of(read(b"c%b\n%b\n." % (name[0].encode(), name[1].encode()))) for name in all_names()}
    for module, name in all_names():
        named = b"c%b\n%b\n" % (module.encode(), name.encode())
        for what, state in STATES.items():
            with pytest.raises(CheckpointError):
                read(named + state + b"b.")
            assert _content_of(read(named + b".")) == fresh[module, name], f"{what} of {module}.{name}"
    assert read(plain) == "2.7.0"


def _content_of(value: Any) -> Any:
    """The state that a value could have changed: its class's attributes, and its own."""
    cls = value if isinstance(value, type) else type(value)
    attributes = {name: id(part) for each in cls.__mro__[:-1] for name, part in vars(each).items()}
    return {
        name: number for name, number in attributes.items() if name not in ("kind", "code", "__doc__", "__module__")
    }


def test_attributes_of_an_ordered_dict_are_nobodys():
    """An attribute named `items` was iterated instead of the dict's contents, and bypassed every limit."""
    hidden = b"ccollections\nOrderedDict\n)R" + malicious.text("deep") + b"(lp0\ng0\nas}" + malicious.text("items")
    with pytest.raises(CheckpointError, match="nested deeper"):
        read_pickle(hidden + b"cbuiltins\nbytes\nsb.", where="x")
    honest = (
        b"ccollections\nOrderedDict\n)R" + malicious.text("a") + b"K\x01s}" + malicious.text("_metadata") + b"K\x02sb."
    )
    value = read_pickle(honest, where="x")
    assert type(value) is collections.OrderedDict and dict(value) == {"a": 1} and not vars(value)
