"""Parse a YAML text, once, into values and their positions.

The parser is PyYAML because all source systems use it: a file that PyYAML refuses starts no run. Called by ``migrate``;
reads and writes no file.
"""

import functools
import re
from collections.abc import Iterable
from typing import Any, TypeGuard

import yaml
from yaml.composer import Composer, ComposerError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from yaml.resolver import Resolver

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.documents.edits import MAX_DEPTH, TOO_DEEP, Document, place_of
from composer_fsdp2.migration.paths import Path

try:
    from yaml.cyaml import CParser as _Parser
except ImportError:  # a PyYAML that was built without libyaml, ten times as slow

    class _Parser(yaml.reader.Reader, yaml.scanner.Scanner, yaml.parser.Parser):  # type: ignore[no-redef]
        def __init__(self, stream: Any) -> None:
            yaml.reader.Reader.__init__(self, stream)
            yaml.scanner.Scanner.__init__(self)
            yaml.parser.Parser.__init__(self)


_MAX_NODES_OF_ALIASES = 100_000  # a configuration has hundreds; ten lines of aliases of aliases make billions
_COLLECTIONS = {f"tag:yaml.org,2002:{name}" for name in ("map", "seq", "set", "omap", "pairs")}
_LINE_END = re.compile("[\r\x85\u2028\u2029]")  # of YAML 1.1, other than the line feed
_MERGE = "tag:yaml.org,2002:merge"


def is_mapping(node: Node | None) -> TypeGuard[MappingNode]:
    return isinstance(node, MappingNode)


class _Nodes(Composer, Resolver, _Parser):
    """Composes nodes within limits, and records the spans of scalars."""

    def __init__(self, text: str) -> None:
        _Parser.__init__(self, text)
        Composer.__init__(self)
        Resolver.__init__(self)
        self.scalars: list[tuple[int, int]] = []
        self.has_aliases = False
        self._depth = 0
        self._sizes: dict[int, int] = {}  # of a node and its descendants, with aliases expanded

    def compose_node(self, parent: Node | None, index: Any) -> Node:
        mark = self.peek_event().start_mark
        if self._depth > MAX_DEPTH:
            raise ComposerError(None, None, TOO_DEEP, mark)
        self._depth += 1
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias:
            self.has_aliases = True
            if id(node) not in self._sizes:
                raise ComposerError(None, None, "an alias stands in what it is an alias of", mark)
        elif isinstance(node, ScalarNode):
            self._sizes[id(node)] = 1
            self.scalars.append((node.start_mark.index, node.end_mark.index))
        else:
            below = [each for pair in node.value for each in pair] if is_mapping(node) else node.value
            size = self._sizes[id(node)] = 1 + sum(self._sizes[id(each)] for each in below)
            if size > _MAX_NODES_OF_ALIASES + len(self._sizes):
                raise ComposerError(None, None, f"aliases of aliases stand for {size} values, which is too many", mark)
        return node


