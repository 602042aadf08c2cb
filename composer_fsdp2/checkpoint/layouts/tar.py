"""A monolithic checkpoint in a tar file: the ``.pt`` lies in it as it is, so its tensors are read in place."""

from pathlib import Path

from composer_fsdp2.checkpoint.archive.packed import is_tar, member_of_tar, unpacked
from composer_fsdp2.checkpoint.archive.torch_archive import Archive
from composer_fsdp2.checkpoint.inventory import CheckpointInventory
from composer_fsdp2.checkpoint.layouts import Layout
from composer_fsdp2.checkpoint.layouts._composer import inventory_of, refuse_rank_file, with_records

_NAME = "monolithic, in a tar file"


def _read(path: Path, trust: bool) -> CheckpointInventory:
    archive = Archive.open(path, *member_of_tar(path))
    refuse_rank_file(archive, path)
    return inventory_of(with_records(archive.unpickle(trust=trust), archive), path, _NAME)


LAYOUT = Layout(name=_NAME, order=60, recognize=is_tar, read=_read, unpack=unpacked)
