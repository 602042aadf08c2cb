"""Check whether blocks are sequential: the input of each block is the output of the previous one."""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn

from composer_fsdp2._torch.tensor_tree import tensors_in
from composer_fsdp2.estimate.blocks import BlockList
from composer_fsdp2.sharding.modules import at_path


class SequentialBlocks:
    """Finds the lists of blocks that are not sequential.

    A few blocks can represent all only if the blocks are sequential. With parallel heads, for example, each omitted
    head would make the tensors of later modules smaller.
    """

    def __init__(self, lists: Sequence[BlockList]) -> None:
        self.lists = lists
        self.broken: set[str] = set()  # the paths of lists
        self._given: dict[str, list[ref[torch.UntypedStorage]]] = {}
        self._made: dict[str, list[ref[torch.UntypedStorage]]] = {}

    @contextlib.contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """In the block, check the forwards of ``model``, which has the ``present`` blocks of each list."""
        with contextlib.ExitStack() as handles:
            for each in self.lists:
                for name in each.present:
                    module, is_first = at_path(model, each.block(name)), name == each.present[0]
                    before, after = partial(self._before, each.path, is_first), partial(self._after, each.path)
                    handles.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
                    handles.enter_context(module.register_forward_hook(after))
            yield

    def _before(self, path: str, is_first: bool, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._given[path] = _storages((args, kwargs))
        if not is_first and _alive(self._made.get(path, [])).isdisjoint(_alive(self._given[path])):
            self.broken.add(path)

    def _after(self, path: str, _: nn.Module, args: Any, output: Any) -> None:
        given = _alive(self._given[path])
        self._made[path] = [each for each in _storages(output) if each() not in given]


def _storages(value: Any) -> list[ref[torch.UntypedStorage]]:
    return [ref(tensor.untyped_storage()) for tensor in tensors_in(value)]


def _alive(references: Sequence[ref[torch.UntypedStorage]]) -> set[torch.UntypedStorage]:
    return {storage for each in references if (storage := each()) is not None}
