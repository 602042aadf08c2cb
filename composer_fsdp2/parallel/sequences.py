"""Plan and start context parallelism: the attention modules that exchange heads for sequence.

See [Note: context parallelism].
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch.distributed as dist
from torch import nn

from composer_fsdp2.config.mesh import AxisRole
from composer_fsdp2.config.sharding import check_split_sequences
from composer_fsdp2.errors import UnsupportedError
from composer_fsdp2.parallel.adapters import KEY, AttentionFacts, ModelAdapter, model_adapters, register_model_adapter
from composer_fsdp2.parallel.hugging_face import HUGGING_FACE
from composer_fsdp2.parallel.qwen_vl import QWEN_VL
from composer_fsdp2.sharding.meshes import group_along
from composer_fsdp2.sharding.modules import ancestors_or_self, at_path
from composer_fsdp2.sharding.plan import ShardingPlan
from composer_fsdp2.training.context import ContextGroup

register_model_adapter(HUGGING_FACE)
register_model_adapter(QWEN_VL)


def plan_context(model: nn.Module, plan: ShardingPlan) -> ShardingPlan:
    """Return ``plan`` with the attention modules that exchange heads for sequence; unchanged without a context axis.

    Raises:
        UnsupportedError: an attention module that is unknown, or cannot be divided; names each module and an
            alternative.
        ConfigError: units whose gradients are not averaged over all ranks.

    Call this on all ranks with the same model. Does not communicate.
    """
    degree = plan.config.context_parallel_degree
    if degree == 1:
        return plan
    for unit in plan.units:
        check_split_sequences(unit.mesh, unit.name or "the model")
    found = _models(model)
    if not found:
        kinds = ", ".join(adapter.name for adapter in reversed(model_adapters()))
        raise UnsupportedError(
            f"{KEY}: no attention of {type(model).__name__} is known that could exchange heads for sequence; it works "
            f"with {kinds}. Leave the key out, or give the model an attention of these",
            keys=(KEY,),
        )
    heads_per = degree * plan.config.mesh.tensor_degree
    problems: list[str] = []
    notes: list[str] = []
    attentions: list[str] = []
    for path, adapter in found.items():
        module = at_path(model, path)
        where = path or "the model"
        facts = {f"{path}.{inner}" if path else inner: each for inner, each in adapter.attentions(module).items()}
        problems += [f"{where}: {text}" for text in adapter.problems(module)]
        problems += _attention_problems(facts, heads_per)
        notes += [f"{where}: {text}" for text in (*adapter.notes(module), *_loss_notes(model, path))]
        attentions += facts
        if not facts:
            problems.append(f"{where}: no attention in it is that of {adapter.name}; leave the key out")
    if problems:
        raise UnsupportedError("\n".join(f"{KEY} {degree}: {text}" for text in problems), keys=(KEY,))
    return replace(plan, exchanging=tuple(attentions), notes=(*plan.notes, *notes))


def start_context(model: nn.Module, plan: ShardingPlan) -> tuple[ContextGroup | None, Callable[[], None]]:
    """Make the model compute this rank's part of its sequences. Called before it is wrapped or sharded.

    Returns:
        This rank's context-parallel group, and a function to call after the model is sharded.

    Called on all ranks; creates process groups.
    """
    degree = plan.config.context_parallel_degree
    if degree == 1:
        return None, lambda: None
    # The tensor axis is the innermost: with degree 2 for both, ranks 0 and 1 share layers, ranks 0 and 2 sequences.
    group = group_along((-1, degree, plan.config.mesh.tensor_degree), 1, AxisRole.CONTEXT.value)
    found = _models(model)
    is_known = not any(any(_loss_notes(model, path)) for path in found)
    context = ContextGroup(group=group, size=degree, index=dist.get_rank(group), divides_losses=is_known)
    afterwards = []
    for path, adapter in found.items():
        inside = [each for each in plan.exchanging if path in ancestors_or_self(each)]
        afterwards.append(
            adapter.start(model, at_path(model, path), [at_path(model, each) for each in inside], context)
        )

    def connect() -> None:
        for each in filter(None, afterwards):
            each()

    return context, connect


def _models(model: nn.Module) -> dict[str, ModelAdapter]:
    """The adapters and paths of the outermost modules for which an adapter is registered."""
    found: dict[str, ModelAdapter] = {}
    for path, module in model.named_modules():
        adapter = next((each for each in model_adapters() if each.matches(module)), None)
        if adapter is not None and not any(above in found for above in ancestors_or_self(path)):
            found[path] = adapter
    return found


# Packages whose ``loss`` is the inner model's, or is replaced by one of a part.
_KNOWN_LOSSES = ("composer.models.huggingface", "llmfoundry.")


def _loss_notes(model: nn.Module, path: str) -> Iterator[str]:
    """Notes on modules around the model, such as a ComposerModel, whose loss may use the labels of full sequences."""
    for above in ancestors_or_self(path)[1:]:
        around = type(at_path(model, above))
        written_in = getattr(getattr(around, "loss", None), "__module__", None)
        if written_in is not None and not written_in.startswith(_KNOWN_LOSSES):
            yield (
                f"{KEY}: {around.__name__}.loss is written in {written_in}, so that logits and loss are computed of "
                "whole rows on each rank; leave it to the model's own loss to compute a part"
            )


def _attention_problems(facts: Mapping[str, AttentionFacts], heads_per: int) -> list[str]:
    """Messages about attention modules that cannot be divided. A message about several modules appears once."""
    found: dict[str, list[str]] = {}
    for path, each in facts.items():
        texts = [*each.problems]
        if each.num_heads % heads_per:
            texts.append(
                f"its {each.num_heads} heads cannot be divided over {heads_per} ranks (context x tensor degree); the "
                "product must divide them"
            )
        if each.dropout:
            texts.append(
                f"attention dropout of {each.dropout:g} would draw other numbers for each rank's heads than one "
                "process; set it to 0"
            )
        for text in texts:
            found.setdefault(text, []).append(path)
    return [f"{paths[0]}{f' and {len(paths) - 1} more' if paths[1:] else ''}: {text}" for text, paths in found.items()]
