"""What context parallelism keeps on a rank for backward, and communicates, of a Llama by transformers.

    python benchmarks/context.py
    python benchmarks/context.py --sequence 8192 --json

Four ranks with one row each at degree 1, and with one row for two, and for all of them. Beside the bytes that autograd
keeps, the collectives of a step with degree 2, ours and of the same composed by hand: fully_shard for each layer, an
attention function that exchanges by all-to-all, queries, keys and values together, and labels that are shifted, cut and
counted. Exit code 0, or 1 if a bar does not hold.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import report
import torch
import torch.distributed as dist
from counting import Collectives
from launch import on_ranks
from llama import VOCABULARY, Holder, LlamaSizes, build, is_layer
from report import Bar, machine, markdown, mib
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

from composer_fsdp2 import prepare_fully_shard

RANKS = 4
DEGREES = (1, 2, 4)
BY_HAND = 2  # the degree of what is composed by hand
MOST_KEPT = 0.3  # at degree 4, of what degree 1 keeps


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser(__doc__)
    for name, default in (("sequence", 4096), ("width", 128), ("layers", 2), ("heads", 8)):
        parser.add_argument(f"--{name}", type=report.count, default=default)
    given = parser.parse_args(arguments)
    options = LlamaSizes(given.sequence, given.width, given.layers, given.heads)
    import transformers.models.llama.modeling_llama  # noqa: F401  # once: the ranks are forked

    found = on_ranks(measure, RANKS, "cpu", asdict(options), start_method="fork")
    kept = {int(degree): each for degree, each in found["kept"].items()}
    ratio = kept[4] / kept[1]
    ours, by_hand = found["collectives"]["ours"], found["collectives"]["by hand"]
    bars = [
        Bar(f"degree 4 keeps less than {MOST_KEPT} of what degree 1 keeps", f"{ratio:.3f}", ratio < MOST_KEPT),
        Bar("the collectives of the same by hand", _counts(ours), _counts(ours) == _counts(by_hand)),
    ]
    return report.conclude(given, bars, summary={"kept_bytes": kept, **found}, text=_text(kept, ours, by_hand))


def measure(given: dict[str, int]) -> dict[str, Any]:
    """What each degree keeps on this rank, and the collectives of a step. Called on all ranks."""
    options = LlamaSizes(**given)
    kept = {}
    for degree in DEGREES:
        model = _ours(options, degree)
        kept[degree] = kept_bytes(model, lambda model=model, degree=degree: _loss(model, options, degree))
    collectives = {
        "ours": _step(_ours(options, BY_HAND), options),
        "by hand": _step(_composed_by_hand(options), options),
    }
    return {"kept": kept, "collectives": collectives}


def kept_bytes(model: nn.Module, forward: Any) -> int:
    """The bytes of all storages that autograd keeps of a forward for its backward, without those of parameters."""
    of_parameters, kept = WeakIdKeyDictionary(), WeakIdKeyDictionary()  # by storage: addresses are used again

    def note_parameters(module: nn.Module, *_: Any) -> None:
        of_parameters.update({p.untyped_storage(): None for p in module.parameters(recurse=False)})

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage not in of_parameters:
            kept[storage] = storage.nbytes()
        return tensor

    handles = [module.register_forward_pre_hook(note_parameters) for module in model.modules()]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = forward()
    num_bytes: int = sum(kept.values())  # of what the loss holds
    loss.backward()
    for handle in handles:
        handle.remove()
    return num_bytes


def _loss(model: Holder, options: LlamaSizes, degree: int) -> torch.Tensor:
    tokens = _tokens(options, dist.get_rank() // degree)
    loss: torch.Tensor = model.model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def _tokens(options: LlamaSizes, seed: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (1, options.sequence), generator=torch.Generator().manual_seed(seed))


def _step(model: Holder, options: LlamaSizes) -> dict[str, dict[str, int]]:
    """The collectives of the second step: in the first one roots are found."""
    _loss(model, options, BY_HAND).backward()
    with Collectives() as collectives:
        _loss(model, options, BY_HAND).backward()
    return collectives.counts


def _ours(options: LlamaSizes, degree: int) -> Holder:
    model = build(options)
    model.model.fsdp_wrap_fn = is_layer
    prepare_fully_shard(model, None, {"context_parallel_degree": degree, "mixed_precision": "FULL"}, device="cpu")
    return model


# ---------------------------------------------------------------------------------------------------------------------
# By hand


def _composed_by_hand(options: LlamaSizes) -> Holder:
    """What an expert writes for this one model."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = build(options)
    groups = [dist.new_group(list(range(first, first + BY_HAND))) for first in range(0, RANKS, BY_HAND)]
    group, index = groups[dist.get_rank() // BY_HAND], dist.get_rank() % BY_HAND
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def exchanged(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **more: Any
    ) -> tuple[torch.Tensor, None]:
        query, key, value = _AllToAll.apply(torch.stack([query, key, value]), group, 2, 3)
        output, _ = attend(module, query, key, value, None, is_causal=True, **more)
        return _AllToAll.apply(output, group, 1, 2), None

    ALL_ATTENTION_FUNCTIONS.register("by_hand", exchanged)
    model.model.config._attn_implementation = "by_hand"
    for module in model.modules():
        if is_layer(module):
            fully_shard(module)
    fully_shard(model.model)
    forward, length = model.model.forward, options.sequence // BY_HAND

    def of_part(input_ids: torch.Tensor, labels: torch.Tensor, **more: Any) -> Any:
        place = slice(index * length, (index + 1) * length)
        labels = functional.pad(labels[:, 1:], (0, 1), value=-100)[:, place]
        items = (labels != -100).sum().double()
        dist.all_reduce(items)
        positions = torch.arange(options.sequence)[None, place]
        return forward(
            input_ids=input_ids[:, place], labels=labels, shift_labels=labels.contiguous(), position_ids=positions,
            num_items_in_batch=items / RANKS, **more,
        )  # fmt: skip

    model.model.forward = of_part
    return model


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any, divided: int, joined: int) -> torch.Tensor:
        ctx.arguments = group, divided, joined
        sent = torch.stack(tensor.chunk(BY_HAND, divided)).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), joined)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        group, divided, joined = ctx.arguments
        return _AllToAll.apply(gradients[0], group, joined, divided), None, None, None


def _counts(collectives: dict[str, dict[str, int]]) -> str:
    """Without the bytes of the all-reduce: we count rows beside tokens, 8 bytes more."""
    return ", ".join(
        f"{name} {each['calls']}" + ("" if name == "allreduce_" else f": {each['bytes']:,} bytes")
        for name, each in sorted(collectives.items())
    )


def _text(kept: dict[int, int], ours: dict[str, Any], by_hand: dict[str, Any]) -> str:
    rows = [[str(degree), mib(each), f"{each / kept[1]:.3f}"] for degree, each in kept.items()]
    tables = [markdown(["degree", "kept for backward on a rank", "of degree 1"], rows)]
    names = sorted(ours | by_hand)
    counted = [
        [who, *(f"{each[name]['calls']}: {mib(each[name]['bytes'])}" if name in each else "0" for name in names)]
        for who, each in (("by hand", by_hand), ("composer_fsdp2", ours))
    ]
    tables.append(markdown([f"collectives of a step with degree {BY_HAND}", *names], counted))
    return "\n\n".join([machine(), *tables])


if __name__ == "__main__":
    sys.exit(main())
