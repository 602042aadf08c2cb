"""Hugging Face's causal language models on a part of their sequences, by their attention interface.

Nothing of transformers is imported or replaced: a model that is there has imported it, the interface takes functions by
name, and what a model's forward gets is changed on the one model.
"""

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from composer_fsdp2.errors import UnsupportedError
from composer_fsdp2.parallel.attention import KEY, AttentionFacts, KnownModel
from composer_fsdp2.parallel.padding import Padding, attend_padded, mask_of_rows
from composer_fsdp2.sharding.modules import is_pretrained
from composer_fsdp2.training.context import ContextGroup

NAME = "Hugging Face's causal language models whose attention goes through transformers' interface"
_OURS = "composer_fsdp2_ulysses"
_FORMER = ("eager", "sdpa", "flash_attention_2")

Attend = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


# ---------------------------------------------------------------------------------------------------------------------
# What is known of a model


def _attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Those that look an attention function up by the name in their configuration."""
    return {
        path: module
        for path, module in model.named_modules()
        if hasattr(module, "is_causal")
        and hasattr(getattr(module, "config", None), "_attn_implementation")
        and not is_pretrained(module)
    }


def _attentions(model: nn.Module) -> Mapping[str, AttentionFacts]:
    return {path: _facts(module) for path, module in _attention_modules(model).items()}


def _facts(module: Any) -> AttentionFacts:
    config = module.config
    dropouts = (getattr(config, name, None) for name in ("attention_dropout", "attn_pdrop"))
    return AttentionFacts(
        num_heads=config.num_attention_heads,
        dropout=next((each for each in dropouts if each), 0.0),
        problems=tuple(_problems_of_attention(module)),
    )


def _problems_of_attention(module: Any) -> Iterator[str]:
    config, former = module.config, module.config._attn_implementation
    if former not in _FORMER or _attend_of(module, former) is None:
        known = f"{', '.join(_FORMER[:-1])} or {_FORMER[-1]}"
        yield f"its attention is {former!r}; give the model attn_implementation: {known}"
    if not module.is_causal:
        yield "it is not causal, which was not tested; leave the key out"
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window or getattr(config, "attention_chunk_size", None):
        yield (
            f"a sliding window or chunks of {window or config.attention_chunk_size} places were not tested; set it to "
            "null in the model's configuration (config_overrides), if no sequence is longer"
        )
    if next(module.parameters(recurse=False), None) is not None:
        yield "it has parameters of its own, which are likely one for each head; leave the key out"
    if not _takes_more(module):
        yield "its forward hands no further arguments to the attention function; leave the key out"


def _parameters_of(function: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of another language
        return set()


def _takes_more(module: nn.Module) -> bool:
    kinds = [each.kind for each in inspect.signature(module.forward).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


def _problems(model: Any) -> Iterator[str]:
    yield from (f"{text}; leave the key out" for text in _other_mixers(model))
    yield from problems_of_rotations(model)
    yield from problems_of_losses(model)
    if not getattr(model, "_supports_attention_backend", False):
        yield (
            f"the attention of {type(model).__name__} does not go through transformers' interface in this release; "
            "leave the key out"
        )
    if getattr(model, "loss_type", None) != "ForCausalLM":
        yield f"{type(model).__name__} has no loss over shifted labels; give a ...ForCausalLM, or leave the key out"
    elif "labels" not in inspect.signature(model.forward).parameters or not _takes_more(model):
        name = type(model).__name__
        yield f"{name}.forward takes no shift_labels and num_items_in_batch for its loss; leave the key out"


def problems_of_rotations(model: nn.Module) -> Iterator[str]:
    """What transformers' dynamic_rope_update decides by the largest position that it sees."""
    for path, module in model.named_modules():
        kind = getattr(module, "rope_type", None)
        if kind == "longrope" or "dynamic" in str(kind):
            yield (
                f"{path} turns by angles of rope_type {kind!r}, which depend on the length of what it sees, a part of "
                "a sequence; leave the key out, or rope_scaling of this type"
            )


