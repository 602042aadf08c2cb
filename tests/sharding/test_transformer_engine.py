"""Transformer Engine's checkpointing under amp_fp8.

The package needs CUDA, so a fake of its functions is imported here, which uses torch's own checkpointing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.models import Model, tokens
from support.on_ranks import on_ranks
from support.ranks import run_ranks
from support.translations import config_of, refused

from composer_fsdp2 import ConfigError, prepare_fully_shard

CONFIG = {
    "activation_checkpointing": True,
    "activation_checkpointing_reentrant": False,
    "te_checkpoint_wrapper": True,
}

STAND_IN = """
import contextlib
from torch.utils.checkpoint import checkpoint as torch_checkpoint

CALLS, SEEDS = [], {}

class CudaRNGStatesTracker:
    def add(self, name, seed):
        SEEDS[name] = seed

def get_activation_recompute_contexts():
    return contextlib.nullcontext(), contextlib.nullcontext()

def checkpoint(function, *args, use_reentrant, context_fn, get_rng_state_tracker, **kwargs):
    assert use_reentrant is False
    CALLS.append((context_fn, get_rng_state_tracker()))
    return torch_checkpoint(function, *args, use_reentrant=False, context_fn=context_fn, **kwargs)
"""


def write_stand_in(folder: Path) -> None:
    package = folder / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text("from . import distributed\n")
    (package / "distributed.py").write_text(STAND_IN)


def check_wrapper(folder: str) -> tuple[int, dict[str, int], float]:
    sys.path.insert(0, folder)
    gradients = []
    for config in (CONFIG, {}):
        torch.manual_seed(0)
        model = Model()
        prepare_fully_shard(model, None, config, "amp_fp8", "cpu", te_rng_seed=77)
        model(tokens(dist.get_rank())).float().square().mean().backward()
        gradients.append(model.decoder.blocks[0].fc_in.weight.grad.full_tensor())
    from transformer_engine.pytorch import distributed  # type: ignore[import-not-found]

    assert len({id(tracker) for _, tracker in distributed.CALLS}) == 1, "one tracker serves all modules"
    return len(distributed.CALLS), distributed.SEEDS, (gradients[0] - gradients[1]).abs().max().item()


def test_transformer_engines_checkpoint_is_used(tmp_path: Path):
    """An fp8 run recomputes with the checkpoint function that preserves fp8 state, seeded as in Composer."""
    write_stand_in(tmp_path)
    # fresh: other tests must not be able to import the fake.
    for num_calls, seeds, difference in run_ranks(check_wrapper, 2, str(tmp_path), fresh=True):
        assert (num_calls, seeds, difference) == (2, {"fsdp-rng": 77}, 0.0)


@on_ranks(2)
def test_without_transformer_engine(folder: str) -> None:
    """A missing package is named before anything is sharded. Runs without checkpointing or fp8 do not need it, nor does
    a laptop that plans or migrates the run."""
    model = Model()
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(ConfigError, match="install transformer-engine"):
        prepare_fully_shard(model, None, CONFIG, "amp_fp8", "cpu")
    assert names == [name for name, _ in model.named_parameters()]
    reentrant = CONFIG | {"activation_checkpointing_reentrant": True}
    assert "activation_checkpointing_reentrant: false" in refused(reentrant, precision="amp_fp8")
    for precision, config in (("amp_fp8", CONFIG), ("amp_fp8", {"te_checkpoint_wrapper": True}), ("amp_bf16", CONFIG)):
        assert config_of(config, precision=precision)
