"""The Hugging Face model in a Composer checkpoint: its config, its tokenizer, and its tied weights.

``HuggingFaceModel`` saves config and tokenizer as plain data in ``state.integrations.huggingface`` (Composer's
``HuggingFaceModel.get_metadata``). It registers the transformers model as its attribute ``model``.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from composer_fsdp2.checkpoint.archive.disk import is_plain, read_json
from composer_fsdp2.checkpoint.archive.writer import Slot
from composer_fsdp2.checkpoint.inventory import CheckpointInventory, TensorRecord
from composer_fsdp2.checkpoint.same_bytes import SameBytes
from composer_fsdp2.checkpoint.trees import value_at
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.sharding.dtypes import dtype_name

_CONFIG = "config.json"
_OTHER_SUFFIXES = (".json", ".txt", ".model", ".jinja")  # of config and tokenizer

# Names of the matrix that is tied to the embedding. from_pretrained ties it again.
_OUTPUT_EMBEDDINGS = ("lm_head.weight", "lm_head.decoder.weight", "embed_out.weight", "predictions.decoder.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceForm:
    """The files of a model folder that ``from_pretrained`` loads.

    Args:
        other_files: The files besides the weights: config.json and the tokenizer's.
        left_out: Files that are not written, with the reason.
    """

    config: dict[str, Any]
    other_files: dict[str, bytes]
    left_out: tuple[str, ...]


def has_config(folder: Path) -> bool:
    """Whether a folder contains a Hugging Face model."""
    return (folder / _CONFIG).is_file()


def hugging_face_form(inventory: CheckpointInventory, dtype: torch.dtype | None) -> HuggingFaceForm | None:
    """The files described by ``state.integrations.huggingface``; None if the checkpoint has no Hugging Face model.

    Args:
        dtype: The dtype of cast weights, for the config; None leaves the config unchanged.
    """
    integration = inventory.tree(("state", "integrations", "huggingface"))
    if integration is None:
        integration = value_at(inventory.tree(("state", "integrations")), ("huggingface",))
    config = value_at(integration, ("model", "config", "content"))
    if not isinstance(config, Mapping):
        return None
    config = dict(config)
    name = _architecture(value_at(integration, ("model", "config", "class")))
    if not config.get("architectures") and name is not None:
        config["architectures"] = [name]
    other_files = {_CONFIG: _as_json(config, dtype)}
    left_out = []
    tokenizer = value_at(integration, ("tokenizer",))
    for name, file in (tokenizer if isinstance(tokenizer, Mapping) else {}).items():
        content = _content(name, file)
        if isinstance(content, str):
            left_out.append(f"tokenizer file {name!r}: {content}")
        else:
            other_files[_file_name(name, file)] = content
    return HuggingFaceForm(config=config, other_files=other_files, left_out=tuple(left_out))


def _architecture(full_name: Any) -> str | None:
    """The class of the transformers model, from the class name that Composer saved.

    For a sharded model that is the name of the sharded class: ``FSDP`` plus the model's own name for ``fully_shard``,
    or FSDP1's wrapper.
    """
    module, _, name = full_name.rpartition(".") if isinstance(full_name, str) else ("", "", "")
    if not module.startswith("torch.distributed."):
        return name or None
    return name.removeprefix("FSDP") if name.startswith("FSDP") else None


def _as_json(config: Mapping[str, Any], dtype: torch.dtype | None) -> bytes:
    if dtype is not None:
        key = "dtype" if "dtype" in config else "torch_dtype"  # transformers changed its name in 4.56
        config = {**config, key: dtype_name(dtype)}
    return json.dumps(config, indent=2, sort_keys=True).encode()


def form_of_folder(folder: Path, dtype: torch.dtype | None) -> HuggingFaceForm:
    """The files of a folder that has a config.json. Files besides the weights are copied unchanged.

    Args:
        dtype: As in ``hugging_face_form``.
    """
    names = [path for path in sorted(folder.iterdir()) if path.suffix in _OTHER_SUFFIXES and path.is_file()]
    other_files = {path.name: path.read_bytes() for path in names if not path.name.endswith(".safetensors.index.json")}
    config = read_json(folder / _CONFIG)
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / _CONFIG}: holds no configuration")
    if dtype is not None:
        other_files[_CONFIG] = _as_json(config, dtype)
    return HuggingFaceForm(config=config, other_files=other_files, left_out=())


def _file_name(name: str, file: Mapping[str, Any]) -> str:
    extension = str(file.get("file_extension", ""))
    return name if name.endswith(extension) else name + extension


# By the ending of a tokenizer file: the type of its content in a checkpoint, and its text, as Composer writes it back.
_TEXTS: dict[str, tuple[type | None, Callable[[Any], str]]] = {
    ".json": (object, lambda content: json.dumps(content, ensure_ascii=False)),
    ".txt": (list, lambda lines: "\n".join(map(str, lines))),
    ".jinja": (str, str),
}


def _content(name: Any, file: Any) -> bytes | str:
    """The bytes of a tokenizer file, as Composer restores it; or the reason why it is not restored."""
    if not isinstance(name, str) or not isinstance(file, Mapping) or "content" not in file:
        return "damaged"
    file_name = _file_name(name, file)
    if not is_plain(file_name) or "/" in file_name or file_name.startswith("."):
        return "its name leads out of the folder"
    if file_name == _CONFIG or file_name.endswith((".safetensors", ".safetensors.index.json")):
        return "it has the name of the model's configuration, of its weights or of their index"
    content, extension = file["content"], file.get("file_extension")
    if extension == ".model" and isinstance(content, bytes):
        return content
    if extension == ".py":
        return "code from a checkpoint is not written"
    kind, text_of = _TEXTS.get(str(extension), (None, str))
    if kind is None or not isinstance(content, kind):
        return f"a {extension} file of {type(content).__name__}"
    try:
        return text_of(content).encode()
    except UnicodeEncodeError as error:
        return f"it is not text ({error.reason})"


def without_ties(weights: Mapping[str, Slot], config: Mapping[str, Any] | None) -> tuple[dict[str, Slot], list[str]]:
    """Keep one name of each tied weight. Return the weights, and the removed names as ``a (tied to b)``.

    Weights that share a storage are tied. Sharded checkpoints and FSDP's full ones contain a copy for each name. In
    these an output embedding that is bitwise equal to an earlier matrix counts as tied, unless the config sets it
    otherwise. Other equal weights are kept, because matrices of zeros or ones are equal as well.
    """
    may_tie = config is not None and config.get("tie_word_embeddings", True)
    kept: dict[str, Slot] = {}
    left_out: list[str] = []
    known = SameBytes[str]()
    # Output embeddings last, so that a tied weight keeps the name of the input embedding.
    for name in sorted(weights, key=_is_output):
        slot = weights[name]
        record = slot.source
        assert isinstance(record, TensorRecord)
        tied_name = known.first(record, copies=may_tie and _is_output(name) and len(slot.shape) == 2)
        if tied_name is None:
            kept[name] = slot
            known.add(name, record)
        else:
            left_out.append(f"{name} (tied to {tied_name})")
    return {name: slot for name, slot in weights.items() if name in kept}, left_out


def _is_output(name: str) -> bool:
    return f".{name}".endswith(tuple(f".{end}" for end in _OUTPUT_EMBEDDINGS))
