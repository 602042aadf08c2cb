"""One ``.pt`` with all entries: Composer's ``state_dict_type: full``, and checkpoints of DDP and of a single device."""

from pathlib import Path

from composer_fsdp2.checkpoint.archive.disk import opened
from composer_fsdp2.checkpoint.archive.torch_archive import Archive, zip_names
from composer_fsdp2.checkpoint.archive.writer import plan_archive
from composer_fsdp2.checkpoint.inventory import CheckpointInventory
from composer_fsdp2.checkpoint.layouts._composer import inventory_of, with_records
from composer_fsdp2.checkpoint.layouts._layout import (
    Layout,
    LayoutWriter,
    Output,
    OutputFile,
    TensorWrite,
    WriteRequest,
)
from composer_fsdp2.errors import CheckpointError

_NAME = "monolithic"


def _recognize(path: Path) -> bool:
    if not path.is_file():
        return False
    with opened(path) as file:
        if file.read(4) != b"PK\x03\x04":
            return False
    try:
        names = {name.partition("/")[2] for name in zip_names(path)}
    except CheckpointError:
        return True  # truncated: ``read`` raises the error
    return "data.pkl" in names and "constants.pkl" not in names  # which a TorchScript module has


def _incomplete(path: Path) -> str | None:
    try:
        Archive.open(path)
    except CheckpointError:
        return "truncated: its directory, which is written last, is not there"
    return None


def _read(path: Path, trust: bool) -> CheckpointInventory:
    archive = Archive.open(path)
    root = with_records(archive.unpickle(trust=trust), archive)
    return inventory_of(root, path, _NAME)


def _lay_out(request: WriteRequest) -> Output:
    """The file that ``torch.save(state, ...)`` would write."""
    archive = plan_archive(request.state)
    file = OutputFile(
        name="",
        num_bytes=archive.num_bytes,
        writes=tuple(TensorWrite.full(slot, archive.offset_of(slot)) for slot in archive.slots),
        rest=lambda crcs: archive.frame(dict(zip(archive.slots, crcs, strict=True))),
    )
    return Output(files=(file,), renamed=request.renamed)


LAYOUT = Layout(
    name=_NAME,
    recognize=_recognize,
    incomplete=_incomplete,
    read=_read,
    written=LayoutWriter(name="monolithic", lay_out=_lay_out, max_files=1),
)
