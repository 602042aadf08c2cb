"""Context parallelism in a Trainer: LLM Foundry's MPT, microbatch weights, and labels and metrics of sequence shards.

``composer_fsdp2/parallel`` shards sequences and supports Hugging Face models; see [Note: context parallelism] there.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from composer.core import State
from torch import nn

from composer_fsdp2._torch.replaced import replaced
from composer_fsdp2.errors import UnsupportedError
from composer_fsdp2.parallel.adapters import KEY, AttentionFacts, ModelAdapter, register_model_adapter
from composer_fsdp2.parallel.divided_layers import DividedLayers
from composer_fsdp2.parallel.hugging_face import refuse_generation
from composer_fsdp2.parallel.padding import note_copies
from composer_fsdp2.training.context import ContextGroup
from composer_fsdp2.training.run import find_context

from .seams import seam

# ---------------------------------------------------------------------------------------------------------------------
# Batches and outputs in a Trainer


_COUNTED = "loss_generating"


@contextlib.contextmanager
def weighted_microbatch(trainer: Any) -> Iterator[None]:
    """Record the factor by which the Trainer multiplies a microbatch's loss (its rows or tokens), for losses of
    sequence shards.

    In the block, the Trainer's own count of tokens returns the recorded number. Otherwise it would count again on the
    device, and the host would wait for the result.
    """
    if (group := find_context(trainer.state.model)) is None:
        yield
        return
    spec, batch = trainer._train_data_spec, trainer.state.batch
    if not trainer.accumulate_train_batch_on_tokens:
        group.weight = float(spec.get_num_samples_in_batch(batch))
        yield
        return
    count = spec.get_num_tokens_in_batch
    group.weight = weight = count(batch, token_type=_COUNTED)

    def known(other: Any, token_type: str = "total") -> Any:
        return weight if other is batch and token_type == _COUNTED else count(other, token_type=token_type)

    with replaced(spec, "get_num_tokens_in_batch", known):
        yield


@seam(
    "composer.devices.device",
    "Device.batch_to_device",
    why="whether padding needs a mask under context parallelism is read from the batch in host memory; on the device "
    "it would synchronise in each microbatch",
)
def batch_to_device(original: Callable[..., Any], self: Any, batch: Any) -> Any:
    moved = original(self, batch)
    note_copies(batch, moved)
    return moved


_TASKS = ("generate", "icl_task")


@seam(
    "composer.models.huggingface",
    "HuggingFaceModel.eval_forward",
    why="under context parallelism outputs cover a part of each sequence, and the metrics' labels all of it",
)
def eval_forward(original: Callable[..., Any], self: Any, batch: Any, outputs: Any = None) -> Any:
    """Replaces ``eval_forward``: uses the labels of this rank's sequence shard. Metrics are summed over all ranks."""
    group = find_context(self)
    if group is None:
        return original(self, batch, outputs)
    if batch.get("mode") in _TASKS:
        raise _no_tasks("this evaluation")
    if not group.divides_losses:
        return original(self, batch, outputs)
    before, self.labels = self.labels, None
    with group.returning_parts():
        output = original(self, batch, outputs)
    if self.labels is None:  # it does not shift labels if the model computes the loss
        self.labels = before
    else:
        self.labels = group.shifted_labels(self.labels, is_shifted=True)
    return output


def refuse_tasks(state: State) -> None:
    """Raise for evaluators and callbacks that do not work with context parallelism. Called on all ranks before ``fit``.

    Raises:
        UnsupportedError: an evaluator or a callback needs full sequences on every rank; names them.
    """
    if find_context(state.model) is None:
        return
    evaluators = [each.label for each in state.evaluators if any(map(_is_of_tasks, each.metric_names))]
    callbacks = [type(each).__name__ for each in state.callbacks if type(each).__name__ == "Generate"]
    if found := [*map(repr, evaluators), *callbacks]:
        raise _no_tasks(", ".join(found))


def _is_of_tasks(metric: str) -> bool:
    return metric.startswith("InContextLearning")


def _no_tasks(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{KEY}: {what} generates or scores full sequences, and each rank computes a part of them; evaluate such tasks "
        "in a run of their own without this key, from a checkpoint of this one",
        keys=(KEY,),
    )


# ---------------------------------------------------------------------------------------------------------------------
# LLM Foundry's MPT: properties of the model

_MPT = "llmfoundry.models.mpt.modeling_mpt"


def _is_mpt(module: nn.Module) -> bool:
    return any(cls.__name__ == "MPTForCausalLM" and cls.__module__ == _MPT for cls in type(module).__mro__)


def _attentions(model: nn.Module) -> Mapping[str, AttentionFacts]:
    return {path: _facts(module) for path, module in model.named_modules() if hasattr(module, "attn_fn")}


def _facts(module: Any) -> AttentionFacts:
    untested = {
        "sliding_window_size": module.sliding_window_size != -1,
        "reuse_kv_layer_idx": module.reuse_kv_layer_idx is not None,
        "reuse_kv_x_layer_idx": module.reuse_kv_x_layer_idx is not None,
        "attn_temperature_tuning": bool((module.attn_temperature_tuning or {}).get("attn_scale")),
    }
    problems = [f"its {name} was not tested; leave it out of attn_config" for name, is_on in untested.items() if is_on]
    if module.attn_impl not in ("torch", "flash"):
        problems.append(f"its attn_impl {module.attn_impl!r} is not known; set it to torch or flash")
    return AttentionFacts(num_heads=module.n_heads, dropout=module.attn_dropout_p, problems=tuple(problems))


