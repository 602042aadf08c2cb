"""Differences between TP, CP and EP models on 4 ranks and one process, as a Markdown table.

    PYTHONPATH=.:tests python -m tests.parallel.distances [tensor|context|expert ...]

Each row is a case of the tests, in float64, without transformers' casts to float32: losses and clipped norms of two
steps, and all parameters after them. A model that fails its test raises.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
import transformers
from support.known_models import MIXTURES
from support.legality import Distances, check_carried
from support.ranks import run_ranks
from support.transformers_models import IN_RELEASE_4, build, is_release_4

from tests.compat import test_layer_plans
from tests.parallel import test_experts_of_mixtures, test_hugging_face

NUM_RANKS, DEGREES = 4, (2, 4)
Check = Callable[[], Distances]


def rows(kind: str) -> dict[str, Callable[[int], Check]]:
    """By model, a function that checks a degree."""
    if kind == "tensor":
        models = test_layer_plans.MODELS | test_layer_plans.LIKE_THESE
        return {name: partial(partial, test_layer_plans.check_model, make) for name, make in models.items()}
    if kind == "expert":
        return {name: partial(of_mixture, name) for name in MIXTURES}
    causal = IN_RELEASE_4 if is_release_4() else ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral", "gpt2")
    encoders = () if is_release_4() else ("bert", "modernbert")
    return {name: partial(of_sequences, name) for name in (*causal, *encoders)}


def of_mixture(name: str, degree: int) -> Check:
    return partial(check_carried, test_experts_of_mixtures.carried(name, degree))


def of_sequences(name: str, degree: int) -> Check:
    is_encoder = name in ("bert", "modernbert")
    loss = test_hugging_face.masked if is_encoder else test_hugging_face.causal
    # The loss that balances experts is computed for one batch, and the mean of several ranks' differs from that of all
    # rows.
    options = {"output_router_logits": False} if name == "qwen3-moe" else {}
    make = partial(build, name, "ForMaskedLM" if is_encoder else "ForCausalLM", attention="eager", **options)
    return partial(test_hugging_face.check, test_hugging_face.row(make, loss, degree))


def measure(kind: str) -> dict[str, list[Distances]]:
    """On a rank."""
    return {name: [check(degree)() for degree in DEGREES] for name, check in rows(kind).items()}


def table(kind: str) -> Iterator[str]:
    found: dict[str, list[Distances]] = run_ranks(measure, NUM_RANKS, kind)[0]
    parts = [f"{part}, {degree}" for degree in DEGREES for part in ("loss", "norm", "parameters")]
    yield f"| {kind} | " + " | ".join(parts) + " |"
    yield "|---" * (len(parts) + 1) + "|"
    for name, distances in found.items():
        numbers = [each[part] for each in distances for part in ("loss", "norm", "parameters")]
        yield f"| {name} | " + " | ".join(f"{number:.1e}" for number in numbers) + " |"


def main(kinds: list[str]) -> None:
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {NUM_RANKS} ranks, float64\n")
    for kind in kinds or ["tensor", "context", "expert"]:
        print("\n".join(table(kind)), end="\n\n")


if __name__ == "__main__":
    from tests.parallel import distances  # ranks look its functions up by the module's name

    distances.main(sys.argv[1:])
