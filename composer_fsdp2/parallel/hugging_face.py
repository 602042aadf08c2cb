"""Context parallelism for Hugging Face models whose attention uses transformers' attention interface.

transformers is neither imported nor patched: an existing model has imported it, the interface accepts functions by
name, and only the forwards of this model are replaced. See [Note: divided layers].
"""

import copy
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from composer_fsdp2._torch.replaced import replaced
from composer_fsdp2.errors import UnsupportedError
from composer_fsdp2.parallel.adapters import KEY, AttentionFacts, ModelAdapter
from composer_fsdp2.parallel.divided_layers import DividedLayers
from composer_fsdp2.parallel.padding import Padding, order_of_rows
from composer_fsdp2.sharding.modules import ancestors_or_self, is_pretrained
from composer_fsdp2.training.context import ContextGroup

_warn_once = functools.cache(logging.getLogger(__name__).warning)

NAME = "Hugging Face's models whose attention goes through transformers' interface"
_OURS = "composer_fsdp2_ulysses"
_SUPPORTED = ("eager", "sdpa", "flash_attention_2")

Attend = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


# ---------------------------------------------------------------------------------------------------------------------
# Properties of a model


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stack:
    """A list of layers that run one after another.

    Args:
        path: The path of the list.
        owner: The transformers model that runs them.
        layers: By path.
        attentions: Their attention modules, by path.
    """

    path: str
    owner: Any
    layers: Mapping[str, nn.Module]
    attentions: Mapping[str, Any]

    @property
    def is_causal(self) -> bool:
        return all(each.is_causal and getattr(each.config, "is_causal", True) for each in self.attentions.values())

    @property
    def has_windows(self) -> bool:
        """Whether attention is limited to a window, so that a position does not see all previous ones."""
        configs = [each.config for each in self.attentions.values() if getattr(each.config, "use_sliding_window", True)]
        kinds = ("sliding_window", "attention_chunk_size")
        return any(getattr(config, kind, None) for config in configs for kind in kinds)

    def full_sequence_reason(self) -> str | None:
        """The reason why each rank computes these layers on full sequences; None if the layers can be divided."""
        if not {"input_ids", "inputs_embeds"} & _parameters_of(self.owner.forward):
            return "its rows are not those of a text"
        if any(len(_attention_modules(layer)) > 1 for layer in self.layers.values()):
            return "its layers attend to another sequence, too"
        return None


def _stacks(model: nn.Module) -> list[_Stack]:
    """The lists of layers whose attention uses transformers' interface."""
    modules = dict(model.named_modules())
    attentions = _attention_modules(model)
    found: dict[str, _Stack] = {}
    for path, module in modules.items():
        inside = {name: each for name, each in attentions.items() if path in ancestors_or_self(name)}
        if not isinstance(module, nn.ModuleList) or not inside or found.keys() & {*ancestors_or_self(path)}:
            continue
        owner = next(modules[above] for above in ancestors_or_self(path) if is_pretrained(modules[above]))
        layers = {f"{path}.{name}": layer for name, layer in module.named_children()}
        found[path] = _Stack(path=path, owner=owner, layers=layers, attentions=inside)
    return list(found.values())


def _divided_stacks(model: nn.Module) -> list[_Stack]:
    return [stack for stack in _stacks(model) if stack.full_sequence_reason() is None]


