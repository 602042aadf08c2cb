"""Pickles that run code when loaded, and every place in a checkpoint that can contain one.

    from support.checkpoints.malicious import CONTAINERS, payloads

A payload creates a marker file when it runs, for tests to check.
"""

from __future__ import annotations

import gzip
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

# Ways to encode a call: of module, name, and the opcodes that push the arguments.
Spelling = Callable[[str, str, bytes], bytes]


def text(value: str) -> bytes:
    """BINUNICODE."""
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def reduce(module: str, name: str, args: bytes) -> bytes:
    """GLOBAL and REDUCE, protocol 0 to 2."""
    return b"c%b\n%b\n(%btR." % (module.encode(), name.encode(), args)


def stack_global(module: str, name: str, args: bytes) -> bytes:
    """STACK_GLOBAL, protocol 4: dotted names reach attributes of attributes."""
    return b"\x80\x04" + text(module) + text(name) + b"\x93(" + args + b"tR."


def framed(module: str, name: str, args: bytes) -> bytes:
    body = stack_global(module, name, args)[2:]
    return b"\x80\x05\x95" + struct.pack("<Q", len(body)) + body


def inst(module: str, name: str, args: bytes) -> bytes:
    return b"(%bi%b\n%b\n." % (args, module.encode(), name.encode())


def obj(module: str, name: str, args: bytes) -> bytes:
    return b"(c%b\n%b\n%bo." % (module.encode(), name.encode(), args)


SPELLINGS: tuple[Spelling, ...] = (reduce, stack_global, framed, inst, obj)


def payloads(marker: Path) -> dict[str, bytes]:
    """Pickles that create ``marker`` when ``pickle.loads`` reads them, by the global that they use."""
    touch = f"open({str(marker)!r}, 'w').close()"
    return {
        **{
            f"builtins.exec by {spelling.__name__}": spelling("builtins", "exec", text(touch)) for spelling in SPELLINGS
        },
        "__builtin__.eval, Python 2's name": reduce("__builtin__", "eval", text(touch)),
        "os.mkdir": reduce("os", "mkdir", text(str(marker))),
        "posix.mkdir": reduce("posix", "mkdir", text(str(marker))),
        "subprocess.call": reduce("subprocess", "call", b"(" + text("touch") + text(str(marker)) + b"l"),
        "codecs.open": reduce("codecs", "open", text(str(marker)) + text("w")),
        "io.FileIO": reduce("io", "FileIO", text(str(marker)) + text("w")),
        # Created harmless, set to a function by its state, then called.
        "functools.partial with a state": b"cfunctools\npartial\n(cbuiltins\nlen\ntR(cbuiltins\nexec\n("
        + text(touch)
        + b"t}}tb(tR.",
        "map and list": b"cbuiltins\nlist\n(cbuiltins\nmap\n(cbuiltins\nexec\n(" + text(touch) + b"ltRtR.",
        "getattr chain": (
            b"cbuiltins\ngetattr\n(cbuiltins\n__import__\n(" + text("os") + b"tR" + text("mkdir") + b"tR("
        )
        + (text(str(marker)) + b"tR."),
        "torch.storage._load_from_bytes": b"ctorch.storage\n_load_from_bytes\n("
        + _binbytes(reduce("builtins", "exec", text(touch)))
        + b"tR.",
        "an element of a dict": b"("
        + text("a")
        + b"(lp0\nI1\na"
        + reduce("builtins", "exec", text(touch))[:-1]
        + b"ad.",
        "a key of a dict": b"(" + reduce("builtins", "exec", text(touch))[:-1] + text("value") + b"d.",
        "persistent id": b"(" + text("storage") + reduce("builtins", "exec", text(touch))[:-1] + b"tQ.",
    }


def _binbytes(data: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(data)) + data


# ---------------------------------------------------------------------------------------------------------------------
# Pickles that run no code, but would hang, exhaust memory, read other memory, or change this process

STORAGE = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x04tQ"  # 4 elements


def tensor(offset: bytes, shape: bytes, stride: bytes, storage: bytes = STORAGE) -> bytes:
    """The opcodes of a tensor in ``STORAGE``; arguments are opcodes too."""
    return b"ctorch._utils\n_rebuild_tensor_v2\n(%b%b(%bt(%bt\x89}tR" % (storage, offset, shape, stride)


def integer(value: int) -> bytes:
    return b"I%d\n" % value


