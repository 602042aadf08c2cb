"""A monolithic checkpoint in a tar file or a compressed one, ``.pt.gz``, ``.tar.zst``: unpacked before it is read."""

import tempfile
from pathlib import Path

from composer_fsdp2.checkpoint.archive.packed import as_errors_of, compression_of, is_tar, unpacked
from composer_fsdp2.checkpoint.archive.torch_archive import Archive
from composer_fsdp2.checkpoint.inventory import CheckpointInventory, Packed, TensorRecord
from composer_fsdp2.checkpoint.layouts._composer import (
    inventory_of,
    refuse_rank_file,
    with_records,
)
from composer_fsdp2.checkpoint.layouts._layout import Layout
from composer_fsdp2.checkpoint.records import damage_of
from composer_fsdp2.checkpoint.trees import mapped
from composer_fsdp2.errors import CheckpointError

_NAME = "monolithic, packed"


def _recognize(path: Path) -> bool:
    return is_tar(path) or compression_of(path) is not None


def _read(path: Path, trust: bool) -> CheckpointInventory:
    """What lies in it: unpacked for that, checked, and removed again."""
    with tempfile.TemporaryDirectory(prefix="composer-fsdp2-") as folder:
        file = unpacked(path, Path(folder))
        with as_errors_of(path, file):
            archive = Archive.open(file)
            refuse_rank_file(archive, path)
            root = mapped(with_records(archive.unpickle(trust=trust), archive), lambda part, _: _packed(part, path))
            _check(archive)
    return inventory_of(root, path, _NAME)


def _check(archive: Archive) -> None:
    """Each record against its CRC32: what is damaged is not to be found out after a second unpacking."""
    for name, blob in archive.blobs.items():
        if blob.crc32 is not None and (damage := damage_of(blob, ())) is not None:
            raise CheckpointError(f"{archive.where}: record {name} is damaged ({damage})")


def _packed(value: object, path: Path) -> object:
    if not isinstance(value, TensorRecord):
        return value
    return TensorRecord.in_one_chunk(value.name, value.shape, value.dtype, Packed(path))


LAYOUT = Layout(
    name=_NAME,
    recognize=_recognize,
    read=_read,
    unpack=unpacked,
)