def _problems(model: Any) -> Iterator[str]:
    config = model.config
    attention, ffn = config.attn_config, config.ffn_config
    if attention.get("prefix_lm"):
        yield "attn_config.prefix_lm was not tested; set it to false"
    if attention.get("rope") and attention.get("rope_impl") != "hf":
        yield f"rope_impl {attention.get('rope_impl')!r} was not tested; set attn_config.rope_impl: hf"
    if str(ffn.get("ffn_type", "")).startswith("mb_"):
        yield f"ffn_type {ffn['ffn_type']} balances experts over whole rows, which was not tested; leave the key out"
    if not config.use_pad_tok_in_ffn:
        yield "use_pad_tok_in_ffn: false was not tested; set it to true"
    if config.use_cache:
        yield "use_cache keeps keys and values of whole rows; set it to false"


# ---------------------------------------------------------------------------------------------------------------------
# LLM Foundry's MPT: sharded sequences


def _start(whole: Any, model: Any, attentions: Sequence[Any], group: ContextGroup) -> Callable[[], None]:
    transformer = model.transformer
    paths = tuple(f"transformer.blocks.{number}" for number in range(len(transformer.blocks)))
    layers = DividedLayers(name="MPTForCausalLM.transformer.blocks", layers=paths, group=group)
    transformer.forward = _padded_forward(transformer.forward, group)
    model.generate = functools.partial(refuse_generation, "generate")
    if transformer.rope:
        transformer.rotary_embedding.forward = _local_rotary(transformer.rotary_embedding.forward, group)
    for attention in attentions:
        attention.attn_fn = _with_all_to_all(attention.attn_fn, layers)
    trainers = [each for each in whole.modules() if getattr(each, "model", None) is model and hasattr(each, "loss_fn")]
    group.divides_losses = group.divides_losses and bool(trainers)
    if group.divides_losses:
        model.forward = _local_forward(model.forward, group)
        for composer_model in trainers:
            composer_model.loss = functools.partial(_local_loss, composer_model, group)
    return functools.partial(layers.connect, model)


_FILL = {"input_ids": 0, "inputs_embeds": 0, "attention_mask": 0, "sequence_id": -1, "position_ids": 0}


def _padded_forward(forward: Callable[..., Any], group: ContextGroup) -> Callable[..., Any]:
    """Wrap the transformer's forward: pad sequences to a multiple of the context-parallel degree, and compute this
    rank's shard."""

    @functools.wraps(forward)
    def local_forward(input_ids: Any = None, **kwargs: Any) -> Any:
        for name in ("past_key_values", "output_attentions", "output_hidden_states"):
            if kwargs.get(name):
                refuse_generation(f"a forward with {name}")
        given = {name: each for name, each in (kwargs | {"input_ids": input_ids}).items() if each is not None}
        length = given["input_ids" if input_ids is not None else "inputs_embeds"].shape[1]
        padded = {name: group.padded(given[name], 1, fill) for name, fill in _FILL.items() if name in given}
        output = forward(**given | padded)
        if not group.in_parts:
            output.last_hidden_state = output.last_hidden_state[:, :length]
        return output

    return local_forward


def _local_forward(forward: Callable[..., Any], group: ContextGroup) -> Callable[..., Any]:
    @functools.wraps(forward)
    def local_forward(*args: Any, **kwargs: Any) -> Any:
        with group.returning_parts():
            return forward(*args, **kwargs)

    return local_forward


def _local_rotary(forward: Callable[..., Any], group: ContextGroup) -> Callable[..., Any]:
    """Compute rotary angles for this rank's positions."""

    @functools.wraps(forward)
    def local_forward(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return forward(x=x, position_ids=group.part(position_ids))

    return local_forward


def _with_all_to_all(attend: Callable[..., Any], layers: DividedLayers) -> Callable[..., Any]:
    """Wrap MPT's attention function in all-to-alls over the context-parallel ranks.

    Tensors are (batch, positions, heads x features). Masks and biases cover full sequences.
    """
    group = layers.group

    @functools.wraps(attend)
    def exchanged(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, n_heads: int, kv_n_heads: int, **options: Any
    ) -> Any:
        layers.note_exchange()
        numbers = (n_heads, kv_n_heads, kv_n_heads)
        parts = [each.unflatten(2, (n, -1)) for each, n in zip((query, key, value), numbers, strict=True)]
        query, key, value = group.to_heads(parts, 2, 1)
        for name, dim in (("attn_bias", 1), ("alibi_slopes", 0)):
            each = options.get(name)
            if each is not None and each.shape[dim] == n_heads:
                options[name] = group.part(each, dim)
        context, weights, cache = attend(
            *(each.flatten(2) for each in (query, key, value)),
            n_heads=query.shape[2],
            kv_n_heads=key.shape[2],
            **options,
        )
        return group.to_sequence(context.unflatten(2, (query.shape[2], -1)), 2, 1).flatten(2), weights, cache

    return exchanged


def _local_loss(model: Any, group: ContextGroup, outputs: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """Replaces ``ComposerMPTCausalLM.loss``: returns this rank's contribution to the mean over the tokens of all
    ranks."""
    logits = outputs.logits
    labels = group.shifted_labels(batch["labels"], is_shifted=not model.shift_labels)
    losses = model.loss_fn(logits.view(-1, logits.shape[-1]), labels.view(-1))
    return losses.sum() / group.items(labels, torch.promote_types(torch.float32, logits.dtype))


register_model_adapter(
    ModelAdapter(name="LLM Foundry's MPT", matches=_is_mpt, attentions=_attentions, problems=_problems, start=_start)
)
