"""A file or folder that no layout recognizes, described for the error that refuses it."""

from pathlib import Path

from composer_fsdp2.checkpoint.archive.torch_archive import zip_names
from composer_fsdp2.config.text import and_more
from composer_fsdp2.errors import CheckpointError

# torch.save's first pickle until 1.6: its magic number.
_LEGACY_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_BY_FIRST_BYTES = {
    _LEGACY_TORCH: "a file of torch.save before 1.6; torch.load it (with weights_only=True) and torch.save it again",
    b"GGUF": "a GGUF file of llama.cpp, which holds converted and often quantized weights; use the model it came from",
    b"\x89HDF": "an HDF5 file (Keras?)",
    b"\x93NUMPY": "a NumPy array",
    b"version https://git-lfs": "a Git LFS pointer in place of the file; run git lfs pull",
    **{b"\x80" + bytes([protocol]): "a plain pickle, not of torch.save" for protocol in range(2, 6)},
}


def looks_like(path: Path) -> str:
    """What lies at a path that no layout recognises, and what to do, where that is known."""
    if path.is_dir():
        return _folder(path)
    # Nothing else is opened: who reads a pipe waits for what nobody writes.
    return _file(path) if path.is_file() else "neither a file nor a folder, but a pipe, a socket or a device"


def listing(folder: Path) -> str:
    """The first names in a folder."""
    names = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir())
    return and_more(names, 8) or "nothing"


def other_archive(path: Path) -> str | None:
    """A zip file that torch.save did not write; None for its own, and for what is not a readable zip file."""
    try:
        names = zip_names(path)
    except CheckpointError:
        return None
    parts = {name.partition("/")[2] for name in names}
    if any(name.endswith(".npy") for name in names):
        return "NumPy arrays (.npz)"
    if "constants.pkl" in parts or any(part.startswith("code/") for part in parts):
        return "a TorchScript module; save its state_dict() with torch.save"
    if "data.pkl" not in parts:
        return f"a zip file, not of torch.save; it holds {and_more(names, 8) or 'nothing'}"
    return None


def _file(path: Path) -> str:
    with open(path, "rb") as file:
        head = file.read(4096)
    if (archive := other_archive(path)) is not None:
        return archive
    if not head:
        return "empty: the save was cut short, or the disk was full"
    for first_bytes, what in _BY_FIRST_BYTES.items():
        if head.startswith(first_bytes):
            return what
    if path.name.endswith(".index.json"):
        return "the index of a folder of weights; name the folder"
    if path.suffix == ".onnx":
        return "an ONNX model"
    if head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < path.stat().st_size:
        return "a safetensors file by its content; give it a name that ends in .safetensors"
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        text = head[: error.start].decode() if error.start > len(head) - 4 else ""  # cut within a character
    if text and all(character.isprintable() or character.isspace() for character in text):
        return f"a text file, which begins with {text[:40]!r}"
    return f"of no format that is known here; it begins with the bytes {head[:8].hex(' ')}"


def _folder(path: Path) -> str:
    names = {entry.name for entry in path.iterdir()}
    if not names:
        return "an empty folder"
    if any(
        name.startswith(("zero_pp_rank_", "bf16_zero_pp_rank_", "mp_rank_")) or name == "zero_to_fp32.py"
        for name in names
    ):
        return "a DeepSpeed checkpoint; convert it with DeepSpeed's zero_to_fp32.py"
    if "pytorch_model.bin.index.json" in names:
        return (
            "Hugging Face weights in pickled shards (pytorch_model-*.bin); load the model with transformers and "
            "save_pretrained(..., safe_serialization=True)"
        )
    if "adapter_config.json" in names:
        return "a PEFT adapter, without the model that it belongs to"
    return f"no checkpoint; the folder holds {listing(path)}"
