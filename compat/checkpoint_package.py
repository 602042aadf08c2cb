"""Composer's newer package ``composer.checkpoint``, whose functions save by whether a model is sharded."""

import os
from collections.abc import Callable
from typing import Any

from composer.checkpoint import save

from composer_fsdp2.sharding.agree import gather

from .seams import seam


@seam(
    "composer.checkpoint.save",
    "_save_sharded_state_dict_to_disk",
    why="rank 0 asked whether the folder is there while the others were making it: now and then a save hung",
)
def write_shards(
    original: Callable[..., Any],
    state_dict: dict[str, Any],
    destination_file_path: str,
    overwrite: bool = False,
    save_format: str = "pt",
) -> str | None:
    """``_save_sharded_state_dict_to_disk`` of ``composer.checkpoint``: whether the folder is there, asked in time.

    Composer 0.32.1 has rank 0 ask while the other ranks go on to torch, which makes the folder: of a fresh one a save
    says now and then that it exists, on rank 0 alone, and the others wait for ever.

    Called on all ranks; gathers rank 0's answer.
    """
    if not overwrite and gather(os.path.exists(save._strip_suffixes(destination_file_path)))[0]:
        raise ValueError(f"Directory {destination_file_path} already exists. Set overwrite=True to overwrite it.")
    return original(state_dict, destination_file_path, True, save_format)
