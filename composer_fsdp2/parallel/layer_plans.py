"""Layer plans of known models: ``layer_plan: auto``.

Hugging Face models list their TP-sharded layers (``base_model_tp_plan`` of their configuration); those of LLM Foundry
are in a table here. This module adds what these plans omit: norms between TP-sharded layers, whose gradients must be
summed ([Note: partial gradients]); embedding and head, sharded by rows of the vocabulary if the degree divides the
vocabulary; and experts that are modules. If the degree does not divide an attention's heads, or a rank's columns would
be misread ([Note: fused projections]), the attention's weights are TP-sharded but it computes all heads on every rank.

[Note: fused projections] ``ColwiseParallel`` gives each rank consecutive columns. If a layer concatenates two
projections, as Phi-3's ``gate_up_proj`` does, the first rank gets the gate and the second rank the projection that the
gate multiplies. The model's forward then splits each rank's columns in two and computes something else, without an
error. The layout is correct if each head's columns are consecutive, as in GPT-NeoX's ``query_key_value``.
"""

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from composer_fsdp2._torch.private_names import own_parameters
from composer_fsdp2.errors import PlanError
from composer_fsdp2.sharding.modules import first_paths, is_pretrained

AUTO = "auto"

# transformers' names, of 4.51 and 5. "local" and "gather" differ only in how they communicate.
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    **dict.fromkeys(("colwise", "local_colwise"), ColwiseParallel),
    **dict.fromkeys(("rowwise", "local_rowwise"), RowwiseParallel),
    **dict.fromkeys(
        ("colwise_rep", "colwise_gather_output"), lambda: ColwiseParallel(output_layouts=Replicate())
    ),
    **dict.fromkeys(
        ("rowwise_rep", "rowwise_split_input"), lambda: RowwiseParallel(input_layouts=Replicate())
    ),
}  # fmt: skip
_FEED_FORWARD = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
_MPT = {
    "attn.W*": "colwise", "attn.out_proj": "rowwise", **{f"ffn.{name}": kind for name, kind in _FEED_FORWARD.items()},
}  # fmt: skip
_EXPERTS = {
    f"layers.*.mlp.{of}.{name}": kind for of in ("experts.*", "shared_expert") for name, kind in _FEED_FORWARD.items()
}
# By model_type, with paths from the base model: in addition to transformers' plan.
_PLANS: dict[str, dict[str, str]] = {
    "mpt": {f"blocks.*.{way}{path}": kind for way in ("", "norm_attn_norm.") for path, kind in _MPT.items()},
    # Its attention reshapes to the full width (4.51).
    "qwen2_moe": _EXPERTS
    | {f"layers.*.self_attn.{name}_proj": "rowwise_rep" if name == "o" else "colwise_rep" for name in "qkvo"},
    "qwen3_moe": _EXPERTS,
}
# Names of fused projections in Hugging Face's models and LLM Foundry. Others are recognised by their width.
_FUSED = frozenset(
    ("gate_up_proj", "Wi", "w12", "qkv_proj", "qkv", "Wqkv", "wqkv", "W_pack", "c_attn", "query_key_value", "kv_proj")
)
# By the class of an attention that has, for each head, so many projections one behind the other.
_PROJECTIONS_OF_HEAD = {"GPTNeoXAttention": 3}
_WAY_OUT = (
    "split it with ColwiseParallel(output_layouts=Replicate()), which gathers its output, and what follows it with "
    "RowwiseParallel(input_layouts=Replicate()), or leave both out of the plan"
)