def problems_of_losses(model: Any) -> Iterator[str]:
    """A loss that is not known to be a sum over a number that it is given may be the mean of a part, in silence."""
    own_loss = getattr(model, "_loss_function", None)
    if own_loss is not None and not {"shift_labels", "num_items_in_batch"} <= _parameters_of(own_loss):
        yield (
            f"{type(model).__name__} was given a loss_function of its own without the parameters shift_labels and "
            "num_items_in_batch, which takes the mean of a part; give it both, as transformers' ForCausalLMLoss has "
            "them, or leave the key out"
        )
    written_in = type(model).forward.__module__
    if not written_in.startswith("transformers."):
        yield (
            f"{type(model).__name__}.forward is written in {written_in}, so that it is not known how it computes its "
            "loss: of a part it may take the mean; give a model of transformers itself, or leave the key out"
        )


def _other_mixers(model: nn.Module) -> Iterator[str]:
    """What mixes places beside attention, as state-space models and convolutions do: on a part, in silence."""
    attentions = set(_attention_modules(model).values())
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv1d):
            yield f"{path} is a convolution over places"
        if isinstance(module, nn.ModuleList) and not attentions.isdisjoint(module.modules()):
            for number, layer in enumerate(module):
                if attentions.isdisjoint(layer.modules()):
                    yield f"{path}.{number} has no attention, and may mix places in another way"


def _notes(model: Any) -> Iterator[str]:
    if getattr(model.config, "output_router_logits", False):
        yield (
            f"{KEY}: the loss that balances experts is the mean of those of the parts of a sequence: approximately "
            "that of the whole"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Attention


@dataclass(frozen=True, slots=True)
class _Exchange:
    """How a module attended before, and with which ranks it exchanges heads for sequence now."""

    attend: Attend
    name: str
    group: ContextGroup


_EXCHANGES: WeakKeyDictionary[nn.Module, _Exchange] = WeakKeyDictionary()


class _WithFewerHeads:
    """An attention module as its function may see it, where key and value heads were repeated."""

    def __init__(self, module: nn.Module, groups: int) -> None:
        self._module, self.num_key_value_groups = module, groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _attend_exchanged(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of the interface: tensors are (batch, heads, places, features), the mask is of whole rows.

    ``position_ids`` are of this rank's part, and serve flash attention alone, to find where packed rows begin.
    """
    exchange = _EXCHANGES[module]
    group = exchange.group
    query, key, value = group.to_heads((query, key, value), 1, 2)
    options.pop("position_ids", None)
    seen = _WithFewerHeads(module, query.shape[1] // key.shape[1])

    def attend(*tensors: torch.Tensor | None) -> torch.Tensor:
        return exchange.attend(seen, *tensors, **options)[0]

    output = attend_padded(attend, attention_mask, query, key, value, dim=1)
    return group.to_sequence(output, 2, 1), None


def _attend_of(module: nn.Module, name: str) -> Attend | None:
    """The function that a module attends with under this name."""
    if name == "eager":  # the one of the model's own file
        files = (sys.modules.get(cls.__module__) for cls in type(module).__mro__)
        found = (getattr(file, "eager_attention_forward", None) for file in files)
        return next((attend for attend in found if attend is not None), None)
    return _functions().get(name)


def _functions() -> Any:
    return sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS


# ---------------------------------------------------------------------------------------------------------------------
# The model

# Padded with zeros to a length that the ranks can divide; a causal place sees nothing behind it.
_OF_PLACES = ("input_ids", "inputs_embeds")
_KNOWN_ARGUMENTS = {*_OF_PLACES, "attention_mask", "labels", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k"}
_GENERATING = ("past_key_values", "cache_position")


def _start(whole: nn.Module, model: Any, attentions: Sequence[Any], group: ContextGroup) -> None:
    name = attentions[0].config._attn_implementation
    table = _functions()
    table.register(_OURS, _attend_exchanged) if hasattr(table, "register") else table.update({_OURS: _attend_exchanged})
    configs: dict[int, Any] = {}
    for module in attentions:
        attend = _attend_of(module, module.config._attn_implementation)
        assert attend is not None
        _EXCHANGES[module] = _Exchange(attend, name, group)
        # A copy: by its own the model makes masks, of the form that the former attention takes.
        config = configs.setdefault(id(module.config), copy.copy(module.config))
        config._attn_implementation = _OURS
        module.config = config
    model.forward = _forward_of_part(model, name, group)
    model.generate = functools.partial(refuse_generation, "generate")


def _forward_of_part(model: nn.Module, name: str, group: ContextGroup) -> Callable[..., Any]:
    """The model's forward for whole rows, which computes this rank's part of them."""
    forward, signature = model.forward, inspect.signature(model.forward)
    more = next(each.name for each in signature.parameters.values() if each.kind is inspect.Parameter.VAR_KEYWORD)
    dtype = next((p.dtype for p in model.parameters() if p.dtype == torch.float64), torch.float32)

    @functools.wraps(forward)
    def of_part(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        given |= given.pop(more, {})
        _refuse_arguments(given, name)
        return forward(**_arguments_of_part(given, name, group, dtype))

    return of_part


def _arguments_of_part(given: dict[str, Any], name: str, group: ContextGroup, dtype: torch.dtype) -> dict[str, Any]:
    rows = given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"]
    length = rows.shape[1] + -rows.shape[1] % group.size
    mask, labels, positions = (given.get(key) for key in ("attention_mask", "labels", "position_ids"))
    if positions is None:
        positions = torch.arange(length, device=rows.device).unsqueeze(0)
    part = {key: group.part(group.padded(given[key], 1, 0)) for key in _OF_PLACES if given.get(key) is not None}
    changed = (
        given
        | part
        | {
            "attention_mask": mask_of_rows(mask, Padding.of(mask, labels), name, length, rows.device),
            "position_ids": group.part(group.padded(positions, positions.dim() - 1, 0), positions.dim() - 1),
            "use_cache": False,
        }
    )
    if labels is not None:
        labels = group.shifted_labels(labels)
        changed |= {"labels": labels, "shift_labels": labels, "num_items_in_batch": group.items(labels, dtype)}
    return changed


def _refuse_arguments(given: Mapping[str, Any], name: str) -> None:
    """Raise for what would be wrong of a part: on all ranks, as they have the same batch."""
    if any(given.get(name) is not None for name in _GENERATING):
        refuse_generation("a forward with past_key_values")
    other = [key for key, value in given.items() if isinstance(value, torch.Tensor) and key not in _KNOWN_ARGUMENTS]
    problems = [
        f"the model got {key}, and it is not known which part of it belongs to a part of a row" for key in other
    ]
    problems += [f"{key} is of whole rows" for key in ("output_attentions", "logits_to_keep") if given.get(key)]
    if given.get("num_items_in_batch") is not None:
        problems.append("num_items_in_batch is counted over all ranks of each forward")
    mask = given.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() != 2:
        problems.append(f"attention_mask has {mask.dim()} dimensions, where (rows, places) is understood")
    if name == "flash_attention_2" and "cu_seq_lens_q" not in given and _is_packed(given.get("position_ids")):
        problems.append("position_ids begin anew within a row, and cu_seq_lens_q does not say where")
    if problems:
        raise UnsupportedError("\n".join(f"{KEY}: {text}; leave it out" for text in problems), keys=(KEY,))


def _is_packed(positions: torch.Tensor | None) -> bool:
    return positions is not None and bool((positions.diff(dim=-1) < 0).any())


def refuse_generation(what: str, *args: Any, **kwargs: Any) -> None:
    raise UnsupportedError(
        f"{KEY}: {what} needs whole sequences on every rank; generate, and evaluate tasks that generate, in a run of "
        "their own without this key, from a checkpoint of this one",
        keys=(KEY,),
    )


HUGGING_FACE = KnownModel(
    name=NAME, is_one=is_pretrained, attentions=_attentions, problems=_problems, notes=_notes, start=_start
)
