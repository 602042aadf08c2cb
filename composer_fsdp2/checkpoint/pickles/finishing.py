"""What a pickle built, walked through once: finished, and small enough to be walked through again."""

import collections
import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from composer_fsdp2.checkpoint.budget import Budget
from composer_fsdp2.checkpoint.pickles.allowed import Array, Dtype, Range, real_class
from composer_fsdp2.checkpoint.pickles.stand_ins import InertObject, StoredTensor, UnsupportedPickleError

_MAX_DEPTH = 200  # what reads the value afterwards recurses
_LEAVES = frozenset({str, int, float, bool, bytes, type(None), StoredTensor})  # most parts; seen without a call
_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque, InertObject)


@dataclass(slots=True)
class Finisher:
    """Replaces stand-ins by NumPy's arrays and dtypes, ranges and classes; refuses values that are endless to walk.

    Containers are changed in place: one may be in several others. A dozen lists, each twice in the next, are small in a
    pickle and 4096 lists to whoever walks through them; so each is walked once here, and its parts are counted.
    """

    budget: Budget
    # By id: the value (kept alive), the new one, the number of its parts, how deep they are nested.
    _done: dict[int, tuple[Any, Any, int, int]] = field(default_factory=dict)
    _depth: int = 0
    # Of the value that is being finished, so far.
    _num_parts: int = 0
    _height: int = 0

    def finish(self, value: Any) -> Any:
        if type(value) in _LEAVES or not isinstance(value, _CONTAINERS):
            return real_class(value)
        if id(value) not in self._done:
            outer = self._num_parts, self._height
            self._depth += 1
            self._check()
            self._num_parts, self._height = (1 if isinstance(value, InertObject) else len(value)), 0
            new = self._finish_parts(value)
            self._depth -= 1
            self._done[id(value)] = value, new, self._num_parts, self._height + 1
            self._num_parts, self._height = outer
        _, new, num_parts, height = self._done[id(value)]
        self._num_parts += num_parts
        self._height = max(self._height, height)
        self._check()
        return new

    def _check(self) -> None:
        if self._depth + self._height > _MAX_DEPTH:
            raise pickle.UnpicklingError(f"containers nested deeper than {_MAX_DEPTH}, or within themselves")
        if self._num_parts > self.budget.num_objects:
            self.budget.spend("containers in the pickle", num_objects=self._num_parts)

    def _finish_parts(self, value: Any) -> Any:
        if isinstance(value, tuple):
            if all(type(part) in _LEAVES for part in value):
                return value
            finished = tuple(map(self.finish, value))
            is_same = all(new is old for new, old in zip(finished, value, strict=True))
            return value if is_same else finished
        if isinstance(value, set | frozenset):
            self._finish_hashed(value)
        elif isinstance(value, dict):
            # A pickle may give an OrderedDict attributes; one called `items` would be walked through in its place.
            getattr(value, "__dict__", {}).clear()
            self._finish_hashed(value)
            for key, part in value.items():
                if type(part) not in _LEAVES:
                    value[key] = self.finish(part)
        elif isinstance(value, list | collections.deque):
            for number, part in enumerate(value):
                if type(part) not in _LEAVES:
                    value[number] = self.finish(part)
        elif isinstance(value, Array):
            return self._finish_array(value)
        elif isinstance(value, Dtype):
            return value.value()
        elif isinstance(value, Range):
            return self._finish_range(value)
        else:
            value.args, value.state = self.finish(value.args), self.finish(value.state)
        return value

    def _finish_array(self, array: Array) -> Any:
        if not isinstance(array.state, tuple) or len(array.state) != 5:
            raise pickle.UnpicklingError("a NumPy array without its values")
        version, shape, dtype, is_fortran, data = array.state
        array.state = version, shape, self.finish(dtype), is_fortran, data
        if isinstance(data, bytes):
            self.budget.spend("arrays in the pickle", num_bytes=len(data))
        return array.value()

    def _finish_range(self, value: Range) -> range:
        """A range counts as many parts as its numbers, because a reader may copy it into a list."""
        numbers = value.value()
        self._num_parts += len(numbers[: 1 + int(self.budget.num_objects)])
        return numbers

    def _finish_hashed(self, parts: Iterable[Any]) -> None:
        """Keys and members stay as they are; where one is a value of ours, nothing could look it up."""
        for part in parts:
            if type(part) not in _LEAVES and self.finish(part) is not part:
                raise UnsupportedPickleError("holds a NumPy value, a range or a class as a key, which is not supported")
