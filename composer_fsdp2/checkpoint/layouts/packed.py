"""A monolithic checkpoint in a tar file or a compressed one, ``.pt.gz``, ``.tar.zst``: unpacked before it is read."""

from pathlib import Path

from composer_fsdp2.checkpoint.archive.packed import compression_of, is_tar, unpacked
from composer_fsdp2.checkpoint.layouts._layout import Layout


def _recognize(path: Path) -> bool:
    return is_tar(path) or compression_of(path) is not None


LAYOUT = Layout(name="monolithic, packed", recognize=_recognize, unpack=unpacked)
