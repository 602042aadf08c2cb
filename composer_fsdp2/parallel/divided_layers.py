"""Layers that compute this rank's part of every sequence, in a model whose other modules compute full sequences.

[Note: divided layers] Embeddings, positions and masks are computed by the model, for full sequences. The input of the
first layer is divided, and so are the rotary angles of each layer; the output of the last layer is gathered. Attention
sees all positions of some heads and uses the model's mask unchanged, so windows, bidirectional attention and packed
rows work. Hooks outside of recomputed blocks do this. A layer that runs outside of this range raises, because its
attention would treat a part as the full sequence.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from composer_fsdp2._torch.private_names import is_in_backward, untraced
from composer_fsdp2._torch.tensor_tree import map_tensors, tensors_in
from composer_fsdp2.errors import UnsupportedError
from composer_fsdp2.parallel.adapters import KEY
from composer_fsdp2.parallel.padding import Padding, is_order
from composer_fsdp2.sharding.modules import at_path
from composer_fsdp2.training.context import ContextGroup


@dataclass(kw_only=True, eq=False)
class DividedLayers:
    """The consecutive layers of a model, and their state within a forward.

    Args:
        name: The name of the list of layers, in messages.
        layers: The path of each layer, in order. The first parameter of a layer's forward is its input, (rows,
            positions, features), and its first output is the input of the next layer.
        angles: The prefix of the names of parameters that are rotary angles of the full sequences: tensors (...,
            positions, features).
        caches: The names of parameters for KV caches, which are set to None: no other code could use the keys and
            values of a part.
        takes_full_sequence: Returns whether a layer accepts a tensor of the full sequences, or one without a dimension
            of rows, as the parameter of this name.
        full_sequence_mask: Creates a mask of the full sequences without padding, from a layer's input and the length.
            If the length is not a multiple of the number of ranks, it masks the positions that were added. None if
            attention is causal.
        always_gathers: Whether the output is gathered in each forward, because the model reshapes it to the shape of
            full sequences.
        is_open: Whether a forward is currently between the first layer and the last one.
        length: The length of the full sequences in the current forward, or in the previous one.
        padding: The padding of the batch, during a forward that returns the loss of a part.
        order: The ``attention_mask`` that layers get instead of the model's, from ``order_of_rows``.
        num_passes: How often the first layer has run in the forward of the model that owns the layers; None if unknown.
    """

    name: str
    layers: tuple[str, ...]
    group: ContextGroup
    angles: str = "position_embeddings"
    caches: tuple[str, ...] = ()
    takes_full_sequence: Callable[[str], bool] = lambda name: True
    full_sequence_mask: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    always_gathers: bool = False
    is_open: bool = False
    length: int = 0
    num_exchanges: int = 0
    gathers: bool = True
    padding: Padding | None = None
    order: torch.Tensor | None = None
    num_passes: int | None = None

    def connect(self, model: nn.Module) -> None:
        """Register the hooks on the layers, or on their wrappers.

        Args:
            model: The module to which the paths in ``layers`` are relative.
        """
        for path in self.layers:
            layer = at_path(model, path)
            before_layer = untraced(partial(self._before_layer, path, _parameters_of(layer)))
            layer.register_forward_pre_hook(before_layer, with_kwargs=True)
        layer.register_forward_hook(untraced(partial(self._after_last_layer)))

    def note_exchange(self) -> None:
        """Called by attention before its exchange.

        Raises:
            UnsupportedError: the attention's layer runs outside of the range from the first layer to the last.
        """
        if not self.is_open and not is_in_backward():
            raise self._outside()
        self.num_exchanges += 1

    def exchanged(
        self,
        attend: Callable[..., torch.Tensor],
        mask: torch.Tensor | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        dim: int,
    ) -> torch.Tensor:
        """Run ``attend(query, key, value, mask)`` on all positions of some heads, between two exchanges.

        Args:
            attend: Gets tensors (rows, heads, positions, features), in the same layout.
            mask: The model's mask of the full sequences, or the result of ``order_of_rows``. Its last dimension is
                positions.
            dim: The dimension of positions in the output of ``attend``, 1 or 2; the other one is heads.

        Called on all ranks; two all-to-alls.
        """
        self.note_exchange()
        query, key, value = self.group.to_heads((query, key, value), 1, 2)
        padded = query.shape[2]
        length = padded if mask is None else _num_positions(mask)
        query, key, value = (each.narrow(2, 0, length) for each in (query, key, value))
        if mask is None or not is_order(mask):
            output = attend(query, key, value, mask)
        else:
            places = mask.transpose(2, 3)  # (rows, 1, positions, 1)
            output = attend(*(each.take_along_dim(places, 2) for each in (query, key, value)), None)
            output = output.take_along_dim(mask.argsort(dim=-1).transpose(dim, 3), dim)
        return self.group.to_sequence(self.group.padded(output, dim, 0), 3 - dim, dim)

    def full_sequence(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """All-gather the output of these layers to full sequences. Returned unchanged if it has the full length."""
        return tensor if tensor.shape[dim] == self.length else self.group.to_whole(tensor, self.length, dim)

    def part(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This rank's part of a tensor of full sequences. Returned unchanged if it already is a part."""
        is_whole = tensor.shape[dim] == self.length
        return self.group.part(self.group.padded(tensor, dim, 0), dim) if is_whole else tensor

    def _before_layer(
        self, path: str, parameters: tuple[str, ...], layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = dict(zip(parameters, args, strict=False)) | kwargs
        hidden = given[parameters[0]]
        if path == self.layers[0]:
            if not is_in_backward():
                self._check_single_pass()
                self.is_open, self.length, self.num_exchanges = True, hidden.shape[1], 0
                self.gathers = self.always_gathers or not self.group.in_parts
            hidden = self.group.part(self.group.padded(hidden, 1, 0))
        elif not self.is_open and not is_in_backward():
            raise self._outside()
        changed = {parameters[0]: hidden}
        for name, value in given.items():
            if name.startswith(self.angles):
                changed[name] = map_tensors(value, self._local_angles)
            elif name in self.caches:
                changed[name] = None
            elif name != parameters[0] and tensors_in(value) and not self.takes_full_sequence(name):
                raise UnsupportedError(
                    f"{KEY}: {path} got {name}, and it is not known which part of it belongs to a part of a row; leave "
                    "the key out",
                    keys=(KEY,),
                )
        if self.order is not None:
            changed["attention_mask"] = self.order
        if self.full_sequence_mask and given.get("attention_mask") is None and self.length % self.group.size:
            changed["attention_mask"] = self.full_sequence_mask(hidden, self.length)
        positional = tuple(changed.get(name, value) for name, value in zip(parameters, args, strict=False))
        return positional, {
            **kwargs,
            **{name: changed[name] for name in changed if name not in parameters[: len(args)]},
        }

    def _check_single_pass(self) -> None:
        """Raise if the first layer runs again within a forward, where it would divide this rank's part once more."""
        if self.num_passes is None:
            return
        if self.num_passes and (self.is_open or not self.gathers):
            raise UnsupportedError(
                f"{KEY}: {self.layers[0]} of {self.name} runs several times in a forward, on what it has divided "
                "already; leave the key out",
                keys=(KEY,),
            )
        self.num_passes += 1

    def _local_angles(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.group.part(self.group.padded(tensor, tensor.dim() - 2, 0), tensor.dim() - 2)

    def _after_last_layer(self, layer: nn.Module, args: Any, output: Any) -> Any:
        """Runs after the last layer."""
        hidden = output[0] if isinstance(output, tuple) else output
        if not is_in_backward() and self.num_exchanges != len(self.layers):
            raise UnsupportedError(
                f"{KEY}: attention of {self.num_exchanges} of the {len(self.layers)} layers of {self.name} exchanged "
                "heads for sequence, so that the others attended within a part; leave the key out",
                keys=(KEY,),
            )
        self.is_open = False
        if not self.gathers:
            return output
        hidden = self.group.to_whole(hidden, self.length)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    def _outside(self) -> UnsupportedError:
        return UnsupportedError(
            f"{KEY}: a layer of {self.name} runs outside of the model's forward, which divides sequences among ranks; "
            "call the model, or leave the key out",
            keys=(KEY,),
        )


def _num_positions(mask: torch.Tensor) -> int:
    """The number of positions in a mask. transformers 4.51 may add one to the last dimension of a causal mask."""
    is_square = mask.dim() == 4 and mask.shape[-2] > 1
    return mask.shape[-2 if is_square else -1]


def _parameters_of(layer: nn.Module) -> tuple[str, ...]:
    """The parameter names of a layer's forward, or of the forward of the module that it wraps."""
    parameters = inspect.signature(layer.forward).parameters.values()
    names = tuple(each.name for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return names or _parameters_of(next(layer.children()))
