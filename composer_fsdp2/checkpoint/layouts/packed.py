"""A monolithic checkpoint in a tar or compressed file (``.pt.gz``, ``.tar.zst``). It is unpacked before it is read."""

import bz2
import contextlib
import gzip
import io
import lzma
import posixpath
import re
import shutil
import subprocess
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

from composer_fsdp2.atomic import replacing
from composer_fsdp2.checkpoint.archive.disk import opened, sync
from composer_fsdp2.checkpoint.budget import Budget
from composer_fsdp2.checkpoint.layouts._layout import Layout
from composer_fsdp2.config.text import and_more
from composer_fsdp2.errors import CheckpointError

STATES = "composer_states.pt"  # Composer's name for the .pt in a tar file

_SLICE_BYTES = 1 << 20
# Weights are no smaller than half of themselves when packed, and an optimizer's state that is all zero makes a file
# three times as small.
_MAX_RATIO = 200
_OBJECTS_PER_MEMBER = 100
_ENDINGS = re.compile(r"(\.pt)?(\.(tar|tgz|gz|bz2|xz|lzma|zst|lz4|lzo))+$")

# How to decompress a file, by its first bytes: in Python, or by the command that Composer uses.
_OPENERS: dict[bytes, Callable[[IO[bytes]], Any] | str] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
    b"]\0\0": lzma.open,
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"\x89LZO\0": "lzop",
}


def _recognize(path: Path) -> bool:
    """Recognize a packed file by its first bytes, regardless of its name."""
    return path.is_file() and (_is_tar(head := _head(path)) or _opener(head) is not None)


def unpacked(path: Path, folder: Path) -> Path:
    """Unpack the ``.pt`` in a tar or compressed file into a folder, and return its path.

    The name is that of the file, without the suffixes of the compression. The file appears when it is complete.

    Raises:
        CheckpointError: the file is damaged, contains no such checkpoint, or ``folder`` has not enough space.
            ``folder`` is then unchanged.
    """
    target = folder / (_ENDINGS.sub("", path.name).removesuffix(".pt") + ".pt")
    if target.exists() and target.samefile(path):
        raise CheckpointError(f"{path}: would be replaced by what is in it; unpack it into another folder")
    with contextlib.ExitStack() as stack:
        content = stack.enter_context(_content(path))
        source: IO[bytes] = content
        states: Iterator[tuple[tarfile.TarInfo, IO[bytes]]] = iter(())
        num_bytes = path.stat().st_size  # not stored; hardly less than the compressed size
        if _is_tar(content.peek(tarfile.BLOCKSIZE)):
            states = _states_in(stack.enter_context(_opened_tar(content, path)), path)
            member, source = next(states)
            num_bytes = member.size
        free_bytes = shutil.disk_usage(folder).free
        if num_bytes > free_bytes:
            raise CheckpointError(f"{path}: unpacks to at least {num_bytes} bytes, {folder} has {free_bytes} free")
        try:
            with replacing(target) as partial, open(partial, "wb") as out:
                shutil.copyfileobj(source, out, _SLICE_BYTES)
                for _ in states:  # read to the end: a second one is an error
                    raise CheckpointError(f"{path}: holds {STATES} twice")
                sync(out)
        except OSError as error:
            raise CheckpointError(f"{target}: cannot be written: {error.strerror or error}") from error
    return target


# ---------------------------------------------------------------------------------------------------------------------
# Tar


def _is_tar(head: bytes) -> bool:
    return head[257:262] == b"ustar"


@contextlib.contextmanager
def _opened_tar(file: Any, path: Path) -> Iterator[tarfile.TarFile]:
    class Member(_Member):
        max_bytes, budget = _max_bytes(path), Budget.of(path)

    try:
        with tarfile.open(fileobj=file, mode="r|", tarinfo=Member) as tar:
            yield tar
    except CheckpointError:
        raise
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{path}: damaged or truncated tar file ({error})") from error


