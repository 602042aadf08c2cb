"""Make Composer and LLM Foundry train on FSDP2. Within ``fsdp2()``, FSDP1 configurations shard with ``fully_shard``."""

if __name__ != "composer_fsdp2.compat":
    raise ImportError(f"this package is composer_fsdp2.compat; it was imported as {__name__!r}")

from composer_fsdp2.prepare import prepare_fully_shard as prepare_fsdp_module

from .install import fsdp2, install, is_installed, uninstall

__all__ = ["fsdp2", "install", "is_installed", "prepare_fsdp_module", "uninstall"]