def hostile() -> dict[str, bytes]:
    """Pickles for an archive with one storage "0" of 16 bytes."""
    whole = tensor(integer(0), integer(4), integer(1))
    doubling = b"(lp0\n" + b"".join(b"(g%d\ng%d\nlp%d\n" % (k, k, k + 1) for k in range(60))
    tuples = b")p0\n" + b"".join(b"g%d\n\x86p%d\n" % (k, k + 1) for k in range(60))
    return {
        "offset beyond the storage": tensor(integer(2), integer(3), integer(1)) + b".",
        "stride beyond the storage": tensor(integer(0), integer(2), integer(4)) + b".",
        "negative offset": tensor(integer(-1), integer(2), integer(1)) + b".",
        "negative size": tensor(integer(0), integer(-4), integer(1)) + b".",
        "negative stride": tensor(integer(3), integer(2), integer(-1)) + b".",
        "size that is not a number": tensor(integer(0), text("4"), integer(1)) + b".",
        "more strides than sizes": tensor(integer(0), integer(2), integer(1) * 2) + b".",
        "4 TB from 4 bytes": tensor(integer(0), integer(1 << 40), integer(0)) + b".",
        "more elements than numbers have": tensor(integer(0), integer(1 << 62) * 4, integer(0) * 4) + b".",
        "a thousand dimensions": tensor(integer(0), integer(1) * 1000, integer(1) * 1000) + b".",
        "storage larger than its record": tensor(
            integer(0), integer(1), integer(1), STORAGE.replace(b"K\x04", integer(1 << 40))
        )
        + b".",
        "storage of negative size": STORAGE.replace(b"K\x04", integer(-1)) + b".",
        "storage that is missing": STORAGE.replace(text("0"), text("7")) + b".",
        "storage key that leads out": STORAGE.replace(text("0"), text("../../etc/passwd")) + b".",
        # BUILD would overwrite attributes that the constructor has checked.
        "tensor moved by its state": whole + b"]" + integer(10**6) + b"ab.",
        "tensor moved by its slots": whole + b"N}" + text("offset") + integer(10**6) + b"s\x86b.",
        "storage with a state": STORAGE + b"](" + text("1") + b"eb.",
        "name with a state": b"ctorch\nFloatStorage\n](" + text("os") + text("system") + b"eb.",
        "class changed for everybody": b"ccollections\nOrderedDict\nN}" + text("items") + b"cbuiltins\nset\ns\x86b.",
        "table of names changed": b"cnumpy\ndtype\nN}" + text("value") + b"cbuiltins\nset\ns\x86b.",
        "Counter changed for everybody": b"ccollections\nCounter\nN}" + text("get") + b"cbuiltins\nset\ns\x86b.",
        "version changed for everybody": b"ctorch.torch_version\nTorchVersion\nN}"
        + text("__new__")
        + b"cbuiltins\nset\ns\x86b.",
        "kind of dtype changed for everybody": b"cnumpy.dtypes\nUInt32DType\nN}"
        + text("code")
        + text("O")
        + b"s\x86b.",
        "items of an OrderedDict": b"ccollections\nOrderedDict\n)R}"
        + (text("items") + b"cbuiltins\nbytes\ns" + b"b0" + doubling[1:] + b"."),
        # Ten bytes for 32 GiB (CPython issue 115952).
        "memo number of 4 bytes": b"\x80\x02Nr\xff\xff\xff\x0f.",
        "memo number in text": b"Np99999999\n.",
        "memo number in a nested pickle": b"ctorch.storage\n_load_from_bytes\n(" + _binbytes(b"Np99999999\n.") + b"tR.",
        "bytes by their number": b"cbuiltins\nbytes\n(" + integer(1 << 40) + b"tR.",
        "bytearray by its number": b"cbuiltins\nbytearray\n(" + integer(1 << 40) + b"tR.",
        "bytes that are not there": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"abc.",
        "range as a list": _range(b"cbuiltins\nset\n(", b"tR."),
        "range as a pair": _range(b"ccollections\nOrderedDict\n((", b"ltR."),
        "range as sizes": _range(b"ctorch\nSize\n(", b"tR."),
        "range that others make a list of": _range(b"", b"."),
        "range again and again": b"(" + _range(b"", b"p0\n", 1_000_000) + b"g0\n" * 40 + b"l.",
        "range changed for everybody": b"cbuiltins\nrange\nN}" + text("value") + b"cbuiltins\nset\ns\x86b.",
        "doubling lists": doubling + b".",
        "doubling tuples": tuples + b".",
        "doubling tuples in a message": b"ctorch\ndevice\n(" + tuples + b"tR.",
        "doubling tuples as a persistent id": tuples + b"Q.",
        "nested 100000 deep": b"(l" * 100000 + b"a" * 99999 + b".",
        "a list in itself": b"(lp0\ng0\na.",
        "extension code": b"\x80\x02\x82\xf0.",
        "out-of-band buffer": b"\x80\x05\x97.",
        "persistent id in text": b"Pos.system\n.",
        "array of objects": _array(b"O8"),
        "array of objects, long name": _array(b"object"),
        "array with fields": _array(b"i4,O"),
        "array larger than its bytes": _array(b"f8", shape=integer(1 << 40)),
        "array of another class": _array(b"f8").replace(b"cnumpy\nndarray\n", b"ctorch\nTensor\n"),
        "text in another encoding": b"c_codecs\nencode\n(" + text("x") + text("rot13") + b"tR.",
        "opcode that is none": b"\xff.",
        "no end": b"N",
        "nothing": b"",
    }


