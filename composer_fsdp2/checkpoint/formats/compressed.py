"""A monolithic checkpoint in a tar file or compressed: ``.tar``, ``.tar.gz``, ``.pt.zst`` and the like.

An uncompressed tar holds the ``.pt`` as it is, so its tensors are read in place. Anything compressed is streamed once,
nothing is written: torch writes the pickle first, which says how long every record after it is, and each record is
checked against its CRC32 in passing.
"""

import bz2
import contextlib
import gzip
import lzma
import os
import posixpath
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol

from composer_fsdp2.checkpoint.formats._composer import mapped, with_records
from composer_fsdp2.checkpoint.formats.monolithic import inventory_of
from composer_fsdp2.checkpoint.inventory import CheckpointInventory, Chunk, EntryPath, Packed, TensorRecord, dotted
from composer_fsdp2.checkpoint.pickles.trust import read_pickle
from composer_fsdp2.checkpoint.pickles.values import StoredTensor
from composer_fsdp2.checkpoint.storage.archive import Archive, opened
from composer_fsdp2.errors import CheckpointError

__all__ = ["NAME", "ORDER", "incomplete", "is_packed", "read", "recognise", "unpacked"]

NAME = "monolithic, compressed"
ORDER = 60
STATES = "composer_states.pt"  # Composer's name for the .pt in a tar file

_SLICE_BYTES = 1 << 20
_MAX_PICKLE_BYTES = 1 << 30
_ENDINGS = re.compile(r"(\.pt)?(\.(tar|tgz|gz|bz2|xz|lzma|zst|lz4|lzo))+$")

# By the first bytes: the ending, and how to open it: in Python, or by the command that Composer uses too.
_CODECS: dict[bytes, tuple[str, Callable[[IO[bytes]], Any] | str]] = {
    b"\x1f\x8b": ("gz", gzip.open),
    b"BZh": ("bz2", bz2.open),
    b"\xfd7zXZ\0": ("xz", lzma.open),
    b"]\0\0": ("lzma", lzma.open),
    b"\x28\xb5\x2f\xfd": ("zst", "zstd"),
    b"\x04\x22\x4d\x18": ("lz4", "lz4"),
    b"\x89LZO\0": ("lzo", "lzop"),
}


def recognise(path: Path) -> bool:
    """By its first bytes; the name does not matter."""
    return path.is_file() and (_is_tar(head := _head(path)) or _codec(head) is not None)


def is_packed(path: Path) -> bool:
    """Whether its tensors can be read only once it is unpacked; those of a plain tar file lie there as they are."""
    return recognise(path) and not _is_tar(_head(path))


def incomplete(path: Path) -> str | None:
    return None  # seen only at its end, after decompressing all of it


def read(path: Path, *, trust: bool) -> CheckpointInventory:
    if _is_tar(_head(path)):
        return _read_tar(path, trust)
    with _content(path) as stream:
        if _is_tar(stream.peek(tarfile.BLOCKSIZE)):
            with _opened_tar(stream, path) as tar:
                (root,) = [_TorchStream(_Stream(file, path)).root(trust) for _, file in _states_in(tar, path)]
        else:
            root = _TorchStream(stream).root(trust)
    ending, _ = _codec(_head(path)) or ("", None)
    return inventory_of(root, path).replaced(layout=f"{NAME} ({ending})", compressed=True)


def unpacked(path: Path, folder: Path) -> Path:
    """Write the ``.pt`` that is in a tar or compressed file into a folder, and say where it is.

    Its name is the file's own, without the endings of the compression. It appears once it is complete.

    Raises:
        CheckpointError: damaged, no such checkpoint, or no space in ``folder``, which then holds nothing new.
    """
    target = folder / (_ENDINGS.sub("", path.name).removesuffix(".pt") + ".pt")
    partial = target.with_name(f".{target.name}.partial")
    if target.exists() and target.samefile(path):
        raise CheckpointError(f"{path}: would be replaced by what is in it; unpack it into another folder")
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(_content(path))
        if _is_tar(stream.peek(tarfile.BLOCKSIZE)):
            states = _states_in(stack.enter_context(_opened_tar(stream, path)), path)
            member, content = next(states)
            source, num_bytes = _Stream(content, path), member.size
        else:  # not said; hardly less than what it was compressed to
            states, source, num_bytes = iter(()), stream, path.stat().st_size
        free_bytes = shutil.disk_usage(folder).free
        if num_bytes > free_bytes:
            raise CheckpointError(f"{path}: unpacks to at least {num_bytes} bytes, {folder} has {free_bytes} free")
        try:
            with open(partial, "wb") as out:
                shutil.copyfileobj(source, out, _SLICE_BYTES)
            for _ in states:  # to the end: what else is there?
                raise CheckpointError(f"{path}: holds {STATES} twice")
            os.replace(partial, target)
        except OSError as error:
            raise CheckpointError(f"{target}: cannot be written: {error.strerror or error}") from error
        finally:
            partial.unlink(missing_ok=True)
    return target


