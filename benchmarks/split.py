"""What a step communicates where layers are split over two ranks and sharded over two more: ours, and by hand.

    python benchmarks/split.py
    python benchmarks/split.py --width 256 --layers 8 --json

Four ranks, a Llama by transformers with attention and feed-forward split (ColwiseParallel, RowwiseParallel). By hand it
is ``parallelize_module`` and then ``fully_shard`` for each layer and the model. Counted are the collectives of a step
with the gradients clipped, and those of a step without; gradients of both are compared. Exit code 0, or 1 if a bar does
not hold.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import report
import torch
import torch.distributed as dist
from counting import Collectives
from launch import on_ranks
from llama import VOCABULARY, Holder, LlamaSizes, build, is_layer
from report import Bar, calls_text, collectives_table, machine
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from composer_fsdp2 import clip_grad_norm_, prepare_fully_shard
from composer_fsdp2._torch.repairs import repair_cpu_collectives

RANKS, TENSOR = 4, 2
TOKENS = 64
OURS, BY_HAND, CLIPPED = "composer_fsdp2", "by hand", "composer_fsdp2, clipped"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser(__doc__)
    for name, default in (("width", 64), ("layers", 4), ("heads", 4)):
        parser.add_argument(f"--{name}", type=report.count, default=default)
    given = parser.parse_args(arguments)
    import transformers.models.llama.modeling_llama  # noqa: F401  # once: the ranks are forked

    options = asdict(LlamaSizes(TOKENS, given.width, given.layers, given.heads))
    found = on_ranks(measure, RANKS, "cpu", options, start_method="fork")
    counts, difference = found["collectives"], found["gradient_difference"]
    added = {name: each for name, each in counts[CLIPPED].items() if each != counts[OURS].get(name)}
    bars = [
        Bar("the collectives and bytes of the same by hand", calls_text(counts[OURS]), counts[OURS] == counts[BY_HAND]),
        Bar(
            "clipping adds one all-reduce for each axis",
            calls_text(added),
            added == {"allreduce_": {"calls": 2, "bytes": 16}},
        ),
        Bar("the gradients of the same by hand", f"{difference:.1e}", difference < 1e-12),
    ]
    return report.conclude(given, bars, summary=found, text=f"{machine()}\n\n{collectives_table(counts)}")


def measure(given: dict[str, int]) -> dict[str, Any]:
    """The collectives of each way's second step, and how far gradients are apart. Called on all ranks."""
    options = LlamaSizes(**given)
    torch.set_default_dtype(torch.float64)
    ours, by_hand = _ours(options), _by_hand(options)
    collectives = {
        OURS: _step(ours),
        BY_HAND: _step(by_hand),
        CLIPPED: _step(ours, lambda model: clip_grad_norm_(model, 1.0)),
    }
    for model in (ours, by_hand):
        model.zero_grad()
        _loss(model).backward()
    pairs = zip(ours.parameters(), by_hand.parameters(), strict=True)
    difference = max(_largest(_full(one.grad) - _full(other.grad)) for one, other in pairs)
    return {"collectives": collectives, "gradient_difference": difference}


def _step(model: Holder, then: Callable[[nn.Module], object] = lambda model: None) -> dict[str, dict[str, int]]:
    _loss(model).backward()  # in the first step roots are found
    model.zero_grad()
    with Collectives() as collectives:
        _loss(model).backward()
        then(model)
    return collectives.counts


def _loss(model: Holder) -> torch.Tensor:
    """Of one row for each group along the tensor axis."""
    generator = torch.Generator().manual_seed(dist.get_rank() // TENSOR)
    tokens = torch.randint(VOCABULARY, (1, TOKENS), generator=generator)
    loss: torch.Tensor = model.model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def _largest(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item()


def _full(grad: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(grad, DTensor), "every parameter is sharded and trained"
    return grad.full_tensor()


def _plan() -> dict[str, ParallelStyle]:
    colwise = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan: dict[str, ParallelStyle] = {f"model.model.layers.*.{name}": ColwiseParallel() for name in colwise}
    plan |= {f"model.model.layers.*.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    return plan


def _ours(options: LlamaSizes) -> Holder:
    model = build(options)
    model.model.fsdp_wrap_fn = is_layer
    split = {"tensor_parallel_degree": TENSOR, "layer_plan": _plan()}
    prepare_fully_shard(model, None, {"mixed_precision": "FULL"}, device="cpu", tensor_parallel=split)
    return model


def _by_hand(options: LlamaSizes) -> Holder:
    """The loop of torch's documentation, with its gradients over gloo averaged."""
    model = build(options)
    mesh = init_device_mesh("cpu", (RANKS // TENSOR, TENSOR), mesh_dim_names=("shard", "tensor"))
    parallelize_module(model, mesh["tensor"], _plan())
    repair_cpu_collectives()
    for module in model.modules():
        if is_layer(module):
            fully_shard(module, mesh=mesh["shard"])
    fully_shard(model.model, mesh=mesh["shard"], reshard_after_forward=False)
    return model


if __name__ == "__main__":
    sys.exit(main())
