"""The versions, the machine, and the hashes of the inputs of a comparison."""

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

from composer_fsdp2.comparing.run_record import RunRecord

# Distributions by their names in the report.
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
    """Of the installed distributions, and the machine."""
    found = {"Python": platform.python_version(), "machine": f"{platform.platform()}, {os.cpu_count()} CPUs"}
    for title, name in _DISTRIBUTIONS.items():
        try:
            found[title] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[title] = "not installed"
    return found


def data_hash(run: RunRecord) -> str:
    """SHA-256 of the data of all ranks and batches."""
    return hashlib.sha256("".join(digest for batch in run.batches for digest in batch.digests).encode()).hexdigest()


def checkpoint_hash(path: str, check: Callable[[], None]) -> str:
    """SHA-256 of a checkpoint on a local disk, or the reason why it is missing.

    Hashing a large checkpoint takes hours, and follows runs that took longer. An interruption must not lose their
    verdict.

    Args:
        check: Called before each chunk; raises KeyboardInterrupt to stop hashing.
    """
    if not Path(path).exists():
        return "not on a local disk"
    try:
        return hash_of(Path(path), check)
    except KeyboardInterrupt:
        return "not computed: interrupted"


def hash_of(path: Path, check: Callable[[], None] = lambda: None) -> str:
    """Hash the bytes of a file; for a folder, the names and bytes of its files, in the order of the names."""
    digest = hashlib.sha256()
    if path.is_file():
        for piece in _pieces(path):
            check()
            digest.update(piece)
    else:
        for file in sorted(each for each in path.rglob("*") if each.is_file()):
            digest.update(f"{file.relative_to(path)}\0{hash_of(file, check)}\n".encode())
    return digest.hexdigest()


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece
