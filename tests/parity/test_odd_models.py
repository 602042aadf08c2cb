"""FSDP2 compared with Composer's FSDP1 on models other than a plain stack of blocks, and with gradients that differ
from `fully_shard`'s default."""

from __future__ import annotations

import pytest
from parity.assertions import assert_parity, parametrize_runs
from parity.harness import Run

pytestmark = pytest.mark.composer

# Together they cover each optimizer, kind of clipping and of groups, microbatches, checkpointing and evaluations. The
# first is bit for bit equal, and fast; so is the norm of gradients with missing ones.
WAYS = (
    {"clipping": "value", "microbatches": 2, "checkpointing": "non-reentrant", "evaluate": True},
    {"clipping": "norm", "groups": "frozen"},
    {"optimizer": "adamw", "clipping": "value", "evaluate": True, "groups": "frozen"},
    {"optimizer": "adamw64", "microbatches": 3, "checkpointing": "non-reentrant", "evaluate": True},
)
# The mistake that each model of models.py would show.
MODELS = {
    "skipped": "a direct child with `_fsdp_wrap = False` is sharded, synchronised or clipped, which FSDP1 did not do",
    "unused": "weight decay acts on others than before: FSDP1 gave unread ones zero in a used unit,"
    " and none in an unused one",
    "branch": "the gradient of one parameter on one rank is added to that of another on the next",
    "nested": "a wrap function that chooses modules inside chosen modules, or returns settings for one, fails",
    "ownbuffers": "a unit with its own MixedPrecision computes with buffers in the model's dtype",
    "twice": "preference training, a chosen and a rejected answer in one loss, misses or repeats a gradient",
    "convolution": "Composer's ChannelsLast fails, since fully_shard takes contiguous parameters only",
}
OF_MODELS = [Run(model=model, **way) for model in MODELS for way in WAYS]
QUICK = [*OF_MODELS[::4], *OF_MODELS[1:12:4]]


@parametrize_runs(OF_MODELS, slow=[run for run in OF_MODELS if run not in QUICK])
def test_odd_models(run: Run):
    """A model of the table above would fail, or train other weights."""
    assert_parity(run, 2)


OF_MODULES = [Run(model="mpt-kwargs", tied=tied, evaluate=True) for tied in (True, False)]


@parametrize_runs(OF_MODULES, slow=OF_MODULES[1:])
def test_settings_on_the_module_itself(run: Run):
    """LLM Foundry's settings on a module (`_fsdp_kwargs_dict`, for its experts) must be neither dropped nor refused."""
    assert_parity(run, 2)


IGNORED = [
    Run(settings="ignored", evaluate=True, microbatches=2),
    Run(settings="ignored", model="llama", clipping="value", groups="frozen", checkpointing="non-reentrant"),
    Run(settings="ignored", strategy="NO_SHARD", optimizer="adamw64"),
    Run(settings="ignored", model="gpt2", tied=True, optimizer="adamw64", evaluate=True),
    Run(settings="ignored", clipping="value", groups="several", checkpointing="non-reentrant"),
    Run(settings="ignored", model="mpt", tied=True, strategy="SHARD_GRAD_OP"),
]


@parametrize_runs(IGNORED, slow=IGNORED[3:])
def test_ignored_modules(run: Run):
    """Ignored modules would be sharded, or their gradients averaged or excluded from the norm.

    Not clipped by the 2-norm, because FSDP1 used a different one on each rank: see clipping.py.
    """
    assert_parity(run, 2)


LOW_GRADIENTS = [
    Run(optimizer="sgd16", settings="low-gradients", clipping="value"),
    Run(optimizer="sgd16", settings="low-gradients", model="gpt2", tied=True, microbatches=3),
    Run(optimizer="sgd16", settings="low-gradients", model="llama", groups="several"),
]


@parametrize_runs(LOW_GRADIENTS, slow=LOW_GRADIENTS[1:])
def test_gradients_in_low_precision(run: Run):
    """A bf16 model with bf16 gradients would train other weights."""
    assert_parity(run, 2)
