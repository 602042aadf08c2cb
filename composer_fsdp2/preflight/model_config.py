"""A transformers model without weights, from its ``config.json`` alone; never from the network."""

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

from composer_fsdp2.config.text import one_line
from composer_fsdp2.errors import ConfigError

FILE = "config.json"


def find_model_config(given: str | Path | None, name: str | None = None) -> Path:
    """The ``config.json`` of a model: the one that is given, the one in the folder that ``name`` is, or the cached one.

    Args:
        given: ``--model-config``: a file or a folder.
        name: A model's name on the Hugging Face hub, or its folder.
    Raises:
        ConfigError: there is none; says how to come by it.
    """
    if given is not None:
        path = Path(given) / FILE if Path(given).is_dir() else Path(given)
        if not str(given) or not path.is_file():
            raise ConfigError(f"--model-config {given}: there is no file {path}")
        return path
    if name is None:
        raise ConfigError("which model is trained is not said here; give its config.json with --model-config")
    folder = Path(name).expanduser()
    if folder.is_dir() and (folder / FILE).is_file():
        return folder / FILE
    if (cached := _cached(name)) is not None:
        return cached
    raise ConfigError(
        f"the model {name} has no {FILE} here, and nothing is downloaded while planning; give it with --model-config "
        f"FILE, or run: huggingface-cli download {name} {FILE}"
    )


def _cached(name: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, FILE)
    except (ImportError, ValueError):  # not installed; not a name that the hub could have
        return None
    return Path(found) if isinstance(found, str) else None


@contextlib.contextmanager
def folder_with(path: Path) -> Iterator[Path]:
    """A folder that holds the file as ``config.json`` and that ``from_pretrained`` reads; it is gone afterwards."""
    if path.name == FILE:
        yield path.parent
        return
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(path, Path(folder) / FILE)
        yield Path(folder)


def is_model_config(values: Mapping[str, Any]) -> bool:
    """Whether these are a transformers model's own values."""
    return isinstance(values.get("model_type"), str) and "fsdp_config" not in values


def build_model(path: Path, changes: Mapping[str, Any] | None = None) -> nn.Module:
    """The model of a ``config.json`` on the meta device, some of its values changed.

    Raises:
        ConfigError: it is none that transformers knows, or its model cannot be built; names the file.
    """
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError as error:
        raise ConfigError(f"{path}: building this model needs transformers: pip install transformers") from error
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no {FILE}: {error}") from error
    if not isinstance(values, dict) or not is_model_config(values):
        raise ConfigError(f"{path} names no model_type, so that it is no transformers model's {FILE}")
    values |= changes or {}
    if values.get("quantization_config"):
        raise ConfigError(
            f"{path}: quantization_config is not planned; give the {FILE} of the model whose weights are not quantized"
        )
    kind = values["model_type"]
    if kind not in CONFIG_MAPPING:
        raise ConfigError(f"{path}: transformers here knows no model_type {kind}; a newer one may")
    try:
        config = CONFIG_MAPPING[kind].from_dict(values)
        config.use_cache = False
        model_class, without_initialization = _model_class(kind, values), _without_initialization()
        # Imported before: torch's compiler, which transformers imports, computes with tensors while it is imported.
        with torch.device("meta"), without_initialization:
            model = model_class._from_config(config, torch_dtype=torch.float32)
        model.tie_weights()  # which transformers leaves out where it leaves out the initialization
        trained: nn.Module = model.train()
        return trained
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{path}: the model cannot be built: {one_line(error)}") from error


def no_split_classes(model: nn.Module) -> set[str]:
    """The classes of the layers that a transformers model names as one piece each."""
    named = [getattr(module, "_no_split_modules", None) or () for module in model.modules()]
    present = {type(module).__name__ for module in model.modules()}
    return present.intersection(*[set().union(*named)])


def longest_sequence(model: nn.Module) -> int | None:
    """How many tokens the model's positions suffice for, where its configuration tells."""
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    lengths = (getattr(config, name, None) for config in configs for name in _LENGTHS)
    return next((length for length in lengths if isinstance(length, int) and length > 0), None)


_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")


def _without_initialization() -> contextlib.AbstractContextManager[Any]:
    """On meta no value is written, but going through all modules takes as long as if one were."""
    from transformers.modeling_utils import no_init_weights

    context: contextlib.AbstractContextManager[Any] = no_init_weights()
    return context


def _model_class(kind: str, values: Mapping[str, Any]) -> Any:
    """The first class of ``architectures`` that this transformers has, else what a causal language model would be."""
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
