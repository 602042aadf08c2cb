"""One ``.pt`` with everything: Composer's ``state_dict_type: full``, and all of DDP's and one device's checkpoints."""

from pathlib import Path

from composer_fsdp2.checkpoint.archive.disk import opened
from composer_fsdp2.checkpoint.archive.torch_archive import Archive
from composer_fsdp2.checkpoint.archive.writer import plan_archive
from composer_fsdp2.checkpoint.inventory import CheckpointInventory
from composer_fsdp2.checkpoint.layouts import Layout, LayoutWriter
from composer_fsdp2.checkpoint.layouts._composer import inventory_of, with_records
from composer_fsdp2.checkpoint.output import Output, OutputFile, TensorWrite, WriteRequest
from composer_fsdp2.checkpoint.unrecognized import other_archive
from composer_fsdp2.errors import CheckpointError

_NAME = "monolithic"


def _recognize(path: Path) -> bool:
    if not path.is_file():
        return False
    with opened(path) as file:
        is_zip = file.read(4) == b"PK\x03\x04"
    return is_zip and other_archive(path) is None


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
    order=50,  # after the per-rank layout, whose files look alike
    recognize=_recognize,
    incomplete=_incomplete,
    read=_read,
    written=LayoutWriter(word="monolithic", lay_out=_lay_out, max_files=1),
)
