"""Composer's queries for every Trainer and every Hugging Face model, run once before ranks are forked.

Imported by the process that ranks are forked from. Reading the processor's name takes a second in each process, and so
does importing all causal models, which Composer compares a model's class with.
"""

from __future__ import annotations

import functools

from composer.utils import collect_env
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

collect_env.get_composer_commit_hash = functools.cache(collect_env.get_composer_commit_hash)
collect_env.get_cpu_model()  # The CPU only: querying the GPU would start CUDA, which does not survive a fork.
MODEL_FOR_CAUSAL_LM_MAPPING.values()