class YamlText(Document):
    """One YAML document: its text, its nodes, and its values as PyYAML reads them (YAML 1.1).

    Args:
        text: The text of the whole file.
        name: The file's name in messages.
    Attributes:
        original: The unchanged text; ``text`` has line feeds for all its line ends.
        values: The values of the document, a mapping unless there is a ``problem``; a list for several documents.
        problem: Why no system reads the file as its configuration; otherwise "".
    Raises:
        ConfigError: The text is not YAML; the message has file, line and column.
    """

    def __init__(self, text: str, name: str = "<text>") -> None:
        super().__init__(text, name)
        lines, self.text = self.text, _LINE_END.sub("\n", self.text)
        self._constructor = yaml.constructor.SafeConstructor()
        self._values: dict[int, Any] = {}
        self._owned: dict[int, dict[Any, tuple[Node, Node]]] = {}
        try:
            nodes = _Nodes(lines)
            roots = []
            while nodes.check_node():
                roots.append(nodes.get_node())
            documents = [self._value_of(root) for root in roots]
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark is not None else f"{name}:1:1"
            raise ConfigError(f"{place}: {error.problem or error.context}") from error
        except yaml.reader.ReaderError as error:
            found = yaml.reader.Reader.NON_PRINTABLE.search(self.text)
            line, column = place_of(self.text, found.start() if found else 0)
            raise ConfigError(f"{name}:{line}:{column}: {error.reason}") from error
        self.scalars, self.has_aliases = sorted(nodes.scalars), nodes.has_aliases
        self.root = roots[0] if roots else MappingNode(Resolver.DEFAULT_MAPPING_TAG, [])
        self.values: Any = documents[0] if len(documents) == 1 else documents
        self.problem = ""
        if len(roots) > 1:
            line = roots[1].start_mark.line + 1
            self.problem = f"{name}:{line}:1: here is a second document, and every system reads files of one only"
        elif not is_mapping(self.root) or not roots:
            self.problem = f"{name}:1:1: a mapping is expected at the top of the file"

    def node(self, path: Path) -> Node:
        """Return the node at a path, including nodes from a merge (``<<``). Raises KeyError if it does not exist."""
        node = self.root
        for key in path:
            below = self._item(node, key)
            if below is None:
                raise KeyError(path)
            node = below
        return node

    def merged(self, path: Path) -> dict[Any, Any]:
        """Return the values from merges (``<<``) in the mapping at ``path``, including overridden ones."""
        node = self.node(path)
        return {key: self._value_of(each) for key, each in self._merged(node).items()} if is_mapping(node) else {}

    def lines_of(self, path: Path) -> tuple[int, int]:
        """``Document.lines_of``; begins at the mapping if it does not have the key itself."""
        first = node = self.node(path)
        parent = self.node(path[:-1])
        if path and is_mapping(parent):
            own = self._own(parent).get(path[-1])
            first = own[0] if own else parent
        return first.start_mark.line + 1, node.end_mark.line + 1

    def positions_of_keys(self, path: Path) -> Iterable[tuple[str | int, int]]:
        """``Document.positions_of_keys``."""
        node = self.node(path)
        if not is_mapping(node) or len(self._own(node)) == len(node.value):
            return ()
        return ((self._key_of(key), key.start_mark.index) for key, _ in node.value if not _is_merge(key))

    @functools.cached_property
    def indent(self) -> int:
        """The number of spaces by which this file indents nested mappings."""
        for _, value in self.root.value:
            if is_mapping(value) and not value.flow_style and value.value:
                return int(value.value[0][0].start_mark.column) or 2
        return 2

    # Nodes and values, each cached

    def _value_of(self, node: Node) -> Any:
        """Return the value of a node as PyYAML reads it: yes is true, 1e8 a string."""
        if id(node) not in self._values:
            self._values[id(node)] = self._constructed(node)
        return self._values[id(node)]

    def _constructed(self, node: Node) -> Any:
        if isinstance(node, ScalarNode):
            return self._scalar(node)
        if node.tag not in _COLLECTIONS:
            raise _refused(f"no system knows the tag {node.tag}", node)
        if isinstance(node, SequenceNode):
            return [self._value_of(each) for each in node.value]
        return {key: self._value_of(each) for key, each in self._entries_of(node).items()}

    def _scalar(self, node: ScalarNode) -> Any:
        try:
            return self._constructor.construct_object(node)
        except yaml.constructor.ConstructorError as error:  # =, or a custom tag
            raise _refused(f"{_cut(node)}: {error.problem}".removeprefix(": "), node) from error
        except (ValueError, KeyError) as error:  # an invalid date
            raise _refused(f"{_cut(node)} is not a value: {error}", node) from error

    def _key_of(self, node: Node) -> Any:
        if not isinstance(node, ScalarNode):
            raise _refused("a key that is a list or a mapping", node)
        return "<<" if _is_merge(node) else self._value_of(node)

    def _own(self, node: MappingNode) -> dict[Any, tuple[Node, Node]]:
        """Return a mapping's own key and value nodes, by key; the last of duplicates."""
        if id(node) not in self._owned:
            self._owned[id(node)] = {self._key_of(key): (key, value) for key, value in node.value}
        return self._owned[id(node)]

    def _merged(self, node: MappingNode) -> dict[Any, Node]:
        """Return the values from merges (``<<``) in a mapping; of several mappings the first takes precedence."""
        merged: dict[Any, Node] = {}
        for key, value in node.value:
            if _is_merge(key):
                each = value.value if isinstance(value, SequenceNode) else [value]
                if not all(map(is_mapping, each)):
                    raise _refused("<< takes a mapping, or a list of them", key)
                for mapping in reversed(each):
                    merged |= self._entries_of(mapping)
        return merged

    def _entries_of(self, node: MappingNode) -> dict[Any, Node]:
        """Return the values of a mapping by key, including those from merges."""
        own = {key: value for key, (name, value) in self._own(node).items() if not _is_merge(name)}
        return self._merged(node) | own

    def _item(self, node: Node, key: str | int) -> Node | None:
        if isinstance(node, SequenceNode):
            return node.value[key] if isinstance(key, int) and key < len(node.value) else None
        if not is_mapping(node):
            return None
        own = self._own(node).get(key)
        return own[1] if own else self._merged(node).get(key)


def _refused(message: str, node: Node) -> ComposerError:
    return ComposerError(None, None, message, node.start_mark)


def _cut(node: ScalarNode) -> str:
    text = str(node.value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _is_merge(node: Node) -> bool:
    return bool(node.tag == _MERGE)