def _range(before: bytes, after: bytes, length: int = 1 << 40) -> bytes:
    return before + b"cbuiltins\nrange\n(" + integer(length) + b"tR" + after


def _array(code: bytes, shape: bytes = b"K\x01") -> bytes:
    """A NumPy array of one element, as NumPy pickles it."""
    dtype = b"cnumpy\ndtype\n(" + text(code.decode()) + b"\x89\x88tR(K\x03" + text("|") + b"NNNJ\xff\xff\xff\xff"
    dtype += b"J\xff\xff\xff\xffK?tb"
    made = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tC\x01btR"
    return made + b"(K\x01(" + shape + b"t" + dtype + b"\x89C\x08" + b"\0" * 8 + b"tb."


# ---------------------------------------------------------------------------------------------------------------------
# Places of pickles in a checkpoint


def archive(path: Path, records: dict[str, bytes]) -> Path:
    """A zip archive like torch.save's, with valid CRC32s."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        for name, data in records.items():
            file.writestr(zipfile.ZipInfo(f"archive/{name}"), data)
    return path


def torch_records(pickled: bytes, storages: dict[str, bytes] | None = None) -> dict[str, bytes]:
    return {
        "data.pkl": pickled,
        "byteorder": b"little",
        **{f"data/{key}": data for key, data in (storages or {}).items()},
        "version": b"3\n",
    }


def in_monolithic(folder: Path, pickled: bytes) -> Path:
    return archive(folder / "ep0-ba1-rank0.pt", torch_records(pickled))


def in_metadata(folder: Path, pickled: bytes) -> Path:
    target = folder / "ep0-ba1"
    target.mkdir()
    (target / ".metadata").write_bytes(pickled)
    return target


def in_byte_entry(folder: Path, pickled: bytes) -> Path:
    """``state.metadata``, which is read to find the checkpoint's writer."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

    target = folder / "ep0-ba1"
    target.mkdir()
    size = archive(target / "__0_0.distcp", torch_records(pickled)).stat().st_size
    metadata = Metadata(
        state_dict_metadata={"state.metadata": BytesStorageMetadata()},
        planner_data={"state.metadata": ("state", "metadata")},
        storage_data={MetadataIndex("state.metadata"): _StorageInfo("__0_0.distcp", 0, size)},
    )
    (target / ".metadata").write_bytes(pickle.dumps(metadata))
    return target


def in_rank_file(folder: Path, pickled: bytes) -> Path:
    """A file of Composer 0.13 to 0.15, recognized by the class in its pickle."""
    named = b"ctorch.distributed._shard.sharded_tensor.api\nShardedTensor\n0"
    return archive(folder / "ep0-ba1-rank0.pt", torch_records(named + pickled))


def in_resumption(folder: Path, pickled: bytes) -> Path:
    target = folder / "ep0-ba1"
    target.mkdir()
    (target / "composer_metadata.json").write_text('{"composer_version": "0.32.1"}')
    (target / "resumption.pkl").write_bytes(pickled)
    return target


def in_gzip(folder: Path, pickled: bytes) -> Path:
    path = folder / "ep0-ba1-rank0.pt.gz"
    path.write_bytes(gzip.compress(in_monolithic(folder, pickled).read_bytes()))
    return path


def in_tar(folder: Path, pickled: bytes) -> Path:
    with tarfile.open(folder / "ep0-ba1-rank0.tar", "w") as tar:
        tar.add(in_monolithic(folder, pickled), "composer_states.pt")
    return folder / "ep0-ba1-rank0.tar"


CONTAINERS: dict[str, Callable[[Path, bytes], Path]] = {
    "monolithic": in_monolithic,
    "dcp metadata": in_metadata,
    "dcp byte entry": in_byte_entry,
    "one file per rank": in_rank_file,
    "resumption.pkl": in_resumption,
    "compressed": in_gzip,
    "in a tar file": in_tar,
}
