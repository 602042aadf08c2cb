"""How a family of models computes a part of its sequences: ``ModelAdapter``, a family a file.

See [Note: context parallelism].
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from composer_fsdp2.training.context import ContextGroup

KEY = "context_parallel_degree"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFacts:
    """What decides whether an attention module can exchange heads for sequence.

    Args:
        num_heads: Of queries, of the whole model.
        dropout: The probability.
        problems: What else it cannot do, each as a sentence that names the way out.
    """

    num_heads: int
    dropout: float = 0.0
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAdapter:
    """What ``context_parallel_degree`` needs to know of a family of models.

    All functions but ``start`` read the model alone: they are called on every rank before anything is changed, and
    must return the same on all.

    Args:
        name: In messages.
        matches: Whether a module is such a model. Of nested ones the outermost counts.
        attentions: The attention modules that will exchange heads for sequence, by path in the model, with their facts.
        problems: What of the model cannot compute a part of a sequence, each as a sentence that names the way out.
        start: Changes the forwards of one model. Gets the module to be sharded, the model in it, the modules of
            ``attentions``, and this rank's group. Called on all ranks, before blocks are wrapped for recomputation;
            the function that it returns is called once they are wrapped and sharded.
        notes: What the user should know of the model, each as a sentence; logged as warnings.
    """

    name: str
    matches: Callable[[nn.Module], bool]
    attentions: Callable[[nn.Module], Mapping[str, AttentionFacts]]
    problems: Callable[[nn.Module], Iterator[str]]
    start: Callable[[nn.Module, nn.Module, Sequence[nn.Module], ContextGroup], Callable[[], None] | None]
    notes: Callable[[nn.Module], Iterator[str]] = lambda model: iter(())


_ADAPTERS: dict[str, ModelAdapter] = {}


def model_adapters() -> tuple[ModelAdapter, ...]:
    """All adapters, the last registered first: it may be for a special case of an earlier one."""
    return tuple(reversed(_ADAPTERS.values()))


def register_model_adapter(adapter: ModelAdapter) -> None:
    """Use ``adapter`` for the models that it matches, before those that are registered already.

    Another one of the same name is replaced. Every rank must register the same ones; it does not communicate.
    """
    _ADAPTERS.pop(adapter.name, None)
    _ADAPTERS[adapter.name] = adapter
