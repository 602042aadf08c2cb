"""What Composer asks about the machine and about itself for every Trainer: asked once, before ranks are forked.

Imported by the process that they are forked from. The processor's name alone takes a second, in each process.
"""

from __future__ import annotations

import functools

from composer.utils import collect_env

collect_env.get_composer_commit_hash = functools.cache(collect_env.get_composer_commit_hash)
collect_env.get_cpu_model()  # No more than that: to ask for the GPU's would start CUDA, which does not survive a fork.