def automatic_plan(model: nn.Module, degree: int, num_shards: int) -> dict[str, ParallelStyle]:
    """The layer plan of a model, by the paths of its modules.

    Args:
        model: A model of transformers or LLM Foundry, or a module that contains one.
        degree: The tensor-parallel degree.
        num_shards: The vocabulary is TP-sharded only if its size is a multiple of ``degree`` times this number.
    Raises:
        PlanError: no plan is known for it.

    Call this on all ranks with the same model. Does not communicate.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    kinds: dict[str, str] = {}
    for path, module in modules.items():
        for pattern, kind in _plan_of_base_model(module).items():
            matches = matching_paths(model, f"{path}.{pattern}" if path else pattern)
            kinds |= dict.fromkeys(matches, kind) if kind in _STYLES else {}
    plan: dict[str, ParallelStyle] = {}
    for above in dict.fromkeys(map(_parent_path, kinds)):
        plan |= _styles_within(modules, {path: kinds[path] for path in kinds if _parent_path(path) == above}, degree)
    if not any(isinstance(style, RowwiseParallel) for style in plan.values()):
        names = dict.fromkeys(type(each).__name__ for each in modules.values() if is_pretrained(each))
        raise PlanError(
            f"layer_plan: auto, and no plan is known for {', '.join(names) or type(model).__name__}; it is for models "
            "of transformers with a base_model_tp_plan, whose layers are nn.Linear, and for LLM Foundry's MPT. Give a "
            "layer_plan: the path of each module to split, with its style"
        )
    plan |= {path: SequenceParallel(use_local_output=True) for path in _per_head_norms(modules, plan)}
    for module in modules.values():
        if is_pretrained(module):
            plan |= _embedding_and_head(module, first_paths(modules), degree * num_shards)
    return plan


def matching_paths(model: nn.Module, pattern: str) -> list[str]:
    """The paths of the modules that match a pattern. ``*`` stands for the name of any child, as in torch."""
    found = [("", model)]
    for part in pattern.split(".") if pattern else ():
        found = [
            (f"{path}.{name}" if path else name, child)
            for path, module in found
            for name, child in module.named_children()
            if fnmatch(name, part)
        ]
    return [path for path, _ in found]


def _plan_of_base_model(module: Any) -> Mapping[str, str]:
    """The plan of a base model. Models that contain it share its configuration, and are skipped."""
    if not is_pretrained(module) or module.base_model is not module:
        return {}
    config = module.config
    return (getattr(config, "base_model_tp_plan", None) or {}) | _PLANS.get(getattr(config, "model_type", ""), {})


def _parent_path(path: str) -> str:
    return path.rpartition(".")[0]


def _styles_within(modules: Mapping[str, nn.Module], kinds: Mapping[str, str], degree: int) -> dict[str, ParallelStyle]:
    """The styles of one module's layers.

    If the module cannot compute with some of the columns, each layer takes and returns all columns.
    """
    linear = {path: module for path in kinds if isinstance(module := modules[path], nn.Linear)}
    fitting = {path for path, each in linear.items() if not (each.out_features % degree or each.in_features % degree)}
    styles = {path: _STYLES[kind]() for path, kind in kinds.items() if path in fitting}
    leave, take = any(map(_outputs_columns, styles.values())), any(map(_takes_columns, styles.values()))
    if len(styles) == len(kinds) and leave == take and not any(projection_problems(modules, styles, degree)):
        return styles
    gathering = {ColwiseParallel: "colwise_rep", RowwiseParallel: "rowwise_rep"}
    return {path: _STYLES[gathering[type(style)]]() for path, style in styles.items()}


def _per_head_norms(modules: Mapping[str, nn.Module], plan: Mapping[str, ParallelStyle]) -> Iterator[str]:
    """Norms that are applied to each head, in a module whose projections are TP-sharded."""
    for above in dict.fromkeys(_parent_path(path) for path, style in plan.items() if _outputs_columns(style)):
        for name, module in modules[above].named_children():
            shapes = {tuple(parameter.shape) for _, parameter in own_parameters(module)}
            if f"{above}.{name}" not in plan and shapes == {(_head_dim_of(modules[above]),)}:
                yield f"{above}.{name}"


def _embedding_and_head(model: Any, paths: Mapping[nn.Module, str], num_parts: int) -> dict[str, ParallelStyle]:
    """The styles of a model's embedding and head. If they share a weight, both are sharded by vocabulary rows."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return {}
    is_tied, rows_fit = embedding.weight is head.weight, not head.out_features % num_parts
    # A subclass may do more with its output than nn.Embedding, as Gemma's, which scales it.
    is_plain = type(embedding) is nn.Embedding
    found: dict[str, ParallelStyle] = {}
    if is_plain and (rows_fit if is_tied else not embedding.embedding_dim % num_parts):
        found[paths[embedding]] = _STYLES["rowwise_rep" if is_tied else "colwise_rep"]()
    if rows_fit and (is_plain or not is_tied):
        found[paths[head]] = _STYLES["colwise_rep"]()
    return found


def projection_problems(
    modules: Mapping[str, nn.Module], styles: Mapping[str, ParallelStyle], degree: int
) -> Iterator[str]:
    """Each column-wise layer whose columns the model's forward would misread on a rank, with an alternative.

    Args:
        modules: The model's modules by path.
        styles: The styles of the layer plan by path.
        degree: The tensor-parallel degree.
    """
    linear = {path: module for path in styles if isinstance(module := modules[path], nn.Linear)}
    rowwise = [path for path in linear if isinstance(styles[path], RowwiseParallel)]
    for path, module in linear.items():
        if not _outputs_columns(styles[path]):
            continue
        parent = modules[_parent_path(path)]
        num_projections = _PROJECTIONS_OF_HEAD.get(type(parent).__name__, 1)
        # A single projection is no wider than the input of the row-wise layers in the same module.
        widths = [linear[other].in_features for other in rowwise if _parent_path(other) == _parent_path(path)]
        is_wider = module.out_features > max(widths, default=module.out_features)
        if num_projections == 1 and (is_wider or path.rpartition(".")[2] in _FUSED):
            yield (
                f"{path} holds several projections one behind the other ({module.out_features} columns), of which each "
                f"rank would get other columns than the model takes them for; {_WAY_OUT}"
            )
        elif head_dim := _head_dim_of(parent):
            yield from _head_problems(path, module, parent, num_projections * head_dim, degree)


def _head_problems(path: str, module: nn.Linear, parent: nn.Module, width: int, degree: int) -> Iterator[str]:
    """Messages if a TP-sharded attention would not get full heads, of ``width`` columns, on each rank."""
    heads, rest = divmod(module.out_features, width)
    if not rest and heads % degree:
        yield (
            f"{path} has {heads} heads of {_head_dim_of(parent)}, which tensor_parallel_degree {degree} does not "
            "divide; use a degree that does, or leave the attention's projections out of the plan"
        )
    elif isinstance(num_heads := getattr(parent, "n_heads", None), int):
        yield (
            f"{path}: {type(parent).__name__} divides what a rank has by all of its n_heads = {num_heads}, as if they "
            f"were narrower; {_WAY_OUT}"
        )


def _outputs_columns(style: ParallelStyle) -> bool:
    """Whether each rank of a column-wise layer returns only its own columns."""
    return isinstance(style, ColwiseParallel) and isinstance(style.output_layouts[0], Shard)


def _takes_columns(style: ParallelStyle) -> bool:
    """Whether each rank of a row-wise layer takes only its own columns, as ``_outputs_columns`` returns them."""
    return isinstance(style, RowwiseParallel) and isinstance(style.input_layouts[0], Shard)


def _head_dim_of(attention: nn.Module) -> int | None:
    dims = (getattr(attention, name, None) for name in ("head_dim", "head_size"))
    return next((each for each in dims if isinstance(each, int)), None)
