"""Hugging Face: arguments of a Trainer, files of accelerate, and files of axolotl, which have both.

``keys`` has a row for each key. ``effective`` computes the values that the run uses, including defaults and keys
outside the section. ``limits`` lists the fields of a run that no FSDP2 key sets.

The migration preserves the behavior of the system, not the text of the file. For example, transformers 4.51.3 reads the
keys of an ``fsdp_config`` only without the prefix ``fsdp_``, accelerate 1.8.1 with or without it, and neither reports a
key that it ignores.

Sources: transformers 4.51.3 (``training_args.py``, ``trainer.py``), accelerate 1.8.1 (``utils/dataclasses.py``,
``utils/launch.py``, ``utils/fsdp_utils.py``, ``commands/launch.py``); for FSDP2 in a Trainer's own arguments
transformers 5, for ``parallelism_config`` accelerate 1.10; axolotl's are in ``huggingface.py``.
"""

from composer_fsdp2.migration.dialects.huggingface.huggingface import AxolotlDialect, HuggingFaceDialect

__all__ = ["AxolotlDialect", "HuggingFaceDialect"]