# ---------------------------------------------------------------------------------------------------------------------
# Tar


def _is_tar(head: bytes) -> bool:
    return head[257:262] == b"ustar"


def _read_tar(path: Path, trust: bool) -> CheckpointInventory:
    """Uncompressed: the archive lies in it as it is."""
    with opened(path) as file, _opened_tar(file, path, mode="r:") as tar:
        (member,) = [member for member, _ in _states_in(tar, path)]
    archive = Archive.open(path, member.offset_data, member.size)
    _refuse_rank_file(archive.read("data.pkl"), path)
    root = with_records(archive.unpickle(trust=trust), archive)
    return inventory_of(root, path).replaced(layout="monolithic, in a tar file")


@contextlib.contextmanager
def _opened_tar(file: Any, path: Path, mode: Any = "r|") -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(fileobj=file, mode=mode) as tar:
            yield tar
    except (tarfile.TarError, EOFError) as error:
        raise CheckpointError(f"{path}: damaged or truncated tar file ({error})") from error


def _states_in(tar: tarfile.TarFile, path: Path) -> Iterator[tuple[tarfile.TarInfo, IO[bytes]]]:
    """The member with Composer's states; goes through the whole tar file, and says what it is if it is not that."""
    names = []
    for member in tar:
        name = posixpath.normpath(member.name)
        names.append(name)
        if name.split("/")[0] == "deepspeed":
            raise CheckpointError(
                f"{path}: a DeepSpeed checkpoint (deepspeed_config, Composer before 0.28), with the weights in "
                "DeepSpeed's own form; convert it with DeepSpeed's zero_to_fp32.py"
            )
        if name == STATES and member.isreg() and not member.issparse():
            content = tar.extractfile(member)
            assert content is not None  # a regular file
            yield member, content
    if STATES not in names:
        shown = ", ".join(names[:8]) or "nothing"
        raise CheckpointError(f"{path}: a tar file without {STATES}, so not Composer's; it holds {shown}")


# ---------------------------------------------------------------------------------------------------------------------
# Streams


class _Readable(Protocol):
    def read(self, size: int = ..., /) -> bytes: ...


class _Stream:
    """Bytes that can be read once, with a look ahead; damage is our error."""

    def __init__(self, file: _Readable, path: Path) -> None:
        self.path = path
        self._file = file
        self._buffer = b""
        self._at = 0

    def peek(self, size: int) -> bytes:
        """The next bytes, at least ``size`` of them before the end; they stay there."""
        if len(self._buffer) - self._at < size:
            parts = [self._buffer[self._at :]]
            missing = size - len(parts[0])
            while missing > 0 and (part := self._read_file()):
                parts.append(part)
                missing -= len(part)
            self._buffer, self._at = b"".join(parts), 0
        return self._buffer[self._at :] if self._at else self._buffer

    def take(self, size: int) -> bytes:
        """These bytes, which ``peek`` has shown."""
        self._at += size
        return self._buffer[self._at - size : self._at]

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            return b"".join(iter(lambda: self.read(_SLICE_BYTES), b""))
        return self.take(min(size, len(self.peek(min(size, 1)))))

    def _read_file(self) -> bytes:
        try:
            return self._file.read(_SLICE_BYTES)
        except (OSError, EOFError, lzma.LZMAError, zlib.error, tarfile.TarError) as error:
            raise CheckpointError(f"{self.path}: damaged or truncated ({error})") from error


