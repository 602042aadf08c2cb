"""Composer and LLM Foundry: ``fsdp_config``, ``parallelism_config.fsdp``; FSDP1's keys in, FSDP2's out.

The keys of a section are in ``fsdp1/keys.py``. Here is what stands elsewhere in a file and changed the section, what
FSDP1 did without being told, and what no ``fsdp_config`` can say. Composer 0.32.1, LLM Foundry 0.22.0.
"""

from composer_fsdp2.migration.dialects.composer.composer import ComposerDialect

__all__ = ["ComposerDialect"]
