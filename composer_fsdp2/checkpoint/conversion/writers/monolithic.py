"""Composer's ``state_dict_type: full``: one ``torch.save`` archive with everything."""

from collections.abc import Mapping
from typing import Any

from composer_fsdp2.checkpoint.conversion.writers import OutputFile, TensorWrite
from composer_fsdp2.checkpoint.storage.archive_writer import plan_archive

__all__ = ["lay_out"]


def lay_out(state: Mapping[str, Any]) -> tuple[OutputFile, ...]:
    """The file that ``torch.save(state, ...)`` would write."""
    archive = plan_archive(state)
    return (
        OutputFile(
            name="",
            num_bytes=archive.num_bytes,
            writes=tuple(TensorWrite.whole(slot, archive.offset_of(slot)) for slot in archive.slots),
            rest=lambda crcs: archive.frame(dict(zip(archive.slots, crcs, strict=True))),
        ),
    )
