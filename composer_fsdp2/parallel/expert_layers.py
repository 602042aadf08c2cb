"""The expert layers that can be expert-parallel: LLM Foundry's ``torch_dmoe``, and those of Hugging Face models.

Each keeps its own router; only the loop over experts is replaced.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from composer_fsdp2._torch.replaced import replaced
from composer_fsdp2.parallel.expert_exchange import Experts, exchange
from composer_fsdp2.parallel.expert_products import Rows, gated_mlp

_NUMBER = "moe_num_experts"
# Instead of an expert's number: a parameter consists of all experts, concatenated in its first dimension.
ALL_EXPERTS = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of expert layer.

    Args:
        number_of: The number of experts in a module of this kind; 0 for any other module.
        expert_of: The index of the expert that owns a parameter, by the parameter's name in the module. ``ALL_EXPERTS``
            for a parameter of all experts; None for one outside of the experts.
        method: The name of the method that calls the experts.
        compute: Replaces that method. Called with the module, its experts, and the method's arguments.
    """

    num_experts_of: Callable[[nn.Module], int]
    expert_of: Callable[[str], int | None]
    method: str
    compute: Callable[..., Any]


def _expert_of_list(name: str) -> int | None:
    first, _, rest = name.partition(".")
    return int(rest.partition(".")[0]) if first == "experts" and rest else None


