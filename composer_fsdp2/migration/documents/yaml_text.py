"""A YAML text with its values and the places where they stand; each text is parsed once.

ruamel.yaml gives the nodes with their marks, PyYAML's rules the values, since all systems that we migrate from read by
them. Called by ``migrate``; reads and writes no file.
"""

import bisect
import functools
import re
from collections.abc import Iterable, Iterator
from io import StringIO
from typing import Any, TypeGuard

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.documents.edits import Edit, Path, apply_edits

_RESOLVER = yaml.resolver.Resolver()
_CONSTRUCTOR = yaml.constructor.SafeConstructor()


def is_mapping(node: Node | None) -> TypeGuard[MappingNode]:
    return isinstance(node, MappingNode)


class YamlText:
    """One YAML document: its text, its nodes, and its values as PyYAML reads them (YAML 1.1).

    Args:
        text: Of the whole file.
        name: What messages call it.
    Attributes:
        original: The text as given; ``text`` has line feeds where it has carriage returns, too.
    Raises:
        ConfigError: it is not YAML, several documents, or no mapping; names file, line and column.
    """

    def __init__(self, text: str, name: str = "<text>") -> None:
        # The parser's marks count line feeds only: places are those in a text without carriage returns.
        self.original, self.text, self.name = text, text.replace("\r\n", "\n"), name
        self._returns = [found.start() - number for number, found in enumerate(re.finditer("\r\n", text))]
        try:
            root = YAML(typ="safe", pure=True).compose(StringIO(self.text))
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark is not None else name
            raise ConfigError(f"{place}: {error.problem or error.context}") from error
        except YAMLError as error:  # a character that YAML does not allow
            position = getattr(error, "position", 0)
            line, column = self.text.count("\n", 0, position) + 1, position - self.text.rfind("\n", 0, position)
            raise ConfigError(f"{name}:{line}:{column}: {getattr(error, 'reason', error)}") from error
        if not is_mapping(root):
            raise ConfigError(f"{name}:1:1: a mapping is expected at the top of the file")
        self.root: MappingNode = root
        try:
            self.values: dict[str, Any] = _value_of(root)
        except RecursionError as error:
            raise ConfigError(f"{name}:1:1: an alias holds itself, or values are nested too deeply") from error
        except _BadNode as error:
            mark = error.node.start_mark
            raise ConfigError(f"{name}:{mark.line + 1}:{mark.column + 1}: {error}") from error

    def edited(self, edits: Iterable[Edit]) -> str:
        """The original text with edits of ``text``, in its own line ends.

        Raises:
            ValueError: two of them overlap.
        """
        newline = "\r\n" if self._returns else "\n"
        return apply_edits(
            self.original,
            (
                Edit(self._original(edit.start), self._original(edit.end), edit.text.replace("\n", newline))
                for edit in edits
            ),
        )

    def _original(self, position: int) -> int:
        return position + bisect.bisect_left(self._returns, position)

    def node(self, path: Path) -> Node:
        """The node at a path, also one that a merge (``<<``) brings there. Raises KeyError."""
        node: Node = self.root
        for key in path:
            found = _item(node, key)
            if found is None:
                raise KeyError(path)
            node = found
        return node

    def merged(self, path: Path) -> dict[Any, Any]:
        """What merges (``<<``) bring to the mapping at ``path``, also what its own entries override."""
        node = self.node(path)
        merges = [value for name, value in node.value if _is_merge(name)] if is_mapping(node) else []
        return {key: each for value in merges for node in _merged_nodes(value) for key, each in _value_of(node).items()}

    def line_of(self, path: Path) -> int:
        """The line of the key at ``path``, from 1; that of the mapping, where the key came from somewhere else."""
        if not path:
            return int(self.root.start_mark.line) + 1
        node = self.node(path)
        parent = self.node(path[:-1])
        if is_mapping(parent):
            found = [name for name, _ in parent.value if _key_of(name) == path[-1]]
            node = found[0] if found else parent
        return int(node.start_mark.line) + 1

    def duplicate(self, path: Path) -> str:
        """A message about a key that stands twice in the mapping at ``path``; "" if none does."""
        seen: dict[Any, int] = {}
        node = self.node(path)
        for name, _ in node.value if is_mapping(node) else ():
            key, mark = _key_of(name), name.start_mark
            if key in seen and key != "<<":
                return f"{self.name}:{mark.line + 1}:{mark.column + 1}: {key} stands in line {seen[key]}, too"
            seen[key] = mark.line + 1
        return ""

    @functools.cached_property
    def has_aliases(self) -> bool:
        """Whether a node stands in more than one place."""
        places = [id(node) for node in self._nodes(self.root)]
        return len(places) > len(set(places))

    @functools.cached_property
    def scalars(self) -> list[tuple[int, int]]:
        """The spans of scalars; a ``#`` in one begins no comment."""
        nodes = {id(node): node for node in self._nodes(self.root) if isinstance(node, ScalarNode)}
        return sorted((node.start_mark.index, node.end_mark.index) for node in nodes.values())

    @functools.cached_property
    def indent(self) -> int:
        """The number of spaces by which this file indents a mapping in a mapping."""
        for _, value in self.root.value:
            if is_mapping(value) and not value.flow_style and value.value:
                return int(value.value[0][0].start_mark.column) or 2
        return 2

    def _nodes(self, node: Node) -> Iterator[Node]:
        """In depth first order; what an alias stands for comes with it."""
        yield node
        if is_mapping(node):
            for key, value in node.value:
                yield key
                yield from self._nodes(value)
        elif isinstance(node, SequenceNode):
            for each in node.value:
                yield from self._nodes(each)