def _head(path: Path) -> bytes:
    with opened(path) as file:
        return file.read(tarfile.BLOCKSIZE)


def _codec(head: bytes) -> tuple[str, Callable[[IO[bytes]], Any] | str] | None:
    return next((codec for magic, codec in _CODECS.items() if head.startswith(magic)), None)


@contextlib.contextmanager
def _content(path: Path) -> Iterator[_Stream]:
    """What is in the file, decompressed."""
    codec = _codec(_head(path))
    with opened(path) as file:
        if codec is None:
            yield _Stream(file, path)
        elif isinstance(codec[1], str):
            with _Command(codec[1], file, path) as output:
                yield _Stream(output, path)
        else:
            with codec[1](file) as content:
                yield _Stream(content, path)


class _Command:
    """The output of ``zstd -dc`` and the like; its failure is seen at the end of the output."""

    def __init__(self, command: str, file: IO[bytes], path: Path) -> None:
        if shutil.which(command) is None:
            raise CheckpointError(
                f"{path}: needs the command {command} to decompress, which is not in the PATH; install it, or "
                f"decompress the file elsewhere"
            )
        # By stdin: a file name may look like an option.
        self._process = subprocess.Popen([command, "-dc"], stdin=file, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def __enter__(self) -> "_Command":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._process.kill()  # where the reader went away early
        self._process.communicate()

    def read(self, size: int = -1) -> bytes:
        assert self._process.stdout is not None and self._process.stderr is not None
        data: bytes = self._process.stdout.read(size)
        if not data and self._process.wait() != 0:
            raise OSError(self._process.stderr.read().decode(errors="replace").strip())
        return data


# ---------------------------------------------------------------------------------------------------------------------
# A torch archive in a stream


_LOCAL, _DESCRIPTOR, _CENTRAL, _END = b"PK\3\4", b"PK\7\x08", b"PK\1\2", b"PK\5\6"
_LOCAL_HEADER = struct.Struct("<4xHHHHHIIIHH")
_CENTRAL_HEADER = struct.Struct("<4xHHHHHHIIIHHHHHII")
_END_BYTES = 22
_HAS_DESCRIPTOR = 1 << 3
_NOT_SAID = {0, 0xFFFFFFFF}


class _TorchStream:
    """The archive that ``torch.save`` writes, from its beginning to its end.

    Its local headers say no sizes: torch writes them after each record, with the record's CRC32 (a data descriptor).
    So a record ends where a descriptor says exactly the bytes and the CRC32 that came before it.
    """

    def __init__(self, stream: _Stream) -> None:
        self._stream = stream
        self._path = stream.path
        self._records: dict[str, tuple[int, int]] = {}  # size and CRC32

    def root(self, trust: bool) -> Any:
        """What was saved, with ``TensorRecord``s; every record has been seen and checked then."""
        name, data = self._next_record()
        if name != "data.pkl":
            self._fail(f"begins with record {name}, expected data.pkl; decompress it and look at the file itself")
        _refuse_rank_file(data, self._path)
        value = read_pickle(data, where=str(self._path), trust=trust, storages=lambda key: sys.maxsize)
        while (magic := self._stream.peek(4)[:4]) == _LOCAL:
            name, data = self._next_record()
            if name == "byteorder" and data != b"little":
                self._fail("written on a big-endian machine, which is not supported")
        if magic != _CENTRAL:
            self._fail("damaged or truncated after its last record")
        self._check_directory()
        return mapped(value, self._packed)

    def _next_record(self) -> tuple[str, bytes]:
        """Name and, of the pickle and small ones, content of the next record."""
        if self._stream.peek(4)[:4] != _LOCAL:
            self._fail("holds no torch.save file (or one of torch before 1.6)")
        head = self._stream.peek(_LOCAL_HEADER.size)
        if len(head) < _LOCAL_HEADER.size:
            self._fail("truncated")
        _, flags, method, *_, compressed_size, size, name_length, extra_length = _LOCAL_HEADER.unpack_from(head)
        self._stream.take(_LOCAL_HEADER.size)
        full_name = self._exactly(name_length).decode(errors="replace")
        self._exactly(extra_length)
        name = full_name.partition("/")[2] or full_name
        if (
            method != 0
            or not flags & _HAS_DESCRIPTOR
            or not {size, compressed_size} <= _NOT_SAID
            or name in self._records
        ):
            self._fail(f"record {full_name} is not as torch.save writes one; decompress it and look at the file itself")
        return name, self._to_descriptor(name, _MAX_PICKLE_BYTES if name == "data.pkl" else 64)

    def _to_descriptor(self, name: str, kept_bytes: int) -> bytes:
        kept = bytearray()
        size = crc = 0
        while True:
            ahead = self._stream.peek(_SLICE_BYTES)
            at = ahead.find(_DESCRIPTOR)
            if at < 0:  # its first bytes may be the last that are seen
                at = max(len(ahead) - len(_DESCRIPTOR) + 1, 0)
            elif at == 0 and (length := self._descriptor_bytes(size, crc)):
                self._records[name] = size, crc
                self._stream.take(length)
                return bytes(kept)
            if at == 0:
                at = 1  # a descriptor of something else, in the data
            if len(ahead) < 16:
                self._fail(f"record {name} is damaged, or the file is truncated: its CRC32 fits nowhere")
            data = self._stream.take(at)
            size, crc = size + at, zlib.crc32(data, crc)
            if len(kept) < kept_bytes:
                kept += data[: kept_bytes - len(kept)]
            if name == "data.pkl" and size > kept_bytes:
                self._fail(f"its pickle has more than {kept_bytes} bytes")

    def _descriptor_bytes(self, size: int, crc: int) -> int:
        """The length of the descriptor ahead, if it is the one of what was read; else 0."""
        ahead = self._stream.peek(28)
        said_crc = int.from_bytes(ahead[4:8], "little")
        if said_crc not in (crc, 0):  # 0: torch.serialization.set_crc32_options(False)
            return 0
        for length, width in ((24, 8), (16, 4)):
            sizes = ahead[8:length]
            if sizes == (size % (1 << 8 * width)).to_bytes(width, "little") * 2 and ahead[length : length + 4] in (
                _LOCAL,
                _CENTRAL,
            ):
                return length
        return 0

    def _check_directory(self) -> None:
        """The central directory names what was read, and is complete."""
        listed = {}
        while (head := self._stream.peek(_CENTRAL_HEADER.size))[:4] == _CENTRAL and len(head) >= _CENTRAL_HEADER.size:
            fields = _CENTRAL_HEADER.unpack_from(head)
            self._stream.take(_CENTRAL_HEADER.size)
            full_name = self._exactly(fields[9]).decode(errors="replace")
            self._exactly(fields[10] + fields[11])
            listed[full_name.partition("/")[2] or full_name] = fields[6]
        for name in listed.keys() | self._records.keys():
            if name not in listed or name not in self._records:
                self._fail(f"record {name} is in its directory and not in the file, or the other way round")
            if listed[name] not in (self._records[name][1], 0):
                self._fail(f"record {name}: its directory says another CRC32")
        tail = self._stream.read()
        if _END not in tail or len(tail) - tail.rindex(_END) < _END_BYTES:
            self._fail("truncated at its very end")

    def _packed(self, value: Any, entry: EntryPath) -> Any:
        if not isinstance(value, StoredTensor):
            return value
        size, _ = self._records.get(f"data/{value.storage.key}", (-1, 0))
        if size < value.storage.num_bytes:
            self._fail(f"{dotted(entry)} needs a record of {value.storage.num_bytes} bytes, there are {max(size, 0)}")
        chunk = Chunk((0,) * len(value.shape), value.shape, Packed(self._path))
        return TensorRecord(name=dotted(entry), shape=value.shape, dtype=value.dtype, chunks=(chunk,))

    def _exactly(self, size: int) -> bytes:
        if len(self._stream.peek(size)) < size:
            self._fail("truncated")
        return self._stream.take(size)

    def _fail(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self._path}: {what}")


def _refuse_rank_file(data: bytes, path: Path) -> None:
    """``sharded`` of Composer 0.13 to 0.15, compressed: the other ranks' files are needed too."""
    if b"torch.distributed._shard.sharded_tensor" in data:
        raise CheckpointError(
            f"{path}: one rank's part of a checkpoint, compressed; unpack the files of all ranks into one folder first"
        )
