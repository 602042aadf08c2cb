"""ROLL: ``strategy_args.strategy_config`` of each worker whose ``strategy_name`` is fsdp2_train or fsdp2_infer.

ROLL trains with FSDP2 already: only keys and values are translated. Meanings and defaults: ROLL of 2026-08
(``fsdp2_strategy.py``, ``fsdp_utils.py``, ``model_args.py``); its own guide lacks several of the keys, and is wrong
about wrap_embeddings, about casting and about the versions of torch that an implicit reshard_after_forward needs.
"""

from composer_fsdp2.migration.dialects.roll.roll import RollDialect

__all__ = ["RollDialect"]
