"""Hugging Face's words: a Trainer's arguments, accelerate's files, and axolotl's files, which have both."""

from composer_fsdp2.migration.dialects.huggingface.axolotl import AxolotlDialect
from composer_fsdp2.migration.dialects.huggingface.huggingface import HuggingFaceDialect

__all__ = ["AxolotlDialect", "HuggingFaceDialect"]