def _attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that look up an attention function by the name in their configuration."""
    return {
        path: module
        for path, module in model.named_modules()
        if hasattr(module, "is_causal")
        and hasattr(getattr(module, "config", None), "_attn_implementation")
        and not is_pretrained(module)
    }


def _attentions(model: nn.Module) -> Mapping[str, AttentionFacts]:
    return {
        path: _attention_facts(module) for stack in _divided_stacks(model) for path, module in stack.attentions.items()
    }


def _attention_facts(module: Any) -> AttentionFacts:
    dropouts = (getattr(module, name, None) for name in ("attention_dropout", "attn_dropout", "dropout"))
    return AttentionFacts(
        num_heads=module.config.num_attention_heads,
        dropout=next((getattr(each, "p", each) for each in dropouts if each is not None), 0.0),
        problems=tuple(_attention_problems(module)),
    )


def _attention_problems(module: Any) -> Iterator[str]:
    original = module.config._attn_implementation
    if not any(hasattr(file, "ALL_ATTENTION_FUNCTIONS") for file in _files_of(module)):
        yield "it does not go through transformers' interface in this release; leave the key out"
    elif original not in _SUPPORTED or _attend_of(module, original) is None:
        known = f"{', '.join(_SUPPORTED[:-1])} or {_SUPPORTED[-1]}"
        yield f"its attention is {original!r}; give the model attn_implementation: {known}"
    if next(module.parameters(recurse=False), None) is not None:
        yield "it has parameters of its own, which are likely one for each head; leave the key out"
    if getattr(module, "reorder_and_upcast_attn", False):
        yield "reorder_and_upcast_attn goes past transformers' interface; set it to false"
    if isinstance(getattr(module, "indexer", None), nn.Module):
        yield "its indexer chooses among the places that it gets, those of a part; leave the key out"
    if _uses_positions(module):
        yield "it scales queries by places that it counts itself, and would count those of a part; leave the key out"


def _uses_positions(module: Any) -> bool:
    """Whether an attention module uses positions in another way than by rotary angles."""
    forward = inspect.unwrap(type(module).forward)
    if hasattr(module, "attn_temperature_tuning"):  # Llama 4, in layers without rotary angles
        return bool(module.attn_temperature_tuning) and not getattr(module, "use_rope", False)
    return not {"arange", "get_llama_4_attn_scale"}.isdisjoint(getattr(forward, "__code__", _NO_CODE).co_names)


_NO_CODE = (lambda: None).__code__


def _parameters_of(function: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # not implemented in Python
        return set()


def _problems(model: nn.Module) -> Iterator[str]:
    divided_stacks = _divided_stacks(model)
    if not divided_stacks:
        yield from (f"{stack.path}: {stack.full_sequence_reason()}; leave the key out" for stack in _stacks(model))
    for stack in divided_stacks:
        yield from (f"{text}; leave the key out" for text in _other_mixers(stack))


def _other_mixers(stack: _Stack) -> Iterator[str]:
    """Modules other than attention that mix positions, such as state-space models and convolutions.

    On this rank's part of a sequence they would mix only the positions of that part, without an error.
    """
    for path, layer in stack.layers.items():
        if not any(path in ancestors_or_self(attention) for attention in stack.attentions):
            yield f"{path} has no attention, and may mix places in another way"
        for name, module in layer.named_modules(prefix=path):
            if isinstance(module, nn.Conv1d):
                yield f"{name} is a convolution over places"


def _notes(model: Any) -> Iterator[str]:
    yield from (
        f"{KEY}: {stack.path} computes whole rows on each rank: {stack.full_sequence_reason()}"
        for stack in _stacks(model)
        if stack.full_sequence_reason() and "input_ids" in _parameters_of(stack.owner.forward)
    )
    if type(model).__name__.endswith("ForCausalLM") and (why := _full_loss_reason(model)):
        yield f"{KEY}: logits and loss are computed of whole rows on each rank: {why}"


def _full_loss_reason(model: Any) -> str | None:
    """The reason why the loss of a model cannot be divided over ranks; None if it can.

    A loss can be divided if it is a sum over a count that the model is passed. Other losses may compute the mean over
    this rank's part, or use labels of other ranks' parts.
    """
    forward = inspect.unwrap(type(model).forward)
    name = type(model).__name__
    if not forward.__module__.startswith("transformers."):
        return f"{name}.forward is written in {forward.__module__}"
    kinds = [each.kind for each in inspect.signature(model.forward).parameters.values()]
    if "labels" not in _parameters_of(model.forward) or inspect.Parameter.VAR_KEYWORD not in kinds:
        return f"{name}.forward takes no labels, or no shift_labels and num_items_in_batch for its loss"
    if "loss_function" not in forward.__code__.co_names or len(_divided_stacks(model)) != 1:
        return f"{name}.forward computes a loss of its own"
    if getattr(model.config, "is_encoder_decoder", False):
        return f"the labels of {name} are another sequence"
    if not {"shift_labels", "num_items_in_batch"} <= _parameters_of(model.loss_function):
        return "its loss_function has no parameters shift_labels and num_items_in_batch, as ForCausalLMLoss has"
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Attention


# The previous attention function of each attention module, and the layers in which it exchanges heads for sequence.
_EXCHANGED: WeakKeyDictionary[nn.Module, tuple[Attend, DividedLayers]] = WeakKeyDictionary()


class _RegroupedHeads:
    """An attention module with another number of query heads per key and value head, after the latter were repeated."""

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
    """The attention function that is registered with transformers. It exchanges heads for sequence.

    Tensors are (batch, heads, positions, features); the mask is that of the full sequences.
    """
    original, layers = _EXCHANGED[module]
    if options.get("dropout"):
        raise UnsupportedError(f"{KEY}: attention dropout of {options['dropout']:g}; set it to 0", keys=(KEY,))
    bias = options.get("position_bias")  # (1, heads, positions, positions)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        length = query.shape[2]
        proxy = _RegroupedHeads(module, query.shape[1] // key.shape[1])
        if bias is not None:
            options["position_bias"] = layers.group.part(bias, 1)[..., :length, :length]
        if "is_causal" in options:  # was computed from the number of positions of a part
            options["is_causal"] = mask is None and bool(module.is_causal)
        return original(proxy, query, key, value, mask, **options)[0]

    return layers.exchanged(attend, attention_mask, query, key, value, dim=1), None


def _attend_of(module: nn.Module, name: str) -> Attend | None:
    """The module's attention function of this name."""
    if name == "eager":  # defined in the model's own module
        found = (getattr(file, "eager_attention_forward", None) for file in _files_of(module))
        return next((attend for attend in found if attend is not None), None)
    return _attention_functions().get(name)


def _files_of(module: nn.Module) -> list[Any]:
    return [sys.modules[cls.__module__] for cls in type(module).__mro__ if cls.__module__ in sys.modules]


def _attention_functions() -> Any:
    return sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS


def _all_positions_mask(attention: str, hidden: torch.Tensor, length: int) -> torch.Tensor:
    """A mask in which all positions attend to each other, in the format of an attention implementation."""
    if attention == "flash_attention_2":
        return hidden.new_ones(len(hidden), length, dtype=torch.int64)
    if attention == "sdpa":
        return torch.ones(1, 1, 1, length, dtype=torch.bool, device=hidden.device)
    return hidden.new_zeros(1, 1, 1, length)


# ---------------------------------------------------------------------------------------------------------------------
# The model

# Arguments of full sequences, or without a dimension of rows, that layers may get: attention uses them unchanged.
_FULL_SEQUENCE_ARGUMENTS = {
    "attention_mask", "position_ids", "cache_position", "last_cache_position", "labels", "shift_labels",
    "num_items_in_batch", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "position_bias", "kwargs",
}  # fmt: skip
_CACHES = ("past_key_values", "past_key_value", "cache", "layer_past")
_PER_POSITION_OUTPUTS = ("last_hidden_state", "hidden_states")


def _start(whole: nn.Module, model: Any, attentions: Sequence[Any], group: ContextGroup) -> Callable[[], None]:
    table = _attention_functions()
    table.register(_OURS, _attend_exchanged) if hasattr(table, "register") else table.update({_OURS: _attend_exchanged})
    group.divides_losses = group.divides_losses and _full_loss_reason(model) is None
    started = [_start_stack(stack, model, group) for stack in _divided_stacks(model)]
    model.forward = _model_forward(model, started[0])
    model.generate = functools.partial(refuse_generation, "generate")

    def connect() -> None:
        for layers in started:
            layers.connect(model)

    return connect


def _start_stack(stack: _Stack, model: nn.Module, group: ContextGroup) -> DividedLayers:
    attentions = [*stack.attentions.values()]
    name = attentions[0].config._attn_implementation
    layers = DividedLayers(
        name=f"{type(model).__name__}.{stack.path}",
        layers=tuple(stack.layers),
        group=group,
        caches=_CACHES,
        takes_full_sequence=_FULL_SEQUENCE_ARGUMENTS.__contains__,
        full_sequence_mask=None if stack.is_causal else functools.partial(_all_positions_mask, name),
        always_gathers="output_shape" in inspect.unwrap(type(stack.owner).forward).__code__.co_varnames,  # as in GPT-2
    )
    configs: dict[int, Any] = {}
    for module in attentions:
        attend = _attend_of(module, module.config._attn_implementation)
        assert attend is not None
        _EXCHANGED[module] = attend, layers
        # A copy: the model creates masks from its own configuration, in the format of the previous attention.
        config = configs.setdefault(id(module.config), copy.deepcopy(module.config))
        config._attn_implementation = _OURS
        module.config = config
        if hasattr(module, "compute_bias"):  # T5 computes it from the lengths of attention's tensors
            module.compute_bias = functools.partial(_full_sequence_bias, module.compute_bias, group)
    stack.owner.forward = _owner_forward(stack, layers, name)
    return layers


def _full_sequence_bias(
    compute_bias: Callable[..., Any], group: ContextGroup, query_length: int, key_length: int, *args: Any, **kwargs: Any
) -> Any:
    return compute_bias(query_length * group.size, key_length * group.size, *args, **kwargs)


def _owner_forward(stack: _Stack, layers: DividedLayers, name: str) -> Callable[..., Any]:
    """Make the forward of the model that runs the layers. It returns full sequences, or this rank's part of them."""
    forward, signature = stack.owner.forward, inspect.signature(stack.owner.forward)

    @functools.wraps(forward)
    def forward_of_part(*args: Any, **kwargs: Any) -> Any:
        given = _arguments(signature, args, kwargs)
        refuse_arguments(given, *_CACHES, "output_attentions")
        with replaced(layers, "num_passes", 0), replaced(layers, "order", None):
            output = forward(**_without_padding(given, layers, stack, name))
        if layers.is_open:
            raise UnsupportedError(f"{KEY}: the last layer of {stack.path} did not run; leave the key out", keys=(KEY,))
        return _converted_output(output, layers, _has_states(given, stack.owner.config))

    return forward_of_part


def _has_states(given: Mapping[str, Any], config: Any) -> bool:
    """Whether the model returns the hidden states of all layers."""
    requested = given.get("output_hidden_states")
    return bool(getattr(config, "output_hidden_states", False) if requested is None else requested)


def _converted_output(output: Any, layers: DividedLayers, has_states: bool) -> Any:
    """Convert all outputs per position to full sequences, or to this rank's part of them."""
    convert = layers.part if layers.group.in_parts else layers.full_sequence
    if isinstance(output, tuple):
        if has_states:
            raise UnsupportedError(f"{KEY}: output_hidden_states needs return_dict=True; give it", keys=(KEY,))
        return (convert(output[0]), *output[1:])
    for name in output.keys() & {*_CACHES}:
        output[name] = None
    for name in _PER_POSITION_OUTPUTS:
        if (value := output.get(name)) is not None:
            output[name] = convert(value) if isinstance(value, torch.Tensor) else tuple(map(convert, value))
    if (logits := output.get("router_logits")) is not None:  # (rows x positions, experts), for a loss of all positions
        num_rows = len(output[0])
        output["router_logits"] = tuple(
            layers.full_sequence(each.unflatten(0, (num_rows, -1))).flatten(0, 1) for each in logits
        )
    return output


def _model_forward(model: nn.Module, layers: DividedLayers) -> Callable[..., Any]:
    """Make the model's forward. If its loss can be divided, it returns this rank's part of the loss and logits."""
    group = layers.group
    forward, signature = model.forward, inspect.signature(model.forward)
    dtype = next((p.dtype for p in model.parameters() if p.dtype == torch.float64), torch.float32)

    @functools.wraps(forward)
    def forward_of_part(*args: Any, **kwargs: Any) -> Any:
        given = _arguments(signature, args, kwargs)
        refuse_arguments(given, *_CACHES, "use_cache")
        if given.get("labels") is None or not group.divides_losses:
            return forward(**given)
        _refuse_loss_arguments(given)
        mask = _padding_mask(given)
        padding = None if mask is None else Padding.of(mask, given["labels"])  # layers do not get the labels
        labels = group.shifted_labels(given["labels"])
        given |= {"labels": labels, "shift_labels": labels, "num_items_in_batch": group.items(labels, dtype)}
        with group.returning_parts(), replaced(layers, "padding", padding):
            return forward(**given)

    return forward_of_part


def _arguments(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Bind the arguments to their names, including those of ``**kwargs``."""
    given = dict(signature.bind(*args, **kwargs).arguments)
    more = [each.name for each in signature.parameters.values() if each.kind is inspect.Parameter.VAR_KEYWORD]
    return given | given.pop(more[0], {}) if more else given


def _padding_mask(given: Mapping[str, Any]) -> torch.Tensor | None:
    """The padding mask among the arguments, (rows, positions); None if there is none."""
    mask = given.get("attention_mask")
    return mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None


def _without_padding(given: dict[str, Any], layers: DividedLayers, stack: _Stack, name: str) -> dict[str, Any]:
    """Remove the mask from the arguments if no counted position depends on it. See [Note: padding]."""
    mask, padding = _padding_mask(given), layers.padding
    if padding is None or mask is None:
        return given
    if padding.counts and name == "sdpa":
        _warn_once(
            f"{KEY}: a label counts at a padded place of the batch, so attention needs a mask of rows x length x "
            "length elements, and kernels without one (flash attention) are not used; set the labels of padding to "
            "-100, and with padding on the left those of first tokens, too, or pad on the right"
        )
    # Without a mask, transformers 5 would take positions that restart at zero for packed rows.
    if padding.counts or not stack.is_causal or given.get("position_ids") is not None:
        return given
    if not padding.is_right:
        # Models without rotary angles may compute positions from the mask. transformers' own checkpointing may run the
        # layers' hooks again, when the order is no longer set.
        checkpointed = any(
            getattr(each, "gradient_checkpointing", False) for each in (stack.owner, *stack.layers.values())
        )
        if name != "sdpa" or stack.has_windows or checkpointed or not hasattr(stack.owner, "rotary_emb"):
            return given
        layers.order = order_of_rows(mask)
    return given | {"attention_mask": None}


def refuse_arguments(given: Mapping[str, Any], *names: str) -> None:
    """Raise for an argument that is supported with full sequences only; on all ranks, which have the same batch."""
    for name in names:
        value = given.get(name)
        if name.startswith("output_") and value:
            raise UnsupportedError(f"{KEY}: {name} is not known of whole rows; leave it out", keys=(KEY,))
        if not name.startswith("output_") and value is not None and value is not False:
            refuse_generation(f"a forward with {name}")


def _refuse_loss_arguments(given: Mapping[str, Any]) -> None:
    is_wrong = {
        "logits_to_keep is of whole rows": given.get("logits_to_keep"),
        "num_items_in_batch is counted over all ranks of each forward": given.get("num_items_in_batch") is not None,
    }
    if problems := [text for text, is_given in is_wrong.items() if is_given]:
        raise UnsupportedError("\n".join(f"{KEY}: {text}; leave it out" for text in problems), keys=(KEY,))


def refuse_generation(what: str, *args: Any, **kwargs: Any) -> None:
    raise UnsupportedError(
        f"{KEY}: {what} needs whole sequences on every rank; generate, and evaluate tasks that generate, in a run of "
        "their own without this key, from a checkpoint of this one",
        keys=(KEY,),
    )


HUGGING_FACE = ModelAdapter(
    name=NAME, matches=is_pretrained, attentions=_attentions, problems=_problems, notes=_notes, start=_start
)
