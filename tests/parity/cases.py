"""The compared runs: every pair of settings at least once, or all combinations.

[Note: pairs] Most mistakes show with one setting or a pair. ``pairwise`` finds a small set of runs that covers each
pair of values of different axes; the slow tests run the full product.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from parity.harness import Run
from support.examples import IS_THOROUGH

Axes = Mapping[str, Sequence[Any]]
Pair = frozenset[tuple[str, Any]]


# Pairs of values that FSDP1 does not support.
REFUSED: tuple[Axes, ...] = (
    # It computes norms in fp32, which torch refuses for gradients in float64.
    {"optimizer": ("sgd64", "adamw64"), "clipping": ("norm", "value")},
    # Composer cannot find the parameters of a group within flat parameters.
    {"settings": ("flat",), "groups": ("several", "subset")},
    # All of a flat parameter needs a gradient, or none of it.
    {"settings": ("flat",), "groups": ("frozen",)},
    # Composer's State refuses activation_cpu_offload without use_orig_params.
    {"settings": ("flat",), "checkpointing": ("offload", "reentrant+offload", "non-reentrant+offload")},
)

CHECKPOINTING = ("off", "reentrant", "non-reentrant", "offload", "reentrant+offload", "non-reentrant+offload")

# AdamW in float64 compares everything; in fp32, where FSDP1 has no float64, all but `NOISE`.
TWO_RANKS: Axes = {
    "strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD:1"),
    "checkpointing": CHECKPOINTING,
    "optimizer": ("sgd", "adamw", "adamw64"),
    "clipping": ("off", "norm", "value"),
    "groups": ("one", "several", "subset", "frozen"),
    "tied": (True, False),
    "microbatches": (1, 3 if IS_THOROUGH else 2),
    "evaluate": (False, True),
}

# For a model with two roots, and for one whose root has no parameter.
TWO_RANKS_AND_SETTINGS: Axes = {
    **TWO_RANKS,
    "settings": ("default", "prefetch-pre", "prefetch-none", "prefetch-far", "flat"),
}

MODELS = ("mlp", "gpt2", "llama", "mpt")
# Each pair of settings on some model, and each setting on every model; the slow tests run each pair on each model.
TWO_RANKS_AND_MODELS: Axes = {
    "model": MODELS,
    **TWO_RANKS_AND_SETTINGS,
    "checkpointing": ("off", "reentrant", "non-reentrant", "non-reentrant+offload"),
    "settings": ("default", "prefetch-none", "prefetch-far", "flat"),
}
# Three values similar to others, each combined with some values only.
TWO_RANKS_ONCE = (
    Run(tied=True, checkpointing="offload", groups="several", clipping="value", settings="prefetch-pre", evaluate=True),
    Run(
        model="mpt", tied=True, checkpointing="reentrant+offload", optimizer="adamw64", groups="frozen", microbatches=2
    ),
)

# AdamW in fp32 turns rounding into steps wherever a gradient is near zero: after 10 steps 2e-6 of a weight's largest
# value, with sums in another order. test_unsharded.py has AdamW with clipping on 4 ranks, in float64.
FOUR_RANKS: Axes = {
    "model": MODELS,
    **TWO_RANKS,
    "strategy": (
        "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD:2", "_HYBRID_SHARD_ZERO2:2", "reshard:2"
    ),
    "checkpointing": ("off", "reentrant", "non-reentrant", "non-reentrant+offload"),
    "optimizer": ("sgd", "adamw64"),
}  # fmt: skip
# Settings that behave differently on 4 ranks than on 2, combined with the values that show it; and each other strategy
# once.
FOUR_RANKS_FEW: Axes = {
    **FOUR_RANKS,
    "model": ("mlp", "llama", "mpt"),
    "strategy": ("reshard:2", "HYBRID_SHARD:2"),
    "checkpointing": ("off", "non-reentrant", "non-reentrant+offload"),
    "groups": ("one", "several", "frozen"),
    "optimizer": ("sgd",),
}
FOUR_RANKS_ONCE = (
    Run(model="gpt2", tied=True, strategy="SHARD_GRAD_OP", groups="subset", clipping="norm", microbatches=2),
    Run(strategy="NO_SHARD", optimizer="adamw64", checkpointing="non-reentrant", microbatches=2, evaluate=True),
    Run(strategy="_HYBRID_SHARD_ZERO2:2", optimizer="adamw64", groups="several", microbatches=2, evaluate=True),
)

# Values of most runs; the pairs above cover the other values of these axes.
FULL_PRODUCT: Axes = {
    "strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"),
    "checkpointing": ("off", "reentrant", "non-reentrant", "offload"),
    "optimizer": ("sgd", "adamw", "adamw64"),
    "clipping": ("off", "norm", "value"),
    "groups": ("one", "several"),
    "tied": (True, False),
    "microbatches": (1, 3),
    "evaluate": (False, True),
}


def is_refused(case: Mapping[str, Any]) -> bool:
    return any(all(case.get(axis) in values for axis, values in row.items()) for row in REFUSED)


def pairs(case: Mapping[str, Any]) -> Iterator[Pair]:
    """Every pair of values of a case, or of its subset."""
    return (frozenset(pair) for pair in itertools.combinations(case.items(), 2))


def possible_pairs(axes: Axes, of: str | None = None) -> list[Pair]:
    """In the order of the axes, without those that FSDP1 refuses; with ``of``, only pairs with this axis."""
    found = []
    for (first, firsts), (second, seconds) in itertools.combinations(axes.items(), 2):
        if of not in (None, first, second):
            continue
        for values in itertools.product(firsts, seconds):
            case = dict(zip((first, second), values, strict=True))
            if not is_refused(case):
                found.append(frozenset(case.items()))
    return found


def pairwise(axes: Axes, of: str | None = None) -> list[dict[str, Any]]:
    """Cases that cover every possible pair, or every pair with the axis ``of``; deterministic.

    Greedy: a case starts from the first missing pair, and each other axis takes the value that adds the most missing
    pairs.
    """
    missing = dict.fromkeys(possible_pairs(axes, of))
    cases = []
    while missing:
        case = dict(next(iter(missing)))
        for axis in sorted(axes, key=lambda axis: -len(axes[axis])):
            if axis not in case:
                options = [{**case, axis: value} for value in axes[axis]]
                allowed = [option for option in options if not is_refused(option)]
                case = max(allowed, key=lambda option: sum(pair in missing for pair in pairs(option)))
        for pair in pairs(case):
            missing.pop(pair, None)
        cases.append({axis: case[axis] for axis in axes})
    return cases


def product(axes: Axes) -> Iterator[dict[str, Any]]:
    """All combinations that FSDP1 supports; AdamW once, in float64 where FSDP1 has it."""
    for values in itertools.product(*axes.values()):
        case = dict(zip(axes, values, strict=True))
        is_double = case["optimizer"] == "adamw" and case["clipping"] == "off"
        if not is_refused(case) and not is_double:
            yield case


def runs(cases: Iterable[Mapping[str, Any]], **fixed: Any) -> list[Run]:
    return [Run(**{**case, **fixed}) for case in cases]
