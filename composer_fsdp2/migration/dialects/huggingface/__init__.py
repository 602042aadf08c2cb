"""Hugging Face's configuration: a Trainer's arguments, accelerate's files, and axolotl's files, which have both.

``keys`` has a row for each key, ``effective`` computes the values in effect in the run, including defaults and keys
beside the section, and ``limits`` lists the fields of a run that no FSDP2 key sets.

The migration follows what the system did with a file, which can differ from the file's contents: transformers 4.51.3
reads the keys of an ``fsdp_config`` only without the prefix ``fsdp_``, accelerate 1.8.1 with or without it, and neither
reports a key that it does not read.

Sources: transformers 4.51.3 (``training_args.py``, ``trainer.py``), accelerate 1.8.1 (``utils/dataclasses.py``,
``utils/launch.py``, ``utils/fsdp_utils.py``, ``commands/launch.py``); for FSDP2 in a Trainer's own arguments
transformers 5, for ``parallelism_config`` accelerate 1.10; axolotl's are in ``huggingface.py``.
"""

from composer_fsdp2.migration.dialects.huggingface.huggingface import AxolotlDialect, HuggingFaceDialect

__all__ = ["AxolotlDialect", "HuggingFaceDialect"]
