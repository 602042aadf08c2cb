"""Support for context parallelism in a family of models: ``ModelAdapter``, one module per family.

See [Note: context parallelism].
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from composer_fsdp2.training.context import ContextGroup

KEY = "context_parallel_degree"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFacts:
    """Properties that decide whether an attention module can exchange heads for sequence.

    Args:
        num_heads: The number of query heads of the whole model.
        dropout: The probability of attention dropout.
        problems: Other reasons why it cannot; each a sentence with an alternative.

    Example:
        >>> AttentionFacts(num_heads=16).problems
        ()
    """

    num_heads: int
    dropout: float = 0.0
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAdapter:
    """A family of models that supports ``context_parallel_degree``.

    All functions except ``start`` only read the model. They are called on every rank before anything is modified, and
    must return the same on all ranks.

    Args:
        name: Shown in messages.
        matches: Returns whether a module is a model of this family. If matching modules are nested, the outermost is
            used.
        attentions: The attention modules that will exchange heads for sequence, by their paths in the model.
        problems: Modules that need full sequences, and therefore do not support context parallelism; each a sentence
            with an alternative.
        start: Replaces the forwards of one model. Arguments: the module that will be sharded, the model in it, the
            modules of ``attentions``, and this rank's group. Called on all ranks, before activation checkpointing. The
            function that it returns, if any, is called after wrapping and sharding.
        notes: What the user should know about the model; each a sentence, logged as a warning.

    Example:
        >>> adapter = ModelAdapter(
        ...     name="my models",
        ...     matches=lambda module: type(module).__name__ == "MyModel",
        ...     attentions=lambda model: {"attention": AttentionFacts(num_heads=16)},
        ...     problems=lambda model: iter(()),
        ...     start=lambda whole, model, attentions, group: None,
        ... )
        >>> adapter.matches(nn.Linear(4, 4))
        False
    """

    name: str
    matches: Callable[[nn.Module], bool]
    attentions: Callable[[nn.Module], Mapping[str, AttentionFacts]]
    problems: Callable[[nn.Module], Iterator[str]]
    start: Callable[[nn.Module, nn.Module, Sequence[nn.Module], ContextGroup], Callable[[], None] | None]
    notes: Callable[[nn.Module], Iterator[str]] = lambda model: iter(())


_ADAPTERS: dict[str, ModelAdapter] = {}


def model_adapters() -> tuple[ModelAdapter, ...]:
    """All adapters, the last registered first, so that it can handle a special case of an earlier one."""
    return tuple(reversed(_ADAPTERS.values()))


def register_model_adapter(adapter: ModelAdapter) -> None:
    """Register an adapter. It takes precedence over adapters that are already registered.

    An adapter of the same name is replaced. Call this on every rank with the same adapter, before
    ``prepare_fully_shard``; it does not communicate.

    Example:
        >>> register_model_adapter(
        ...     ModelAdapter(
        ...         name="an example",
        ...         matches=lambda module: False,
        ...         attentions=lambda model: {},
        ...         problems=lambda model: iter(()),
        ...         start=lambda whole, model, attentions, group: None,
        ...     )
        ... )
    """
    _ADAPTERS.pop(adapter.name, None)
    _ADAPTERS[adapter.name] = adapter
