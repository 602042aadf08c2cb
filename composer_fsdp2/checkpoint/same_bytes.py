"""Whether two tensors of a checkpoint are the same bytes, from metadata alone: how tied weights show."""

import torch

from composer_fsdp2.checkpoint.inventory import Chunk, NestedArchive, Strided, TensorRecord


def are_one_storage(a: TensorRecord, b: TensorRecord) -> bool:
    """Whether both are the same view of the same bytes, as ``torch.save`` leaves tied weights."""
    if a is b:
        return True
    return _are_alike(a, b) and all(one.source == other.source for one, other in zip(a.chunks, b.chunks, strict=True))


def have_same_bytes(a: TensorRecord, b: TensorRecord) -> bool:
    """Whether the contents are equal, which their records' CRC32s tell; False also where nothing says.

    Two tensors can be equal without being tied: of ones, of zeros.
    """
    if are_one_storage(a, b):
        return True
    return _are_alike(a, b) and all(
        _fingerprint(one, a.dtype) == _fingerprint(other, b.dtype) is not None
        for one, other in zip(a.chunks, b.chunks, strict=True)
    )


def same_content(a: object, b: object) -> bool | None:
    """Whether two entries for one parameter are equal; None where only reading them can tell."""
    if not isinstance(a, TensorRecord) or not isinstance(b, TensorRecord):
        return None
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    if are_one_storage(a, b):
        return True
    if not _are_alike(a, b):
        return None
    pairs = [
        (_record_fingerprint(one, a.dtype), _record_fingerprint(other, b.dtype))
        for one, other in zip(a.chunks, b.chunks, strict=True)
    ]
    known = [(one, other) for one, other in pairs if one is not None and other is not None and one[1:] == other[1:]]
    if any(one != other for one, other in known):
        return False
    return True if len(known) == len(pairs) else None


def _record_fingerprint(chunk: Chunk, dtype: torch.dtype) -> tuple[object, ...] | None:
    """What tells a chunk's content if it is all of its record, CRC32 first; None if no CRC32 is stored, or not here."""
    source = chunk.source
    assert isinstance(source, Strided | NestedArchive)
    if isinstance(source, NestedArchive) and source.is_remote:
        return None  # it may be here and not on another machine, whose ranks must come to the same result
    is_all_of_record = source.locate(chunk, dtype).blob.num_bytes == chunk.numel * dtype.itemsize
    return _fingerprint(chunk, dtype) if is_all_of_record else None


def _are_alike(a: TensorRecord, b: TensorRecord) -> bool:
    """Whether both have one shape and dtype, and lie in files, in the same boxes."""
    boxes = [[(chunk.offsets, chunk.sizes) for chunk in record.chunks] for record in (a, b)]
    are_in_files = all(isinstance(chunk.source, Strided | NestedArchive) for chunk in (*a.chunks, *b.chunks))
    return bool(a.chunks) and (a.shape, a.dtype) == (b.shape, b.dtype) and boxes[0] == boxes[1] and are_in_files


def _fingerprint(chunk: Chunk, dtype: torch.dtype) -> tuple[object, ...] | None:
    """What tells a chunk's content; None where the file has no CRC32 for it."""
    assert isinstance(chunk.source, Strided | NestedArchive)
    source = chunk.source.locate(chunk, dtype)
    blob = source.blob
    return None if blob.crc32 is None else (blob.crc32, blob.num_bytes, source.offset, source.stride)
