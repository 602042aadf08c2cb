"""Composer and LLM Foundry: ``fsdp_config``, ``parallelism_config.fsdp``; FSDP1's keys in, FSDP2's out.

The keys of a section are in ``fsdp1/keys.py``. This package handles settings elsewhere in a file that changed the
section, implicit defaults of FSDP1, and fields of a run that no ``fsdp_config`` can configure. Composer 0.32.1, LLM
Foundry 0.22.0.
"""

from composer_fsdp2.migration.dialects.composer.composer import ComposerDialect

__all__ = ["ComposerDialect"]
