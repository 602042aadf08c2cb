"""Which runs are compared: every pair of settings at least once, or all combinations.

[Note: pairs] Most mistakes need one setting or two to show. ``pairwise`` finds few runs in which each two values of
different axes meet; the full product is left to the slow tests.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from parity.harness import Run
from support.examples import IS_THOROUGH

Axes = Mapping[str, Sequence[Any]]
Pair = frozenset[tuple[str, Any]]


# Values of two axes that FSDP1 does not take together.
REFUSED: tuple[Axes, ...] = (
    # It takes norms in fp32, which torch refuses for gradients in float64.
    {"optimizer": ("sgd64", "adamw64"), "clipping": ("norm", "value")},
    # Composer cannot find the parameters of a group within flat parameters.
    {"settings": ("flat",), "groups": ("several", "subset")},
    # A flat parameter needs a gradient or needs none.
    {"settings": ("flat",), "groups": ("frozen",)},
    # Composer's State refuses activation_cpu_offload without use_orig_params.
    {"settings": ("flat",), "checkpointing": ("offload", "reentrant+offload", "non-reentrant+offload")},
)

CHECKPOINTING = ("off", "reentrant", "non-reentrant", "offload", "reentrant+offload", "non-reentrant+offload")

# AdamW in float64 compares everything; in fp32 what `NOISE` leaves of it, where FSDP1 has no float64.
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

# For a model with two roots, and for one whose root holds no parameter.
TWO_RANKS_AND_SETTINGS: Axes = {
    **TWO_RANKS,
    "settings": ("default", "prefetch-pre", "prefetch-none", "prefetch-far", "flat"),
}

MODELS = ("mlp", "gpt2", "llama", "mpt")
# Every two settings on some model, and every setting on every model; the slow tests have each two on each model.
TWO_RANKS_AND_MODELS: Axes = {
    "model": MODELS,
    **TWO_RANKS_AND_SETTINGS,
    "checkpointing": ("off", "reentrant", "non-reentrant", "non-reentrant+offload"),
    "settings": ("default", "prefetch-none", "prefetch-far", "flat"),
}
# Three values that are near relatives of those meet some others only.
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
# What lies otherwise on 4 ranks than on 2, to meet the values that tell; and each of the other strategies once.
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

# What most runs set; the other values of these axes are met by the pairs above.
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
    """Every two values of a case, or of the part of it that is chosen."""
    return (frozenset(pair) for pair in itertools.combinations(case.items(), 2))


def possible_pairs(axes: Axes, of: str | None = None) -> list[Pair]:
    """In the order of the axes, without those that FSDP1 refuses; with ``of``, those of this axis with another."""
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
    """Cases in which every possible pair occurs, or every one of the axis ``of``; the same ones each time.

    Greedy: a case starts from the first pair that is missing, and each other axis takes the value that adds the most
    missing pairs.
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
    """All combinations that FSDP1 takes; AdamW once, in float64 where FSDP1 has it."""
    for values in itertools.product(*axes.values()):
        case = dict(zip(axes, values, strict=True))
        is_double = case["optimizer"] == "adamw" and case["clipping"] == "off"
        if not is_refused(case) and not is_double:
            yield case


def runs(cases: Iterable[Mapping[str, Any]], **fixed: Any) -> list[Run]:
    return [Run(**{**case, **fixed}) for case in cases]
