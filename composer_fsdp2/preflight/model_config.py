"""Build a transformers model without weights from its ``config.json``, without network access."""

import contextlib
import importlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.preflight.run_file import as_config_error

FILE = "config.json"


def find_model_config(path: str | Path | None, name: str | None = None) -> Path:
    """Return the path of a model's ``config.json``: ``path`` if set, else in the folder ``name``, else in the Hub's
    cache.

    Args:
        path: ``--model-config``: a file or a folder.
        name: The name of a model on the Hugging Face Hub, or its folder.
    Raises:
        ConfigError: no such file exists; the message says how to download it.
    """
    if path is not None:
        file = Path(path) / FILE if Path(path).is_dir() else Path(path)
        if not str(path) or not file.is_file():
            is_hub_name = str(path).count("/") == 1 and file.suffix != ".json"
            why = _missing(str(path)) if is_hub_name else f"there is no file {file}"
            raise ConfigError(f"--model-config {path}: {why}")
        return file
    if name is None:
        raise ConfigError("this file does not name a model; give its config.json with --model-config")
    in_folder = Path(name).expanduser() / FILE
    found = in_folder if in_folder.is_file() else _cached(name)
    if found is None:
        raise ConfigError(f"{_missing(name)}; or give a local one with --model-config FILE")
    return found


def _missing(name: str) -> str:
    """Return the reason why a model has no ``config.json`` on this machine, and how to download it."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return f"the folder {name} has no {FILE}"
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        return f"there is no folder {name}"
    return (
        f"the model {name} has no {FILE} in the cache, and nothing is downloaded while planning; run: huggingface-cli "
        f"download {name} {FILE} (if https://huggingface.co/{name} asks for it, accept its licence there and run "
        "huggingface-cli login, or set HF_TOKEN, before)"
    )


def _cached(name: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, FILE)
    except (ImportError, ValueError):  # not installed, or not a valid name on the hub
        return None
    return Path(found) if isinstance(found, str) else None


@contextlib.contextmanager
def folder_with(path: Path) -> Iterator[Path]:
    """Yield a folder in which the file is named ``config.json``, for ``from_pretrained``; a temporary folder if
    necessary.
    """
    if path.name == FILE:
        yield path.parent
        return
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(path, Path(folder) / FILE)
        yield Path(folder)


def is_model_config(values: Any) -> bool:
    """Whether these are the values of a transformers model's ``config.json``."""
    is_mapping = isinstance(values, Mapping)
    return is_mapping and isinstance(values.get("model_type"), str) and "fsdp_config" not in values


def build_model(path: Path, changes: Mapping[str, Any]) -> nn.Module:
    """Build the model of a ``config.json`` on the meta device. ``changes`` override values of the file.

    Raises:
        ConfigError: transformers does not know the model, or cannot build it; names the file.
    """
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError as error:
        raise ConfigError(f"{path}: building this model needs transformers: pip install transformers") from error
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no {FILE}: {error}") from error
    if not is_model_config(values):
        raise ConfigError(f"{path} names no model_type, so it is not a transformers model's {FILE}")
    values |= changes
    if values.get("quantization_config"):
        raise ConfigError(
            f"{path}: quantization_config is not planned; give the {FILE} of the model whose weights are not quantized"
        )
    kind = values["model_type"]
    if kind not in CONFIG_MAPPING:
        raise ConfigError(f"{path}: transformers here knows no model_type {kind}; a newer one may")
    with as_config_error(f"{path}: the model cannot be built"):
        config = CONFIG_MAPPING[kind].from_dict(values)
        config.use_cache = False
        # Imported outside of the meta device: torch's compiler, which transformers imports, computes with tensors at
        # import.
        model_class = _model_class(kind, values)
        with torch.device("meta"):
            model: nn.Module = model_class._from_config(config, torch_dtype=torch.float32)
    return model.train()


def _model_class(kind: str, values: Mapping[str, Any]) -> Any:
    """Return the first class in ``architectures`` that the installed transformers has, else its language model class
    for ``kind``.
    """
    from transformers.models.auto import modeling_auto as names
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    mappings = (
        names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        names.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        names.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    usual = [mapping[kind] for mapping in mappings if kind in mapping]
    folder = model_type_to_module_name(kind)
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    for name in (*(values.get("architectures") or ()), *usual):
        if hasattr(module, name):
            return getattr(module, name)
    raise ConfigError(f"{kind} is no language model that transformers can train: no class for it")


def no_split_classes(model: nn.Module) -> set[str]:
    """The classes of layers in a transformers model's ``_no_split_modules``."""
    named = [name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()]
    return {type(module).__name__ for module in model.modules()}.intersection(named)


_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")


def longest_sequence(model: nn.Module) -> int | None:
    """The number of the model's positions, if its configuration has it."""
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    lengths = (getattr(config, name, None) for config in configs for name in _LENGTHS)
    return next((length for length in lengths if isinstance(length, int) and length > 0), None)
