"""What is known of models whose attention can exchange heads for sequence: a kind of model a file.

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
class KnownModel:
    """A kind of model that can compute a part of its sequences.

    Args:
        name: In a message's words.
        is_one: Whether a module is such a model, from where tokens go in to where the loss or the logits come out.
        attentions: Its attention modules by path, with their facts.
        problems: What of such a model cannot compute a part, each as a sentence that names the way out.
        start: Makes one of the modules compute a part; gets the model as a whole, it, and its attention modules.
        notes: What is only approximately what the whole would give.
    """

    name: str
    is_one: Callable[[nn.Module], bool]
    attentions: Callable[[nn.Module], Mapping[str, AttentionFacts]]
    problems: Callable[[nn.Module], Iterator[str]]
    start: Callable[[nn.Module, nn.Module, Sequence[nn.Module], ContextGroup], None]
    notes: Callable[[nn.Module], Iterator[str]] = lambda model: iter(())


_KNOWN: dict[str, KnownModel] = {}


def known_models() -> tuple[KnownModel, ...]:
    """Every kind, the last known first: it may be a special case of an earlier one."""
    return tuple(reversed(_KNOWN.values()))


def know(kind: KnownModel) -> None:
    """From now on models of this kind can compute a part of their sequences."""
    _KNOWN[kind.name] = kind
