"""Composer and LLM Foundry: ``fsdp_config`` and ``parallelism_config.fsdp``. FSDP1's keys are converted to FSDP2's.

``fsdp1/keys.py`` has the keys of a section. This package handles settings outside the section that affect it, implicit
defaults of FSDP1, and fields of a run that no ``fsdp_config`` can configure. Composer 0.32.1, LLM Foundry 0.22.0.
"""

from composer_fsdp2.migration.dialects.composer.composer import ComposerDialect

__all__ = ["ComposerDialect"]
