"""What a report rests on: versions, the machine, and hashes of what was compared."""

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

from composer_fsdp2.comparing.run_record import RunRecord

# By what they are called here, the distributions.
_DISTRIBUTIONS = {
    "composer-fsdp2": "composer-fsdp2",
    "torch": "torch",
    "Composer": "mosaicml",
    "LLM Foundry": "llm-foundry",
    "Streaming": "mosaicml-streaming",
    "transformers": "transformers",
}
_PIECE_BYTES = 1 << 24


def versions() -> dict[str, str]:
    """Of what is installed, and of the machine."""
    found = {"Python": platform.python_version(), "machine": f"{platform.platform()}, {os.cpu_count()} CPUs"}
    for title, name in _DISTRIBUTIONS.items():
        try:
            found[title] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[title] = "not installed"
    return found


def hashes(file: str, runs: Sequence[RunRecord]) -> dict[str, str]:
    """SHA-256 of the file, and of the data that the first run saw."""
    found = {"file": hash_of(Path(file))}
    if runs:
        digests = "".join(digest for batch in runs[0].batches for digest in batch.digests)
        found["data"] = hashlib.sha256(digests.encode()).hexdigest()
    return found


def checkpoint_hash(path: str) -> str:
    """SHA-256 of a checkpoint on a local disk; reads all of it, so that an interruption ends in no hash.

    Large checkpoints take hours, after runs that took longer: their verdict must survive.
    """
    if not Path(path).exists():
        return "not on a local disk"
    try:
        return hash_of(Path(path))
    except KeyboardInterrupt:
        return "not computed: interrupted"


def hash_of(path: Path) -> str:
    """Of a file's bytes; of a folder's files, with their names, in the names' order."""
    digest = hashlib.sha256()
    if path.is_file():
        for piece in _pieces(path):
            digest.update(piece)
        return digest.hexdigest()
    for file in sorted(each for each in path.rglob("*") if each.is_file()):
        digest.update(f"{file.relative_to(path)}\0{hash_of(file)}\n".encode())
    return digest.hexdigest()


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece
