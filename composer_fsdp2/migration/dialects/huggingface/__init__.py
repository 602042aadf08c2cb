"""Hugging Face's words: a Trainer's arguments, accelerate's files, and axolotl's files, which have both.

``keys`` has a row for each key, ``effective`` the values that were in effect in the run, of defaults and of keys beside
the section too; ``limits`` what a run for FSDP2 has no key for.

What a file configures is what its system did with it, which is not always what it says: transformers 4.51.3 reads the
keys of an ``fsdp_config`` without the prefix ``fsdp_`` only, accelerate 1.8.1 with or without it, and neither reports a
key that it does not read.

Sources: transformers 4.51.3 (``training_args.py``, ``trainer.py``), accelerate 1.8.1 (``utils/dataclasses.py``,
``utils/launch.py``, ``utils/fsdp_utils.py``, ``commands/launch.py``); for FSDP2 in a Trainer's own arguments
transformers 5, for ``parallelism_config`` accelerate 1.10; axolotl's are in its file.
"""

from composer_fsdp2.migration.dialects.huggingface.axolotl import AxolotlDialect
from composer_fsdp2.migration.dialects.huggingface.huggingface import HuggingFaceDialect

__all__ = ["AxolotlDialect", "HuggingFaceDialect"]
