"""ROLL: ``strategy_args.strategy_config`` of each worker whose ``strategy_name`` is fsdp2_train or fsdp2_infer.

ROLL already trains with FSDP2, so only keys and values are translated. Meanings and defaults are those of ROLL of
2026-08 (``fsdp2_strategy.py``, ``fsdp_utils.py``, ``model_args.py``). Its guide lacks several keys, and is wrong about
wrap_embeddings, casting, and the torch versions that an unset reshard_after_forward requires.
"""

from composer_fsdp2.migration.dialects.roll.roll import RollDialect

__all__ = ["RollDialect"]
