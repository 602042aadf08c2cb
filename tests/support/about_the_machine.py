"""What Composer asks for every Trainer and every model of Hugging Face: asked once, before ranks are forked.

Imported by the process that they are forked from. The processor's name alone takes a second, in each process, and as
long takes the import of all causal models, of which Composer asks whether a model is one.
"""

from __future__ import annotations

import functools

from composer.utils import collect_env
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

collect_env.get_composer_commit_hash = functools.cache(collect_env.get_composer_commit_hash)
collect_env.get_cpu_model()  # No more than that: to ask for the GPU's would start CUDA, which does not survive a fork.
MODEL_FOR_CAUSAL_LM_MAPPING.values()