class _BadNode(Exception):
    def __init__(self, message: str, node: Node) -> None:
        super().__init__(message)
        self.node = node


def _value_of(node: Node) -> Any:
    """As PyYAML has it: yes is true, 1e8 a string."""
    if isinstance(node, SequenceNode):
        return [_value_of(each) for each in node.value]
    if is_mapping(node):
        merged: dict[Any, Any] = {}
        own: dict[Any, Any] = {}
        for key, value in node.value:
            if _is_merge(key):
                for each in _merged_nodes(value):
                    merged = _value_of(each) | merged  # of several the first goes first
            else:
                own[_key_of(key)] = _value_of(value)
        return merged | own
    return _scalar(node)


def _scalar(node: Any) -> Any:
    if node.style is not None:
        return node.value
    tag = _RESOLVER.resolve(yaml.ScalarNode, node.value, (True, False))
    try:
        return _CONSTRUCTOR.construct_object(yaml.ScalarNode(tag, node.value))
    except (yaml.constructor.ConstructorError, ValueError) as error:  # =, or a date that is none
        raise _BadNode(f"{node.value} is not a value: {error.args[-1] or error.args[-2]}", node) from error


def _key_of(node: Node) -> Any:
    if not isinstance(node, ScalarNode):
        raise _BadNode("a key that is a list or a mapping", node)
    return "<<" if _is_merge(node) else _scalar(node)


def _is_merge(node: Any) -> bool:
    return isinstance(node, ScalarNode) and node.value == "<<" and node.style is None


def _merged_nodes(node: Node) -> list[Node]:
    return [each for each in (node.value if isinstance(node, SequenceNode) else [node]) if is_mapping(each)]


def _item(node: Node, key: str | int) -> Node | None:
    if isinstance(node, SequenceNode):
        return node.value[key] if isinstance(key, int) and key < len(node.value) else None
    if not is_mapping(node):
        return None
    own = [value for name, value in node.value if _key_of(name) == key]
    if own:
        return own[-1]
    merges = [each for name, value in node.value if _is_merge(name) for each in _merged_nodes(value)]
    return next((found for each in merges if (found := _item(each, key)) is not None), None)
