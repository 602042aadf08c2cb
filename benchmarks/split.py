"""What a step communicates where layers are split over two ranks and sharded over two more: ours, and by hand.

    python benchmarks/split.py
    python benchmarks/split.py --width 256 --layers 8 --json

Four ranks, a Llama by transformers with attention and feed-forward split (ColwiseParallel, RowwiseParallel). By hand it
is ``parallelize_module`` and then ``fully_shard`` for each layer and the model. Counted are the collectives of a step
with the gradients clipped, and those of a step without; gradients of both are compared. Exit code 0, or 1 if a bar does
not hold.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import beside
import report
import torch
import torch.distributed as dist
from launch import on_ranks
from llama import VOCABULARY, Holder, LlamaSizes, build, is_layer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from composer_fsdp2 import prepare_fully_shard
from composer_fsdp2._torch.repairs import repair_cpu_collectives

RANKS, TENSOR = 4, 2
TOKENS = 64


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser(__doc__)
    for name, default in (("width", 64), ("layers", 4), ("heads", 4)):
        parser.add_argument(f"--{name}", type=report.count, default=default)
    given = parser.parse_args(arguments)
    import transformers.models.llama.modeling_llama  # noqa: F401  # once: the ranks are forked

    options = asdict(LlamaSizes(TOKENS, given.width, given.layers, given.heads))
    found = on_ranks(measure, RANKS, "cpu", options, start_method="fork")
    return beside.conclude(given, found)


def measure(given: dict[str, int]) -> dict[str, Any]:
    options = LlamaSizes(**given)
    torch.set_default_dtype(torch.float64)
    return beside.compare(_ours(options), _by_hand(options), _loss)


def _loss(model: Holder) -> torch.Tensor:
    """Of one row for each group along the tensor axis."""
    generator = torch.Generator().manual_seed(dist.get_rank() // TENSOR)
    tokens = torch.randint(VOCABULARY, (1, TOKENS), generator=generator)
    loss: torch.Tensor = model.model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


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