def _takes(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _is_of_transformers(method: Any) -> bool:
    """Whether a method is defined in transformers. A method that a script replaced may compute something else.

    Checks the method's globals, because a wrapper copies the name and the module of the wrapped function.
    """
    written_in: str = getattr(method, "__globals__", {}).get("__name__", "")
    return written_in.startswith("transformers.")


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face, transformers 4: a list of modules. The block has a router `gate` and a loop.

_ROUTED = ("MixtralSparseMoeBlock", "Qwen2MoeSparseMoeBlock", "Qwen3MoeSparseMoeBlock", "OlmoeSparseMoeBlock")


def _num_in_list(block: Any, classes: Collection[str], loop: str, takes: tuple[str, ...]) -> int:
    """The number of experts if the block is of one of these classes and its method ``loop`` calls a list of experts."""
    experts, method = getattr(block, "experts", None), getattr(block, loop, None)
    is_known = type(block).__name__ in classes and isinstance(experts, nn.ModuleList) and _is_of_transformers(method)
    return len(block.experts) if is_known and _takes(getattr(block, loop)) == takes else 0


def _num_in_block(block: nn.Module) -> int:
    """The number of experts of a block whose ``forward`` loops over them.

    As in ``transformers/models/mixtral/modeling_mixtral.py`` and others, 4.51.
    """
    has_router = isinstance(getattr(block, "gate", None), nn.Linear)
    return _num_in_list(block, _ROUTED, "forward", ("hidden_states",)) if has_router else 0


def _compute_block(block: Any, experts: Experts, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the block with its own router and shared expert. Return its output and the router's logits."""
    shape = hidden_states.shape
    if block.training and (noise := getattr(block, "jitter_noise", 0)) > 0:
        hidden_states = hidden_states * torch.empty_like(hidden_states).uniform_(1.0 - noise, 1.0 + noise)
    rows = hidden_states.reshape(-1, shape[-1])
    logits = block.gate(rows)
    weights, chosen = torch.topk(F.softmax(logits, dim=1, dtype=torch.float), block.top_k, dim=-1)
    if getattr(block, "norm_topk_prob", True):
        weights = weights / weights.sum(dim=-1, keepdim=True)
    out = exchange(rows, weights.to(rows.dtype), chosen, experts, partial(_compute_modules, block.experts, experts))
    if hasattr(block, "shared_expert"):
        out = out + torch.sigmoid(block.shared_expert_gate(rows)) * block.shared_expert(rows)
    return out.view(shape), logits


def _num_in_method_block(block: nn.Module) -> int:
    """The loop is a separate method: ``transformers/models/deepseek_v3/modeling_deepseek_v3.py``, 4.51."""
    return _num_in_list(block, ("DeepseekV3MoE",), "moe", ("hidden_states", "topk_indices", "topk_weights"))


def _compute_method(
    block: Any, experts: Experts, hidden_states: torch.Tensor, topk_indices: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    compute = partial(_compute_modules, block.experts, experts)
    out = exchange(hidden_states, topk_weights, topk_indices, experts, compute, dtype=topk_weights.dtype)
    return out.type(hidden_states.dtype)


# The gate and up projections, and the down projection.
_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


def _compute_modules(modules: nn.ModuleList, experts: Experts, rows: Rows) -> torch.Tensor:
    """Apply this rank's expert modules; by grouped products if each has three plain matrices and an activation."""
    own: list[Any] = [modules[number] for number in experts.own]
    names = next((names for names in _GATED if all(_has_plain(each, names) for each in own)), None)
    if names is None:
        parts = zip(own, rows.values.split(rows.counts), strict=True)
        return torch.cat([module(part) for module, part in parts])
    gate, up, down = ([getattr(each, name).weight for each in own] for name in names)
    return gated_mlp(rows, (gate, up), down, lambda gate, up: own[0].act_fn(gate) * up)


# Attributes by which a script may customize a single module.
_ADDED = ("forward", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _has_plain(expert: nn.Module, names: tuple[str, ...]) -> bool:
    """Whether an expert is as transformers defines it. If it has adapters, biases or hooks, it must be called."""
    layers = [getattr(expert, name, None) for name in names]
    return (
        hasattr(expert, "act_fn")
        and _is_of_transformers(expert.forward)
        and all(type(each) is nn.Linear and each.bias is None for each in layers)
        and not any(vars(each).get(name) for each in expert.modules() for name in _ADDED)
    )


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face, transformers 5: all experts in two weights. The block is not changed.


def _num_in_weights(module: nn.Module) -> int:
    """The number of experts of a module with stacked weights: gated, without biases, with one activation.

    As in ``transformers/integrations/moe.py``, 5.x.
    """
    shapes = {name: tuple(each.shape) for name, each in module.named_parameters()}
    has_gate = hasattr(module, "_apply_gate") or hasattr(module, "act_fn")
    is_known = shapes.keys() == {"gate_up_proj", "down_proj"} and has_gate and _is_of_transformers(module.forward)
    is_unlike = any(getattr(module, name, False) for name in ("is_transposed", "has_bias", "has_post_expert_norm"))
    if not is_known or is_unlike or _takes(module.forward) != ("hidden_states", "top_k_index", "top_k_weights"):
        return 0
    num_experts, width, half = shapes["down_proj"] if len(shapes["down_proj"]) == 3 else (0, 0, 0)
    return num_experts if shapes["gate_up_proj"] == (num_experts, 2 * half, width) else 0


def _compute_weights(
    module: Any, experts: Experts, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    def activate(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return module.act_fn(gate) * up

    def compute(rows: Rows) -> torch.Tensor:
        # Models that limit the values define their own method between the two weights.
        return gated_mlp(rows, (module.gate_up_proj,), module.down_proj, getattr(module, "_apply_gate", activate))

    return exchange(hidden_states, top_k_weights, top_k_index, experts, compute)


# ---------------------------------------------------------------------------------------------------------------------
# LLM Foundry


def _num_in_dmoe(module: nn.Module) -> int:
    """The number of experts of ``llmfoundry/models/layers/dmoe.py``, 0.22.0.

    Its ``mlp`` has the weights of all experts, and takes rows and the index of one expert. The layer loops over
    experts.
    """
    weights = getattr(module, "mlp", None)
    if not isinstance(weights, nn.Module):
        return 0
    is_known = _takes(module.forward) == ("x", "scores", "expert_weights", "top_experts")
    return getattr(weights, _NUMBER, 0) if is_known and _takes(weights.forward) == ("x", "expert_idx") else 0


def _compute_torch_dmoe(
    layer: Any,
    experts: Experts,
    x: torch.Tensor,
    scores: torch.Tensor,
    expert_weights: torch.Tensor,
    top_experts: torch.Tensor,
) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return exchange(rows, expert_weights, top_experts, experts, partial(_compute_mlp, layer.mlp, experts)).view(x.shape)


def _compute_mlp(mlp: nn.Module, experts: Experts, rows: Rows) -> torch.Tensor:
    # The MLP reshapes its weights by its number of experts, and this rank all-gathers only some of these.
    with replaced(mlp, _NUMBER, len(experts.own)):
        return torch.cat([mlp(part, number) for number, part in enumerate(rows.values.split(rows.counts))])


KINDS: Mapping[str, Kind] = {
    "torch_dmoe": Kind(
        num_experts_of=_num_in_dmoe, expert_of=lambda name: ALL_EXPERTS, method="forward", compute=_compute_torch_dmoe
    ),
    "modules": Kind(num_experts_of=_num_in_block, expert_of=_expert_of_list, method="forward", compute=_compute_block),
    "modules, in a method": Kind(
        num_experts_of=_num_in_method_block, expert_of=_expert_of_list, method="moe", compute=_compute_method
    ),
    "weights": Kind(
        num_experts_of=_num_in_weights, expert_of=lambda name: ALL_EXPERTS, method="forward", compute=_compute_weights
    ),
}
