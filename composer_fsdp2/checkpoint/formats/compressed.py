"""A monolithic checkpoint in a tar file or compressed: ``.tar``, ``.tar.gz``, ``.pt.zst`` and the like.

An uncompressed tar holds the ``.pt`` as it is, so its tensors are read in place. Anything compressed is streamed once,
nothing is written: torch writes the pickle first, which says how long every record after it is, and each record is
checked against its CRC32 in passing.

[Note: small files that unpack to large ones] What a few bytes may cost is bounded: how much they unpack to, the headers
of a tar file and how many there are, the records beside those that the pickle names, what comes after the end.
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
_MAX_PICKLE_BYTES = 64 << 20
# What a file may unpack to: this, and so many times its size. Weights are no smaller than half of themselves when
# packed, and an optimizer's state that is all zero makes a file three times as small.
_MAX_UNPACKED_BYTES, _MAX_RATIO = 512 << 20, 200
_MAX_TAR_HEADER_BYTES, _MAX_TAR_MEMBERS = 1 << 20, 10_000
_MAX_OTHER_RECORDS = 64  # beside the storages: version, byteorder and the like
_MAX_TAIL_BYTES = 1 << 17  # a zip file's own: its end, and a comment of 64 KiB
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
        with tarfile.open(fileobj=file, mode=mode, tarinfo=_Member) as tar:
            yield tar
    except CheckpointError:
        raise
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{path}: damaged or truncated tar file ({error})") from error


class _Member(tarfile.TarInfo):
    """A member as Composer writes one; what Python's reader goes on for ever with, or fills the memory, is refused.

    That is a size below zero (CVE-2025-8194), a name or extended header as long as its writer likes, and sparse files.
    """

    def _proc_member(self, tar: tarfile.TarFile) -> Any:
        is_extended = self.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, *_LONG_NAMES)
        if self.size < 0 or (is_extended and self.size > _MAX_TAR_HEADER_BYTES):
            raise tarfile.ReadError(f"a header of {self.size} bytes")
        member = super()._proc_member(tar)  # type: ignore[misc]
        if member.size < 0:
            raise tarfile.ReadError(f"a member of {member.size} bytes")
        return member

    def _proc_sparse(self, *unused: Any) -> NoReturn:
        raise tarfile.ReadError("a sparse file")

    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _proc_sparse


_LONG_NAMES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


def _states_in(tar: tarfile.TarFile, path: Path) -> Iterator[tuple[tarfile.TarInfo, IO[bytes]]]:
    """The member with Composer's states; goes through the whole tar file, and says what it is if it is not that."""
    names = []
    for member in tar:
        name = posixpath.normpath(member.name)
        names.append(name)
        if len(names) > _MAX_TAR_MEMBERS:
            raise CheckpointError(f"{path}: a tar file of more than {_MAX_TAR_MEMBERS} members, so not Composer's")
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
    """Bytes that can be read once, with a look ahead; damage is our error.

    Args:
        max_bytes: After so many the file is refused.
    """

    def __init__(self, file: _Readable, path: Path, *, max_bytes: int | None = None) -> None:
        self.path = path
        self._file = file
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._buffer = b""
        self._at = 0

    def peek(self, size: int) -> bytes:
        """The next ``size`` bytes, or fewer before the end; they stay there."""
        self._fill(size)
        return self._buffer[self._at : self._at + size]

    def take(self, size: int) -> bytes:
        """These bytes, which ``peek`` has shown."""
        self._at += size
        return self._buffer[self._at - size : self._at]

    def read(self, size: int = _SLICE_BYTES, /) -> bytes:
        """At most ``size`` bytes; none at the end."""
        return self.take(min(size, self._fill(min(size, 1))))

    def _fill(self, size: int) -> int:
        """How many bytes lie ahead: ``size`` at least, before the end."""
        if len(self._buffer) - self._at < size:
            parts = [self._buffer[self._at :]]
            missing = size - len(parts[0])
            while missing > 0 and (part := self._read_file()):
                parts.append(part)
                missing -= len(part)
            self._buffer, self._at = b"".join(parts), 0
        return len(self._buffer) - self._at

    def _read_file(self) -> bytes:
        try:
            data = self._file.read(_SLICE_BYTES)
        except CheckpointError:  # of a stream in this one
            raise
        except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error, tarfile.TarError) as error:
            raise CheckpointError(f"{self.path}: damaged or truncated ({error})") from error
        self._num_bytes += len(data)
        if self._max_bytes is not None and self._num_bytes > self._max_bytes:
            raise CheckpointError(
                f"{self.path}: unpacks to more than {self._max_bytes} bytes, which no checkpoint of its size does; if "
                "you know what it is, decompress it yourself"
            )
        return data


