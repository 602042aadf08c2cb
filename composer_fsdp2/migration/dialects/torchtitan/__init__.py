"""TorchTitan up to v0.2.2: the TOML tables for sharding, mixed precision, activation checkpointing, saving and
compilation.

Later releases have a registry in Python instead of TOML. Meanings and defaults are those of v0.2.2 (``job_config.py``,
the models' ``parallelize.py``), and names of earlier releases are aliases. Sources of the names: v0.1.0
(``config_manager.py``), v0.2.0, v0.2.1 and v0.2.2 (``config/job_config.py``). TorchTitan already trains with FSDP2.
"""

from composer_fsdp2.migration.dialects.torchtitan.torchtitan import TorchTitanDialect

__all__ = ["TorchTitanDialect"]