class _Member(tarfile.TarInfo):
    """A tar member as Composer writes it. Raises for headers that make Python's reader hang, or take too much memory.

    These are a negative size (CVE-2025-8194), a size beyond the end of the file (a stream is read for it block by
    block), names and extended headers of unlimited length, and sparse files.
    """

    max_bytes: float
    budget: Budget

    def _proc_member(self, tar: tarfile.TarFile) -> Any:
        is_extended = self.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, *_LONG_NAMES)
        if self.size < 0:
            raise tarfile.ReadError(f"a header of {self.size} bytes")
        self.budget.spend("its members", num_bytes=is_extended * self.size, num_objects=_OBJECTS_PER_MEMBER)
        member = super()._proc_member(tar)  # type: ignore[misc]
        if not 0 <= member.size <= self.max_bytes:
            raise tarfile.ReadError(f"a member of {member.size} bytes")
        return member

    def _proc_sparse(self, *unused: Any) -> NoReturn:
        raise tarfile.ReadError("a sparse file")

    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _proc_sparse


_LONG_NAMES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


def _states_in(tar: tarfile.TarFile, path: Path) -> Iterator[tuple[tarfile.TarInfo, IO[bytes]]]:
    """Yield the member with Composer's states, then read the rest of the tar file.

    Raises:
        CheckpointError: there is no such member; lists the members.
    """
    names, num_found = [], 0
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
            num_found += 1
            yield member, content
    if not num_found and STATES in names:
        raise CheckpointError(f"{path}: a tar file whose {STATES} is not a regular file, so not Composer's")
    if not num_found:
        shown = and_more(names, 8) or "nothing"
        raise CheckpointError(f"{path}: a tar file without {STATES}, so not Composer's; it holds {shown}")


# ---------------------------------------------------------------------------------------------------------------------
# Compression


class _Decompressed(io.RawIOBase):
    """The output of a decompressor as a file. Raises CheckpointError for damaged input.

    Args:
        max_bytes: Raise if the output is longer.
    """

    def __init__(self, file: Any, path: Path, max_bytes: float) -> None:
        self._file, self._path = file, path
        self._max_bytes, self._num_bytes = max_bytes, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._file.read(len(buffer))
        except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
            raise CheckpointError(f"{self._path}: damaged or truncated ({error})") from error
        self._num_bytes += len(data)
        if self._num_bytes > self._max_bytes:
            raise CheckpointError(
                f"{self._path}: unpacks to more than {self._max_bytes:.0f} bytes, which no checkpoint of its size "
                "does; if you know what it is, decompress it yourself"
            )
        buffer[: len(data)] = data
        return len(data)


def _head(path: Path) -> bytes:
    with opened(path) as file:
        return file.read(tarfile.BLOCKSIZE)


def _opener(head: bytes) -> Callable[[IO[bytes]], Any] | str | None:
    return next((opener for magic, opener in _OPENERS.items() if head.startswith(magic)), None)


def _max_bytes(path: Path) -> float:
    """The maximum size of the unpacked checkpoint; see [Note: budgets]."""
    num_bytes = path.stat().st_size
    return num_bytes if _opener(_head(path)) is None else Budget.of(path, more_bytes=_MAX_RATIO * num_bytes).num_bytes


@contextlib.contextmanager
def _content(path: Path) -> Iterator[io.BufferedReader]:
    """The file's content, decompressed."""
    opener = _opener(_head(path))
    with contextlib.ExitStack() as stack:
        file: Any = stack.enter_context(opened(path))
        if opener is not None:
            file = stack.enter_context(_Command(opener, file, path) if isinstance(opener, str) else opener(file))
        yield io.BufferedReader(_Decompressed(file, path, _max_bytes(path)), _SLICE_BYTES)


class _Command:
    """The output of ``zstd -dc`` or a similar command as a file. Raises at the end if the command failed."""

    def __init__(self, command: str, file: IO[bytes], path: Path) -> None:
        if shutil.which(command) is None:
            raise CheckpointError(
                f"{path}: needs the command {command} to decompress, which is not in the PATH; install it, or "
                f"decompress the file elsewhere"
            )
        # Passed by stdin, because a file name may look like an option.
        self._process = subprocess.Popen([command, "-dc"], stdin=file, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def __enter__(self) -> "_Command":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._process.kill()  # if the reader closed the pipe early
        self._process.communicate()

    def read(self, size: int = -1) -> bytes:
        assert self._process.stdout is not None and self._process.stderr is not None
        data: bytes = self._process.stdout.read(size)
        if not data and self._process.wait() != 0:
            raise OSError(self._process.stderr.read().decode(errors="replace").strip())
        return data


LAYOUT = Layout(name="monolithic, packed", recognize=_recognize, unpack=unpacked)