def _head(path: Path) -> bytes:
    with opened(path) as file:
        return file.read(tarfile.BLOCKSIZE)


def _codec(head: bytes) -> tuple[str, Callable[[IO[bytes]], Any] | str] | None:
    return next((codec for magic, codec in _CODECS.items() if head.startswith(magic)), None)


@contextlib.contextmanager
def _content(path: Path) -> Iterator[_Stream]:
    """What is in the file, decompressed."""
    codec = _codec(_head(path))
    max_bytes = _MAX_UNPACKED_BYTES + _MAX_RATIO * path.stat().st_size
    with opened(path) as file:
        if codec is None:
            yield _Stream(file, path)
        elif isinstance(codec[1], str):
            with _Command(codec[1], file, path) as output:
                yield _Stream(output, path, max_bytes=max_bytes)
        else:
            with codec[1](file) as content:
                yield _Stream(content, path, max_bytes=max_bytes)


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
_LONGEST_DESCRIPTOR = 28  # with what must follow it
_MAX_FALSE_DESCRIPTORS = 100_000
_SMALL_RECORD_BYTES = 4096  # so far is looked ahead first
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
        self._keys: set[str] = set()  # of the storages that the pickle names

    def root(self, trust: bool) -> Any:
        """What was saved, with ``TensorRecord``s; every record has been seen and checked then."""
        name, data = self._next_record()
        if name != "data.pkl":
            self._fail(f"begins with record {name}, expected data.pkl; decompress it and look at the file itself")
        _refuse_rank_file(data, self._path)
        value = read_pickle(data, where=str(self._path), trust=trust, storages=self._note_storage)
        while (magic := self._stream.peek(4)[:4]) == _LOCAL:
            name, data = self._next_record()
            if len(self._records) > len(self._keys) + _MAX_OTHER_RECORDS:
                self._fail("has more records than its pickle names")
            if name == "byteorder" and data != b"little":
                self._fail("written on a big-endian machine, which is not supported")
        if magic != _CENTRAL:
            self._fail("damaged or truncated after its last record")
        self._check_directory()
        return mapped(value, self._packed)

    def _note_storage(self, key: str) -> int:
        self._keys.add(key)
        return sys.maxsize  # how long its record is will be seen

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
        window, num_false = _SMALL_RECORD_BYTES, 0
        while True:
            content = self._stream.peek(window + _LONGEST_DESCRIPTOR)
            ahead = memoryview(content)
            # Data may look like descriptors all along: each is looked at once, where it lies.
            start, found = 0, content.find(_DESCRIPTOR)
            while 0 <= found < window:
                size, crc = size + found - start, zlib.crc32(ahead[start:found], crc)
                start = found
                if length := _descriptor_bytes(content[found : found + _LONGEST_DESCRIPTOR], size, crc):
                    kept += self._stream.take(found)[: kept_bytes - len(kept)]
                    self._records[name] = size, crc
                    self._stream.take(length)
                    return bytes(kept)
                num_false += 1  # one in four billion bytes of weights
                if num_false > _MAX_FALSE_DESCRIPTORS:
                    self._fail(f"record {name} is full of what looks like its end; decompress it and look at the file")
                found = content.find(_DESCRIPTOR, found + 1)
            if len(content) < window + _LONGEST_DESCRIPTOR:
                self._fail(f"record {name} is damaged, or the file is truncated: its CRC32 fits nowhere")
            size, crc = size + window - start, zlib.crc32(ahead[start:window], crc)
            kept += self._stream.take(window)[: kept_bytes - len(kept)]
            if name == "data.pkl" and size > kept_bytes:
                self._fail(f"its pickle has more than {kept_bytes} bytes")
            window = min(2 * window, _SLICE_BYTES)

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
        tail = self._stream.peek(_MAX_TAIL_BYTES + 1)
        if len(tail) > _MAX_TAIL_BYTES:
            self._fail("goes on after its end")
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


def _descriptor_bytes(ahead: bytes, size: int, crc: int) -> int:
    """The length of the descriptor at the start of ``ahead``, if it is the one of what was read; else 0."""
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


def _refuse_rank_file(data: bytes, path: Path) -> None:
    """``sharded`` of Composer 0.13 to 0.15, compressed: the other ranks' files are needed too."""
    if b"torch.distributed._shard.sharded_tensor" in data:
        raise CheckpointError(
            f"{path}: one rank's part of a checkpoint, compressed; unpack the files of all ranks into one folder first"
        )
